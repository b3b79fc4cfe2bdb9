/* SPDX-License-Identifier: Apache-2.0 */
/* The kernel of inbox.h. */
#ifndef PERSEUS_FUSED_INBOX_CUH
#define PERSEUS_FUSED_INBOX_CUH

#include "fused/core/inbox_word.cuh"
#include "fused/core/sync.cuh"
#include "fused/gemm/unfused/inbox.h"
#include "fused/gemm/unfused/unfused.h"
#include "fused/gemm/unfused/vector.cuh"

enum { SEND_AHEAD = 4 /* items that a thread loads before it stores them */ };

/* Draws one of the `all` numbers of a launch: PRS_INBOX_LAUNCH times the launch, plus the draw's number in it. The last
 * draw of a launch begins the next launch. */
PRS_DEVICE uint32_t draw_one(uint32_t *drawn, uint32_t all)
{
    uint32_t number = atomicAdd(drawn, 1u);
    if (number % PRS_INBOX_LAUNCH + 1 == all)
        atomicAdd(drawn, PRS_INBOX_LAUNCH - all);
    return number;
}

/* For the whole CTA: thread 0 draws its number. */
PRS_DEVICE uint32_t draw_number(uint32_t *drawn)
{
    volatile uint32_t *shared = (volatile uint32_t *)dynamic_shared();
    if (threadIdx.x == 0)
        *shared = draw_one(drawn, gridDim.x);
    __syncthreads();
    return *shared;
}

/* What a CTA works on: the bank of this launch, and the same items of every rank's part. */
struct inbox_share {
    uint64_t bank; /* where it begins in the inbox of every rank */
    uint32_t items, first, count;
};

/* Where the bank of a launch begins, by a number that was drawn in it. */
PRS_DEVICE uint64_t bank_of(const struct prs_unfused_inbox_sum &a, uint32_t number)
{
    /* MUTANT(emulator few_rows_are_summed_in_one_hop) an inbox has two banks: s/& 1/& 0/ */
    return PRS_INBOX_BANKS + (number / PRS_INBOX_LAUNCH & 1) * a.bank_step;
}

PRS_DEVICE struct inbox_share inbox_share_of(const struct prs_unfused_inbox_sum &a, uint32_t number)
{
    struct inbox_share share;
    uint32_t items = (uint32_t)prs_inbox_items(a.part), each = prs_ceil_div(items, gridDim.x);
    uint32_t first = number % PRS_INBOX_LAUNCH * each, left = first < items ? items - first : 0;
    share.bank = bank_of(a, number);
    share.items = items;
    share.first = first;
    share.count = left < each ? left : each;
    return share;
}

/* The element of the product at which item i of the part of a local rank begins. */
PRS_DEVICE uint32_t item_first(const struct prs_unfused_inbox_sum &a, uint32_t local_rank, uint32_t i)
{
    return local_rank * a.part_step + i * PRS_INBOX_ITEM;
}

/* How many elements the item has; the last part may be shorter than the others. */
PRS_DEVICE uint32_t item_elements(const struct prs_unfused_inbox_sum &a, uint32_t local_rank, uint32_t i)
{
    uint32_t first = item_first(a, local_rank, i), left = first < a.all ? a.all - first : 0;
    left = min(left, a.part - i * PRS_INBOX_ITEM);
    return min(left, (uint32_t)PRS_INBOX_ITEM);
}

/* Partial sums of an item in the inbox of neighbour p. */
PRS_DEVICE uint4 *partial_at(const struct prs_unfused_inbox_sum &a, const struct inbox_share &share, uint32_t p,
                             uint32_t slot, uint32_t i)
{
    return (uint4 *)(a.inbox[p] + share.bank) + (slot * share.items + i);
}

/* Vector v of an item's `vectors` vectors of results, which come after the partial sums. */
PRS_DEVICE uint4 *result_at(const struct prs_unfused_inbox_sum &a, const struct inbox_share &share, uint32_t p,
                            uint32_t slot, uint32_t i, uint32_t v, uint32_t vectors)
{
    uint32_t slots = a.place.local_ranks - 1;
    return (uint4 *)(a.inbox[p] + share.bank) + ((slots + slot * vectors + v) * share.items + i);
}

/* An item that a CTA exchanges with another rank. Item k: first all those of neighbour 1, then all of the next
 * neighbour. */
struct inbox_letter {
    uint32_t p, rank, i; /* rank: the local rank of neighbour p */
};

PRS_DEVICE struct inbox_letter letter_of(const struct prs_unfused_inbox_sum &a, const struct inbox_share &share,
                                         uint32_t k)
{
    struct inbox_letter l;
    l.p = 1 + k / share.count;
    l.rank = a.place.local_rank + l.p;
    l.rank -= l.rank < a.place.local_ranks ? 0 : a.place.local_ranks;
    l.i = share.first + k % share.count;
    return l;
}

template <int TYPE, bool WIDE>
PRS_DEVICE void send_partials(const struct prs_unfused_inbox_sum &a, const struct inbox_share &share)
{
    uint32_t me = a.place.local_rank, all = share.count * (a.place.local_ranks - 1);
    for (uint32_t k = threadIdx.x; k < all; k += SEND_AHEAD * blockDim.x) {
        uint4 x[SEND_AHEAD], *to[SEND_AHEAD];
#pragma unroll
        for (uint32_t j = 0; j < SEND_AHEAD; j++) {
            to[j] = NULL;
            if (k + j * blockDim.x >= all)
                continue;
            struct inbox_letter l = letter_of(a, share, k + j * blockDim.x);
            uint32_t count = item_elements(a, l.rank, l.i);
            if (count == 0)
                continue;
            x[j] = load_eight<TYPE, WIDE>(a.product, item_first(a, l.rank, l.i), count);
            to[j] = partial_at(a, share, l.p, prs_inbox_slot(me, l.rank), l.i);
        }
#pragma unroll
        for (uint32_t j = 0; j < SEND_AHEAD; j++)
            if (to[j])
                store_relaxed_sys_v4(to[j], sent_vector(x[j]));
    }
}

/* Waits for the partial sums of item i from each rank of the node, in rank order; this rank's x is already set. All are
 * read once before the first wait. */
PRS_DEVICE void await_partials(const struct prs_unfused_inbox_sum &a, const struct inbox_share &share, uint32_t i,
                               uint4 (&x)[PRS_MAX_LOCAL_RANKS])
{
    uint32_t ranks = a.place.local_ranks, me = a.place.local_rank;
    struct wait_clock clock = {0, 0};
    for (;;) {
        uint32_t missing = ranks;
#pragma unroll
        for (uint32_t r = 0; r < PRS_MAX_LOCAL_RANKS; r++)
            if (r < ranks && r != me)
                x[r] = load_relaxed_sys_v4(partial_at(a, share, 0, prs_inbox_slot(r, me), i));
#pragma unroll
        for (uint32_t r = 0; r < PRS_MAX_LOCAL_RANKS; r++)
            if (r < ranks && r != me && !has_arrived(x[r]))
                missing = r;
        /* MUTANT(emulator few_rows_are_summed_in_one_hop) what others send is awaited: s/missing == ranks/true/ */
        if (missing == ranks ||
            !keep_waiting(&a.sync, &clock, PRS_AWAIT_PARTIAL, prs_place_rank(&a.place, a.place.node, missing), i, 1, 0))
            return;
    }
}

/* [gave-up]: if a neighbour gave up in an earlier launch, the data that it sends now may be wrong. It raised the alarm
 * before it sent this word, which the thread has read. */
PRS_DEVICE void check_alarm(const struct prs_unfused_inbox_sum &a, const uint4 *word)
{
    (void)load_acquire_sys((const uint32_t *)word);
    /* MUTANT(emulator unfused_what_a_rank_that_gave_up_sent_is_an_error_where_it_came)
     * an alarm is an error: s/alarmed(&a.sync)/false/ */
    if (alarmed(&a.sync))
        record_alarm(&a.sync);
}

/* Adds the partial sums of item i, of `count` elements, to s: in fp32, in rank order, so that all ranks get the same
 * bits. Clears what it has read. */
template <int TYPE, bool WIDE>
PRS_DEVICE void add_partials(const struct prs_unfused_inbox_sum &a, const struct inbox_share &share, uint32_t i,
                             uint32_t count, float (&s)[PRS_INBOX_ITEM])
{
    uint32_t ranks = a.place.local_ranks, me = a.place.local_rank;
    uint4 x[PRS_MAX_LOCAL_RANKS];
    x[0] = sent_vector(load_eight<TYPE, WIDE>(a.product, item_first(a, me, i), count));
#pragma unroll
    for (uint32_t r = 1; r < PRS_MAX_LOCAL_RANKS; r++)
        x[r] = x[0];
    await_partials(a, share, i, x);
    if (i == 0)
        for (uint32_t slot = 0; slot + 1 < ranks; slot++)
            check_alarm(a, partial_at(a, share, 0, slot, i));
    /* MUTANT(emulator few_rows_are_summed_in_one_hop) what is read is cleared: s/make_uint4(0, 0, 0, 0)/x[0]/ */
    for (uint32_t slot = 0; slot + 1 < ranks; slot++)
        store_relaxed_sys_v4(partial_at(a, share, 0, slot, i), make_uint4(0, 0, 0, 0));
#pragma unroll
    for (uint32_t r = 0; r < PRS_MAX_LOCAL_RANKS; r++)
        if (r < ranks)
            add_eight<TYPE>(s, received_vector(x[r]));
}

/* The second hop: sends item i of this rank's part to the others. */
template <int RESULT>
PRS_DEVICE void send_results(const struct prs_unfused_inbox_sum &a, const struct inbox_share &share, uint32_t i,
                             const float (&s)[PRS_INBOX_ITEM])
{
    enum { VECTORS = PRS_INBOX_ITEM / element<RESULT>::in_vector };
    uint32_t ranks = a.place.local_ranks, me = a.place.local_rank;
    uint4 y[VECTORS];
#pragma unroll
    for (uint32_t v = 0; v < VECTORS; v++)
        y[v] = pack_vector<RESULT>(&s[v * element<RESULT>::in_vector]);
    for (uint32_t p = 1; p < ranks; p++) {
        uint32_t rank = me + p < ranks ? me + p : me + p - ranks;
#pragma unroll
        for (uint32_t v = 0; v < VECTORS; v++)
            store_relaxed_sys_v4(result_at(a, share, p, prs_inbox_slot(me, rank), i, v, VECTORS), sent_vector(y[v]));
    }
}

/* The second hop: waits for the results of an item of another rank's part, and clears them. one: true for one thread of
 * the CTA, which also checks for an alarm. */
template <int RESULT>
PRS_DEVICE void receive_results(const struct prs_unfused_inbox_sum &a, const struct inbox_share &share,
                                const struct inbox_letter &l, bool one, float (&s)[PRS_INBOX_ITEM])
{
    enum { VECTORS = PRS_INBOX_ITEM / element<RESULT>::in_vector };
    uint32_t slot = prs_inbox_slot(l.rank, a.place.local_rank);
    struct wait_clock clock = {0, 0};
    uint4 y[VECTORS];
    for (;;) {
        bool arrived = true;
#pragma unroll
        for (uint32_t v = 0; v < VECTORS; v++) {
            y[v] = load_relaxed_sys_v4(result_at(a, share, 0, slot, l.i, v, VECTORS));
            arrived = arrived && has_arrived(y[v]);
        }
        /* MUTANT(emulator five_to_eight_ranks_sum_rows_in_two_hops) results are awaited: s/arrived ||/true ||/ */
        if (arrived || !keep_waiting(&a.sync, &clock, PRS_AWAIT_BROADCAST,
                                     prs_place_rank(&a.place, a.place.node, l.rank), l.i, 1, 0))
            break;
    }
    if (one)
        check_alarm(a, result_at(a, share, 0, slot, l.i, 0, VECTORS));
#pragma unroll
    for (uint32_t v = 0; v < VECTORS; v++) {
        store_relaxed_sys_v4(result_at(a, share, 0, slot, l.i, v, VECTORS), make_uint4(0, 0, 0, 0));
        unpack_vector<RESULT>(received_vector(y[v]), &s[v * element<RESULT>::in_vector]);
    }
}

/* Adds up item i, finishes it, and rounds once. In two hops the result goes to the others, too. */
template <int TYPE, int RESULT, bool WIDE>
PRS_DEVICE void sum_item(const struct prs_unfused_inbox_sum &a, const struct inbox_share &share, uint32_t i)
{
    uint32_t count = item_elements(a, a.place.local_rank, i), at = a.c_first + i * PRS_INBOX_ITEM;
    float s[PRS_INBOX_ITEM] = {};
    if (count == 0)
        return;
    add_partials<TYPE, WIDE>(a, share, i, count, s);
    finish_elements<TYPE, RESULT>(a.epilogue, s, at, count, a.columns);
    if (a.hops == 2)
        send_results<RESULT>(a, share, i, s);
    store_eight<RESULT, WIDE>(a.c, at, s, count);
}

/* The second hop: stores item k of the other ranks' parts in C. */
template <int RESULT, bool WIDE>
PRS_DEVICE void take_item(const struct prs_unfused_inbox_sum &a, const struct inbox_share &share, uint32_t k)
{
    struct inbox_letter l = letter_of(a, share, k);
    uint32_t count = item_elements(a, l.rank, l.i);
    float s[PRS_INBOX_ITEM];
    if (count == 0)
        return;
    receive_results<RESULT>(a, share, l, k == 0, s);
    store_eight<RESULT, WIDE>(a.c, item_first(a, l.rank, l.i), s, count);
}

template <int TYPE, int RESULT, bool WIDE>
static __global__ void sum_by_inbox(const __grid_constant__ struct prs_unfused_inbox_sum a)
{
    struct inbox_share share = inbox_share_of(a, draw_number(&((struct prs_inbox *)a.inbox[0])->drawn));
    uint32_t others = a.hops == 2 ? share.count * (a.place.local_ranks - 1) : 0;
    send_partials<TYPE, WIDE>(a, share);
    for (uint32_t i = threadIdx.x; i < share.count; i += blockDim.x)
        sum_item<TYPE, RESULT, WIDE>(a, share, share.first + i);
    for (uint32_t k = threadIdx.x; k < others; k += blockDim.x)
        take_item<RESULT, WIDE>(a, share, k);
}

#endif

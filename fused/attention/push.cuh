/* SPDX-License-Identifier: Apache-2.0 */
/* Ring attention, warp 1: sends this rank's keys and values to the other ranks, once they have given credit for the
 * buffers. */
#ifndef PERSEUS_FUSED_ATTENTION_PUSH_CUH
#define PERSEUS_FUSED_ATTENTION_PUSH_CUH

#include "fused/attention/far.cuh"

/* The last message that was sent, until it is counted at its receiver. */
struct push_state {
    uint32_t pending, peer, index; /* pending: 1 when there is one */
    uint32_t forwards;             /* 0, or 1 + the group of rows of another node */
    uint32_t pieces;               /* sent so far in this launch */
    int64_t next;                  /* when the next piece may be sent, SM clock */
};

/* Counts the last message at its receiver. The message must have landed. */
template <class E>
PRS_DEVICE void count_message(const struct prs_attention_args &args, uint32_t epoch, struct push_state *p)
{
    fence_release_sys(); /* [sent-rows]: the rows, before their count in await_slabs() */
    if (E::far && p->peer == 0)
        relay_message<E>(args, epoch, p->index);
    else
        add_relaxed_sys(arrival_at(args, p->peer, epoch, p->index), 1);
    if (E::far && p->forwards != 0)
        count_for_far(args, epoch, p->forwards - 1);
    p->pending = 0;
}

template <class E>
PRS_DEVICE void count_all(const struct prs_attention_args &args, uint32_t epoch, struct push_state *p)
{
    bulk_wait_done<0>();
    if (p->pending != 0)
        count_message<E>(args, epoch, p);
}

/* Counts the pending message once it has landed. since: how many pieces have been sent after its last piece. */
template <class E>
PRS_DEVICE void count_after(const struct prs_attention_args &args, uint32_t epoch, struct push_state *p, uint32_t since)
{
    if (p->pending == 0)
        return;
    switch (since) { /* the number is part of the instruction */
    case 0:
        bulk_wait_done<0>();
        break;
    case 1:
        bulk_wait_done<1>();
        break;
    default:
        bulk_wait_done<2>();
    }
    count_message<E>(args, epoch, p);
}

/* Waits until *flag is raised. Counts everything that was sent first, because a rank may wait for the last messages
 * before it can raise the flag. */
template <class E>
PRS_DEVICE void await_flag(const struct prs_attention_args &args, uint32_t epoch, struct push_state *p,
                           const uint32_t *flag, uint32_t want, uint32_t what, uint32_t from, uint32_t index)
{
    if (prs_flag_reached(load_acquire_sys(flag), want))
        return;
    count_all<E>(args, epoch, p);
    wait_flag(&args.sync, flag, want, what, from, index);
}

/* Waits until the rank that reads this group's buffer no longer needs what is in it. [slab-credit] */
template <class E>
PRS_DEVICE void await_credit(const struct prs_attention_args &args, const struct prs_attention_message &x,
                             uint32_t epoch, struct push_state *p)
{
    const struct prs_attention_schedule *s = &args.schedule;
    bool earlier;
    uint32_t evicted, want;
    if (!prs_attention_evicted(s, x.group, args.claims->groups_before, &evicted, &earlier))
        return;
    want = earlier ? args.claims->before : epoch;
    if (E::far && x.distance == 0) { /* the relay slot: all counterparts */
        for (uint32_t back = 1; back < s->place.nodes; back++) {
            uint32_t word = prs_attention_far_credit(s, back, evicted);
            await_flag<E>(args, epoch, p, far_flag(args, word), want, PRS_AWAIT_CREDIT,
                          prs_place_counterpart(&s->place, s->place.nodes - back), word);
        }
    } else {
        uint32_t index = prs_attention_credit(s, x.distance, evicted);
        await_flag<E>(args, epoch, p, args.credits[0] + index, want, PRS_AWAIT_CREDIT,
                      prs_place_neighbour(&s->place, s->place.local_ranks - x.distance), index);
    }
    fence_async_global(); /* the credit was read by an ordinary load, and lets TMA write */
}

/* For a slice of another node: waits until the slab has come from the counterpart. */
template <class E>
PRS_DEVICE void await_far_slab(const struct prs_attention_args &args, const struct prs_attention_message &x,
                               uint32_t epoch, struct push_state *p)
{
    const struct prs_attention_schedule *s = &args.schedule;
    uint32_t word = prs_attention_far_slab(s, x.way, x.pair, x.kind, x.segment, x.slab);
    await_flag<E>(args, epoch, p, far_flag(args, word), epoch, PRS_AWAIT_KEYS, prs_place_counterpart(&s->place, x.way),
                  word);
    fence_async_global(); /* the signal was read by an ordinary load, the rows are read by TMA */
}

template <class E> PRS_DEVICE uint32_t row_bytes_of(const struct prs_attention_message &x)
{
    return x.kind == PRS_KEYS ? E::row_bytes : E::value_bytes;
}

template <class E> PRS_DEVICE uint32_t piece_bytes_of(const struct prs_attention_message &x, uint32_t row)
{
    return (x.rows - row < E::piece_rows ? x.rows - row : E::piece_rows) * row_bytes_of<E>(x);
}

/* Where a row of a message lies in staging memory. Each segment there has room for the wider tensor. */
template <class E>
PRS_DEVICE uint64_t place_of_row(const struct prs_attention_args &args, uint32_t stage,
                                 const struct prs_attention_message &x, uint32_t row)
{
    if (E::value_dim == E::head_dim || x.kind == PRS_KEYS)
        return staging_place(args, stage, row);
    return staging_place(args, stage, 0) + row * E::value_bytes;
}

/* How far send_message() counts rows: to the message's end; or to one row in another piece, which stands for the terms
 * that travel with a counterpart's queries. */
template <class E> PRS_DEVICE uint32_t end_of(const struct prs_attention_message &x)
{
    if (E::terms && x.way != 0 && x.kind == PRS_KEYS)
        return prs_ceil_div(x.rows, E::piece_rows) * E::piece_rows + 1;
    return x.rows;
}

/* Fetches the terms that travel with a message. */
template <class E>
PRS_DEVICE void fetch_terms(const struct prs_attention_args &args, uint32_t epoch, uint8_t *to, uint64_t *full,
                            const struct prs_attention_message &x)
{
    uint32_t bytes = terms_bytes(args, x.row, x.rows);
    mbarrier_expect(full, bytes);
    bulk_load(to,
              args.staging[0] + terms_place(args, epoch, prs_place_counterpart(&args.schedule.place, x.way), x.pair,
                                            x.segment, x.row),
              bytes, full);
}

/* Fetches the piece that begins at row `row` of the message into its push slot: rows of this rank, or of a counterpart,
 * which lie in staging memory in the layout of messages. number: how many pieces of the launch came before. */
template <class E>
PRS_DEVICE void fetch_piece(const struct prs_attention_args &args, const struct attention_memory &m, uint32_t epoch,
                            uint32_t number, const struct prs_attention_message &x, uint32_t row)
{
    const struct prs_attention_schedule *s = &args.schedule;
    uint64_t *full = &m.pushed[number % PRS_ATTENTION_PUSH_SLOTS];
    uint8_t *to = m.base + number % PRS_ATTENTION_PUSH_SLOTS * PRS_ATTENTION_PUSH_BYTES;
    if (E::terms && row >= x.rows) {
        fetch_terms<E>(args, epoch, to, full, x);
        return;
    }
    if (E::far && x.way != 0) {
        uint32_t stage = prs_attention_stage(s, x.way * s->place.local_ranks, x.pair, x.kind, x.segment);
        uint32_t bytes = piece_bytes_of<E>(x, row);
        mbarrier_expect(full, bytes);
        bulk_load(to, args.staging[0] + place_of_row<E>(args, stage, x, x.row + row), bytes, full);
        return;
    }
    uint32_t segment = E::mirrored ? s->segments - 1 - x.segment : x.segment;
    struct attention_coordinate at =
        attention_coordinate_of(args, x.pair / s->heads_kv, x.pair % s->heads_kv, s->heads_kv, segment);
    mbarrier_expect(full, E::piece_rows * row_bytes_of<E>(x));
    tma_load_5d(to, x.kind == PRS_KEYS ? &args.push_k : &args.push_v, full, 0, (int32_t)(x.row + row), 0, at.u, at.v);
}

/* Stores a piece that has been fetched. to: address of the message's first row at the receiver, which is neighbour
 * `peer`. */
template <class E>
PRS_DEVICE void store_piece(const struct prs_attention_args &args, uint32_t epoch, const uint8_t *from,
                            const struct prs_attention_message &x, uint32_t peer, uint8_t *to, uint32_t row)
{
    if (E::terms && row >= x.rows)
        bulk_store(args.staging[peer] + terms_place(args, epoch, prs_place_counterpart(&args.schedule.place, x.way),
                                                    x.pair, x.segment, x.row),
                   from, terms_bytes(args, x.row, x.rows));
    else
        bulk_store(to + row * row_bytes_of<E>(x), from, piece_bytes_of<E>(x, row));
    bulk_commit();
}

/* Sends a message's pieces one after the other. Each is fetched while the piece before it is sent, and the message
 * before is counted meanwhile. Rows of one head lie without gaps in staging memory, so each piece is one contiguous
 * store. */
template <class E>
PRS_DEVICE void send_message(const struct prs_attention_args &args, const struct attention_memory &m, uint32_t epoch,
                             const struct prs_attention_message &x, struct push_state *p)
{
    const struct prs_attention_schedule *s = &args.schedule;
    uint32_t order = prs_attention_order(s, x.way, x.distance),
             peer = x.distance == 0 ? 0 : s->place.local_ranks - x.distance;
    uint32_t stage = prs_attention_stage(s, order, x.pair, x.kind, x.segment), sent = 0, end = end_of<E>(x);
    uint8_t *to = args.staging[peer] + place_of_row<E>(args, stage, x, x.row);
    bulk_wait_read<PRS_ATTENTION_PUSH_SLOTS - 1>();
    fetch_piece<E>(args, m, epoch, p->pieces, x, 0);
    for (uint32_t row = 0; row < end; row += E::piece_rows, sent++, p->pieces++) {
        uint32_t slot = p->pieces % PRS_ATTENTION_PUSH_SLOTS, phase = p->pieces / PRS_ATTENTION_PUSH_SLOTS & 1;
        bool last = end - row <= E::piece_rows;
        if (!last) {
            bulk_wait_read<PRS_ATTENTION_PUSH_SLOTS - 2>();
            fetch_piece<E>(args, m, epoch, p->pieces + 1, x, row + E::piece_rows);
        }
        if (last || sent == 2)
            count_after<E>(args, epoch, p, sent);
        mbarrier_wait(&m.pushed[slot], phase);
        sleep_until(p->next);
        p->next = clock64() + args.push_gap;
        store_piece<E>(args, epoch, m.base + slot * PRS_ATTENTION_PUSH_BYTES, x, peer, to, row);
    }
    p->peer = peer;
    p->index = prs_attention_arrival(s, order, x.pair, x.kind, x.segment, x.slab);
    p->forwards = E::far && x.way != 0 ? 1 + x.group : 0;
    p->pending = 1;
}

/* Rows that a counterpart has put here are already in this rank's memory: only counts them, for this rank's own
 * loader. */
PRS_DEVICE void announce_message(const struct prs_attention_args &args, uint32_t epoch,
                                 const struct prs_attention_message &x)
{
    const struct prs_attention_schedule *s = &args.schedule;
    uint32_t index = prs_attention_arrival(s, x.way * s->place.local_ranks, x.pair, x.kind, x.segment, x.slab);
    fence_release_sys(); /* [rows-here]: the rows that the signal announced, before their count in await_slabs() */
    add_relaxed_sys(arrival_at(args, 0, epoch, index), 1);
}

/* Waits until a message may be sent. *credited: the last buffer for which credit was found. */
template <class E>
PRS_DEVICE void await_message(const struct prs_attention_args &args, const struct prs_attention_message &x,
                              uint32_t epoch, struct push_state *p, uint32_t *credited)
{
    const struct prs_attention_schedule *s = &args.schedule;
    uint32_t buffer = x.group * s->place.local_ranks + x.distance;
    if (E::far && x.way != 0)
        await_far_slab<E>(args, x, epoch, p);
    if (*credited != buffer && (!E::far || x.way == 0 || x.distance != 0))
        await_credit<E>(args, x, epoch, p);
    *credited = buffer;
}

/* Each message waits only for earlier messages, of any rank, and for pieces that need only those. So the next message
 * may be claimed while one is sent. */
PRS_DEVICE uint32_t claim_message(const struct prs_attention_args &args)
{
    return atomicAdd(&args.claims->messages, 1u);
}

/* Message number `at`; false: it is not sent. */
template <class E>
PRS_DEVICE bool find_message(const struct prs_attention_args &args, uint32_t at, struct prs_attention_message *x)
{
    const struct prs_attention_schedule *s = &args.schedule;
    if constexpr (!E::striped)
        return prs_attention_message_at(s, at, x);
    return prs_stripe_message_at(&args.stripes, s, at, x);
}

/* Each message is counted at its receiver once it has landed, while the next message is being sent. */
template <class E> PRS_DEVICE void push_slice(const struct prs_attention_args &args, struct attention_memory m)
{
    const struct prs_attention_schedule *s = &args.schedule;
    uint32_t epoch = launch_epoch(&args.sync), credited = ~0u, next;
    struct push_state p = {};
    m.base += E::at_push;
    for (uint32_t i = claim_message(args); i < prs_attention_messages(s); i = next) {
        struct prs_attention_message x;
        next = claim_message(args);
        if (!find_message<E>(args, i, &x))
            continue;
        if (!E::far)
            x.way = 0; /* it is; so the compiler leaves out what only other nodes need */
        await_message<E>(args, x, epoch, &p, &credited);
        if (E::far && x.way != 0 && x.distance == 0)
            announce_message(args, epoch, x);
        else
            send_message<E>(args, m, epoch, x, &p);
    }
    count_all<E>(args, epoch, &p);
}

#endif

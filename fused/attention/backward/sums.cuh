/* SPDX-License-Identifier: Apache-2.0 */
/* dq: the parts that this rank's keys add go to the owners of the queries. Each owner adds up the parts of all ranks,
 * in the order of the ring, and rounds once. Parts travel in block floating point (core/block_float.cuh), since in bf16
 * their errors would add up to more than that of the last rounding.
 *
 * A sum is a block of queries of a head, in two halves of 64 rows and 64 columns. A half has the layout in which 128
 * threads hold the accumulators of a product: vector i of thread t, of four elements, is number 128 i + t. */
#ifndef PERSEUS_FUSED_ATTENTION_BACKWARD_SUMS_CUH
#define PERSEUS_FUSED_ATTENTION_BACKWARD_SUMS_CUH

#include "fused/attention/backward/cta.cuh"
#include "fused/attention/far.cuh"
#include "fused/attention/softmax.cuh"
#include "fused/core/block_float.cuh"

/* Sums of one rank's queries. */
PRS_DEVICE uint32_t sums_of_rank(const struct prs_attention_schedule *s, uint32_t pairs)
{
    return (uint32_t)prs_backward_sum(s, pairs, 1, 0, 0, 0);
}

/* ---- warp 1, when it has pushed: sends the sums of other ranks' queries, group by group ---- */
/* Waits until all tasks of the group have added: two threads of each task count. Has no limit, like await_turn(). */
PRS_DEVICE void await_group(const struct prs_attention_args &args, uint32_t group)
{
    const uint32_t *added = args.finished + args.schedule.groups + group;
    uint32_t want = 2 * args.pieces_of[group];
    /* MUTANT(emulator attention_backward/several_ranks_are_right) sums are complete: s/< want/< 0/ */
    while (load_acquire_sys(added) < want) /* [dq-group] */
        __nanosleep(PRS_BACKWARD_NAP_NS);
    __syncwarp();
}

/* Where sums for the rank at `order` go: to that rank, or, if it is on another node, to the memory from which they are
 * put. *slot: how many slices of sums come before them there. */
template <class E> PRS_DEVICE uint16_t *find_parts(const struct prs_backward_args &args, uint32_t order, uint32_t *slot)
{
    const struct prs_place *place = &args.stream.schedule.place;
    if (E::far && order >= place->local_ranks) {
        *slot = order - place->local_ranks;
        return (uint16_t *)(args.stream.staging[0] + args.far.leaving);
    }
    *slot = E::far ? prs_backward_slot(place, prs_place_in_order(place, order), place->rank)
                   : prs_distance_back(order, place->local_ranks) - 1;
    return args.sums.parts[order];
}

/* Called when a sum of a head for a rank of another node lies in the memory from which it is put. The call for the last
 * sum puts all of them: a head's sums for one rank are consecutive there. */
template <class E>
PRS_DEVICE_OUTLINED void put_parts(const struct prs_backward_args &args, uint32_t epoch, uint32_t order, uint32_t pair)
{
    constexpr uint32_t bytes = PRS_BACKWARD_BLOCK * sizeof(uint16_t);
    const struct prs_attention_schedule *s = &args.stream.schedule;
    const struct prs_place *place = &s->place;
    uint32_t to = prs_place_in_order(place, order), slot = prs_backward_slot(place, to, place->rank);
    uint32_t count = prs_attention_interest(s, to, place->rank) * prs_backward_blocks(s),
             ahead = order - place->local_ranks;
    uint32_t *converted = args.far.converted + ahead * args.pairs_q + pair;
    uint64_t all = sums_of_rank(s, args.pairs_q), first = prs_backward_sum(s, args.pairs_q, 0, pair, 0, 0);
    /* MUTANT(emulator attention_backward_nodes/two_nodes_give_what_one_does) all sums are there: s/count)/1)/ */
    if (!arrives_last(converted, count))
        return;
    *converted = 0;
    put_far(args.stream, to, args.stream.far.staging_window, args.far.leaving + (ahead * all + first) * bytes,
            args.far.parts + (slot * all + first) * bytes, (uint64_t)count * bytes, pair);
    signal_far(args.stream, to, prs_backward_far_part(s, slot, pair), epoch, pair);
}

/* Sends one sum to the rank at `order`. */
template <class E> PRS_DEVICE void send_sum(const struct prs_backward_args &args, uint32_t order, uint32_t number)
{
    constexpr uint32_t elements = PRS_BACKWARD_BLOCK;
    const struct prs_backward_sums *x = &args.sums;
    uint32_t all = sums_of_rank(&args.stream.schedule, args.pairs_q), slot;
    uint16_t *to = find_parts<E>(args, order, &slot);
    const float *from = x->sums + ((uint64_t)order * all + number) * elements;
    to += ((uint64_t)slot * all + number) * elements;
#pragma unroll 4
    for (uint32_t i = threadIdx.x % 32 * 8; i < elements; i += 32 * 8) {
        float4 a = *(const float4 *)(from + i), b = *(const float4 *)(from + i + 4);
        uint2 first = pack_block({a.x, a.y, a.z, a.w}), second = pack_block({b.x, b.y, b.z, b.w});
        *(uint4 *)(to + i) = make_uint4(first.x, first.y, second.x, second.y);
    }
    if (threadIdx.x % 32 == 0)
        x->turns[(uint64_t)order * all + number] = 0;
    if (E::far && order >= args.stream.schedule.place.local_ranks) {
        __syncwarp(); /* all lanes have written */
        if (threadIdx.x % 32 == 0)
            put_parts<E>(args, launch_epoch(&args.stream.sync), order,
                         number / prs_backward_blocks(&args.stream.schedule) / args.stream.schedule.segments);
    }
}

/* A whole warp of each CTA calls it. Sums for other nodes go first, because they take longest. */
template <class E> PRS_DEVICE void send_sums(const struct prs_backward_args &args)
{
    const struct prs_attention_schedule *s = &args.stream.schedule;
    uint32_t per_pair = s->segments * prs_backward_blocks(s), pairs, first = 0, at = blockIdx.x;
    uint32_t others = (E::far ? s->place.world : s->place.local_ranks) - 1;
    for (uint32_t group = 0; group < s->groups; group++, first += pairs) {
        pairs = prs_attention_group_pairs(s, group);
        await_group(args.stream, group);
        /* CTAs deal out the sums of all groups in turn. */
        for (; at < (first + pairs) * per_pair * others; at += gridDim.x) {
            uint32_t i = at - first * per_pair * others, order = 1 + i / (pairs * per_pair);
            uint32_t number = first * per_pair + i % (pairs * per_pair);
            uint32_t block = number % prs_backward_blocks(s), segment = number / prs_backward_blocks(s) % s->segments;
            if (E::far)
                order = others + 1 - order;
            if (prs_backward_adds(&args.stream.stripes, s, s->place.rank, prs_place_in_order(&s->place, order), segment,
                                  block))
                send_sum<E>(args, order, number);
        }
    }
    __syncwarp();
    if (threadIdx.x % 32 != 0)
        return;
    /* [dq-parts]: all parts, before the count that await_parts() waits for */
    fence_release_sys();
    for (uint32_t p = 1; p < s->place.local_ranks; p++)
        add_relaxed_sys(args.sums.arrivals[p] + prs_distance_back(p, s->place.local_ranks) - 1, 1);
}

/* ---- the kernel after the pass ---- */
/* Each CTA of each rank of the node counts once in every launch, when its parts have landed; a rank of another node
 * signals each query head. */
template <bool FAR> PRS_DEVICE void await_parts(const struct prs_finish_args &args)
{
    const struct prs_place *place = &args.schedule.place;
    /* the pass has already ended this epoch */
    uint32_t want = *(volatile uint32_t *)&args.sync.words->epoch * gridDim.x;
    for (uint32_t order = 1 + threadIdx.x; order < place->local_ranks; order += PRS_FINISH_THREADS)
        /* MUTANT(emulator attention_backward/several_ranks_are_right) parts are awaited: s/, want,/, 0,/ */
        wait_flag(&args.sync, args.sums.arrivals[0] + order - 1, want, PRS_AWAIT_GRADIENTS,
                  prs_place_in_order(place, order), order - 1);
    for (uint32_t i = threadIdx.x; FAR && i < (place->world - place->local_ranks) * args.pairs_q;
         i += PRS_FINISH_THREADS) {
        uint32_t from = prs_place_in_order(place, place->local_ranks + i / args.pairs_q);
        uint32_t word =
            prs_backward_far_part(&args.schedule, prs_backward_slot(place, place->rank, from), i % args.pairs_q);
        /* MUTANT(emulator attention_backward_nodes/two_nodes_give_what_one_does) parts of other nodes are awaited:
         * s/wait_flag(&args.sync, far_flag/(void)(far_flag/ */
        wait_flag(&args.sync, far_flag(args, word), *(volatile uint32_t *)&args.sync.words->epoch, PRS_AWAIT_GRADIENTS,
                  from, word);
    }
    __syncthreads();
}

/* One warpgroup finishes half of sum `number` of this rank's queries. */
template <int TYPE, int HEAD_DIM, bool FAR>
PRS_DEVICE void finish_sum(const struct prs_finish_args &args, uint32_t number, uint32_t half)
{
    typedef element<TYPE> out;
    constexpr uint32_t count = 32, elements = PRS_BACKWARD_BLOCK, rows = PRS_BACKWARD_BLOCK / HEAD_DIM;
    const struct prs_attention_schedule *s = &args.schedule;
    const struct prs_attention_strides *x = &args.strides;
    uint64_t all = sums_of_rank(s, args.pairs_q);
    uint64_t at = number * elements + half * (elements / 2) + threadIdx.x % 128 * 4;
    uint32_t blocks = prs_backward_blocks(s), block = number % blocks, segment = number / blocks % s->segments;
    uint32_t pair = number / blocks / s->segments, lane = threadIdx.x % 32;
    uint32_t row = block * rows + half * (rows - 64) + threadIdx.x / 32 % 4 * 16 + lane / 4, w[count / 16][4];
    float sum[count];
#pragma unroll
    for (uint32_t i = 0; i < count; i += 4)
        *(float4 *)(sum + i) = *(const float4 *)(args.sums.sums + at + i * 128);
    for (uint32_t order = 1; order < (FAR ? s->place.world : s->place.local_ranks); order++) { /* of the ring */
        const uint16_t *part = args.sums.parts[0] + (order - 1) * all * elements + at;
        if (!prs_backward_adds(&args.stripes, s,
                               FAR ? prs_place_after(&s->place, order) : prs_place_in_order(&s->place, order),
                               s->place.rank, segment, block))
            continue;
#pragma unroll
        for (uint32_t i = 0; i < count; i += 4)
            add_block_float(sum + i, *(const uint2 *)(part + i * 128));
    }
    typename out::bits *to =
        (typename out::bits *)args.dq + pair / s->heads_q * x->batch + pair % s->heads_q * x->head +
        (args.stripes.log_rows != 0 ? segment : prs_backward_segment(s, segment)) * x->segment + half * (HEAD_DIM - 64);
#pragma unroll
    for (int h = 0; h < 2; h++, row += 8) {
        round_row<TYPE>(w, sum, h, args.scale);
        if (row >= s->segment_rows)
            continue;
#pragma unroll
        for (uint32_t i = 0; i < count / 16; i++)
            *(uint4 *)(to + row * x->row + i * 32 + lane % 4 * out::in_vector) =
                make_uint4(w[i][0], w[i][1], w[i][2], w[i][3]);
    }
}

template <int TYPE, int HEAD_DIM, bool FAR>
__global__ void __launch_bounds__(PRS_FINISH_THREADS)
    finish_queries(const __grid_constant__ struct prs_finish_args args)
{
    uint32_t all = sums_of_rank(&args.schedule, args.pairs_q);
    await_parts<FAR>(args);
    for (uint32_t at = blockIdx.x; at < all; at += gridDim.x) {
        finish_sum<TYPE, HEAD_DIM, FAR>(args, at, threadIdx.x / 128);
        if (threadIdx.x == 0)
            args.sums.turns[at] = 0;
    }
}

#endif

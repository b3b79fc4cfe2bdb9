/* SPDX-License-Identifier: Apache-2.0 */
/* The backward pass, warp 0: loads a task's tile of this rank's tensors, and the stream, and waits there for data from
 * other ranks. */
#ifndef PERSEUS_FUSED_ATTENTION_BACKWARD_LOAD_CUH
#define PERSEUS_FUSED_ATTENTION_BACKWARD_LOAD_CUH

#include "fused/attention/backward/cta.cuh"
#include "fused/attention/load.cuh"

/* How many slabs of the span are known to have arrived, for each of the two tensors of the stream. */
struct backward_arrived {
    uint32_t first, second;
};

/* ---- walks, as in the forward's load.cuh ---- */
PRS_DEVICE void begin_pass(const struct prs_backward_args &args, const struct prs_attention_piece &piece,
                           struct prs_attention_walk *w)
{
    *w = piece.begin;
}

PRS_DEVICE void begin_pass(const struct prs_backward_args &args, const struct prs_attention_piece &piece,
                           struct prs_stripe_walk *w)
{
    begin_walk(args.stream, piece, args.shape.shared, w);
}

template <class E>
PRS_DEVICE bool next_in_pass(const struct prs_backward_args &args, const struct prs_attention_task &t,
                             struct prs_attention_walk *w)
{
    return prs_backward_next(&args.stream.schedule, &args.shape, &t, w, E::far);
}

template <class E>
PRS_DEVICE bool next_in_pass(const struct prs_backward_args &args, const struct prs_attention_task &t,
                             struct prs_stripe_walk *w)
{
    return next_step(args.stream, t, w);
}

/* Awaits the walk's block of both tensors, and leaves its span and pair in *span and t->pair. */
template <class E>
PRS_DEVICE void await_step(const struct prs_backward_args &args, struct prs_attention_task *t,
                           const struct prs_attention_walk &w, struct backward_arrived *a, uint32_t *span)
{
    constexpr uint32_t what = PRS_AWAIT_QUERIES;
    struct prs_attention_walk at = w;
    *span = at.span = prs_backward_span(&args.stream.schedule, &args.shape, &w, E::far);
    t->pair = prs_backward_pair(&args.shape, t, &w);
    if (at.span / args.stream.schedule.segments != 0) {
        await_block<what>(args.stream, *t, PRS_KEYS, at, &a->first); /* [terms]: and the terms of these rows */
        /* MUTANT(emulator attention_backward/several_ranks_are_right) both tensors of the stream are awaited: delete */
        await_block<what>(args.stream, *t, PRS_VALUES, at, &a->second);
    }
}

template <class E>
PRS_DEVICE void await_step(const struct prs_backward_args &args, struct prs_attention_task *t,
                           const struct prs_stripe_walk &w, struct backward_arrived *a, uint32_t *span)
{
    constexpr uint32_t what = PRS_AWAIT_QUERIES;
    *span = w.at.span;
    t->pair += w.head;
    if (w.order != 0) {
        await_block<what>(args.stream, *t, PRS_KEYS, w, &a->first); /* [terms]: and the terms of these rows */
        await_block<what>(args.stream, *t, PRS_VALUES, w, &a->second);
    }
}

/* ---- loads ---- */
/* What the consumers need to know of the walk's block. */
template <class E>
PRS_DEVICE struct prs_attention_step step_of(const struct prs_backward_args &args, const struct prs_attention_task &t,
                                             const struct prs_attention_walk &w)
{
    const struct prs_attention_schedule *s = &args.stream.schedule;
    uint32_t first = t.tile * E::tile_rows, flags = w.left == 1 ? (uint32_t)PRS_STEP_LAST : 0;
    if (w.diagonal)
        flags |= PRS_STEP_DIAGONAL;
    if (prs_backward_range(s, &w, first).to < E::block || prs_backward_range(s, &w, first + E::tile_rows - 1).from > 0)
        flags |= PRS_STEP_MASKED;
    return {w.block, flags};
}

template <class E>
PRS_DEVICE struct prs_attention_step step_of(const struct prs_backward_args &args, const struct prs_attention_task &t,
                                             const struct prs_stripe_walk &w)
{
    return step_of(args.stream, w);
}

/* Where rows of one of the two tensors of the stream lie. order: the position of their slice. */
template <class E, int KIND>
PRS_DEVICE struct attention_coordinate coordinate_in_stream(const struct prs_backward_args &args,
                                                            const struct prs_attention_task &t, uint32_t order,
                                                            uint32_t segment)
{
    const struct prs_attention_schedule *s = &args.stream.schedule;
    if (order != 0)
        return {(int32_t)prs_attention_stage(s, order, t.pair, KIND, segment), 0};
    return attention_coordinate_of(args.stream, t.batch, t.pair % s->heads_kv, s->heads_kv,
                                   tensor_segment<E>(s, segment));
}

/* Loads the walk's block of both tensors. step: how many blocks were loaded before. What can be computed is computed
 * before the stage is free: the time from there to the arrival of the data limits head_dim 64. */
template <class E>
PRS_DEVICE void load_step(const struct prs_backward_args &args, const struct attention_memory &m,
                          const struct prs_attention_task &task, const typename walk_of<E::striped>::type &walk,
                          uint32_t bank, uint32_t step, struct backward_arrived *a)
{
    const struct prs_attention_args &x = args.stream;
    const struct prs_attention_schedule *s = &x.schedule;
    struct prs_attention_task t = task;
    uint32_t span, order, segment, stage = stage_of(step), block = place_of(walk).block;
    uint64_t *k_full = m.k_full + stage, *v_full = m.v_full + stage;
    await_step<E>(args, &t, walk, a, &span);
    order = span / s->segments;
    segment = span % s->segments;
    struct attention_coordinate first = coordinate_in_stream<E, PRS_KEYS>(args, t, order, segment);
    struct attention_coordinate second = coordinate_in_stream<E, PRS_VALUES>(args, t, order, segment);
    uint64_t term =
        prs_backward_term(s, bank, prs_place_in_order(&s->place, order), t.pair, segment) + block * E::block;
    struct prs_attention_step told = step_of<E>(args, t, walk);
    int32_t row = (int32_t)(block * E::block);
    mbarrier_wait(m.k_empty + stage, phase_of(step) ^ 1);
    mbarrier_wait(m.v_empty + stage, phase_of(step) ^ 1);
    __syncwarp(); /* as in load_tiles(): no lane may look a phase late */
    if (threadIdx.x != 0)
        return;
    pass_step(m, stage, told);
    mbarrier_expect(k_full, E::block_bytes + E::terms_bytes);
    tma_load_5d(m.base + E::at_k + stage * E::block_bytes, order != 0 ? &x.received : &x.k, k_full, 0, row, 0, first.u,
                first.v);
    bulk_load(m.base + E::at_terms + stage * E::terms_bytes, args.terms + term, E::terms_bytes, k_full);
    mbarrier_expect(v_full, E::block_bytes);
    tma_load_5d(m.base + E::at_v + stage * E::block_bytes, order != 0 ? &x.received : &x.v, v_full, 0, row, 0, second.u,
                second.v);
}

/* Loads the rows of each warpgroup, of both of this rank's tensors. */
template <class E>
PRS_DEVICE void load_own(const struct prs_backward_args &args, const struct attention_memory &m,
                         const struct prs_attention_task &t, uint32_t phase)
{
    uint32_t segment = tensor_segment<E>(&args.stream.schedule, t.segment);
    struct attention_coordinate at = attention_coordinate_of(args.stream, t.batch, t.head, args.shape.heads, segment);
    for (uint32_t i = 0; i < E::warpgroups; i++) {
        int32_t row = (int32_t)(t.tile * E::tile_rows + i * 64);
        mbarrier_wait(&m.q_empty[i], phase ^ 1);
        __syncwarp(); /* as in load_tiles(): no lane may look a phase late */
        if (threadIdx.x % 32 == 0) {
            mbarrier_expect(&m.q_full[i], 2 * E::rows_bytes);
            tma_load_5d(m.base + E::at_q + i * E::rows_bytes, &args.stream.q, &m.q_full[i], 0, row, 0, at.u, at.v);
            tma_load_5d(m.base + E::at_second + i * E::rows_bytes, &args.second, &m.q_full[i], 0, row, 0, at.u, at.v);
        }
    }
}

/* Claims tasks, and loads in the order in which the consumers use the data. */
template <class E> PRS_DEVICE void load_backward(const struct prs_backward_args &args, const struct attention_memory &m)
{
    const struct prs_attention_args &x = args.stream;
    bool claims = threadIdx.x == 0;
    /* MUTANT(emulator attention_backward/several_ranks_are_right) terms have two banks: s/= prs_/= 0 * prs_/ */
    uint32_t bank = prs_backward_bank(launch_epoch(&x.sync));
    uint32_t step = 0, piece = claims ? claim_piece(x) : 0;
    struct backward_arrived arrived = {0, 0};
    for (uint32_t turn = 0;; turn++) {
        piece = __shfl_sync(~0u, piece, 0);
        if (claims)
            pass_piece(m, turn, piece);
        if (piece >= x.pieces_count)
            break;
        struct prs_attention_task t = x.pieces[piece].task;
        typename walk_of<E::striped>::type w;
        begin_pass(args, x.pieces[piece], &w);
        arrived.first = arrived.second = 0;
        bool first = true;
        do {
            load_step<E>(args, m, t, w, bank, step++, &arrived);
            if (first)
                load_own<E>(args, m, t, turn & 1);
            first = false;
        } while (next_in_pass<E>(args, t, &w));
        piece = claims ? claim_piece(x) : 0;
    }
}

#endif

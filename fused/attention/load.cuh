/* SPDX-License-Identifier: Apache-2.0 */
/* Ring attention, warp 0: loads queries, keys and values, and waits there for data from other ranks. */
#ifndef PERSEUS_FUSED_ATTENTION_LOAD_CUH
#define PERSEUS_FUSED_ATTENTION_LOAD_CUH

#include "fused/attention/cta.cuh"

/* ---- walks; the walk of a striped task begins here, another one as its piece says ---- */
PRS_DEVICE void begin_walk(const struct prs_attention_args &args, const struct prs_attention_piece &piece,
                           uint32_t heads, struct prs_attention_walk *w)
{
    *w = piece.begin;
}

PRS_DEVICE void begin_walk(const struct prs_attention_args &args, const struct prs_attention_piece &piece,
                           uint32_t heads, struct prs_stripe_walk *w)
{
    prs_stripe_begin(&args.stripes, &args.schedule, &piece.task, heads, w);
}

PRS_DEVICE bool next_step(const struct prs_attention_args &args, const struct prs_attention_task &t,
                          struct prs_attention_walk *w)
{
    return prs_attention_next(&args.schedule, &t, w);
}

PRS_DEVICE bool next_step(const struct prs_attention_args &args, const struct prs_attention_task &t,
                          struct prs_stripe_walk *w)
{
    return prs_stripe_next(&args.stripes, &args.schedule, w);
}

PRS_DEVICE const struct prs_attention_walk &place_of(const struct prs_attention_walk &w)
{
    return w;
}

PRS_DEVICE const struct prs_attention_walk &place_of(const struct prs_stripe_walk &w)
{
    return w.at;
}

template <bool STRIPED> struct walk_of {
    typedef struct prs_attention_walk type;
};
template <> struct walk_of<true> {
    typedef struct prs_stripe_walk type;
};

/* What the consumers need to know of the walk's block. */
PRS_DEVICE struct prs_attention_step step_of(const struct prs_attention_args &args, struct prs_stripe_walk w)
{
    uint32_t position = prs_stripe_look(&args.stripes, &args.schedule, &w);
    return {position,
            (w.at.left == 1 ? (uint32_t)PRS_STEP_LAST : 0) | (w.at.diagonal != 0 ? (uint32_t)PRS_STEP_MASKED : 0)};
}

/* ---- waiting ---- */
/* Waits, and returns how many slabs have arrived, counted from `slab`; at least 1. Each lane reads one counter, so a
 * complete span costs one read per 32 slabs. Returns a large number when the wait gave up. WHAT: which tensors'
 * slabs. */
template <uint32_t WHAT>
PRS_DEVICE uint32_t await_slabs(const struct prs_attention_args &args, const struct prs_attention_task &t,
                                uint32_t kind, uint32_t span, uint32_t slab)
{
    const struct prs_attention_schedule *s = &args.schedule;
    uint32_t lane = threadIdx.x % 32, order = span / s->segments, mine = slab + lane;
    uint32_t index = prs_attention_arrival(s, order, t.pair, kind, span % s->segments, mine);
    uint32_t want = mine < s->slabs ? prs_attention_arrivals(s, mine) : 0;
    uint32_t epoch = launch_epoch(&args.sync); /* read each time, because registers are few */
    const uint32_t *counter = arrival_at(args, 0, epoch, index);
    if (args.planes != 0) { /* copied: one flag stands for all slabs */
        /* MUTANT(emulator attention/keys_that_are_copied_are_right) a flag for each group of copied keys:
         * s/t.group/0/ */
        index = prs_attention_copied(s, order, t.group);
        counter = args.arrivals[0] + index;
        /* MUTANT(emulator attention/keys_that_are_copied_are_right) wait for copied keys: s/epoch/epoch - 1/ */
        want = epoch;
    }
    struct wait_clock clock = {0, 0};
    for (;;) {
        uint32_t seen = mine < s->slabs ? load_acquire_sys(counter) : want;
        uint32_t missing = __ballot_sync(~0u, !prs_flag_reached(seen, want));
        if (missing == 0)
            return 32;
        if ((missing & 1) == 0)
            return __ffs(missing) - 1;
        bool go = keep_waiting(&args.sync, &clock, WHAT, prs_place_in_order(&s->place, order), index, want, seen);
        if (!__shfl_sync(~0u, go, 0))
            return ~0u >> 2;
    }
}

/* Waits until the walk's block has arrived. *ready: how many slabs of the span are known to have arrived. */
template <uint32_t WHAT>
PRS_DEVICE void await_block(const struct prs_attention_args &args, const struct prs_attention_task &t, uint32_t kind,
                            const struct prs_attention_walk &w, uint32_t *ready)
{
    const struct prs_attention_schedule *s = &args.schedule;
    uint32_t slab_rows = s->slab_chunks * s->chunk_rows, end = (w.block + 1) * s->block_rows;
    if (w.block == 0)
        *ready = 0;
    if (end > s->segment_rows)
        end = s->segment_rows;
    if (*ready >= s->slabs || *ready * slab_rows >= end)
        return;
    while (*ready < s->slabs && *ready * slab_rows < end)
        *ready += await_slabs<WHAT>(args, t, kind, w.span, *ready);
    fence_async_global(); /* arrivals were read by ordinary loads, the slabs are read by TMA */
}

/* The same for a striped walk. A segment is a slab. The segments of a slice that the task reads are consecutive; others
 * may never arrive. *ready: the first segment that may not have arrived, counted over slices and their heads. */
template <uint32_t WHAT>
PRS_DEVICE void await_block(const struct prs_attention_args &args, const struct prs_attention_task &t, uint32_t kind,
                            const struct prs_stripe_walk &w, uint32_t *ready)
{
    const struct prs_attention_schedule *s = &args.schedule;
    uint32_t segment = w.at.span % s->segments, at = (w.order * w.heads + w.head) * s->segments + segment;
    uint32_t mine = segment + threadIdx.x % 32, epoch = launch_epoch(&args.sync);
    uint32_t index = prs_attention_arrival(s, w.order, t.pair, kind, mine, 0), want = prs_attention_arrivals(s, 0);
    struct wait_clock clock = {0, 0};
    if (*ready > at)
        return;
    for (bool go = true; go;) {
        uint32_t seen = mine < w.end ? load_acquire_sys(arrival_at(args, 0, epoch, index)) : want;
        uint32_t missing = __ballot_sync(~0u, !prs_flag_reached(seen, want));
        /* MUTANT(emulator attention_striped/several_ranks_are_right) stripes are awaited: s/missing & 1/0/ */
        if ((missing & 1) == 0) {
            uint32_t have = missing == 0 ? 32 : __ffs(missing) - 1;
            /* MUTANT(emulator attention_striped/up_to_eight_ranks_are_right) not those of the next slice:
             * s/have < w.end - segment ? have : w.end - segment/have/ */
            *ready = at + (have < w.end - segment ? have : w.end - segment);
            break;
        }
        go = keep_waiting(&args.sync, &clock, WHAT, prs_place_in_order(&s->place, w.order), index, want, seen);
        go = __shfl_sync(~0u, go, 0);
    }
    fence_async_global(); /* as above */
}

/* Loads `rows` rows of a head to a stage. If the width is no multiple of a stage row, this takes several boxes, and the
 * last one reaches beyond the tensor. */
template <int WIDTH>
PRS_DEVICE void load_rows(uint8_t *to, const CUtensorMap *map, uint64_t *full, uint32_t rows, int32_t row,
                          const struct attention_coordinate &at)
{
    constexpr int columns = element<PRS_DTYPE_BF16>::in_row;
    if constexpr (WIDTH % columns == 0) {
        tma_load_5d(to, map, full, 0, row, 0, at.u, at.v);
    } else {
#pragma unroll
        for (int column = 0; column < WIDTH; column += columns)
            tma_load_5d(to + column / columns * rows * PRS_STAGE_ROW, map, full, column, row, 0, at.u, at.v);
    }
}

/* step: how many blocks were loaded before. */
template <class E, int KIND>
PRS_DEVICE void load_block(const struct prs_attention_args &args, const struct attention_memory &m,
                           const struct prs_attention_task &t, const typename walk_of<E::striped>::type &walk,
                           uint32_t step, uint32_t *ready)
{
    const struct prs_attention_schedule *s = &args.schedule;
    const struct prs_attention_walk &w = place_of(walk);
    uint32_t stage = stage_of(step), order = w.span / s->segments, segment = w.span % s->segments;
    uint64_t *full = (KIND == PRS_KEYS ? m.k_full : m.v_full) + stage;
    uint8_t *to = m.base + (KIND == PRS_KEYS ? E::at_k + stage * E::block_bytes : E::at_v + stage * E::values_bytes);
    int32_t row = (int32_t)(w.block * s->block_rows);
    if (order != 0)
        await_block<PRS_AWAIT_KEYS>(args, t, KIND, walk, ready);
    mbarrier_wait((KIND == PRS_KEYS ? m.k_empty : m.v_empty) + stage, phase_of(step) ^ 1);
    __syncwarp(); /* as in load_tiles(): no lane may look a phase late */
    if (threadIdx.x != 0)
        return;
    if constexpr (E::striped && KIND == PRS_KEYS)
        pass_step(m, stage, step_of(args, walk));
    mbarrier_expect(full, KIND == PRS_KEYS ? E::block_bytes : E::values_bytes);
    constexpr bool other_width = KIND == PRS_VALUES && E::value_dim != E::head_dim;
    const CUtensorMap *map = other_width ? &args.received_values : &args.received;
    struct attention_coordinate at = {0, 0};
    if (order == 0)
        map = KIND == PRS_KEYS ? &args.k : &args.v;
    if (order != 0 && args.planes == 0)
        at.u = (int32_t)prs_attention_stage(s, order, t.pair, KIND, segment);
    else
        at = attention_coordinate_of(args, t.batch, t.pair % s->heads_kv, s->heads_kv, segment);
    if (order != 0)
        at.v += (int32_t)(prs_attention_tensor(s, order, other_width ? PRS_KEYS : KIND) * args.planes);
    load_rows<KIND == PRS_KEYS ? E::head_dim : E::value_dim>(to, map, full, E::block, row, at);
}

template <class E>
PRS_DEVICE void load_queries(const struct prs_attention_args &args, const struct attention_memory &m,
                             const struct prs_attention_task &t, uint32_t phase)
{
    struct attention_coordinate at = attention_coordinate_of(args, t.batch, t.head, args.schedule.heads_q, t.segment);
    for (uint32_t i = 0; i < E::warpgroups; i++) {
        mbarrier_wait(&m.q_empty[i], phase ^ 1);
        __syncwarp(); /* as in load_tiles(): no lane may look a phase late */
        if (threadIdx.x % 32 == 0) {
            mbarrier_expect(&m.q_full[i], E::rows_bytes);
            load_rows<E::head_dim>(m.base + E::at_q + i * E::rows_bytes, &args.q, &m.q_full[i], 64,
                                   (int32_t)(t.tile * E::tile_rows + i * 64), at);
        }
    }
}

/* Claims pieces and loads in the order in which the consumers use the data: keys one block ahead of values. */
template <class E> PRS_DEVICE void load_tasks(const struct prs_attention_args &args, const struct attention_memory &m)
{
    bool claims = threadIdx.x == 0;
    uint32_t step = 0; /* number of the next block of keys */
    uint32_t piece = claims ? claim_piece(args) : 0;
    for (uint32_t turn = 0;; turn++) {
        piece = __shfl_sync(~0u, piece, 0);
        if (claims)
            pass_piece(m, turn, piece);
        if (piece >= args.pieces_count)
            break;
        struct prs_attention_task t = args.pieces[piece].task;
        typename walk_of<E::striped>::type w, before;
        begin_walk(args, args.pieces[piece], 1, &w);
        uint32_t keys_ready = 0, values_ready = 0;
        bool first = true, more = true;
        for (;;) {
            if (more)
                load_block<E, PRS_KEYS>(args, m, t, w, step, &keys_ready);
            else if (claims)
                piece = claim_piece(args); /* claimed now, so that it arrives while the last values are awaited */
            if (first)
                load_queries<E>(args, m, t, turn & 1);
            else
                load_block<E, PRS_VALUES>(args, m, t, before, step - 1, &values_ready);
            if (!more)
                break;
            step++;
            first = false;
            before = w;
            more = next_step(args, t, &w);
        }
    }
}

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* Ring attention, warp 0: loads queries, keys and values, and waits there for what other ranks send. */
#ifndef PERSEUS_FUSED_ATTENTION_LOAD_CUH
#define PERSEUS_FUSED_ATTENTION_LOAD_CUH

#include "fused/attention/cta.cuh"

/* Waits, and returns how many slabs have arrived, counted from `slab`; at least 1. Each lane reads one counter, so a
 * complete span costs one read per 32 slabs. Returns a large number when the wait gave up. WHAT: of which tensors. */
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
    fence_async_global(); /* arrivals were read by ordinary loads, the slabs are read by the copy engine */
}

/* step: how many blocks were loaded before. */
template <class E, int KIND>
PRS_DEVICE void load_block(const struct prs_attention_args &args, const struct attention_memory &m,
                           const struct prs_attention_task &t, const struct prs_attention_walk &w, uint32_t step,
                           uint32_t *ready)
{
    const struct prs_attention_schedule *s = &args.schedule;
    uint32_t stage = stage_of(step), order = w.span / s->segments, segment = w.span % s->segments;
    uint64_t *full = (KIND == PRS_KEYS ? m.k_full : m.v_full) + stage;
    uint8_t *to = m.base + (KIND == PRS_KEYS ? E::at_k : E::at_v) + stage * E::block_bytes;
    int32_t row = (int32_t)(w.block * s->block_rows);
    if (order != 0)
        await_block<PRS_AWAIT_KEYS>(args, t, KIND, w, ready);
    mbarrier_wait((KIND == PRS_KEYS ? m.k_empty : m.v_empty) + stage, phase_of(step) ^ 1);
    __syncwarp(); /* as in load_tiles(): no lane may look a phase late */
    if (threadIdx.x != 0)
        return;
    mbarrier_expect(full, E::block_bytes);
    const CUtensorMap *map = &args.received;
    struct attention_coordinate at = {0, 0};
    if (order == 0)
        map = KIND == PRS_KEYS ? &args.k : &args.v;
    if (order != 0 && args.planes == 0)
        at.u = (int32_t)prs_attention_stage(s, order, t.pair, KIND, segment);
    else
        at = attention_coordinate_of(args, t.batch, t.pair % s->heads_kv, s->heads_kv, segment);
    if (order != 0)
        at.v += (int32_t)(prs_attention_tensor(order, KIND) * args.planes);
    tma_load_5d(to, map, full, 0, row, 0, at.u, at.v);
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
            tma_load_5d(m.base + E::at_q + i * E::rows_bytes, &args.q, &m.q_full[i], 0,
                        (int32_t)(t.tile * E::tile_rows + i * 64), 0, at.u, at.v);
        }
    }
}

/* Claims pieces and loads in the order in which the consumers use the data: keys one block ahead of values. */
template <class E> PRS_DEVICE void load_tasks(const struct prs_attention_args &args, const struct attention_memory &m)
{
    const struct prs_attention_schedule *s = &args.schedule;
    bool claims = threadIdx.x == 0;
    uint32_t step = 0; /* of the next block of keys */
    uint32_t piece = claims ? claim_piece(args) : 0;
    for (uint32_t turn = 0;; turn++) {
        piece = __shfl_sync(~0u, piece, 0);
        if (claims)
            pass_piece(m, turn, piece);
        if (piece >= args.pieces_count)
            break;
        struct prs_attention_task t = args.pieces[piece].task;
        struct prs_attention_walk w = args.pieces[piece].begin, before;
        uint32_t keys_ready = 0, values_ready = 0;
        bool first = true, more = true;
        for (;;) {
            if (more)
                load_block<E, PRS_KEYS>(args, m, t, w, step, &keys_ready);
            else if (claims)
                piece = claim_piece(args); /* comes while the last values are awaited */
            if (first)
                load_queries<E>(args, m, t, turn & 1);
            else
                load_block<E, PRS_VALUES>(args, m, t, before, step - 1, &values_ready);
            if (!more)
                break;
            step++;
            first = false;
            before = w;
            more = prs_attention_next(s, &t, &w);
        }
    }
}

#endif

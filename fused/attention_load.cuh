/* SPDX-License-Identifier: Apache-2.0 */
/* Ring attention, warp 0: loads queries, keys and values, and waits there for what other ranks send. */
#ifndef PERSEUS_FUSED_ATTENTION_LOAD_CUH
#define PERSEUS_FUSED_ATTENTION_LOAD_CUH

#include "fused/attention_cta.cuh"

/* Where the keys, or the values, of a task are loaded from next. */
struct attention_stream {
    struct prs_attention_walk walk;
    uint32_t ready; /* slabs of the span that are known to be here */
    struct ring ring;
};

/* How many slabs from `slab` on have arrived, at least 1. All lanes look at once, so that a span that is complete costs
 * one look per 32 slabs. A large number when waiting was given up. */
PRS_DEVICE uint32_t await_slabs(const struct prs_attention_args &args, uint32_t pair, uint32_t kind, uint32_t span,
                                uint32_t slab)
{
    const struct prs_attention_schedule *s = &args.schedule;
    uint32_t lane = threadIdx.x % 32, distance = span / s->segments, mine = slab + lane;
    uint32_t index = prs_attention_arrival(s, distance, pair, kind, span % s->segments, mine);
    uint32_t want = mine < s->slabs ? launch_epoch(&args.sync) * prs_attention_arrivals(s, mine) : 0;
    struct wait_clock clock = {0, 0};
    for (;;) {
        uint32_t seen = mine < s->slabs ? load_acquire_sys(args.arrivals[0] + index) : 0;
        uint32_t missing = __ballot_sync(~0u, !prs_flag_reached(seen, want));
        if (missing == 0)
            return 32;
        if ((missing & 1) == 0)
            return __ffs(missing) - 1;
        bool go = keep_waiting(&args.sync, &clock, PRS_AWAIT_KEYS, (s->rank + distance) % s->world, index, want, seen);
        if (!__shfl_sync(~0u, go, 0))
            return ~0u >> 2;
    }
}

/* The stream's block is here. */
PRS_DEVICE void await_block(const struct prs_attention_args &args, uint32_t pair, uint32_t kind,
                            struct attention_stream *x)
{
    const struct prs_attention_schedule *s = &args.schedule;
    uint32_t slab_rows = s->slab_chunks * s->chunk_rows, end = (x->walk.block + 1) * s->block_rows;
    if (x->walk.block == 0)
        x->ready = 0;
    if (end > s->segment_rows)
        end = s->segment_rows;
    if (x->ready >= s->slabs || x->ready * slab_rows >= end)
        return;
    while (x->ready < s->slabs && x->ready * slab_rows < end)
        x->ready += await_slabs(args, pair, kind, x->walk.span, x->ready);
    fence_async_global(); /* arrivals were read by ordinary loads, the slabs are read by the copy engine */
}

template <class E>
PRS_DEVICE void load_block(const struct prs_attention_args &args, const struct attention_memory &m,
                           const struct prs_attention_task &t, uint32_t kind, struct attention_stream *x)
{
    const struct prs_attention_schedule *s = &args.schedule;
    uint64_t *full = (kind == PRS_KEYS ? m.k_full : m.v_full) + x->ring.stage;
    uint64_t *empty = (kind == PRS_KEYS ? m.k_empty : m.v_empty) + x->ring.stage;
    uint8_t *to = m.base + (kind == PRS_KEYS ? E::at_k : E::at_v) + x->ring.stage * E::block_bytes;
    uint32_t distance = x->walk.span / s->segments, segment = x->walk.span % s->segments;
    int32_t row = (int32_t)(x->walk.block * s->block_rows);
    if (distance != 0)
        await_block(args, t.pair, kind, x);
    mbarrier_wait(empty, x->ring.phase ^ 1);
    ring_next<PRS_ATTENTION_STAGES>(&x->ring);
    if (threadIdx.x % 32 != 0)
        return;
    mbarrier_expect(full, E::block_bytes);
    if (distance != 0) {
        tma_load_5d(to, &args.received, full, 0, row, 0,
                    (int32_t)prs_attention_stage(s, distance, t.pair, kind, segment), 0);
    } else {
        struct attention_place at = attention_place_of(args, t.batch, t.pair % s->heads_kv, s->heads_kv, segment);
        tma_load_5d(to, kind == PRS_KEYS ? &args.k : &args.v, full, 0, row, 0, at.u, at.v);
    }
}

template <class E>
PRS_DEVICE void load_queries(const struct prs_attention_args &args, const struct attention_memory &m,
                             const struct prs_attention_task &t, uint32_t phase)
{
    struct attention_place at = attention_place_of(args, t.batch, t.head, args.schedule.heads_q, t.segment);
    for (uint32_t i = 0; i < E::warpgroups; i++) {
        mbarrier_wait(&m.q_empty[i], phase ^ 1);
        if (threadIdx.x % 32 == 0) {
            mbarrier_expect(&m.q_full[i], E::rows_bytes);
            tma_load_5d(m.base + E::at_q + i * E::rows_bytes, &args.q, &m.q_full[i], 0,
                        (int32_t)(t.tile * E::tile_rows + i * 64), 0, at.u, at.v);
        }
    }
}

/* In the order in which the consumers want them: keys one block ahead of values. */
template <class E> PRS_DEVICE void load_tasks(const struct prs_attention_args &args, const struct attention_memory &m)
{
    const struct prs_attention_schedule *s = &args.schedule;
    struct attention_stream keys = {{0, 0, 0, false}, 0, {0, 0}}, values = keys;
    for (uint32_t turn = 0; turn * gridDim.x < s->tasks; turn++) {
        struct prs_attention_task t;
        uint32_t at = prs_attention_position(s, blockIdx.x, gridDim.x, turn);
        if (at >= s->tasks)
            break; /* only the last turn is short */
        prs_attention_task_at(s, at, &t);
        prs_attention_begin(s, &t, &keys.walk);
        values.walk = keys.walk;
        load_block<E>(args, m, t, PRS_KEYS, &keys);
        load_queries<E>(args, m, t, turn & 1);
        while (prs_attention_next(s, &t, &keys.walk)) {
            load_block<E>(args, m, t, PRS_KEYS, &keys);
            load_block<E>(args, m, t, PRS_VALUES, &values);
            prs_attention_next(s, &t, &values.walk);
        }
        load_block<E>(args, m, t, PRS_VALUES, &values);
    }
}

#endif

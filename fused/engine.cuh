/* SPDX-License-Identifier: Apache-2.0 */
/* The tile engine. A cluster of two CTAs computes one unit (schedule.h): each CTA one 128 x 256 tile, sharing the
 * columns of B, of which each loads half and multicasts it. In a CTA: warp 0          load_tiles     fills the stage
 * ring, gates on other ranks' data warps 1, 2      store_tiles    one per consumer warpgroup: bulk-stores finished
 * slabs, raises flags once they have landed warp 3          push_block or await_broadcast (all-gather, all-reduce)
 *   warps 4..11     multiply_tiles two consumer warpgroups, 64 rows each
 * Consumers never wait for another GPU, except through the stage ring and the store buffers. */
#ifndef PERSEUS_FUSED_ENGINE_CUH
#define PERSEUS_FUSED_ENGINE_CUH

#include "fused/layout.h"
#include "fused/ptx.cuh"
#include "fused/sync.cuh"

enum { CONSUMER_WARPS = 8, PRODUCER_REGISTERS = 56, CONSUMER_REGISTERS = 224 };

/* Compile-time shape of one kernel. */
template <int KIND, int B_N_MAJOR> struct engine {
    static constexpr int kind = KIND;
    static constexpr int b_n_major = B_N_MAJOR;
    static constexpr bool gathers = KIND == PRS_KIND_ALLGATHER;
    static constexpr bool reduces = KIND == PRS_KIND_REDUCE_SCATTER || KIND == PRS_KIND_ALLREDUCE;
    static constexpr bool broadcasts = KIND == PRS_KIND_ALLREDUCE;
    static constexpr int slabs = gathers ? 1 : 2; /* store buffers per warpgroup */
};

struct cta_memory {
    uint8_t *base;
    uint64_t *full, *empty;     /* [PRS_STAGES] */
    uint64_t *c_full, *c_empty; /* [2 warpgroups][2 slabs] */
    uint64_t *pushed;           /* [PRS_PUSH_SLOTS] */
};

struct cta_place {
    uint32_t cluster, clusters, rank; /* rank: of the CTA in its cluster */
    uint32_t epoch;
};

/* Position in the stage ring; runs on across units. */
struct ring {
    uint32_t stage, phase;
};

PRS_DEVICE void ring_next(struct ring *r)
{
    if (++r->stage == PRS_STAGES) {
        r->stage = 0;
        r->phase ^= 1;
    }
}

PRS_DEVICE struct cta_memory cta_memory_map(uint8_t *base)
{
    struct cta_memory m;
    m.base = base;
    m.full = (uint64_t *)(base + PRS_SMEM_BARRIERS);
    m.empty = m.full + PRS_STAGES;
    m.c_full = m.empty + PRS_STAGES;
    m.c_empty = m.c_full + 4;
    m.pushed = m.c_empty + 4;
    return m;
}

PRS_DEVICE void cta_memory_init(const struct cta_memory *m)
{
    for (int i = 0; i < PRS_STAGES; i++) {
        mbarrier_init(&m->full[i], 1);
        mbarrier_init(&m->empty[i], 2 * CONSUMER_WARPS); /* both CTAs read what either multicasts */
    }
    for (int i = 0; i < 4; i++) {
        mbarrier_init(&m->c_full[i], 4);
        mbarrier_init(&m->c_empty[i], 1);
    }
    for (int i = 0; i < PRS_PUSH_SLOTS; i++)
        mbarrier_init(&m->pushed[i], 1);
    mbarrier_init_fence();
}

/* ---- warp 0: load -------------------------------------------------------------------------------------------------
 */
/* All-gather: how many strips from `strip` on have arrived, at least 1. All lanes look at once, so that a row that is
 * complete costs one look per 32 strips. Returns a large number when waiting was given up. */
PRS_DEVICE uint32_t await_strips(const struct prs_kernel_args &args, const struct cta_place &at, uint32_t slot,
                                 uint32_t row_tile, uint32_t strip)
{
    const struct prs_schedule *s = &args.schedule;
    uint32_t lane = threadIdx.x % 32, mine = strip + lane, strips = prs_schedule_strips(s);
    uint32_t index = prs_schedule_arrival(s, slot, row_tile, mine);
    uint32_t want = mine < strips ? at.epoch * prs_schedule_arrivals(s, row_tile, mine) : 0;
    struct wait_clock clock = {0, 0};
    for (;;) {
        uint32_t seen = mine < strips ? load_acquire_sys(args.flags[0] + index) : 0;
        uint32_t missing = __ballot_sync(~0u, !reached(seen, want));
        if (missing == 0)
            return 32;
        if ((missing & 1) == 0)
            return __ffs(missing) - 1;
        bool go = keep_waiting(&args, &clock, PRS_AWAIT_CHUNK, (s->rank + 1 + slot) % s->world, index, want, seen);
        if (!__shfl_sync(~0u, go, 0))
            return ~0u >> 1;
    }
}

/* tiles: the rows of A as pushed by another rank, swizzled 16 KB tiles along K; NULL: from the tensor map. */
template <class E>
PRS_DEVICE void load_stage(const struct prs_kernel_args &args, const struct cta_memory &m, const struct cta_place &at,
                           uint32_t stage, const uint8_t *tiles, int32_t row, int32_t column, uint32_t step)
{
    uint64_t *bar = &m.full[stage];
    uint8_t *b = m.base + PRS_SMEM_B + stage * PRS_STAGE_B + at.rank * (PRS_STAGE_B / 2);
    int32_t k = (int32_t)step * PRS_TILE_K, n = column * PRS_TILE_N + (int32_t)at.rank * (PRS_TILE_N / 2);
    mbarrier_expect(bar, PRS_STAGE);
    if (E::gathers && tiles != NULL)
        bulk_load(m.base + PRS_SMEM_A + stage * PRS_STAGE_A, tiles + (uint64_t)step * PRS_STAGE_A, PRS_STAGE_A, bar);
    else
        tma_load_2d(m.base + PRS_SMEM_A + stage * PRS_STAGE_A, &args.a, bar, k, row);
    if (E::b_n_major) {
        tma_load_2d_multicast(b, &args.b, bar, n, k, 3);
        tma_load_2d_multicast(b + PRS_STAGE_B / 4, &args.b, bar, n + PRS_TILE_N / 4, k, 3);
    } else {
        tma_load_2d_multicast(b, &args.b, bar, k, n, 3);
    }
}

/* After the K steps of an own tile: the other ranks' partial sums, as further stages of the ring. */
PRS_DEVICE void load_partials(const struct prs_kernel_args &args, const struct cta_memory &m,
                              const struct cta_place &at, struct ring *r, uint32_t tile)
{
    const struct prs_schedule *s = &args.schedule;
    uint32_t lane = threadIdx.x % 32, slots = s->world - 1;
    const uint8_t *bank = args.staging[0] + (at.epoch & 1) * args.staging_bank_bytes;
    if (lane < 2 * slots) {
        uint32_t slot = lane / 2, index = prs_schedule_partial_flag(s, slot, tile, lane & 1);
        wait_flag(&args, args.flags[0] + index, at.epoch, PRS_AWAIT_PARTIAL, (s->rank + 1 + slot) % s->world, index);
    }
    __syncwarp();
    fence_async_global(); /* the flags were read by ordinary loads, the sums are read by the copy engine */
    for (uint32_t first = 0; first < slots; first += PRS_PARTIALS_PER_STAGE) {
        uint32_t count = slots - first < PRS_PARTIALS_PER_STAGE ? slots - first : PRS_PARTIALS_PER_STAGE;
        for (uint32_t quarter = 0; quarter < 4; quarter++, ring_next(r)) {
            mbarrier_wait(&m.empty[r->stage], r->phase ^ 1);
            if (lane == 0) {
                mbarrier_expect(&m.full[r->stage], count * PRS_PARTIAL_QUARTER);
                for (uint32_t i = 0; i < count; i++) {
                    /* Sums 1 and 2 fill the B part of the stage, sum 0 the A part. */
                    uint8_t *dst = i == 0
                                       ? m.base + PRS_SMEM_A + r->stage * PRS_STAGE_A
                                       : m.base + PRS_SMEM_B + r->stage * PRS_STAGE_B + (i - 1) * PRS_PARTIAL_QUARTER;
                    bulk_load(dst, bank + prs_layout_partial(s, first + i, tile, quarter), PRS_PARTIAL_QUARTER,
                              &m.full[r->stage]);
                }
            }
        }
    }
}

template <class E>
PRS_DEVICE void load_tiles(const struct prs_kernel_args &args, const struct cta_memory &m, const struct cta_place &at)
{
    const struct prs_schedule *s = &args.schedule;
    uint32_t lane = threadIdx.x % 32;
    struct ring r = {0, 0};
    struct prs_cursor cursor = {0, 0};
    for (uint32_t unit = at.cluster; unit < s->units; unit += at.clusters) {
        struct prs_unit u;
        prs_schedule_unit(s, &cursor, unit, &u);
        bool own = u.block == s->rank;
        const uint8_t *tiles = NULL;
        uint32_t row = u.pair * PRS_PAIR_M + at.rank * PRS_TILE_M, ready = 0;
        uint32_t slot = prs_schedule_slot(s, u.block, s->rank), row_tile = u.pair * 2 + at.rank;
        if (E::gathers && !own) {
            tiles =
                args.staging[0] + (at.epoch & 1) * args.staging_bank_bytes + prs_layout_gathered(s, slot, row_tile, 0);
        } else if (E::reduces) {
            row += u.block * s->block_rows;
        }
        for (uint32_t step = 0; step < s->k_steps; step++, ring_next(&r)) {
            if (E::gathers && !own && step % PRS_STRIP_STEPS == 0) {
                if (ready == 0) {
                    ready = await_strips(args, at, slot, row_tile, step / PRS_STRIP_STEPS);
                    fence_async_global(); /* arrivals were read by ordinary loads, A is read by the copy engine */
                }
                ready--;
            }
            mbarrier_wait(&m.empty[r.stage], r.phase ^ 1);
            if (lane == 0)
                load_stage<E>(args, m, at, r.stage, tiles, (int32_t)row, (int32_t)u.column, step);
        }
        if (E::reduces && own)
            load_partials(args, m, at, &r, prs_schedule_tile(s, &u, at.rank));
    }
}

/* ---- warps 4..11: multiply ----------------------------------------------------------------------------------------
 */
/* Shared-memory matrix descriptors, 128-byte swizzle. K-major: rows of 128 bytes, 8-row groups 1024 bytes apart.
 * N-major: boxes of 64 K rows x 64 columns, 8192 bytes apart; 8-row groups along K 1024 bytes apart. */
PRS_DEVICE uint64_t matrix_descriptor(uint32_t address, uint32_t leading_bytes)
{
    return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)(leading_bytes >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 |
           (uint64_t)1 << 62;
}

/* One lane per CTA of the cluster says: this warp has read the stage. */
PRS_DEVICE void release_stage(const struct cta_memory &m, uint32_t stage)
{
    uint32_t lane = threadIdx.x % 32;
    if (lane < 2)
        mbarrier_arrive_at(&m.empty[stage], lane);
}

/* Issues one stage's products and returns while they run. */
template <class E>
PRS_DEVICE void multiply_stage(float (&d)[128], const struct cta_memory &m, const struct ring &r, uint32_t half,
                               bool add)
{
    uint32_t base = smem_address(m.base);
    uint64_t a = matrix_descriptor(base + PRS_SMEM_A + half * (PRS_STAGE_A / 2) + r.stage * PRS_STAGE_A, 16);
    uint64_t b = matrix_descriptor(base + PRS_SMEM_B + r.stage * PRS_STAGE_B, E::b_n_major ? 8192 : 16);
    mbarrier_wait(&m.full[r.stage], r.phase);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++)
        wgmma_m64n256k16<E::b_n_major>(d, a + k * 2, b + k * (E::b_n_major ? 128 : 2), add || k != 0);
    wgmma_commit();
}

/* d += the other ranks' partial sums, in slot order. */
PRS_DEVICE void add_partials(float (&d)[128], const struct cta_memory &m, struct ring *r, uint32_t half, uint32_t slots)
{
    uint32_t mine = half * PRS_SLAB + (threadIdx.x % 128) * 16;
    uint32_t a_base = smem_address(m.base) + PRS_SMEM_A + mine, b_base = smem_address(m.base) + PRS_SMEM_B + mine;
    for (uint32_t first = 0; first < slots; first += PRS_PARTIALS_PER_STAGE) {
        uint32_t count = slots - first < PRS_PARTIALS_PER_STAGE ? slots - first : PRS_PARTIALS_PER_STAGE;
#pragma unroll
        for (int quarter = 0; quarter < 4; quarter++) {
            mbarrier_wait(&m.full[r->stage], r->phase);
#pragma unroll
            for (int i = 0; i < PRS_PARTIALS_PER_STAGE; i++) {
                uint32_t from = i == 0 ? a_base + r->stage * PRS_STAGE_A
                                       : b_base + r->stage * PRS_STAGE_B + (i - 1) * PRS_PARTIAL_QUARTER;
                if (i < (int)count) {
#pragma unroll
                    for (int v = 0; v < 4; v++) {
                        uint4 x = load_shared_v4(from + v * 2048);
                        float *to = &d[quarter * 32 + v * 8];
                        to[0] += bf16_low(x.x), to[1] += bf16_high(x.x);
                        to[2] += bf16_low(x.y), to[3] += bf16_high(x.y);
                        to[4] += bf16_low(x.z), to[5] += bf16_high(x.z);
                        to[6] += bf16_low(x.w), to[7] += bf16_high(x.w);
                    }
                }
            }
            __syncwarp(); /* all lanes have read before one releases */
            release_stage(m, r->stage);
            ring_next(r);
        }
    }
}

/* One quarter of a tile as bf16 pairs: what one slab holds, 16 registers. */
PRS_DEVICE void pack_quarter(uint32_t (&to)[16], const float *d)
{
#pragma unroll
    for (int i = 0; i < 16; i++)
        to[i] = pack_bf16x2(d[2 * i], d[2 * i + 1]);
}

/* Slab in fragment order, for another rank's add_partials: thread t's 16-byte vector v at v * 2048 + t * 16. */
PRS_DEVICE void fill_partial_slab(const uint32_t (&x)[16], uint32_t slab)
{
    uint32_t to = slab + (threadIdx.x % 128) * 16;
#pragma unroll
    for (int v = 0; v < 4; v++)
        store_shared_v4(to + v * 2048, x[4 * v], x[4 * v + 1], x[4 * v + 2], x[4 * v + 3]);
}

/* Slab as 64 rows of 128 bytes, swizzled as the copy engine expects. */
PRS_DEVICE void fill_result_slab(const uint32_t (&x)[16], uint32_t slab)
{
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    uint32_t row = warp * 16 + (lane / 8 & 1) * 8 + lane % 8;
    uint32_t line = slab + row * 128, right = lane / 16;
#pragma unroll
    for (int v = 0; v < 4; v++)
        store_matrix_x4(line + (((2 * v + right) ^ (row & 7)) << 4), x[4 * v], x[4 * v + 1], x[4 * v + 2],
                        x[4 * v + 3]);
}

/* The ring of store buffers of one warpgroup, as its consumers see it. */
struct slab_ring {
    uint32_t filled; /* slabs handed over so far */
};

template <class E> PRS_DEVICE uint32_t next_slab(const struct slab_ring &ring, uint32_t half)
{
    return half * E::slabs + ring.filled % E::slabs;
}

/* True for a whole warp, or for none of it. */
template <class E> PRS_DEVICE bool slab_is_free(const struct cta_memory &m, const struct slab_ring &ring, uint32_t half)
{
    uint32_t phase = ring.filled / E::slabs & 1;
    return __all_sync(~0u, mbarrier_test(&m.c_empty[next_slab<E>(ring, half)], phase ^ 1));
}

/* Hands one packed quarter to this warpgroup's store warp; waits until a slab is free. */
template <class E>
PRS_DEVICE void hand_over_quarter(const uint32_t (&x)[16], const struct cta_memory &m, uint32_t half,
                                  struct slab_ring *ring, bool partial)
{
    uint32_t slab = next_slab<E>(*ring, half), phase = ring->filled / E::slabs & 1;
    uint32_t to = smem_address(m.base) + PRS_SMEM_C + slab * PRS_SLAB;
    mbarrier_wait(&m.c_empty[slab], phase ^ 1);
    if (E::reduces && partial)
        fill_partial_slab(x, to);
    else
        fill_result_slab(x, to);
    fence_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        mbarrier_arrive(&m.c_full[slab]);
    ring->filled++;
}

/* The quarters of the last tile for which no slab was free. They wait in registers, and are handed over during the next
 * tile's products as slabs come free: with them a whole tile can wait for the link while the tensor cores go on. Each
 * warp decides for itself. */
template <class E> struct left_over {
    static constexpr int count = PRS_SLABS_PER_TILE - E::slabs;
    uint32_t quarter[count][16];
    uint32_t next; /* count: nothing left */
    bool partial;
};

/* Registers have no run-time index: hence the unrolled loops over constants. */
template <class E>
PRS_DEVICE void hand_over_next(struct left_over<E> *left, const struct cta_memory &m, uint32_t half,
                               struct slab_ring *ring)
{
    uint32_t now = left->next;
#pragma unroll
    for (int i = 0; i < left_over<E>::count; i++)
        if (now == i)
            hand_over_quarter<E>(left->quarter[i], m, half, ring, left->partial);
    left->next = now + 1;
}

template <class E>
PRS_DEVICE void hand_over_rest(struct left_over<E> *left, const struct cta_memory &m, uint32_t half,
                               struct slab_ring *ring)
{
    uint32_t now = left->next;
#pragma unroll
    for (int i = 0; i < left_over<E>::count; i++)
        if (now <= i)
            hand_over_quarter<E>(left->quarter[i], m, half, ring, left->partial);
    left->next = left_over<E>::count;
}

template <class E>
PRS_DEVICE void hand_over_tile(const float (&d)[128], const struct cta_memory &m, uint32_t half, struct slab_ring *ring,
                               bool partial, struct left_over<E> *left)
{
    hand_over_rest<E>(left, m, half, ring);
#pragma unroll
    for (int i = 0; i < left_over<E>::count; i++)
        pack_quarter(left->quarter[i], &d[(E::slabs + i) * 32]);
    left->next = 0;
    left->partial = partial;
#pragma unroll
    for (int i = 0; i < E::slabs; i++) {
        uint32_t x[16];
        pack_quarter(x, &d[i * 32]);
        hand_over_quarter<E>(x, m, half, ring, partial);
    }
}

/* The K loop of one tile. One group of tensor-core work stays in flight while the stage before it is released. */
template <class E>
PRS_DEVICE void multiply_tile(float (&d)[128], const struct cta_memory &m, struct ring *r, uint32_t half,
                              uint32_t steps, struct left_over<E> *left, struct slab_ring *slabs)
{
    uint32_t before = 0;
    for (uint32_t step = 0; step < steps; step++) {
        multiply_stage<E>(d, m, *r, half, step != 0);
        if (step != 0) {
            wgmma_wait<1>();
            release_stage(m, before);
        }
        if (left->next < left_over<E>::count && slab_is_free<E>(m, *slabs, half))
            hand_over_next<E>(left, m, half, slabs);
        before = r->stage;
        ring_next(r);
    }
    wgmma_wait<0>();
    release_stage(m, before);
}

template <class E>
PRS_DEVICE void multiply_tiles(const struct prs_kernel_args &args, const struct cta_memory &m,
                               const struct cta_place &at)
{
    const struct prs_schedule *s = &args.schedule;
    uint32_t half = threadIdx.x / 128 - 1;
    struct slab_ring slabs = {0};
    struct left_over<E> left;
    struct ring r = {0, 0};
    struct prs_cursor cursor = {0, 0};
    float d[128];
    left.next = left_over<E>::count;
    for (uint32_t unit = at.cluster; unit < s->units; unit += at.clusters) {
        bool partial = false;
        multiply_tile<E>(d, m, &r, half, s->k_steps, &left, &slabs);
        if (E::reduces) {
            struct prs_unit u;
            prs_schedule_unit(s, &cursor, unit, &u);
            partial = u.block != s->rank;
            if (!partial) {
                /* The other ranks may be waiting for what is left over here before they send what is awaited now. */
                hand_over_rest<E>(&left, m, half, &slabs);
                add_partials(d, m, &r, half, s->world - 1);
            }
        }
        hand_over_tile<E>(d, m, half, &slabs, partial, &left);
    }
    hand_over_rest<E>(&left, m, half, &slabs);
}

/* ---- warps 1, 2: store --------------------------------------------------------------------------------------------
 */
template <class E>
PRS_DEVICE void store_slab(const struct prs_kernel_args &args, const struct cta_place &at, const struct prs_unit &u,
                           const uint8_t *slab, uint32_t half, uint32_t quarter)
{
    const struct prs_schedule *s = &args.schedule;
    if (E::reduces && u.block != s->rank) {
        uint32_t peer = (u.block + s->world - s->rank) % s->world, slot = prs_schedule_slot(s, s->rank, u.block);
        uint8_t *bank = args.staging[peer] + (at.epoch & 1) * args.staging_bank_bytes;
        uint64_t where = prs_layout_partial(s, slot, prs_schedule_tile(s, &u, at.rank), quarter);
        bulk_store(bank + where + half * PRS_SLAB, slab, PRS_SLAB);
        return;
    }
    int32_t x = (int32_t)(u.column * PRS_TILE_N + quarter * 64);
    int32_t y = (int32_t)(u.pair * PRS_PAIR_M + at.rank * PRS_TILE_M + half * 64);
    int32_t z = E::kind == PRS_KIND_REDUCE_SCATTER ? 0 : (int32_t)u.block;
    if (x >= (int32_t)args.n || y >= (int32_t)s->block_rows)
        return;
    for (uint32_t p = 0; p < (E::broadcasts ? s->world : 1); p++)
        tma_store_3d(&args.c[p], slab, x, y, z);
}

/* The tile has landed: tell whoever waits for it. */
template <class E>
PRS_DEVICE void signal_tile(const struct prs_kernel_args &args, const struct cta_place &at, const struct prs_unit &u,
                            uint32_t half)
{
    const struct prs_schedule *s = &args.schedule;
    if (u.block != s->rank) {
        uint32_t peer = (u.block + s->world - s->rank) % s->world, slot = prs_schedule_slot(s, s->rank, u.block);
        uint32_t tile = prs_schedule_tile(s, &u, at.rank);
        store_release_sys(args.flags[peer] + prs_schedule_partial_flag(s, slot, tile, half), at.epoch);
    } else if (E::broadcasts) {
        fence_release_sys(); /* R2: one fence for all ranks. Pairs with A1 in await_broadcast(). */
        for (uint32_t p = 1; p < s->world; p++)
            add_relaxed_sys(args.done[p] + prs_schedule_slot(s, s->rank, (s->rank + p) % s->world), 1);
    }
}

template <class E>
PRS_DEVICE void store_tiles(const struct prs_kernel_args &args, const struct cta_memory &m, const struct cta_place &at,
                            uint32_t half)
{
    const struct prs_schedule *s = &args.schedule;
    uint32_t stored = 0;
    struct prs_cursor cursor = {0, 0};
    for (uint32_t unit = at.cluster; unit < s->units; unit += at.clusters) {
        struct prs_unit u;
        prs_schedule_unit(s, &cursor, unit, &u);
        for (uint32_t quarter = 0; quarter < PRS_SLABS_PER_TILE; quarter++, stored++) {
            uint32_t slab = half * E::slabs + stored % E::slabs, phase = stored / E::slabs & 1;
            mbarrier_wait(&m.c_full[slab], phase);
            store_slab<E>(args, at, u, m.base + PRS_SMEM_C + slab * PRS_SLAB, half, quarter);
            bulk_commit();
            bulk_wait_read<E::slabs - 1>();
            if (E::slabs == 1)
                mbarrier_arrive(&m.c_empty[slab]);
            else if (quarter != 0)
                mbarrier_arrive(&m.c_empty[half * E::slabs + (stored - 1) % E::slabs]);
        }
        bulk_wait_read<0>();
        if (E::slabs == 2)
            mbarrier_arrive(&m.c_empty[half * E::slabs + (stored - 1) % E::slabs]);
        if (E::reduces) {
            bulk_wait_done<0>();
            signal_tile<E>(args, at, u, half);
        }
    }
    bulk_wait_done<0>();
}

/* ---- warp 3: push the own block of A, or wait for the others' results -----------------------------------------------
 */
PRS_DEVICE void push_chunk(const struct prs_kernel_args &args, const struct cta_place &at, const uint8_t *slot,
                           const struct prs_chunk &c)
{
    const struct prs_schedule *s = &args.schedule;
    for (uint32_t p = 1; p < s->world; p++) {
        uint32_t owner = (s->rank + p) % s->world, place = prs_schedule_slot(s, s->rank, owner);
        uint8_t *bank = args.staging[p] + (at.epoch & 1) * args.staging_bank_bytes;
        bulk_store(bank + prs_layout_gathered(s, place, c.row / PRS_TILE_M, c.step) +
                       c.row % PRS_TILE_M / PRS_PUSH_ROWS * PRS_PUSH_BYTES,
                   slot, PRS_PUSH_BYTES);
    }
    bulk_commit();
}

PRS_DEVICE void signal_chunk(const struct prs_kernel_args &args, const struct prs_chunk &c)
{
    const struct prs_schedule *s = &args.schedule;
    fence_release_sys(); /* R3: one fence for all ranks. Pairs with the acquire in await_strips(). */
    for (uint32_t p = 1; p < s->world; p++) {
        uint32_t owner = (s->rank + p) % s->world, place = prs_schedule_slot(s, s->rank, owner);
        add_relaxed_sys(args.flags[p] + prs_schedule_arrival(s, place, c.row / PRS_TILE_M, c.step / PRS_STRIP_STEPS),
                        1);
    }
}

/* Two chunks are under way at any time; a chunk is signalled once it has landed everywhere, two chunks later. */
PRS_DEVICE void push_block(const struct prs_kernel_args &args, const struct cta_memory &m, const struct cta_place &at)
{
    const struct prs_schedule *s = &args.schedule;
    uint32_t first = at.cluster * 2 + at.rank, chunks = prs_schedule_chunks(s), count = 0;
    struct prs_chunk c, before = {0, 0}, landed = {0, 0}; /* chunks i, i - 1, i - 2 */
    if (first >= args.push_ctas)
        return;
    for (uint32_t i = first; i < chunks; i += args.push_ctas, count++) {
        uint32_t slot = count % PRS_PUSH_SLOTS, phase = count / PRS_PUSH_SLOTS & 1;
        uint8_t *buffer = m.base + PRS_SMEM_PUSH + slot * PRS_PUSH_BYTES;
        prs_schedule_chunk(s, i, &c);
        bulk_wait_read<PRS_PUSH_SLOTS - 1>();
        mbarrier_expect(&m.pushed[slot], PRS_PUSH_BYTES);
        tma_load_2d(buffer, &args.push_source, &m.pushed[slot], (int32_t)(c.step * PRS_TILE_K), (int32_t)c.row);
        mbarrier_wait(&m.pushed[slot], phase);
        push_chunk(args, at, buffer, c);
        bulk_wait_done<PRS_PUSH_SLOTS>();
        if (count >= PRS_PUSH_SLOTS)
            signal_chunk(args, landed);
        landed = before;
        before = c;
    }
    bulk_wait_done<0>();
    if (count > 1)
        signal_chunk(args, landed);
    if (count > 0)
        signal_chunk(args, before);
}

/* All-reduce: the launch must not end before the other ranks' results have landed here. */
PRS_DEVICE void await_broadcast(const struct prs_kernel_args &args, const struct cta_place &at)
{
    const struct prs_schedule *s = &args.schedule;
    uint32_t slot = threadIdx.x % 32, want = at.epoch * prs_schedule_tiles(s) * 2;
    if (slot + 1 < s->world)
        wait_flag(&args, args.done[0] + slot, want, PRS_AWAIT_BROADCAST, (s->rank + 1 + slot) % s->world, slot);
}

/* ---- entry --------------------------------------------------------------------------------------------------------
 */
template <class E>
PRS_DEVICE void produce(const struct prs_kernel_args &args, const struct cta_memory &m, const struct cta_place &at)
{
    switch (threadIdx.x / 32) {
    case 0:
        load_tiles<E>(args, m, at);
        break;
    case 1:
    case 2:
        if (threadIdx.x % 32 == 0)
            store_tiles<E>(args, m, at, threadIdx.x / 32 - 1);
        break;
    default:
        if (E::gathers && threadIdx.x % 32 == 0)
            push_block(args, m, at);
        if (E::broadcasts && at.cluster == 0 && at.rank == 0)
            await_broadcast(args, at);
    }
}

/* Made anew by each role: a value that lives across the roles is spilled by the compiler. */
template <class E> PRS_DEVICE struct cta_place cta_place_here(const struct prs_kernel_args &args)
{
    struct cta_place at = {blockIdx.x / 2, gridDim.x / 2, blockIdx.x % 2, 0};
    if (E::kind != PRS_KIND_GEMM)
        at.epoch = launch_epoch(&args);
    return at;
}

template <class E>
__global__ void __launch_bounds__(PRS_THREADS, 1) fused_kernel(const __grid_constant__ struct prs_kernel_args args)
{
    extern __shared__ __align__(1024) uint8_t shared[];
    struct cta_memory m = cta_memory_map(shared);
    if (threadIdx.x == 0)
        cta_memory_init(&m);
    if (threadIdx.x == 32) {
        tensor_map_prefetch(&args.a);
        tensor_map_prefetch(&args.b);
        tensor_map_prefetch(&args.c[0]);
    }
    cluster_arrive();
    cluster_wait(); /* the other CTA's barriers exist before anything is multicast to it */

    if (threadIdx.x < 128) {
        registers_give<PRODUCER_REGISTERS>();
        produce<E>(args, m, cta_place_here<E>(args));
    } else {
        registers_take<CONSUMER_REGISTERS>();
        multiply_tiles<E>(args, m, cta_place_here<E>(args));
    }
    __syncwarp();
    cluster_arrive();
    cluster_wait(); /* the other CTA may still arrive on this CTA's barriers until here */
    if (E::kind != PRS_KIND_GEMM && threadIdx.x == 0)
        leave_epoch(&args, launch_epoch(&args), gridDim.x);
}

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* The tile engine. A cluster of two CTAs computes one unit (schedule.h): each CTA one tile of 128 x 256, or
 * 128 x 192. They share the columns of B, of which each loads a part and multicasts it. In a CTA:
 *   warp 0        load_tiles      fills the stages, waits for other ranks' data
 *   warps 1, 2    store_tiles     one per consumer warpgroup: stores finished slabs, raises flags once they have landed
 *   warp 3        push_blocks and keep_rows (all-gather), or await_broadcast (all-reduce)
 *   warps 4..11   multiply_tiles  two consumer warpgroups, 64 rows each
 * Consumers never wait for another GPU, except through the stages and the store buffers. */
#ifndef PERSEUS_FUSED_GEMM_ENGINE_CUH
#define PERSEUS_FUSED_GEMM_ENGINE_CUH

#include "fused/gemm/keep.cuh"
#include "fused/gemm/load.cuh"
#include "fused/gemm/multiply.cuh"
#include "fused/gemm/push.cuh"
#include "fused/gemm/store.cuh"

/* Compile-time shape of one kernel. */
template <int TYPE, int OP, int B_N_MAJOR, bool FAR = false, bool PROMOTES = false, int COLUMNS = PRS_TILE_N>
struct engine : tile_columns<COLUMNS, element<TYPE>::sum> {
    static constexpr int type = TYPE; /* of A and B: enum prs_dtype */
    static constexpr int op = OP;
    static constexpr int b_n_major = B_N_MAJOR;
    static constexpr bool gathers = OP == PRS_GEMM_ALLGATHER;
    static constexpr bool reduces = OP == PRS_GEMM_REDUCE_SCATTER || OP == PRS_GEMM_ALLREDUCE;
    static constexpr bool broadcasts = OP == PRS_GEMM_ALLREDUCE;
    static constexpr bool far = FAR; /* several nodes: a kernel of its own, so that one node pays nothing for it */
    static constexpr bool scaled = TYPE == PRS_DTYPE_E4M3;
    static constexpr bool promotes = PROMOTES;            /* scales.cuh */
    static constexpr bool quantises = scaled && !reduces; /* the result may be e4m3, too */
    static constexpr bool told = PROMOTES;                /* unit.cuh */
    /* Store buffers per warpgroup. An instance that promotes has no registers for the rest of a tile. If it sends sums,
     * its buffers hold a whole tile, in place of the last stage, so that it need not wait for the network. */
    static constexpr bool buffers_tile = PROMOTES && reduces;
    static constexpr int slabs = buffers_tile ? 4 : gathers ? 1 : 2;
    static constexpr int stages = buffers_tile ? PRS_STAGES - 1 : PRS_STAGES;
    static constexpr uint32_t slab_place = buffers_tile ? PRS_SMEM_C - PRS_STAGE_B : PRS_SMEM_C;
    static constexpr int slab_barriers = buffers_tile ? 2 * slabs : 4;
    static constexpr int cluster = 2; /* CTAs that multicast to each other */
    /* Columns of B that the first CTA loads; N-major they come in boxes as wide as a row of a stage. */
    static constexpr int first_columns =
        B_N_MAJOR ? (COLUMNS / element<TYPE>::in_row + 1) / 2 * element<TYPE>::in_row : COLUMNS / 2;
    static constexpr int unit_readers = CONSUMER_WARPS + 3; /* the loading warp and the two that store */
};

template <class E>
PRS_DEVICE void produce(const struct prs_kernel_args &args, const struct cta_memory &m, const struct cta_position &at,
                        uint32_t first)
{
    switch (threadIdx.x / 32) {
    case 0:
        load_tiles<E>(args, m, at, first);
        break;
    case 1:
    case 2:
        if (threadIdx.x % 32 == 0)
            store_tiles<E>(args, m, at, threadIdx.x / 32 - 1);
        else if (blockIdx.x == 0 && threadIdx.x <= 32 + PRS_MAX_LOCAL_RANKS)
            launch_compare(args, threadIdx.x - 33);
        break;
    default:
        if (E::gathers && threadIdx.x % 32 == 0) {
            uint32_t loaded = push_blocks<E>(args, m, at);
            if (args.keeps != 0)
                keep_rows<E>(args, loaded);
        }
        if (E::broadcasts && E::far)
            forward_rows<E>(args, at.epoch);
        /* MUTANT(emulator allreduce_is_right) wait for the others' results: s/await_broadcast(args, at)// */
        if (E::broadcasts && at.cluster == 0 && at.rank == 0)
            await_broadcast(args, at);
    }
}

/* All-gather by copy engine: tells the other ranks that they may overwrite the rows that they copied here. */
PRS_DEVICE void give_copy_credit(const struct prs_kernel_args &args)
{
    const struct prs_schedule *s = &args.schedule;
    if (s->segments == 0)
        return;
    uint32_t copied = *(volatile uint32_t *)&args.turns[0]->copied + 1;
    *(volatile uint32_t *)&args.turns[0]->copied = copied;
    for (uint32_t p = 1; p < s->place.world; p++)
        store_release_sys(
            args.turns[p]->credit + prs_schedule_slot(s, s->place.rank, (s->place.rank + p) % s->place.world), copied);
}

/* The first unit is claimed before the cluster's barrier, so that its claim costs no time. */
template <class E>
__global__ void __launch_bounds__(PRS_THREADS, 1) fused_kernel(const __grid_constant__ struct prs_kernel_args args)
{
    struct cta_memory m = cta_memory_map(dynamic_shared());
    if (E::buffers_tile) { /* after A of the stages that are left */
        m.c_full = (uint64_t *)(m.base + PRS_SMEM_A + E::stages * PRS_STAGE_A);
        m.c_empty = m.c_full + E::slab_barriers;
    }
    struct cta_position at = {blockIdx.x / E::cluster, gridDim.x / E::cluster, blockIdx.x % E::cluster, 0};
    uint32_t first = 0;
    if (threadIdx.x == 0) {
        if (at.rank == 0)
            first = atomicAdd(claim_counter(args, PRS_CLAIM_UNITS), 1u);
        unit_memory_init<E>(unit_memory_map(m));
    }
    if (threadIdx.x == 64)
        launch_begin(args);
    if (threadIdx.x == 96)
        launch_say(args);
    begin_roles<E>(m, &args.a, &args.b, &args.c[0]);
    if (threadIdx.x < 128) {
        registers_give<PRODUCER_REGISTERS>();
        at.epoch = launch_here()->epoch;
        produce<E>(args, m, at, first);
    } else {
        registers_take<CONSUMER_REGISTERS>();
        multiply_tiles<E>(args, m);
    }
    end_roles();
    bool last = threadIdx.x == 0 && leave_epoch(&args.sync, launch_here()->epoch, gridDim.x);
    if (!__syncthreads_or(last))
        return;
    launch_end<E>(args);
    if (threadIdx.x == 0) {
        give_copy_credit(args);
        if (E::far)
            network_quiet(&args.sync, &args.far.device);
    }
}

#endif

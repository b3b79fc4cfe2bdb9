/* SPDX-License-Identifier: Apache-2.0 */
/* Striped attention: the kernel before a launch. It finds the sequence of each position once, and not for each tile,
 * head and block again, and writes the tables of which rank has which stripe. */
#ifndef PERSEUS_FUSED_ATTENTION_PREPARE_CUH
#define PERSEUS_FUSED_ATTENTION_PREPARE_CUH

#include "fused/attention/kernels.h"
#include "fused/attention/stripes.h"
#include "fused/core/launch.cuh"
#include "fused/core/sync.cuh"

enum { PREPARE_THREADS = 256, PREPARE_WARPS = PREPARE_THREADS / 32 };

/* Shared memory. */
struct prepare_memory {
    uint32_t have[PRS_MAX_LOCAL_RANKS]; /* stripes that each rank is given */
    uint32_t in_warp[PREPARE_WARPS];    /* of a warp's stripes, how many are the rank's */
};

/* The CTAs that find parts are the first ones; one for the tables of each rank follows. */
PRS_SHARED uint32_t ctas_for_parts(const struct prs_prepare_args *args)
{
    return args->bounds ? prs_ceil_div(args->positions, PREPARE_THREADS) : 0;
}

/* Reports a bound that is below the one before it, or outside of the positions: sequences would be wrong, and nothing
 * else would notice it. */
PRS_DEVICE void check_bound(const struct prs_prepare_args &args, uint32_t i)
{
    int32_t before = i == 0 ? 0 : args.bounds[i - 1];
    if (args.bounds[i] < before || args.bounds[i] > (int32_t)args.positions)
        record_fault(&args.sync, PRS_FAULT_BOUNDS, args.rank, i, (uint32_t)before, (uint32_t)args.bounds[i], 0);
}

PRS_DEVICE void find_parts(const struct prs_prepare_args &args)
{
    uint32_t position = blockIdx.x * PREPARE_THREADS + threadIdx.x;
    if (position < args.positions)
        args.parts[position] = prs_stripe_part(args.bounds, args.sequences, position, args.positions);
    for (uint32_t i = position; i <= args.sequences; i += ctas_for_parts(&args) * PREPARE_THREADS)
        check_bound(args, i);
}

/* Whether each rank is given equally many stripes. Otherwise it says which one is not. All threads of the CTA call
 * it. */
PRS_DEVICE bool check_assigned(const struct prs_prepare_args &args, struct prepare_memory *m, bool tells)
{
    uint32_t want = args.stripes / args.world, thread = threadIdx.x;
    bool right = true;
    if (thread < args.world)
        m->have[thread] = 0;
    __syncthreads();
    for (uint32_t i = thread; i < args.stripes; i += PREPARE_THREADS)
        if (args.assigned[i] < args.world)
            atomicAdd(&m->have[args.assigned[i]], 1u);
    __syncthreads();
    for (uint32_t rank = 0; rank < args.world; rank++)
        right = right && m->have[rank] == want;
    if (tells && thread < args.world && m->have[thread] != want)
        record_fault(&args.sync, PRS_FAULT_STRIPES, args.rank, thread, want, m->have[thread], 0);
    return right;
}

/* Writes the tables of one rank. Zigzag takes the place of an assignment that is wrong, so that the launch can run. */
PRS_DEVICE void write_tables(const struct prs_prepare_args &args, uint32_t rank)
{
    struct prepare_memory *m = (struct prepare_memory *)dynamic_shared();
    uint32_t world = args.world, lane = threadIdx.x % 32, before = 0;
    bool right = check_assigned(args, m, rank == 0);
    for (uint32_t first = 0; first <= args.stripes; first += PREPARE_THREADS) {
        uint32_t at = first + threadIdx.x, mine = before;
        /* MUTANT(emulator attention_striped/wrong_ranks_of_stripes_are_reported) zigzag if ranks are wrong:
         * s/right/true/ */
        bool has = at < args.stripes && (right ? args.assigned[at] : prs_stripe_zigzag_rank(world, at)) == rank;
        uint32_t others = __ballot_sync(~0u, has);
        if (lane == 0)
            m->in_warp[threadIdx.x / 32] = __popc(others);
        __syncthreads();
        for (uint32_t warp = 0; warp < PREPARE_WARPS; warp++) {
            /* MUTANT(emulator attention_striped/tables_of_many_stripes_are_right) those of the warps before: delete */
            mine += warp < threadIdx.x / 32 ? m->in_warp[warp] : 0;
            before += m->in_warp[warp];
        }
        mine += __popc(others & ((1u << lane) - 1));
        if (at <= args.stripes)
            args.how_many[at * world + rank] = mine;
        if (has)
            args.stripe_of[mine * world + rank] = at;
        __syncthreads();
    }
}

static __global__ void prepare_stripes(const __grid_constant__ struct prs_prepare_args args)
{
    uint32_t ctas = ctas_for_parts(&args);
    if (blockIdx.x < ctas)
        find_parts(args);
    else
        write_tables(args, blockIdx.x - ctas);
}

static const struct launch_shape prepare_shape = {1, PREPARE_THREADS, sizeof(struct prepare_memory)};

#endif

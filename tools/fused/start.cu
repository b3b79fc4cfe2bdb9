/* SPDX-License-Identifier: Apache-2.0 */
/* Lets all GPUs begin a timed launch together. */
#include "tools/fused/bench.h"
#include "tools/fused/launch.cuh"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct meet_args {
    uint32_t *flags[PRS_MAX_LOCAL_RANKS]; /* [r]: flags of rank r */
    uint32_t rank, world, epoch;
};

static __global__ void meet_kernel(struct meet_args m)
{
    uint32_t p = threadIdx.x;
    if (p >= m.world)
        return;
    __threadfence_system();
    *(volatile uint32_t *)&m.flags[p][m.rank] = m.epoch;
    for (uint64_t spins = 0; (int32_t)(*(volatile uint32_t *)&m.flags[m.rank][p] - m.epoch) < 0; spins++) {
        __nanosleep(20); /* the Hopper emulator runs other threads here */
        if (spins > 100000000ull) {
            printf("perseus-fused-bench: rank %u waited for rank %u at meeting %u\n", m.rank, p, m.epoch);
            __trap();
        }
    }
}

void bench_start_open(struct bench_start *s, struct prs_fused *ctx, struct bench_rank *rank)
{
    void *mine, *all[PRS_MAX_LOCAL_RANKS];
    memset(s, 0, sizeof(*s));
    s->rank = rank;
    BENCH_CALL(prs_fused_alloc(ctx, PRS_MAX_LOCAL_RANKS * sizeof(uint32_t), &mine));
    /* Threads reach each other's symmetric memory by plain pointers. Processes cannot, so their barrier is on the host
     * only. */
    bench_allgather(rank, &mine, all, sizeof(mine));
    for (uint32_t p = 0; p < rank->world; p++)
        s->flags[p] = (uint32_t *)all[p];
}

void bench_start_cross(struct bench_start *s, cudaStream_t stream)
{
    struct meet_args m;
    /* other ranks may store here after the barrier, so this rank's work must be done before it */
    if (!s->rank->threads)
        BENCH_CUDA(cudaStreamSynchronize(stream));
    bench_meet(s->rank);
    if (!s->rank->threads)
        return;
    memcpy(m.flags, s->flags, sizeof(m.flags));
    m.rank = s->rank->rank, m.world = s->rank->world, m.epoch = ++s->meetings;
    bench_launch(meet_kernel, 1, 32, stream, m);
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Many launches, between which the ranks synchronize only by the GPUs' own flags. Three sets of inputs alternate: with
 * fewer, a launch that read data of the launch before it, or of the one before that (same bank), would go unnoticed.
 * Each result must have the bits of that set's first result, which bench_check() has checked. */
#include "tools/fused/bench.h"
#include "tools/fused/launch.cuh"

#include <stdio.h>
#include <stdlib.h>

enum { SETS = BENCH_SOAK_SETS };

static __global__ void count_differences(const uint4 *x, const uint4 *y, uint64_t bytes,
                                         unsigned long long *differences)
{
    unsigned long long mine = 0;
    uint64_t count = bytes / 16;
    for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < count;
         i += (uint64_t)gridDim.x * blockDim.x) {
        uint4 a = x[i], b = y[i];
        mine += a.x != b.x || a.y != b.y || a.z != b.z || a.w != b.w;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0 && bytes % 16 != 0) {
        const uint8_t *a = (const uint8_t *)(x + count), *b = (const uint8_t *)(y + count);
        uint64_t i = 0;
        while (i < bytes % 16 && a[i] == b[i])
            i++;
        mine += i < bytes % 16;
    }
    if (mine != 0)
        atomicAdd(differences, mine);
}

static __global__ void delay(uint32_t ns)
{
    __nanosleep(ns); /* sleeps up to twice as long */
}

static uint32_t next_random(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

void bench_count_differences(const void *x, const void *y, size_t bytes, unsigned long long *differences,
                             cudaStream_t stream)
{
    bench_launch(count_differences, 64, 256, stream, (const uint4 *)x, (const uint4 *)y, bytes, differences);
}

struct soak {
    bench_soak_turn *turn;
    void *user;
    unsigned long long *differences; /* device */
    cudaStream_t stream;
};

/* Half of the launches start at once, the others after a delay of up to 120 us. */
static void step(const struct soak *s, uint32_t i, uint32_t *random)
{
    uint32_t late = next_random(random);
    if (late & 1)
        bench_launch(delay, 1, 1, s->stream, late % 60000);
    s->turn(s->user, i % SETS, s->differences);
}

static void run(const struct soak *s, uint32_t launches, uint32_t seed)
{
    uint32_t random = seed;
    for (uint32_t i = 0; i < launches; i++) {
        step(s, i, &random);
        if (i % 512 == 511) /* keep fewer launches in flight than CUDA can buffer */
            BENCH_CUDA(cudaStreamSynchronize(s->stream));
    }
    BENCH_CUDA(cudaStreamSynchronize(s->stream));
}

/* One launch of each set, captured once and replayed. */
static void replay(const struct soak *s, uint32_t replays)
{
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    BENCH_CUDA(cudaStreamBeginCapture(s->stream, cudaStreamCaptureModeThreadLocal));
    for (uint32_t set = 0; set < SETS; set++)
        s->turn(s->user, set, s->differences);
    BENCH_CUDA(cudaStreamEndCapture(s->stream, &graph));
    BENCH_CUDA(cudaGraphInstantiate(&executable, graph, 0));
    for (uint32_t i = 0; i < replays; i++)
        BENCH_CUDA(cudaGraphLaunch(executable, s->stream));
    BENCH_CUDA(cudaStreamSynchronize(s->stream));
    BENCH_CUDA(cudaGraphExecDestroy(executable));
    BENCH_CUDA(cudaGraphDestroy(graph));
}

double bench_soak(struct bench_rank *rank, const struct bench_options *o, bench_soak_turn *turn, void *user,
                  cudaStream_t stream)
{
    struct soak s = {turn, user, NULL, stream};
    unsigned long long found;
    double worst;
    BENCH_CUDA(cudaMalloc((void **)&s.differences, sizeof(*s.differences)));
    BENCH_CUDA(cudaMemsetAsync(s.differences, 0, sizeof(*s.differences), stream));
    if (o->soak != 0)
        run(&s, o->soak, rank->rank + 1);
    bench_meet(rank);
    replay(&s, o->replay);
    BENCH_CUDA(cudaMemcpyAsync(&found, s.differences, sizeof(found), cudaMemcpyDeviceToHost, stream));
    BENCH_CUDA(cudaStreamSynchronize(stream));
    /* After this all ranks are done: cudaFree() waits for the GPU, which ranks may share. */
    worst = bench_max(rank, (double)found);
    BENCH_CUDA(cudaFree(s.differences));
    return worst;
}

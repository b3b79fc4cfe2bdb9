/* SPDX-License-Identifier: Apache-2.0 */
/* The rounds in which the ways take turns. Nothing may write where a timed launch wrote before that was compared. */
#include "tools/fused/timed.h"
#include "tools/fused/launch.cuh"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { WARMUP = 3 };

struct rounds {
    struct bench_timed *t;
    cudaEvent_t from, to;
    unsigned long long *differences, *ignored; /* device */
};

static __global__ void flip(uint16_t *element)
{
    *element ^=
        0x4000; /* the highest bit of a bf16's exponent: zero becomes 2, everything else far larger or smaller */
}

/* --corrupt: what this looks like when a launch was wrong. One rank is enough, and rank 0 reports. */
static void corrupt(struct bench_timed *t)
{
    const struct bench_rank *rank = t->start->rank;
    uint16_t *element = rank->rank + 1 == rank->world ? t->calls->sampled(t->user) : NULL;
    if (rank->rank + 1 == rank->world && element == NULL)
        fprintf(stderr, "perseus-fused-bench: rank %u has nothing to corrupt\n", rank->rank);
    if (element == NULL)
        return;
    bench_launch(flip, 1, 1, t->stream, element);
}

/* What other ranks send waits in memory of the plan, which has two banks at most. A launch that did not wait for it
 * would find what the launch before it, or the one before that, was sent: so those are of other data. */
static void leave_other_data(struct bench_timed *t, uint32_t way)
{
    t->calls->negate(t->user);
    t->calls->launch(t->user, way);
    t->calls->launch(t->user, way);
    t->calls->negate(t->user);
    BENCH_CUDA(cudaStreamSynchronize(t->stream)); /* what they put to other nodes is counted before the next is */
}

static double time_once(struct rounds *r, uint32_t way)
{
    struct bench_timed *t = r->t;
    float ms;
    leave_other_data(t, way < t->own ? way : 0); /* before others' too: all find the caches alike */
    /* Before every timed run, and the ranks meet behind it: what an earlier run left must not pass for this one's. */
    t->calls->prepare(t->user, way);
    bench_start_cross(t->start, t->stream);
    BENCH_CUDA(cudaEventRecord(r->from, t->stream));
    t->calls->launch(t->user, way);
    BENCH_CUDA(cudaEventRecord(r->to, t->stream));
    BENCH_CUDA(cudaEventSynchronize(r->to));
    BENCH_CUDA(cudaEventElapsedTime(&ms, r->from, r->to));
    return bench_max(t->start->rank, ms * 1e3); /* all ranks are through, and nobody stores here until all go on */
}

/* Behind the time that was taken. What others' kernels left is compared as well and forgotten: each way then finds the
 * caches as the others do. */
static void look_at(struct rounds *r, uint32_t way, uint32_t round)
{
    struct bench_timed *t = r->t;
    bool own = way < t->own;
    if (own && round + 1 == WARMUP)
        t->calls->keep(t->user, way);
    if (round < WARMUP)
        return;
    if (own && round + 1 == WARMUP + t->options->corrupt)
        corrupt(t);
    t->calls->compare(t->user, own ? way : 0, own ? r->differences : r->ignored);
    if (!own)
        return;
    t->checked++;
    if (round + 1 == WARMUP + t->options->iterations)
        t->calls->check(t->user, way);
}

static void take_turns(struct rounds *r)
{
    static __thread double times[BENCH_MAX_WAYS][BENCH_MAX_ITERATIONS];
    struct bench_timed *t = r->t;
    for (uint32_t i = 0; i < WARMUP + t->options->iterations; i++)
        for (uint32_t way = 0; way < BENCH_MAX_WAYS; way++) {
            double usec;
            if ((t->ways >> way & 1) == 0)
                continue;
            usec = time_once(r, way);
            if (i >= WARMUP)
                times[way][i - WARMUP] = usec;
            look_at(r, way, i);
        }
    for (uint32_t way = 0; way < BENCH_MAX_WAYS; way++)
        if ((t->ways >> way & 1) != 0)
            t->usec[way] = bench_median(times[way], t->options->iterations);
}

static void check_once(struct bench_timed *t)
{
    for (uint32_t way = 0; way < t->own; way++) {
        t->calls->prepare(t->user, way);
        bench_start_cross(t->start, t->stream); /* nobody may store into what is still being poisoned */
        t->calls->launch(t->user, way);
        BENCH_CUDA(cudaStreamSynchronize(t->stream));
        bench_meet(t->start->rank);
        t->calls->check(t->user, way);
    }
}

void bench_timed_run(struct bench_timed *t)
{
    struct rounds r = {t};
    unsigned long long found = 0;
    t->checked = 0;
    t->differing = 0;
    for (uint32_t way = 0; way < BENCH_MAX_WAYS; way++)
        t->usec[way] = NAN;
    if (t->options->iterations == 0) {
        check_once(t);
        return;
    }
    BENCH_CUDA(cudaEventCreate(&r.from));
    BENCH_CUDA(cudaEventCreate(&r.to));
    BENCH_CUDA(cudaMalloc((void **)&r.differences, 2 * sizeof(*r.differences)));
    BENCH_CUDA(cudaMemsetAsync(r.differences, 0, 2 * sizeof(*r.differences), t->stream));
    r.ignored = r.differences + 1;
    take_turns(&r);
    BENCH_CUDA(cudaMemcpyAsync(&found, r.differences, sizeof(found), cudaMemcpyDeviceToHost, t->stream));
    BENCH_CUDA(cudaStreamSynchronize(t->stream));
    t->differing = bench_max(t->start->rank, (double)found);
    BENCH_CUDA(cudaFree(r.differences));
    BENCH_CUDA(cudaEventDestroy(r.from));
    BENCH_CUDA(cudaEventDestroy(r.to));
}

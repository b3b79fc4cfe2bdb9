/* SPDX-License-Identifier: Apache-2.0 */
/* The rounds of bench_timed_run(). Nothing may overwrite what a timed launch wrote before it has been compared. */
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
    /* The highest bit of a bf16's exponent: zero becomes 2, everything else far larger or smaller. */
    *element ^= 0x4000;
}

/* The option --corrupt makes a launch look wrong. One rank is enough; it is not rank 0, which must also report errors
 * of others. */
static void corrupt(struct bench_timed *t)
{
    const struct bench_rank *rank = t->start->rank;
    uint16_t *element = rank->rank + 1 == rank->world ? t->calls->sampled(t->user) : NULL;
    if (rank->rank + 1 == rank->world && !element)
        fprintf(stderr, "perseus-fused-bench: rank %u has nothing to corrupt\n", rank->rank);
    if (!element)
        return;
    bench_launch(flip, 1, 1, t->stream, element);
}

/* Other ranks' data goes to memory of the plan, which has at most two banks. A launch that does not wait for its data
 * reads that of one of the two launches before it. So those two get other data, and the error shows. */
static void leave_other_data(struct bench_timed *t, uint32_t method)
{
    t->calls->negate(t->user);
    t->calls->launch(t->user, method);
    t->calls->launch(t->user, method);
    t->calls->negate(t->user);
    BENCH_CUDA(cudaStreamSynchronize(t->stream)); /* its puts to other nodes must not count as the next launch's */
}

static double time_once(struct rounds *r, uint32_t method)
{
    struct bench_timed *t = r->t;
    float ms;
    leave_other_data(t, method < t->own ? method
                                        : 0); /* before the baselines too, so that all methods have the same caches */
    /* Before every timed run, and before the barrier of the ranks: results of an earlier run must not pass for this
     * one's. */
    t->calls->prepare(t->user, method);
    bench_start_cross(t->start, t->stream);
    BENCH_CUDA(cudaEventRecord(r->from, t->stream));
    t->calls->launch(t->user, method);
    BENCH_CUDA(cudaEventRecord(r->to, t->stream));
    BENCH_CUDA(cudaEventSynchronize(r->to));
    BENCH_CUDA(cudaEventElapsedTime(&ms, r->from, r->to));
    return bench_max(t->start->rank, ms * 1e3); /* all ranks are done, and none stores here before all ranks continue */
}

/* Runs after the time was taken. It also compares the baselines' results, but ignores the count, so that the caches are
 * in the same state for every method. */
static void check_round(struct rounds *r, uint32_t method, uint32_t round)
{
    struct bench_timed *t = r->t;
    bool own = method < t->own;
    if (own && round + 1 == WARMUP)
        t->calls->keep(t->user, method);
    if (round < WARMUP)
        return;
    if (own && round + 1 == WARMUP + t->options->corrupt)
        corrupt(t);
    t->calls->compare(t->user, own ? method : 0, own ? r->differences : r->ignored);
    if (!own)
        return;
    t->checked++;
    if (round + 1 == WARMUP + t->options->iterations)
        t->calls->check(t->user, method);
}

static void run_rounds(struct rounds *r)
{
    static __thread double times[BENCH_MAX_METHODS][BENCH_MAX_ITERATIONS];
    struct bench_timed *t = r->t;
    for (uint32_t i = 0; i < WARMUP + t->options->iterations; i++)
        for (uint32_t method = 0; method < BENCH_MAX_METHODS; method++) {
            double usec;
            if ((t->methods >> method & 1) == 0)
                continue;
            usec = time_once(r, method);
            if (i >= WARMUP)
                times[method][i - WARMUP] = usec;
            check_round(r, method, i);
        }
    for (uint32_t method = 0; method < BENCH_MAX_METHODS; method++)
        if ((t->methods >> method & 1) != 0)
            t->usec[method] = bench_median(times[method], t->options->iterations);
}

static void check_once(struct bench_timed *t)
{
    for (uint32_t method = 0; method < t->own; method++) {
        t->calls->prepare(t->user, method);
        bench_start_cross(t->start, t->stream); /* no rank may store into memory that is still being poisoned */
        t->calls->launch(t->user, method);
        BENCH_CUDA(cudaStreamSynchronize(t->stream));
        bench_meet(t->start->rank);
        t->calls->check(t->user, method);
    }
}

void bench_timed_run(struct bench_timed *t)
{
    struct rounds r = {t};
    unsigned long long found = 0;
    t->checked = 0;
    t->differing = 0;
    for (uint32_t method = 0; method < BENCH_MAX_METHODS; method++)
        t->usec[method] = NAN;
    if (t->options->iterations == 0) {
        check_once(t);
        return;
    }
    BENCH_CUDA(cudaEventCreate(&r.from));
    BENCH_CUDA(cudaEventCreate(&r.to));
    BENCH_CUDA(cudaMalloc((void **)&r.differences, 2 * sizeof(*r.differences)));
    BENCH_CUDA(cudaMemsetAsync(r.differences, 0, 2 * sizeof(*r.differences), t->stream));
    r.ignored = r.differences + 1;
    run_rounds(&r);
    BENCH_CUDA(cudaMemcpyAsync(&found, r.differences, sizeof(found), cudaMemcpyDeviceToHost, t->stream));
    BENCH_CUDA(cudaStreamSynchronize(t->stream));
    t->differing = bench_max(t->start->rank, (double)found);
    BENCH_CUDA(cudaFree(r.differences));
    BENCH_CUDA(cudaEventDestroy(r.from));
    BENCH_CUDA(cudaEventDestroy(r.to));
}

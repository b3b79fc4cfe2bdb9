/* SPDX-License-Identifier: Apache-2.0 */
/* Time launches, and check that each did its work: every timed launch of our own kernels must write the same bits as
 * the last warm-up launch, and the last one is also compared with a reference. Before each launch its results are
 * poisoned, and the plan's memory, which holds what other ranks sent, is filled from other data. */
#ifndef TOOLS_FUSED_TIMED_H
#define TOOLS_FUSED_TIMED_H

#include "tools/fused/bench.h"

enum { BENCH_MAX_METHODS = 5 };

/* The parts that each bench implements. All calls only enqueue, except check(). */
struct bench_timed_calls {
    void (*negate)(void *user);                   /* changes the sign of all data that is sent; two calls restore it */
    void (*prepare)(void *user, uint32_t method); /* poisons what the method writes */
    void (*launch)(void *user, uint32_t method);
    void (*keep)(void *user, uint32_t method); /* copies the results */
    void (*compare)(void *user, uint32_t method,
                    unsigned long long *differences); /* adds the number of differences from the copy */
    void (*check)(void *user, uint32_t method);       /* compares the results with the reference; collective */
    uint16_t *(*sampled)(void *user); /* an element that check() reads; NULL: there is none on this rank */
};

struct bench_timed {
    const struct bench_options *options;
    struct bench_start *start;
    cudaStream_t stream;
    const struct bench_timed_calls *calls;
    void *user;
    uint32_t own, methods; /* methods [0, own) are our kernels; `methods` has a bit for each method to run */
    /* Results. */
    double usec[BENCH_MAX_METHODS]; /* medians, each of the slowest rank's times; NaN: did not run */
    uint64_t checked;               /* timed launches of our own kernels that were compared */
    double differing;               /* elements that differed in those launches, on the rank with the most */
};

/* Each round runs every method once. With no iterations, each of our own kernels is launched once, untimed, and
 * checked. */
void bench_timed_run(struct bench_timed *t);

#endif

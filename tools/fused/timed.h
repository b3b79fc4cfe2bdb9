/* SPDX-License-Identifier: Apache-2.0 */
/* Timed launches, and that each did what it was timed for: every launch of our own kernels leaves the bits of the last
 * warm-up launch, in everything that it writes, and the last one is compared with a reference. What it writes was
 * poisoned, and what other ranks had left in the plan's memory was of other data, before. */
#ifndef TOOLS_FUSED_TIMED_H
#define TOOLS_FUSED_TIMED_H

#include "tools/fused/bench.h"

enum { BENCH_MAX_WAYS = 4 };

/* What is known of the ways only where they are. All enqueue, but for check(). */
struct bench_timed_calls {
    void (*negate)(void *user);                /* what travels is of the other sign then; twice: as it was */
    void (*prepare)(void *user, uint32_t way); /* poisons what it writes */
    void (*launch)(void *user, uint32_t way);
    void (*keep)(void *user, uint32_t way);                                     /* copies what it wrote */
    void (*compare)(void *user, uint32_t way, unsigned long long *differences); /* adds what is not as in the copy */
    void (*check)(void *user, uint32_t way); /* compares what it wrote with the reference; all ranks call it together */
    uint16_t *(*sampled)(void *user);        /* an element that check() looks at; NULL: there is none here */
};

struct bench_timed {
    const struct bench_options *options;
    struct bench_start *start;
    cudaStream_t stream;
    const struct bench_timed_calls *calls;
    void *user;
    uint32_t own, ways; /* ways [0, own) are our kernels; `ways` has a bit for each that is to run */
    /* Results. */
    double usec[BENCH_MAX_WAYS]; /* medians of the slowest rank; NaN: did not run */
    uint64_t checked;            /* timed launches of our own that were compared */
    double differing;            /* what differed in them, on the worst rank */
};

/* The ways take turns in every round. Without iterations each of our own is launched once, untimed, and checked. */
void bench_timed_run(struct bench_timed *t);

#endif

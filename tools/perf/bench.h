/* SPDX-License-Identifier: Apache-2.0 */
/* What every benchmark needs: the rails; for one policy a team, a heap and a proxy; and test data that can be
 * checked. */
#ifndef TOOLS_PERF_BENCH_H
#define TOOLS_PERF_BENCH_H

#include <perseus/heap.h>
#include <perseus/proxy.h>
#include "tools/perf/gpu.h"
#include "tools/perf/options.h"
#include "tools/common/ranks.h"

struct bench {
    const struct options *options;
    struct ranks *ranks;
    struct prs_bootstrap bootstrap;
    struct prs_fabric *fabric;
    struct prs_rail_set rails;
    struct prs_team *team;
    struct prs_heap *heap;
    struct prs_proxy *proxy;
    struct prs_device device;
    uint64_t half;                 /* of the heap's data: sources are below this offset, arrivals above */
    uint64_t slots;                /* of the largest size that fit in one half */
    struct trace *trace;           /* NULL: this rank records nothing */
    const struct gpu_library *gpu; /* NULL: the CPU sends and checks */
};

#define BENCH_POISON 0xdeaddeaddeaddeadu

/* Open the fabric and its rails. Return 0, 77 (no device here) or 1; the reason is on stderr. */
int bench_init(struct bench *bench, struct ranks *ranks, uint32_t size, const struct options *options);
void bench_fini(struct bench *bench);
/* Open a policy's team, heap and proxy; collective. Return 0, or -errno with the reason on stderr. */
int bench_open(struct bench *bench, const char *policy);
void bench_close(struct bench *bench);

/* Step the proxy until all commands that were pushed are complete. */
int bench_quiet(struct bench *bench);
/* For ranks_wait_word(): step the proxy. */
int bench_idle(void *bench);
int bench_fail(const struct bench *bench, const char *what, int error);

uint64_t *bench_word(const struct bench *bench, uint64_t index);     /* this rank's signal word */
uint64_t *bench_source(const struct bench *bench, uint64_t offset);  /* this rank's data to send */
uint64_t *bench_arrival(const struct bench *bench, uint64_t offset); /* where it receives */

struct prs_device_put bench_put(const struct bench *bench, uint32_t peer, uint64_t offset, uint64_t bytes,
                                uint32_t group);
/* Three functions: fill a slot with data made from iteration and slot, count the wrong words, and make the words
 * wrong. */
void bench_fill(uint64_t *words, uint64_t bytes, uint64_t iteration, uint64_t slot);
uint64_t bench_wrong(const uint64_t *words, uint64_t bytes, uint64_t iteration, uint64_t slot);
void bench_poison(uint64_t *words, uint64_t bytes);

double bench_now_us(void);
double bench_median(double *values, uint32_t count); /* sorts them */
double bench_percentile(const double *sorted, uint32_t count, double part);

#endif

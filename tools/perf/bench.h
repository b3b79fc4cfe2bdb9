/* SPDX-License-Identifier: Apache-2.0 */
/* What every benchmark stands on: the rails, and for one policy a team, a heap and a proxy; and data that tells what it
 * is. */
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
    uint64_t half;                 /* the heap's data: sources below this offset, what arrives above */
    uint64_t slots;                /* of the largest size that fit in one half */
    const struct gpu_library *gpu; /* NULL: the CPU sends and checks */
};

#define BENCH_POISON 0xdeaddeaddeaddeadu

/* Rails. Return 0, 77 (no device here) or 1; what is wrong is on stderr. */
int bench_init(struct bench *bench, struct ranks *ranks, uint32_t size, const struct options *options);
void bench_fini(struct bench *bench);
/* A policy's team, heap and proxy, collective. Return 0 or -errno, said on stderr. */
int bench_open(struct bench *bench, const char *policy);
void bench_close(struct bench *bench);

/* Step the proxy until everything pushed is complete. */
int bench_quiet(struct bench *bench);
/* For ranks_wait_word(): step the proxy. */
int bench_idle(void *bench);
int bench_fail(const struct bench *bench, const char *what, int error);

uint64_t *bench_word(const struct bench *bench, uint64_t index);     /* of the heap's signals here */
uint64_t *bench_source(const struct bench *bench, uint64_t offset);  /* here */
uint64_t *bench_arrival(const struct bench *bench, uint64_t offset); /* here */

struct prs_device_put bench_put(const struct bench *bench, uint32_t peer, uint64_t offset, uint64_t bytes,
                                uint32_t group);
/* Fill with what tells iteration and slot; count words that do not; make them wrong. */
void bench_fill(uint64_t *words, uint64_t bytes, uint64_t iteration, uint64_t slot);
uint64_t bench_wrong(const uint64_t *words, uint64_t bytes, uint64_t iteration, uint64_t slot);
void bench_poison(uint64_t *words, uint64_t bytes);

double bench_now_us(void);
double bench_median(double *values, uint32_t count); /* sorts them */
double bench_percentile(const double *sorted, uint32_t count, double part);

#endif

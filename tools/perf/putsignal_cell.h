/* SPDX-License-Identifier: Apache-2.0 */
/* One cell of putsignal's table, measured by the CPU (putsignal.c) or by a kernel (putsignal_gpu.c). */
#ifndef TOOLS_PERF_PUTSIGNAL_CELL_H
#define TOOLS_PERF_PUTSIGNAL_CELL_H

#include "tools/perf/bench.h"
#include "tools/perf/results.h"

struct cell {
    const char *policy;
    uint64_t group; /* GROUP_COUPLED, GROUP_PEER or a number of puts */
    uint64_t bytes;
    uint32_t concurrency, peers;
};

/* Indices of the words that the ranks share. An epoch is one iteration of either kind: odd ones put only, even ones
 * signal too. */
enum { WORD_EPOCH = 0, WORD_ACKS = 1, WORD_ERRORS = 2 };

/* Counters of a sender, to be read while it is idle. */
struct cell_counts {
    uint64_t fences;
    uint64_t work_requests, doorbells, completions;
    struct prs_proxy_stats proxy;
};
void cell_count(struct bench *bench, struct cell_counts *out);
/* Compute a cell's results from its times, which are sorted here, and from the counters before and after them. */
void cell_conclude(const struct cell *cell, uint32_t iterations, double *put_only_us, double *put_signal_us,
                   const struct cell_counts *before, const struct cell_counts *after, struct putsignal_result *result);

#endif

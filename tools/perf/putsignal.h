/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TOOLS_PERF_PUTSIGNAL_H
#define TOOLS_PERF_PUTSIGNAL_H

#include "tools/perf/bench.h"
#include "tools/perf/results.h"

/* One cell of the table. */
struct cell {
    const char *policy;
    uint64_t group; /* GROUP_COUPLED, GROUP_PEER or a number of puts */
    uint64_t bytes;
    uint32_t concurrency, peers;
};

/* Words of the ranks' board. An epoch is one iteration of either kind: odd ones put only, even ones with signals. */
enum { WORD_EPOCH = 0, WORD_ACKS = 1, WORD_ERRORS = 2 };

/* Counters of a sender, to be taken while it is idle. */
struct putsignal_counts {
    uint64_t fences;
    struct prs_proxy_stats proxy;
};
void putsignal_count(struct bench *bench, struct putsignal_counts *out);
/* The figures of a cell from its times (sorted here) and from what was counted meanwhile. */
void putsignal_conclude(const struct cell *cell, uint32_t iterations, double *put_only_us, double *put_signal_us,
                        const struct putsignal_counts *before, const struct putsignal_counts *after,
                        struct putsignal_result *result);
/* The same cell with a persistent kernel as the sender. */
int putsignal_gpu_send(struct bench *bench, const struct cell *cell, struct putsignal_result *result);
int putsignal_gpu_receive(struct bench *bench, const struct cell *cell);
int putsignal_gpu_clear(struct bench *bench, const struct cell *cell);

/* Collective: rank 0 puts to ranks 1..peers, without and with signals by turns. Rank 0 fills result. Return 0 or
 * -errno. */
int putsignal_run(struct bench *bench, const struct cell *cell, struct putsignal_result *result);

#endif

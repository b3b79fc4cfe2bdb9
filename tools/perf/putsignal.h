/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TOOLS_PERF_PUTSIGNAL_H
#define TOOLS_PERF_PUTSIGNAL_H

#include "tools/perf/bench.h"
#include "tools/perf/report.h"

/* One cell of the table. */
struct cell {
    const char *policy;
    uint64_t group; /* GROUP_COUPLED, GROUP_PEER or a number of puts */
    uint64_t bytes;
    uint32_t concurrency, peers;
};

/* Collective: rank 0 puts to ranks 1..peers, without and with signals by turns. Rank 0 fills result. Return 0 or
 * -errno. */
int putsignal_run(struct bench *bench, const struct cell *cell, struct putsignal_result *result);

#endif

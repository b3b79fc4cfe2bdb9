/* SPDX-License-Identifier: Apache-2.0 */
/* The command line of perseus-perf. */
#ifndef TOOLS_PERF_OPTIONS_H
#define TOOLS_PERF_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>

enum { OPTIONS_VALUES = 24, OPTIONS_POLICIES = 8, OPTIONS_POLICY_CHARS = 16 };

struct values {
    uint64_t value[OPTIONS_VALUES];
    uint32_t count;
};

enum perf_op { PERF_PUTSIGNAL, PERF_PUT, PERF_LATENCY, PERF_MSGRATE, PERF_ALLTOALL };

/* How puts and signals are arranged; any other value is a number of puts per group. */
enum { GROUP_COUPLED = 0, GROUP_PEER = 1 << 20 };

struct options {
    enum perf_op op;
    char policies[OPTIONS_POLICIES][OPTIONS_POLICY_CHARS];
    uint32_t policy_count;
    bool every_policy; /* none was asked for: those that the rails can keep */
    struct values groups, bytes, concurrency, peers;
    uint32_t iterations, warmup, nodes, timeout_s;
    int queues_per_rail;
    bool json, gpu;
    const char *plot; /* SVG file, or NULL */
    const char *op_name;
};

/* Return 0, 1 (wrong: said on stderr) or 2 (help was asked for and printed). */
int options_parse(int argc, char **argv, struct options *out);
/* "coupled", "peer" or the number. */
const char *options_group_name(uint64_t group, char *text, uint32_t bytes);

#endif

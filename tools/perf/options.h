/* SPDX-License-Identifier: Apache-2.0 */
/* The command line of perseus-perf. */
#ifndef TOOLS_PERF_OPTIONS_H
#define TOOLS_PERF_OPTIONS_H

#include "tools/common/option_table.h"

enum perf_op { PERF_PUTSIGNAL, PERF_PUT, PERF_LATENCY, PERF_MSGRATE, PERF_ALLTOALL };

/* How puts and signals are arranged. Up to GROUP_PUTS_MAX: a number of puts per group. */
enum { GROUP_PUTS_MAX = (1 << 20) - 1, GROUP_COUPLED, GROUP_PEER };

struct options {
    enum perf_op op;
    const char *op_name;
    struct option_list policies; /* options_policy_name() */
    bool every_policy;           /* no policy was named: measure those that the rails can keep */
    struct option_list groups, bytes, concurrency, peers;
    uint32_t iterations, warmup, nodes, timeout_s;
    uint32_t queues_per_rail; /* 0: the transport's default */
    bool json, gpu;
    const char *trace; /* NULL: none */
};

/* Fill *out; wrong options end the program. */
void options_parse(int argc, char **argv, struct options *out);
/* Name of the i-th policy to measure. */
const char *options_policy_name(const struct options *options, uint32_t i);
/* "coupled", "peer" or the number. */
const char *options_group_name(uint64_t group, char *text, uint32_t bytes);

#endif

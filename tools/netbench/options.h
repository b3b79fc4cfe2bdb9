/* SPDX-License-Identifier: Apache-2.0 */
/** What the command line asks for. */
#ifndef NETBENCH_OPTIONS_H
#define NETBENCH_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>

enum op { OP_SENDRECV, OP_ALLREDUCE, OP_ALLGATHER, OP_REDUCESCATTER, OP_ALLTOALL, OP_COUNT };

enum { SIZES_MAX = 512, RANKS_MAX = 64, COMMS_MAX = 32, OUTSTANDING_MAX = 32, GROUP_MAX = 8, ITERS_MAX = 1000000 };

struct options {
    const char *plugin;
    int api; /* 0: the newest table that the plugin has */
    enum op op;
    int ranks, nodes, comms, outstanding, group, iters, warmup;
    int yield; /* idle passes of the progress thread between two calls of sched_yield() */
    int timeout_s;
    int setup_timeout_s; /* of connecting, and of waiting for all ranks; 0 while parsing: as timeout_s */
    size_t chunk_bytes;
    bool check, json, fuse, flush, churn;
    int size_count;
    size_t size[SIZES_MAX];
};

const char *op_name(enum op op);

/** Fill from the command line; prints why and how on a mistake. Return 0, or the status to exit with plus one. */
int options_parse(struct options *options, int argc, char **argv);

#endif

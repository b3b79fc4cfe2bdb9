/* SPDX-License-Identifier: Apache-2.0 */
/* The command line of perseus-netbench. */
#ifndef NETBENCH_OPTIONS_H
#define NETBENCH_OPTIONS_H

#include "tools/common/option_table.h"

enum op { OP_SENDRECV, OP_ALLREDUCE, OP_ALLGATHER, OP_REDUCESCATTER, OP_ALLTOALL };

enum { RANKS_MAX = 64, COMMS_MAX = 32, OUTSTANDING_MAX = 32, MULTI_MAX = 8, ITERS_MAX = 1000000, ROUNDS_MAX = 1000000 };

struct options {
    const char *plugin;
    const char *peer; /* NULL, or a second plugin, which alternates with the first */
    int api;          /* 0: the newest table that the plugin has */
    enum op op;
    int ranks, nodes, comms, outstanding, iters, warmup;
    int per_receive; /* buffers of one NCCL receive (multi-receive) */
    int yield;       /* idle passes of the progress thread between two calls of sched_yield() */
    int timeout_s;
    const char *until;   /* NULL, or a file: a size ends once it exists */
    int rounds;          /* how often everything is opened, used and closed */
    int setup_timeout_s; /* limit of connecting, and of waiting for all ranks; 0 while parsing: as timeout_s */
    size_t chunk_bytes;
    bool odd, check, json, fuse, flush, churn;
    struct option_list sizes;
};

const char *op_name(enum op op);

/* Fill from the command line; wrong options end the program. */
void options_parse(struct options *options, int argc, char **argv);

#endif

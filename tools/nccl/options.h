/* SPDX-License-Identifier: Apache-2.0 */
/* The command line of perseus-nccl-ranks, which perseus-nccl (Python) makes. */
#ifndef TOOLS_NCCL_OPTIONS_H
#define TOOLS_NCCL_OPTIONS_H

#include "tools/common/option_table.h"

enum { RANKS_MAX = 16, ITERATIONS_MAX = 100000 };

enum collective {
    ALL_REDUCE,
    ALL_GATHER,
    REDUCE_SCATTER,
    BROADCAST,
    REDUCE,
    SENDRECV,
    ALL_TO_ALL,
};

enum placement { OUT_OF_PLACE, IN_PLACE, BOTH_PLACES };

struct options {
    const char *nccl_path; /* NULL: libnccl.so.2 */
    const char *label;     /* copied into each result, e.g. the transport's name */
    uint32_t ranks, iterations, warmup;
    uint32_t timeout_s;       /* of each wait */
    struct option_list ops;   /* of enum collective */
    struct option_list types; /* of enum nccl_type */
    struct option_list sizes; /* bytes, the largest last */
    enum placement place;
    bool hosts;            /* each rank has its own NCCL_HOSTID, so that NCCL takes them for different nodes */
    bool register_buffers; /* with ncclCommRegister */
};

/* The names of the nccl-tests binaries, without "_perf", so that one list of operations serves both programs. */
const char *collective_name(enum collective op);

/* Fill from the command line; wrong options end the program. */
void options_parse(struct options *options, int argc, char **argv);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* What the rank processes of one perseus-nccl run share: the job's description, and a mapping where they meet. */
#ifndef TOOLS_NCCL_JOB_H
#define TOOLS_NCCL_JOB_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "tools/nccl/nccl_library.h"

enum { JOB_MAX_RANKS = 16, JOB_MAX_TYPES = 16 };

enum job_op {
    JOB_ALL_REDUCE,
    JOB_ALL_GATHER,
    JOB_REDUCE_SCATTER,
    JOB_BROADCAST,
    JOB_REDUCE,
    JOB_SENDRECV,
    JOB_ALL_TO_ALL,
    JOB_OPS,
};

struct job {
    const char *nccl_path; /* NULL: libnccl.so.2 */
    const char *label;     /* copied into each result, e.g. the transport's name */
    int ranks;
    bool ops[JOB_OPS];
    bool in_place, out_of_place;
    bool hosts;            /* give each rank a NCCL_HOSTID of its own: NCCL then takes them for different nodes */
    bool register_buffers; /* ncclCommRegister the buffers */
    enum nccl_type types[JOB_MAX_TYPES];
    int type_count;
    uint64_t min_bytes, max_bytes, factor;
    int iterations, warmup;
    double timeout_s; /* of any one wait */
};

/* Anonymous shared memory, made before the ranks are forked. */
struct job_meeting {
    _Atomic uint32_t arrived, round;
    _Atomic uint64_t wrong;
    _Atomic bool failed;
    struct nccl_unique_id id;
    double usec[JOB_MAX_RANKS];
};

const char *job_op_name(enum job_op op);
/* The op of that name (the names of the nccl-tests binaries, without "_perf"), or -1. */
int job_op_parse(const char *name);

/* Wait until all ranks are here. Ends the process when a rank has failed or the limit is over: it says which. */
void job_meet(const struct job *job, struct job_meeting *meeting, int rank);

/* One rank, from start to end; rank 0 prints a JSON object for each row. Return the process's exit status. */
int job_run_rank(const struct job *job, struct job_meeting *meeting, int rank);

#endif

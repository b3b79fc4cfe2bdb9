/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/nccl/job.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Spelled as nccl-tests spells its binaries, so that one --op list serves both programs. */
static const char *const op_names[JOB_OPS] = {
    [JOB_ALL_REDUCE] = "all_reduce", [JOB_ALL_GATHER] = "all_gather", [JOB_REDUCE_SCATTER] = "reduce_scatter",
    [JOB_BROADCAST] = "broadcast",   [JOB_REDUCE] = "reduce",         [JOB_SENDRECV] = "sendrecv",
    [JOB_ALL_TO_ALL] = "alltoall",
};

const char *job_op_name(enum job_op op)
{
    return op_names[op];
}

int job_op_parse(const char *name)
{
    for (int i = 0; i < JOB_OPS; i++)
        if (strcmp(op_names[i], name) == 0)
            return i;
    return -1;
}

void job_meet(const struct job *job, struct job_meeting *meeting, int rank)
{
    uint32_t round = atomic_load(&meeting->round);
    struct timespec begin, now;

    if (atomic_fetch_add(&meeting->arrived, 1) + 1 == (uint32_t)job->ranks) {
        atomic_store(&meeting->arrived, 0);
        /* Opens the door: pairs with the load in the loop below; all that the ranks wrote before is seen behind it. */
        atomic_fetch_add(&meeting->round, 1);
        return;
    }
    clock_gettime(CLOCK_MONOTONIC, &begin);
    while (atomic_load(&meeting->round) == round) {
        if (atomic_load(&meeting->failed))
            exit(1); /* who failed has said why */
        clock_gettime(CLOCK_MONOTONIC, &now);
        if ((double)(now.tv_sec - begin.tv_sec) > job->timeout_s) {
            atomic_store(&meeting->failed, true);
            fprintf(stderr, "perseus-nccl: rank %d waited %.0f s for the others: %u of %d came\n", rank, job->timeout_s,
                    atomic_load(&meeting->arrived), job->ranks);
            exit(1);
        }
        sched_yield();
    }
}

/* SPDX-License-Identifier: Apache-2.0 */
/* What the rank processes of a run share: memory for connecting and for their results. */
#ifndef NETBENCH_JOB_H
#define NETBENCH_JOB_H

#include <stdint.h>

#include "plugin/abi.h"
#include "tools/netbench/options.h"

/* What a receiver publishes for one sender and one comm. */
struct meeting {
    uint32_t is_published;
    uint8_t handle[NET_HANDLE_BYTES];
};

struct rank_state {
    uint64_t errors;
    uint64_t beats;      /* grows while the rank is alive, also when it waits */
    char waits_for[512]; /* what it was doing, for the report of a hang */
};

struct job {
    int ranks, comms;
    uint32_t stop;                   /* a rank failed: all end */
    uint32_t arrived, generation;    /* barrier */
    bool slice_is_over, told_to_end; /* rank 0 writes them between two barriers */
    struct rank_state rank[RANKS_MAX];
    struct meeting *meeting; /* [receiver][sender][comm] */
    double *usec;            /* [rank][iteration] */
};

/* Two plugins in one run have a job each. */
enum { SIDES_MAX = 2 };

/* Before the ranks are forked. Return 0 or -errno after printing why. */
int job_open(const struct options *options, struct job **out);

struct meeting *job_meeting(struct job *job, int receiver, int sender, int comm);
double *job_usec(struct job *job, int rank);

/* Ask every rank to end. */
void job_stop(struct job *job);
bool job_stopped(const struct job *job);

/* Wait for all ranks. Return 0, -ECANCELED when one asked all to end, or -ETIMEDOUT. */
int job_barrier(struct job *job, int timeout_s);

/* Monotonic, in microseconds. */
double job_now(void);

#endif

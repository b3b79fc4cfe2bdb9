/* SPDX-License-Identifier: Apache-2.0 */
/** Where rank processes meet: memory shared by all of them. */
#ifndef NETBENCH_WORLD_H
#define NETBENCH_WORLD_H

#include <stdint.h>

#include "plugin/abi.h"
#include "tools/netbench/options.h"

/** What a receiver publishes for one sender and one comm. */
struct meeting {
    uint32_t is_published;
    uint8_t handle[NET_HANDLE_BYTES];
};

struct rank_state {
    uint64_t errors;
    uint64_t beats;      /* grows while it is alive, also when it waits */
    char waits_for[512]; /* what it was doing, for the report of a hang */
};

struct world {
    int ranks, comms;
    uint32_t stop;                /* some rank failed: all give up */
    uint32_t arrived, generation; /* barrier */
    struct rank_state rank[RANKS_MAX];
    struct meeting *meeting; /* [receiver][sender][comm] */
    double *usec;            /* [rank][iteration] */
};

/** Before the ranks are forked. Return 0 or -errno after printing why. */
int world_open(const struct options *options, struct world **out);

struct meeting *world_meeting(struct world *world, int receiver, int sender, int comm);
double *world_usec(struct world *world, int rank);

/** Ask every rank to give up. */
void world_stop(struct world *world);
bool world_stopped(const struct world *world);

/** Wait for all ranks. Return 0, -ECANCELED when one gave up, or -ETIMEDOUT. */
int world_barrier(struct world *world, int timeout_s);

/** Monotonic, in microseconds. */
double world_now(void);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* What the workloads and the program share: one run, and its result. */
#ifndef SIM_WORK_H
#define SIM_WORK_H

#include "tools/sim/options.h"
#include "tools/sim/sim.h"

/* One run: a point of the lists of the command line. */
struct work {
    const struct options *options;
    struct sim_options sim;
    enum sim_band band;
    const char *policy;
    uint32_t nodes;
    uint64_t group; /* GROUP_COUPLED, GROUP_PEER or a number of puts */
    uint64_t bytes;
    uint32_t concurrency, peers;
};

struct work_result {
    double us;          /* time of the slowest rank */
    double put_only_us; /* putsignal */
    double stall_us;    /* policy drain: stall of rank 0 */
    uint32_t transfers; /* number of transfers of a rank */
    uint64_t bytes;     /* bytes that one rank sent over the network */
    uint32_t slowest;
    struct sim_counts counts; /* counts of rank 0, in an iteration with signals */
    struct sim_counts all;
    /* putsignal: counts of rank 0, in one iteration without signals plus one with signals */
    struct sim_counts both;
    struct sim_explain explain; /* causes of the slowest rank */
    uint64_t events, memory_bytes, pairs_most, early;
    struct sim_lost lost;
    uint64_t side_bytes;     /* memory of one side of a connection: the average over those open at the end */
    double user_s, system_s; /* CPU time of the simulator's core */
};

/* Each function runs one simulation. Return 0 or -errno, with a line on stderr. */
int putsignal_play(const struct work *work, struct work_result *result);
int moe_play(const struct work *work, struct work_result *result);
int nccl_play(const struct work *work, struct work_result *result);
int trace_play(const struct work *work, struct work_result *result);
int fused_play(const struct work *work, struct work_result *result);
int alltoall_play(const struct work *work, struct work_result *result);

/* The differences between two counts. */
struct sim_counts work_counts_since(const struct sim_counts *now, const struct sim_counts *before);
/* Fill in the results that every workload has. Call it when no event is left. Return 0, or -EPROTO when order was
 * broken. */
int work_finish(struct sim *sim, struct work_result *result);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* The command line of perseus-sim. */
#ifndef SIM_OPTIONS_H
#define SIM_OPTIONS_H

#include "tools/common/option_table.h"
#include "tools/sim/cluster.h"
#include "tools/sim/sim.h"

enum workload { WORK_PUTSIGNAL, WORK_MOE, WORK_ALLTOALL, WORK_FUSED, WORK_NCCL, WORK_TRACE };

/* How puts and signals are arranged. Up to GROUP_PUTS_MAX: a number of puts a group. As in perseus-perf. */
enum { GROUP_PUTS_MAX = (1 << 20) - 1, GROUP_COUPLED, GROUP_PEER };

enum { SETTINGS_MAX = 64, BANDS = 3 };

struct options {
    enum workload workload;
    const char *workload_name;
    const char *cluster; /* a file, or the name of one of clusters/ */
    const char *setting[SETTINGS_MAX];
    uint32_t settings;
    struct option_list bands, policies, groups, bytes, concurrency, peers, nodes;
    uint32_t queues, window, ring_slots, iterations, warmup, turn, connections, outstanding, passes, rows_per_put,
        rows_per_signal;
    uint32_t all_send, explain, json, statistics, parameters;
    uint64_t seed;
    struct sim_loss loss;
    uint32_t model; /* index in moe_models */
    const char *trace;
    uint32_t collective; /* index in nccl_collective_names */
    uint64_t slice_bytes;
    uint32_t kernel; /* enum fused_kernel */
    uint32_t size, band_pairs, tiles_per_signal;
    uint32_t tokens, experts, compute, relay;
    double zipf;
};

void options_parse(int argc, char **argv, struct options *options);
const char *options_policy_name(const struct options *options, uint32_t i);
const char *options_band_name(enum sim_band band);
/* "coupled", "peer" or the number. */
const char *options_group_name(uint64_t group, char *text, uint32_t bytes);
/* The cluster with all settings, at one end of its ranges. Ends the program when something is wrong. */
void options_cluster(const struct options *options, enum sim_band band, struct sim_cluster *out);

#endif

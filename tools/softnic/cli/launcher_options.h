/* SPDX-License-Identifier: Apache-2.0 */
#ifndef SOFTNIC_LAUNCHER_OPTIONS_H
#define SOFTNIC_LAUNCHER_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>

enum { SN_NICS_MOST = 16 };

/* One value for each NIC of a node, in order. The last one also applies to the rest. */
struct sn_launcher_list {
    uint64_t value[SN_NICS_MOST];
    uint64_t count; /* values given on the command line; the rest are filled in */
};

struct sn_launcher_options {
    uint64_t nics, nodes;                                   /* per node; emulated nodes */
    struct sn_launcher_list rate_bps, latency_ns, loss_ppb; /* 0: not modelled, as for all times below */
    uint64_t wr_cost_ns, doorbell_cost_ns, fence_cost_ns, jitter_ns, seed;
    uint64_t retry_cap_ns; /* 0: the world's default */
    bool fence_strict;
    uint32_t atomic_cap; /* enum ibv_atomic_cap: 1 is HCA */
    bool copier;
    bool odd_empty;
    bool plain_cuda;
    bool efa;
    bool model_given; /* an option that shapes the world was given */
    bool quiet, no_sysfs;
    const char *name; /* name of the world; NULL: made from the process id */
    char **command;
};

/* Read the command line. Return 0 to continue, or a positive number: exit now with this status minus one (--help,
 * --version: 1; bad options: 3, printed on stderr). */
int sn_launcher_options_parse(struct sn_launcher_options *options, int argc, char **argv);

#endif

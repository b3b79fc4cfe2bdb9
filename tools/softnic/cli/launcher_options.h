/* SPDX-License-Identifier: Apache-2.0 */
#ifndef SOFTNIC_LAUNCHER_OPTIONS_H
#define SOFTNIC_LAUNCHER_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>

enum { SN_NICS_MOST = 16 };

/* One value for each NIC of a node, in order; the last one is meant for the rest, too. */
struct sn_launcher_list {
    uint64_t value[SN_NICS_MOST];
    uint64_t count; /* as given; all values are filled in */
};

struct sn_launcher_options {
    uint64_t nics, nodes;                                   /* per node; emulated nodes */
    struct sn_launcher_list rate_bps, latency_ns, loss_ppb; /* 0: not modelled; so are all times below */
    uint64_t wr_cost_ns, doorbell_cost_ns, fence_cost_ns, jitter_ns, seed;
    uint64_t retry_cap_ns; /* 0: as the world has it */
    bool fence_strict;
    bool copier;
    bool efa;
    bool model_given; /* some option above other than the default was named */
    bool quiet, no_sysfs;
    const char *name; /* of the world; NULL: by process id */
    char **command;
};

/** Read the command line. Return 0 to go on, positive = exit now with this status minus one (--help, --version: 1; bad:
 * 3); what was wrong has been said on stderr. */
int sn_launcher_options_parse(struct sn_launcher_options *options, int argc, char **argv);

#endif

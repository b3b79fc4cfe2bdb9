/* SPDX-License-Identifier: Apache-2.0 */
#ifndef SOFTNIC_LAUNCHER_OPTIONS_H
#define SOFTNIC_LAUNCHER_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>

struct sn_launcher_options {
    uint64_t nics, nodes; /* per node; emulated nodes */
    uint64_t rate_bps;    /* 0: not modelled; so are all times below */
    uint64_t latency_ns, wr_cost_ns, doorbell_cost_ns, fence_cost_ns, jitter_ns, seed;
    bool fence_strict;
    bool model_given; /* some option above other than the default was named */
    bool quiet, no_sysfs;
    const char *name; /* of the world; NULL: by process id */
    char **command;
};

/** Read the command line. Return 0 to go on, positive = exit now with this status minus one (--help, --version: 1; bad:
 * 3); what was wrong has been said on stderr. */
int sn_launcher_options_parse(struct sn_launcher_options *options, int argc, char **argv);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* The result of one size: a row of the table, or with --json an object. */
#ifndef NETBENCH_BANDWIDTH_H
#define NETBENCH_BANDWIDTH_H

#include "tools/netbench/holding.h"
#include "tools/netbench/net.h"
#include "tools/netbench/job.h"

enum { RATIOS_MAX = 8192 };

/* Ratios of the plugin's times to the peer's, each from two successive slices. */
struct ratios {
    int count;
    double value[RATIOS_MAX];
};

void bandwidth_print_head(const struct options *options);
/* The times of all ranks are in the job, and are sorted there. */
void bandwidth_print_size(const struct options *options, const struct net *net, struct job *job, size_t bytes,
                          int iterations);

/* Print median and quartiles of the ratios, which are sorted here. */
void bandwidth_print_ratio(const struct options *options, size_t bytes, struct ratios *ratios);

/* Print what rank 0 held after the first rounds and after the last. */
void bandwidth_print_holding(const struct options *options, const struct holding *before, const struct holding *now);

#endif

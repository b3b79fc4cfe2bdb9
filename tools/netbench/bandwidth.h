/* SPDX-License-Identifier: Apache-2.0 */
/* The result of one size: a row of the table, or with --json an object. */
#ifndef NETBENCH_BANDWIDTH_H
#define NETBENCH_BANDWIDTH_H

#include "tools/netbench/holding.h"
#include "tools/netbench/net.h"
#include "tools/netbench/job.h"

enum { RATIOS_MAX = 8192 };

/* Times of the plugin by those of the peer, each of two slices that followed each other. */
struct ratios {
    int count;
    double value[RATIOS_MAX];
};

void bandwidth_print_head(const struct options *options);
/* The times of all ranks are in the job, and are sorted there. */
void bandwidth_print_size(const struct options *options, const struct net *net, struct job *job, size_t bytes);

/* Median and quartiles of the ratios, which it sorts. */
void bandwidth_print_ratio(const struct options *options, size_t bytes, struct ratios *ratios);

/* What rank 0 held after the first rounds and after the last. */
void bandwidth_print_holding(const struct options *options, const struct holding *before, const struct holding *now);

#endif

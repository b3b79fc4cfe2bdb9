/* SPDX-License-Identifier: Apache-2.0 */
/** Results of one size: a table's row, or with --json an object a line. */
#ifndef NETBENCH_REPORT_H
#define NETBENCH_REPORT_H

#include "tools/netbench/net.h"
#include "tools/netbench/world.h"

void report_head(const struct options *options);
/** Times of all ranks are in the world; sorts them there. */
void report_size(const struct options *options, const struct net *net, struct world *world, size_t bytes);

#endif

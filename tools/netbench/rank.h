/* SPDX-License-Identifier: Apache-2.0 */
/* One rank process. */
#ifndef NETBENCH_RANK_H
#define NETBENCH_RANK_H

#include "tools/netbench/options.h"
#include "tools/netbench/job.h"

/* Run all sizes, with a job for each plugin; rank 0 prints the results. Return the process's exit status. */
int rank_run(const struct options *options, struct job *const *jobs, int rank);

#endif

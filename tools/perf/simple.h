/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TOOLS_PERF_SIMPLE_H
#define TOOLS_PERF_SIMPLE_H

#include "tools/perf/bench.h"

/* put, latency, msgrate and alltoall, over the options' policies and sizes. Collective. Return 0, 1 or -errno. */
int simple_run(struct bench *bench);

#endif

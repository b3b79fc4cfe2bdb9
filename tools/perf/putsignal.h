/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TOOLS_PERF_PUTSIGNAL_H
#define TOOLS_PERF_PUTSIGNAL_H

#include "tools/perf/putsignal_cell.h"

/* Collective: rank 0 puts to ranks 1..peers, alternately without and with signals. Rank 0 fills result. Return 0 or
 * -errno. */
int putsignal_run(struct bench *bench, const struct cell *cell, struct putsignal_result *result);

#endif

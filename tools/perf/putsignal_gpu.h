/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TOOLS_PERF_PUTSIGNAL_GPU_H
#define TOOLS_PERF_PUTSIGNAL_GPU_H

#include "tools/perf/putsignal_cell.h"

/* A cell whose sender is a persistent kernel. Return 0 or -errno. */
int putsignal_gpu_send(struct bench *bench, const struct cell *cell, struct putsignal_result *result);
int putsignal_gpu_receive(struct bench *bench, const struct cell *cell);
int putsignal_gpu_clear(struct bench *bench, const struct cell *cell);

#endif

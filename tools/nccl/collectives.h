/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TOOLS_NCCL_COLLECTIVES_H
#define TOOLS_NCCL_COLLECTIVES_H

#include "tools/nccl/meeting.h"

/* One rank, from start to end; rank 0 prints a JSON object for each row. Return the process's exit status. */
int collectives_run(const struct options *options, struct meeting *meeting, uint32_t rank);

#endif

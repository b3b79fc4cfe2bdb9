/* SPDX-License-Identifier: Apache-2.0 */
/* Memory that the rank processes share. They wait for each other without sleeping, since a measurement follows. */
#ifndef TOOLS_NCCL_MEETING_H
#define TOOLS_NCCL_MEETING_H

#include <stdatomic.h>

#include "tools/nccl/nccl_library.h"
#include "tools/nccl/options.h"

/* Anonymous shared memory, made before the ranks are forked. */
struct meeting {
    _Atomic uint32_t arrived, round;
    _Atomic uint64_t wrong;
    _Atomic bool failed;
    struct nccl_unique_id id;
    double usec[RANKS_MAX];
};

/* Wait until all ranks are here. Ends the process when a rank has failed, or, with a line on stderr, after the
 * limit. */
void meeting_wait(const struct options *options, struct meeting *meeting, uint32_t rank);

#endif

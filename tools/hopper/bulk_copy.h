/* SPDX-License-Identifier: Apache-2.0 */
/* The copy engine of an SM. */
#ifndef TOOLS_HOPPER_BULK_COPY_H
#define TOOLS_HOPPER_BULK_COPY_H

#include "tools/hopper/device_memory.h"

namespace hopper
{

/* Forgets everything in flight, after a violation. */
void copies_drop(void);
/* A cheap sum over shared memory, to see that nobody writes what is still to be read. */
uint64_t shared_sum(const uint8_t *p, uint32_t bytes, uint64_t sum);

} // namespace hopper

#endif

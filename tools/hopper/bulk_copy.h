/* SPDX-License-Identifier: Apache-2.0 */
/* Bulk and tensor copies between global and shared memory. */
#ifndef TOOLS_HOPPER_BULK_COPY_H
#define TOOLS_HOPPER_BULK_COPY_H

#include "tools/hopper/device_memory.h"

namespace hopper
{

/* Forgets all copies in flight, after a violation. */
void copies_forget(void);
/* A cheap checksum of shared memory, to notice that something was written before an operation has read it. */
uint64_t shared_checksum(const uint8_t *p, uint32_t bytes, uint64_t sum);

} // namespace hopper

#endif

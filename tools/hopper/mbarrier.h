/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TOOLS_HOPPER_MBARRIER_H
#define TOOLS_HOPPER_MBARRIER_H

#include "tools/hopper/scheduler.h"

namespace hopper
{

/* A copy that `issuer` has issued has written bytes to the shared memory of c. */
void mbarrier_complete_bytes(const struct fiber *issuer, struct cta *c, uint32_t address, uint32_t bytes);

} // namespace hopper

#endif

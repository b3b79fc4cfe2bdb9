/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TOOLS_HOPPER_MBARRIER_H
#define TOOLS_HOPPER_MBARRIER_H

#include "tools/hopper/scheduler.h"

namespace hopper
{

/* A copy of `issuer` has brought bytes to the CTA c. */
void mbarrier_complete_bytes(const struct fiber *issuer, struct cta *c, uint32_t address, uint32_t bytes);

} // namespace hopper

#endif

/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TOOLS_HOPPER_VIRTUAL_H
#define TOOLS_HOPPER_VIRTUAL_H

namespace hopper
{

/* The driver's call of this name, if it manages virtual memory; NULL otherwise. */
void *virtual_call(const char *name);

} // namespace hopper

#endif

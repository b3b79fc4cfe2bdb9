/* SPDX-License-Identifier: Apache-2.0 */
/* Device memory in a world with a copier (copier.h): the functions of device_mem.h hand each copy to that process, so
 * that no thread of this one calls the CUDA driver during a transfer. Memory without a handle that the copier could
 * open stays with its owner: the initiator itself, or the agent of the other side (owner_copy.h). */
#ifndef SOFTNIC_COPIER_CLIENT_H
#define SOFTNIC_COPIER_CLIENT_H

#include "tools/softnic/memory/device_mem.h"

/* Set sn_device_mem for a process that has just joined this world: CUDA in this process, or the copier. */
void sn_device_mem_choose(const struct sn_world *world);

/* Wait until the copier has ended every copy that began before the call. Return 0 or -ETIMEDOUT. */
int sn_copier_wait(const struct sn_world *world, uint64_t give_up);

#endif

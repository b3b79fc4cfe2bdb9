/* SPDX-License-Identifier: Apache-2.0 */
/* The namespaces of a world's command, for a launcher that joins the world. Processes copy from and to each other's
 * memory. The kernel allows this within one user namespace, and from outside into it, but not between two namespaces
 * that an unprivileged user made separately. */
#ifndef SOFTNIC_NAMESPACES_H
#define SOFTNIC_NAMESPACES_H

#include <stdbool.h>
#include <stdint.h>

#include "tools/softnic/world/world.h"

/* Enter the user namespace of the process that the world's launcher made for its command, if it has one of its own;
 * mounts: its mount namespace too, with its /sys/class/infiniband. Wait until that process is in its namespaces, for
 * some seconds at most. Return 1 (entered), 0 (it is in the caller's user namespace), -ESRCH (it has ended), -ETIMEDOUT
 * (it is not ready), or another -errno; the pid goes to *pid (0: unknown). */
int sn_namespaces_enter(const struct sn_world *world, bool mounts, uint32_t *pid);

#endif

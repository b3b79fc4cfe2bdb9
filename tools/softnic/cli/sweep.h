/* SPDX-License-Identifier: Apache-2.0 */
/* Worlds as files: list them, and remove those that no process can use any more. */
#ifndef SOFTNIC_SWEEP_H
#define SOFTNIC_SWEEP_H

#include <stdbool.h>

#include "tools/softnic/world/world.h"

#define SN_WORLD_DIR "/dev/shm"

/* Path of the world that a user calls `name`: a path is taken as it is; anything else is the name given to softnic-run
 * --name. */
void sn_sweep_path(const char *name, char *path, size_t bytes);

/* Free what dead processes left, and return how many processes of the world still run. */
unsigned sn_sweep_members(struct sn_world *world);

/* Call visit for every world file, mapped, in no particular order. */
void sn_sweep_each(void (*visit)(const char *path, struct sn_world *world, void *arg), void *arg);

/* Remove every abandoned world. Return how many. */
unsigned sn_sweep_all(void);

#endif

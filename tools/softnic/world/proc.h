/* SPDX-License-Identifier: Apache-2.0 */
/* The process table: which processes take part in a world, which of them are dead, and what these left behind. */
#ifndef SOFTNIC_PROC_H
#define SOFTNIC_PROC_H

#include "tools/softnic/world/world.h"

/* True when pid exists and is neither a zombie nor dead. */
bool sn_pid_runs(uint32_t pid);

/* True when it is stopped, traced or gone: it will not continue by itself. */
bool sn_pid_stopped(uint32_t pid);

/* Start time of a process in clock ticks since boot; 0 when it does not run. */
uint64_t sn_pid_start(uint32_t pid);

/* Enter this process into the table. nonce_addr: where it keeps the nonce, a word that others read back to identify
 * it. Dead processes are swept as well. Return 0, -ENOMEM (table full), or -ESTALE (the world was removed meanwhile:
 * open it again). */
int sn_proc_enter(struct sn_world *world, uint64_t nonce, const uint64_t *nonce_addr, uint32_t node, uint32_t *index);

/* Leave the table. Objects that are left are hidden, and freed: at once if none is a queue pair, on which threads of
 * this process may be at work, else by a sweep after its end. The last process to leave an ephemeral world removes its
 * file, path. */
void sn_proc_leave(struct sn_world *world, uint32_t index, const char *path);

/* True when the process that created the world still runs. */
bool sn_creator_lives(const struct sn_world *world);

/* Remove the world's file, path, if its creator and all its processes are gone; with `force`, always. Return whether it
 * was removed. */
bool sn_world_remove(struct sn_world *world, const char *path, bool force);

/* True when that process still runs (reads /proc: some 10 us). */
bool sn_proc_alive(const struct sn_proc *proc);

/* Free the objects of every dead process, except those that an initiator is still using: a later sweep frees them.
 * Return how many processes were swept. */
unsigned sn_proc_sweep(struct sn_world *world);

#endif

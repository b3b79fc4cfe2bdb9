/* SPDX-License-Identifier: Apache-2.0 */
/* The copier's process (copier.h), from the launcher's side. */
#ifndef SOFTNIC_LAUNCHER_COPIER_H
#define SOFTNIC_LAUNCHER_COPIER_H

#include <signal.h>
#include <sys/types.h>

/** Start it, as a child, with the library in libdir, for the world of SOFTNIC_WORLD in the environment that
 * prepare(arg) makes. It has joined the world when this returns, ignores what the terminal sends, and dies with this
 * process. Return its pid or -errno; said on stderr. */
pid_t sn_launcher_copier_start(const char *libdir, int (*prepare)(const void *arg), const void *arg);

/** End it and wait for that. pid 0: there is none. */
void sn_launcher_copier_stop(pid_t pid);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* The copier's process (copier.h), from the launcher's side. */
#ifndef SOFTNIC_LAUNCHER_COPIER_H
#define SOFTNIC_LAUNCHER_COPIER_H

#include <signal.h>
#include <sys/types.h>

/* Start the copier as a child, with the library in libdir and the environment that prepare(arg) sets, which names the
 * world. When this returns, the copier has joined the world. It ignores the terminal's signals and dies with this
 * process. Return its pid, or -errno after printing the reason. */
pid_t sn_launcher_copier_start(const char *libdir, int (*prepare)(const void *arg), const void *arg);

/* End the copier and wait for its exit. pid 0: there is none. */
void sn_launcher_copier_stop(pid_t pid);

#endif

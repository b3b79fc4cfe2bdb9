/* SPDX-License-Identifier: Apache-2.0 */
/* The other side, started by this one: over ssh, srun, or any command that runs another one. */
#ifndef HWCHECK_LAUNCH_H
#define HWCHECK_LAUNCH_H

#include <stddef.h>
#include <stdio.h>

/* Fill in a cookie that nobody can guess. Return 0, or -errno after printing why. */
int make_cookie(char *cookie, size_t bytes);

/* Run `command`, followed by this program with --listen. The cookie goes through its standard input, where other users
 * cannot see it; when that is closed, a listener without a client ends. Return NULL after printing why. */
FILE *launch(const char *command, unsigned port, const char *cookie);
/* Wait until it has ended. Return its exit status. */
int launched_end(FILE *launched);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* Loading kernels. With lazy loading, the default, a kernel is loaded when it is first asked for, which may wait for
 * all running kernels: also for a collective of another library that waits for another rank. So all kernels are loaded
 * when a context opens, and opening a plan or launching waits for nothing. */
#ifndef PERSEUS_FUSED_LOAD_H
#define PERSEUS_FUSED_LOAD_H

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Loads kernels on the current device. 0 or -ENOTSUP. */
typedef int prs_load_fn(void);

/* Called by static initialisers, so that the core need not know the kernels. Returns true. */
bool prs_load_add(prs_load_fn *load);
/* Calls all functions that were added. 0 or -ENOTSUP (logged). */
int prs_load_all(int device);

#ifdef __cplusplus
}
#endif

#endif

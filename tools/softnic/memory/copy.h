/* SPDX-License-Identifier: Apache-2.0 */
/* Copying between registered memory of two processes, one of which is the caller's: by this process where it can, else
 * by the owner of the other side's memory. */
#ifndef SOFTNIC_COPY_H
#define SOFTNIC_COPY_H

#include "tools/softnic/memory/atomic.h"

/* Copy, the last bytes last; an aligned destination of 4 or 8 bytes gets one store. If this process cannot map the
 * other side's device memory, its owner copies. Return 0 (done), SN_COPY_BUSY (call sn_copy_poll until it returns
 * something else), -ESRCH (the other process is gone), -EFAULT (memory is not mapped), -EPERM, or -EIO. */
int sn_copy_start(struct sn_copy *copy);
int sn_copy_poll(struct sn_copy *copy);

/* Atomic among all requests of the world. Return as sn_copy_start; *found is filled in at the end. Both structures
 * must stay until then. */
int sn_copy_atomic(struct sn_copy *copy, struct sn_atomic *atomic);

#endif

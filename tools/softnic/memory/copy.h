/* SPDX-License-Identifier: Apache-2.0 */
/* Moving bytes between registered memory of two processes, one of which is the caller's: by this process where it can, else
 * by the owner of the other side's memory. */
#ifndef SOFTNIC_COPY_H
#define SOFTNIC_COPY_H

#include "tools/softnic/memory/atomic.h"

/** Copy (device memory that cannot be mapped here: have its owner copy), the last bytes last; an aligned 4 or 8 byte
 * destination gets one store. Return 0 (done), SN_COPY_BUSY (device memory: call sn_copy_poll until it is not),
 * -ESRCH (the other process is gone), -EFAULT (memory is not mapped), -EPERM, -EIO. */
int sn_copy_start(struct sn_copy *copy);
int sn_copy_poll(struct sn_copy *copy);

/** Atomic among all requests of the world. Return as sn_copy_start; *found is filled in when it is done. Both must
 * stay until then. */
int sn_copy_atomic(struct sn_copy *copy, struct sn_atomic *atomic);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* Copying host memory within this process, or between it and another, on the calling thread. */
#ifndef SOFTNIC_HOST_COPY_H
#define SOFTNIC_HOST_COPY_H

#include "tools/softnic/memory/span.h"

/* Copy, the last bytes last; a destination of 4 or 8 aligned bytes gets one store. Return 0, -ESRCH (the other process
 * is gone), -EFAULT (memory there is not mapped), -EINVAL (memory here is not), -EPERM, or -EIO. */
int sn_host_copy_spans(const struct sn_copy *copy);

enum { SN_WRITE_BATCH = 32, SN_WRITE_BATCH_BYTES = 4096 /* longer writes gain nothing from sharing a system call */ };

/* Write count pieces of host memory of this process to the same number of pieces of the other, in order, with one
 * system call. dst[i] and src[i] are equally long. Return 0, or -EAGAIN: perhaps not all were written; write them one
 * by one to learn what is wrong. */
int sn_host_writes(struct sn_world *world, uint32_t dst_proc, const struct sn_span *dst, const struct sn_span *src,
                   unsigned count);

/* Read memory of a process, which may be this one: then what another thread unmaps meanwhile does no harm. Return 0,
 * -ESRCH, -EPERM, or -EFAULT. */
int sn_host_read(uint32_t pid, uint64_t from, void *to, size_t bytes);

/* True when the process exists and is still the one that entered the world. */
bool sn_process_reachable(struct sn_world *world, uint32_t proc);

#endif

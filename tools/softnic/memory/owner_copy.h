/* SPDX-License-Identifier: Apache-2.0 */
/* Ask the owner of device memory to make a copy that this process cannot make.
 *
 * The job names the initiator's buffers as they are, and the owner copies between them and its own memory. Where the
 * owner cannot reach the initiator's side either (device memory on both sides that nobody else can open), pieces go
 * through host memory of the initiator, four at a time: one is copied here while others are copied there. */
#ifndef SOFTNIC_OWNER_COPY_H
#define SOFTNIC_OWNER_COPY_H

#include "tools/softnic/memory/span.h"

/* As sn_copy_start and sn_copy_poll. An owner that is gone, or does not move for 4 s, gives -ESRCH. */
int sn_owner_copy_start(struct sn_copy *copy);
int sn_owner_copy_poll(struct sn_copy *copy);

/* As sn_copy_atomic, without the steps. */
int sn_owner_copy_atomic(struct sn_copy *copy, bool cas, uint64_t compare_add, uint64_t swap, uint64_t *found);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* A copy that this process makes by itself: of host memory, alone or with the help of threads, or of device memory. */
#ifndef SOFTNIC_LOCAL_COPY_H
#define SOFTNIC_LOCAL_COPY_H

#include "tools/softnic/memory/span.h"

/* Return as sn_copy_start, or SN_COPY_OWNER: only the owner of the other side's memory can copy it. Only device copies
 * take time; poll them with sn_device_mem->copy_poll. */
int sn_local_copy_start(struct sn_copy *copy);

#endif

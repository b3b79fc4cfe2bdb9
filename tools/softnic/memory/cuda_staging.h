/* SPDX-License-Identifier: Apache-2.0 */
/* Pinned memory of this process, through which pageable host memory and GPUs exchange data. */
#ifndef SOFTNIC_CUDA_STAGING_H
#define SOFTNIC_CUDA_STAGING_H

#include "tools/softnic/memory/cuda_api.h"

enum {
    SN_STAGING_SMALL = 16 << 10, /* bytes of a small slot: short messages do not queue behind pieces of long ones */
    SN_STAGING_LARGE = 512 << 10,
};

struct sn_staging_slot {
    struct sn_staging_slot *next;
    void *host;
    bool large;
};

/* Pin the slots, once; the GPU must be current. Return 0 or -EIO (logged). */
int sn_staging_init(const struct sn_cuda *cuda);

/* A slot for that many bytes (at most SN_STAGING_LARGE), or NULL when all are in use: try later. */
struct sn_staging_slot *sn_staging_take(size_t bytes);
void sn_staging_give(struct sn_staging_slot *slot);

/* SN_BOUNCE_BYTES of pinned memory (device_mem.h), or NULL when all are in use. Kept apart from the slots: the holder
 * waits for another process, which may need slots for that, and whose own slots may all be waiting for this
 * process. */
void *sn_staging_bounce_take(void);
void sn_staging_bounce_give(void *bounce);

#endif

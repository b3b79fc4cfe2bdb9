/* SPDX-License-Identifier: Apache-2.0 */
/* Threads that copy host memory, or help with it: one core copies about 10 GB/s, which is less than a GPU or a NIC
 * takes. */
#ifndef SOFTNIC_COPY_THREADS_H
#define SOFTNIC_COPY_THREADS_H

#include "tools/softnic/memory/span.h"

enum { SN_HOST_COPY_BUSY = 1, SN_SPLIT_LEAST = 128 << 10 };

/* One copy of contiguous host memory between two processes, one of them the caller's. It must stay in place until it is
 * done. */
struct sn_host_copy {
    struct sn_host_copy *next;
    struct sn_world *world;
    uint32_t self, dst_proc, src_proc;
    uint64_t dst, src, bytes;
    int result; /* SN_HOST_COPY_BUSY, then as sn_copy_start; read it with sn_host_copy_result */
};

/* Copy on the calling thread. Return as sn_copy_start. */
int sn_host_copy_now(struct sn_host_copy *copy);

/* Give the copy to a thread. Where there are no threads, it is made here. */
void sn_host_copy_start(struct sn_host_copy *copy);

/* Copy on the calling thread, with the help of idle threads: for SN_SPLIT_LEAST bytes or more. The last bytes are
 * written when all others are. Return as sn_copy_start; after an error any part may have been copied. */
int sn_host_copy_split(const struct sn_host_copy *copy);

/* May threads help? Not where cores are few. */
bool sn_host_copy_can_split(void);

static inline int sn_host_copy_result(const struct sn_host_copy *copy)
{
    /* [copy-result] acquire; pairs with the release in copy_first_locked: the bytes are there. */
    return __atomic_load_n(&copy->result, __ATOMIC_ACQUIRE);
}

#endif

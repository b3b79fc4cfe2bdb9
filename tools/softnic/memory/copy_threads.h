/* SPDX-License-Identifier: Apache-2.0 */
/* Threads that copy host memory, or help with it: one core copies some 10 GB/s, which is less than a GPU or a link
 * takes.
 */
#ifndef SOFTNIC_MOVER_H
#define SOFTNIC_MOVER_H

#include "tools/softnic/memory/span.h"

enum { SN_MOVE_UNDER_WAY = 1, SN_SHARE_LEAST = 128 << 10 };

/* One copy of contiguous host memory between two processes, one of them the caller's. Must stay where it is until it is
 * done. */
struct sn_move {
    struct sn_move *next;
    struct sn_world *world;
    uint32_t self, dst_proc, src_proc;
    uint64_t dst, src, bytes;
    int result; /* SN_MOVE_UNDER_WAY, then as sn_place_start; read it with sn_move_result */
};

/** Do it here and now. Return as sn_place_start. */
int sn_move_now(struct sn_move *move);

/** Give it to a thread; without threads it is done here. */
void sn_move_start(struct sn_move *move);

/** Do it here and now, with the threads that are free: for SN_SHARE_LEAST bytes or more. The last bytes are placed when
 * all others are. Return as sn_place_start; after an error any part may have been copied. */
int sn_move_shared(const struct sn_move *move);

/** Whether there are threads to share with: not where cores are few. */
bool sn_move_shares(void);

static inline int sn_move_result(const struct sn_move *move)
{
    /* M1: acquire; pairs with the release in mover.c: what was copied is there. */
    return __atomic_load_n(&move->result, __ATOMIC_ACQUIRE);
}

#endif

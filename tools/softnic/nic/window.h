/* SPDX-License-Identifier: Apache-2.0 */
/* Memory windows of type 2: other keys for parts of a registration, which the send queue of one queue pair makes and
 * invalidates, and which only that queue pair's peer can use. */
#ifndef SOFTNIC_WINDOW_H
#define SOFTNIC_WINDOW_H

#include "tools/softnic/nic/queue_pair.h"

/* Requests that touch no other queue pair. */
static inline bool sn_is_local(uint32_t opcode)
{
    return opcode == IBV_WR_BIND_MW || opcode == IBV_WR_LOCAL_INV;
}

/* Fill in a request that binds. Return 0 or EINVAL. */
int sn_window_bind_fill(const struct sn_qp *qp, struct sn_wqe *w, const struct ibv_mw *mw, uint32_t rkey,
                        const struct ibv_mw_bind_info *info);

/* Bind or invalidate. Return 0 (w->status: the outcome), or SN_EXEC_CROWDED: a peer still uses the window. The caller
 * is the runner. */
int sn_window_execute(struct sn_qp *qp, struct sn_wqe *w);

/* The window that key names, if target's peer may use it; else NULL. */
struct sn_mr_shm *sn_window_find(const struct sn_qp_shm *target, uint32_t key);

#endif

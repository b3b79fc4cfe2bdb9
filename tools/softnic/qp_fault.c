/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/qp_fault.h"

#include <errno.h>
#include <infiniband/verbs.h>

#include "tools/softnic/lock.h"
#include "tools/softnic/object.h"
#include "tools/softnic/wake.h"

int sn_qp_fault(struct sn_world *world, uint32_t qpn)
{
    struct sn_qp_shm *qp = sn_qp_find(world, qpn);
    if (!qp)
        return -ENOENT;
    sn_lock_take(&qp->lock);
    __atomic_store_n(&qp->state, IBV_QPS_ERR, __ATOMIC_RELEASE);
    sn_lock_drop(&qp->lock);
    sn_async_raise(world, qp->ctx, IBV_EVENT_QP_FATAL, qpn);
    return 0;
}

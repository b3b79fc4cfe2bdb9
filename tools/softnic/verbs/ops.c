/* SPDX-License-Identifier: Apache-2.0 */
/* The function tables behind struct ibv_context: inline wrappers in <infiniband/verbs.h> call these instead of symbols.
 * A NULL in the extended table means EOPNOTSUPP. Entries that a wrapper calls without checking must not be NULL; they
 * return the error themselves. */
#include "tools/softnic/verbs/cq.h"
#include "tools/softnic/verbs/devices.h"
#include "tools/softnic/verbs/qp.h"

/* Only for windows of type 1, which are not supported. */
static int no_bind_mw(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *bind)
{
    return EOPNOTSUPP;
}

static int no_close_xrcd(struct ibv_xrcd *xrcd)
{
    return EOPNOTSUPP;
}

static struct ibv_srq *srq_create_ex(struct ibv_context *context, struct ibv_srq_init_attr_ex *attr)
{
    errno = EOPNOTSUPP; /* the wrapper calls ibv_create_srq() for basic SRQs */
    return NULL;
}

static int rt_values(struct ibv_context *context, struct ibv_values_ex *values)
{
    if (values->comp_mask & IBV_VALUES_MASK_RAW_CLOCK)
        clock_gettime(CLOCK_MONOTONIC, &values->raw_clock);
    values->comp_mask &= IBV_VALUES_MASK_RAW_CLOCK;
    return 0;
}

void sn_ops_fill(struct verbs_context *verbs, bool efa)
{
    struct ibv_context *context = &verbs->context;

    verbs->sz = sizeof(*verbs);
    verbs->query_port = sn_port_query;
    verbs->query_device_ex = sn_device_query_ex;
    verbs->create_cq_ex = sn_cq_create_ex;
    verbs->modify_cq = sn_cq_modify;
    verbs->create_qp_ex = sn_qp_create_ex;
    verbs->create_srq_ex = srq_create_ex;
    verbs->close_xrcd = no_close_xrcd;
    verbs->query_rt_values = rt_values;
    verbs->alloc_td = sn_td_alloc;
    verbs->dealloc_td = sn_td_dealloc;
    verbs->alloc_parent_domain = sn_parent_domain_alloc;
    if (!efa) {
        verbs->alloc_dm = sn_dm_alloc;
        verbs->free_dm = sn_dm_free;
        verbs->reg_dm_mr = sn_dm_reg;
        verbs->advise_mr = sn_mr_advise;
    }
    context->abi_compat = __VERBS_ABI_IS_EXTENDED;
    context->ops.alloc_mw = sn_mw_alloc;
    context->ops.bind_mw = no_bind_mw;
    context->ops.dealloc_mw = sn_mw_dealloc;
    context->ops.poll_cq = sn_cq_poll;
    context->ops.req_notify_cq = sn_cq_req_notify;
    context->ops.post_send = sn_post_send;
    context->ops.post_recv = sn_post_recv;
    context->ops.post_srq_recv = sn_post_srq_recv;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/verbs/efadv.h"

#include <errno.h>
#include <string.h>

#include "tools/softnic/nic/datagram.h"
#include "tools/softnic/nic/srd.h"
#include "tools/softnic/verbs/cq.h"
#include "tools/softnic/verbs/qp.h"

enum {
    VENDOR = 0x1d0f, /* Amazon */
    PART = 0xefa1, /* EFA of the second generation: perftest of Debian 12 knows no later one and would test no reads */
};

static bool is_efa(struct ibv_context *context)
{
    return sn_ctx_dev(sn_ctx_of(context))->efa;
}

/* Is the caller's structure, `bytes` long, long enough for ours up to this field, and is everything after ours zero? */
#define LONG_ENOUGH(type, field, bytes) ((bytes) >= offsetof(type, field) + sizeof(((type *)0)->field))

static bool zero_behind(const void *data, size_t mine, size_t bytes)
{
    for (size_t i = mine; i < bytes; i++)
        if (((const uint8_t *)data)[i])
            return false;
    return true;
}

void sn_efa_limits(struct ibv_device_attr *attr)
{
    attr->vendor_id = VENDOR;
    attr->vendor_part_id = PART;
    attr->device_cap_flags = 0;
    attr->max_qp_wr = SN_SRD_MAX_SQ_WR;
    attr->max_sge = SN_SRD_MAX_SQ_SGE;
    attr->max_sge_rd = SN_SRD_MAX_RDMA_SGE;
    attr->atomic_cap = IBV_ATOMIC_NONE;
    attr->max_qp_rd_atom = attr->max_res_rd_atom = attr->max_qp_init_rd_atom = 0;
    attr->max_mw = 0;
    attr->max_srq = attr->max_srq_wr = attr->max_srq_sge = 0;
}

int sn_efadv_query_device(struct ibv_context *context, struct sn_efa_device *attr, uint32_t bytes)
{
    struct sn_efa_device mine = {
        .max_sq_wr = SN_SRD_MAX_SQ_WR,
        .max_rq_wr = SN_SRD_MAX_RQ_WR,
        .max_sq_sge = SN_SRD_MAX_SQ_SGE,
        .max_rq_sge = SN_SRD_MAX_RQ_SGE,
        .inline_buf_size = SN_SRD_MAX_INLINE,
        .device_caps = SN_EFA_RDMA_READ | SN_EFA_RNR_RETRY | SN_EFA_CQ_WITH_SGID | SN_EFA_RDMA_WRITE,
        .max_rdma_size = SN_SRD_MAX_RDMA,
    };

    if (!is_efa(context))
        return EOPNOTSUPP;
    if (!LONG_ENOUGH(struct sn_efa_device, inline_buf_size, bytes))
        return EINVAL;
    memset(attr, 0, bytes);
    memcpy(attr, &mine, bytes < sizeof(mine) ? bytes : sizeof(mine));
    return 0;
}

struct ibv_qp *sn_efadv_create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr,
                                     struct sn_efa_qp_init *efa, uint32_t bytes)
{
    if (!is_efa(context)) {
        errno = EOPNOTSUPP;
        return NULL;
    }
    if (!LONG_ENOUGH(struct sn_efa_qp_init, driver_qp_type, bytes) || efa->comp_mask ||
        !zero_behind(efa, offsetof(struct sn_efa_qp_init, reserved), bytes)) {
        sn_log("efadv_create_qp_ex on %s: comp_mask or flags that are not supported", context->device->name);
        errno = EINVAL;
        return NULL;
    }
    if (attr->qp_type == IBV_QPT_DRIVER && efa->driver_qp_type != SN_EFA_SRD) {
        sn_log("efadv_create_qp_ex on %s: driver_qp_type %u: only SRD is there", context->device->name,
               efa->driver_qp_type);
        errno = EOPNOTSUPP;
        return NULL;
    }
    return sn_qp_create_srd(context, attr);
}

struct ibv_qp *sn_efadv_create_driver_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *init, uint32_t type)
{
    struct sn_efa_qp_init efa = {.driver_qp_type = type};
    struct ibv_qp_init_attr_ex attr = sn_qp_init_extend(pd, init);
    struct ibv_qp *qp = sn_efadv_create_qp_ex(pd->context, &attr, &efa, sizeof(efa));

    if (qp)
        init->cap = attr.cap;
    return qp;
}

int sn_efadv_query_ah(struct ibv_ah *ah, struct sn_efa_ah *attr, uint32_t bytes)
{
    struct sn_efa_ah mine = {.ahn = (uint16_t)((struct sn_ah *)ah)->dev};

    if (!is_efa(ah->context))
        return EOPNOTSUPP;
    if (!LONG_ENOUGH(struct sn_efa_ah, ahn, bytes))
        return EINVAL;
    memset(attr, 0, bytes);
    memcpy(attr, &mine, bytes < sizeof(mine) ? bytes : sizeof(mine));
    return 0;
}

/* The sender of the receive that is being polled. EFA reports it only while it has no address handle for the sender. */
static int wc_read_sgid(struct sn_efa_cq *efa, union ibv_gid *sgid)
{
    const struct sn_cq *cq = (const struct sn_cq *)((const uint8_t *)efa - offsetof(struct sn_cq, efa));

    if (!cq->current.is_recv)
        return -EINVAL;
    memcpy(sgid->raw, sn_self->world->devs[cq->current.src_dev].gid[0], sizeof(sgid->raw));
    return 0;
}

struct ibv_cq_ex *sn_efadv_create_cq(struct ibv_context *context, struct ibv_cq_init_attr_ex *attr,
                                     struct sn_efa_cq_init *efa, uint32_t bytes)
{
    struct ibv_cq_ex *cq;

    if (!is_efa(context)) {
        errno = EOPNOTSUPP;
        return NULL;
    }
    if (!LONG_ENOUGH(struct sn_efa_cq_init, wc_flags, bytes) || efa->comp_mask ||
        (efa->wc_flags & ~(uint64_t)SN_EFA_WC_WITH_SGID) || !zero_behind(efa, sizeof(*efa), bytes)) {
        errno = EINVAL;
        return NULL;
    }
    cq = sn_cq_create_ex(context, attr);
    if (cq && (efa->wc_flags & SN_EFA_WC_WITH_SGID))
        sn_cq_of_ex(cq)->efa.wc_read_sgid = wc_read_sgid;
    return cq;
}

struct sn_efa_cq *sn_efadv_cq_from_ibv_cq_ex(struct ibv_cq_ex *cq)
{
    if (is_efa(cq->context))
        return &sn_cq_of_ex(cq)->efa;
    errno = EOPNOTSUPP;
    return NULL;
}

/* The interconnect that each kind of access uses. There is none here, so no value is marked valid. */
int sn_efadv_query_mr(struct ibv_mr *mr, void *attr, uint32_t bytes)
{
    if (!is_efa(mr->context))
        return EOPNOTSUPP;
    memset(attr, 0, bytes);
    return 0;
}

/* The limit is the same for all buffers. */
int sn_efadv_get_max_sq_depth(struct ibv_context *context, void *attr, uint32_t bytes)
{
    return is_efa(context) ? SN_SRD_MAX_SQ_WR : -EOPNOTSUPP;
}

int sn_efadv_get_max_rq_depth(struct ibv_context *context, void *attr, uint32_t bytes)
{
    return is_efa(context) ? SN_SRD_MAX_RQ_WR : -EOPNOTSUPP;
}

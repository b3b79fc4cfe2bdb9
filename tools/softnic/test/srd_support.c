/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/test/srd_support.h"

#include <errno.h>
#include <string.h>

struct sn_config srd_config(void)
{
    struct sn_config config;

    sn_config_default(&config);
    config.nics = 2;
    config.efa = 1;
    return config;
}

struct sn_world *srd_world(void)
{
    struct sn_config config = srd_config();

    return test_world(&config);
}

void srd_queue_make(struct end *e, uint32_t wrs)
{
    struct efadv_qp_init_attr efa = {.driver_qp_type = EFADV_QP_DRIVER_TYPE_SRD};
    struct ibv_qp_init_attr_ex attr = {.send_cq = e->cq,
                                       .recv_cq = e->cq,
                                       .cap = {wrs, wrs, 2, 1, 32},
                                       .qp_type = IBV_QPT_DRIVER,
                                       .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
                                       .pd = e->pd,
                                       .send_ops_flags = SRD_OPS};

    e->qp = efadv_create_qp_ex(e->ctx, &attr, &efa, sizeof(efa));
    require(e->qp != NULL, "efadv_create_qp_ex: %s", strerror(errno));
}

void srd_ready(struct end *e, int rnr_retry)
{
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = SRD_QKEY};
    int mask = IBV_QP_STATE | IBV_QP_SQ_PSN | (rnr_retry < 0 ? 0 : IBV_QP_RNR_RETRY);

    require(ibv_modify_qp(e->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY) == 0, "to INIT");
    attr.qp_state = IBV_QPS_RTR;
    require(ibv_modify_qp(e->qp, &attr, IBV_QP_STATE) == 0, "to RTR");
    attr.qp_state = IBV_QPS_RTS;
    attr.rnr_retry = (uint8_t)rnr_retry;
    require(ibv_modify_qp(e->qp, &attr, mask) == 0, "to RTS");
}

void srd_open(struct end *e, const struct end_options *o)
{
    srd_queue_make(e, end_begin(e, o));
    end_register(e, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);
    srd_ready(e, -1);
}

struct address srd_address(const struct end *e)
{
    struct address a = {.qpn = e->qp->qp_num, .rkey = e->mr->rkey, .addr = (uintptr_t)e->buf};

    require(ibv_query_gid(e->ctx, 1, 0, &a.gid) == 0, "query_gid");
    return a;
}

struct ibv_ah *srd_ah(struct end *e, const struct address *to)
{
    struct ibv_ah_attr attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = to->gid}};
    struct ibv_ah *ah = ibv_create_ah(e->pd, &attr);

    require(ah != NULL, "create_ah: %s", strerror(errno));
    return ah;
}

static void begin(struct ibv_qp_ex *qp, const struct srd_request *q)
{
    switch (q->opcode) {
    case IBV_WR_RDMA_WRITE:
        ibv_wr_rdma_write(qp, q->rkey, q->raddr);
        break;
    case IBV_WR_RDMA_WRITE_WITH_IMM:
        ibv_wr_rdma_write_imm(qp, q->rkey, q->raddr, (uint32_t)q->wr_id);
        break;
    case IBV_WR_RDMA_READ:
        ibv_wr_rdma_read(qp, q->rkey, q->raddr);
        break;
    case IBV_WR_SEND_WITH_IMM:
        ibv_wr_send_imm(qp, (uint32_t)q->wr_id);
        break;
    default:
        ibv_wr_send(qp);
    }
}

static void add(struct end *e, struct ibv_qp_ex *qp, const struct srd_request *q)
{
    uint32_t pieces = q->pieces ? q->pieces : 1;
    struct ibv_sge sge[4];

    qp->wr_id = q->wr_id;
    qp->wr_flags = (q->flags & ~(unsigned int)IBV_SEND_INLINE) | (q->unsignaled ? 0 : IBV_SEND_SIGNALED);
    begin(qp, q);
    if (q->ah)
        ibv_wr_set_ud_addr(qp, q->ah, q->qpn, q->qkey);
    for (uint32_t i = 0; i < pieces && i < 4; i++)
        sge[i] =
            (struct ibv_sge){(uintptr_t)e->buf + q->offset + i * (q->length / pieces), q->length / pieces, e->mr->lkey};
    if (q->flags & IBV_SEND_INLINE)
        ibv_wr_set_inline_data(qp, e->buf + q->offset, q->length);
    else
        ibv_wr_set_sge_list(qp, pieces, sge);
}

int srd_post(struct end *e, const struct srd_request *q)
{
    struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(e->qp);

    ibv_wr_start(qp);
    add(e, qp, q);
    return ibv_wr_complete(qp);
}

static struct srd_request put_of(enum ibv_wr_opcode opcode, struct ibv_ah *ah, const struct address *to,
                                 uint64_t offset, uint32_t length, uint64_t wr_id)
{
    return (struct srd_request){.opcode = opcode,
                                .ah = ah,
                                .qpn = to->qpn,
                                .qkey = SRD_QKEY,
                                .rkey = to->rkey,
                                .raddr = to->addr + offset,
                                .offset = offset,
                                .length = length,
                                .wr_id = wr_id};
}

int srd_put(struct end *e, enum ibv_wr_opcode opcode, struct ibv_ah *ah, const struct address *to, uint64_t offset,
            uint32_t length, uint64_t wr_id)
{
    struct srd_request q = put_of(opcode, ah, to, offset, length, wr_id);

    return srd_post(e, &q);
}

int srd_put_all(struct end *e, enum ibv_wr_opcode opcode, struct ibv_ah *ah, const struct address *to, uint32_t length,
                uint32_t count)
{
    struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(e->qp);

    ibv_wr_start(qp);
    for (uint32_t i = 0; i < count; i++) {
        struct srd_request q = put_of(opcode, ah, to, (uint64_t)i * length, length, i);

        add(e, qp, &q);
    }
    return ibv_wr_complete(qp);
}

struct ibv_ah *srd_pair_open(const struct sn_config *config, struct end *a, struct end *b)
{
    struct end_options other = {.dev = 1};
    struct address to;

    test_world(config);
    srd_open(a, NULL);
    srd_open(b, &other);
    to = srd_address(b);
    return srd_ah(a, &to);
}

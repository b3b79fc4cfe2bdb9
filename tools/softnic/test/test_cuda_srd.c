/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/test/test_cuda_srd.h"

#include <arpa/inet.h>
#include <infiniband/efadv.h>
#include <stdlib.h>
#include <string.h>

#include "tools/softnic/world/world.h"

enum { QKEY = 77, BURST = 12, ROUNDS = 10, PIECE = 6000, SRD_OPS = 31 /* all IBV_QP_EX_WITH_ except atomics */ };

bool srd_wanted(void)
{
    const char *path = getenv(SN_WORLD_ENV);
    struct sn_world *world;
    bool efa;

    if (!path || sn_world_open(path, &world))
        return false;
    efa = world->config.efa;
    sn_world_close(world);
    return efa;
}

struct ibv_qp *srd_make(const struct side *side)
{
    struct efadv_qp_init_attr efa = {.driver_qp_type = EFADV_QP_DRIVER_TYPE_SRD};
    struct ibv_qp_init_attr_ex attr = {
        .send_cq = side->cq,
        .recv_cq = side->cq,
        .qp_type = IBV_QPT_DRIVER,
        .cap = {.max_send_wr = 64, .max_recv_wr = 16, .max_send_sge = 2, .max_recv_sge = 2},
        .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
        .pd = side->pd,
        .send_ops_flags = SRD_OPS};

    return efadv_create_qp_ex(side->context, &attr, &efa, sizeof(efa));
}

void srd_connect(struct side *side, const union ibv_gid *gid, uint32_t qpn)
{
    struct ibv_ah_attr ah = {.is_global = 1, .port_num = 1, .grh = {.dgid = *gid}};
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY};

    MUST(!ibv_modify_qp(side->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY));
    attr.qp_state = IBV_QPS_RTR;
    MUST(!ibv_modify_qp(side->qp, &attr, IBV_QP_STATE));
    attr.qp_state = IBV_QPS_RTS;
    MUST(!ibv_modify_qp(side->qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN));
    side->ah = ibv_create_ah(side->pd, &ah);
    side->peer_qpn = qpn;
    MUST(side->ah);
}

static void post_at(struct side *side, enum ibv_wr_opcode opcode, const struct buf *buf, size_t offset, size_t bytes,
                    struct remote remote, uint32_t number)
{
    struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(side->qp);

    ibv_wr_start(qp);
    qp->wr_id = number;
    qp->wr_flags = IBV_SEND_SIGNALED;
    if (opcode == IBV_WR_RDMA_WRITE)
        ibv_wr_rdma_write(qp, remote.rkey, remote.addr + offset);
    else if (opcode == IBV_WR_RDMA_WRITE_WITH_IMM)
        ibv_wr_rdma_write_imm(qp, remote.rkey, remote.addr + offset, htonl(number));
    else if (opcode == IBV_WR_RDMA_READ)
        ibv_wr_rdma_read(qp, remote.rkey, remote.addr + offset);
    else
        ibv_wr_send(qp);
    ibv_wr_set_ud_addr(qp, side->ah, side->peer_qpn, QKEY);
    ibv_wr_set_sge(qp, buf->mr->lkey, buf->addr + offset, (uint32_t)bytes);
    MUST(!ibv_wr_complete(qp));
}

void srd_post(struct side *side, enum ibv_wr_opcode opcode, const struct buf *buf, size_t offset, size_t bytes,
              struct remote remote)
{
    post_at(side, opcode, buf, offset, bytes, remote, IMM);
}

/* Each round writes to a buffer of its own; the target checks a piece as soon as its immediate arrives. */
void immediates_come_after_their_own_bytes(struct side *side, enum memory memory)
{
    struct ibv_recv_wr *bad, receive = {.num_sge = 0};
    uint8_t *want = malloc(BURST * PIECE), *have = malloc(BURST * PIECE);
    struct remote remote;
    struct buf buf;

    MUST(want && have);
    buf_make(side, &buf, side->initiator ? PAGEABLE : memory, BURST * PIECE);
    remote = swap_remote(side, &buf);
    for (uint32_t round = 0; round < ROUNDS; round++) {
        bool seen[BURST] = {0};

        for (uint32_t i = 0; i < BURST; i++)
            memset(want + i * PIECE, (int)(round * BURST + i + 1), PIECE);
        if (side->initiator)
            memcpy((void *)(uintptr_t)buf.addr, want, BURST * PIECE);
        for (uint32_t i = 0; !side->initiator && i < BURST; i++)
            MUST(!ibv_post_recv(side->qp, &receive, &bad));
        side_barrier(side);
        for (uint32_t i = 0; side->initiator && i < BURST; i++)
            post_at(side, IBV_WR_RDMA_WRITE_WITH_IMM, &buf, i * PIECE, PIECE, remote, i);
        for (uint32_t n = 0; n < BURST; n++) {
            struct ibv_wc wc = side_poll(side);
            uint32_t i = side->initiator ? (uint32_t)wc.wr_id : ntohl(wc.imm_data);

            MUST(wc.status == IBV_WC_SUCCESS && i < BURST && !seen[i]);
            seen[i] = true;
            if (side->initiator)
                continue;
            buf_read(&buf, i * PIECE, have, PIECE);
            MUST(!memcmp(have, want + i * PIECE, PIECE)); /* the bytes of the immediate that arrived */
        }
        side_barrier(side);
    }
    buf_free(&buf);
    free(want);
    free(have);
}

void a_refused_write_spares_its_neighbours(struct side *side, enum memory memory)
{
    struct remote remote, wrong;
    struct buf buf;

    buf_make(side, &buf, memory, BURST * PIECE);
    if (side->initiator)
        buf_fill(&buf, 5);
    else
        buf_zero(&buf);
    remote = wrong = swap_remote(side, &buf);
    wrong.rkey++;
    for (uint32_t i = 0; side->initiator && i < 2 * BURST; i++)
        post_at(side, IBV_WR_RDMA_WRITE, &buf, i / 2 * PIECE, PIECE, i % 2 ? wrong : remote, i);
    for (uint32_t i = 0; side->initiator && i < 2 * BURST; i++) {
        struct ibv_wc wc = side_poll(side);

        MUST(wc.status == (wc.wr_id % 2 ? IBV_WC_REM_ACCESS_ERR : IBV_WC_SUCCESS));
    }
    side_barrier(side);
    if (!side->initiator)
        MUST(buf_check(&buf, BURST * PIECE, 5, "between refused writes"));
    side_barrier(side);
    buf_free(&buf);
}

void initiators_share_the_receives_of_one_target(struct side *side, enum memory memory)
{
    struct ibv_recv_wr *bad, receive = {.num_sge = 0};
    struct remote remote;
    struct side second;
    struct buf buf;

    side_add(side, &second);
    second.peer_qpn = side->peer_qpn;
    buf_make(side, &buf, side->initiator ? PAGEABLE : memory, BURST * PIECE);
    remote = swap_remote(side, &buf);
    for (uint32_t round = 0; round < ROUNDS; round++) {
        bool seen[2 * BURST] = {0};

        for (uint32_t i = 0; !side->initiator && i < BURST / 2; i++)
            MUST(!ibv_post_recv(side->qp, &receive, &bad));
        side_barrier(side);
        for (uint32_t i = 0; side->initiator && i < 2 * BURST; i++)
            post_at(i % 2 ? &second : side, IBV_WR_RDMA_WRITE_WITH_IMM, &buf, i / 2 * PIECE, PIECE, remote, i);
        for (uint32_t n = 0; n < 2 * BURST; n++) {
            struct ibv_wc wc = side_poll(side);
            uint32_t i = side->initiator ? (uint32_t)wc.wr_id : ntohl(wc.imm_data);

            MUST(wc.status == IBV_WC_SUCCESS && i < 2 * BURST && !seen[i]);
            seen[i] = true;
            if (!side->initiator && n < 2 * BURST - BURST / 2)
                MUST(!ibv_post_recv(side->qp, &receive, &bad));
        }
        side_barrier(side);
    }
    buf_free(&buf);
    MUST(!ibv_destroy_qp(second.qp) && !ibv_destroy_ah(second.ah));
}

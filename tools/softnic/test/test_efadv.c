/* SPDX-License-Identifier: Apache-2.0 */
/* What an EFA device reports, takes and refuses. */
#include <assert.h>
#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <errno.h>
#include <stddef.h>
#include <string.h>

#include "tools/softnic/test/srd_support.h"
#include "tools/softnic/verbs/efa_abi.h"

/* What softnic declares itself is what programs are compiled with. Newer headers may have longer structures. */
#define SAME_FIELD(mine, theirs, field)                                                                                \
    static_assert(offsetof(struct mine, field) == offsetof(struct theirs, field) &&                                    \
                      sizeof(((struct mine *)0)->field) == sizeof(((struct theirs *)0)->field),                        \
                  #theirs "." #field)
SAME_FIELD(sn_efa_device, efadv_device_attr, comp_mask);
SAME_FIELD(sn_efa_device, efadv_device_attr, max_sq_wr);
SAME_FIELD(sn_efa_device, efadv_device_attr, max_rq_wr);
SAME_FIELD(sn_efa_device, efadv_device_attr, max_sq_sge);
SAME_FIELD(sn_efa_device, efadv_device_attr, max_rq_sge);
SAME_FIELD(sn_efa_device, efadv_device_attr, inline_buf_size);
SAME_FIELD(sn_efa_device, efadv_device_attr, device_caps);
SAME_FIELD(sn_efa_device, efadv_device_attr, max_rdma_size);
SAME_FIELD(sn_efa_qp_init, efadv_qp_init_attr, comp_mask);
SAME_FIELD(sn_efa_qp_init, efadv_qp_init_attr, driver_qp_type);
SAME_FIELD(sn_efa_ah, efadv_ah_attr, comp_mask);
SAME_FIELD(sn_efa_ah, efadv_ah_attr, ahn);
SAME_FIELD(sn_efa_cq, efadv_cq, comp_mask);
SAME_FIELD(sn_efa_cq, efadv_cq, wc_read_sgid);
SAME_FIELD(sn_efa_cq_init, efadv_cq_init_attr, comp_mask);
SAME_FIELD(sn_efa_cq_init, efadv_cq_init_attr, wc_flags);
static_assert((int)SN_EFA_SRD == (int)EFADV_QP_DRIVER_TYPE_SRD, "the only driver type");
static_assert((int)SN_EFA_WC_WITH_SGID == (int)EFADV_WC_EX_WITH_SGID, "the only flag of a completion");
static_assert((int)SN_EFA_RDMA_READ == (int)EFADV_DEVICE_ATTR_CAPS_RDMA_READ &&
                  (int)SN_EFA_RNR_RETRY == (int)EFADV_DEVICE_ATTR_CAPS_RNR_RETRY &&
                  (int)SN_EFA_CQ_WITH_SGID == (int)EFADV_DEVICE_ATTR_CAPS_CQ_WITH_SGID,
              "the bits that old headers name");

static struct end a, b;
static struct address at, bt;
static struct ibv_ah *to_b;

static void start(void)
{
    struct sn_config config = srd_config();

    to_b = srd_pair_open(&config, &a, &b);
    at = srd_address(&a);
    bt = srd_address(&b);
}

static void sent(uint32_t status, const char *what)
{
    struct ibv_wc wc = wait_wc(a.cq, what);

    cr_assert_eq(wc.status, status, "%s: %s", what, ibv_wc_status_str(wc.status));
}

Test(efadv, requests_that_an_efa_does_not_know_are_refused)
{
    struct ibv_sge sge;
    struct ibv_send_wr wr = {.sg_list = &sge,
                             .num_sge = 1,
                             .opcode = IBV_WR_RDMA_WRITE,
                             .send_flags = IBV_SEND_SIGNALED},
                       *bad = NULL;
    struct srd_request good, q;

    start();
    good = (struct srd_request){.opcode = IBV_WR_RDMA_WRITE,
                                .ah = to_b,
                                .qpn = bt.qpn,
                                .qkey = SRD_QKEY,
                                .rkey = bt.rkey,
                                .raddr = bt.addr,
                                .length = 16};
    q = good, q.unsignaled = true;
    cr_assert_eq(srd_post(&a, &q), EINVAL, "not signaled");
    q = good, q.flags = IBV_SEND_FENCE;
    cr_assert_eq(srd_post(&a, &q), EINVAL, "fence");
    q = good, q.flags = IBV_SEND_SOLICITED;
    cr_assert_eq(srd_post(&a, &q), EINVAL, "solicited");
    q = good, q.flags = IBV_SEND_INLINE;
    cr_assert_eq(srd_post(&a, &q), EINVAL, "inline write");
    q = good, q.pieces = 2;
    cr_assert_eq(srd_post(&a, &q), EINVAL, "a write of two buffers");
    q = good, q.opcode = IBV_WR_SEND, q.pieces = 3;
    cr_assert_eq(srd_post(&a, &q), EINVAL, "a send of three");
    q = good, q.opcode = IBV_WR_SEND, q.flags = IBV_SEND_INLINE, q.length = 33;
    cr_assert_eq(srd_post(&a, &q), EINVAL, "33 bytes inline");
    q = good, q.ah = NULL;
    cr_assert_eq(srd_post(&a, &q), EINVAL, "without a target");
    cr_assert_null(ibv_qp_to_qp_ex(a.qp)->wr_atomic_fetch_add);
    sge = (struct ibv_sge){at.addr, 8, a.mr->lkey};
    wr.wr.ud.ah = to_b;
    wr.wr.ud.remote_qpn = bt.qpn;
    wr.wr.ud.remote_qkey = SRD_QKEY;
    cr_assert_eq(ibv_post_send(a.qp, &wr, &bad), EINVAL, "a write by ibv_post_send");
    wr.opcode = IBV_WR_SEND;
    cr_assert_eq(post_recv(&b, 0, 16, 3), 0);
    cr_assert_eq(ibv_post_send(a.qp, &wr, &bad), 0, "a send by it");
    sent(IBV_WC_SUCCESS, "that send");
    cr_assert_eq(srd_post(&a, &good), 0);
    sent(IBV_WC_SUCCESS, "and nothing of what was refused");
    cr_assert(quiet(a.cq, 1000));
}

struct create_row {
    uint32_t type, driver_type, sends, receives, send_sge, recv_sge, inline_bytes;
    int srq, error;
};
static struct create_row create_rows[] = {
    {IBV_QPT_DRIVER, 0, 4096, 32768, 2, 3, 32, 0, 0},  {IBV_QPT_DRIVER, 1, 16, 16, 1, 1, 0, 0, EOPNOTSUPP},
    {IBV_QPT_RC, 0, 16, 16, 1, 1, 0, 0, EOPNOTSUPP},   {IBV_QPT_UD, 0, 16, 16, 1, 1, 0, 0, EOPNOTSUPP},
    {IBV_QPT_DRIVER, 0, 4097, 16, 1, 1, 0, 0, EINVAL}, {IBV_QPT_DRIVER, 0, 16, 32769, 1, 1, 0, 0, EINVAL},
    {IBV_QPT_DRIVER, 0, 16, 16, 3, 1, 0, 0, EINVAL},   {IBV_QPT_DRIVER, 0, 16, 16, 1, 4, 0, 0, EINVAL},
    {IBV_QPT_DRIVER, 0, 16, 16, 1, 1, 33, 0, EINVAL},  {IBV_QPT_DRIVER, 0, 16, 16, 1, 1, 0, 1, EOPNOTSUPP},
};

ParameterizedTestParameters(efa, queue_pairs_have_the_limits_of_an_efa)
{
    return cr_make_param_array(struct create_row, create_rows, sizeof(create_rows) / sizeof(create_rows[0]));
}

ParameterizedTest(struct create_row *row, efa, queue_pairs_have_the_limits_of_an_efa)
{
    struct efadv_qp_init_attr efa = {.driver_qp_type = row->driver_type};
    struct ibv_srq srq;
    struct ibv_qp_init_attr_ex attr = {
        .cap = {row->sends, row->receives, row->send_sge, row->recv_sge, row->inline_bytes},
        .qp_type = row->type,
        .comp_mask = IBV_QP_INIT_ATTR_PD,
        .srq = row->srq ? &srq : NULL};
    struct ibv_qp *qp;

    start();
    attr.pd = a.pd;
    attr.send_cq = attr.recv_cq = a.cq;
    errno = 0;
    qp = efadv_create_qp_ex(a.ctx, &attr, &efa, sizeof(efa));
    cr_assert_eq(qp == NULL, row->error != 0);
    if (row->error)
        cr_assert_eq(errno, row->error, "%s", strerror(errno));
    cr_assert_null(ibv_create_qp_ex(a.ctx, &attr), "not by plain verbs");
}

Test(efadv, a_device_says_what_it_is)
{
    struct efadv_device_attr attr;
    struct ibv_port_attr port;
    struct efadv_ah_attr ah;
    union ibv_gid gid;

    start();
    cr_assert_eq(a.ctx->device->transport_type, IBV_TRANSPORT_UNSPECIFIED);
    cr_assert_eq(strncmp(a.ctx->device->name, "efa_", 4), 0);
    cr_assert_eq(efadv_query_device(a.ctx, &attr, sizeof(attr)), 0);
    cr_assert_eq(attr.device_caps, 15, "reads, RNR retries, source addresses, writes");
    cr_assert_eq(attr.max_rdma_size, 1u << 30);
    cr_assert_eq(efadv_query_device(a.ctx, &attr, 8), EINVAL, "too short to say anything");
    cr_assert_eq(ibv_query_port(a.ctx, 1, &port), 0);
    cr_assert_eq(port.link_layer, IBV_LINK_LAYER_UNSPECIFIED);
    cr_assert_eq(port.gid_tbl_len, 1);
    cr_assert_neq(ibv_query_gid(a.ctx, 1, 1, &gid), 0);
    cr_assert_eq(efadv_query_ah(to_b, &ah, sizeof(ah)), 0);
}

Test(efadv, other_devices_are_no_efa)
{
    struct efadv_qp_init_attr efa = {.driver_qp_type = EFADV_QP_DRIVER_TYPE_SRD};
    struct ibv_qp_init_attr_ex attr = {.qp_type = IBV_QPT_DRIVER, .comp_mask = IBV_QP_INIT_ATTR_PD};
    struct efadv_device_attr device;

    test_world(NULL);
    pair_open(&a, &b);
    cr_assert_eq(efadv_query_device(a.ctx, &device, sizeof(device)), EOPNOTSUPP);
    attr.pd = a.pd;
    attr.send_cq = attr.recv_cq = a.cq;
    errno = 0;
    cr_assert_null(efadv_create_qp_ex(a.ctx, &attr, &efa, sizeof(efa)));
    cr_assert_eq(errno, EOPNOTSUPP);
}

/* The attributes that EFA's kernel driver takes. */
struct step_row {
    int to, mask, result;
};
static struct step_row step_rows[] = {
    {IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, EINVAL},
    {IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY | IBV_QP_ACCESS_FLAGS, EINVAL},
    {IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY, 0},
    {IBV_QPS_RTS, IBV_QP_SQ_PSN, EINVAL},
    {IBV_QPS_RTR, IBV_QP_AV | IBV_QP_DEST_QPN, EINVAL},
    {IBV_QPS_RTR, 0, 0},
    {IBV_QPS_RTS, 0, EINVAL},
    {IBV_QPS_RTS, IBV_QP_SQ_PSN | IBV_QP_TIMEOUT, EINVAL},
    {IBV_QPS_RTS, IBV_QP_SQ_PSN | IBV_QP_RNR_RETRY, 0},
};

Test(efadv, a_queue_pair_has_the_states_and_attributes_of_an_efas)
{
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RESET, .port_num = 1};

    start();
    cr_assert_eq(ibv_modify_qp(a.qp, &attr, IBV_QP_STATE), 0);
    for (unsigned i = 0; i < sizeof(step_rows) / sizeof(step_rows[0]); i++) {
        attr.qp_state = (enum ibv_qp_state)step_rows[i].to;
        cr_assert_eq(ibv_modify_qp(a.qp, &attr, IBV_QP_STATE | step_rows[i].mask), step_rows[i].result, "row %u", i);
    }
}

/* Perseus finds the connection of an arrival by this (transport/nic/verbs/srd_pool.h). */
Test(efadv, a_write_with_immediate_names_its_sender)
{
    struct efadv_ah_attr ah;
    struct ibv_wc wc;

    start();
    cr_assert_eq(efadv_query_ah(srd_ah(&b, &at), &ah, sizeof(ah)), 0);
    cr_assert_eq(post_recv(&b, 0, 64, 5), 0);
    cr_assert_eq(srd_put(&a, IBV_WR_RDMA_WRITE_WITH_IMM, to_b, &bt, 0, 8, 1), 0);
    wc = wait_wc(b.cq, "an arrival");
    cr_assert(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM);
    cr_assert_eq(wc.qp_num, b.qp->qp_num);
    cr_assert_eq(wc.src_qp, a.qp->qp_num);
    cr_assert_eq(wc.slid, ah.ahn, "the number of b's handle for a");
}

Test(efadv, the_receiver_learns_whose_address_it_was)
{
    struct ibv_cq_init_attr_ex init = {.cqe = 16, .wc_flags = IBV_WC_STANDARD_FLAGS};
    struct efadv_cq_init_attr efa = {.wc_flags = EFADV_WC_EX_WITH_SGID};
    struct ibv_poll_cq_attr poll = {0};
    uint64_t give_up;
    struct efadv_ah_attr ah;
    struct ibv_cq *plain;
    struct ibv_cq_ex *cq;
    union ibv_gid gid;

    start();
    cq = efadv_create_cq(b.ctx, &init, &efa, sizeof(efa));
    cr_assert_not_null(cq);
    cr_assert_eq(efadv_query_ah(srd_ah(&b, &at), &ah, sizeof(ah)), 0);
    plain = b.cq; /* make another end on the same device, with this completion queue */
    b.cq = ibv_cq_ex_to_cq(cq);
    srd_queue_make(&b, END_WRS);
    srd_ready(&b, -1);
    bt = srd_address(&b);
    cr_assert_eq(post_recv(&b, 0, 64, 5), 0);
    cr_assert_eq(srd_put(&a, IBV_WR_SEND, to_b, &bt, 0, 8, 1), 0);
    sent(IBV_WC_SUCCESS, "a send");
    for (give_up = now_ns() + WAIT_S * 1000000000ull; ibv_start_poll(cq, &poll);)
        cr_assert_lt(now_ns(), give_up, "no completion for %d s", WAIT_S);
    cr_assert_eq(cq->wr_id, 5);
    cr_assert_eq(ibv_wc_read_slid(cq), ah.ahn, "the number of b's handle for a");
    cr_assert_eq(efadv_wc_read_sgid(efadv_cq_from_ibv_cq_ex(cq), &gid), 0);
    cr_assert_eq(memcmp(gid.raw, at.gid.raw, sizeof(gid.raw)), 0);
    ibv_end_poll(cq);
    b.cq = plain;
}

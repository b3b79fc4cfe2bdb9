/* SPDX-License-Identifier: Apache-2.0 */
/* Unreliable queue pairs: datagrams (UD), and connections without acknowledgements (UC). */
#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <netinet/ip.h>
#include <pthread.h>
#include <string.h>

#include "tools/softnic/test/support.h"

enum { GRH = sizeof(struct ibv_grh), QKEY = 0x11223344, MTU = 4096, NOT_LONG_US = 20000 };

static struct sn_world *world;
static struct end a, b;
static struct address at, bt;
static struct ibv_ah *to_b;
static uint8_t gid_index;

static void queue_make(struct end *e, enum ibv_qp_type type, uint32_t wrs, uint64_t send_ops)
{
    struct ibv_qp_init_attr_ex attr = {.send_cq = e->cq,
                                       .recv_cq = e->cq,
                                       .srq = e->srq,
                                       .cap = {wrs, wrs, 32, 32, 128},
                                       .qp_type = type,
                                       .comp_mask = IBV_QP_INIT_ATTR_PD,
                                       .pd = e->pd};

    if (send_ops)
        attr.comp_mask |= IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    attr.send_ops_flags = send_ops;
    e->qp = ibv_create_qp_ex(e->ctx, &attr);
    require(e->qp != NULL, "create_qp of type %d: %s", type, strerror(errno));
}

static void ready(struct end *e)
{
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY};

    require(ibv_modify_qp(e->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY) == 0, "to INIT");
    attr.qp_state = IBV_QPS_RTR;
    require(ibv_modify_qp(e->qp, &attr, IBV_QP_STATE) == 0, "to RTR");
    attr.qp_state = IBV_QPS_RTS;
    require(ibv_modify_qp(e->qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN) == 0, "to RTS");
}

static void ud_open(struct end *e, const struct end_options *o)
{
    uint32_t wrs = end_begin(e, o);

    queue_make(e, IBV_QPT_UD, wrs, o && o->extended ? IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM : 0);
    end_register(e, ALL_ACCESS);
    for (size_t i = 0; i < e->bytes; i++)
        e->buf[i] = (uint8_t)(i * 7 + 1);
    ready(e);
}

static struct ibv_ah *ah_of(struct end *e, const struct end *to)
{
    struct ibv_ah_attr attr = {.is_global = 1,
                               .port_num = 1,
                               .grh = {.sgid_index = gid_index, .hop_limit = 9, .traffic_class = 5, .flow_label = 77}};
    struct ibv_ah *ah;

    require(ibv_query_gid(to->ctx, 1, gid_index, &attr.grh.dgid) == 0, "query_gid");
    ah = ibv_create_ah(e->pd, &attr);
    require(ah != NULL, "create_ah: %s", strerror(errno));
    return ah;
}

static void start(const struct sn_config *config)
{
    struct end_options ao = {.extended = true}, bo = {.dev = 1};

    world = test_world(config);
    ud_open(&a, &ao);
    ud_open(&b, &bo);
    at = end_address(&a);
    bt = end_address(&b);
    to_b = ah_of(&a, &b);
}

static void finish(void)
{
    cr_assert_eq(ibv_destroy_ah(to_b), 0);
    end_close(&a);
    end_close(&b);
}

static int send_to(struct end *e, struct ibv_ah *ah, uint32_t qpn, uint32_t qkey, uint32_t length, uint64_t wr_id)
{
    struct ibv_sge sge = {(uintptr_t)e->buf, length, e->mr->lkey};
    struct ibv_send_wr wr = {.wr_id = wr_id,
                             .sg_list = &sge,
                             .num_sge = 1,
                             .opcode = IBV_WR_SEND_WITH_IMM,
                             .send_flags = IBV_SEND_SIGNALED,
                             .imm_data = (uint32_t)wr_id,
                             .wr.ud = {.ah = ah, .remote_qpn = qpn, .remote_qkey = qkey}},
                       *bad;

    return ibv_post_send(e->qp, &wr, &bad);
}

static void sent(struct end *e, enum ibv_wc_status status, const char *what)
{
    struct ibv_wc wc = wait_wc(e->cq, what);

    cr_assert(wc.status == status && wc.opcode == IBV_WC_SEND, "%s: %s, want %s, opcode %d", what,
              ibv_wc_status_str(wc.status), ibv_wc_status_str(status), wc.opcode);
}

static uint64_t dropped(uint32_t dev)
{
    return __atomic_load_n(&world->devs[dev].counters.dropped, __ATOMIC_RELAXED);
}

/* Nothing arrives at b, the sender does not learn of it, and it is counted. */
static void lost(struct ibv_ah *ah, uint32_t qpn, uint32_t qkey, const char *what)
{
    uint64_t before = dropped(0);

    cr_assert_eq(send_to(&a, ah, qpn, qkey, 64, 1), 0, "%s", what);
    sent(&a, IBV_WC_SUCCESS, what);
    cr_assert(quiet(b.cq, NOT_LONG_US), "%s: it arrived", what);
    cr_assert_eq(dropped(0), before + 1, "%s", what);
}

static uint8_t both[] = {0, 1};

ParameterizedTestParameters(ud, a_datagram_brings_the_header_that_its_gids_ask_for)
{
    return cr_make_param_array(uint8_t, both, 2);
}

ParameterizedTest(uint8_t *index, ud, a_datagram_brings_the_header_that_its_gids_ask_for)
{
    union ibv_gid from, to;
    struct ibv_grh grh;
    struct iphdr ip;
    struct ibv_wc wc;

    gid_index = *index;
    start(NULL);
    cr_assert_eq(post_recv(&b, 8192, GRH + 100, 5), 0);
    cr_assert_eq(send_to(&a, to_b, bt.qpn, QKEY, 100, 0xabc), 0);
    sent(&a, IBV_WC_SUCCESS, "send");
    wc = wait_wc(b.cq, "arrival");
    cr_assert(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_RECV && wc.wr_id == 5 && wc.byte_len == GRH + 100);
    cr_assert(wc.src_qp == at.qpn && wc.qp_num == bt.qpn && wc.imm_data == 0xabc);
    cr_assert_eq(wc.wc_flags, IBV_WC_GRH | IBV_WC_WITH_IMM);
    cr_assert(wc.slid == world->devs[0].lid && wc.sl == (gid_index ? 2 : 0), "slid %u, sl %u", wc.slid, wc.sl);
    cr_assert_eq(memcmp(b.buf + 8192 + GRH, a.buf, 100), 0);
    cr_assert_eq(b.buf[8192 + GRH + 100], (uint8_t)((8192 + GRH + 100) * 7 + 1), "a byte behind it was changed");
    ibv_query_gid(a.ctx, 1, gid_index, &from);
    ibv_query_gid(b.ctx, 1, gid_index, &to);
    memcpy(&grh, b.buf + 8192, sizeof(grh));
    memcpy(&ip, b.buf + 8192 + 20, sizeof(ip));
    if (gid_index == 0) {
        cr_assert(!memcmp(&grh.sgid, &from, 16) && !memcmp(&grh.dgid, &to, 16));
        cr_assert(grh.next_hdr == 0x1b && grh.hop_limit == 9 && ntohs(grh.paylen) == 100);
        cr_assert_eq(ntohl(grh.version_tclass_flow), 6u << 28 | 5u << 20 | 77);
    } else {
        cr_assert(!memcmp(&ip.saddr, from.raw + 12, 4) && !memcmp(&ip.daddr, to.raw + 12, 4));
        cr_assert(ip.version == 4 && ip.ihl == 5 && ip.protocol == IPPROTO_UDP && ip.ttl == 9 && ip.tos == 5);
    }
    finish();
}

ParameterizedTestParameters(ud, a_receiver_can_answer)
{
    return cr_make_param_array(uint8_t, both, 2);
}

ParameterizedTest(uint8_t *index, ud, a_receiver_can_answer)
{
    struct ibv_ah_attr attr;
    struct ibv_ah *back;
    struct ibv_wc wc;

    gid_index = *index;
    start(NULL);
    cr_assert_eq(post_recv(&b, 0, 1024, 1), 0);
    cr_assert_eq(post_recv(&a, 4096, 1024, 2), 0);
    cr_assert_eq(send_to(&a, to_b, bt.qpn, QKEY, 8, 0), 0);
    sent(&a, IBV_WC_SUCCESS, "question");
    wc = wait_wc(b.cq, "question");
    cr_assert_eq(ibv_init_ah_from_wc(b.ctx, 1, &wc, (struct ibv_grh *)b.buf, &attr), 0);
    cr_assert(attr.is_global && attr.grh.sgid_index == gid_index && attr.grh.traffic_class == 5);
    back = ibv_create_ah_from_wc(b.pd, &wc, (struct ibv_grh *)b.buf, 1);
    cr_assert_not_null(back);
    cr_assert_eq(ibv_create_ah_from_wc(a.pd, &wc, (struct ibv_grh *)b.buf, 1), NULL, "a did not receive it");
    cr_assert_eq(send_to(&b, back, wc.src_qp, QKEY, 8, 0), 0);
    sent(&b, IBV_WC_SUCCESS, "answer");
    wc = wait_wc(a.cq, "answer");
    cr_assert(wc.status == IBV_WC_SUCCESS && wc.wr_id == 2 && wc.src_qp == bt.qpn);
    wc.wc_flags &= ~(unsigned int)IBV_WC_GRH;
    cr_assert_eq(ibv_init_ah_from_wc(a.ctx, 1, &wc, (struct ibv_grh *)(a.buf + 4096), &attr), -1);
    cr_assert_eq(ibv_destroy_ah(back), 0);
    finish();
}

Test(ud, what_nobody_takes_is_dropped_without_a_word)
{
    struct ibv_ah *to_a;

    start(NULL);
    to_a = ah_of(&a, &a);
    lost(to_b, bt.qpn, QKEY, "without a receive");
    cr_assert_eq(post_recv(&b, 0, 1024, 1), 0);
    cr_assert(quiet(b.cq, 1000), "it had been dropped before");
    lost(to_b, bt.qpn, QKEY + 1, "another qkey");
    lost(to_b, bt.qpn + 1, QKEY, "no such queue pair");
    lost(to_a, bt.qpn, QKEY, "the device of the address has no such queue pair");
    __atomic_store_n(&world->devs[1].port_up, 0, __ATOMIC_RELEASE);
    lost(to_b, bt.qpn, QKEY, "a pulled link");
    __atomic_store_n(&world->devs[1].port_up, 1, __ATOMIC_RELEASE);
    cr_assert_eq(send_to(&a, to_b, bt.qpn, QKEY, 64, 1), 0);
    sent(&a, IBV_WC_SUCCESS, "after all that");
    cr_assert_eq(wait_wc(b.cq, "after all that").wr_id, 1);
    cr_assert_eq(ibv_destroy_ah(to_a), 0);
    finish();
}

Test(ud, a_qkey_with_the_highest_bit_is_that_of_the_queue_pair)
{
    start(NULL);
    cr_assert_eq(post_recv(&b, 0, 1024, 1), 0);
    cr_assert_eq(send_to(&a, to_b, bt.qpn, 0x80000000, 64, 1), 0);
    sent(&a, IBV_WC_SUCCESS, "with its own key");
    cr_assert_eq(wait_wc(b.cq, "with its own key").status, IBV_WC_SUCCESS);
    finish();
}

Test(ud, too_long_a_datagram_stops_the_send_queue_alone)
{
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTS};
    struct ibv_qp_init_attr init;
    struct ibv_ah *to_a;

    start(NULL);
    to_a = ah_of(&b, &a);
    cr_assert_eq(post_recv(&b, 0, GRH + MTU, 1), 0);
    cr_assert_eq(post_recv(&a, 0, 1024, 1), 0);
    cr_assert_eq(send_to(&a, to_b, bt.qpn, QKEY, MTU, 1), 0);
    sent(&a, IBV_WC_SUCCESS, "as long as the MTU");
    cr_assert_eq(wait_wc(b.cq, "as long as the MTU").byte_len, GRH + MTU);
    cr_assert_eq(send_to(&a, to_b, bt.qpn, QKEY, MTU + 1, 2), 0);
    sent(&a, IBV_WC_LOC_LEN_ERR, "longer than the MTU");
    cr_assert_eq(ibv_query_qp(a.qp, &attr, IBV_QP_STATE, &init), 0);
    cr_assert_eq(attr.qp_state, IBV_QPS_SQE);
    cr_assert_eq(send_to(&a, to_b, bt.qpn, QKEY, 8, 3), 0);
    sent(&a, IBV_WC_WR_FLUSH_ERR, "while the send queue is stopped");
    cr_assert_eq(send_to(&b, to_a, at.qpn, QKEY, 8, 4), 0);
    sent(&b, IBV_WC_SUCCESS, "to the stopped one");
    cr_assert_eq(wait_wc(a.cq, "it still receives").status, IBV_WC_SUCCESS);
    attr.qp_state = IBV_QPS_RTS;
    cr_assert_eq(ibv_modify_qp(a.qp, &attr, IBV_QP_STATE), 0);
    cr_assert_eq(post_recv(&b, 0, 1024, 1), 0);
    cr_assert_eq(send_to(&a, to_b, bt.qpn, QKEY, 8, 5), 0);
    sent(&a, IBV_WC_SUCCESS, "again");
    cr_assert_eq(wait_wc(b.cq, "again").status, IBV_WC_SUCCESS);
    cr_assert_eq(ibv_destroy_ah(to_a), 0);
    finish();
}

Test(ud, a_wrong_key_of_the_sender_is_its_own_error)
{
    struct ibv_sge sge;
    struct ibv_send_wr wr = {
        .sg_list = &sge, .num_sge = 1, .send_flags = IBV_SEND_SIGNALED, .opcode = IBV_WR_SEND, .wr.ud = {0}};
    struct ibv_send_wr *bad;

    start(NULL);
    sge = (struct ibv_sge){(uintptr_t)a.buf, 8, a.mr->lkey + 1};
    wr.wr.ud.ah = to_b;
    wr.wr.ud.remote_qpn = bt.qpn + 1; /* even where nobody is */
    cr_assert_eq(ibv_post_send(a.qp, &wr, &bad), 0);
    sent(&a, IBV_WC_LOC_PROT_ERR, "a wrong lkey");
    finish();
}

Test(ud, too_short_a_receive_fails_the_receiver_alone)
{
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;

    start(NULL);
    cr_assert_eq(post_recv(&b, 0, GRH + 63, 1), 0);
    cr_assert_eq(post_recv(&b, 0, GRH + 64, 2), 0);
    cr_assert_eq(send_to(&a, to_b, bt.qpn, QKEY, 64, 1), 0);
    sent(&a, IBV_WC_SUCCESS, "there is nobody to tell the sender");
    cr_assert_eq(wait_wc(b.cq, "one byte is missing").status, IBV_WC_LOC_LEN_ERR);
    cr_assert_eq(wait_wc(b.cq, "the other receive").status, IBV_WC_WR_FLUSH_ERR);
    cr_assert_eq(ibv_query_qp(b.qp, &attr, IBV_QP_STATE, &init), 0);
    cr_assert_eq(attr.qp_state, IBV_QPS_ERR);
    cr_assert_eq(dropped(0), 1);
    finish();
}

Test(ud, a_queue_pair_can_send_to_itself)
{
    struct ibv_ah *to_a;
    unsigned seen = 0;

    start(NULL);
    to_a = ah_of(&a, &a);
    cr_assert_eq(post_recv(&a, 4096, 1024, 7), 0);
    cr_assert_eq(send_to(&a, to_a, at.qpn, QKEY, 200, 8), 0);
    for (int i = 0; i < 2; i++) {
        struct ibv_wc wc = wait_wc(a.cq, "both completions");

        cr_assert_eq(wc.status, IBV_WC_SUCCESS);
        seen |= 1u << (wc.wr_id - 7);
    }
    cr_assert(seen == 3 && !memcmp(a.buf, a.buf + 4096 + GRH, 200));
    /* A receive that is too short fails the queue pair, but not the send. */
    cr_assert_eq(post_recv(&a, 4096, 8, 7), 0);
    cr_assert_eq(send_to(&a, to_a, at.qpn, QKEY, 200, 8), 0);
    for (int i = 0; i < 2; i++) {
        struct ibv_wc wc = wait_wc(a.cq, "both completions again");

        cr_assert_eq(wc.status, wc.wr_id == 7 ? IBV_WC_LOC_LEN_ERR : IBV_WC_SUCCESS);
    }
    cr_assert_eq(ibv_destroy_ah(to_a), 0);
    finish();
}

Test(ud, all_buffers_and_the_header_fit)
{
    struct ibv_sge from[32], into[32];
    struct ibv_send_wr wr = {.sg_list = from, .num_sge = 32, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED},
                       *bad;
    struct ibv_recv_wr recv = {.sg_list = into, .num_sge = 32}, *bad_recv;

    start(NULL);
    for (uint32_t i = 0; i < 32; i++) {
        from[i] = (struct ibv_sge){(uintptr_t)a.buf + 128 * (31 - i), 128, a.mr->lkey};
        into[i] = (struct ibv_sge){(uintptr_t)b.buf + 200 * i, i ? 128 : 128 + GRH, b.mr->lkey};
    }
    wr.wr.ud.ah = to_b;
    wr.wr.ud.remote_qpn = bt.qpn;
    wr.wr.ud.remote_qkey = QKEY;
    cr_assert_eq(ibv_post_recv(b.qp, &recv, &bad_recv), 0);
    cr_assert_eq(ibv_post_send(a.qp, &wr, &bad), 0);
    sent(&a, IBV_WC_SUCCESS, "32 buffers");
    cr_assert_eq(wait_wc(b.cq, "32 buffers").byte_len, GRH + MTU);
    for (uint32_t i = 0; i < 32; i++)
        cr_assert_eq(memcmp(b.buf + 200 * i + (i ? 0 : GRH), a.buf + 128 * (31 - i), 128), 0, "buffer %u", i);
    finish();
}

Test(ud, the_extended_interface_posts_inline_and_in_bulk)
{
    struct ibv_qp_ex *ex;

    start(NULL);
    ex = ibv_qp_to_qp_ex(a.qp);
    cr_assert_not_null(ex);
    for (uint64_t i = 0; i < 8; i++)
        cr_assert_eq(post_recv(&b, 1024 * i, 1024, i), 0);
    ibv_wr_start(ex);
    for (uint32_t i = 0; i < 8; i++) {
        ex->wr_id = i;
        ex->wr_flags = IBV_SEND_SIGNALED;
        if (i % 2)
            ibv_wr_send(ex);
        else
            ibv_wr_send_imm(ex, i);
        ibv_wr_set_ud_addr(ex, to_b, bt.qpn, QKEY);
        if (i < 4)
            ibv_wr_set_inline_data(ex, a.buf + 16 * i, 16);
        else
            ibv_wr_set_sge(ex, a.mr->lkey, (uintptr_t)a.buf + 16 * i, 16);
    }
    cr_assert_eq(ibv_wr_complete(ex), 0);
    for (uint32_t i = 0; i < 8; i++) {
        struct ibv_wc wc;

        sent(&a, IBV_WC_SUCCESS, "one of eight");
        wc = wait_wc(b.cq, "one of eight");
        cr_assert(wc.wr_id == i && wc.wc_flags == (IBV_WC_GRH | (i % 2 ? 0 : IBV_WC_WITH_IMM)), "%u: out of order", i);
        cr_assert_eq(memcmp(b.buf + 1024 * i + GRH, a.buf + 16 * i, 16), 0);
    }
    ibv_wr_start(ex);
    ibv_wr_send(ex);
    ibv_wr_set_sge(ex, a.mr->lkey, (uintptr_t)a.buf, 16);
    cr_assert_eq(ibv_wr_complete(ex), EINVAL, "without an address");
    finish();
}

Test(ud, what_ud_cannot_do_is_refused)
{
    struct ibv_ah_attr attr = {.port_num = 1, .dlid = 1};
    struct ibv_qp_init_attr_ex init = {.qp_type = IBV_QPT_UD,
                                       .cap = {1, 1, 1, 1, 0},
                                       .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
                                       .send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE};
    struct ibv_send_wr wr = {.opcode = IBV_WR_RDMA_WRITE}, *bad;
    union ibv_gid group = {.raw = {0xff}};

    start(NULL);
    wr.wr.ud.ah = to_b;
    wr.wr.ud.remote_qpn = bt.qpn;
    cr_assert_eq(ibv_post_send(a.qp, &wr, &bad), EINVAL, "a write");
    cr_assert_eq(send_to(&a, NULL, bt.qpn, QKEY, 8, 1), EINVAL, "no address handle");
    cr_assert_eq(ibv_create_ah(a.pd, &attr), NULL, "an address without a GID");
    attr.is_global = 1;
    attr.grh.sgid_index = SN_MAX_GIDS;
    cr_assert_eq(ibv_create_ah(a.pd, &attr), NULL, "a GID index that is not there");
    cr_assert_eq(ibv_attach_mcast(a.qp, &group, 0), EOPNOTSUPP);
    init.pd = a.pd;
    init.send_cq = init.recv_cq = a.cq;
    cr_assert(!ibv_create_qp_ex(a.ctx, &init) && errno == EOPNOTSUPP, "writes of the extended interface");
    finish();
}

enum { UD_INIT = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT };

/* One step from the state that the steps before it have reached. */
static const struct {
    enum ibv_qp_type type;
    int to, mask, result;
} steps[] = {
    {IBV_QPT_UD, IBV_QPS_INIT, UD_INIT | IBV_QP_ACCESS_FLAGS, EINVAL},
    {IBV_QPT_UD, IBV_QPS_INIT, UD_INIT, EINVAL},
    {IBV_QPT_UD, IBV_QPS_INIT, UD_INIT | IBV_QP_QKEY, 0},
    {IBV_QPT_UD, IBV_QPS_RTR, IBV_QP_STATE | IBV_QP_AV, EINVAL},
    {IBV_QPT_UD, IBV_QPS_RTR, IBV_QP_STATE, 0},
    {IBV_QPT_UD, IBV_QPS_RTS, IBV_QP_STATE, EINVAL},
    {IBV_QPT_UD, IBV_QPS_RTS, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_RNR_RETRY, EINVAL},
    {IBV_QPT_UD, IBV_QPS_RTS, IBV_QP_STATE | IBV_QP_SQ_PSN, 0},
    {IBV_QPT_UD, IBV_QPS_RTS, IBV_QP_QKEY, 0},
    {IBV_QPT_UC, IBV_QPS_INIT, UD_INIT | IBV_QP_QKEY, EINVAL},
    {IBV_QPT_UC, IBV_QPS_INIT, UD_INIT | IBV_QP_ACCESS_FLAGS, 0},
    {IBV_QPT_UC, IBV_QPS_RTR, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN, EINVAL},
    {IBV_QPT_UC, IBV_QPS_RTR, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN, 0},
    {IBV_QPT_UC, IBV_QPS_RTS, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT, EINVAL},
    {IBV_QPT_UC, IBV_QPS_RTS, IBV_QP_STATE | IBV_QP_SQ_PSN, 0},
};

Test(ud, states_take_the_attributes_of_their_type)
{
    struct end e;

    test_world(NULL);
    end_begin(&e, NULL);
    for (unsigned i = 0; i < sizeof(steps) / sizeof(steps[0]); i++) {
        struct ibv_qp_attr attr = {.qp_state = steps[i].to,
                                   .port_num = 1,
                                   .path_mtu = IBV_MTU_1024,
                                   .ah_attr = {.is_global = 1, .port_num = 1}};

        if (i == 0 || steps[i].type != steps[i - 1].type)
            queue_make(&e, steps[i].type, 4, 0);
        cr_assert_eq(ibv_modify_qp(e.qp, &attr, steps[i].mask), steps[i].result, "step %u", i);
    }
}

Test(ud, the_model_delays_and_loses_datagrams_but_keeps_their_order)
{
    struct sn_config config;
    uint64_t before;
    unsigned arrived = 0;
    uint32_t last = 0;

    sn_config_default(&config);
    config.nics = 2;
    config.latency_ns = 20000000;
    start(&config);
    cr_assert_eq(post_recv(&b, 0, 1024, 1), 0);
    before = now_ns();
    cr_assert_eq(send_to(&a, to_b, bt.qpn, QKEY, 8, 1), 0);
    cr_assert_eq(wait_wc(b.cq, "a slow one").status, IBV_WC_SUCCESS);
    cr_assert_geq(now_ns() - before, config.latency_ns);
    sent(&a, IBV_WC_SUCCESS, "a slow one");
    sn_world_set_loss(world, 0, 300000000);
    for (uint32_t i = 1; i <= END_WRS; i++) {
        cr_assert_eq(post_recv(&b, 0, 1024, i), 0);
        cr_assert_eq(send_to(&a, to_b, bt.qpn, QKEY, 8, i), 0);
    }
    for (uint32_t i = 1; i <= END_WRS; i++)
        sent(&a, IBV_WC_SUCCESS, "one of many");
    for (; arrived + dropped(0) < END_WRS; arrived++) {
        struct ibv_wc wc = wait_wc(b.cq, "one of many");

        cr_assert_gt(wc.imm_data, last, "out of order");
        last = wc.imm_data;
    }
    cr_assert(quiet(b.cq, NOT_LONG_US));
    cr_assert(dropped(0) > 5 && dropped(0) < 40, "%llu of %d lost", (unsigned long long)dropped(0), END_WRS);
    finish();
}

enum { SENDERS = 10 /* more than may be at one queue pair at a time */, EACH = 200, MANY = SENDERS * EACH };

static void *sender(void *arg)
{
    struct end_options o = {.ctx = a.ctx};
    struct end e;

    ud_open(&e, &o);
    struct ibv_ah *ah = ah_of(&e, &b);

    for (uint32_t i = 0; i < EACH; i++) {
        require(send_to(&e, ah, bt.qpn, QKEY, 64, i) == 0, "post_send");
        require(wait_wc(e.cq, "one sent").status == IBV_WC_SUCCESS, "one sent");
    }
    require(ibv_destroy_ah(ah) == 0, "destroy_ah");
    end_leave(&e);
    return arg;
}

Test(ud, many_threads_reach_one_receiver)
{
    struct end_options bo = {.dev = 1, .wrs = MANY};
    pthread_t threads[SENDERS];

    world = test_world(NULL);
    ud_open(&a, NULL);
    ud_open(&b, &bo);
    bt = end_address(&b);
    for (uint32_t i = 0; i < MANY; i++)
        cr_assert_eq(post_recv(&b, 128 * (i % 256), 128, i), 0);
    for (unsigned i = 0; i < SENDERS; i++)
        cr_assert_eq(pthread_create(&threads[i], NULL, sender, NULL), 0);
    for (uint32_t i = 0; i < MANY; i++)
        cr_assert_eq(wait_wc(b.cq, "one of many").status, IBV_WC_SUCCESS);
    for (unsigned i = 0; i < SENDERS; i++)
        cr_assert_eq(pthread_join(threads[i], NULL), 0);
    cr_assert_eq(dropped(0), 0);
}

static void uc_open(struct end *e, uint32_t dev)
{
    struct end_options o = {.dev = dev};

    queue_make(e, IBV_QPT_UC, end_begin(e, &o), 0);
    end_register(e, ALL_ACCESS);
    memset(e->buf, 1 + (int)dev, e->bytes);
}

static void uc_connect(struct end *e, const struct address *to)
{
    struct ibv_qp_attr attr = {
        .qp_state = IBV_QPS_INIT,
        .port_num = 1,
        .qp_access_flags = ALL_ACCESS,
        .path_mtu = IBV_MTU_4096,
        .dest_qp_num = to->qpn,
        .ah_attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = to->gid, .sgid_index = 1, .hop_limit = 1}}};

    cr_assert_eq(ibv_modify_qp(e->qp, &attr, UD_INIT | IBV_QP_ACCESS_FLAGS), 0);
    attr.qp_state = IBV_QPS_RTR;
    cr_assert_eq(
        ibv_modify_qp(e->qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN), 0);
    attr.qp_state = IBV_QPS_RTS;
    cr_assert_eq(ibv_modify_qp(e->qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN), 0);
}

Test(ud, a_connection_without_acknowledgements_drops_and_goes_on)
{
    struct address wrong;
    struct ibv_wc wc;

    world = test_world(NULL);
    uc_open(&a, 0);
    uc_open(&b, 1);
    at = end_address(&a);
    bt = end_address(&b);
    uc_connect(&a, &bt);
    uc_connect(&b, &at);
    cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, 4096, &bt, 0, IBV_SEND_SIGNALED, 1), 0);
    cr_assert_eq(wait_wc(a.cq, "write").status, IBV_WC_SUCCESS);
    cr_assert_eq(memcmp(a.buf, b.buf, 4096), 0);
    wrong = bt;
    wrong.rkey++;
    cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, 64, &wrong, 0, IBV_SEND_SIGNALED, 2), 0);
    cr_assert_eq(wait_wc(a.cq, "write with a wrong key").status, IBV_WC_SUCCESS);
    cr_assert_eq(post(&a, IBV_WR_SEND, 0, 64, NULL, 0, IBV_SEND_SIGNALED, 3), 0);
    cr_assert_eq(wait_wc(a.cq, "send without a receive").status, IBV_WC_SUCCESS);
    cr_assert_eq(dropped(0), 2);
    cr_assert_eq(post_recv(&b, 8192, 64, 9), 0);
    cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE_WITH_IMM, 0, 16384, &bt, 0, IBV_SEND_SIGNALED, 4), 0);
    cr_assert_eq(wait_wc(a.cq, "write with immediate").status, IBV_WC_SUCCESS);
    wc = wait_wc(b.cq, "immediate");
    cr_assert(wc.wr_id == 9 && wc.byte_len == 16384 && wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM && wc.imm_data == 4);
    cr_assert(wc.wc_flags == IBV_WC_WITH_IMM && !memcmp(a.buf, b.buf, 16384));
    cr_assert_eq(post(&a, IBV_WR_RDMA_READ, 0, 64, &bt, 0, IBV_SEND_SIGNALED, 5), EINVAL, "there are no reads");
    end_close(&a);
    end_close(&b);
}

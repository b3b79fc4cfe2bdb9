/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <poll.h>
#include <string.h>
#include <unistd.h>

#include "tools/softnic/test/support.h"
#include "tools/softnic/world/object.h"

enum { M_INIT = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS };
enum {
    M_RTR = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
            IBV_QP_MIN_RNR_TIMER
};
enum {
    M_RTS =
        IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC
};

/* One step from a state that was reached correctly. */
struct row {
    int from, to, mask, result;
};
static struct row rows[] = {
    {IBV_QPS_RESET, IBV_QPS_INIT, M_INIT, 0},
    {IBV_QPS_RESET, IBV_QPS_INIT, M_INIT & ~IBV_QP_PORT, EINVAL},
    {IBV_QPS_RESET, IBV_QPS_INIT, M_INIT | IBV_QP_AV, EINVAL},
    {IBV_QPS_RESET, IBV_QPS_RTR, M_RTR, EINVAL},
    {IBV_QPS_RESET, IBV_QPS_RTS, M_RTS, EINVAL},
    {IBV_QPS_RESET, IBV_QPS_RESET, IBV_QP_STATE, 0},
    {IBV_QPS_RESET, IBV_QPS_ERR, IBV_QP_STATE, 0},
    {IBV_QPS_INIT, IBV_QPS_INIT, IBV_QP_STATE | IBV_QP_ACCESS_FLAGS, 0},
    {IBV_QPS_INIT, IBV_QPS_RTR, M_RTR, 0},
    {IBV_QPS_INIT, IBV_QPS_RTR, M_RTR & ~IBV_QP_AV, EINVAL},
    {IBV_QPS_INIT, IBV_QPS_RTR, M_RTR & ~IBV_QP_MIN_RNR_TIMER, EINVAL},
    {IBV_QPS_INIT, IBV_QPS_RTS, M_RTS, EINVAL},
    {IBV_QPS_RTR, IBV_QPS_RTS, M_RTS, 0},
    {IBV_QPS_RTR, IBV_QPS_RTS, M_RTS & ~IBV_QP_TIMEOUT, EINVAL},
    {IBV_QPS_RTR, IBV_QPS_RTR, M_RTR, EINVAL},
    {IBV_QPS_RTR, IBV_QPS_INIT, M_INIT, EINVAL},
    {IBV_QPS_RTS, IBV_QPS_RTS, IBV_QP_STATE | IBV_QP_MIN_RNR_TIMER, 0},
    {IBV_QPS_RTS, IBV_QPS_RTS, IBV_QP_ACCESS_FLAGS, 0},
    {IBV_QPS_RTS, IBV_QPS_RTS, IBV_QP_STATE | IBV_QP_DEST_QPN, EINVAL},
    {IBV_QPS_RTS, IBV_QPS_SQD, IBV_QP_STATE, 0},
    {IBV_QPS_RTS, IBV_QPS_RTR, M_RTR, EINVAL},
    {IBV_QPS_RTS, IBV_QPS_ERR, IBV_QP_STATE, 0},
    {IBV_QPS_RTS, IBV_QPS_RESET, IBV_QP_STATE, 0},
    {IBV_QPS_SQD, IBV_QPS_RTS, IBV_QP_STATE, 0},
    {IBV_QPS_SQD, IBV_QPS_SQD, IBV_QP_STATE | IBV_QP_TIMEOUT, 0},
    {IBV_QPS_ERR, IBV_QPS_RESET, IBV_QP_STATE, 0},
    {IBV_QPS_ERR, IBV_QPS_RTS, IBV_QP_STATE, EINVAL},
    {IBV_QPS_ERR, IBV_QPS_INIT, M_INIT, EINVAL},
};

static struct ibv_qp_attr attributes(const struct end *e, int to)
{
    struct ibv_qp_attr attr = {.qp_state = to,
                               .port_num = 1,
                               .path_mtu = IBV_MTU_1024,
                               .dest_qp_num = e->qp->qp_num,
                               .ah_attr = {.is_global = 1, .port_num = 1}};

    cr_assert_eq(ibv_query_gid(e->ctx, 1, 1, &attr.ah_attr.grh.dgid), 0);
    return attr;
}

static void bring_to(struct end *e, int state)
{
    static const struct {
        int state, mask;
    } way[] = {{IBV_QPS_INIT, M_INIT}, {IBV_QPS_RTR, M_RTR}, {IBV_QPS_RTS, M_RTS}, {IBV_QPS_SQD, IBV_QP_STATE}};

    if (state == IBV_QPS_RESET)
        return;
    for (unsigned i = 0; i < sizeof(way) / sizeof(way[0]); i++) {
        struct ibv_qp_attr attr = attributes(e, state == IBV_QPS_ERR ? IBV_QPS_ERR : way[i].state);

        cr_assert_eq(ibv_modify_qp(e->qp, &attr, state == IBV_QPS_ERR ? IBV_QP_STATE : way[i].mask), 0);
        if ((int)attr.qp_state == state)
            return;
    }
}

ParameterizedTestParameters(qp_state, follows_the_table)
{
    return cr_make_param_array(struct row, rows, sizeof(rows) / sizeof(rows[0]));
}

ParameterizedTest(struct row *row, qp_state, follows_the_table)
{
    struct ibv_qp_attr attr, after;
    struct ibv_qp_init_attr init;
    struct end e;

    test_world(NULL);
    end_open(&e, NULL);
    bring_to(&e, row->from);
    attr = attributes(&e, row->to);
    cr_assert_eq(ibv_modify_qp(e.qp, &attr, row->mask), row->result, "%d to %d with 0x%x", row->from, row->to,
                 row->mask);
    cr_assert_eq(ibv_query_qp(e.qp, &after, IBV_QP_STATE, &init), 0);
    cr_assert_eq((int)after.qp_state, row->result ? row->from : row->to);
    end_close(&e);
}

Test(qp_state, a_wrong_current_state_is_refused)
{
    struct ibv_qp_attr attr;
    struct end e;

    test_world(NULL);
    end_open(&e, NULL);
    attr = attributes(&e, IBV_QPS_INIT);
    attr.cur_qp_state = IBV_QPS_RTS;
    cr_assert_eq(ibv_modify_qp(e.qp, &attr, M_INIT | IBV_QP_CUR_STATE), EINVAL);
}

Test(qp_state, posting_too_early_is_refused)
{
    struct address self;
    struct end e;

    test_world(NULL);
    end_open(&e, NULL);
    self = end_address(&e);
    cr_assert_eq(post_recv(&e, 0, 8, 1), EINVAL, "receive in RESET");
    cr_assert_eq(post(&e, IBV_WR_RDMA_WRITE, 0, 8, &self, 8, 0, 1), EINVAL, "send in RESET");
    bring_to(&e, IBV_QPS_INIT);
    cr_assert_eq(post_recv(&e, 0, 8, 1), 0, "receive in INIT");
    cr_assert_eq(post(&e, IBV_WR_RDMA_WRITE, 0, 8, &self, 8, 0, 1), EINVAL, "send in INIT");
}

Test(qp_state, a_reset_queue_pair_works_again)
{
    struct ibv_qp_attr reset = {.qp_state = IBV_QPS_RESET};
    struct address at, bt;
    struct end a, b;

    test_world(NULL);
    pair_open(&a, &b);
    at = end_address(&a);
    bt = end_address(&b);
    for (int i = 0; i < END_WRS; i++) /* fill the queue with requests that are never polled */
        cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, 8, &bt, 0, IBV_SEND_SIGNALED, 1), 0);
    cr_assert_eq(ibv_modify_qp(a.qp, &reset, IBV_QP_STATE), 0);
    cr_assert_eq(ibv_modify_qp(b.qp, &reset, IBV_QP_STATE), 0);
    cr_assert(quiet(a.cq, 1000), "completions of a reset queue pair are gone");
    end_connect(&a, &bt, &link_default);
    end_connect(&b, &at, &link_default);
    for (int i = 0; i < END_WRS; i++)
        cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, 8, &bt, 0, IBV_SEND_SIGNALED, 2), 0);
    cr_assert_eq(wait_wc(a.cq, "write after reset").wr_id, 2);
    end_close(&a);
    end_close(&b);
}

Test(qp_state, a_drained_send_queue_waits_and_goes_on)
{
    struct ibv_qp_attr sqd = {.qp_state = IBV_QPS_SQD}, rts = {.qp_state = IBV_QPS_RTS};
    struct address bt;
    struct end a, b;

    test_world(NULL);
    pair_open(&a, &b);
    bt = end_address(&b);
    cr_assert_eq(ibv_modify_qp(a.qp, &sqd, IBV_QP_STATE), 0);
    cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, 8, &bt, 0, IBV_SEND_SIGNALED, 5), 0);
    cr_assert(quiet(a.cq, 3000));
    cr_assert_eq(ibv_modify_qp(a.qp, &rts, IBV_QP_STATE), 0);
    cr_assert_eq(wait_wc(a.cq, "write posted in SQD").status, IBV_WC_SUCCESS);
}

Test(qp_state, numbers_are_not_reused_at_once)
{
    enum { MADE = 200 };
    uint32_t seen[MADE];
    struct end e;

    test_world(NULL);
    end_open(&e, NULL);
    for (int i = 0; i < MADE; i++) {
        struct ibv_qp_init_attr init = {
            .send_cq = e.cq, .recv_cq = e.cq, .cap = {4, 4, 1, 1, 0}, .qp_type = IBV_QPT_RC};
        struct ibv_qp *qp = ibv_create_qp(e.pd, &init);

        cr_assert_not_null(qp);
        seen[i] = qp->qp_num;
        for (int j = 0; j < i; j++)
            cr_assert_neq(seen[j], seen[i], "number 0x%x of queue pair %d given to %d", seen[i], j, i);
        cr_assert_eq(ibv_destroy_qp(qp), 0);
    }
}

Test(qp_state, what_cannot_be_is_refused_at_creation)
{
    struct ibv_qp_init_attr init;
    struct end e;

    test_world(NULL);
    end_open(&e, NULL);
    init = (struct ibv_qp_init_attr){
        .send_cq = e.cq, .recv_cq = e.cq, .cap = {4, 4, 1, 1, 0}, .qp_type = IBV_QPT_RAW_PACKET};
    cr_assert_null(ibv_create_qp(e.pd, &init));
    cr_assert_eq(errno, EOPNOTSUPP);
    init.qp_type = IBV_QPT_RC;
    init.cap.max_inline_data = 1 << 20;
    cr_assert_null(ibv_create_qp(e.pd, &init));
    cr_assert_eq(errno, EINVAL);
}

/* The old structure ends with padding, where the extended one has its mask. Programs do not clear it. */
Test(qp_state, padding_is_no_mask)
{
    struct ibv_qp_init_attr init;
    struct ibv_qp *qp;
    struct end e;

    test_world(NULL);
    end_open(&e, NULL);
    memset(&init, 0xff, sizeof(init));
    init.qp_context = NULL;
    init.send_cq = init.recv_cq = e.cq;
    init.srq = NULL;
    init.cap = (struct ibv_qp_cap){4, 4, 1, 1, 0};
    init.qp_type = IBV_QPT_RC;
    init.sq_sig_all = 1;
    qp = ibv_create_qp(e.pd, &init);
    cr_assert_not_null(qp, "%s", strerror(errno));
    cr_assert_eq(ibv_destroy_qp(qp), 0);
    end_close(&e);
}

Test(qp_state, a_queue_of_another_context_is_refused_at_creation)
{
    struct ibv_qp_init_attr init = {.cap = {4, 4, 1, 1, 0}, .qp_type = IBV_QPT_RC};
    struct ibv_srq_init_attr srq_init = {.attr = {.max_wr = 4, .max_sge = 1}};
    struct end e, other;

    test_world(NULL);
    end_open(&e, NULL);
    end_open(&other, NULL);
    init.send_cq = e.cq, init.recv_cq = other.cq;
    cr_assert_null(ibv_create_qp(e.pd, &init));
    cr_assert_eq(errno, EINVAL);
    init.send_cq = other.cq, init.recv_cq = e.cq;
    cr_assert_null(ibv_create_qp(e.pd, &init));
    cr_assert_eq(errno, EINVAL);
    init.send_cq = e.cq;
    init.srq = ibv_create_srq(other.pd, &srq_init);
    cr_assert_null(ibv_create_qp(e.pd, &init));
    cr_assert_eq(errno, EINVAL);
    cr_assert_eq(ibv_destroy_srq(init.srq), 0);
    end_close(&other);
    end_close(&e);
}

/* Data in place is not yet acknowledged: the event comes after the completion. */
Test(qp_state, a_send_queue_that_drains_later_says_so)
{
    struct ibv_qp_attr sqd = {.qp_state = IBV_QPS_SQD, .en_sqd_async_notify = 1};
    volatile uint8_t *arrived;
    struct ibv_async_event event;
    struct sn_config config;
    struct pollfd readable;
    struct address bt;
    uint64_t give_up;
    struct ibv_wc wc;
    struct end a, b;

    sn_config_default(&config);
    config.nics = 2;
    config.latency_ns = 100000000;
    test_world(&config);
    pair_open(&a, &b);
    bt = end_address(&b);
    a.buf[0] = 1;
    arrived = b.buf;
    cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, 1, &bt, 0, IBV_SEND_SIGNALED, 1), 0);
    for (give_up = now_ns() + 5000000000ull; !*arrived && now_ns() < give_up;)
        usleep(1000);
    cr_assert(*arrived);
    cr_assert_eq(ibv_modify_qp(a.qp, &sqd, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY), 0);
    readable = (struct pollfd){a.ctx->async_fd, POLLIN, 0};
    cr_assert_eq(poll(&readable, 1, 5000), 1, "no event within 5 s");
    cr_assert_eq(ibv_get_async_event(a.ctx, &event), 0);
    cr_assert(event.event_type == IBV_EVENT_SQ_DRAINED && event.element.qp == a.qp);
    ibv_ack_async_event(&event);
    cr_assert_eq(ibv_poll_cq(a.cq, 1, &wc), 1, "the completion came first");
    cr_assert_eq(poll(&readable, 1, 0), 0, "told once");
    end_close(&a);
    end_close(&b);
}

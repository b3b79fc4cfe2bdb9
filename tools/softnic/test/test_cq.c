/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <time.h>

#include "tools/softnic/test/support.h"
#include "tools/softnic/world/wake.h"

static struct end a, b;
static struct address bt;

static bool readable(int fd, int ms)
{
    struct pollfd p = {fd, POLLIN, 0};

    return poll(&p, 1, ms) == 1;
}

/* b receives, with a completion channel. */
static struct ibv_comp_channel *start_with_channel(void)
{
    struct end_options other = {.dev = 1};
    struct ibv_device **list;
    struct ibv_comp_channel *ch;

    test_world(NULL);
    list = ibv_get_device_list(NULL);
    other.ctx = ibv_open_device(list[1]);
    ibv_free_device_list(list);
    ch = ibv_create_comp_channel(other.ctx);
    cr_assert_not_null(ch);
    other.channel = ch;
    pair_open_with(&a, &b, NULL, &other, &link_default);
    bt = end_address(&b);
    return ch;
}

static void send_one(unsigned int flags)
{
    cr_assert_eq(post_recv(&b, 0, 64, 1), 0);
    cr_assert_eq(post(&a, IBV_WR_SEND, 0, 8, NULL, 0, IBV_SEND_SIGNALED | flags, 1), 0);
    wait_wc(a.cq, "send");
}

Test(cq, an_overrun_is_an_event_and_an_error)
{
    struct end_options small = {.cqe = 2};
    struct end_options other = {.dev = 1};
    struct ibv_async_event event;
    struct ibv_wc wc;

    test_world(NULL);
    pair_open_with(&a, &b, &small, &other, &link_default);
    bt = end_address(&b);
    for (int i = 0; i < 3; i++)
        cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, 8, &bt, 0, IBV_SEND_SIGNALED, 1), 0);
    cr_assert_eq(ibv_get_async_event(a.ctx, &event), 0);
    cr_assert(event.event_type == IBV_EVENT_CQ_ERR && event.element.cq == a.cq);
    ibv_ack_async_event(&event);
    cr_assert_eq(ibv_get_async_event(a.ctx, &event), 0);
    cr_assert(event.event_type == IBV_EVENT_QP_FATAL && event.element.qp == a.qp);
    ibv_ack_async_event(&event);
    cr_assert_eq(ibv_poll_cq(a.cq, 1, &wc), 1);
    cr_assert_eq(ibv_poll_cq(a.cq, 1, &wc), 1);
    cr_assert_lt(ibv_poll_cq(a.cq, 1, &wc), 0, "what is lost may not look like silence");
}

Test(cq, a_channel_wakes_once_per_request_for_notification)
{
    struct ibv_comp_channel *ch = start_with_channel();
    struct ibv_cq *cq;
    void *context;

    send_one(0);
    cr_assert_not(readable(ch->fd, 20), "not armed");
    cr_assert_eq(ibv_req_notify_cq(b.cq, 0), 0);
    send_one(0);
    send_one(0);
    cr_assert(readable(ch->fd, WAIT_S * 1000));
    cr_assert_eq(ibv_get_cq_event(ch, &cq, &context), 0);
    cr_assert_eq(cq, b.cq);
    cr_assert_not(readable(ch->fd, 20), "one event for one arming");
    cr_assert_eq(ibv_destroy_comp_channel(ch), EBUSY);
    ibv_ack_cq_events(cq, 1);
    end_close(&a);
    cr_assert_eq(ibv_destroy_qp(b.qp), 0);
    cr_assert_eq(ibv_destroy_cq(b.cq), 0);
    cr_assert_eq(ibv_destroy_comp_channel(ch), 0);
}

Test(cq, solicited_notification_ignores_other_completions)
{
    struct ibv_comp_channel *ch = start_with_channel();

    cr_assert_eq(ibv_req_notify_cq(b.cq, 1), 0);
    send_one(0);
    cr_assert_not(readable(ch->fd, 20));
    send_one(IBV_SEND_SOLICITED);
    cr_assert(readable(ch->fd, WAIT_S * 1000));
}

Test(cq, a_non_blocking_channel_says_again)
{
    struct ibv_comp_channel *ch = start_with_channel();
    struct ibv_cq *cq;
    void *context;

    cr_assert_eq(fcntl(ch->fd, F_SETFL, fcntl(ch->fd, F_GETFL) | O_NONBLOCK), 0);
    cr_assert_eq(ibv_get_cq_event(ch, &cq, &context), -1);
    cr_assert_eq(errno, EAGAIN);
}

Test(cq, no_event_is_lost_when_the_socket_is_full)
{
    enum { QUEUES = 100 }; /* far more than a datagram socket holds */
    struct ibv_comp_channel *ch = start_with_channel();
    struct ibv_cq *cq, *cqs[QUEUES];
    struct ibv_qp *qps[QUEUES];
    struct ibv_qp *first = b.qp;
    void *context;
    int events = 0;

    for (int i = 0; i < QUEUES; i++) {
        struct ibv_qp_init_attr init = {.cap = {2, 2, 1, 1, 0}, .qp_type = IBV_QPT_RC};
        struct address self;

        cqs[i] = ibv_create_cq(b.ctx, 4, NULL, ch, 0);
        init.send_cq = init.recv_cq = cqs[i];
        qps[i] = b.qp = ibv_create_qp(b.pd, &init);
        self = end_address(&b);
        end_connect(&b, &self, &link_default);
        cr_assert_eq(ibv_req_notify_cq(cqs[i], 0), 0);
        cr_assert_eq(post(&b, IBV_WR_RDMA_WRITE, 0, 8, &self, 64, IBV_SEND_SIGNALED, 1), 0);
    }
    while (readable(ch->fd, WAIT_S * 1000)) {
        cr_assert_eq(ibv_get_cq_event(ch, &cq, &context), 0);
        ibv_ack_cq_events(cq, 1);
        events++;
        cr_assert_leq(events, QUEUES);
        if (events == QUEUES)
            break;
    }
    cr_assert_eq(events, QUEUES);
    for (int i = 0; i < QUEUES; i++) {
        cr_assert_eq(ibv_destroy_qp(qps[i]), 0);
        cr_assert_eq(ibv_destroy_cq(cqs[i]), 0);
    }
    b.qp = first;
}

Test(cq, destroying_a_queue_pair_removes_its_completions)
{
    test_world(NULL);
    pair_open(&a, &b);
    bt = end_address(&b);
    cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, 8, &bt, 0, IBV_SEND_SIGNALED, 1), 0);
    cr_assert_eq(ibv_destroy_cq(a.cq), EBUSY, "in use");
    cr_assert_eq(ibv_destroy_qp(a.qp), 0);
    cr_assert(quiet(a.cq, 1000));
}

Test(cq, the_extended_interface_reads_every_field)
{
    struct ibv_cq_init_attr_ex init = {.cqe = 16,
                                       .wc_flags = IBV_WC_STANDARD_FLAGS | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP};
    struct ibv_poll_cq_attr poll_attr = {0};
    struct ibv_cq_ex *ex;
    struct ibv_cq *plain;

    test_world(NULL);
    end_open(&a, NULL);
    ex = ibv_create_cq_ex(a.ctx, &init);
    cr_assert_not_null(ex);
    cr_assert_eq(ibv_start_poll(ex, &poll_attr), ENOENT);
    plain = a.cq;
    a.cq = ibv_cq_ex_to_cq(ex);
    cr_assert_eq(ibv_destroy_qp(a.qp), 0);
    a.qp = ibv_create_qp(a.pd, &(struct ibv_qp_init_attr){
                                   .send_cq = a.cq, .recv_cq = a.cq, .cap = {4, 4, 1, 1, 0}, .qp_type = IBV_QPT_RC});
    bt = end_address(&a);
    end_connect(&a, &bt, &link_default);
    cr_assert_eq(post_recv(&a, 0, 64, 41), 0);
    cr_assert_eq(post(&a, IBV_WR_SEND_WITH_IMM, 100, 8, NULL, 0, IBV_SEND_SIGNALED, 42), 0);
    cr_assert_eq(ibv_start_poll(ex, &poll_attr), 0);
    cr_assert(ex->wr_id == 41 && ex->status == IBV_WC_SUCCESS && ibv_wc_read_opcode(ex) == IBV_WC_RECV);
    cr_assert(ibv_wc_read_imm_data(ex) == 42 && ibv_wc_read_byte_len(ex) == 8 &&
              ibv_wc_read_qp_num(ex) == a.qp->qp_num);
    cr_assert(ibv_wc_read_wc_flags(ex) & IBV_WC_WITH_IMM);
    cr_assert_gt(ibv_wc_read_completion_ts(ex), 0);
    cr_assert_eq(ibv_next_poll(ex), 0);
    cr_assert(ex->wr_id == 42 && ibv_wc_read_opcode(ex) == IBV_WC_SEND);
    cr_assert_eq(ibv_next_poll(ex), ENOENT);
    ibv_end_poll(ex);
    cr_assert_eq(ibv_destroy_qp(a.qp), 0);
    cr_assert_eq(ibv_destroy_cq(a.cq), 0);
    cr_assert_eq(ibv_destroy_cq(plain), 0);
}

Test(cq, an_overrun_cannot_be_ignored)
{
    struct ibv_cq_init_attr_ex init = {.cqe = 4,
                                       .wc_flags = IBV_WC_STANDARD_FLAGS,
                                       .comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS,
                                       .flags = IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN};
    struct ibv_cq_ex *ex;

    test_world(NULL);
    end_open(&a, NULL);
    cr_assert_null(ibv_create_cq_ex(a.ctx, &init));
    cr_assert_eq(errno, EOPNOTSUPP);
    init.flags = IBV_CREATE_CQ_ATTR_SINGLE_THREADED;
    ex = ibv_create_cq_ex(a.ctx, &init);
    cr_assert_not_null(ex);
    cr_assert_eq(ibv_destroy_cq(ibv_cq_ex_to_cq(ex)), 0);
    end_close(&a);
}

/* An extended queue with that many entries, and a's queue pair on it, connected to itself. */
static struct ibv_cq_ex *start_extended(uint32_t entries)
{
    struct ibv_cq_init_attr_ex init = {
        .cqe = entries, .wc_flags = IBV_WC_STANDARD_FLAGS | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK};
    struct ibv_cq_ex *ex;

    test_world(NULL);
    end_open(&a, NULL);
    ex = ibv_create_cq_ex(a.ctx, &init);
    cr_assert_not_null(ex);
    a.cq = ibv_cq_ex_to_cq(ex);
    a.qp = ibv_create_qp(a.pd, &(struct ibv_qp_init_attr){
                                   .send_cq = a.cq, .recv_cq = a.cq, .cap = {4, 4, 1, 1, 0}, .qp_type = IBV_QPT_RC});
    cr_assert_not_null(a.qp);
    bt = end_address(&a);
    end_connect(&a, &bt, &link_default);
    return ex;
}

Test(cq, the_extended_interface_tells_of_an_overrun_too)
{
    struct ibv_poll_cq_attr poll_attr = {0};
    struct ibv_cq_ex *ex = start_extended(2);

    for (int i = 0; i < 3; i++)
        cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, 8, &bt, 64, IBV_SEND_SIGNALED, 1), 0);
    cr_assert_eq(ibv_start_poll(ex, &poll_attr), 0);
    cr_assert_eq(ibv_next_poll(ex), 0);
    cr_assert_eq(ibv_next_poll(ex), ENOENT);
    ibv_end_poll(ex);
    cr_assert_eq(ibv_start_poll(ex, &poll_attr), EIO, "what is lost may not look like silence");
}

Test(cq, the_wall_clock_is_that_of_the_wall)
{
    struct ibv_poll_cq_attr poll_attr = {0};
    struct ibv_cq_ex *ex = start_extended(8);
    uint64_t before = (uint64_t)time(NULL), at;

    cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, 8, &bt, 64, IBV_SEND_SIGNALED, 1), 0);
    cr_assert_eq(ibv_start_poll(ex, &poll_attr), 0);
    at = ibv_wc_read_completion_wallclock_ns(ex) / 1000000000ull;
    ibv_end_poll(ex);
    cr_assert(at + 1 >= before && at <= (uint64_t)time(NULL) + 1, "%lu, now %lu", at, before);
}

Test(cq, the_link_tells_everyone_who_has_it_open)
{
    struct sn_world *world = test_world(NULL);
    struct ibv_async_event event;
    struct ibv_port_attr port;

    end_open(&a, NULL);
    end_open(&b, NULL);
    cr_assert_eq(sn_cable_set(world, 0, false), 0);
    for (int i = 0; i < 2; i++) {
        cr_assert_eq(ibv_get_async_event(i ? a.ctx : b.ctx, &event), 0);
        cr_assert(event.event_type == IBV_EVENT_PORT_ERR && event.element.port_num == 1);
        ibv_ack_async_event(&event);
    }
    cr_assert_eq(ibv_query_port(a.ctx, 1, &port), 0);
    cr_assert_eq(port.state, IBV_PORT_DOWN);
    cr_assert_eq(sn_cable_set(world, 0, true), 0);
    cr_assert_eq(ibv_get_async_event(a.ctx, &event), 0);
    cr_assert_eq(event.event_type, IBV_EVENT_PORT_ACTIVE);
}

enum { GROWING = 400 };

static void *posts_all(void *arg)
{
    struct end *e = arg;

    for (uint64_t i = 0; i < GROWING; i++)
        while (post(e, IBV_WR_RDMA_WRITE, 0, 0, NULL, 0, IBV_SEND_SIGNALED, i))
            ; /* until an entry of the send queue is free: the other thread polls */
    return NULL;
}

/* Completions come while it changes: none is lost, and their order stays. */
Test(cq, a_queue_changes_its_size_while_it_is_used)
{
    struct end x, y;
    pthread_t thread;

    test_world(NULL);
    pair_open(&x, &y);
    cr_assert_eq(pthread_create(&thread, NULL, posts_all, &x), 0);
    for (uint64_t i = 0; i < GROWING; i++) {
        int most = 4 * END_WRS << i % 4;

        cr_assert_eq(ibv_resize_cq(x.cq, most), 0);
        cr_assert_geq(x.cq->cqe, most);
        cr_assert_eq(wait_wc(x.cq, "one of many").wr_id, i);
    }
    cr_assert_eq(pthread_join(thread, NULL), 0);
    for (uint64_t i = 0; i < 3; i++)
        cr_assert_eq(post(&x, IBV_WR_RDMA_WRITE, 0, 0, NULL, 0, IBV_SEND_SIGNALED, i), 0);
    cr_assert_eq(ibv_resize_cq(x.cq, 2), EINVAL, "there are three in it");
    cr_assert_eq(ibv_resize_cq(x.cq, 0), EINVAL);
    cr_assert_eq(ibv_resize_cq(x.cq, SN_MAX_CQE + 1), EINVAL);
    for (uint64_t i = 0; i < 3; i++)
        cr_assert_eq(wait_wc(x.cq, "one of three").wr_id, i);
    end_close(&x);
    end_close(&y);
}

/* As libfabric's ofi_rxm and NVSHMEM make them. */
Test(cq, a_queue_may_be_as_large_as_the_device_says_and_no_larger)
{
    struct end_options large = {.cqe = SN_MAX_CQE}, other = {.dev = 1};
    struct ibv_device_attr attr;

    test_world(NULL);
    pair_open_with(&a, &b, &large, &other, &link_default);
    bt = end_address(&b);
    cr_assert_eq(ibv_query_device(a.ctx, &attr), 0);
    cr_assert_eq(attr.max_cqe, SN_MAX_CQE);
    cr_assert_geq(a.cq->cqe, SN_MAX_CQE);
    cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, 8, &bt, 0, IBV_SEND_SIGNALED, 5), 0);
    cr_assert_eq(wait_wc(a.cq, "write").wr_id, 5);
    errno = 0;
    cr_assert_null(ibv_create_cq(a.ctx, attr.max_cqe + 1, NULL, NULL, 0));
    cr_assert_eq(errno, EINVAL);
}

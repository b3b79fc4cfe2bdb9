/* SPDX-License-Identifier: Apache-2.0 */
/* What a program may expect that polls a descriptor before it blocks on an event. */
#include <criterion/criterion.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include "tools/softnic/test/support.h"
#include "tools/softnic/world/wake.h"

static struct end a, b;

static bool readable(int fd)
{
    struct pollfd p = {fd, POLLIN, 0};

    return poll(&p, 1, 0) == 1;
}

/* A completion queue of the channel, with one pending event. */
static struct ibv_cq *queue_with_an_event(struct ibv_comp_channel *ch, struct ibv_qp **qp)
{
    struct ibv_cq *cq = ibv_create_cq(a.ctx, 4, NULL, ch, 0), *old_cq = a.cq;
    struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .cap = {2, 2, 1, 1, 0}, .qp_type = IBV_QPT_RC};
    struct ibv_qp *old_qp = a.qp;
    struct address self;

    cr_assert_not_null(cq);
    a.cq = cq;
    a.qp = *qp = ibv_create_qp(a.pd, &init);
    cr_assert_not_null(*qp);
    self = end_address(&a);
    end_connect(&a, &self, &link_default);
    cr_assert_eq(ibv_req_notify_cq(cq, 0), 0);
    cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, 8, &self, 64, IBV_SEND_SIGNALED, 1), 0);
    wait_wc(cq, "write to itself");
    a.cq = old_cq;
    a.qp = old_qp;
    return cq;
}

/* A leftover token would make a program with other work wait in ibv_get_cq_event for ever. */
Test(channel, a_channel_is_readable_as_long_as_there_are_events)
{
    enum { QUEUES = 5 };
    struct ibv_comp_channel *ch;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    void *context;

    test_world(NULL);
    end_open(&a, NULL);
    ch = ibv_create_comp_channel(a.ctx);
    for (int i = 0; i < QUEUES; i++)
        queue_with_an_event(ch, &qp);
    for (int i = 0; i < QUEUES; i++) {
        cr_assert(readable(ch->fd), "%d of %d events are left", QUEUES - i, QUEUES);
        cr_assert_eq(ibv_get_cq_event(ch, &cq, &context), 0);
        ibv_ack_cq_events(cq, 1);
    }
    cr_assert_not(readable(ch->fd), "all events were taken");
}

Test(channel, the_event_of_a_destroyed_queue_is_not_announced)
{
    struct ibv_comp_channel *ch;
    struct ibv_cq *cq;
    struct ibv_qp *qp;

    test_world(NULL);
    end_open(&a, NULL);
    ch = ibv_create_comp_channel(a.ctx);
    cq = queue_with_an_event(ch, &qp);
    cr_assert(readable(ch->fd));
    cr_assert_eq(ibv_destroy_qp(qp), 0);
    cr_assert_eq(ibv_destroy_cq(cq), 0);
    cr_assert_not(readable(ch->fd));
}

Test(channel, a_device_is_readable_as_long_as_there_are_events)
{
    struct sn_world *world = test_world(NULL);
    struct ibv_async_event event;

    end_open(&a, NULL);
    for (int i = 0; i < 4; i++)
        cr_assert_eq(sn_cable_set(world, 0, i % 2), 0);
    for (int i = 0; i < 4; i++) {
        cr_assert(readable(a.ctx->async_fd), "event %d of 4", i);
        cr_assert_eq(ibv_get_async_event(a.ctx, &event), 0);
        cr_assert_eq(event.event_type, i % 2 ? IBV_EVENT_PORT_ACTIVE : IBV_EVENT_PORT_ERR);
    }
    cr_assert_not(readable(a.ctx->async_fd));
}

Test(channel, events_of_a_destroyed_object_go_with_it)
{
    struct end_options shared = {.dev = 1, .with_srq = true};
    struct ibv_qp_attr err = {.qp_state = IBV_QPS_ERR};
    struct sn_world *world = test_world(NULL);
    struct ibv_async_event event;

    pair_open_with(&a, &b, NULL, &shared, &link_default);
    cr_assert_eq(ibv_modify_qp(b.qp, &err, IBV_QP_STATE), 0);
    cr_assert(readable(b.ctx->async_fd), "it has taken its last receive");
    cr_assert_eq(sn_cable_set(world, 1, false), 0);
    cr_assert_eq(ibv_destroy_qp(b.qp), 0);
    cr_assert_eq(ibv_get_async_event(b.ctx, &event), 0);
    cr_assert_eq(event.event_type, IBV_EVENT_PORT_ERR);
    cr_assert_not(readable(b.ctx->async_fd));
}

/* To shut down an SRQ, a program waits for this event of each queue pair. */
Test(channel, every_queue_pair_of_many_that_fail_says_so)
{
    enum { PAIRS = 200 };
    struct ibv_qp_attr err = {.qp_state = IBV_QPS_ERR};
    struct end_options shared = {.with_srq = true};
    struct ibv_async_event event;
    struct ibv_qp *qps[PAIRS];
    struct address self;

    test_world(NULL);
    end_open(&a, &shared);
    for (int i = 0; i < PAIRS; i++) {
        struct ibv_qp_init_attr init = {
            .send_cq = a.cq, .recv_cq = a.cq, .srq = a.srq, .cap = {2, 0, 1, 0, 0}, .qp_type = IBV_QPT_RC};

        a.qp = qps[i] = ibv_create_qp(a.pd, &init);
        cr_assert_not_null(qps[i]);
        self = end_address(&a);
        end_connect(&a, &self, &link_default);
    }
    for (int i = 0; i < PAIRS; i++)
        cr_assert_eq(ibv_modify_qp(qps[i], &err, IBV_QP_STATE), 0);
    for (int i = 0; i < PAIRS; i++) {
        cr_assert(readable(a.ctx->async_fd), "event %d of %d", i, PAIRS);
        cr_assert_eq(ibv_get_async_event(a.ctx, &event), 0);
        cr_assert(event.event_type == IBV_EVENT_QP_LAST_WQE_REACHED && event.element.qp == qps[i]);
        ibv_ack_async_event(&event);
    }
}

static void on_signal(int number)
{
}

struct reader {
    struct ibv_comp_channel *channel;
    bool done;
    int result, error;
};

static void *read_event(void *arg)
{
    struct reader *reader = arg;
    struct ibv_cq *cq;
    void *context;

    reader->result = ibv_get_cq_event(reader->channel, &cq, &context);
    reader->error = errno;
    __atomic_store_n(&reader->done, true, __ATOMIC_RELEASE);
    return NULL;
}

/* As read(2) does in rdma-core: programs rely on it to stop a thread that waits. */
Test(channel, a_signal_ends_the_wait_for_an_event)
{
    struct sigaction action = {.sa_handler = on_signal}; /* without SA_RESTART */
    struct reader reader = {0};
    uint64_t give_up;
    pthread_t thread;

    test_world(NULL);
    end_open(&a, NULL);
    reader.channel = ibv_create_comp_channel(a.ctx);
    cr_assert_eq(sigaction(SIGUSR1, &action, NULL), 0);
    cr_assert_eq(pthread_create(&thread, NULL, read_event, &reader), 0);
    give_up = now_ns() + 5000000000ull;
    while (!__atomic_load_n(&reader.done, __ATOMIC_ACQUIRE) && now_ns() < give_up) {
        pthread_kill(thread, SIGUSR1); /* again and again: it may not be waiting yet */
        usleep(1000);
    }
    cr_assert(__atomic_load_n(&reader.done, __ATOMIC_ACQUIRE), "5 s of signals");
    pthread_join(thread, NULL);
    cr_assert(reader.result == -1 && reader.error == EINTR, "%d, errno %d", reader.result, reader.error);
    cr_assert_eq(ibv_destroy_comp_channel(reader.channel), 0);
}

Test(channel, a_nic_that_dies_says_so_takes_no_command_and_flushes_nothing)
{
    struct ibv_qp_attr error = {.qp_state = IBV_QPS_ERR};
    struct sn_world *world = test_world(NULL);
    struct ibv_async_event event;
    struct address to;

    pair_open(&a, &b);
    to = end_address(&b);
    cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, 8, &to, 0, IBV_SEND_SIGNALED, 1), 0);
    cr_assert_eq(wait_wc(a.cq, "write before").status, IBV_WC_SUCCESS);
    cr_assert_eq(sn_device_kill(world, 0), 0);
    cr_assert_eq(ibv_get_async_event(a.qp->context, &event), 0);
    cr_assert_eq(event.event_type, IBV_EVENT_DEVICE_FATAL);
    ibv_ack_async_event(&event);
    cr_assert_eq(ibv_modify_qp(a.qp, &error, IBV_QP_STATE), EIO);
    cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, 8, &to, 0, IBV_SEND_SIGNALED, 2), 0);
    cr_assert(quiet(a.cq, 20000), "it completes nothing");
    cr_assert_eq(sn_cable_set(world, 0, true), -EINVAL, "its cable does not revive it");
}

/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <string.h>

#include "tools/softnic/test/support.h"

static struct end a, b;

static void start(void)
{
    struct end_options shared = {.dev = 1, .with_srq = true};

    test_world(NULL);
    pair_open_with(&a, &b, NULL, &shared, &link_default);
}

Test(srq, receives_are_taken_in_order)
{
    start();
    for (uint64_t i = 0; i < 8; i++)
        cr_assert_eq(post_recv(&b, i * 64, 64, i), 0);
    for (uint64_t i = 0; i < 8; i++) {
        a.buf[0] = (uint8_t)(i + 1);
        cr_assert_eq(post(&a, IBV_WR_SEND, 0, 1, NULL, 0, IBV_SEND_SIGNALED, i), 0);
        wait_wc(a.cq, "send");
        cr_assert_eq(wait_wc(b.cq, "receive").wr_id, i);
        cr_assert_eq(b.buf[i * 64], i + 1);
    }
    end_close(&a);
    end_close(&b);
}

Test(srq, the_limit_is_told_once)
{
    struct ibv_srq_attr attr = {.srq_limit = 3};
    struct ibv_async_event event;

    start();
    for (uint64_t i = 0; i < 6; i++)
        cr_assert_eq(post_recv(&b, 0, 64, i), 0);
    cr_assert_eq(ibv_modify_srq(b.srq, &attr, IBV_SRQ_LIMIT), 0);
    for (uint64_t i = 0; i < 5; i++) {
        cr_assert_eq(post(&a, IBV_WR_SEND, 0, 1, NULL, 0, IBV_SEND_SIGNALED, i), 0);
        wait_wc(a.cq, "send");
    }
    cr_assert_eq(ibv_get_async_event(b.ctx, &event), 0);
    cr_assert(event.event_type == IBV_EVENT_SRQ_LIMIT_REACHED && event.element.srq == b.srq);
    ibv_ack_async_event(&event);
    cr_assert_eq(ibv_query_srq(b.srq, &attr), 0);
    cr_assert_eq(attr.srq_limit, 0, "disarmed");
}

Test(srq, a_full_queue_refuses_a_post)
{
    struct ibv_srq_attr attr;

    start();
    cr_assert_eq(ibv_query_srq(b.srq, &attr), 0);
    for (uint32_t i = 0; i < attr.max_wr; i++)
        cr_assert_eq(post_recv(&b, 0, 64, i), 0);
    cr_assert_eq(post_recv(&b, 0, 64, 99), ENOMEM);
}

Test(srq, a_failed_queue_pair_says_when_it_took_its_last)
{
    struct ibv_qp_attr err = {.qp_state = IBV_QPS_ERR};
    struct ibv_async_event event;

    start();
    cr_assert_eq(post_recv(&b, 0, 64, 1), 0);
    cr_assert_eq(ibv_destroy_srq(b.srq), EBUSY, "in use");
    cr_assert_eq(ibv_modify_qp(b.qp, &err, IBV_QP_STATE), 0);
    cr_assert_eq(ibv_get_async_event(b.ctx, &event), 0);
    cr_assert(event.event_type == IBV_EVENT_QP_LAST_WQE_REACHED && event.element.qp == b.qp);
    ibv_ack_async_event(&event);
    cr_assert(quiet(b.cq, 1000), "receives of a shared queue are not flushed");
}

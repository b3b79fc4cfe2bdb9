/* SPDX-License-Identifier: Apache-2.0 */
/* The order of execution, of completion and of failures. */
#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tools/softnic/test/support.h"
#include "tools/softnic/test/two_ends.h"
#include "tools/softnic/world/wake.h"

Test(run, a_full_queue_refuses_a_post)
{
    start(NULL);
    for (int i = 0; i < END_WRS; i++)
        cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, 8, &bt, 0, i == END_WRS - 1 ? IBV_SEND_SIGNALED : 0, (uint64_t)i),
                     0);
    cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, 8, &bt, 0, 0, 99), ENOMEM, "nothing was polled, so nothing is free");
    cr_assert_eq(wait_wc(a.cq, "last of a batch").wr_id, END_WRS - 1);
    for (int i = 0; i < END_WRS; i++)
        cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, 8, &bt, 0, IBV_SEND_SIGNALED, 7), 0,
                     "one signaled completion frees all %d", END_WRS);
}

Test(run, a_full_receive_queue_refuses_a_post)
{
    start(NULL);
    for (int i = 0; i < END_WRS; i++)
        cr_assert_eq(post_recv(&b, 0, 64, (uint64_t)i), 0);
    cr_assert_eq(post_recv(&b, 0, 64, 99), ENOMEM);
    cr_assert_eq(post(&a, IBV_WR_SEND, 0, 8, NULL, 0, IBV_SEND_SIGNALED, 1), 0);
    wait_wc(a.cq, "send");
    cr_assert_eq(post_recv(&b, 0, 64, 99), ENOMEM, "consumed, but its completion was not polled");
    wait_wc(b.cq, "receive");
    cr_assert_eq(post_recv(&b, 0, 64, 99), 0);
}

Test(run, a_chain_stops_at_the_first_bad_request)
{
    struct ibv_sge sge;
    struct ibv_send_wr wr[3] = {{.wr_id = 0}, {.wr_id = 1}, {.wr_id = 2}}, *bad = NULL;

    start(NULL);
    sge = (struct ibv_sge){at.addr, 8, a.mr->lkey};
    for (int i = 0; i < 3; i++) {
        wr[i].next = i < 2 ? &wr[i + 1] : NULL;
        wr[i].sg_list = &sge;
        wr[i].num_sge = i == 1 ? 99 : 1;
        wr[i].opcode = IBV_WR_RDMA_WRITE;
        wr[i].send_flags = IBV_SEND_SIGNALED;
        wr[i].wr.rdma.remote_addr = bt.addr;
        wr[i].wr.rdma.rkey = bt.rkey;
    }
    cr_assert_eq(ibv_post_send(a.qp, wr, &bad), EINVAL);
    cr_assert_eq(bad, &wr[1]);
    cr_assert_eq(wait_wc(a.cq, "first of the chain").wr_id, 0);
    cr_assert(quiet(a.cq, 2000), "the third was not posted");
}

Test(run, requests_complete_in_order_whoever_runs_them)
{
    uint64_t next = 0;

    start(NULL);
    for (uint64_t round = 0; round < 20; round++) {
        for (uint64_t i = 0; i < 16; i++) /* the engine does large ones; small ones may not overtake them */
            cr_assert_eq(post(&a, i % 3 ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ, 0, i % 2 ? 8 : 60000, &bt, 0,
                              IBV_SEND_SIGNALED, round * 16 + i),
                         0);
        for (int i = 0; i < 16; i++)
            cr_assert_eq(wait_wc(a.cq, "ordered").wr_id, next++);
    }
    end_close(&a);
    end_close(&b);
}

Test(run, a_later_write_does_not_overtake_an_earlier_read)
{
    start(NULL);
    memset(a.buf, 0xaa, 60000);
    for (int i = 0; i < 50; i++) {
        memset(b.buf, i, 60000);
        cr_assert_eq(post(&a, IBV_WR_RDMA_READ, 0, 30000, &bt, 0, IBV_SEND_SIGNALED, 1), 0);
        cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 60000, 8, &bt, 29992, IBV_SEND_SIGNALED, 2), 0);
        wait_wc(a.cq, "read");
        cr_assert_eq(a.buf[29999], i, "the read saw the later write");
        wait_wc(a.cq, "write");
    }
}

Test(run, after_a_fault_the_rest_is_flushed_in_order)
{
    struct address wrong;
    struct ibv_wc wc;

    start(NULL);
    wrong = bt;
    wrong.rkey ^= 1;
    for (uint64_t i = 0; i < 4; i++)
        cr_assert_eq(post_recv(&b, 0, 64, 100 + i), 0);
    cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, 60000, &bt, 0, IBV_SEND_SIGNALED, 0), 0);
    cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, 60000, &wrong, 0, IBV_SEND_SIGNALED, 1), 0);
    for (uint64_t i = 2; i < 10; i++)
        post(&a, IBV_WR_RDMA_WRITE, 0, 8, &bt, 0, i % 2 ? 0 : IBV_SEND_SIGNALED, i);
    for (uint64_t i = 0; i < 10; i++) {
        wc = wait_wc(a.cq, "flushed");
        cr_assert_eq(wc.wr_id, i);
        cr_assert_eq(wc.status,
                     i == 0   ? IBV_WC_SUCCESS
                     : i == 1 ? IBV_WC_REM_ACCESS_ERR
                              : IBV_WC_WR_FLUSH_ERR,
                     "request %d: %s", (int)i, ibv_wc_status_str(wc.status));
    }
    for (uint64_t i = 0; i < 4; i++) {
        wc = wait_wc(b.cq, "flushed receive");
        cr_assert(wc.wr_id == 100 + i && wc.status == IBV_WC_WR_FLUSH_ERR);
    }
    cr_assert_eq(post_recv(&b, 0, 64, 200), 0, "posting in the error state is allowed");
    cr_assert_eq(wait_wc(b.cq, "receive in error").status, IBV_WC_WR_FLUSH_ERR);
    cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, 8, &bt, 0, 0, 201), 0);
    cr_assert_eq(wait_wc(a.cq, "send in error").status, IBV_WC_WR_FLUSH_ERR);
}

/* A program that polls rarely learns the reason from the first failed completion. This holds also while an earlier
 * request is under way, with receives posted meanwhile, and on a queue pair connected to itself. */
Test(run, the_request_that_failed_completes_before_what_is_flushed)
{
    struct sn_config config = model();
    struct address wrong;

    config.latency_ns = 20000000;
    start(&config);
    wrong = bt;
    wrong.rkey ^= 1;
    for (uint64_t i = 0; i < 3; i++)
        cr_assert_eq(post_recv(&a, 0, 64, 100 + i), 0);
    cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, 8, &bt, 0, IBV_SEND_SIGNALED, 1), 0);
    cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, 8, &wrong, 0, IBV_SEND_SIGNALED, 2), 0);
    usleep(30000); /* the second has failed, the first is not complete yet */
    cr_assert_eq(post_recv(&a, 0, 64, 103), 0);
    cr_assert_eq(wait_wc(a.cq, "the first").wr_id, 1);
    cr_assert_eq(wait_wc(a.cq, "the failed one").wr_id, 2);
    for (uint64_t i = 0; i < 4; i++) {
        struct ibv_wc wc = wait_wc(a.cq, "flushed receive");
        cr_assert(wc.wr_id == 100 + i && wc.status == IBV_WC_WR_FLUSH_ERR);
    }
}

Test(run, a_request_to_itself_that_failed_completes_before_what_is_flushed)
{
    struct address wrong;

    test_world(NULL);
    end_open(&a, &(struct end_options){0});
    at = end_address(&a);
    end_connect(&a, &at, &link_default);
    wrong = at;
    wrong.rkey ^= 1;
    cr_assert_eq(post_recv(&a, 0, 64, 100), 0);
    cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, 8, &wrong, 0, IBV_SEND_SIGNALED, 2), 0);
    cr_assert_eq(wait_wc(a.cq, "the failed one").wr_id, 2);
    cr_assert_eq(wait_wc(a.cq, "flushed receive").wr_id, 100);
}

/* A program that ends with receives posted has seen no error. */
Test(run, what_is_flushed_counts_apart_from_errors)
{
    struct sn_world *world = start(NULL);
    const struct sn_counters *count = &world->devs[0].counters;
    struct ibv_qp_attr err = {.qp_state = IBV_QPS_ERR};
    struct address wrong = bt;

    for (uint64_t i = 0; i < 3; i++)
        cr_assert_eq(post_recv(&a, 0, 64, 100 + i), 0);
    cr_assert_eq(ibv_modify_qp(a.qp, &err, IBV_QP_STATE), 0);
    for (int i = 0; i < 3; i++)
        wait_wc(a.cq, "flushed receive");
    cr_assert(count->flushed == 3 && count->errors == 0, "%lu flushed, %lu errors", count->flushed, count->errors);
    end_close(&a);
    end_close(&b);
    pair_open(&a, &b);
    bt = end_address(&b);
    wrong = bt;
    wrong.rkey ^= 1;
    for (uint64_t i = 0; i < 3; i++)
        cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, 60000, &wrong, 0, IBV_SEND_SIGNALED, i), 0);
    for (int i = 0; i < 3; i++)
        wait_wc(a.cq, "failed or flushed");
    cr_assert(count->flushed == 5 && count->errors == 1, "%lu flushed, %lu errors", count->flushed, count->errors);
}

Test(run, moving_to_error_flushes_what_waits)
{
    struct ibv_qp_attr err = {.qp_state = IBV_QPS_ERR};

    start(NULL);
    cr_assert_eq(post(&a, IBV_WR_SEND, 0, 8, NULL, 0, 0, 1), 0); /* waits for a receive */
    cr_assert_eq(post(&a, IBV_WR_SEND, 0, 8, NULL, 0, 0, 2), 0);
    cr_assert_eq(ibv_modify_qp(a.qp, &err, IBV_QP_STATE), 0);
    cr_assert_eq(wait_wc(a.cq, "flush").wr_id, 1);
    cr_assert_eq(wait_wc(a.cq, "flush").wr_id, 2);
}

Test(run, a_link_that_comes_back_in_time_is_no_error)
{
    struct sn_config config = model();
    struct sn_world *world;
    struct link_options patient = link_default;

    config.retry_cap_ns = 2 * WAIT_S * 1000000000ull; /* and the world's cap must not end it earlier */
    world = start(&config);
    end_close(&a);
    end_close(&b);
    patient.timeout = 24; /* 69 s: this thread may have no core while the link is down */
    pair_open_with(&a, &b, NULL, &(struct end_options){.dev = 1}, &patient);
    bt = end_address(&b);
    cr_assert_eq(sn_cable_set(world, 1, false), 0);
    cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, 8, &bt, 0, IBV_SEND_SIGNALED, 1), 0);
    cr_assert(quiet(a.cq, 20000));
    cr_assert_eq(sn_cable_set(world, 1, true), 0);
    cr_assert_eq(wait_wc(a.cq, "write after link up").status, IBV_WC_SUCCESS);
}

Test(run, a_link_that_stays_down_exceeds_the_retries)
{
    struct sn_world *world = start(NULL);

    cr_assert_eq(sn_cable_set(world, 0, false), 0);
    cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, 8, &bt, 0, IBV_SEND_SIGNALED, 1), 0);
    cr_assert_eq(wait_wc(a.cq, "write on a dead link").status, IBV_WC_RETRY_EXC_ERR);
}

Test(run, counters_count)
{
    struct sn_world *world = start(NULL);
    const struct sn_counters *mine = &world->devs[0].counters, *theirs = &world->devs[1].counters;

    cr_assert_eq(post_recv(&b, 0, 64, 1), 0);
    cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, 1000, &bt, 0, 0, 1), 0);
    cr_assert_eq(post(&a, IBV_WR_SEND, 0, 24, NULL, 0, IBV_SEND_SIGNALED | IBV_SEND_FENCE, 2), 0);
    wait_wc(a.cq, "send");
    wait_wc(b.cq, "receive");
    cr_assert(mine->send_wrs == 2 && mine->doorbells == 2 && mine->cqes_send == 1 && mine->bytes_tx == 1024 &&
              mine->fences == 1);
    cr_assert(theirs->recv_wrs == 1 && theirs->doorbells == 1 && theirs->cqes_recv == 1 && theirs->bytes_rx == 1024);
}

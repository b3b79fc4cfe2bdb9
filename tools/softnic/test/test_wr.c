/* SPDX-License-Identifier: Apache-2.0 */
/* ibv_wr_*: the same requests through the other interface. */
#include <criterion/criterion.h>
#include <string.h>

#include "tools/softnic/test/support.h"

static struct end a, b;
static struct address bt;
static struct ibv_qp_ex *ex;

static void start(void)
{
    struct end_options extended = {.extended = true}, other = {.dev = 1};

    test_world(NULL);
    pair_open_with(&a, &b, &extended, &other, &link_default);
    bt = end_address(&b);
    ex = ibv_qp_to_qp_ex(a.qp);
    cr_assert_not_null(ex);
    cr_assert_null(ibv_qp_to_qp_ex(b.qp), "made without send_ops_flags");
    for (int i = 0; i < 256; i++)
        a.buf[i] = (uint8_t)(i + 1);
}

Test(wr, a_batch_of_every_kind)
{
    uint64_t *word;

    start();
    word = (uint64_t *)(b.buf + 512);
    *word = 5;
    cr_assert_eq(post_recv(&b, 1024, 64, 1), 0);
    cr_assert_eq(post_recv(&b, 2048, 64, 2), 0);
    ibv_wr_start(ex);
    ex->wr_id = 10;
    ex->wr_flags = 0;
    ibv_wr_rdma_write(ex, bt.rkey, bt.addr);
    ibv_wr_set_sge(ex, a.mr->lkey, (uintptr_t)a.buf, 100);
    ex->wr_id = 11;
    ibv_wr_send_imm(ex, 77);
    ibv_wr_set_inline_data(ex, a.buf, 16);
    ex->wr_id = 12;
    ibv_wr_rdma_write_imm(ex, bt.rkey, bt.addr + 256, 78);
    ibv_wr_set_sge(ex, a.mr->lkey, (uintptr_t)a.buf, 8);
    ex->wr_id = 13;
    ibv_wr_atomic_fetch_add(ex, bt.rkey, bt.addr + 512, 3);
    ibv_wr_set_sge(ex, a.mr->lkey, (uintptr_t)a.buf + 512, 8);
    ex->wr_id = 14;
    ibv_wr_atomic_cmp_swp(ex, bt.rkey, bt.addr + 512, 8, 9);
    ibv_wr_set_sge(ex, a.mr->lkey, (uintptr_t)a.buf + 520, 8);
    ex->wr_id = 15;
    ex->wr_flags = IBV_SEND_SIGNALED;
    ibv_wr_rdma_read(ex, bt.rkey, bt.addr);
    ibv_wr_set_sge(ex, a.mr->lkey, (uintptr_t)a.buf + 1024, 100);
    cr_assert_eq(ibv_wr_complete(ex), 0);
    cr_assert_eq(wait_wc(a.cq, "batch").wr_id, 15);
    cr_assert_eq(wait_wc(b.cq, "send").imm_data, 77);
    cr_assert_eq(wait_wc(b.cq, "immediate").imm_data, 78);
    cr_assert_eq(memcmp(a.buf + 1024, a.buf, 100), 0);
    cr_assert_eq(memcmp(b.buf + 1024, a.buf, 16), 0);
    cr_assert(*word == 9 && *(uint64_t *)(a.buf + 512) == 5 && *(uint64_t *)(a.buf + 520) == 8);
}

Test(wr, an_error_undoes_the_batch)
{
    start();
    ibv_wr_start(ex);
    ex->wr_flags = IBV_SEND_SIGNALED;
    ibv_wr_rdma_write(ex, bt.rkey, bt.addr);
    ibv_wr_set_sge(ex, a.mr->lkey, (uintptr_t)a.buf, 100);
    ibv_wr_rdma_write(ex, bt.rkey, bt.addr);
    ibv_wr_set_inline_data(ex, a.buf, 4096);
    cr_assert_eq(ibv_wr_complete(ex), EINVAL);
    cr_assert(quiet(a.cq, 2000));
    cr_assert_eq(b.buf[0], 0);
}

Test(wr, an_aborted_batch_leaves_nothing)
{
    start();
    ibv_wr_start(ex);
    ex->wr_flags = IBV_SEND_SIGNALED;
    ibv_wr_rdma_write(ex, bt.rkey, bt.addr);
    ibv_wr_set_sge(ex, a.mr->lkey, (uintptr_t)a.buf, 100);
    ibv_wr_abort(ex);
    cr_assert(quiet(a.cq, 2000));
    cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, 8, &bt, 0, IBV_SEND_SIGNALED, 3), 0);
    cr_assert_eq(wait_wc(a.cq, "after the abort").wr_id, 3);
}

Test(wr, more_than_the_queue_holds_is_refused_whole)
{
    start();
    ibv_wr_start(ex);
    for (int i = 0; i <= END_WRS; i++) {
        ibv_wr_rdma_write(ex, bt.rkey, bt.addr);
        ibv_wr_set_sge(ex, a.mr->lkey, (uintptr_t)a.buf, 8);
    }
    cr_assert_eq(ibv_wr_complete(ex), ENOMEM);
    cr_assert_eq(b.buf[0], 0);
}

/* It refuses what ibv_post_send refuses. */
Test(wr, what_cannot_be_is_refused)
{
    start();
    ibv_wr_start(ex);
    ibv_wr_rdma_read(ex, bt.rkey, bt.addr);
    ibv_wr_set_inline_data(ex, a.buf, 8);
    cr_assert_eq(ibv_wr_complete(ex), EINVAL, "the data of a read has to go somewhere");
    ibv_wr_start(ex);
    ibv_wr_atomic_fetch_add(ex, bt.rkey, bt.addr, 1);
    ibv_wr_set_inline_data(ex, a.buf, 8);
    cr_assert_eq(ibv_wr_complete(ex), EINVAL, "and so has what an atomic finds");
    ibv_wr_start(ex);
    ibv_wr_rdma_write(ex, bt.rkey, bt.addr);
    ibv_wr_set_sge(ex, a.mr->lkey, (uintptr_t)a.buf, (1u << 31) + 1);
    cr_assert_eq(ibv_wr_complete(ex), EINVAL, "longer than max_msg_sz");
    cr_assert(quiet(a.cq, 1000));
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Memory windows of type 2, and device memory. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "tools/softnic/test/support.h"

enum { WINDOW_AT = 4096, WINDOW_BYTES = 1024, RIGHTS = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ };

static struct end a, b;
static struct ibv_mr *mr; /* b's, with windows */
static struct ibv_mw *mw;

static void start(void)
{
    test_world(NULL);
    pair_open(&a, &b);
    mr = ibv_reg_mr(b.pd, b.buf, b.bytes, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND);
    mw = ibv_alloc_mw(b.pd, IBV_MW_TYPE_2);
    cr_assert(mr && mw);
    memset(a.buf, 7, a.bytes);
}

static void finish(void)
{
    cr_assert_eq(ibv_dealloc_mw(mw), 0);
    cr_assert_eq(ibv_dereg_mr(mr), 0);
    end_close(&a);
    end_close(&b);
}

static int bind(uint32_t rkey, uint64_t offset, uint64_t length)
{
    struct ibv_send_wr wr = {.opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED, .wr_id = 5}, *bad;

    wr.bind_mw.mw = mw;
    wr.bind_mw.rkey = rkey;
    wr.bind_mw.bind_info = (struct ibv_mw_bind_info){mr, (uintptr_t)b.buf + offset, length, RIGHTS};
    return ibv_post_send(b.qp, &wr, &bad);
}

static uint32_t bound(void)
{
    uint32_t key = ibv_inc_rkey(mw->rkey);
    struct ibv_wc wc;

    cr_assert_eq(bind(key, WINDOW_AT, WINDOW_BYTES), 0);
    wc = wait_wc(b.cq, "bind");
    cr_assert(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_BIND_MW && wc.wr_id == 5);
    return key;
}

static int invalidate(struct end *e, enum ibv_wr_opcode opcode, uint32_t key)
{
    struct ibv_send_wr wr = {.opcode = opcode, .send_flags = IBV_SEND_SIGNALED, .invalidate_rkey = key}, *bad;

    return ibv_post_send(e->qp, &wr, &bad);
}

static enum ibv_wc_status written(uint32_t key, uint64_t offset, uint32_t length)
{
    struct address to = {.rkey = key, .addr = (uintptr_t)b.buf};

    cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, length, &to, offset, IBV_SEND_SIGNALED, 1), 0);
    return wait_wc(a.cq, "write").status;
}

Test(mw, a_window_shows_its_part_and_no_more)
{
    uint32_t key;

    start();
    key = bound();
    cr_assert_eq(written(key, WINDOW_AT, WINDOW_BYTES), IBV_WC_SUCCESS);
    cr_assert(!memcmp(b.buf + WINDOW_AT, a.buf, WINDOW_BYTES) && !b.buf[WINDOW_AT - 1] &&
              !b.buf[WINDOW_AT + WINDOW_BYTES]);
    cr_assert_eq(ibv_dereg_mr(mr), EBUSY, "its registration is in use");
    cr_assert_eq(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, 0), IBV_REREG_MR_ERR_INPUT);
    cr_assert_eq(written(key, WINDOW_AT, 8), IBV_WC_SUCCESS, "after both were refused");
    cr_assert_eq(written(key, WINDOW_AT + 1, WINDOW_BYTES), IBV_WC_REM_ACCESS_ERR);
    finish();
}

Test(mw, the_key_of_a_window_is_no_local_key)
{
    struct ibv_sge sge;
    struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED},
                       *bad;

    start();
    sge = (struct ibv_sge){(uintptr_t)b.buf + WINDOW_AT, 8, bound()};
    cr_assert_eq(ibv_post_send(b.qp, &wr, &bad), 0);
    cr_assert_eq(wait_wc(b.cq, "send from a window").status, IBV_WC_LOC_PROT_ERR);
    finish();
}

Test(mw, only_the_peer_of_the_queue_pair_that_bound_it_can_use_it)
{
    struct end c, d;
    struct end_options co, do_;
    struct address ct, dt;
    uint32_t key;

    start();
    key = bound();
    co = (struct end_options){.ctx = a.ctx};
    do_ = (struct end_options){.ctx = b.ctx};
    end_open(&c, &co);
    end_open(&d, &do_);
    /* a queue pair of the window's domain, which did not bind it */
    struct ibv_qp_init_attr init = {.send_cq = d.cq, .recv_cq = d.cq, .cap = {4, 4, 1, 1, 0}, .qp_type = IBV_QPT_RC};

    cr_assert_eq(ibv_destroy_qp(d.qp), 0);
    d.qp = ibv_create_qp(b.pd, &init);
    cr_assert_not_null(d.qp);
    ct = end_address(&c);
    dt = end_address(&d);
    end_connect(&c, &dt, &link_default);
    end_connect(&d, &ct, &link_default);
    dt = (struct address){.rkey = key, .addr = (uintptr_t)b.buf};
    cr_assert_eq(post(&c, IBV_WR_RDMA_WRITE, 0, 8, &dt, WINDOW_AT, IBV_SEND_SIGNALED, 1), 0);
    cr_assert_eq(wait_wc(c.cq, "write").status, IBV_WC_REM_ACCESS_ERR);
    cr_assert_eq(written(key, WINDOW_AT, 8), IBV_WC_SUCCESS, "while its own peer can");
    cr_assert_eq(ibv_destroy_qp(d.qp), 0);
    cr_assert_eq(ibv_destroy_qp(c.qp), 0);
    cr_assert_eq(ibv_dereg_mr(d.mr), 0);
    cr_assert_eq(ibv_dereg_mr(c.mr), 0);
    cr_assert_eq(ibv_destroy_cq(d.cq) | ibv_destroy_cq(c.cq) | ibv_dealloc_pd(d.pd) | ibv_dealloc_pd(c.pd), 0);
    free(d.buf);
    free(c.buf);
    finish();
}

Test(mw, both_ends_can_invalidate)
{
    struct ibv_wc wc;
    uint32_t key;

    start();
    key = bound();
    cr_assert_eq(invalidate(&b, IBV_WR_LOCAL_INV, key), 0);
    wc = wait_wc(b.cq, "local invalidation");
    cr_assert(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_LOCAL_INV);
    key = bound(); /* the same key again */
    cr_assert_eq(written(key, WINDOW_AT, 8), IBV_WC_SUCCESS);
    cr_assert_eq(post_recv(&b, 0, 8, 9), 0);
    cr_assert_eq(invalidate(&a, IBV_WR_SEND_WITH_INV, key), 0);
    cr_assert_eq(wait_wc(a.cq, "send with invalidate").status, IBV_WC_SUCCESS);
    wc = wait_wc(b.cq, "its arrival");
    cr_assert(wc.status == IBV_WC_SUCCESS && wc.wr_id == 9 && wc.wc_flags == IBV_WC_WITH_INV &&
              wc.invalidated_rkey == key);
    cr_assert_eq(written(key, WINDOW_AT, 8), IBV_WC_REM_ACCESS_ERR);
    finish();
}

Test(mw, a_send_cannot_invalidate_what_is_no_window)
{
    start();
    cr_assert_eq(post_recv(&b, 0, 8, 9), 0);
    cr_assert_eq(invalidate(&a, IBV_WR_SEND_WITH_INV, mr->rkey), 0);
    cr_assert_eq(wait_wc(a.cq, "send with invalidate").status, IBV_WC_REM_ACCESS_ERR);
    cr_assert_eq(wait_wc(b.cq, "the receive").status, IBV_WC_WR_FLUSH_ERR);
    finish();
}

Test(mw, a_bind_that_cannot_be_is_an_error)
{
    start();
    cr_assert_eq(bind(mw->rkey + 0x10000, WINDOW_AT, 8), EINVAL, "another window's key");
    cr_assert_eq(bind(mw->rkey, WINDOW_AT, 0), EINVAL);
    cr_assert(!ibv_alloc_mw(b.pd, IBV_MW_TYPE_1) && errno == EOPNOTSUPP);
    cr_assert_eq(bind(mw->rkey, b.bytes - 8, 9), 0);
    cr_assert_eq(wait_wc(b.cq, "out of bounds").status, IBV_WC_MW_BIND_ERR);
    finish();
}

Test(dm, device_memory_has_the_rules_of_a_nics)
{
    struct ibv_alloc_dm_attr attr = {.length = 8192};
    struct ibv_device_attr_ex device;
    struct ibv_dm *dm, *more;
    struct address to;
    struct ibv_mr *dm_mr;
    uint8_t bytes[16];

    start();
    cr_assert_eq(ibv_query_device_ex(b.ctx, NULL, &device), 0);
    dm = ibv_alloc_dm(b.ctx, &attr);
    cr_assert_not_null(dm);
    attr.length = device.max_dm_size - 8191;
    cr_assert(!ibv_alloc_dm(b.ctx, &attr) && errno == ENOMEM, "more than there is");
    attr.length = device.max_dm_size - 8192;
    more = ibv_alloc_dm(b.ctx, &attr);
    cr_assert_not_null(more);
    cr_assert_eq(ibv_free_dm(more), 0);
    cr_assert_neq(ibv_memcpy_to_dm(dm, 2, bytes, 8), 0);
    cr_assert_neq(ibv_memcpy_to_dm(dm, 0, bytes, 6), 0);
    cr_assert_neq(ibv_memcpy_from_dm(bytes, dm, 8184, 12), 0);
    cr_assert_null(ibv_reg_dm_mr(b.pd, dm, 0, 8192, IBV_ACCESS_LOCAL_WRITE), "addresses that do not begin at 0");
    cr_assert_null(ibv_reg_dm_mr(b.pd, dm, 4096, 4100, IBV_ACCESS_ZERO_BASED), "behind its end");
    dm_mr = ibv_reg_dm_mr(b.pd, dm, 4096, 4096, IBV_ACCESS_ZERO_BASED | IBV_ACCESS_LOCAL_WRITE | RIGHTS);
    cr_assert_not_null(dm_mr);
    cr_assert_eq(ibv_free_dm(dm), EBUSY);
    to = (struct address){.rkey = dm_mr->rkey};
    cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, 16, &to, 8, IBV_SEND_SIGNALED, 1), 0);
    cr_assert_eq(wait_wc(a.cq, "write").status, IBV_WC_SUCCESS);
    cr_assert_eq(ibv_memcpy_from_dm(bytes, dm, 4096 + 8, 16), 0);
    cr_assert_eq(memcmp(bytes, a.buf, 16), 0);
    cr_assert_eq(ibv_dereg_mr(dm_mr), 0);
    cr_assert_eq(ibv_free_dm(dm), 0);
    finish();
}

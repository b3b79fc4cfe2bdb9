/* SPDX-License-Identifier: Apache-2.0 */
/* The effect of each request, and the error completion of each fault. */
#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <string.h>

#include "tools/softnic/test/support.h"

static struct end a, b;
static struct address at, bt;

static void start(void)
{
    test_world(NULL);
    pair_open(&a, &b);
    at = end_address(&a);
    bt = end_address(&b);
    for (size_t i = 0; i < a.bytes; i++)
        a.buf[i] = (uint8_t)(i * 7 + 1);
}

static void finish(void)
{
    end_close(&a);
    end_close(&b);
}

/* Sizes that are copied in post_send or by the engine, at the limit between them, odd, and empty. */
static uint32_t sizes[] = {0, 1, 3, 4, 7, 8, 9, 63, 64, 65, 4095, 4096, 4097, 16384, 16385, 65536};

ParameterizedTestParameters(exec, a_write_arrives_whole)
{
    return cr_make_param_array(uint32_t, sizes, sizeof(sizes) / sizeof(sizes[0]));
}

ParameterizedTest(uint32_t *size, exec, a_write_arrives_whole)
{
    struct ibv_wc wc;

    start();
    cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, *size, &bt, 0, IBV_SEND_SIGNALED, 77), 0);
    wc = wait_wc(a.cq, "write");
    cr_assert(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_RDMA_WRITE && wc.wr_id == 77 &&
              wc.qp_num == a.qp->qp_num);
    cr_assert_eq(memcmp(a.buf, b.buf, *size), 0);
    for (size_t i = *size; i < b.bytes; i++)
        require(b.buf[i] == 0, "byte %zu behind a write of %u", i, *size);
    finish();
}

ParameterizedTestParameters(exec, a_read_brings_what_is_there)
{
    return cr_make_param_array(uint32_t, sizes, sizeof(sizes) / sizeof(sizes[0]));
}

ParameterizedTest(uint32_t *size, exec, a_read_brings_what_is_there)
{
    struct ibv_wc wc;

    start();
    cr_assert_eq(post(&b, IBV_WR_RDMA_READ, 0, *size, &at, 0, IBV_SEND_SIGNALED, 78), 0);
    wc = wait_wc(b.cq, "read");
    cr_assert(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_RDMA_READ && wc.byte_len == *size);
    cr_assert_eq(memcmp(a.buf, b.buf, *size), 0);
    finish();
}

ParameterizedTestParameters(exec, a_send_lands_in_the_receive)
{
    return cr_make_param_array(uint32_t, sizes, sizeof(sizes) / sizeof(sizes[0]));
}

ParameterizedTest(uint32_t *size, exec, a_send_lands_in_the_receive)
{
    struct ibv_wc wc;

    start();
    cr_assert_eq(post_recv(&b, 0, (uint32_t)b.bytes, 5), 0);
    cr_assert_eq(post(&a, IBV_WR_SEND_WITH_IMM, 0, *size, NULL, 0, IBV_SEND_SIGNALED, 6), 0);
    wc = wait_wc(b.cq, "receive");
    cr_assert(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_RECV && wc.wr_id == 5 && wc.byte_len == *size);
    cr_assert((wc.wc_flags & IBV_WC_WITH_IMM) && wc.imm_data == 6 && wc.src_qp == a.qp->qp_num);
    cr_assert_eq(wait_wc(a.cq, "send").opcode, IBV_WC_SEND);
    cr_assert_eq(memcmp(a.buf, b.buf, *size), 0);
    finish();
}

Test(execute, a_write_with_immediate_tells_the_receiver_after_the_data)
{
    struct ibv_wc wc;

    start();
    cr_assert_eq(post_recv(&b, 0, 0, 9), 0);
    cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE_WITH_IMM, 0, 40000, &bt, 0, IBV_SEND_SIGNALED, 10), 0);
    wc = wait_wc(b.cq, "immediate");
    cr_assert_eq(memcmp(a.buf, b.buf, 40000), 0);
    cr_assert(wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM && wc.wr_id == 9 && wc.imm_data == 10 && wc.byte_len == 40000);
    cr_assert_eq(wait_wc(a.cq, "write").status, IBV_WC_SUCCESS);
    finish();
}

Test(execute, scattered_and_gathered_buffers_keep_their_order)
{
    struct ibv_sge from[3], to[2];
    struct ibv_send_wr wr = {.wr_id = 1,
                             .sg_list = from,
                             .num_sge = 3,
                             .opcode = IBV_WR_SEND,
                             .send_flags = IBV_SEND_SIGNALED},
                       *bad;
    struct ibv_recv_wr recv = {.wr_id = 2, .sg_list = to, .num_sge = 2}, *bad_recv;

    start();
    from[0] = (struct ibv_sge){at.addr + 100, 10, a.mr->lkey};
    from[1] = (struct ibv_sge){at.addr, 0, 0}; /* length 0, so its key is not checked */
    from[2] = (struct ibv_sge){at.addr + 300, 25, a.mr->lkey};
    to[0] = (struct ibv_sge){bt.addr + 1000, 17, b.mr->lkey};
    to[1] = (struct ibv_sge){bt.addr + 2000, 100, b.mr->lkey};
    cr_assert_eq(ibv_post_recv(b.qp, &recv, &bad_recv), 0);
    cr_assert_eq(ibv_post_send(a.qp, &wr, &bad), 0);
    cr_assert_eq(wait_wc(b.cq, "receive").byte_len, 35);
    cr_assert_eq(memcmp(b.buf + 1000, a.buf + 100, 10), 0);
    cr_assert_eq(memcmp(b.buf + 1010, a.buf + 300, 7), 0);
    cr_assert_eq(memcmp(b.buf + 2000, a.buf + 307, 18), 0);
    cr_assert_eq(b.buf[2018], 0);
    wait_wc(a.cq, "send");
    finish();
}

Test(execute, inline_data_may_change_after_posting)
{
    start();
    cr_assert_eq(post_recv(&b, 0, 64, 1), 0);
    memset(a.buf, 'x', 32);
    cr_assert_eq(post(&a, IBV_WR_SEND, 0, 32, NULL, 0, IBV_SEND_SIGNALED | IBV_SEND_INLINE, 2), 0);
    memset(a.buf, 'y', 32);
    wait_wc(b.cq, "receive");
    for (int i = 0; i < 32; i++)
        cr_assert_eq(b.buf[i], 'x');
    wait_wc(a.cq, "send");
    cr_assert_eq(post(&a, IBV_WR_SEND, 0, 129, NULL, 0, IBV_SEND_INLINE, 3), EINVAL, "more than max_inline_data");
    finish();
}

Test(execute, atomics_return_the_old_value)
{
    struct ibv_sge sge = {0, 8, 0};
    struct ibv_send_wr wr = {.wr_id = 1, .sg_list = &sge, .num_sge = 1, .send_flags = IBV_SEND_SIGNALED}, *bad;
    uint64_t *word, *result;

    start();
    word = (uint64_t *)b.buf;
    result = (uint64_t *)a.buf;
    sge = (struct ibv_sge){at.addr, 8, a.mr->lkey};
    *word = 40;
    wr.wr.atomic.remote_addr = bt.addr;
    wr.wr.atomic.rkey = bt.rkey;
    wr.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
    wr.wr.atomic.compare_add = 2;
    cr_assert_eq(ibv_post_send(a.qp, &wr, &bad), 0);
    cr_assert_eq(wait_wc(a.cq, "fetch and add").opcode, IBV_WC_FETCH_ADD);
    cr_assert(*result == 40 && *word == 42);
    wr.opcode = IBV_WR_ATOMIC_CMP_AND_SWP;
    wr.wr.atomic.compare_add = 41; /* does not match */
    wr.wr.atomic.swap = 7;
    cr_assert_eq(ibv_post_send(a.qp, &wr, &bad), 0);
    cr_assert_eq(wait_wc(a.cq, "compare").opcode, IBV_WC_COMP_SWAP);
    cr_assert(*result == 42 && *word == 42);
    wr.wr.atomic.compare_add = 42;
    cr_assert_eq(ibv_post_send(a.qp, &wr, &bad), 0);
    cr_assert_eq(wait_wc(a.cq, "compare and swap").status, IBV_WC_SUCCESS);
    cr_assert(*result == 42 && *word == 7);
    finish();
}

Test(execute, a_queue_pair_may_be_connected_to_itself)
{
    start();
    end_close(&b);
    end_open(&b, NULL);
    bt = end_address(&b);
    end_connect(&b, &bt, &link_default);
    memset(b.buf, 3, 100);
    cr_assert_eq(post(&b, IBV_WR_RDMA_READ, 1000, 100, &bt, 0, IBV_SEND_SIGNALED, 1), 0);
    cr_assert_eq(wait_wc(b.cq, "read from itself").status, IBV_WC_SUCCESS);
    cr_assert_eq(b.buf[1099], 3);
    finish();
}

static void expect_error(enum ibv_wc_status mine, int theirs)
{
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    struct ibv_wc wc = wait_wc(a.cq, "failing request");

    cr_assert_eq(wc.status, mine, "%s, want %s", ibv_wc_status_str(wc.status), ibv_wc_status_str(mine));
    cr_assert_eq(ibv_query_qp(a.qp, &attr, IBV_QP_STATE, &init), 0);
    cr_assert_eq(attr.qp_state, IBV_QPS_ERR, "requester's state");
    if (theirs < 0)
        return;
    cr_assert_eq(ibv_query_qp(b.qp, &attr, IBV_QP_STATE, &init), 0);
    cr_assert_eq((int)attr.qp_state, theirs, "responder's state");
}

Test(execute, a_wrong_rkey_is_a_remote_access_error_on_both_sides)
{
    struct address wrong;

    start();
    wrong = bt;
    wrong.rkey ^= 1;
    cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, 8, &wrong, 0, 0, 1), 0); /* unsignaled: an error still completes */
    expect_error(IBV_WC_REM_ACCESS_ERR, IBV_QPS_ERR);
}

Test(execute, a_write_beyond_the_region_is_refused_whole)
{
    start();
    cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, 16, &bt, b.bytes - 8, IBV_SEND_SIGNALED, 1), 0);
    expect_error(IBV_WC_REM_ACCESS_ERR, IBV_QPS_ERR);
    cr_assert_eq(b.buf[b.bytes - 1], 0);
}

Test(execute, bounds_do_not_wrap_around)
{
    struct address wild;

    start();
    wild = bt;
    wild.addr = UINT64_MAX - 7;
    cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, 64, &wild, 0, IBV_SEND_SIGNALED, 1), 0);
    expect_error(IBV_WC_REM_ACCESS_ERR, IBV_QPS_ERR);
}

struct right {
    int opcode, qp_access, mr_access, ok;
};
static struct right rights[] = {
    {IBV_WR_RDMA_WRITE, IBV_ACCESS_REMOTE_READ, ALL_ACCESS, 0},
    {IBV_WR_RDMA_WRITE, ALL_ACCESS, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ, 0},
    {IBV_WR_RDMA_WRITE, IBV_ACCESS_REMOTE_WRITE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE, 1},
    {IBV_WR_RDMA_READ, IBV_ACCESS_REMOTE_WRITE, ALL_ACCESS, 0},
    {IBV_WR_RDMA_READ, ALL_ACCESS, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE, 0},
    {IBV_WR_RDMA_READ, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_READ, 1},
    {IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE, ALL_ACCESS, 0},
    {IBV_WR_ATOMIC_FETCH_AND_ADD, ALL_ACCESS, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE, 0},
    {IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_ACCESS_REMOTE_ATOMIC, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_ATOMIC, 1},
};

ParameterizedTestParameters(exec, rights_of_queue_pair_and_memory_both_count)
{
    return cr_make_param_array(struct right, rights, sizeof(rights) / sizeof(rights[0]));
}

ParameterizedTest(struct right *r, exec, rights_of_queue_pair_and_memory_both_count)
{
    struct link_options link = link_default;
    struct end_options other = {.dev = 1};
    struct ibv_mr *mr;

    test_world(NULL);
    link.access = (unsigned)r->qp_access;
    pair_open_with(&a, &b, NULL, &other, &link);
    mr = ibv_reg_mr(b.pd, b.buf, 4096, r->mr_access);
    cr_assert_not_null(mr);
    bt = end_address(&b);
    bt.rkey = mr->rkey;
    cr_assert_eq(post(&a, r->opcode, 0, 8, &bt, 0, IBV_SEND_SIGNALED, 1), 0);
    if (r->ok)
        cr_assert_eq(wait_wc(a.cq, "allowed").status, IBV_WC_SUCCESS);
    else
        expect_error(IBV_WC_REM_ACCESS_ERR, IBV_QPS_ERR);
}

Test(execute, a_key_is_dead_after_deregistration)
{
    struct ibv_mr *mr;

    start();
    mr = ibv_reg_mr(b.pd, b.buf, 4096, ALL_ACCESS);
    bt.rkey = mr->rkey;
    cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, 8, &bt, 0, IBV_SEND_SIGNALED, 1), 0);
    cr_assert_eq(wait_wc(a.cq, "before").status, IBV_WC_SUCCESS);
    cr_assert_eq(ibv_dereg_mr(mr), 0);
    cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, 8, &bt, 0, IBV_SEND_SIGNALED, 2), 0);
    expect_error(IBV_WC_REM_ACCESS_ERR, IBV_QPS_ERR);
}

Test(execute, a_key_of_another_protection_domain_is_refused)
{
    struct ibv_pd *pd;
    struct ibv_mr *mr;

    start();
    pd = ibv_alloc_pd(b.ctx);
    mr = ibv_reg_mr(pd, b.buf, 4096, ALL_ACCESS);
    bt.rkey = mr->rkey;
    cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, 8, &bt, 0, IBV_SEND_SIGNALED, 1), 0);
    expect_error(IBV_WC_REM_ACCESS_ERR, IBV_QPS_ERR);
    cr_assert_eq(ibv_dealloc_pd(pd), EBUSY);
    cr_assert_eq(ibv_dereg_mr(mr), 0);
    cr_assert_eq(ibv_dealloc_pd(pd), 0);
}

Test(execute, a_wrong_lkey_is_a_local_protection_error)
{
    struct ibv_sge sge;
    struct ibv_send_wr wr = {.wr_id = 1, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE}, *bad;

    start();
    sge = (struct ibv_sge){at.addr, 8, a.mr->lkey ^ 1};
    wr.wr.rdma.remote_addr = bt.addr;
    wr.wr.rdma.rkey = bt.rkey;
    cr_assert_eq(ibv_post_send(a.qp, &wr, &bad), 0);
    expect_error(IBV_WC_LOC_PROT_ERR, IBV_QPS_RTS);
}

Test(execute, a_read_into_read_only_memory_is_a_local_protection_error)
{
    struct ibv_mr *mr;
    struct ibv_mr *own;

    start();
    mr = ibv_reg_mr(a.pd, a.buf, 4096, IBV_ACCESS_REMOTE_READ);
    own = a.mr;
    a.mr = mr;
    cr_assert_eq(post(&a, IBV_WR_RDMA_READ, 0, 8, &bt, 0, IBV_SEND_SIGNALED, 1), 0);
    expect_error(IBV_WC_LOC_PROT_ERR, IBV_QPS_RTS);
    a.mr = own;
}

Test(execute, a_send_longer_than_the_receive_fails_both)
{
    struct ibv_wc wc;

    start();
    cr_assert_eq(post_recv(&b, 0, 10, 4), 0);
    cr_assert_eq(post(&a, IBV_WR_SEND, 0, 11, NULL, 0, IBV_SEND_SIGNALED, 1), 0);
    expect_error(IBV_WC_REM_INV_REQ_ERR, IBV_QPS_ERR);
    wc = wait_wc(b.cq, "receive");
    cr_assert(wc.status == IBV_WC_LOC_LEN_ERR && wc.wr_id == 4);
    cr_assert_eq(b.buf[0], 0);
}

Test(execute, a_receive_with_a_bad_key_fails_both)
{
    struct ibv_sge sge;
    struct ibv_recv_wr wr = {.wr_id = 4, .sg_list = &sge, .num_sge = 1}, *bad;

    start();
    sge = (struct ibv_sge){bt.addr, 64, b.mr->lkey ^ 1};
    cr_assert_eq(ibv_post_recv(b.qp, &wr, &bad), 0);
    cr_assert_eq(post(&a, IBV_WR_SEND, 0, 11, NULL, 0, IBV_SEND_SIGNALED, 1), 0);
    expect_error(IBV_WC_REM_OP_ERR, IBV_QPS_ERR);
    cr_assert_eq(wait_wc(b.cq, "receive").status, IBV_WC_LOC_PROT_ERR);
}

Test(execute, an_unaligned_atomic_is_an_invalid_request)
{
    start();
    cr_assert_eq(post(&a, IBV_WR_ATOMIC_FETCH_AND_ADD, 0, 8, &bt, 4, IBV_SEND_SIGNALED, 1), 0);
    expect_error(IBV_WC_REM_INV_REQ_ERR, IBV_QPS_ERR);
}

Test(execute, without_a_receive_the_retries_run_out)
{
    struct link_options link = link_default;
    struct end_options other = {.dev = 1};

    test_world(NULL);
    link.rnr_retry = 2;
    link.min_rnr_timer = 14; /* 1.28 ms */
    pair_open_with(&a, &b, NULL, &other, &link);
    cr_assert_eq(post(&a, IBV_WR_SEND, 0, 8, NULL, 0, IBV_SEND_SIGNALED, 1), 0);
    expect_error(IBV_WC_RNR_RETRY_EXC_ERR, IBV_QPS_RTS);
}

Test(execute, rnr_retry_7_waits_for_the_receive)
{
    start();
    cr_assert_eq(post(&a, IBV_WR_SEND, 0, 8, NULL, 0, IBV_SEND_SIGNALED, 1), 0);
    cr_assert(quiet(a.cq, 20000));
    cr_assert_eq(post_recv(&b, 0, 64, 2), 0);
    cr_assert_eq(wait_wc(a.cq, "send after a late receive").status, IBV_WC_SUCCESS);
    cr_assert_eq(wait_wc(b.cq, "late receive").wr_id, 2);
    finish();
}

Test(execute, a_target_that_is_not_connected_back_does_not_answer)
{
    struct ibv_qp_attr reset = {.qp_state = IBV_QPS_RESET};

    start();
    cr_assert_eq(ibv_modify_qp(b.qp, &reset, IBV_QP_STATE), 0);
    cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, 8, &bt, 0, IBV_SEND_SIGNALED, 1), 0);
    expect_error(IBV_WC_RETRY_EXC_ERR, -1);
}

Test(execute, memory_that_is_unmapped_is_no_crash)
{
    start();
    cr_assert_null(ibv_reg_mr(a.pd, (void *)0x10000, 1 << 20, ALL_ACCESS), "registering what is not mapped");
    cr_assert_eq(errno, EFAULT);
    cr_assert_null(ibv_reg_mr(a.pd, a.buf, 4096, IBV_ACCESS_REMOTE_WRITE), "remote write needs local write");
    cr_assert_eq(errno, EINVAL);
    finish();
}

Test(execute, iova_is_what_requests_name)
{
    struct ibv_mr *mr;
    struct address shifted;

    start();
    mr = ibv_reg_mr_iova(b.pd, b.buf, 4096, 0x40000, ALL_ACCESS);
    cr_assert_not_null(mr);
    shifted = (struct address){.rkey = mr->rkey, .addr = 0x40000};
    cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, 8, &shifted, 16, IBV_SEND_SIGNALED, 1), 0);
    cr_assert_eq(wait_wc(a.cq, "write to an iova").status, IBV_WC_SUCCESS);
    cr_assert_eq(memcmp(b.buf + 16, a.buf, 8), 0);
}

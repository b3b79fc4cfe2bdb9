/* SPDX-License-Identifier: Apache-2.0 */
/* Registration refuses what a kernel refuses. */
#include <criterion/criterion.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tools/softnic/test/support.h"

static struct end a;

Test(mr, the_whole_address_space_is_not_memory)
{
    test_world(NULL);
    end_open(&a, NULL);
    cr_assert_null(ibv_reg_mr(a.pd, NULL, SIZE_MAX, ALL_ACCESS));
    cr_assert_null(ibv_reg_mr(a.pd, (void *)(UINTPTR_MAX - 8191), 8191, 0), "up to the last byte");
    cr_assert_null(ibv_reg_mr(a.pd, a.buf, SIZE_MAX - (uintptr_t)a.buf, 0));
    end_close(&a);
}

Test(mr, an_iova_is_at_the_same_place_in_its_page)
{
    struct ibv_mr *mr;

    test_world(NULL);
    end_open(&a, NULL);
    cr_assert_null(ibv_reg_mr_iova(a.pd, a.buf + 8, 64, 0x10000, ALL_ACCESS));
    cr_assert_eq(errno, EINVAL);
    mr = ibv_reg_mr_iova(a.pd, a.buf + 8, 64, 0x10008, ALL_ACCESS);
    cr_assert_not_null(mr);
    cr_assert_eq(ibv_dereg_mr(mr), 0);
    end_close(&a);
}

Test(mr, a_domain_with_a_shared_receive_queue_is_in_use)
{
    struct ibv_srq_init_attr init = {.attr = {.max_wr = 4, .max_sge = 1}};
    struct ibv_srq *srq;
    struct ibv_pd *pd;

    test_world(NULL);
    end_open(&a, NULL);
    pd = ibv_alloc_pd(a.ctx);
    srq = ibv_create_srq(pd, &init);
    cr_assert_not_null(srq);
    cr_assert_eq(ibv_dealloc_pd(pd), EBUSY);
    cr_assert_eq(ibv_destroy_srq(srq), 0);
    cr_assert_eq(ibv_dealloc_pd(pd), 0);
    end_close(&a);
}

Test(mr, a_domain_with_an_address_handle_is_in_use)
{
    struct ibv_ah_attr to = {.is_global = 1, .port_num = 1};
    struct ibv_ah *ah;
    struct ibv_pd *pd;

    test_world(NULL);
    end_open(&a, NULL);
    pd = ibv_alloc_pd(a.ctx);
    cr_assert_eq(ibv_query_gid(a.ctx, 1, 0, &to.grh.dgid), 0);
    ah = ibv_create_ah(pd, &to);
    cr_assert_not_null(ah);
    cr_assert_eq(ibv_dealloc_pd(pd), EBUSY);
    cr_assert_eq(ibv_destroy_ah(ah), 0);
    cr_assert_eq(ibv_dealloc_pd(pd), 0);
    end_close(&a);
}

Test(mr, an_address_handle_needs_a_gid)
{
    struct ibv_ah_attr to = {.port_num = 1, .dlid = 1};

    test_world(NULL);
    end_open(&a, NULL);
    cr_assert_null(ibv_create_ah(a.pd, &to));
    cr_assert_eq(errno, EINVAL);
    end_close(&a);
}

Test(mr, what_is_imported_is_what_was_opened)
{
    struct ibv_context *ctx;
    struct ibv_pd *pd;
    struct ibv_mr *mr;
    int copy;

    test_world(NULL);
    end_open(&a, NULL);
    copy = dup(a.ctx->cmd_fd);
    cr_assert_geq(copy, 0);
    ctx = ibv_import_device(copy);
    cr_assert_not_null(ctx);
    pd = ibv_import_pd(ctx, a.pd->handle);
    mr = pd ? ibv_import_mr(pd, a.mr->handle) : NULL;
    cr_assert_not_null(mr);
    cr_assert(mr->rkey == a.mr->rkey && mr->length == a.mr->length && !mr->addr);
    cr_assert_null(ibv_import_mr(pd, a.mr->handle + 1));
    cr_assert_null(ibv_import_pd(ctx, a.pd->handle + 1));
    ibv_unimport_mr(mr);
    ibv_unimport_pd(pd);
    copy = dup(a.ctx->cmd_fd);
    cr_assert_eq(ibv_close_device(ctx), 0);
    end_close(&a); /* the objects that it opened exist until here */
    cr_assert_null(ibv_import_device(copy), "the device is closed");
    cr_assert_eq(errno, EOPNOTSUPP);
    close(copy);
}

Test(mr, a_parent_domain_is_another_name_of_a_domain)
{
    struct ibv_td_init_attr none = {0};
    struct ibv_parent_domain_init_attr attr = {0};
    struct ibv_pd *pd, *parent;
    struct ibv_td *td;
    struct ibv_mr *mr;

    test_world(NULL);
    end_open(&a, NULL);
    pd = ibv_alloc_pd(a.ctx);
    td = ibv_alloc_td(a.ctx, &none);
    cr_assert(pd && td);
    cr_assert(!ibv_alloc_parent_domain(a.ctx, &attr) && errno == EINVAL, "of no domain");
    attr.pd = pd;
    attr.td = td;
    parent = ibv_alloc_parent_domain(a.ctx, &attr);
    cr_assert_not_null(parent);
    attr.pd = parent;
    cr_assert(!ibv_alloc_parent_domain(a.ctx, &attr) && errno == EINVAL, "of a parent domain");
    cr_assert_eq(ibv_dealloc_td(td), EBUSY);
    cr_assert_eq(ibv_dealloc_pd(pd), EBUSY);
    mr = ibv_reg_mr(parent, a.buf, 4096, 0);
    cr_assert_not_null(mr);
    cr_assert_eq(ibv_dealloc_pd(parent), EBUSY);
    cr_assert_eq(ibv_dereg_mr(mr), 0);
    mr = ibv_reg_mr(pd, a.buf, 4096, 0);
    cr_assert_eq(ibv_dealloc_pd(parent), 0, "what has the domain under its own name does not hold it");
    cr_assert_eq(ibv_dereg_mr(mr), 0);
    cr_assert_eq(ibv_dealloc_td(td), 0);
    cr_assert_eq(ibv_dealloc_pd(pd), 0);
    end_close(&a);
}

static enum ibv_wc_status written(const struct ibv_mr *mr, const void *where, uint32_t length)
{
    struct address to = {.rkey = mr->rkey, .addr = (uintptr_t)where};

    cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, length, &to, 0, IBV_SEND_SIGNALED, 1), 0);
    return wait_wc(a.cq, "write").status;
}

Test(mr, a_registration_can_be_changed_and_keeps_its_keys)
{
    struct end b;
    struct ibv_pd *other;
    uint32_t key;

    test_world(NULL);
    pair_open(&a, &b);
    key = b.mr->rkey;
    cr_assert_eq(ibv_rereg_mr(b.mr, 0, NULL, NULL, 0, 0), IBV_REREG_MR_ERR_INPUT);
    cr_assert_eq(ibv_rereg_mr(b.mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, NULL, 4096, 0), IBV_REREG_MR_ERR_INPUT);
    cr_assert_eq(ibv_rereg_mr(b.mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_REMOTE_WRITE),
                 IBV_REREG_MR_ERR_INPUT);
    cr_assert_eq(written(b.mr, b.buf, 8), IBV_WC_SUCCESS, "nothing has changed");
    other = ibv_alloc_pd(b.ctx);
    cr_assert_eq(ibv_rereg_mr(b.mr, IBV_REREG_MR_CHANGE_PD, other, NULL, 0, 0), 0);
    cr_assert_eq(ibv_dealloc_pd(other), EBUSY);
    cr_assert_eq(ibv_rereg_mr(b.mr, IBV_REREG_MR_CHANGE_PD, b.pd, NULL, 0, 0), 0);
    cr_assert_eq(ibv_dealloc_pd(other), 0);
    cr_assert_eq(ibv_rereg_mr(b.mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, b.buf + 8192, 4096, 0), 0);
    cr_assert(b.mr->rkey == key && b.mr->addr == b.buf + 8192 && b.mr->length == 4096);
    cr_assert_eq(written(b.mr, b.buf + 8192, 4096), IBV_WC_SUCCESS);
    cr_assert_eq(written(b.mr, b.buf, 8), IBV_WC_REM_ACCESS_ERR, "where it was");
    end_close(&a);
    end_close(&b);
}

Test(mr, on_demand_memory_may_be_mapped_later)
{
    enum { ON_DEMAND = IBV_ACCESS_ON_DEMAND | IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE };
    size_t bytes = 1 << 20;
    uint8_t *hole;
    struct ibv_mr *mr, *all;
    struct ibv_sge sge;
    struct end b;

    test_world(NULL);
    pair_open(&a, &b);
    a.buf[0] = 7;
    hole = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    cr_assert(hole != MAP_FAILED && !munmap(hole, bytes));
    cr_assert_null(ibv_reg_mr(b.pd, hole, bytes, ON_DEMAND & ~IBV_ACCESS_ON_DEMAND));
    mr = ibv_reg_mr(b.pd, hole, bytes, ON_DEMAND);
    all = ibv_reg_mr(b.pd, NULL, SIZE_MAX, ON_DEMAND);
    cr_assert(mr && all);
    sge = (struct ibv_sge){(uintptr_t)hole, 8192, mr->lkey};
    cr_assert_eq(ibv_advise_mr(b.pd, IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE, 0, &sge, 1), EFAULT, "nothing is there");
    cr_assert_eq(mmap(hole, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0),
                 hole);
    cr_assert_eq(ibv_advise_mr(b.pd, IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE, 0, &sge, 1), 0);
    sge.length = (uint32_t)bytes + 1;
    cr_assert_eq(ibv_advise_mr(b.pd, IBV_ADVISE_MR_ADVICE_PREFETCH, 0, &sge, 1), EINVAL, "behind its end");
    sge = (struct ibv_sge){(uintptr_t)b.buf, 8, b.mr->lkey};
    cr_assert_eq(ibv_advise_mr(b.pd, IBV_ADVISE_MR_ADVICE_PREFETCH, 0, &sge, 1), EINVAL, "not on demand");
    cr_assert_eq(written(mr, hole + 4096, 8), IBV_WC_SUCCESS);
    cr_assert_eq(hole[4096], 7);
    cr_assert_eq(written(all, hole + 8192, 8), IBV_WC_SUCCESS);
    cr_assert_eq(hole[8192], 7);
    cr_assert_eq(ibv_dereg_mr(mr), 0);
    cr_assert_eq(ibv_dereg_mr(all), 0);
    munmap(hole, bytes);
    end_close(&a);
    end_close(&b);
}

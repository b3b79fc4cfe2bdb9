/* SPDX-License-Identifier: Apache-2.0 */
/* Registration refuses what a kernel refuses. */
#include <criterion/criterion.h>
#include <unistd.h>

#include "test/softnic/support.h"

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
    end_close(&a); /* what it opened is still there until here */
    cr_assert_null(ibv_import_device(copy), "the device is closed");
    cr_assert_eq(errno, EOPNOTSUPP);
    close(copy);
}

/* The device reports in odp_caps that it does not support it. */
Test(mr, there_is_no_paging_on_demand)
{
    struct ibv_device_attr_ex attr;

    test_world(NULL);
    end_open(&a, NULL);
    cr_assert_eq(ibv_query_device_ex(a.ctx, NULL, &attr), 0);
    cr_assert_eq(attr.odp_caps.general_caps, 0);
    cr_assert_null(ibv_reg_mr(a.pd, a.buf, 4096, ALL_ACCESS | IBV_ACCESS_ON_DEMAND));
    cr_assert_eq(errno, EINVAL);
    end_close(&a);
}

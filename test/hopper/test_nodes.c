/* SPDX-License-Identifier: Apache-2.0 */
/* The fused kernels over several nodes: emulated GPUs, the real transport, and whatever verbs device there is
 * (softnic). Nodes are groups of ranks that do not map each other. */
#include <criterion/criterion.h>
#include <perseus/perseus.h>
#include <stdio.h>
#include <stdlib.h>

#include "test/hopper/hopper.h"
#include "test/hopper/ranks.h"

struct row {
    uint32_t world, nodes, m, n, k, nk, epochs;
    struct prs_fused_tuning tuning;
};

/* Criterion runs each test in a process of its own: look for a device in each. */
static void need_a_device(void)
{
    struct prs_fabric *fabric;
    if (prs_fabric_open(NULL, &fabric) != 0 || prs_fabric_rails(fabric) == 0)
        cr_skip_test("no verbs device: run it under softnic-run");
    prs_fabric_close(fabric);
}

static void assert_right(enum prs_fused_op op, const struct row *r)
{
    struct ranks_product p = {.shape = {op, r->m, r->n, r->k, r->nk},
                              .tuning = r->tuning,
                              .world = r->world,
                              .nodes = r->nodes,
                              .epochs = r->epochs};
    struct ranks_verdict v;
    hopper_setup(8, 4, 0);
    ranks_multiply(&p, &v);
    cr_assert_eq(v.result, 0, "%u x %u x %u on %u nodes: the calls returned %d (HOPPER_SEED=%llu)", r->m, r->n, r->k,
                 r->nodes, v.result, (unsigned long long)hopper_seed());
    cr_assert_eq(v.beyond, 0, "%u x %u x %u on %u nodes: %llu of %llu elements are wrong, first %s (HOPPER_SEED=%llu)",
                 r->m, r->n, r->k, r->nodes, (unsigned long long)v.beyond, (unsigned long long)v.checked, v.first,
                 (unsigned long long)hopper_seed());
    cr_assert_gt(v.checked, 0);
}

/* 2 x 2 with tails, a GPU a node, three nodes, every piece signalled alone and all of a band together. */
static const struct row rows[] = {
    {4, 2, 1024, 512, 192, 1, 3, {.band = 1}},
    {4, 2, 1632, 328, 136, 0, 2, {.group = 1}},
    {2, 2, 1040, 264, 328, 1, 3, {.group = 2}},
    {6, 3, 1536, 264, 72, 0, 2, {.group = 1000}},
    {3, 3, 816, 520, 72, 1, 2},
};

Test(nodes, reduce_scatter_is_right, .timeout = 200)
{
    need_a_device();
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++)
        assert_right(PRS_FUSED_REDUCE_SCATTER, &rows[i]);
}

Test(nodes, allgather_is_right, .timeout = 200)
{
    need_a_device();
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++)
        assert_right(PRS_FUSED_ALLGATHER, &rows[i]);
}

Test(nodes, allreduce_is_right, .timeout = 200)
{
    need_a_device();
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++)
        assert_right(PRS_FUSED_ALLREDUCE, &rows[i]);
}

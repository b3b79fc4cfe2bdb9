/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <string.h>

#include "test/support/order_bench.h"

const struct prs_keys bench_keys;
const uint32_t bench_local_keys[PRS_MAX_RAILS];
const uint64_t bench_path_keys[PRS_MAX_RAILS] = {BENCH_HIGH + 70, BENCH_HIGH + 71, BENCH_HIGH + 72, BENCH_HIGH + 73,
                                                 BENCH_HIGH + 74, BENCH_HIGH + 75, BENCH_HIGH + 76, BENCH_HIGH + 77};

struct bench *bench_fresh(enum prs_policy policy, uint32_t paths, uint32_t queues)
{
    static struct bench bench;
    struct prs_order_options options = {.policy = policy,
                                        .max_ops = BENCH_WINDOW,
                                        .in_order = true,
                                        .fence = true,
                                        .path_count = paths,
                                        .queues_per_path = queues,
                                        .depth = BENCH_DEPTH,
                                        .split_queues = true,
                                        .failover = true,
                                        .max_part_bytes = 1 << 20};

    prs_order_fini(&bench.order); /* the engine of the previous row */
    memset(&bench, 0, sizeof(bench));
    for (uint32_t i = 0; i < paths; i++) {
        options.path[i].local_rail = options.path[i].remote_rail = i;
        options.path[i].rate = 1000.0f * (float)(i + 1);
    }
    cr_assert_eq(prs_order_init(&bench.order, &options), 0);
    for (uint32_t q = 0; q < paths * queues + paths; q++)
        bench.order.queue[q].inline_bytes = bench.copies[q];
    if (policy == PRS_POLICY_COUNTED)
        cr_assert_eq(prs_order_set_records(&bench.order, 4096, bench_path_keys, &bench.credit), 0);
    return &bench;
}

void bench_put(struct bench *bench, size_t bytes, uint32_t id, uint32_t group, uint32_t flags)
{
    static struct prs_op ops[BENCH_OPS];
    static int used;
    struct prs_put put = {.dst = &bench_keys, .len_bytes = bytes, .notify_id = id, .group = group, .flags = flags};

    cr_assert_eq(prs_order_put(&bench->order, &ops[used % BENCH_OPS], &put, bench_local_keys), 0);
    used++;
}

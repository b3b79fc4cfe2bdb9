/* SPDX-License-Identifier: Apache-2.0 */
/* The parts into which the order engine cuts a message. */
#include <criterion/criterion.h>
#include <errno.h>

#include "test/support/order_bench.h"
#include "transport/order/wire.h"

/* A device with short messages once promised more parts than a notification can count. */
Test(order_parts, a_notified_put_of_as_many_parts_as_rails_promise_always_leaves)
{
    static const uint32_t shapes[][2] = {{1, 1}, {1, 16}, {2, 2}, {8, 1}, {8, 7}};

    for (size_t i = 0; i < sizeof(shapes) / sizeof(*shapes); i++) {
        struct bench *bench = bench_fresh(PRS_POLICY_IN_ORDER, shapes[i][0], shapes[i][1]);
        struct prs_put put = {.dst = &bench_keys,
                              .len_bytes = PRS_ORDER_SURE_PARTS * bench->order.max_part_bytes,
                              .flags = PRS_PUT_NOTIFY};
        struct prs_op op[2];

        cr_assert_eq(prs_order_put(&bench->order, &op[0], &put, bench_local_keys), 0, "%u paths, %u queues",
                     shapes[i][0], shapes[i][1]);
        put.len_bytes = (PRS_IMM_MAX_PARTS + 1) * bench->order.max_part_bytes;
        cr_assert_eq(prs_order_put(&bench->order, &op[1], &put, bench_local_keys), -EINVAL);
    }
}

/* Check that each byte of a message is transferred once, from and to the same offset. */
static void check_parts(const struct bench *bench, uint64_t remote_addr, uint64_t bytes)
{
    uint64_t covered = 0;

    while (covered < bytes) {
        uint64_t before = covered;

        for (uint32_t q = 0; q < bench->order.data_queues; q++) {
            const struct prs_order_queue *queue = &bench->order.queue[q];

            for (uint32_t i = 0; i < queue->head && covered == before; i++)
                if (queue->wr[i].remote_addr == remote_addr + covered) {
                    cr_assert_eq(queue->wr[i].local_addr, 4096 + covered);
                    covered += queue->wr[i].len_bytes;
                }
        }
        cr_assert_gt(covered, before, "no request for byte %llu of %llu", (unsigned long long)covered,
                     (unsigned long long)bytes);
    }
    cr_assert_eq(covered, bytes);
}

Test(order_parts, the_parts_of_a_message_cover_it_once)
{
    static const uint64_t sizes[] = {200000, 3 << 20, (3 << 20) + 1, 9999999};

    for (size_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++) {
        struct prs_put put = {.dst = &bench_keys,
                              .dst_addr = 1 << 30,
                              .src_addr = (void *)(uintptr_t)4096,
                              .len_bytes = sizes[i],
                              .flags = PRS_PUT_NOTIFY};
        struct prs_get get = {
            .src = &bench_keys, .src_addr = 1 << 30, .dst_addr = (void *)(uintptr_t)4096, .len_bytes = sizes[i]};
        struct bench *bench = bench_fresh(PRS_POLICY_IN_ORDER, 2, 2);
        struct prs_op op;

        cr_assert_eq(prs_order_put(&bench->order, &op, &put, bench_local_keys), 0);
        check_parts(bench, put.dst_addr, sizes[i]);
        bench = bench_fresh(PRS_POLICY_IN_ORDER, 2, 2);
        cr_assert_eq(prs_order_get(&bench->order, &op, &get, bench_local_keys), 0);
        check_parts(bench, get.src_addr, sizes[i]);
    }
}

/* SPDX-License-Identifier: Apache-2.0 */
/* An order engine alone, for tests of single rules. */
#ifndef TEST_SUPPORT_ORDER_BENCH_H
#define TEST_SUPPORT_ORDER_BENCH_H

#include "transport/order/order.h"

enum { BENCH_OPS = 400, BENCH_DEPTH = 32, BENCH_WINDOW = 48 };

#define BENCH_HIGH 0x3900000000ull /* high bits of all remote keys, which have 64 bits */

/* An engine and the memory that its owner gives it. */
struct bench {
    struct prs_order order;
    uint8_t copies[PRS_ORDER_MAX_QUEUES][BENCH_DEPTH * PRS_INLINE_BYTES];
    uint64_t credit;
};

extern const struct prs_keys bench_keys;
extern const uint32_t bench_local_keys[PRS_MAX_RAILS];
extern const uint64_t bench_path_keys[PRS_MAX_RAILS]; /* BENCH_HIGH + 70, 71, ... */

/* Return the only bench, reset. */
struct bench *bench_fresh(enum prs_policy policy, uint32_t paths, uint32_t queues);

/* Admit a put, which must succeed. At most BENCH_OPS may be pending. */
void bench_put(struct bench *bench, size_t bytes, uint32_t id, uint32_t group, uint32_t flags);

#endif

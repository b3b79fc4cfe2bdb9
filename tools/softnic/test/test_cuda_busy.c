/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels that run until a transfer brings their data: no transfer may wait for such a kernel. */
#include "tools/softnic/test/test_cuda_busy.h"

enum { BYTES = 70000, SMALL = 8, SEED = 300, PLANS = 4 };

/* The target's memory is new each time, so that each new mapping finds an old one to replace. */
void no_transfer_waits_for_a_running_kernel(struct side *side, enum memory memory)
{
    struct buf device, host, target;

    /* The other side has freed its memory of earlier tests. So the registration below closes those mappings, and they
     * are not counted here; without it one run in ten counted one too many. */
    side_barrier(side);
    buf_make(side, &device, memory, BYTES);
    buf_make(side, &host, PAGEABLE, BYTES);
    for (uint32_t i = 0; i < PLANS; i++) {
        if (!side->initiator) {
            buf_make(side, &target, memory, BYTES);
            buf_zero(&target);
        }
        struct remote remote = swap_remote(side, side->initiator ? &device : &target);
        if (side->initiator) {
            const struct buf *from = i % 2 ? &host : &device;
            int waits = kernel_waits();

            buf_fill(from, SEED + i);
            kernel_runs(true);
            post(side, IBV_WR_RDMA_WRITE, from, 0, BYTES, remote);
            post(side, IBV_WR_RDMA_WRITE, &host, 0, SMALL, remote);
            post(side, IBV_WR_RDMA_WRITE, from, 0, BYTES, remote);
            for (int n = 0; n < 3; n++)
                expect_success(side, "write while a kernel runs");
            MUST(kernel_waits() == waits);
            kernel_runs(false);
        }
        side_barrier(side);
        if (!side->initiator) {
            MUST(buf_check(&target, BYTES, SEED + i, "write while a kernel runs"));
            buf_free(&target);
        }
        side_barrier(side);
    }
    int closed = driver_calls("cuIpcCloseMemHandle");
    buf_free(&device); /* here the driver may wait: stale mappings are closed */
    /* With the copier, another process maps it (test_cuda_copier.c). */
    MUST(memory != LEGACY || !side->initiator || side->copier || driver_calls("cuIpcCloseMemHandle") == closed + PLANS);
    buf_free(&host);
}

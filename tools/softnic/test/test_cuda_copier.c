/* SPDX-License-Identifier: Apache-2.0 */
/* The copier: a separate process that copies device memory. */
#include "tools/softnic/test/test_cuda_copier.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

enum { BYTES = 300000, SEED = 800, BURST = 40, WAITED = 4096 };

/* On both sides a thread waits and holds the lock, as in a copy of pageable memory after a kernel. */
void copies_go_on_while_the_application_holds_the_drivers_lock(struct side *side)
{
    static const struct {
        enum ibv_wr_opcode opcode;
        enum memory mine, theirs; /* of the initiator, of the target */
        size_t bytes;
    } rows[] = {{IBV_WR_RDMA_WRITE, LEGACY, LEGACY, BYTES},   {IBV_WR_RDMA_WRITE, VMM, LEGACY, 8},
                {IBV_WR_RDMA_WRITE, PAGEABLE, VMM, 8},        {IBV_WR_RDMA_WRITE, PAGEABLE, LEGACY, BYTES},
                {IBV_WR_RDMA_WRITE, LEGACY, PAGEABLE, BYTES}, {IBV_WR_RDMA_WRITE, PINNED, LEGACY, BYTES},
                {IBV_WR_RDMA_READ, VMM, LEGACY, BYTES},       {IBV_WR_RDMA_READ, PAGEABLE, LEGACY, 4}};
    int waits = driver_lock_waits();

    for (uint32_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        bool read = rows[i].opcode == IBV_WR_RDMA_READ;
        struct buf buf;

        buf_make(side, &buf, side->initiator ? rows[i].mine : rows[i].theirs, BYTES);
        if (side->initiator != read)
            buf_fill(&buf, SEED + i);
        else
            buf_zero(&buf);
        struct remote remote = swap_remote(side, &buf);
        driver_locked(true);
        side_barrier(side);
        for (int n = 0; side->initiator && n < BURST; n++) /* more than the copier takes at a time */
            post(side, rows[i].opcode, &buf, 0, rows[i].bytes, remote);
        for (int n = 0; side->initiator && n < BURST; n++)
            expect_success(side, "copy while the driver is locked");
        side_barrier(side);
        driver_locked(false);
        if (side->initiator == read)
            MUST(buf_check(&buf, rows[i].bytes, SEED + i, "copy while the driver is locked"));
        side_barrier(side);
        buf_free(&buf);
    }
    MUST(driver_lock_waits() == waits);
}

/* Copy to pageable memory on the legacy default stream: it waits for the kernel and holds the driver's lock. */
static void *read_behind(void *flag)
{
    static uint8_t bytes[WAITED];

    side_enter_thread();
    buf_read(flag, 64, bytes, WAITED);
    return NULL;
}

/* As copies_go_on_while_the_application_holds_the_drivers_lock, with the real lock: without the copier the kernels give
 * up. */
void kernels_are_reached_while_a_copy_waits_for_them(struct side *side)
{
    uint64_t words[2];
    struct buf flag, one;
    pthread_t reader;
    char mine, theirs;

    buf_make(side, &flag, LEGACY, 64 + WAITED);
    buf_zero(&flag);
    buf_make(side, &one, LEGACY, 64);
    buf_fill(&one, 3);
    struct remote remote = swap_remote(side, &flag);
    mine = spin_start(flag.addr) ? 'y' : 'n';
    side_exchange(side, &mine, &theirs, 1);
    MUST(mine == theirs);
    if (mine == 'y') {
        MUST(!pthread_create(&reader, NULL, read_behind, &flag));
        usleep(200000); /* give the thread time to begin its wait */
        side_barrier(side);
        post(side, IBV_WR_RDMA_WRITE, &one, 0, 8, remote);
        expect_success(side, "write to a kernel that a copy waits for");
        MUST(!pthread_join(reader, NULL));
        spin_wait();
        buf_read(&flag, 0, words, sizeof(words));
        MUST(words[0] && words[1] == 1); /* 2: the kernel gave up */
    }
    side_barrier(side);
    buf_free(&flag);
    buf_free(&one);
}

/* Otherwise memory that the application frees would stay in use. */
void deregistered_memory_is_closed_soon(struct side *side)
{
    double give_up = now_s() + PATIENCE_S;
    struct buf buf;

    buf_make(side, &buf, LEGACY, BYTES);
    side_barrier(side);
    int closed = driver_calls("cuIpcCloseMemHandle");
    side_barrier(side);
    if (side->initiator)
        buf_free(&buf);
    while (driver_calls("cuIpcCloseMemHandle") == closed) {
        MUST(now_s() < give_up);
        usleep(1000);
    }
    side_barrier(side);
    if (!side->initiator)
        buf_free(&buf);
}

static void write_fails(struct side *side, const struct buf *buf, struct remote remote)
{
    double start = now_s();

    post(side, IBV_WR_RDMA_WRITE, buf, 0, BYTES, remote);
    MUST(side_poll(side).status == IBV_WC_REM_OP_ERR);
    MUST(now_s() - start < LONG_S);
}

void a_killed_copier_ends_in_errors_soon(struct side *side)
{
    enum { REQUESTS = 12, LONG = 8 << 20 };
    struct buf buf, other;
    uint32_t failed = 0;

    buf_make(side, &buf, side->initiator ? PAGEABLE : LEGACY, LONG);
    buf_make(side, &other, LEGACY, BYTES);
    struct remote remote = swap_remote(side, &buf), there = swap_remote(side, &other);
    double start = now_s();
    for (int i = 0; side->initiator && i < REQUESTS; i++)
        post(side, IBV_WR_RDMA_WRITE, &buf, 0, LONG, remote);
    if (side->initiator)
        MUST(!kill(side->copier, SIGKILL));
    for (int i = 0; side->initiator && i < REQUESTS; i++) {
        struct ibv_wc wc = side_poll(side);
        if (wc.status == IBV_WC_SUCCESS)
            MUST(!failed);
        else
            MUST(wc.status == (failed++ ? IBV_WC_WR_FLUSH_ERR : IBV_WC_REM_OP_ERR));
    }
    MUST(!side->initiator || (failed && now_s() - start < LONG_S));
    side_barrier(side);
    side_connect(side);
    if (side->initiator)
        write_fails(side, &other, there); /* a write that would not wait for the previous one */
    side_barrier(side);
    side_connect(side);
    buf_free(&buf);
    buf_free(&other);
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Device memory that only its owner can reach: the effects of the owner's application and of its end. */
#include "tools/softnic/test/test_cuda_owner.h"

#include <signal.h>
#include <stdio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* The owner's application reads its memory all the time and calls no verb: each word arrives before the next one is
 * sent, and in order. */
void a_busy_owner_copies(struct side *side)
{
    enum { WORDS = 200 };
    struct buf word, values;
    struct timespec start, now;

    buf_make(side, &word, PRIVATE, 64);
    buf_zero(&word);
    buf_make(side, &values, PAGEABLE, 8 * WORDS);
    struct remote remote = swap_remote(side, &word);
    for (uint64_t i = 0; side->initiator && i < WORDS; i++) {
        ((uint64_t *)(uintptr_t)values.addr)[i] = i + 1;
        struct remote at = {remote.addr - 8 * i, remote.rkey}; /* post() adds the offset */
        post(side, IBV_WR_RDMA_WRITE, &values, 8 * i, 8, at);
        if (i % 16 == 15)
            for (int n = 0; n < 16; n++)
                expect_success(side, "word to a busy owner");
    }
    for (uint64_t i = 0; side->initiator && i < WORDS % 16; i++)
        expect_success(side, "word to a busy owner");
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (uint64_t seen = 0, value; !side->initiator && seen < WORDS; seen = value) {
        buf_read(&word, 0, &value, 8);
        MUST(value >= seen && value <= WORDS);
        clock_gettime(CLOCK_MONOTONIC, &now);
        MUST(now.tv_sec < start.tv_sec + PATIENCE_S); /* fails if the words did not come */
    }
    side_barrier(side);
    buf_free(&word);
    buf_free(&values);
}

/* More requests at once than an owner has slots: each must get its turn. */
void more_queue_pairs_than_slots_are_served(struct side *side)
{
    enum { QPS = 40, BYTES = 40000 };
    struct side more[QPS];
    struct buf buf;

    for (int i = 0; i < QPS; i++)
        side_add(side, &more[i]);
    buf_make(side, &buf, side->initiator ? PAGEABLE : PRIVATE, 2 << 20); /* one chunk on both sides */
    if (side->initiator)
        buf_fill(&buf, 60);
    else
        buf_zero(&buf);
    struct remote remote = swap_remote(side, &buf);
    for (size_t round = 0; side->initiator && round < 3; round++) {
        for (size_t i = 0; i < QPS; i++)
            post(&more[i], IBV_WR_RDMA_WRITE, &buf, i * BYTES, BYTES, remote);
        for (int i = 0; i < QPS; i++)
            expect_success(side, "one of many queue pairs");
    }
    side_barrier(side);
    if (!side->initiator)
        MUST(buf_check(&buf, QPS * BYTES, 60, "many queue pairs"));
    for (int i = 0; i < QPS; i++)
        MUST(!ibv_destroy_qp(more[i].qp));
    side_barrier(side);
    buf_free(&buf);
}

static void add_post(struct side *side, const struct buf *result, size_t at, struct remote word)
{
    struct ibv_sge sge = {result->addr + 8 * at, 8, result->mr->lkey};
    struct ibv_send_wr *bad,
        wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD, .send_flags = IBV_SEND_SIGNALED};
    wr.wr.atomic.remote_addr = word.addr;
    wr.wr.atomic.rkey = word.rkey;
    wr.wr.atomic.compare_add = 1;
    MUST(!ibv_post_send(side->qp, &wr, &bad));
}

/* Both sides at the same time, the owner over queue pairs to itself: on one word for all, and on one word for each
 * queue pair. */
void atomics_of_many_queue_pairs_add_up(struct side *side, enum memory memory)
{
    enum { QPS = 6, ADDS = 8, ALL = QPS * ADDS, OWN_WORDS = 8 };
    struct side more[QPS], loop;
    struct buf words, results;
    bool seen[2 * ALL] = {false};
    uint64_t value;

    buf_make(side, &words, memory, 256);
    buf_zero(&words);
    buf_make(side, &results, memory == LEGACY ? LEGACY : PAGEABLE, (size_t)2 * ALL * 8);
    struct remote theirs = swap_remote(side, &words);
    for (int i = 0; i < QPS; i++)
        side_add(side, &more[i]);
    side_loop(side, &loop);
    struct remote at = side->initiator ? theirs : (struct remote){words.addr, words.mr->rkey};
    struct remote own = {at.addr + (side->initiator ? 8 : 8 * (1 + OWN_WORDS)), at.rkey};
    for (size_t n = 0; n < ALL; n++) {
        size_t qp = n % QPS;
        struct side *by = side->initiator ? &more[qp] : &loop;
        add_post(by, &results, n, at);
        add_post(by, &results, ALL + n, (struct remote){own.addr + 8 * qp, own.rkey});
        if (!side->initiator || n % 8 == 7)
            for (int i = 0; i < (side->initiator ? 16 : 2); i++)
                expect_success(side, "fetch and add of many queue pairs");
    }
    for (size_t n = 0; n < ALL; n++) {
        buf_read(&results, 8 * n, &value, 8);
        MUST(value < 2 * ALL && !seen[value]); /* no other atomic fetched this value */
        seen[value] = true;
        buf_read(&results, 8 * (ALL + n), &value, 8);
        MUST(value == n / QPS);
    }
    side_barrier(side);
    buf_read(&words, 0, &value, 8);
    MUST(side->initiator || value == 2 * ALL);
    for (int i = 0; i < QPS; i++)
        MUST(!ibv_destroy_qp(more[i].qp));
    MUST(!ibv_destroy_qp(loop.qp));
    side_barrier(side);
    buf_free(&words);
    buf_free(&results);
}

/* Rounds that post one fetch-and-add for each queue pair and wait for all of them. */
static void adds_row(struct side *side, struct side *more, size_t qps, const struct buf *results, struct remote words,
                     const char *where)
{
    static double us[TIMES_MOST];
    size_t rounds = side->fake ? 50 : TIMES_MOST;
    char what[80];

    for (size_t i = 0; i < rounds; i++) {
        double start = now_s();
        for (size_t n = 0; n < qps; n++)
            add_post(&more[n], results, n, (struct remote){words.addr + 8 * n, words.rkey});
        for (size_t n = 0; n < qps; n++)
            expect_success(side, "fetch and add");
        us[i] = (now_s() - start) * 1e6;
    }
    snprintf(what, sizeof(what), "fetch-and-add to %s, %zu queue pairs", where, qps);
    times_print(what, us, rounds);
}

/* On this process's own memory, as in one process with several GPUs, while a kernel waits for the atomics. */
static void own_rows(struct side *side, struct side *loop, size_t qps, const struct buf *results)
{
    struct buf words, flag, one;

    buf_make(side, &words, LEGACY, 64);
    buf_zero(&words);
    buf_make(side, &flag, LEGACY, 64);
    buf_zero(&flag);
    buf_make(side, &one, PAGEABLE, 64);
    *(uint64_t *)(uintptr_t)one.addr = 1;
    struct remote own = {words.addr, words.mr->rkey};
    for (size_t n = 1; n <= qps; n *= 2)
        adds_row(side, loop, n, results, own, "own memory");
    if (spin_start(flag.addr)) {
        for (size_t n = 1; n <= qps; n *= 2)
            adds_row(side, loop, n, results, own, "own memory beside a kernel");
        spin_watch(); /* as a program does that polls for the kernel's end, and so takes the driver's locks */
        for (size_t n = 1; n <= qps; n *= 2)
            adds_row(side, loop, n, results, own, "own memory, kernel watched");
        spin_watch_end();
        post(&loop[0], IBV_WR_RDMA_WRITE, &one, 0, 8, (struct remote){flag.addr, flag.mr->rkey});
        expect_success(side, "end of a kernel");
        spin_wait();
    }
    buf_free(&words);
    buf_free(&flag);
    buf_free(&one);
}

void owner_figures(struct side *side)
{
    enum { QPS = 4 };
    struct side more[QPS], loop[QPS];
    struct buf words, results;

    buf_make(side, &words, PRIVATE, 64);
    buf_zero(&words);
    buf_make(side, &results, PAGEABLE, 64);
    struct remote theirs = swap_remote(side, &words);
    for (int i = 0; i < QPS; i++) {
        side_add(side, &more[i]);
        side_loop(side, &loop[i]);
    }
    for (size_t qps = 1; side->initiator && qps <= QPS; qps *= 2)
        adds_row(side, more, qps, &results, theirs, "private memory");
    if (side->initiator)
        own_rows(side, loop, QPS, &results);
    side_barrier(side);
    for (int i = 0; i < QPS; i++)
        MUST(!ibv_destroy_qp(more[i].qp) && !ibv_destroy_qp(loop[i].qp));
    side_barrier(side);
    buf_free(&words);
    buf_free(&results);
}

/* The copy ends, or it no longer touches the memory; and the side that ends does not wait long. */
void a_queue_pair_may_go_while_a_copy_is_under_way(struct side *side, bool initiator_first)
{
    enum { BYTES = 48 << 20 };
    struct side more;
    struct buf buf;

    side_add(side, &more);
    buf_make(side, &buf, PRIVATE, BYTES); /* through host memory, in pieces */
    buf_zero(&buf);
    struct remote remote = swap_remote(side, &buf);
    if (side->initiator) {
        post(&more, IBV_WR_RDMA_WRITE, &buf, 0, BYTES, remote);
        usleep(2000);
    }
    side_barrier(side);
    if (side->initiator != initiator_first)
        side_barrier(side);
    double start = now_s();
    MUST(!ibv_destroy_qp(more.qp));
    MUST(now_s() - start < LONG_S);
    if (side->initiator == initiator_first)
        side_barrier(side);
    start = now_s();
    buf_free(&buf);
    MUST(now_s() - start < LONG_S);
    side_barrier(side);
}

/* A key that was valid just before. */
void a_deregistered_region_is_refused(struct side *side)
{
    struct buf buf, here;

    buf_make(side, &buf, PRIVATE, 4096);
    buf_make(side, &here, PAGEABLE, 4096);
    struct remote remote = swap_remote(side, &buf);
    if (side->initiator) {
        post(side, IBV_WR_RDMA_WRITE, &here, 0, 4096, remote);
        expect_success(side, "write before dereg");
    }
    side_barrier(side);
    buf_free(&buf);
    side_barrier(side);
    if (side->initiator) {
        post(side, IBV_WR_RDMA_WRITE, &here, 0, 4096, remote);
        MUST(side_poll(side).status == IBV_WC_REM_ACCESS_ERR);
    }
    side_barrier(side);
    side_connect(side);
    buf_free(&here);
}

/* A stopped owner does not answer; when it runs again, it works as before. */
void a_stopped_owner_ends_in_retry_exceeded(struct side *side, pid_t owner)
{
    struct buf buf;
    int status;

    buf_make(side, &buf, side->initiator ? PAGEABLE : PRIVATE, 4096);
    if (side->initiator)
        buf_fill(&buf, 90);
    else
        buf_zero(&buf);
    struct remote remote = swap_remote(side, &buf);
    if (side->initiator) {
        MUST(waitpid(owner, &status, WUNTRACED) == owner && WIFSTOPPED(status));
        post(side, IBV_WR_RDMA_WRITE, &buf, 0, 4096, remote);
        MUST(side_poll(side).status == IBV_WC_RETRY_EXC_ERR);
        MUST(!kill(owner, SIGCONT));
    } else {
        MUST(!raise(SIGSTOP));
    }
    side_barrier(side);
    side_connect(side);
    if (side->initiator) {
        post(side, IBV_WR_RDMA_WRITE, &buf, 0, 4096, remote);
        expect_success(side, "write to an owner that goes on");
    }
    side_barrier(side);
    if (!side->initiator)
        MUST(buf_check(&buf, 4096, 90, "an owner that goes on"));
    side_barrier(side);
    buf_free(&buf);
}

/* The owner dies with requests under way: they fail soon, as with any dead peer. */
void a_killed_owner_ends_in_retry_exceeded(struct side *side)
{
    enum { REQUESTS = 12, BYTES = 4 << 20 };
    struct buf buf;
    uint32_t failed = 0;
    char c = 0, theirs;

    buf_make(side, &buf, PRIVATE, BYTES);
    buf_zero(&buf);
    struct remote remote = swap_remote(side, &buf);
    for (int i = 0; side->initiator && i < REQUESTS; i++)
        post(side, IBV_WR_RDMA_WRITE, &buf, 0, BYTES, remote);
    side_exchange(side, &c, &theirs, 1);
    double give_up = now_s() + PATIENCE_S;
    if (!side->initiator) {
        kill(getpid(), SIGKILL);
        for (;;)
            pause();
    }
    for (int open = REQUESTS; open; open--) {
        struct ibv_wc wc = side_poll(side);
        if (wc.status == IBV_WC_SUCCESS) {
            MUST(!failed && now_s() < give_up);
            post(side, IBV_WR_RDMA_WRITE, &buf, 0, BYTES, remote); /* the owner is still alive */
            open++;
        } else {
            MUST(wc.status == (failed++ ? IBV_WC_WR_FLUSH_ERR : IBV_WC_RETRY_EXC_ERR));
        }
    }
    MUST(failed == REQUESTS);
    buf_free(&buf);
}

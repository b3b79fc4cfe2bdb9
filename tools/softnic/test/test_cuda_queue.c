/* SPDX-License-Identifier: Apache-2.0 */
/* Writes to device memory that are issued without waiting for the previous one. */
#include "tools/softnic/test/test_cuda_queue.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum {
    BURST = 16,
    PIECE = 40000,
    SIGNALS = 4096, /* offset of words in their buffer */
    PAIRS = 96,
    PUT_BYTES = 4096,
    CHAIN_PAIRS = 16, /* posted with one call */
};

/* Post a chain of `count` writes with one call. Write i sends the first `bytes` bytes of piece i. The last `signaled`
 * writes are signaled. */
static void burst_post_of(struct side *side, const struct buf *from, uint32_t bytes, struct remote to, int count,
                          int signaled, enum ibv_wr_opcode opcode)
{
    struct ibv_sge sge[BURST];
    struct ibv_send_wr wr[BURST], *bad;

    for (int i = 0; i < count; i++) {
        sge[i] = (struct ibv_sge){from->addr + (size_t)i * PIECE, bytes, from->mr->lkey};
        wr[i] = (struct ibv_send_wr){.wr_id = (uint64_t)i,
                                     .next = i + 1 < count ? &wr[i + 1] : NULL,
                                     .sg_list = &sge[i],
                                     .num_sge = 1,
                                     .opcode = opcode,
                                     .imm_data = htonl((uint32_t)i),
                                     .send_flags = i >= count - signaled ? IBV_SEND_SIGNALED : 0};
        wr[i].wr.rdma.remote_addr = to.addr + (size_t)i * PIECE;
        wr[i].wr.rdma.rkey = to.rkey;
    }
    MUST(!ibv_post_send(side->qp, wr, &bad));
}

static void burst_post(struct side *side, const struct buf *from, struct remote to, int count, int signaled,
                       enum ibv_wr_opcode opcode)
{
    burst_post_of(side, from, PIECE, to, count, signaled, opcode);
}

static void signal_post(struct side *side, struct remote to, uint64_t value, bool tells)
{
    struct ibv_sge sge = {(uintptr_t)&value, 8, 0};
    struct ibv_send_wr *bad, wr = {.wr_id = BURST,
                                   .sg_list = &sge,
                                   .num_sge = 1,
                                   .opcode = IBV_WR_RDMA_WRITE,
                                   .send_flags = IBV_SEND_INLINE | (tells ? IBV_SEND_SIGNALED : 0)};
    wr.wr.rdma.remote_addr = to.addr;
    wr.wr.rdma.rkey = to.rkey;
    MUST(!ibv_post_send(side->qp, &wr, &bad));
}

/* The target polls a word on its GPU, calls no verb, and finds all data when the word is there. The initiator waits for
 * nothing in between. */
void a_signal_comes_after_its_data(struct side *side)
{
    enum { ROUNDS = 6 };
    struct buf data, words;

    buf_make(side, &data, LEGACY, BURST * PIECE);
    buf_make(side, &words, LEGACY, SIGNALS + 64);
    buf_zero(&words);
    struct remote there = swap_remote(side, &data), signals = swap_remote(side, &words);
    for (uint64_t round = 1; round <= ROUNDS; round++) {
        if (side->initiator)
            buf_fill(&data, (uint32_t)(600 + round));
        else
            buf_zero(&data);
        side_barrier(side);
        if (side->initiator) {
            burst_post(side, &data, there, BURST, 0, IBV_WR_RDMA_WRITE);
            struct remote word = {signals.addr + SIGNALS + 8 * (round % 2), signals.rkey};
            signal_post(side, word, round - 1, false); /* two in a row: the second one is checked */
            signal_post(side, word, round, true);
            expect_success(side, "data and signal");
        } else {
            for (uint64_t value = 0; value != round;)
                buf_read(&words, SIGNALS + 8 * (round % 2), &value, 8);
            MUST(buf_check(&data, BURST * PIECE, (uint32_t)(600 + round), "data before its signal"));
        }
        side_barrier(side);
    }
    buf_free(&data);
    buf_free(&words);
}

void an_immediate_comes_after_its_data(struct side *side)
{
    struct buf data;
    uint8_t *have = malloc(PIECE), *want = malloc(BURST * PIECE);

    MUST(have && want);
    buf_make(side, &data, LEGACY, BURST * PIECE);
    buf_fill(&data, 640);
    buf_read(&data, 0, want, BURST * PIECE);
    if (!side->initiator)
        buf_zero(&data);
    for (int i = 0; !side->initiator && i < BURST; i++) {
        struct ibv_recv_wr *bad, wr = {.wr_id = (uint64_t)i};
        MUST(!ibv_post_recv(side->qp, &wr, &bad));
    }
    struct remote there = swap_remote(side, &data);
    if (side->initiator) {
        burst_post(side, &data, there, BURST, 1, IBV_WR_RDMA_WRITE_WITH_IMM);
        expect_success(side, "burst with immediates");
    }
    for (uint32_t i = 0; !side->initiator && i < BURST; i++) {
        struct ibv_wc wc = side_poll(side);
        MUST(wc.status == IBV_WC_SUCCESS && wc.imm_data == htonl(i) && wc.wr_id == i);
        buf_read(&data, (size_t)i * PIECE, have, PIECE);
        MUST(!memcmp(have, want + (size_t)i * PIECE, PIECE));
    }
    side_barrier(side);
    buf_free(&data);
    free(have);
    free(want);
}

/* Writes that wait for the previous one, and writes that do not, mixed. */
void completions_come_in_order(struct side *side)
{
    enum { MIXED = 24 };
    struct buf device, host;

    buf_make(side, &device, LEGACY, BURST * PIECE);
    buf_make(side, &host, PAGEABLE, BURST * PIECE);
    struct remote on_gpu = swap_remote(side, &device), on_host = swap_remote(side, &host);
    for (uint64_t i = 0; side->initiator && i < MIXED; i++) {
        const struct buf *from = i % 5 == 2 ? &host : &device;
        struct remote to = i % 3 == 1 ? on_host : on_gpu;
        struct ibv_sge sge = {from->addr, i % 4 == 3 ? 8 : PIECE, from->mr->lkey};
        struct ibv_send_wr *bad, wr = {.wr_id = i,
                                       .sg_list = &sge,
                                       .num_sge = 1,
                                       .opcode = i % 7 == 6 ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE,
                                       .send_flags = IBV_SEND_SIGNALED | (i % 8 == 5 ? IBV_SEND_FENCE : 0)};
        wr.wr.rdma.remote_addr = to.addr;
        wr.wr.rdma.rkey = to.rkey;
        MUST(!ibv_post_send(side->qp, &wr, &bad));
    }
    for (uint64_t i = 0; side->initiator && i < MIXED; i++) {
        struct ibv_wc wc = side_poll(side);
        MUST(wc.status == IBV_WC_SUCCESS && wc.wr_id == i);
    }
    side_barrier(side);
    buf_free(&device);
    buf_free(&host);
}

/* True if the driver has the whole burst when the posting call returns. In any case it is one copy, because its writes
 * continue each other, and at most two events cover it. */
static bool burst_is_given_at_once(struct side *side, const struct buf *data, struct remote there)
{
    int copies = driver_calls("cuMemcpyAsync"), marks = driver_calls("cuEventRecord");

    burst_post(side, data, there, BURST, 1, IBV_WR_RDMA_WRITE);
    bool at_once = driver_calls("cuMemcpyAsync") == copies + 1;
    expect_success(side, "burst");
    MUST(driver_calls("cuMemcpyAsync") == copies + 1 && driver_calls("cuEventRecord") <= marks + 2);
    return at_once;
}

/* A signal is one call, and one event after it once a program asks for it. */
static bool signal_is_given_at_once(struct side *side, struct remote there)
{
    int copies = driver_calls("cuMemcpyAsync"), of_words = driver_calls("cuStreamBatchMemOp_v2");

    signal_post(side, there, 1, true);
    bool at_once = driver_calls("cuStreamBatchMemOp_v2") == of_words + 1;
    expect_success(side, "signal");
    MUST(driver_calls("cuStreamBatchMemOp_v2") == of_words + 1 && driver_calls("cuMemcpyAsync") == copies);
    return at_once;
}

/* The thread that completed the request before may still hold the queue pair, and then issues the burst itself. So try
 * again after a pause, until the posting thread issued one. */
void a_burst_is_given_away_at_once(struct side *side)
{
    double give_up = now_s() + PATIENCE_S;
    struct buf data;

    buf_make(side, &data, LEGACY, BURST * PIECE);
    struct remote there = swap_remote(side, &data);
    if (side->initiator) {
        burst_post(side, &data, there, 1, 1, IBV_WR_RDMA_WRITE); /* so that no later write has to map memory */
        expect_success(side, "first of a burst");
        while (!burst_is_given_at_once(side, &data, there)) {
            MUST(now_s() < give_up);
            usleep(1000);
        }
        while (!signal_is_given_at_once(side, there)) {
            MUST(now_s() < give_up);
            usleep(1000);
        }
    }
    side_barrier(side);
    buf_free(&data);
}

void an_error_in_a_burst_flushes_what_is_behind(struct side *side)
{
    enum { GOOD = 5 };
    struct buf data;

    buf_make(side, &data, LEGACY, BURST * PIECE);
    struct remote there = swap_remote(side, &data);
    if (side->initiator) {
        burst_post(side, &data, there, 1, 1, IBV_WR_RDMA_WRITE);
        expect_success(side, "first of a burst");
        fail_later("cuMemcpyAsync", GOOD, 700);
        burst_post_of(side, &data, 512, there, BURST, BURST, IBV_WR_RDMA_WRITE); /* short: a copy each */
        for (int i = 0; i < BURST; i++) {
            struct ibv_wc wc = side_poll(side);
            MUST(wc.wr_id == (uint64_t)i);
            MUST(wc.status == (i < GOOD ? IBV_WC_SUCCESS : i == GOOD ? IBV_WC_REM_OP_ERR : IBV_WC_WR_FLUSH_ERR));
        }
    }
    side_barrier(side);
    side_connect(side);
    buf_free(&data);
}

static double now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static void put_post(struct side *side, const struct buf *from, struct remote to, uint32_t bytes, bool tells)
{
    struct ibv_sge sge = {from->addr, bytes, from->mr->lkey};
    struct ibv_send_wr *bad,
        wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .send_flags = tells ? IBV_SEND_SIGNALED : 0};
    wr.wr.rdma.remote_addr = to.addr;
    wr.wr.rdma.rkey = to.rkey;
    MUST(!ibv_post_send(side->qp, &wr, &bad));
}

/* Rounds of `puts` writes and a signal, which is waited for; one posting call for each. */
static void figures_row(struct side *side, const struct buf *from, struct remote to, struct remote word, uint32_t bytes,
                        int puts)
{
    int rounds = side->fake ? 10 : 1000;
    double posting = 0, start = now_us();

    for (int i = 0; i < rounds; i++) {
        double posted = now_us();
        for (int n = 0; n < puts; n++)
            put_post(side, from, to, bytes, false);
        signal_post(side, word, (uint64_t)i, true);
        posting += now_us() - posted;
        expect_success(side, "figures");
    }
    printf("  %2d writes of %6u bytes and a signal: %7.2f us posting, %7.2f us until complete\n", puts, bytes,
           posting / rounds, (now_us() - start) / rounds);
}

/* Post pairs of a put and its signal with a few calls, in the order of their memory or mixed up, as the blocks of a
 * kernel send them; puts of neighbours continue each other or are apart. */
static void pairs_post(struct side *side, const struct buf *data, struct remote to, struct remote words, int step,
                       int stride)
{
    struct ibv_send_wr wr[2 * CHAIN_PAIRS], *bad;
    struct ibv_sge sge[2 * CHAIN_PAIRS];
    uint64_t value = 1;

    for (int i = 0; i < PAIRS; i++) {
        int n = i % CHAIN_PAIRS * 2;
        size_t pair = (size_t)(i * step % PAIRS);
        for (int k = n; k < n + 2; k++)
            wr[k] =
                (struct ibv_send_wr){.next = &wr[k + 1], .sg_list = &sge[k], .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE};
        sge[n] = (struct ibv_sge){data->addr + pair * (size_t)stride, PUT_BYTES, data->mr->lkey};
        wr[n].wr.rdma.remote_addr = to.addr + pair * (size_t)stride;
        wr[n].wr.rdma.rkey = to.rkey;
        sge[n + 1] = (struct ibv_sge){(uintptr_t)&value, sizeof(value), 0};
        wr[n + 1].send_flags = IBV_SEND_INLINE | (i + 1 == PAIRS ? IBV_SEND_SIGNALED : 0);
        wr[n + 1].wr.rdma.remote_addr = words.addr + 8 * pair;
        wr[n + 1].wr.rdma.rkey = words.rkey;
        if (n + 2 < 2 * CHAIN_PAIRS)
            continue;
        wr[n + 1].next = NULL;
        MUST(!ibv_post_send(side->qp, wr, &bad));
    }
}

static void pairs_row(struct side *side, const struct buf *data, struct remote to, struct remote words, int step,
                      int stride)
{
    static const char *const names[] = {"cuMemcpyAsync", "cuMemcpyBatchAsync_v2", "cuStreamBatchMemOp_v2",
                                        "cuEventRecord"};
    static double us[TIMES_MOST];
    int rounds = side->fake ? 5 : 500, calls[4];
    double posting = 0;
    char what[80];

    for (int k = 0; side->fake && k < 4; k++)
        calls[k] = driver_calls(names[k]);
    for (int i = 0; i < rounds; i++) {
        double start = now_us();
        pairs_post(side, data, to, words, step, stride);
        posting += now_us() - start;
        expect_success(side, "pairs");
        us[i] = now_us() - start;
    }
    snprintf(what, sizeof(what), "%d puts and signals%s%s, %.0f us posting", PAIRS, step > 1 ? ", mixed up" : "",
             stride > PUT_BYTES ? ", apart" : "", posting / rounds);
    times_print(what, us, (size_t)rounds);
    for (int k = 0; side->fake && k < 4; k++)
        printf("    %s: %.1f\n", names[k], (double)(driver_calls(names[k]) - calls[k]) / rounds);
}

static void pair_figures(struct side *side)
{
    struct buf data, words;

    buf_make(side, &data, LEGACY, PAIRS * 2 * PUT_BYTES);
    buf_make(side, &words, LEGACY, PAIRS * 8);
    struct remote there = swap_remote(side, &data), signals = swap_remote(side, &words);
    for (int way = 0; side->initiator && way < 3; way++)
        pairs_row(side, &data, there, signals, way ? 37 : 1, way == 2 ? 2 * PUT_BYTES : PUT_BYTES);
    side_barrier(side);
    buf_free(&data);
    buf_free(&words);
}

void flight_figures(struct side *side)
{
    static const uint32_t sizes[] = {8, 4096, 65536};
    struct buf data, word;

    buf_make(side, &data, LEGACY, 65536);
    buf_make(side, &word, LEGACY, 64);
    struct remote there = swap_remote(side, &data), signals = swap_remote(side, &word);
    for (size_t i = 0; side->initiator && i < sizeof(sizes) / sizeof(sizes[0]); i++)
        for (int puts = 0; puts <= BURST; puts += puts ? 3 * puts : 1)
            if (puts || !i)
                figures_row(side, &data, there, signals, sizes[i], puts);
    side_barrier(side);
    buf_free(&data);
    buf_free(&word);
    pair_figures(side);
}

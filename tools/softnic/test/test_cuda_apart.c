/* SPDX-License-Identifier: Apache-2.0 */
/* Batches of atomics on memory of two GPUs of one process; one whose copies fail; how long bursts take. */
#include "tools/softnic/test/test_cuda_batch.h"

#include <stdio.h>

#include "tools/softnic/test/cuda_chain.h"

/* Data on one GPU of the initiator, words and a target for the data on its other GPU, and a queue pair to itself. */
struct apart {
    struct side by;
    struct buf data, words, there;
    struct remote at, to;
};

static void apart_open(struct side *side, struct apart *apart, enum memory memory)
{
    side_loop(side, &apart->by);
    buf_make(side, &apart->data, memory, MOST / 2 * PIECE);
    buf_fill(&apart->data, 40);
    side_other_gpu(true);
    buf_make(side, &apart->words, memory, WORDS_BYTES);
    buf_make(side, &apart->there, memory, MOST / 2 * PIECE);
    buf_zero(&apart->words);
    side_other_gpu(false);
    apart->at = (struct remote){apart->words.addr, apart->words.mr->rkey};
    apart->to = (struct remote){apart->there.addr, apart->there.mr->rkey};
}

static void apart_close(struct apart *apart)
{
    MUST(!ibv_destroy_qp(apart->by.qp));
    buf_free(&apart->data);
    buf_free(&apart->words);
    buf_free(&apart->there);
}

/* The driver copies to the other GPU's words in a stream of the first GPU; if the driver does not, the requests must be
 * carried out all the same. */
void words_on_another_gpu_of_the_process_are_changed(struct side *side, enum memory memory)
{
    enum { PAIRS = 8 };
    struct chain chain;
    struct apart apart;

    if (!side->initiator || side_gpus() < 2)
        return;
    chain_open(side, &chain);
    apart_open(side, &apart, memory);
    chain.side = &apart.by;
    for (uint64_t round = 0; round < 4; round++) {
        side_other_gpu(true);
        buf_zero(&apart.there);
        side_other_gpu(false);
        /* Fails the read of the words, after the first write. This process does not try such a read again. */
        if (side->fake && !side->copier && round == 2 && memory == VMM)
            fail_later("cuMemcpyAsync", 1, 1);
        for (size_t i = 0; i < PAIRS; i++) {
            write_piece(&chain, &apart.data, i * PIECE, PIECE, apart.to);
            add(&chain, apart.at, i, 5);
        }
        chain_run(&chain);
        side_other_gpu(true);
        MUST(buf_check(&apart.there, PAIRS * PIECE, 40, "data between GPUs of one process"));
        for (size_t i = 0; i < PAIRS; i++)
            MUST(word_read(&apart.words, i) == 5 * (round + 1) && result(&chain, 2 * (int)i + 1) == 5 * round);
        side_other_gpu(false);
    }
    apart_close(&apart);
    chain_close(&chain);
}

/* As NCCL leaves its memory where its ranks are not to use NVLink: each allocation is mapped for its own GPU. */
void memory_of_two_gpus_that_see_only_their_own_is_copied(struct side *side)
{
    static const enum memory memories[] = {VMM, PRIVATE};
    static const enum ibv_wr_opcode opcodes[] = {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ};
    enum { BYTES = 300001 };

    if (!side->initiator || side_gpus() < 2)
        return;
    side_own_gpu_only(true);
    for (int i = 0; i < 4; i++) {
        struct buf here, there;
        struct side by;

        side_loop(side, &by);
        buf_make(side, &here, memories[i % 2], BYTES);
        side_other_gpu(true);
        buf_make(side, &there, memories[i % 2], BYTES);
        if (opcodes[i / 2] == IBV_WR_RDMA_READ)
            buf_fill(&there, 60 + (uint32_t)i);
        else
            buf_zero(&there);
        side_other_gpu(false);
        if (opcodes[i / 2] == IBV_WR_RDMA_READ)
            buf_zero(&here);
        else
            buf_fill(&here, 60 + (uint32_t)i);
        post(&by, opcodes[i / 2], &here, 0, BYTES, (struct remote){there.addr, there.mr->rkey});
        expect_success(side, "between GPUs that see only their own memory");
        if (opcodes[i / 2] == IBV_WR_RDMA_WRITE)
            side_other_gpu(true);
        MUST(buf_check(opcodes[i / 2] == IBV_WR_RDMA_READ ? &here : &there, BYTES, 60 + (uint32_t)i,
                       "data between GPUs that see only their own memory"));
        if (opcodes[i / 2] == IBV_WR_RDMA_WRITE)
            side_other_gpu(false);
        MUST(!ibv_destroy_qp(by.qp));
        buf_free(&here);
        buf_free(&there);
    }
    side_own_gpu_only(false);
}

void a_driver_error_in_a_batch_gives_its_locks_back(struct side *side)
{
    static const struct {
        const char *call;
        int after;
    } rows[] = {{"cuMemcpyAsync", 0}, {"cuMemcpyAsync", 1}, {"cuEventQuery", 0}};
    enum { ALL = 12 }; /* neighbours: one copy writes them */
    struct chain chain;
    struct buf words;
    struct side by;

    chain_open(side, &chain);
    struct remote at = words_open(side, &by, &words, LEGACY, false);
    for (size_t row = 0; row < sizeof(rows) / sizeof(rows[0]); row++) {
        if (side->initiator)
            fail_later(rows[row].call, rows[row].after, 700);
        for (size_t i = 0; side->initiator && i < ALL; i++)
            add(&chain, at, i, 1);
        if (side->initiator)
            chain_post(&chain);
        for (int i = 0; side->initiator && i < ALL; i++) {
            struct ibv_wc wc = side_poll(side);
            MUST(wc.wr_id == (uint64_t)i);
            MUST(wc.status == (i ? IBV_WC_WR_FLUSH_ERR : IBV_WC_REM_OP_ERR));
        }
        chain.count = 0;
        side_barrier(side);
        side_connect(side);
        for (size_t i = 0; !side->initiator && i < ALL; i++)
            MUST(word_read(&words, i) == (row > 0)); /* nothing was changed */
        if (!side->initiator)
            buf_zero(&words);
        side_barrier(side);
        for (size_t i = 0; side->initiator && i < ALL; i++)
            add(&chain, at, i, 1);
        if (side->initiator)
            chain_run(&chain);
        side_barrier(side);
        for (size_t i = 0; !side->initiator && i < ALL; i++)
            MUST(word_read(&words, i) == 1);
        side_barrier(side);
    }
    words_close(side, &by, &words);
    chain_close(&chain);
}

static void figures_row(struct side *side, struct chain *chain, const struct buf *data, struct remote words,
                        struct remote there, bool writes, const char *where)
{
    enum { BURST = 16 };
    static double us[TIMES_MOST];
    size_t rounds = side->fake ? 2 : 500;
    char what[80];

    for (size_t n = 0; n < rounds; n++) {
        double start = now_s();
        for (size_t i = 0; i < BURST; i++) {
            if (writes)
                write_piece(chain, data, i * PIECE, PIECE, there);
            add(chain, words, i, 1);
        }
        chain_run(chain);
        us[n] = (now_s() - start) * 1e6;
    }
    snprintf(what, sizeof(what), "%d %sfetch-and-adds, memory %s", BURST, writes ? "writes and " : "", where);
    times_print(what, us, rounds);
}

void batch_figures(struct side *side)
{
    struct chain chain;
    struct buf words, data, secret;
    struct side by;

    chain_open(side, &chain);
    buf_make(side, &data, LEGACY, 16 * PIECE);
    buf_make(side, &secret, PRIVATE, 4096);
    buf_zero(&secret);
    struct remote at = words_open(side, &by, &words, LEGACY, false), there = swap_remote(side, &data);
    struct remote hidden = swap_remote(side, &secret);
    side_loop(side, &by);
    for (int writes = 0; side->initiator && writes < 2; writes++) {
        chain.side = &by;
        figures_row(side, &chain, &data, (struct remote){words.addr, words.mr->rkey},
                    (struct remote){data.addr, data.mr->rkey}, writes, "own");
        chain.side = side;
        figures_row(side, &chain, &data, at, there, writes, "of the other");
        figures_row(side, &chain, &data, hidden, there, writes, "of the other, private");
    }
    words_close(side, &by, &words);
    buf_free(&secret);
    buf_free(&data);
    chain_close(&chain);
}

void apart_figures(struct side *side)
{
    struct chain chain;
    struct apart apart;

    if (!side->initiator || side_gpus() < 2)
        return;
    chain_open(side, &chain);
    apart_open(side, &apart, VMM);
    chain.side = &apart.by;
    for (int writes = 0; writes < 2; writes++)
        figures_row(side, &chain, &apart.data, apart.at, apart.to, writes, "own, between GPUs");
    apart_close(&apart);
    chain_close(&chain);
}

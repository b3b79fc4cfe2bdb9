/* SPDX-License-Identifier: Apache-2.0 */
/* Atomics on device memory, many posted with one call. */
#include "tools/softnic/test/test_cuda_batch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/softnic/test/cuda_chain.h"

void atomics_behind_each_other_share_their_copies(struct side *side)
{
    enum { WORDS = 16 };
    static const struct {
        enum memory memory;
        bool own, writes;
        size_t step;
        int copies; /* a read, and a write of the changed words; the first write to data, and one of all others */
        int words;  /* calls that write words one after the other: they are apart */
    } rows[] = {{LEGACY, false, false, 1, 2, 0}, {VMM, false, false, 1, 2, 0},     {LEGACY, true, false, 1, 2, 0},
                {PRIVATE, true, false, 1, 2, 0}, {LEGACY, false, true, 1, 4, 0},   {LEGACY, true, true, 1, 4, 0},
                {LEGACY, false, false, 9, 1, 1}, {PRIVATE, true, false, 30, 1, 1}, {VMM, false, true, 2, 3, 1}};
    struct chain chain;
    struct buf words, data;
    struct side by;

    buf_make(side, &data, LEGACY, WORDS * PIECE);
    chain_open(side, &chain);
    struct remote there = swap_remote(side, &data);
    for (size_t row = 0; row < sizeof(rows) / sizeof(rows[0]); row++) {
        struct remote at = words_open(side, &by, &words, rows[row].memory, rows[row].own);
        struct remote to = rows[row].own ? (struct remote){data.addr, data.mr->rkey} : there;
        chain.side = &by;
        for (uint64_t round = 0; side->initiator && round < 3; round++) {
            int copies = driver_calls("cuMemcpyAsync"), of_words = driver_calls("cuStreamBatchMemOp_v2");
            for (size_t i = 0; i < WORDS; i++) {
                if (rows[row].writes)
                    write_piece(&chain, &data, i * PIECE, PIECE, to);
                add(&chain, at, i * rows[row].step, i + 1);
            }
            chain_run(&chain);
            copies = driver_calls("cuMemcpyAsync") - copies;
            of_words = driver_calls("cuStreamBatchMemOp_v2") - of_words;
            if (copies != rows[row].copies || of_words != rows[row].words)
                fprintf(stderr, "row %zu: %d copies, %d calls for words\n", row, copies, of_words);
            MUST(copies == rows[row].copies && of_words == rows[row].words);
            for (int i = 0; i < WORDS; i++)
                MUST(result(&chain, rows[row].writes ? 2 * i + 1 : i) == round * (uint64_t)(i + 1));
        }
        words_close(side, &by, &words);
    }
    chain_close(&chain);
    buf_free(&data);
}

/* Also with atomics on other words between the adds, and compare-and-swaps after them. */
void adds_to_one_word_each_return_the_value_before_them(struct side *side, enum memory memory)
{
    struct chain chain;
    struct buf words;
    struct side by;

    chain_open(side, &chain);
    struct remote at = words_open(side, &by, &words, memory, false);
    for (uint64_t round = 0; side->initiator && round < 10; round++) {
        uint64_t was = round * 1000;
        for (uint64_t i = 0; i < 10; i++) {
            add(&chain, at, 5, i);
            add(&chain, at, 6 + i % 2, 1);
        }
        swap(&chain, at, 5, was + 44, was + 500); /* the word is 45: it stays */
        swap(&chain, at, 5, was + 45, was + 900);
        add(&chain, at, 5, 100);
        chain_run(&chain);
        for (int i = 0; i < 10; i++) {
            MUST(result(&chain, 2 * i) == was + (uint64_t)(i * (i - 1) / 2));
            MUST(result(&chain, 2 * i + 1) == round * 5 + (uint64_t)(i / 2));
        }
        MUST(result(&chain, 20) == was + 45 && result(&chain, 21) == was + 45 && result(&chain, 22) == was + 900);
    }
    side_barrier(side);
    if (!side->initiator)
        MUST(word_read(&words, 5) == 10000 && word_read(&words, 6) == 50 && word_read(&words, 7) == 50);
    words_close(side, &by, &words);
    chain_close(&chain);
}

/* Words of two registrations in turn; some use the same lock. */
void words_far_apart_are_changed_like_neighbours(struct side *side)
{
    static const size_t steps[] = {1, 2, 64, 600, 64 * 7};
    enum { ROUNDS = 4 };
    struct chain chain;
    struct buf words, more;
    struct side by;

    chain_open(side, &chain);
    buf_make(side, &more, VMM, WORDS_BYTES);
    struct remote at = words_open(side, &by, &words, LEGACY, false), other = swap_remote(side, &more);
    for (size_t s = 0; s < sizeof(steps) / sizeof(steps[0]); s++) {
        buf_zero(&words);
        buf_zero(&more);
        side_barrier(side);
        for (uint64_t round = 0; side->initiator && round < ROUNDS; round++) {
            for (size_t i = 0; i < MOST; i++)
                add(&chain, i % 3 ? at : other, (i * 7 % MOST) * steps[s], i + 1);
            chain_run(&chain);
            for (int i = 0; i < MOST; i++)
                MUST(result(&chain, i) == round * (uint64_t)(i + 1));
        }
        side_barrier(side);
        for (size_t i = 0; !side->initiator && i < MOST; i++)
            MUST(word_read(i % 3 ? &words : &more, (i * 7 % MOST) * steps[s]) == ROUNDS * (i + 1));
        side_barrier(side);
    }
    words_close(side, &by, &words);
    buf_free(&more);
    chain_close(&chain);
}

/* The owner writes them meanwhile, and must find its own values. A failed comparison and an addition of 0 write nothing
 * either. */
void words_in_between_are_left_alone(struct side *side)
{
    enum { MINE = 3, BURSTS = 40 };
    static const size_t mine[MINE] = {1, 4, 5};
    struct chain chain;
    struct buf words;
    struct side by;
    char over = 0;

    chain_open(side, &chain);
    struct remote at = words_open(side, &by, &words, LEGACY, false);
    for (uint64_t n = 0; side->initiator && n < BURSTS; n++) {
        add(&chain, at, 0, 1);
        add(&chain, at, 2, 1);
        add(&chain, at, 3, 1);
        swap(&chain, at, 4, 0, 1); /* never 0 after the owner has begun */
        add(&chain, at, 5, 0);
        add(&chain, at, 6, 1);
        chain_run(&chain);
        if (n == 0) /* the batch has begun; now the owner may begin. Word 4 was 0 until then */
            side_barrier(side);
    }
    if (!side->initiator)
        side_barrier(side);
    for (uint32_t n = 1; !side->initiator && n < 400; n++)
        for (int i = 0; i < MINE; i++) {
            struct buf word = words;
            word.addr += 8 * mine[i];
            word.bytes = 8;
            buf_fill(&word, n);
            MUST(buf_check(&word, 8, n, "word between atomics, just written"));
            for (int k = 0; n > 1 && k < MINE; k++) {
                word.addr = words.addr + 8 * mine[k];
                MUST(buf_check(&word, 8, k <= i ? n : n - 1, "word between atomics"));
            }
        }
    side_exchange(side, &over, &over, 1);
    if (!side->initiator)
        MUST(word_read(&words, 0) == BURSTS && word_read(&words, 3) == BURSTS && word_read(&words, 6) == BURSTS);
    words_close(side, &by, &words);
    chain_close(&chain);
}

void an_atomic_behind_a_write_to_its_word_finds_it(struct side *side)
{
    struct chain chain;
    struct buf words, data;
    struct side by;

    chain_open(side, &chain);
    buf_make(side, &data, PAGEABLE, WORDS_BYTES);
    struct remote at = words_open(side, &by, &words, LEGACY, false);
    for (uint64_t round = 0; side->initiator && round < 10; round++) {
        ((uint64_t *)(uintptr_t)data.addr)[2] = 100 + round;
        for (int i = 0; i < 3; i++) {
            add(&chain, at, 1, 1);
            add(&chain, at, 2, 7);
            write_piece(&chain, &data, 16, 8, at);
            add(&chain, at, 2, 1);
        }
        chain_run(&chain);
        for (int i = 0; i < 3; i++) {
            MUST(result(&chain, 4 * i) == 3 * round + (uint64_t)i);
            MUST(result(&chain, 4 * i + 1) == (i ? 101 + round : round ? 100 + round : 0));
            MUST(result(&chain, 4 * i + 3) == 100 + round);
        }
    }
    words_close(side, &by, &words);
    buf_free(&data);
    chain_close(&chain);
}

/* The distance of the pieces that belong to neighbouring words. */
static size_t step_of(bool apart)
{
    return apart ? 3 * PIECE : PIECE;
}

static struct buf piece_of(const struct buf *data, size_t offset)
{
    struct buf piece = *data;

    piece.addr += offset;
    piece.bytes = PIECE;
    return piece;
}

/* After word i changes, all of the write before it is there. Before that, nothing of the write after it is, if the
 * writes are from host memory: only those from GPU memory may pass. */
static void watch_pair(const struct buf *words, const struct buf *data, size_t i, size_t pairs, uint64_t round,
                       bool from_host, size_t step)
{
    double give_up = now_s() + PATIENCE_S;
    struct buf piece = piece_of(data, i * step), next = piece_of(data, (i + 1) * step);

    next.bytes = 8;
    for (uint64_t word = 0, seen = 0, old = 0; word != round;) {
        if (i + 1 < pairs)
            buf_read(&next, 0, &seen, 8);
        old = old ? old : seen;
        word = word_read(words, i);
        MUST(!from_host || seen == old || word == round);
        MUST(now_s() < give_up);
    }
    MUST(buf_check(&piece, PIECE, (uint32_t)round, "data before its atomic"));
}

/* The target calls no verb. */
void signals_and_writes_are_seen_in_their_order(struct side *side, bool from_host, bool flags, bool apart)
{
    enum { PAIRS = 8, ROUNDS = 20 };
    size_t step = step_of(apart);
    struct chain chain;
    struct buf words, data;
    struct side by;
    int copies, batches, of_words;

    chain_open(side, &chain);
    buf_make(side, &data, side->initiator && from_host ? PAGEABLE : LEGACY, PAIRS * step);
    struct remote at = words_open(side, &by, &words, LEGACY, false), there = swap_remote(side, &data);
    for (uint32_t round = 1; round <= ROUNDS; round++) {
        side_barrier(side);
        for (size_t i = 0; side->initiator && i < PAIRS; i++) {
            struct buf piece = piece_of(&data, i * step);
            buf_fill(&piece, round);
            write_piece(&chain, &data, i * step, PIECE, there);
            if (flags)
                flag(&chain, at, i, round);
            else
                add(&chain, at, i, 1);
        }
        copies = driver_calls("cuMemcpyAsync");
        batches = driver_calls("cuMemcpyBatchAsync_v2");
        of_words = driver_calls("cuStreamBatchMemOp_v2");
        if (side->initiator)
            chain_run(&chain);
        if (side->initiator && side->fake && !side->copier && flags && !from_host) /* one for all data, or all flags */
            MUST(driver_calls("cuMemcpyAsync") == copies + !apart &&
                 driver_calls("cuMemcpyBatchAsync_v2") == batches + apart &&
                 driver_calls("cuStreamBatchMemOp_v2") == of_words + 1);
        for (size_t i = 0; !side->initiator && i < PAIRS; i++)
            watch_pair(&words, &data, i, PAIRS, round, from_host, step);
    }
    words_close(side, &by, &words);
    buf_free(&data);
    chain_close(&chain);
}

/* A random request within the buffer, carried out on the model, too. Writes often continue the previous one, overlap
 * others, touch words, or are as short as a flag. */
struct meeting {
    uint8_t model[64 << 10];
    uint64_t found[MOST];
    size_t from, to, bytes; /* of the last write */
};

static void meeting_add(struct chain *chain, struct meeting *m, struct remote at)
{
    uint64_t *word = (uint64_t *)(void *)&m->model[(size_t)random() % 128 * 512];

    m->found[chain->count] = *word;
    *word += (uint64_t)chain->count + 1;
    add(chain, at, (size_t)((uint8_t *)word - m->model) / 8, (uint64_t)chain->count + 1);
}

static void meeting_flag(struct chain *chain, struct meeting *m, struct remote at)
{
    size_t word = (size_t)random() % 128 * 64 + (size_t)random() % 3;

    ((uint64_t *)(void *)m->model)[word] = (uint64_t)random();
    flag(chain, at, word, ((uint64_t *)(void *)m->model)[word]);
}

static void meeting_write(struct chain *chain, struct meeting *m, const struct buf *data, struct remote at)
{
    static const size_t sizes[] = {8, 512, 1024, 1024, 2048, 4096};

    m->from += m->bytes;
    m->to += m->bytes;
    while (random() % 3 == 0 || m->from + 4096 > sizeof(m->model) || m->to + 4096 > sizeof(m->model) ||
           (m->from < m->to + 4096 && m->to < m->from + 4096)) {
        m->from = (size_t)random() % 128 * 512;
        m->to = (size_t)random() % 128 * 512;
    }
    m->bytes = sizes[(size_t)random() % (sizeof(sizes) / sizeof(sizes[0]))];
    memcpy(&m->model[m->to], &m->model[m->from], m->bytes);
    write_piece(chain, data, m->from, (uint32_t)m->bytes, at);
    chain->wr[chain->count - 1].wr.rdma.remote_addr = at.addr + m->to;
}

void requests_that_meet_keep_their_order(struct side *side)
{
    static struct meeting m;
    static uint8_t found[sizeof(m.model)];
    int rounds = side->copier ? 40 : 150;
    struct chain chain;
    struct buf data;
    struct side by;

    if (!side->initiator)
        return;
    chain_open(side, &chain);
    side_loop(side, &by);
    chain.side = &by;
    buf_make(side, &data, LEGACY, sizeof(m.model));
    buf_fill(&data, 90);
    buf_read(&data, 0, m.model, sizeof(m.model));
    srandom(90);
    for (int round = 0; round < rounds; round++) {
        struct remote at = {data.addr, data.mr->rkey};
        while (chain.count < MOST)
            if (random() % 3 == 0)
                meeting_add(&chain, &m, at);
            else if (random() % 3 == 0)
                meeting_flag(&chain, &m, at);
            else
                meeting_write(&chain, &m, &data, at);
        chain_run(&chain);
        for (int i = 0; i < MOST; i++)
            MUST(chain.wr[i].opcode == IBV_WR_RDMA_WRITE || result(&chain, i) == m.found[i]);
        buf_read(&data, 0, found, sizeof(found));
        MUST(!memcmp(found, m.model, sizeof(found)));
    }
    MUST(!ibv_destroy_qp(by.qp));
    buf_free(&data);
    chain_close(&chain);
}

static void read_word(struct chain *chain, struct remote words, size_t word)
{
    flag(chain, words, word, ~0ull);
    chain->wr[chain->count - 1].opcode = IBV_WR_RDMA_READ;
}

void flags_among_reads_atomics_and_fences_keep_their_order(struct side *side)
{
    enum { ROUNDS = 10 };
    struct chain chain;
    struct buf words;
    struct side by;

    chain_open(side, &chain);
    struct remote at = words_open(side, &by, &words, LEGACY, false);
    for (uint64_t round = 1; side->initiator && round <= ROUNDS; round++) {
        for (size_t i = 0; i < 3; i++)
            flag(&chain, at, 7 * i, 100 * round + i);
        for (size_t i = 0; i < 3; i++)
            read_word(&chain, at, 7 * i);
        flag(&chain, at, 7, 200 * round); /* 6 */
        add(&chain, at, 7, 1);
        flag(&chain, at, 14, 300 * round);
        add(&chain, at, 7, 1);
        flag(&chain, at, 7, 400 * round); /* 10 */
        chain.wr[chain.count - 1].send_flags |= IBV_SEND_FENCE;
        flag(&chain, at, 7, 500 * round);
        read_word(&chain, at, 7);
        read_word(&chain, at, 14);
        chain_run(&chain);
        for (int i = 0; i < 3; i++)
            MUST(result(&chain, 3 + i) == 100 * round + (uint64_t)i);
        MUST(result(&chain, 7) == 200 * round && result(&chain, 9) == 200 * round + 1);
        MUST(result(&chain, 12) == 500 * round && result(&chain, 13) == 300 * round);
    }
    words_close(side, &by, &words);
    chain_close(&chain);
}

/* The driver refuses each kind once, and is not asked again. */
void what_the_driver_refuses_is_copied_alone(struct side *side)
{
    enum { PAIRS = 8, ROUNDS = 4, WORDS_REFUSED = 2, COPIES_REFUSED = 3 };
    size_t step = step_of(true);
    struct chain chain;
    struct buf words, data;
    struct side by;

    chain_open(side, &chain);
    buf_make(side, &data, LEGACY, PAIRS * step);
    struct remote at = words_open(side, &by, &words, LEGACY, false), there = swap_remote(side, &data);
    for (uint64_t round = 1; side->initiator && round <= ROUNDS; round++) {
        int copies = driver_calls("cuMemcpyAsync"), of_words = driver_calls("cuStreamBatchMemOp_v2"),
            batches = driver_calls("cuMemcpyBatchAsync_v2");

        if (round == WORDS_REFUSED)
            fail_next("cuStreamBatchMemOp_v2", 801);
        if (round == COPIES_REFUSED)
            fail_next("cuMemcpyBatchAsync_v2", 801);
        for (size_t i = 0; i < PAIRS; i++) {
            struct buf piece = piece_of(&data, i * step);
            buf_fill(&piece, (uint32_t)round);
            write_piece(&chain, &data, i * step, PIECE, there);
            flag(&chain, at, 3 * i, round);
        }
        chain_run(&chain);
        MUST(driver_calls("cuStreamBatchMemOp_v2") - of_words == (round <= WORDS_REFUSED));
        MUST(driver_calls("cuMemcpyBatchAsync_v2") - batches == (round <= COPIES_REFUSED));
        MUST(driver_calls("cuMemcpyAsync") - copies == PAIRS * ((round >= WORDS_REFUSED) + (round >= COPIES_REFUSED)));
        for (size_t i = 0; i < PAIRS; i++)
            add(&chain, at, 3 * i, 7);
        chain_run(&chain);
        for (int i = 0; i < PAIRS; i++)
            MUST(result(&chain, i) == round);
    }
    side_barrier(side);
    for (size_t i = 0; !side->initiator && i < PAIRS; i++)
        MUST(word_read(&words, 3 * i) == ROUNDS + 7);
    for (size_t i = 0; !side->initiator && i < PAIRS; i++) {
        struct buf piece = piece_of(&data, i * step);
        MUST(buf_check(&piece, PIECE, ROUNDS, "data copied alone"));
    }
    words_close(side, &by, &words);
    buf_free(&data);
    chain_close(&chain);
}

/* A program that saw an atomic may change the word and report it. Atomics posted after that must find the new value,
 * even while those posted with the first one are under way. */
void an_atomic_finds_what_the_word_was_when_it_was_posted(struct side *side)
{
    enum { PAIRS = 18, ROUNDS = 10 };
    struct chain chain;
    struct buf words, data, word;
    struct side by;

    chain_open(side, &chain);
    buf_make(side, &data, LEGACY, PAIRS * PIECE);
    struct remote at = words_open(side, &by, &words, LEGACY, false), there = swap_remote(side, &data);
    word = words;
    word.bytes = 8;
    for (int round = 0; round < ROUNDS; round++) {
        double give_up = now_s() + PATIENCE_S;
        side_barrier(side);
        if (side->initiator) {
            add(&chain, at, 0, 1);
            for (size_t i = 0; i < PAIRS; i++) {
                write_piece(&chain, &data, i * PIECE, PIECE, there);
                add(&chain, at, i + 1, 1);
            }
            chain_post(&chain);
        } else {
            while (word_read(&words, 0) != 1)
                MUST(now_s() < give_up);
            buf_zero(&word);
        }
        side_barrier(side);
        if (side->initiator) {
            int first = chain.count;
            add(&chain, at, 0, 1);
            struct ibv_send_wr *bad;
            MUST(!ibv_post_send(side->qp, &chain.wr[first], &bad));
            chain_expect(&chain);
            MUST(result(&chain, first) == 0);
        }
        side_barrier(side);
        if (!side->initiator) {
            MUST(word_read(&words, 0) == 1 && word_read(&words, PAIRS) == (uint64_t)round + 1);
            buf_zero(&word);
        }
    }
    words_close(side, &by, &words);
    buf_free(&data);
    chain_close(&chain);
}

/* Both sides at the same time, the owner over a queue pair to itself; no two atomics fetch the same value. */
void atomics_of_two_queue_pairs_on_one_word_lose_nothing(struct side *side, enum memory memory)
{
    enum { WORDS = 3, BURSTS = 30, ADDS = BURSTS * MOST, FEW = 6 };
    static bool seen[WORDS][2 * ADDS];
    struct chain chain;
    struct buf words;
    struct side by, loop;
    int bursts = side->copier ? FEW : BURSTS; /* with the copier each atomic is done alone, through three processes */

    memset(seen, 0, sizeof(seen));
    chain_open(side, &chain);
    struct remote at = words_open(side, &by, &words, memory, false);
    side_loop(side, &loop);
    if (!side->initiator) {
        chain.side = &loop;
        at = (struct remote){words.addr, words.mr->rkey};
    }
    side_barrier(side);
    for (int burst = 0; burst < bursts; burst++) {
        for (size_t i = 0; i < MOST; i++)
            add(&chain, at, (size_t)burst % 2 ? 0 : i % WORDS, 1);
        chain_run(&chain);
        for (size_t i = 0; i < MOST; i++) {
            bool *one = &seen[burst % 2 ? 0 : i % WORDS][result(&chain, (int)i)];
            MUST(result(&chain, (int)i) < 2 * ADDS && !*one);
            *one = true;
        }
    }
    side_barrier(side);
    if (!side->initiator)
        MUST(word_read(&words, 0) + word_read(&words, 1) + word_read(&words, 2) == 2u * MOST * (uint64_t)bursts);
    MUST(!ibv_destroy_qp(loop.qp));
    words_close(side, &by, &words);
    chain_close(&chain);
}

void a_batch_ends_before_an_atomic_that_is_refused(struct side *side)
{
    static const struct {
        uint64_t off; /* from the buffer's address, in bytes */
        uint32_t key;
        enum ibv_wc_status status;
    } rows[] = {{4, 0, IBV_WC_REM_INV_REQ_ERR}, {WORDS_BYTES, 0, IBV_WC_REM_ACCESS_ERR}, {8, 1, IBV_WC_REM_ACCESS_ERR}};
    enum { GOOD = 3, ALL = 6 };
    struct chain chain;
    struct buf words;
    struct side by;

    chain_open(side, &chain);
    struct remote at = words_open(side, &by, &words, LEGACY, false);
    for (size_t row = 0; row < sizeof(rows) / sizeof(rows[0]); row++) {
        for (int i = 0; side->initiator && i < ALL; i++)
            add(&chain, at, 1, 1);
        chain.wr[GOOD].wr.atomic.remote_addr = at.addr + rows[row].off;
        chain.wr[GOOD].wr.atomic.rkey = at.rkey ^ rows[row].key;
        if (side->initiator)
            chain_post(&chain);
        for (int i = 0; side->initiator && i < ALL; i++) {
            struct ibv_wc wc = side_poll(side);
            MUST(wc.wr_id == (uint64_t)i);
            MUST(wc.status == (i < GOOD ? IBV_WC_SUCCESS : i == GOOD ? rows[row].status : IBV_WC_WR_FLUSH_ERR));
            MUST(i >= GOOD || result(&chain, i) == row * GOOD + (uint64_t)i);
        }
        chain.count = 0;
        side_barrier(side);
        side_connect(side);
        if (!side->initiator)
            MUST(word_read(&words, 1) == (row + 1) * GOOD);
        side_barrier(side);
    }
    words_close(side, &by, &words);
    chain_close(&chain);
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/common/ranks.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "tools/common/rank_processes.h"
#include "transport/util/clock.h"

enum { WAIT_SLICE_US = 300, GRACE_S = 5 };

struct board {
    uint64_t words[RANKS_WORDS];
    uint64_t arrived; /* arrivals at the barrier, over all its uses */
    uint64_t failed;  /* a rank has failed */
    uint8_t block[RANK_PROCESSES_MAX][RANKS_BLOCK_BYTES];
};

struct ranks {
    struct board *board;
    uint32_t rank, size, nodes;
    uint32_t timeout_s;
    uint64_t barriers; /* passed */
    int (*body)(struct ranks *ranks, void *user);
    void *user;
};

uint64_t *ranks_words(struct ranks *ranks)
{
    return ranks->board->words;
}

uint32_t ranks_rank(const struct ranks *ranks)
{
    return ranks->rank;
}

int ranks_wait_word(struct ranks *ranks, uint64_t *word, uint64_t value, int (*idle)(void *), void *user)
{
    uint64_t start = prs_clock_ms();
    uint64_t looks = 0;

    /* Pairs with the release by the rank that raises the word: everything that it wrote before is visible here. */
    while (__atomic_load_n(word, __ATOMIC_ACQUIRE) < value) {
        int r = idle ? idle(user) : 0;

        if (r < 0)
            return r;
        if (__atomic_load_n(&ranks->board->failed, __ATOMIC_RELAXED))
            return -ECONNRESET;
        if (prs_clock_ms() - start > ranks->timeout_s * 1000ull)
            return -ETIMEDOUT;
        /* Many ranks share few cores, so yield at first, and then sleep. Do not sleep while idle() has work, because a
         * sender may be waiting for it. */
        looks = r > 0 ? 0 : looks + 1;
        if (looks < 3)
            sched_yield();
        else
            nanosleep(&(struct timespec){0, WAIT_SLICE_US * 1000}, NULL);
    }
    return 0;
}

int ranks_barrier(struct ranks *ranks)
{
    ranks->barriers++;
    __atomic_fetch_add(&ranks->board->arrived, 1, __ATOMIC_ACQ_REL);
    return ranks_wait_word(ranks, &ranks->board->arrived, ranks->barriers * ranks->size, NULL, NULL);
}

int ranks_allgather(void *user, const void *mine, void *all, size_t bytes)
{
    struct ranks *ranks = user;

    for (size_t done = 0; done < bytes; done += RANKS_BLOCK_BYTES) {
        size_t piece = bytes - done < RANKS_BLOCK_BYTES ? bytes - done : RANKS_BLOCK_BYTES;
        int r;

        memcpy(ranks->board->block[ranks->rank], (const char *)mine + done, piece);
        r = ranks_barrier(ranks);
        if (r < 0)
            return r;
        for (uint32_t rank = 0; rank < ranks->size; rank++)
            memcpy((char *)all + rank * bytes + done, ranks->board->block[rank], piece);
        r = ranks_barrier(ranks); /* no block is written again before all have read it */
        if (r < 0)
            return r;
    }
    return 0;
}

static int be_rank(uint32_t rank, void *user)
{
    struct ranks *ranks = user;
    int r;

    ranks->rank = rank;
    rank_setenv("RANK", rank);
    rank_setenv("WORLD_SIZE", ranks->size);
    if (ranks->nodes > 1) {
        uint32_t node = (uint32_t)((uint64_t)rank * ranks->nodes / ranks->size);

        rank_setenv("SOFTNIC_NODE", node);
        rank_setenv("PERSEUS_NODE", node + 1);
    }
    r = ranks->body(ranks, ranks->user);
    return r < 0 ? 1 : r;
}

static void give_up(void *user)
{
    struct ranks *ranks = user;

    __atomic_store_n(&ranks->board->failed, 1, __ATOMIC_RELAXED);
}

int ranks_run(uint32_t size, uint32_t nodes, uint32_t timeout_s, int (*body)(struct ranks *ranks, void *user),
              void *user)
{
    struct ranks ranks = {.size = size, .nodes = nodes, .timeout_s = timeout_s, .body = body, .user = user};
    const struct rank_processes processes = {
        .program = program_invocation_short_name,
        .count = size,
        .run = be_rank,
        .give_up = give_up,
        .user = &ranks,
        .limit_s = timeout_s,
        .grace_s = GRACE_S,
    };
    int failed;

    ranks.board = mmap(NULL, sizeof(*ranks.board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (ranks.board == MAP_FAILED) {
        perror("shared memory of the ranks");
        return 1;
    }
    failed = rank_processes_run(&processes);
    munmap(ranks.board, sizeof(*ranks.board));
    return failed;
}

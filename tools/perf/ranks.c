/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/perf/ranks.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "transport/util/clock.h"

enum { RANKS_MAX = 256, WAIT_SLICE_US = 300 };

struct board {
    uint64_t words[RANKS_WORDS];
    uint64_t arrived; /* at the barrier, over all its uses */
    uint64_t dead;    /* a rank ended before its time */
    uint8_t block[RANKS_MAX][RANKS_BLOCK_BYTES];
};

struct ranks {
    struct board *board;
    uint32_t rank, size;
    uint32_t timeout_s;
    uint64_t barriers; /* passed */
};

uint64_t *ranks_words(struct ranks *ranks)
{
    return ranks->board->words;
}

uint32_t ranks_rank(const struct ranks *ranks)
{
    return ranks->rank;
}

static uint64_t now_us(void)
{
    return prs_clock_ns() / 1000;
}

int ranks_wait_word(struct ranks *ranks, uint64_t *word, uint64_t value, int (*idle)(void *), void *user)
{
    uint64_t start = now_us();
    uint64_t looks = 0;

    /* Pairs with the release of who raises the word: what it did before is seen. */
    while (__atomic_load_n(word, __ATOMIC_ACQUIRE) < value) {
        int r = idle ? idle(user) : 0;

        if (r < 0)
            return r;
        if (__atomic_load_n(&ranks->board->dead, __ATOMIC_RELAXED))
            return -ECONNRESET;
        if (now_us() - start > ranks->timeout_s * 1000000ull)
            return -ETIMEDOUT;
        /* Many ranks share few cores: yield at first, then sleep. But not while there is something to do: a sender may
         * wait for it. */
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
        r = ranks_barrier(ranks); /* all have read before a block is written again */
        if (r < 0)
            return r;
    }
    return 0;
}

static void set_number(const char *name, uint32_t value)
{
    char text[16];

    snprintf(text, sizeof(text), "%u", value);
    setenv(name, text, 1);
}

static void be_rank(struct ranks *ranks, uint32_t nodes, int (*body)(struct ranks *, void *), void *user)
{
    uint32_t node = (uint32_t)((uint64_t)ranks->rank * nodes / ranks->size);
    int r;

    set_number("RANK", ranks->rank);
    set_number("WORLD_SIZE", ranks->size);
    if (nodes > 1) {
        set_number("SOFTNIC_NODE", node);
        set_number("PERSEUS_NODE", node + 1);
    }
    r = body(ranks, user);
    fflush(NULL);
    _exit(r < 0 ? 1 : r);
}

/* Collect the ranks; the first that fails makes the others give up, by the board's dead word, then by force. */
static int reap(struct ranks *ranks, pid_t *pids)
{
    uint64_t start = now_us(), kill_at = start + ranks->timeout_s * 1000000ull;
    uint32_t left = ranks->size;
    int failed = 0;

    while (left > 0) {
        for (uint32_t rank = 0; rank < ranks->size; rank++) {
            int status;

            if (pids[rank] == 0 || waitpid(pids[rank], &status, WNOHANG) != pids[rank])
                continue;
            pids[rank] = 0;
            left--;
            if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
                continue;
            if (!failed && WIFEXITED(status) && WEXITSTATUS(status) == 77)
                failed = 77; /* skipped, and has said why */
            else if (!failed)
                fprintf(stderr, "rank %u %s %d\n", rank, WIFEXITED(status) ? "ended with status" : "died of signal",
                        WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status));
            failed = failed ? failed : 1;
            __atomic_store_n(&ranks->board->dead, 1, __ATOMIC_RELAXED);
            if (kill_at > now_us() + 5000000)
                kill_at = now_us() + 5000000;
        }
        if (left > 0 && now_us() > kill_at) {
            for (uint32_t rank = 0; rank < ranks->size; rank++)
                if (pids[rank] != 0) {
                    fprintf(stderr, "rank %u does not end (others failed, or %u s are over): killed\n", rank,
                            ranks->timeout_s);
                    kill(pids[rank], SIGKILL);
                }
            failed = 1;
            kill_at = UINT64_MAX;
        }
        nanosleep(&(struct timespec){0, 2000000}, NULL);
    }
    return failed;
}

int ranks_run(uint32_t size, uint32_t nodes, uint32_t timeout_s, int (*body)(struct ranks *ranks, void *user),
              void *user)
{
    struct ranks ranks = {.size = size, .timeout_s = timeout_s};
    pid_t pids[RANKS_MAX] = {0};
    int failed;

    if (size == 0 || size > RANKS_MAX) {
        fprintf(stderr, "%u ranks: from 1 to %d can be started\n", size, RANKS_MAX);
        return 1;
    }
    ranks.board = mmap(NULL, sizeof(*ranks.board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (ranks.board == MAP_FAILED) {
        perror("shared memory of the ranks");
        return 1;
    }
    fflush(NULL);
    for (ranks.rank = 0; ranks.rank < size; ranks.rank++) {
        pids[ranks.rank] = fork();
        if (pids[ranks.rank] == 0)
            be_rank(&ranks, nodes, body, user);
        if (pids[ranks.rank] < 0) {
            perror("fork");
            pids[ranks.rank] = 0;
            __atomic_store_n(&ranks.board->dead, 1, __ATOMIC_RELAXED);
            ranks.size = ranks.rank;
        }
    }
    failed = reap(&ranks, pids);
    if (ranks.size != size)
        failed = 1;
    munmap(ranks.board, sizeof(*ranks.board));
    return failed;
}

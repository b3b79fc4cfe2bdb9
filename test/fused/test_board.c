/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <sys/random.h>
#include <sys/wait.h>
#include <unistd.h>

#include "fused/core/board.h"

static uint64_t new_name(void)
{
    uint64_t name = 0;
    cr_assert_eq(getrandom(&name, sizeof(name), 0), sizeof(name));
    return name;
}

static struct prs_board *open_board(uint64_t name, uint32_t rank, uint32_t world)
{
    struct prs_board *b = NULL;
    struct prs_place at;
    prs_place_init(&at, rank, world, 1);
    cr_assert_eq(prs_board_open(name, &at, &b), 0);
    return b;
}

Test(board, all_have_left_when_each_says_so)
{
    uint64_t name = new_name();
    struct prs_board *b[3];
    for (uint32_t i = 0; i < 3; i++)
        b[i] = open_board(name, i, 3);
    prs_board_hide(b[0]);
    prs_board_leave(b[1]);
    cr_assert_not(prs_board_all_left(b[0]), "rank 2 is still there");
    prs_board_leave(b[2]);
    cr_assert(prs_board_all_left(b[0]));
    cr_assert_not(prs_board_all_left(b[1]), "rank 0 is still there");
    for (uint32_t i = 0; i < 3; i++)
        prs_board_close(b[i]);
}

/* A board that is hidden is found by nobody, so that a name never leads to an old board. */
Test(board, a_hidden_board_is_not_found)
{
    uint64_t name = new_name();
    struct prs_board *old = open_board(name, 0, 2), *other;
    prs_board_hide(old);
    other = open_board(name, 1, 2);
    prs_board_leave(other);
    cr_assert_not(prs_board_all_left(old));
    prs_board_hide(other);
    prs_board_close(other);
    prs_board_close(old);
}

/* The process of rank 1 is killed, before or after its parent has waited for it. */
Test(board, a_process_that_has_ended_has_left, .timeout = 60)
{
    uint64_t name = new_name();
    struct prs_board *b = open_board(name, 0, 2);
    int ready[2];
    char byte;
    pid_t pid;
    cr_assert_eq(pipe(ready), 0);
    pid = fork();
    if (pid == 0) {
        (void)open_board(name, 1, 2);
        (void)!write(ready[1], "", 1);
        for (;;)
            (void)pause();
    }
    cr_assert_eq(read(ready[0], &byte, 1), 1);
    prs_board_hide(b);
    cr_assert_not(prs_board_all_left(b), "rank 1 runs");
    cr_assert_eq(kill(pid, SIGKILL), 0);
    for (int i = 0; i < 1000 && !prs_board_all_left(b); i++)
        (void)usleep(10000);
    cr_assert(prs_board_all_left(b), "its process has ended, and nobody has waited for it");
    cr_assert_eq(waitpid(pid, NULL, 0), pid);
    cr_assert(prs_board_all_left(b));
    prs_board_close(b);
}

enum { LONG_MS = 60000, SHORT_MS = 50 };

struct gathering {
    struct prs_board *board;
    uint32_t missing;
    int result;
};

static void *gather(void *arg)
{
    struct gathering *g = arg;
    g->result = prs_board_gather(g->board, LONG_MS, &g->missing);
    return NULL;
}

static void expect_all_come(struct prs_board *const *b, uint32_t world)
{
    struct gathering g[PRS_MAX_LOCAL_RANKS];
    pthread_t thread[PRS_MAX_LOCAL_RANKS];
    for (uint32_t i = 0; i < world; i++) {
        g[i] = (struct gathering){.board = b[i], .result = 1};
        cr_assert_eq(pthread_create(&thread[i], NULL, gather, &g[i]), 0);
    }
    for (uint32_t i = 0; i < world; i++) {
        cr_assert_eq(pthread_join(thread[i], NULL), 0);
        cr_assert_eq(g[i].result, 0, "rank %u: %d, missing %u", i, g[i].result, g[i].missing);
    }
}

/* Often, so that words of earlier gatherings are used again. */
Test(board, ranks_gather_until_one_is_late_and_again_afterwards, .timeout = 120)
{
    uint64_t name = new_name();
    uint32_t missing;
    struct prs_board *b[3];
    for (uint32_t i = 0; i < 3; i++)
        b[i] = open_board(name, i, 3);
    prs_board_hide(b[0]);
    for (uint32_t round = 0; round < 12; round++) {
        expect_all_come(b, 3);
        for (uint32_t i = 0; i < 3; i++) {
            cr_assert_eq(prs_board_gather(b[i], i == 0 ? SHORT_MS : LONG_MS, &missing), -ETIMEDOUT);
            cr_assert_eq(missing, 1, "rank %u was told that rank %u is missing", i, missing);
        }
    }
    for (uint32_t i = 0; i < 3; i++)
        prs_board_close(b[i]);
}

/* Rank 0 gives up so often that its verdicts replace the one that rank 1 then looks for. */
Test(board, a_rank_that_comes_much_too_late_is_told_so, .timeout = 60)
{
    uint64_t name = new_name();
    uint32_t missing;
    struct prs_board *b[2] = {open_board(name, 0, 2), open_board(name, 1, 2)};
    prs_board_hide(b[0]);
    for (uint32_t i = 0; i < 40; i++)
        cr_assert_eq(prs_board_gather(b[0], 1, &missing), -ETIMEDOUT);
    for (uint32_t i = 0; i < 40; i++) {
        cr_assert_eq(prs_board_gather(b[1], LONG_MS, &missing), -ETIMEDOUT);
        cr_assert_eq(missing, 1);
    }
    expect_all_come(b, 2);
    prs_board_close(b[0]);
    prs_board_close(b[1]);
}

Test(board, nobody_waits_for_a_process_that_has_ended, .timeout = 50)
{
    uint64_t name = new_name();
    uint32_t missing = 9;
    struct prs_board *b = open_board(name, 0, 2);
    pid_t pid = fork();
    if (pid == 0) {
        (void)open_board(name, 1, 2);
        _exit(0);
    }
    cr_assert_eq(waitpid(pid, NULL, 0), pid);
    prs_board_hide(b);
    cr_assert_eq(prs_board_gather(b, LONG_MS, &missing), -ETIMEDOUT);
    cr_assert_eq(missing, 1);
    prs_board_close(b);
}

/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tools/common/rank_processes.h"
#include "tools/common/ranks.h"

enum { RANKS = 3, LONG_S = 100 };

/* What one rank does; the others wait until they are asked to end, or for ever. */
enum act { END_WELL, END_WITH_3, SKIP, DIE, HANG };

struct play {
    enum act act;
    uint32_t actor;
    bool deaf;         /* the others do not hear that they should end */
    uint32_t *give_up; /* shared by the ranks */
};

static int play(uint32_t rank, void *user)
{
    const struct play *p = user;
    time_t end = time(NULL) + LONG_S;

    if (rank == p->actor && p->act == DIE)
        raise(SIGKILL);
    if (rank == p->actor && p->act != HANG)
        return p->act == SKIP ? RANK_SKIPPED : p->act == END_WITH_3 ? 3 : 0;
    while (p->act != END_WELL && time(NULL) < end && (p->deaf || !__atomic_load_n(p->give_up, __ATOMIC_RELAXED)))
        usleep(1000);
    return p->act == END_WELL ? 0 : 1;
}

static void ask_to_end(void *user)
{
    __atomic_store_n(((struct play *)user)->give_up, 1, __ATOMIC_RELAXED);
}

Test(rank_processes, the_first_failure_decides_and_no_rank_is_left)
{
    static const struct {
        enum act act;
        bool deaf;
        uint32_t limit_s, grace_s, may_die;
        int status;
    } rows[] = {
        {END_WELL, false, 0, 0, 0, 0},
        {END_WITH_3, false, 0, LONG_S, 0, 1},
        {END_WITH_3, true, 0, 0, 0, 1}, /* killed at once */
        {END_WITH_3, true, LONG_S, 1, 0, 1},
        {SKIP, false, 0, LONG_S, 0, RANK_SKIPPED},
        {DIE, false, 0, LONG_S, 0, 1},
        {HANG, true, 1, 1, 0, 1},
        {DIE, true, 2, 1, 2, 1}, /* this one may die, but the others hang */
    };

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct play p = {rows[i].act, 1, rows[i].deaf, NULL};
        struct rank_processes processes = {
            .program = "test",
            .count = RANKS,
            .run = play,
            .give_up = ask_to_end,
            .user = &p,
            .limit_s = rows[i].limit_s,
            .grace_s = rows[i].grace_s,
            .may_die = rows[i].may_die,
        };
        time_t start = time(NULL);

        p.give_up = mmap(NULL, sizeof(*p.give_up), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        cr_assert_eq(rank_processes_run(&processes), rows[i].status, "row %zu", i);
        cr_assert_lt(time(NULL) - start, LONG_S / 2, "row %zu", i);
        cr_assert(waitpid(-1, NULL, WNOHANG) < 0 && errno == ECHILD, "row %zu", i);
        munmap(p.give_up, sizeof(*p.give_up));
    }
}

Test(rank_processes, too_many_ranks_are_refused)
{
    struct rank_processes none = {.program = "test", .run = play},
                          many = {.program = "test", .count = 257, .run = play};

    cr_assert_eq(rank_processes_run(&none), 1);
    cr_assert_eq(rank_processes_run(&many), 1);
}

static int gather(struct ranks *ranks, void *user)
{
    char mine[3 * RANKS_BLOCK_BYTES / 2], all[RANKS][3 * RANKS_BLOCK_BYTES / 2], want[12];
    const char *rank = getenv("RANK"), *size = getenv("WORLD_SIZE"), *node = getenv("SOFTNIC_NODE");
    int r;

    (void)user;
    snprintf(want, sizeof(want), "%u", ranks_rank(ranks));
    if (!rank || strcmp(rank, want) || !size || strcmp(size, "3") || !node || strcmp(node, rank[0] == '2' ? "1" : "0"))
        return 2;
    memset(mine, 'a' + (int)ranks_rank(ranks), sizeof(mine));
    r = ranks_allgather(ranks, mine, all, sizeof(mine));
    for (uint32_t i = 0; i < RANKS && r == 0; i++)
        r = all[i][0] == 'a' + (int)i && !memcmp(all[i], all[i] + 1, sizeof(all[i]) - 1) ? 0 : 3;
    __atomic_fetch_add(ranks_words(ranks), 1, __ATOMIC_RELEASE);
    return r ? r : ranks_wait_word(ranks, ranks_words(ranks), RANKS, NULL, NULL);
}

Test(ranks, all_get_what_each_brought_and_know_their_place)
{
    cr_assert_eq(ranks_run(RANKS, 2, LONG_S, gather, NULL), 0);
}

static int wait_for_none(struct ranks *ranks, void *user)
{
    (void)user;
    if (ranks_rank(ranks) == 0)
        return 1;
    return ranks_barrier(ranks) == -ECONNRESET ? 0 : 2;
}

Test(ranks, a_wait_for_a_rank_that_failed_ends)
{
    time_t start = time(NULL);

    cr_assert_eq(ranks_run(RANKS, 1, LONG_S, wait_for_none, NULL), 1);
    cr_assert_lt(time(NULL) - start, LONG_S / 2);
}

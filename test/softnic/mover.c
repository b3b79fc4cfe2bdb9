/* SPDX-License-Identifier: Apache-2.0 */
/* The threads that move large pieces, with a copy of our own in place of place.c's. */
#include "tools/softnic/mover.h"

#include <criterion/criterion.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { DONE = 7, LIMIT_MS = 5000 };

static pid_t mover;

int sn_place_start(struct sn_copy *copy)
{
    mover = gettid();
    return DONE;
}

/* Whether it is done within the limit. */
static bool moves(void)
{
    static struct sn_move move;

    sn_move_start(&move);
    for (int ms = 0; ms < LIMIT_MS; ms++) {
        /* M1: acquire; pairs with M2 in mover.c. */
        if (__atomic_load_n(&move.result, __ATOMIC_ACQUIRE) != SN_MOVE_UNDER_WAY)
            return move.result == DONE && mover != gettid();
        nanosleep(&(struct timespec){0, 1000000}, NULL);
    }
    return false;
}

Test(mover, a_forked_child_has_threads_of_its_own)
{
    int status;
    pid_t pid;

    cr_assert(moves());
    pid = fork();
    if (pid == 0)
        _exit(moves() ? 0 : 1);
    cr_assert_eq(waitpid(pid, &status, 0), pid);
    cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0, "nobody moved it");
    cr_assert(moves(), "the parent's go on");
}

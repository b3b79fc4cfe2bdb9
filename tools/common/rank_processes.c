/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/common/rank_processes.h"

#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tools/common/stdout_check.h"
#include "transport/util/clock.h"

enum { LOOK_NS = 2000000 };

struct children {
    const struct rank_processes *processes;
    pid_t pids[RANK_PROCESSES_MAX]; /* 0: ended */
    uint32_t started, left;
    int status;  /* status of all ranks: 0, RANK_SKIPPED or 1 */
    bool killed; /* by us */
    uint64_t progress, alive_ms;
};

void rank_setenv(const char *name, uint32_t value)
{
    char text[16];

    snprintf(text, sizeof(text), "%u", value);
    setenv(name, text, 1);
}

/* The first failure decides: the others mostly follow from it. */
static void fail(struct children *children, int status)
{
    const struct rank_processes *p = children->processes;

    if (children->status)
        return;
    children->status = status;
    children->alive_ms = prs_clock_ms();
    if (p->give_up)
        p->give_up(p->user);
}

static void start(struct children *children)
{
    const struct rank_processes *p = children->processes;

    fflush(NULL); /* else each rank would print the buffered output again */
    for (; children->started < p->count; children->started++) {
        pid_t pid = fork();

        if (pid == 0) {
            int status;

            prctl(PR_SET_PDEATHSIG, SIGKILL);
            status = p->run(children->started, p->user);
            if (stdout_is_lost(p->program) && !status) /* a rank ends without exit(), whose checks are made here */
                status = 1;
            fflush(NULL);
            _exit(status);
        }
        if (pid < 0) {
            fprintf(stderr, "%s: cannot fork rank %u: %s\n", p->program, children->started, strerror(errno));
            fail(children, 1);
            break;
        }
        children->pids[children->started] = pid;
    }
    children->left = children->started;
}

static void collect(struct children *children, uint32_t rank, int status)
{
    const struct rank_processes *p = children->processes;

    children->pids[rank] = 0;
    children->left--;
    if (p->progress)
        children->alive_ms = prs_clock_ms();
    if (status == 0 || (WIFSIGNALED(status) && rank + 1 == p->may_die))
        return;
    if (WIFSIGNALED(status) && !children->killed)
        fprintf(stderr, "%s: rank %u was killed by signal %d (%s)\n", p->program, rank, WTERMSIG(status),
                strsignal(WTERMSIG(status)));
    else if (WIFEXITED(status) && !children->status && WEXITSTATUS(status) != RANK_SKIPPED)
        fprintf(stderr, "%s: rank %u ended with status %d\n", p->program, rank, WEXITSTATUS(status));
    fail(children, WIFEXITED(status) && WEXITSTATUS(status) == RANK_SKIPPED ? RANK_SKIPPED : 1);
}

static void kill_if_late(struct children *children)
{
    const struct rank_processes *p = children->processes;
    uint64_t limit_s = children->status ? p->grace_s : p->limit_s;

    if (p->progress && p->progress(p->user) != children->progress) {
        children->progress = p->progress(p->user);
        children->alive_ms = prs_clock_ms();
    }
    if ((!limit_s && !children->status) || prs_clock_ms() - children->alive_ms < limit_s * 1000)
        return;
    for (uint32_t rank = 0; rank < children->started; rank++)
        if (children->pids[rank]) {
            if (limit_s)
                fprintf(stderr, "%s: rank %u shows no life for %llu s: killed\n", p->program, rank,
                        (unsigned long long)limit_s);
            kill(children->pids[rank], SIGKILL);
        }
    children->killed = true;
    fail(children, 1);
    children->status = 1;
    children->alive_ms = prs_clock_ms();
}

int rank_processes_run(const struct rank_processes *processes)
{
    struct children children = {.processes = processes, .alive_ms = prs_clock_ms()};

    if (processes->count == 0 || processes->count > RANK_PROCESSES_MAX) {
        fprintf(stderr, "%s: %u ranks: want 1 to %d\n", processes->program, processes->count, RANK_PROCESSES_MAX);
        return 1;
    }
    start(&children);
    while (children.left > 0) {
        for (uint32_t rank = 0; rank < children.started; rank++) {
            int status;

            if (children.pids[rank] && waitpid(children.pids[rank], &status, WNOHANG) == children.pids[rank])
                collect(&children, rank, status);
        }
        if (children.left > 0) {
            kill_if_late(&children);
            nanosleep(&(struct timespec){0, LOOK_NS}, NULL);
        }
    }
    return children.status;
}

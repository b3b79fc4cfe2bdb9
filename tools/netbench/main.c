/* SPDX-License-Identifier: Apache-2.0 */
/** perseus-netbench: forks the ranks and watches over them. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tools/netbench/rank.h"
#include "tools/netbench/report.h"

enum {
    LOOK_MS = 20,
    GRACE_S = 15, /* for what a rank does besides waiting: fill, check, close */
};

/** Before the plugin is loaded: what tells software NICs and plugins where a rank is. */
static void set_place(const struct options *options, int rank)
{
    int per_node = (options->ranks + options->nodes - 1) / options->nodes;
    char text[32];

    snprintf(text, sizeof(text), "%d", rank);
    setenv("RANK", text, 1);
    snprintf(text, sizeof(text), "%d", options->ranks);
    setenv("WORLD_SIZE", text, 1);
    snprintf(text, sizeof(text), "%d", rank % per_node);
    setenv("LOCAL_RANK", text, 1);
    if (options->nodes > 1) {
        snprintf(text, sizeof(text), "%d", rank / per_node);
        setenv("SOFTNIC_NODE", text, 1);
        snprintf(text, sizeof(text), "node%d", rank / per_node);
        setenv("NCCL_HOSTID", text, 1);
    }
}

/** Return how many could be forked. */
static int fork_ranks(const struct options *options, struct world *world, pid_t *pids)
{
    for (int rank = 0; rank < options->ranks; rank++) {
        pids[rank] = fork();
        if (pids[rank] < 0) {
            fprintf(stderr, "perseus-netbench: cannot fork rank %d: %s\n", rank, strerror(errno));
            return rank;
        }
        if (pids[rank] == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            set_place(options, rank);
            exit(rank_run(options, world, rank));
        }
    }
    return options->ranks;
}

static void reap(struct world *world, pid_t *pids, int rank, int status, int *running, bool *is_bad)
{
    pids[rank] = 0;
    --*running;
    if (status == 0)
        return;
    *is_bad = true;
    if (WIFSIGNALED(status))
        fprintf(stderr, "perseus-netbench: rank %d was killed by signal %d (%s)\n", rank, WTERMSIG(status),
                strsignal(WTERMSIG(status)));
    world_stop(world);
}

static uint64_t beats(const struct world *world)
{
    uint64_t sum = 0;

    for (int rank = 0; rank < world->ranks; rank++)
        sum += __atomic_load_n(&world->rank[rank].beats, __ATOMIC_RELAXED);
    return sum;
}

/** Wait for the ranks; when none shows life, or one has failed and others do not follow, kill them. Return exit status.
 */
static int watch(const struct options *options, struct world *world, pid_t *pids, int count)
{
    const struct timespec pause = {.tv_nsec = LOOK_MS * 1000000};
    double alive = world_now();
    uint64_t seen = 0;
    bool is_bad = count < options->ranks;
    int running = count;

    if (is_bad)
        world_stop(world);
    while (running > 0) {
        int longest_s = options->setup_timeout_s > options->timeout_s ? options->setup_timeout_s : options->timeout_s;
        int limit_s = world_stopped(world) ? GRACE_S : longest_s + GRACE_S;
        int before = running, status;

        for (int rank = 0; rank < count; rank++) {
            if (pids[rank] > 0 && waitpid(pids[rank], &status, WNOHANG) == pids[rank])
                reap(world, pids, rank, status, &running, &is_bad);
        }
        if (beats(world) != seen || running != before) {
            seen = beats(world);
            alive = world_now();
        }
        if (world_now() - alive > limit_s * 1e6) {
            for (int rank = 0; rank < count; rank++) {
                if (pids[rank] <= 0)
                    continue;
                fprintf(stderr,
                        "perseus-netbench: rank %d shows no life for %d s, inside a call that does not return: "
                        "killed\n",
                        rank, limit_s);
                kill(pids[rank], SIGKILL);
            }
            alive = world_now();
        }
        nanosleep(&pause, NULL);
    }
    return is_bad ? 1 : 0;
}

int main(int argc, char **argv)
{
    struct options options;
    struct world *world;
    pid_t pids[RANKS_MAX];
    int r = options_parse(&options, argc, argv);

    if (r > 0)
        return r - 1;
    if (world_open(&options, &world) < 0)
        return 1;
    report_head(&options);
    fflush(stdout);
    r = fork_ranks(&options, world, pids);
    return watch(&options, world, pids, r);
}

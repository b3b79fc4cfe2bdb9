/* SPDX-License-Identifier: Apache-2.0 */
/* perseus-netbench: starts the ranks and watches over them. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tools/common/rank_processes.h"
#include "tools/netbench/net.h"
#include "tools/netbench/rank.h"

enum { GRACE_S = 15 /* time for the work of a rank other than waiting: fill, check, close */ };

struct run {
    struct options options;
    struct job *jobs[SIDES_MAX]; /* the second: NULL without --peer */
};

/* Tell the software NIC and the plugin where the rank is. Must run before the plugin is loaded. */
static void set_environment(const struct options *options, int rank)
{
    int per_node = (options->ranks + options->nodes - 1) / options->nodes;
    char text[32];

    rank_setenv("RANK", (uint32_t)rank);
    rank_setenv("WORLD_SIZE", (uint32_t)options->ranks);
    rank_setenv("LOCAL_RANK", (uint32_t)(rank % per_node));
    if (options->nodes > 1) {
        rank_setenv("SOFTNIC_NODE", (uint32_t)(rank / per_node));
        snprintf(text, sizeof(text), "node%d", rank / per_node);
        setenv("NCCL_HOSTID", text, 1);
    }
}

static int run(uint32_t rank, void *user)
{
    struct run *run = user;

    set_environment(&run->options, (int)rank);
    exit(rank_run(&run->options, run->jobs, (int)rank)); /* runs the plugin's destructors */
}

static void give_up(void *user)
{
    struct run *run = user;

    for (int i = 0; i < SIDES_MAX && run->jobs[i]; i++)
        job_stop(run->jobs[i]);
}

static uint64_t count_beats(void *user)
{
    const struct run *run = user;
    uint64_t sum = 0;

    for (int i = 0; i < SIDES_MAX && run->jobs[i]; i++)
        for (int rank = 0; rank < run->options.ranks; rank++)
            sum += __atomic_load_n(&run->jobs[i]->rank[rank].beats, __ATOMIC_RELAXED);
    return sum;
}

/* Try to load the plugin in a process of its own, so that a plugin that cannot be loaded is reported once and not by
 * each rank. The ranks load it themselves, since a plugin reads the environment of its rank. */
static bool can_load(const char *plugin, int api)
{
    int status = 1;
    pid_t pid = fork();

    if (pid == 0) {
        struct net net;

        _exit(net_load(&net, plugin, api) < 0 ? 1 : 0);
    }
    if (pid < 0)
        perror("perseus-netbench: fork");
    else
        waitpid(pid, &status, 0);
    if (pid > 0 && WIFSIGNALED(status))
        fprintf(stderr, "perseus-netbench: %s: loading it ended with signal %d\n", plugin, WTERMSIG(status));
    return pid > 0 && status == 0;
}

int main(int argc, char **argv)
{
    static struct run all;
    const struct options *options = &all.options;
    struct rank_processes ranks = {
        .program = "perseus-netbench",
        .run = run,
        .give_up = give_up,
        .progress = count_beats,
        .user = &all,
        .grace_s = GRACE_S,
    };

    options_parse(&all.options, argc, argv);
    if (!can_load(options->plugin, options->api) || (options->peer && !can_load(options->peer, options->api)))
        return 1;
    if (job_open(options, &all.jobs[0]) < 0 || (options->peer && job_open(options, &all.jobs[1]) < 0))
        return 1;
    ranks.count = (uint32_t)options->ranks;
    ranks.limit_s =
        (uint32_t)(options->setup_timeout_s > options->timeout_s ? options->setup_timeout_s : options->timeout_s);
    ranks.limit_s += GRACE_S;
    return rank_processes_run(&ranks);
}

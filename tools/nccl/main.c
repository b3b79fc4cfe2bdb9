/* SPDX-License-Identifier: Apache-2.0 */
/* perseus-nccl-ranks: starts the ranks of one NCCL job in the environment that it is given. perseus-nccl runs it once
 * for each transport. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "tools/common/rank_processes.h"
#include "tools/nccl/collectives.h"

static struct options options;
static struct meeting *meeting;

static int run(uint32_t rank, void *user)
{
    (void)user;
    exit(collectives_run(&options, meeting, rank)); /* runs the destructors of CUDA and NCCL */
}

static void give_up(void *user)
{
    (void)user;
    atomic_store(&meeting->failed, true);
}

int main(int argc, char **argv)
{
    struct rank_processes ranks = {
        .program = "perseus-nccl",
        .run = run,
        .give_up = give_up,
        .grace_s = 1, /* the others may still be printing why they failed */
    };

    options_parse(&options, argc, argv);
    meeting = mmap(NULL, sizeof(*meeting), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (meeting == MAP_FAILED) {
        perror("perseus-nccl-ranks: shared memory");
        return 1;
    }
    ranks.count = options.ranks;
    return rank_processes_run(&ranks);
}

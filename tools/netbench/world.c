/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/netbench/world.h"

#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "transport/util/clock.h"

enum { BARRIER_SPINS = 200 };

static size_t meetings(const struct options *options)
{
    return (size_t)options->ranks * options->ranks * options->comms;
}

static size_t world_bytes(const struct options *options)
{
    return sizeof(struct world) + meetings(options) * sizeof(struct meeting) +
           (size_t)options->ranks * options->iters * sizeof(double);
}

int world_open(const struct options *options, struct world **out)
{
    size_t bytes = world_bytes(options);
    struct world *world = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    if (world == MAP_FAILED) {
        fprintf(stderr, "perseus-netbench: cannot map %zu bytes to share: %s\n", bytes, strerror(errno));
        return -errno;
    }
    world->ranks = options->ranks;
    world->comms = options->comms;
    world->usec = (double *)(world + 1);
    world->meeting = (struct meeting *)(world->usec + (size_t)options->ranks * options->iters);
    *out = world;
    return 0;
}

struct meeting *world_meeting(struct world *world, int receiver, int sender, int comm)
{
    return &world->meeting[((size_t)receiver * world->ranks + sender) * world->comms + comm];
}

double *world_usec(struct world *world, int rank)
{
    /* The meetings lie behind the times, so their distance tells how many a rank has. */
    size_t all = (size_t)((double *)world->meeting - world->usec);

    return world->usec + (size_t)rank * (all / world->ranks);
}

static long futex(uint32_t *word, int operation, uint32_t value, const struct timespec *timeout)
{
    return syscall(SYS_futex, word, operation, value, timeout, NULL, 0);
}

void world_stop(struct world *world)
{
    __atomic_store_n(&world->stop, 1, __ATOMIC_RELEASE);
    futex(&world->generation, FUTEX_WAKE, INT32_MAX, NULL);
}

bool world_stopped(const struct world *world)
{
    return __atomic_load_n(&world->stop, __ATOMIC_ACQUIRE);
}

double world_now(void)
{
    return (double)prs_clock_ns() / 1e3;
}

int world_barrier(struct world *world, int timeout_s)
{
    uint32_t generation = __atomic_load_n(&world->generation, __ATOMIC_ACQUIRE);
    double give_up = world_now() + timeout_s * 1e6;

    /* B1: all that this rank did before is seen by those who pass. Pairs with B2. */
    if (__atomic_add_fetch(&world->arrived, 1, __ATOMIC_ACQ_REL) == (uint32_t)world->ranks) {
        __atomic_store_n(&world->arrived, 0, __ATOMIC_RELAXED);
        __atomic_add_fetch(&world->generation, 1, __ATOMIC_RELEASE);
        futex(&world->generation, FUTEX_WAKE, INT32_MAX, NULL);
        return world_stopped(world) ? -ECANCELED : 0;
    }
    for (int i = 0;; i++) {
        const struct timespec tenth = {.tv_nsec = 100000000};

        if (world_stopped(world))
            return -ECANCELED;
        /* B2: pairs with B1 of the last to arrive. */
        if (__atomic_load_n(&world->generation, __ATOMIC_ACQUIRE) != generation)
            return 0;
        if (world_now() > give_up)
            return -ETIMEDOUT;
        if (i < BARRIER_SPINS)
            sched_yield();
        else
            futex(&world->generation, FUTEX_WAIT, generation, &tenth);
    }
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/netbench/job.h"

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

static size_t job_bytes(const struct options *options)
{
    return sizeof(struct job) + meetings(options) * sizeof(struct meeting) +
           (size_t)options->ranks * options->iters * sizeof(double);
}

int job_open(const struct options *options, struct job **out)
{
    size_t bytes = job_bytes(options);
    struct job *job = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    if (job == MAP_FAILED) {
        fprintf(stderr, "perseus-netbench: cannot map %zu bytes of shared memory: %s\n", bytes, strerror(errno));
        return -errno;
    }
    job->ranks = options->ranks;
    job->comms = options->comms;
    job->usec = (double *)(job + 1);
    job->meeting = (struct meeting *)(job->usec + (size_t)options->ranks * options->iters);
    *out = job;
    return 0;
}

struct meeting *job_meeting(struct job *job, int receiver, int sender, int comm)
{
    return &job->meeting[((size_t)receiver * job->ranks + sender) * job->comms + comm];
}

double *job_usec(struct job *job, int rank)
{
    /* job->meeting follows job->usec in memory, so their distance is the number of times. */
    size_t all = (size_t)((double *)job->meeting - job->usec);

    return job->usec + (size_t)rank * (all / job->ranks);
}

static long futex(uint32_t *word, int operation, uint32_t value, const struct timespec *timeout)
{
    return syscall(SYS_futex, word, operation, value, timeout, NULL, 0);
}

void job_stop(struct job *job)
{
    __atomic_store_n(&job->stop, 1, __ATOMIC_RELEASE);
    futex(&job->generation, FUTEX_WAKE, INT32_MAX, NULL);
}

bool job_stopped(const struct job *job)
{
    return __atomic_load_n(&job->stop, __ATOMIC_ACQUIRE);
}

double job_now(void)
{
    return (double)prs_clock_ns() / 1e3;
}

int job_barrier(struct job *job, int timeout_s)
{
    uint32_t generation = __atomic_load_n(&job->generation, __ATOMIC_ACQUIRE);
    double give_up = job_now() + timeout_s * 1e6;

    /* [netbench-barrier]: everything that this rank did before is visible to each rank that passes; its pair is
     * below. */
    if (__atomic_add_fetch(&job->arrived, 1, __ATOMIC_ACQ_REL) == (uint32_t)job->ranks) {
        __atomic_store_n(&job->arrived, 0, __ATOMIC_RELAXED);
        __atomic_add_fetch(&job->generation, 1, __ATOMIC_RELEASE);
        futex(&job->generation, FUTEX_WAKE, INT32_MAX, NULL);
        return job_stopped(job) ? -ECANCELED : 0;
    }
    for (int i = 0;; i++) {
        const struct timespec tenth = {.tv_nsec = 100000000};

        if (job_stopped(job))
            return -ECANCELED;
        /* [netbench-barrier]: pairs with the addition by the rank that arrives last. */
        if (__atomic_load_n(&job->generation, __ATOMIC_ACQUIRE) != generation)
            return 0;
        if (job_now() > give_up)
            return -ETIMEDOUT;
        if (i < BARRIER_SPINS)
            sched_yield();
        else
            futex(&job->generation, FUTEX_WAIT, generation, &tenth);
    }
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/cuda/gpu_wait.h"

#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { LINE_S = 4, LIMIT_S = 30, SEEN = 16384, PROBES = 64 };

/* Shared by the thread that waits and the thread that calls the driver; the last of them to leave frees it. */
struct wait {
    void *ctx;
    sem_t ended;
    int users;
};

static struct sn_gpu_wait_calls driver;
static uint64_t seen[SEEN]; /* hashes; 0: free */
static int captures;

void sn_gpu_wait_open(const struct sn_gpu_wait_calls *calls)
{
    driver = *calls;
}

static void leave(struct wait *wait)
{
    if (__atomic_sub_fetch(&wait->users, 1, __ATOMIC_ACQ_REL))
        return;
    sem_destroy(&wait->ended);
    free(wait);
}

static void *synchronize(void *arg)
{
    struct wait *wait = arg;

    if (driver.ctx_set(wait->ctx) == 0)
        driver.ctx_synchronize(); /* the call itself will return the error, too */
    sem_post(&wait->ended);
    leave(wait);
    return NULL;
}

static bool start(struct wait *wait)
{
    sigset_t all, old;
    pthread_t thread;

    sigfillset(&all); /* signals are the application's */
    pthread_sigmask(SIG_SETMASK, &all, &old);
    bool started = pthread_create(&thread, NULL, synchronize, wait) == 0;
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (started)
        pthread_detach(thread);
    return started;
}

static bool ended_within(struct wait *wait, int seconds)
{
    struct timespec until;
    int r;

    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += seconds;
    do
        r = sem_clockwait(&wait->ended, CLOCK_MONOTONIC, &until);
    while (r && errno == EINTR);
    return r == 0;
}

/* The driver's own call for this has no time limit, so a thread makes it. */
void sn_gpu_wait(const char *name)
{
    static int told;
    struct wait *wait;
    void *ctx = NULL;

    if (__atomic_load_n(&captures, __ATOMIC_ACQUIRE) > 0 || driver.ctx_get(&ctx) || !ctx)
        return;
    wait = malloc(sizeof(*wait));
    if (!wait)
        return;
    *wait = (struct wait){.ctx = ctx, .users = 2};
    sem_init(&wait->ended, 0, 0);
    if (!start(wait)) {
        leave(wait);
    } else if (!ended_within(wait, LINE_S)) {
        const char *log = getenv("SOFTNIC_LOG");
        if (!__atomic_exchange_n(&told, 1, __ATOMIC_RELAXED) && (!log || strcmp(log, "none") != 0))
            fprintf(
                stderr,
                "softnic: pid %d: %s waits for the GPU's work to end (up to %d s), because the CUDA driver may wait "
                "for it with a lock held that the NIC needs. If that work waits for this call, start the program "
                "with softnic-run --plain-cuda\n",
                getpid(), name, LIMIT_S);
        ended_within(wait, LIMIT_S - LINE_S);
    }
    leave(wait);
}

static uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 32) * 0x9e3779b97f4a7c15u;
    return x ^ x >> 29;
}

bool sn_gpu_first(uint64_t a, uint64_t b)
{
    void *ctx = NULL;

    if (driver.ctx_get(&ctx) || !ctx)
        return false;
    uint64_t key = mix(mix(mix((uintptr_t)ctx) + a) + b) | 1;
    for (uint64_t i = key >> 32; i < (key >> 32) + PROBES; i++) {
        uint64_t old = __atomic_load_n(&seen[i % SEEN], __ATOMIC_RELAXED);
        if (old == key)
            return false;
        if (!old && __atomic_compare_exchange_n(&seen[i % SEEN], &old, key, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
            return true;
        if (old == key)
            return false; /* another thread waits for it */
    }
    sn_gpu_forget(); /* full */
    return true;
}

void sn_gpu_forget(void)
{
    for (int i = 0; i < SEEN; i++)
        __atomic_store_n(&seen[i], 0, __ATOMIC_RELAXED);
}

void sn_gpu_captures(int more)
{
    __atomic_add_fetch(&captures, more, __ATOMIC_ACQ_REL);
}

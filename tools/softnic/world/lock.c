/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/world/lock.h"

#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include "tools/softnic/world/proc.h"

enum {
    LOCK_SPINS = 200,    /* about as long as the longest holder needs */
    LOCK_NAP_NS = 20000, /* sleep, not yield: a real-time waiter that yields starves a preempted holder for ever */
    LOCK_DEATH_CHECK_NAPS = 25,    /* reading /proc costs 10 us; do it every half millisecond */
    LOCK_DEATH_CHECK_TRIES = 4096, /* for callers that do other work between tries */
    /* some seconds; then take it even from a holder that is stopped or whose pid was reused */
    LOCK_PATIENCE_NAPS = 100000
};

uint32_t sn_pid;

static void pid_refresh(void)
{
    sn_pid = (uint32_t)getpid();
}

static __attribute__((constructor)) void pid_init(void)
{
    pid_refresh();
    pthread_atfork(NULL, NULL, pid_refresh);
}

static bool lock_try(struct sn_lock *lock, uint32_t expected)
{
    return __atomic_compare_exchange_n(&lock->owner, &expected, sn_pid, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
}

static bool lock_relieve(struct sn_lock *lock, uint32_t holder, uint32_t naps)
{
    bool dead = holder != sn_pid && !sn_pid_runs(holder);

    if (!dead && naps < LOCK_PATIENCE_NAPS)
        return false;
    if (!lock_try(lock, holder))
        return false;
    __atomic_fetch_add(&lock->stolen, 1, __ATOMIC_RELAXED);
    if (!dead)
        sn_log("lock %p: held for %u naps by pid %u, which runs but does not let go (stopped?); taken from it",
               (void *)lock, naps, holder);
    return true;
}

void sn_lock_slow(struct sn_lock *lock)
{
    struct timespec nap = {0, LOCK_NAP_NS};

    for (int i = 0; i < LOCK_SPINS; i++) {
        if (__atomic_load_n(&lock->owner, __ATOMIC_RELAXED) == 0 && lock_try(lock, 0))
            return;
        sn_cpu_relax();
    }
    for (uint32_t naps = 1;; naps++) {
        uint32_t holder = __atomic_load_n(&lock->owner, __ATOMIC_RELAXED);

        if (holder == 0 && lock_try(lock, 0))
            return;
        if (holder != 0 && naps % LOCK_DEATH_CHECK_NAPS == 0 && lock_relieve(lock, holder, naps))
            return;
        nanosleep(&nap, NULL);
    }
}

bool sn_lock_try(struct sn_lock *lock, uint32_t *tries)
{
    uint32_t holder;

    if (lock_try(lock, 0)) /* [lock] acquire; pairs with sn_lock_drop */
        return true;
    holder = __atomic_load_n(&lock->owner, __ATOMIC_RELAXED);
    return holder != 0 && ++*tries % LOCK_DEATH_CHECK_TRIES == 0 && lock_relieve(lock, holder, 0);
}

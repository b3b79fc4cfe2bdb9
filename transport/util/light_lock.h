/* SPDX-License-Identifier: Apache-2.0 */
/* A recursive lock for what one thread takes at each poll, and others hardly ever. A thread that finds it taken
 * yields. */
#ifndef TRANSPORT_UTIL_LIGHT_LOCK_H
#define TRANSPORT_UTIL_LIGHT_LOCK_H

#include <pthread.h>

#include "transport/util/spin.h"

/* All zero: the lock is free. */
struct prs_light_lock {
    uint32_t held;
    uint32_t depth;   /* how often the holder has taken the lock again */
    pthread_t holder; /* a thread finds its own id here only while it is the holder; 0: nobody */
};

/* Return whether the caller holds the lock now. */
static inline bool prs_light_lock_try(struct prs_light_lock *lock)
{
    pthread_t self = pthread_self();

    if (__atomic_load_n(&lock->holder, __ATOMIC_RELAXED) == self) {
        lock->depth++;
        return true;
    }
    if (!prs_spin_trylock(&lock->held))
        return false;
    __atomic_store_n(&lock->holder, self, __ATOMIC_RELAXED);
    return true;
}

static inline void prs_light_lock_take(struct prs_light_lock *lock)
{
    while (!prs_light_lock_try(lock))
        sched_yield();
}

static inline void prs_light_lock_give(struct prs_light_lock *lock)
{
    if (lock->depth) {
        lock->depth--;
        return;
    }
    __atomic_store_n(&lock->holder, 0, __ATOMIC_RELAXED);
    prs_spin_unlock(&lock->held);
}

#endif

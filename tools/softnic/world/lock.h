/* SPDX-License-Identifier: Apache-2.0 */
/* Locks in shared memory that survive a killed holder: the word is the holder's pid, and a waiter takes the lock from a
 * holder that no longer runs. The data they protect is written so that a half-done update loses at most one entry,
 * never the structure. */
#ifndef SOFTNIC_LOCK_H
#define SOFTNIC_LOCK_H

#include "tools/softnic/world/world.h"

void sn_lock_slow(struct sn_lock *lock);
extern uint32_t sn_pid; /* this process's pid; lock.c updates it after fork */

static inline void sn_lock_take(struct sn_lock *lock)
{
    uint32_t idle = 0;

    /* [lock] acquire; pairs with sn_lock_drop. */
    if (!__atomic_compare_exchange_n(&lock->owner, &idle, sn_pid, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
        sn_lock_slow(lock);
}

/* Take the lock if it is free; for callers that try again later. tries: 0 before the first try. */
bool sn_lock_try(struct sn_lock *lock, uint32_t *tries);

static inline void sn_lock_drop(struct sn_lock *lock)
{
    /* [lock] release; pairs with sn_lock_take, sn_lock_slow and sn_lock_try. */
    __atomic_store_n(&lock->owner, 0, __ATOMIC_RELEASE);
}

static inline void sn_cpu_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#endif

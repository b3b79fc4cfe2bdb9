/* SPDX-License-Identifier: Apache-2.0 */
/* Locks in shared memory that survive a killed holder: the word is the holder's pid, and a waiter relieves a holder
 * that no longer runs. What they protect is written so that a half-done update loses at most one entry, never the
 * structure. */
#ifndef SOFTNIC_LOCK_H
#define SOFTNIC_LOCK_H

#include "tools/softnic/world/world.h"

void sn_lock_slow(struct sn_lock *lock);
extern uint32_t sn_pid; /* this process; kept right across fork by lock.c */

static inline void sn_lock_take(struct sn_lock *lock)
{
    uint32_t idle = 0;

    /* L1: acquire; pairs with L2 in sn_lock_drop. */
    if (!__atomic_compare_exchange_n(&lock->owner, &idle, sn_pid, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
        sn_lock_slow(lock);
}

/** Take it if it is free; for who asks again and again and has other things to do. tries: 0 before the first. */
bool sn_lock_try(struct sn_lock *lock, uint32_t *tries);

static inline void sn_lock_drop(struct sn_lock *lock)
{
    /* L2: release; pairs with L1 and with the exchange in sn_lock_slow. */
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

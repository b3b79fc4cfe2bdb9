/* SPDX-License-Identifier: Apache-2.0 */
/* A lock that is held for a few hundred instructions, by each message once or twice: a mutex of the C library would
 * cost a large part of that. A thread that finds it taken yields, since the holder may wait for a processor. 0 is free.
 * It needs a word of its own, because gcc may read adjacent flags with one load. */
#ifndef TRANSPORT_UTIL_SPIN_H
#define TRANSPORT_UTIL_SPIN_H

#include <sched.h>
#include <stdbool.h>
#include <stdint.h>

static inline bool prs_spin_trylock(uint32_t *locked)
{
    /* [spin] acquires what the last holder did under the lock */
    return !__atomic_exchange_n(locked, 1, __ATOMIC_ACQUIRE);
}

static inline void prs_spin_lock(uint32_t *locked)
{
    while (!prs_spin_trylock(locked))
        sched_yield();
}

static inline void prs_spin_unlock(uint32_t *locked)
{
    __atomic_store_n(locked, 0, __ATOMIC_RELEASE); /* [spin] for the next holder */
}

#endif

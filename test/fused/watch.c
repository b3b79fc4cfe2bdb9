/* SPDX-License-Identifier: Apache-2.0 */
#include "test/fused/watch.h"

#include <sched.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#include "fused/schedule.h"

uint32_t watch_load(const uint32_t *p)
{
    return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}

void watch_raise(uint32_t *p, uint32_t v)
{
    __atomic_store_n(p, v, __ATOMIC_RELEASE);
}

void watch_add(uint32_t *p)
{
    __atomic_fetch_add(p, 1, __ATOMIC_RELEASE);
}

uint32_t watch_count(uint32_t *p)
{
    return __atomic_add_fetch(p, 1, __ATOMIC_ACQ_REL);
}

void watch_fail(struct watch *w, const char *what, uint32_t rank, uint32_t index, uint32_t from, uint32_t want,
                uint32_t seen)
{
    uint32_t none = 0;
    if (!__atomic_compare_exchange_n(&w->failed, &none, 1, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
        return;
    snprintf(w->text, sizeof(w->text), "rank %u: %s %u of rank %u: want %u, have %u", rank, what, index, from, want,
             seen);
    watch_raise(&w->failed, 2);
}

static bool wait_for(struct watch *w, const uint32_t *flag, uint32_t want, bool exactly, const char *what,
                     uint32_t rank, uint32_t index, uint32_t from)
{
    time_t give_up = time(NULL) + (from == rank ? 4 : 1) * w->wait_seconds; /* within a GPU nobody looks at the clock */
    for (uint32_t spins = 1;; spins++) {
        uint32_t seen = watch_load(flag);
        if (exactly ? seen == want : prs_flag_reached(seen, want))
            return true;
        if (watch_load(&w->failed) != 0)
            return false;
        if (spins % 1024 == 0 && time(NULL) > give_up) {
            watch_fail(w, what, rank, index, from, want, seen);
            return false;
        }
        sched_yield();
    }
}

bool watch_wait(struct watch *w, const uint32_t *flag, uint32_t want, const char *what, uint32_t rank, uint32_t index,
                uint32_t from)
{
    return wait_for(w, flag, want, false, what, rank, index, from);
}

bool watch_wait_exactly(struct watch *w, const uint32_t *flag, uint32_t want, const char *what, uint32_t rank,
                        uint32_t index, uint32_t from)
{
    return wait_for(w, flag, want, true, what, rank, index, from);
}

void watch_dawdle(uint32_t *random)
{
    *random = *random * 1664525u + 1013904223u;
    if (*random >> 26 == 0)
        usleep(*random >> 8 & 127);
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "test/fused/watch.h"

#include <linux/futex.h>
#include <limits.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "fused/schedule.h"

uint32_t watch_load(const uint32_t *p)
{
    return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}

static void wake(uint32_t *p)
{
    syscall(SYS_futex, p, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

void watch_pause(const uint32_t *p, uint32_t seen)
{
    /* Also because nothing wakes it when somebody failed. */
    syscall(SYS_futex, p, FUTEX_WAIT_PRIVATE, seen, &(struct timespec){.tv_nsec = 10000000}, NULL, 0);
}

void watch_raise(uint32_t *p, uint32_t v)
{
    __atomic_store_n(p, v, __ATOMIC_RELEASE);
    wake(p);
}

void watch_add(uint32_t *p)
{
    __atomic_fetch_add(p, 1, __ATOMIC_RELEASE);
    wake(p);
}

uint32_t watch_count(uint32_t *p)
{
    uint32_t sum = __atomic_add_fetch(p, 1, __ATOMIC_ACQ_REL);
    wake(p);
    return sum;
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

static uint64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

bool watch_leaves(struct watch *w, uint32_t launch)
{
    if (w->lost_after == 0 || launch <= w->lost_after)
        return false;
    if (__atomic_sub_fetch(&w->leaving, 1, __ATOMIC_ACQ_REL) == 0)
        __atomic_store_n(&w->lost_when, now(), __ATOMIC_RELEASE);
    return true;
}

/* A word within a rank waits for threads that wait for other ranks: those shall name the lost one. */
static bool too_late(const struct watch *w, uint64_t began, bool within)
{
    uint64_t lost = __atomic_load_n(&w->lost_when, __ATOMIC_ACQUIRE);
    if (lost == 0 || within)
        return now() > began + WAIT_SECONDS * 1000000000ull;
    return now() > (lost > began ? lost : began) + LOST_SECONDS * 1000000000ull;
}

static bool wait_for(struct watch *w, const uint32_t *flag, uint32_t want, bool exactly, const char *what,
                     uint32_t rank, uint32_t index, uint32_t from)
{
    uint64_t began = now();
    for (;;) {
        uint32_t seen = watch_load(flag);
        if (exactly ? seen == want : prs_flag_reached(seen, want))
            return true;
        if (watch_load(&w->failed) != 0)
            return false;
        if (too_late(w, began, from == rank)) {
            watch_fail(w, what, rank, index, from, want, seen);
            return false;
        }
        watch_pause(flag, seen);
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

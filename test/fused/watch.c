/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <linux/futex.h>
#include <limits.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "test/fused/watch.h"
#include "fused/gemm/schedule.h"

uint32_t watch_load(const uint32_t *p)
{
    return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}

/* Number of threads that sleep at a word, or at another word with the same hash. Most words are raised while no thread
 * sleeps, and then the kernel need not be called. Relaxed: a wait that is missing in the model must stay visible to
 * ThreadSanitizer. */
static uint32_t sleepers[256];

static uint32_t *sleepers_at(const uint32_t *p)
{
    return &sleepers[(uint32_t)((uintptr_t)p / sizeof(*p) * 0x9e3779b97f4a7c15ull >> 56)];
}

static void wake(uint32_t *p)
{
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* the word first, then the sleepers; watch_pause() the other way round */
    if (__atomic_load_n(sleepers_at(p), __ATOMIC_RELAXED) == 0)
        return;
    syscall(SYS_futex, p, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

void watch_pause(const uint32_t *p, uint32_t seen)
{
    (void)__atomic_fetch_add(sleepers_at(p), 1, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    /* Sleeps 10 ms at most, because nothing wakes it when another thread has failed. */
    syscall(SYS_futex, p, FUTEX_WAIT_PRIVATE, seen, &(struct timespec){.tv_nsec = 10000000}, NULL, 0);
    (void)__atomic_fetch_sub(sleepers_at(p), 1, __ATOMIC_RELAXED);
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

void watch_init(struct watch *w, uint32_t threads, uint32_t of_last_node, uint32_t lost_after)
{
    cr_assert_leq(threads, WATCH_THREADS);
    w->lost_after = lost_after;
    w->leaving = of_last_node;
    w->staying = threads - of_last_node;
    pthread_mutex_init(&w->lock, NULL);
}

bool watch_leaves(struct watch *w, uint32_t launch)
{
    if (w->lost_after == 0 || launch <= w->lost_after)
        return false;
    (void)__atomic_sub_fetch(&w->leaving, 1, __ATOMIC_ACQ_REL);
    return true;
}

static bool has_come(const struct watch_word *wait, uint32_t *seen)
{
    *seen = watch_load(wait->flag);
    return wait->exactly ? *seen == wait->want : prs_flag_reached(*seen, wait->want);
}

/* Done only once the node is lost. Earlier, a lock that all threads take would hide missing waits from
 * ThreadSanitizer. */
static void write_down(struct watch *w, const struct watch_word *wait)
{
    pthread_mutex_lock(&w->lock);
    w->waiting[w->waiting_count++] = wait;
    pthread_mutex_unlock(&w->lock);
}

static void strike_out(struct watch *w, const struct watch_word *wait)
{
    uint32_t i = 0;
    pthread_mutex_lock(&w->lock);
    while (w->waiting[i] != wait)
        i++;
    w->waiting[i] = w->waiting[--w->waiting_count];
    pthread_mutex_unlock(&w->lock);
}

/* True when nothing can change any more: all remaining threads wait, the NICs have nothing to do, and no awaited word
 * has come. A thread in the list raises no flag and posts nothing, so a state seen under the lock remains. */
static bool all_wait_in_vain(struct watch *w)
{
    bool vain;
    pthread_mutex_lock(&w->lock);
    /* Acquire: pairs with the release of nic.c, so that the flags that a NIC raised are seen. */
    vain = w->waiting_count == w->staying && __atomic_load_n(&w->under_way, __ATOMIC_ACQUIRE) == 0;
    for (uint32_t i = 0; i < w->waiting_count && vain; i++) {
        uint32_t seen;
        vain = !has_come(w->waiting[i], &seen);
    }
    pthread_mutex_unlock(&w->lock);
    return vain;
}

static bool wait_for(struct watch *w, const struct watch_word *wait, const char *what, uint32_t rank, uint32_t index,
                     uint32_t from)
{
    uint64_t began = now();
    bool is_written = false, in_time = false;
    uint32_t seen;
    while (!(in_time = has_come(wait, &seen)) && watch_load(&w->failed) == 0) {
        bool is_lost = w->lost_after != 0 && watch_load(&w->leaving) == 0;
        if (is_lost && !is_written) {
            write_down(w, wait);
            is_written = true;
        }
        /* A wait inside a rank is for threads that wait for other ranks: those threads are to name the lost rank. */
        if ((is_lost && from != rank && all_wait_in_vain(w)) || now() > began + WAIT_SECONDS * 1000000000ull)
            watch_fail(w, what, rank, index, from, wait->want, seen);
        else
            watch_pause(wait->flag, seen);
    }
    if (is_written)
        strike_out(w, wait);
    return in_time;
}

bool watch_wait(struct watch *w, const uint32_t *flag, uint32_t want, const char *what, uint32_t rank, uint32_t index,
                uint32_t from)
{
    return wait_for(w, &(struct watch_word){flag, want, false}, what, rank, index, from);
}

bool watch_wait_exactly(struct watch *w, const uint32_t *flag, uint32_t want, const char *what, uint32_t rank,
                        uint32_t index, uint32_t from)
{
    return wait_for(w, &(struct watch_word){flag, want, true}, what, rank, index, from);
}

void watch_dawdle(uint32_t *random)
{
    *random = *random * 1664525u + 1013904223u;
    if (*random >> 26 == 0)
        usleep(*random >> 8 & 127);
}

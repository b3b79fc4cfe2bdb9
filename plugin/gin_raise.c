/* SPDX-License-Identifier: Apache-2.0 */
/* Signals that this process raises (policy `counted`, rails without atomics) may have arrived, but not been raised,
 * when their window is released. If one were raised later, the memory of its word would be gone, and the peer would
 * fail.
 *
 * A rank that releases a window knows that no rank still sends to it. Every signal is then done at its sender and has
 * arrived here, and only the thread that drives the sets has work left. That thread says when it has raised them all.
 * No other rank is asked. One thread at a time drives a set: a new one has called progress before the old one releases
 * memory. */
#include <errno.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "plugin/gin.h"
#include "transport/util/compiler.h"
#include "transport/util/log.h"
#include "transport/util/patience.h"

enum {
    /* limits if traffic never pauses: after both, signals older than the question have been raised */
    BUSY_ROUNDS = 1000,
    BUSY_MS = 100,
    /* limit for a thread that rarely calls progress: it may itself be waiting for the thread that releases memory */
    SLOW_MS = 2000,
    LOOK_NS = 1000000,
};

static pid_t this_thread(void)
{
    static _Thread_local pid_t id;

    if (unlikely(!id))
        id = (pid_t)syscall(SYS_gettid);
    return id;
}

static bool has_ended(pid_t thread)
{
    return syscall(SYS_tgkill, getpid(), thread, 0) != 0 && errno == ESRCH;
}

uint32_t gin_raise_asked(const struct gin_set *set)
{
    /* [raise-asked] The round that follows finds all that had arrived before the question. Pairs with
     * raise_in_set(). */
    return __atomic_load_n(&set->asked, __ATOMIC_ACQUIRE);
}

void gin_raise_answer(struct gin_set *set, uint32_t asked, int handled)
{
    __atomic_store_n(&set->driver, this_thread(), __ATOMIC_RELAXED);
    __atomic_store_n(&set->rounds, set->rounds + 1, __ATOMIC_RELAXED);
    if (asked == set->answered || handled > 0)
        return;
    for (uint32_t c = 0; c < set->contexts; c++)
        if (prs_team_is_raising(set->base.comm->team, set->first_context + c))
            return;
    /* [raise-answered] The signals are raised before the answer is seen. Pairs with raise_in_set(). */
    __atomic_store_n(&set->answered, asked, __ATOMIC_RELEASE);
}

static void raise_in_set(struct gin_set *set, gin_progress_fn *progress)
{
    uint32_t first = __atomic_load_n(&set->rounds, __ATOMIC_RELAXED), rounds = 0;
    /* [raise-asked] Pairs with gin_raise_asked(). */
    uint32_t asked = __atomic_add_fetch(&set->asked, 1, __ATOMIC_RELEASE);
    pid_t driver = __atomic_load_n(&set->driver, __ATOMIC_RELAXED);
    struct prs_patience patience = prs_patience_begin(LOOK_NS);

    if (first == set->gave_up_at) /* no thread has called progress since then (0: or ever) */
        return;
    /* [raise-answered] Pairs with gin_raise_answer(). */
    while (__atomic_load_n(&set->answered, __ATOMIC_ACQUIRE) != asked) {
        bool is_over = prs_patience_is_over(&patience, rounds > BUSY_ROUNDS ? BUSY_MS : SLOW_MS);

        if (is_over || (driver != this_thread() && has_ended(driver))) {
            set->gave_up_at = first + rounds;
            PRS_DEBUG("GIN: memory is released after %u rounds and %llu ms, though signals may still wait to be raised",
                      rounds, (unsigned long long)(patience.waited_ns / 1000000));
            return;
        }
        if (driver != this_thread())
            sched_yield();
        else if (progress(set) != NET_SUCCESS)
            return;
        rounds = __atomic_load_n(&set->rounds, __ATOMIC_RELAXED) - first;
        driver = __atomic_load_n(&set->driver, __ATOMIC_RELAXED);
    }
}

void gin_raise_arrived(struct gin_comm *comm, gin_progress_fn *progress)
{
    if (!comm->raises)
        return;
    pthread_mutex_lock(&comm->lock);
    for (struct gin_set *set = comm->sets; set; set = set->next)
        raise_in_set(set, progress);
    pthread_mutex_unlock(&comm->lock);
}

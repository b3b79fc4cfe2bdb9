/* SPDX-License-Identifier: Apache-2.0 */
/* Where this process raises the signals that come (policy `counted`, rails without atomics), one that nobody waits
 * for may be on its way when its window goes: raised a moment later it would find no memory, and its peer would
 * fail. Who gives a window up has to know that nobody still sends to it: so what was sent is done for who sent it,
 * it has come to this process, and all that is left to do is here. The thread that drives the sets does it and says
 * so; no other rank is asked. */
#include <sched.h>

#include "plugin/gin.h"
#include "transport/util/clock.h"
#include "transport/util/log.h"

enum {
    ROUNDS_MOST = 1000, /* with traffic that never pauses, what came before the question has been taken by then */
    WAIT_MS = 100,      /* for all of that */
    IDLE_MS = 20,       /* for a first round: nobody drives the set, so that nothing is raised either */
};

uint32_t gin_settle_asked(const struct gin_set *set)
{
    return __atomic_load_n(&set->asked, __ATOMIC_ACQUIRE); /* S2: what had come by the question is found after this */
}

void gin_settle_answer(struct gin_set *set, uint32_t asked, int handled)
{
    __atomic_store_n(&set->driver, pthread_self(), __ATOMIC_RELAXED);
    __atomic_store_n(&set->rounds, set->rounds + 1, __ATOMIC_RELAXED);
    if (__builtin_expect(asked == set->answered, 1) || handled > 0)
        return;
    for (uint32_t c = 0; c < set->contexts; c++)
        if (prs_team_raises(set->base.comm->team, set->first_context + c))
            return;
    /* S0: what was raised is raised before the answer is seen. Pairs with S1. */
    __atomic_store_n(&set->answered, asked, __ATOMIC_RELEASE);
}

static void settle_set(struct gin_set *set)
{
    uint32_t first = __atomic_load_n(&set->rounds, __ATOMIC_RELAXED);
    uint32_t asked = __atomic_add_fetch(&set->asked, 1, __ATOMIC_RELEASE); /* pairs with S2 */
    bool ours = first > 0 && pthread_equal(__atomic_load_n(&set->driver, __ATOMIC_RELAXED), pthread_self());
    uint64_t began = prs_clock_ms();

    if (first == set->left_at) /* 0: never driven */
        return;
    /* S1: pairs with S0. */
    while (__atomic_load_n(&set->answered, __ATOMIC_ACQUIRE) != asked) {
        uint32_t rounds = __atomic_load_n(&set->rounds, __ATOMIC_RELAXED) - first;
        uint64_t waited = prs_clock_ms() - began;

        if (rounds > ROUNDS_MOST || waited > (rounds ? WAIT_MS : IDLE_MS)) {
            set->left_at = first + rounds;
            PRS_DEBUG("GIN: memory goes after %u rounds and %llu ms without a pause in which all signals were raised",
                      rounds, (unsigned long long)waited);
            return;
        }
        if (!ours)
            sched_yield();
        else if (gin_request_progress(set) != NET_SUCCESS)
            return;
    }
}

void gin_settle(struct gin_comm *comm)
{
    if (!comm->raises)
        return;
    pthread_mutex_lock(&comm->lock);
    for (struct gin_set *set = comm->sets; set; set = set->next)
        settle_set(set);
    pthread_mutex_unlock(&comm->lock);
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/nic/verbs/cqs.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "transport/nic/verbs/device.h"
#include "transport/util/log.h"

enum { FIRST_NAMES = 32 /* enough for a link with a completion queue of its own, so its table never moves */ };
static_assert((int)FIRST_NAMES > (int)PRS_ORDER_MAX_QUEUES_PER_RAIL, "its queues and the loopback queue");

struct prs_queue prs_cqs_silent;

/* ---- life ---- */

int prs_cqs_open(const struct prs_rail *rail, bool shared, struct prs_cqs **out)
{
    struct prs_cqs *cqs = calloc(1, sizeof(*cqs));

    if (cqs)
        cqs->queue = calloc(FIRST_NAMES, sizeof(*cqs->queue));
    if (!cqs || !cqs->queue) {
        free(cqs);
        return prs_nic_fail(rail, ENOMEM, "completion queues");
    }
    cqs->base.rail = rail;
    cqs->shared = shared;
    cqs->refs = 1;
    cqs->names = FIRST_NAMES;
    pthread_mutex_init(&cqs->life, NULL);
    *out = cqs;
    return 0;
}

void prs_cqs_hold(struct prs_cqs *cqs)
{
    pthread_mutex_lock(&cqs->life);
    cqs->refs++;
    pthread_mutex_unlock(&cqs->life);
}

static void free_cqs(struct prs_cqs *cqs)
{
    while (cqs->first) {
        struct prs_cq *cq = cqs->first;

        cqs->first = cq->next;
        if (prs_verbs.destroy_cq(cq->cq))
            PRS_WARN("%s: cannot destroy a completion queue", cqs->base.rail->info.name);
        free(cq);
    }
    pthread_mutex_destroy(&cqs->life);
    free(cqs->held);
    free(cqs->wc);
    free(cqs->queue);
    free(cqs);
}

void prs_cqs_drop(struct prs_cqs *cqs)
{
    bool last;

    if (!cqs)
        return;
    pthread_mutex_lock(&cqs->life);
    last = --cqs->refs == 0;
    pthread_mutex_unlock(&cqs->life);
    if (last)
        free_cqs(cqs);
}

/* ---- room ---- */

/* Return NULL, not logged, with errno. */
static struct prs_cq *new_cq(struct prs_cqs *cqs, uint32_t entries)
{
    struct prs_cq *cq = calloc(1, sizeof(*cq));

    errno = ENOMEM;
    if (!cq)
        return NULL;
    errno = 0;
    cq->cq =
        prs_verbs.create_cq(prs_verbs_device(cqs->base.rail->domain)->context, (int)entries, &cq->overrun, NULL, 0);
    if (!cq->cq) {
        free(cq);
        return NULL;
    }
    cq->room = entries; /* the device may have made more entries than were asked for */
    return cq;
}

static uint32_t limit_of(const struct prs_cqs *cqs)
{
    int most = prs_verbs_device(cqs->base.rail->domain)->attr.max_cqe;

    return most > 0 ? (uint32_t)most : INT_MAX;
}

static uint32_t doubled(const struct prs_cqs *cqs, uint32_t room)
{
    uint32_t most = limit_of(cqs);

    return room < most / 2 ? 2 * room : most;
}

static bool resize(struct prs_cqs *cqs, struct prs_cq *cq, uint32_t room)
{
    int r = prs_verbs.resize_cq ? prs_verbs.resize_cq(cq->cq, (int)room) : ENOSYS;

    if (r) {
        cqs->fixed = r == ENOSYS || r == EOPNOTSUPP;
        return false;
    }
    cq->room = room;
    return true;
}

/* Make room for this many more entries, and for as many again as there are already, so that resizing is rare. */
static bool grow(struct prs_cqs *cqs, struct prs_cq *cq, uint32_t entries)
{
    uint32_t most = limit_of(cqs), twice = doubled(cqs, cq->room);

    if (cqs->fixed || entries > most || cq->used > most - entries)
        return false;
    return (twice >= cq->used + entries && resize(cqs, cq, twice)) || resize(cqs, cq, cq->used + entries);
}

static struct prs_cq *find_room(struct prs_cqs *cqs, uint32_t entries)
{
    for (struct prs_cq *cq = cqs->first; cq; cq = cq->next)
        if (cq->room - cq->used >= entries)
            return cq;
    return cqs->first && grow(cqs, cqs->first, entries) ? cqs->first : NULL;
}

/* Add a completion queue, because the last one cannot grow. If the device resizes none, each new one is larger than the
 * last, so that few must be polled. */
static struct prs_cq *add_cq(struct prs_cqs *cqs, uint32_t entries)
{
    uint32_t twice = cqs->fixed ? doubled(cqs, cqs->first->room) : 0;
    struct prs_cq *cq = twice > entries ? new_cq(cqs, twice) : NULL;

    if (!cq)
        cq = new_cq(cqs, entries);
    if (!cq)
        return NULL;
    prs_spin_lock(&cqs->locked); /* the owner polls them meanwhile */
    cq->next = cqs->first;
    cqs->first = cq;
    prs_spin_unlock(&cqs->locked);
    return cq;
}

int prs_cqs_reserve(struct prs_cqs *cqs, uint32_t entries, struct prs_cq **out)
{
    struct prs_cq *cq;
    int error;

    pthread_mutex_lock(&cqs->life);
    cq = find_room(cqs, entries);
    if (!cq)
        cq = add_cq(cqs, entries);
    error = errno;
    if (cq)
        cq->used += entries;
    pthread_mutex_unlock(&cqs->life);
    *out = cq;
    return cq ? 0 : prs_nic_fail(cqs->base.rail, error, "cannot create a completion queue");
}

void prs_cqs_release(struct prs_cqs *cqs, struct prs_cq *cq, uint32_t entries)
{
    pthread_mutex_lock(&cqs->life);
    cq->used -= entries;
    pthread_mutex_unlock(&cqs->life);
}

/* ---- names ---- */

static bool more_names(struct prs_cqs *cqs)
{
    struct prs_queue **more = realloc(cqs->queue, 2 * cqs->names * sizeof(*more));

    if (!more)
        return false;
    memset(more + cqs->names, 0, cqs->names * sizeof(*more));
    cqs->queue = more;
    cqs->names *= 2;
    return true;
}

int prs_cqs_name(struct prs_cqs *cqs, struct prs_queue *queue, uint32_t *name)
{
    uint32_t at = 0;
    bool found;

    prs_spin_lock(&cqs->locked);
    while (at < cqs->names && cqs->queue[at])
        at++;
    found = at < cqs->names || more_names(cqs);
    if (found)
        cqs->queue[at] = queue;
    prs_spin_unlock(&cqs->locked);
    *name = at;
    return found ? 0 : prs_nic_fail(cqs->base.rail, ENOMEM, "completion queues");
}

void prs_cqs_silence(struct prs_cqs *cqs, uint32_t name)
{
    prs_spin_lock(&cqs->locked);
    cqs->queue[name] = &prs_cqs_silent;
    prs_spin_unlock(&cqs->locked);
}

static uint32_t remove_silent(const struct prs_cqs *cqs, struct ibv_wc *wc, uint32_t from, uint32_t to)
{
    uint32_t kept = from;

    for (; from < to; from++)
        if (prs_cqs_find(cqs, &wc[from]) != &prs_cqs_silent)
            wc[kept++] = wc[from];
    return kept;
}

/* Some drivers leave completions of a destroyed queue pair where they are. */
void prs_cqs_unname(struct prs_cqs *cqs, uint32_t name)
{
    prs_spin_lock(&cqs->locked);
    while (cqs->shared && prs_cqs_poll_locked(cqs) > 0) /* otherwise nobody polls any more */
        cqs->count = remove_silent(cqs, cqs->wc, cqs->at, cqs->count);
    cqs->count = remove_silent(cqs, cqs->wc, cqs->at, cqs->count);
    cqs->held_count = remove_silent(cqs, cqs->held, 0, cqs->held_count);
    cqs->queue[name] = NULL;
    prs_spin_unlock(&cqs->locked);
}

/* ---- completions ---- */

/* Return false: no memory. */
static bool make_room(struct ibv_wc **wc, uint32_t *room, uint32_t wanted)
{
    struct ibv_wc *more;

    if (wanted <= *room)
        return true;
    more = realloc(*wc, 2 * (size_t)wanted * sizeof(*more));
    if (!more)
        return false;
    *wc = more;
    *room = 2 * wanted;
    return true;
}

int prs_cqs_poll_locked(struct prs_cqs *cqs)
{
    uint32_t before;

    if (cqs->at == cqs->count)
        cqs->at = cqs->count = 0;
    before = cqs->count;
    for (struct prs_cq *cq = cqs->first; cq; cq = cq->next) {
        int taken;

        if (unlikely(!make_room(&cqs->wc, &cqs->room, cqs->count + PRS_POLL_MOST)))
            return -ENOMEM;
        taken = ibv_poll_cq(cq->cq, PRS_POLL_MOST, cqs->wc + cqs->count);
        if (unlikely(taken < 0))
            return -EIO;
        cqs->count += (uint32_t)taken;
    }
    return (int)(cqs->count - before);
}

int prs_cqs_hold_back_locked(struct prs_cqs *cqs)
{
    if (!make_room(&cqs->held, &cqs->held_room, cqs->held_count + 1))
        return -ENOMEM;
    cqs->held[cqs->held_count++] = cqs->wc[cqs->at++];
    return 0;
}

int prs_cqs_adopt(struct prs_cqs *cqs, struct prs_link *link, void *user)
{
    bool has_room;

    prs_spin_lock(&cqs->locked);
    has_room = make_room(&cqs->wc, &cqs->room, cqs->count + cqs->held_count);
    if (has_room) {
        link->user = user;
        if (cqs->held_count)
            memcpy(cqs->wc + cqs->count, cqs->held, cqs->held_count * sizeof(*cqs->held));
        cqs->count += cqs->held_count;
        cqs->held_count = 0; /* completions of other links will be held back again */
    }
    prs_spin_unlock(&cqs->locked);
    return has_room ? 0 : prs_nic_fail(cqs->base.rail, ENOMEM, "completions");
}

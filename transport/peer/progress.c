/* SPDX-License-Identifier: Apache-2.0 */
/* From a queue back to the op: completions, arrivals, and how often to look after a silent peer. */
#include <errno.h>
#include <string.h>

#include "transport/nic/cq_group.h"
#include "transport/peer/fail.h"
#include "transport/peer/health.h"
#include "transport/peer/peer.h"
#include "transport/util/clock.h"
#include "transport/util/compiler.h"

/* In so many polls come all flushed receives of several queues, and more. */
enum { FAILURE_POLLS = 4 * PRS_NOTIFY_IDS / PRS_POLL_MOST };

/* ---- events ---- */

static inline void notify(struct prs_peer *peer, uint32_t first_id, uint32_t count, uint64_t bytes)
{
    peer->notifications += count;
    for (uint32_t id = first_id; id != first_id + count; id++)
        peer->on_notify(peer->user, id % PRS_NOTIFY_IDS, bytes);
}

/* Parts of notifications, counted puts, signal records, and invalid arrivals. */
static PRS_OUTLINED int take_irregular_arrival(struct prs_peer *peer, const struct prs_event *event)
{
    struct prs_notice notice;
    struct prs_imm imm;
    int r = prs_imm_parse(event->value, &imm);

    if (!r && imm.bare && imm.kind == PRS_BARE_NOTE && peer->failover) {
        prs_failover_expect_note(peer);
        return 0;
    }
    if (imm.tag || imm.bare) {
        if (!r)
            r = prs_records_arrive(peer, &imm, peer->order.queue[event->queue].path);
        if (!r && imm.bare)
            return 0;
    }
    if (unlikely(r || !peer->on_notify))
        return prs_peer_fail(peer, -EPROTO, "arrival with immediate %#x: %s", event->value,
                             r ? "not of this protocol" : "but the caller asked for no notifications");
    if (unlikely(imm.sized && !peer->sizes.addr))
        return prs_peer_fail(peer, -EPROTO, "arrival with immediate %#x: no sizes were announced", event->value);
    r = prs_arrivals_add(peer->arriving, &imm, event->bytes, &notice);
    if (!r)
        return 0;
    if (unlikely(r < 0))
        return prs_peer_fail(peer, r, "arrival with immediate %#x contradicts earlier parts of id %u", event->value,
                             imm.id);
    /* The NIC wrote the size before the completion that was polled. */
    notify(peer, notice.first_id, notice.count,
           imm.sized ? __atomic_load_n((uint64_t *)peer->sizes.addr + imm.id, __ATOMIC_RELAXED) : notice.bytes);
    return 0;
}

static inline int take_arrival(struct prs_peer *peer, const struct prs_event *event)
{
    uint32_t value = event->value, id = value % PRS_NOTIFY_IDS, run = value / PRS_NOTIFY_IDS + 1;

    peer->arrivals++;
    /* Most arrivals are whole runs: there are no parts to assemble. */
    if (unlikely(!prs_imm_is_run(value) || !peer->on_notify || peer->arriving->wanted[id]))
        return take_irregular_arrival(peer, event);
    notify(peer, id - run + 1, run, event->bytes);
    return 0;
}

/* Handle events. Of several failures keep in *first the most informative one: a queue that fails flushes its other
 * requests, and the NIC may report them in any order. Without a failure first->kind does not change. Return 0 or -errno
 * (the peer has failed). */
static int take_events(struct prs_peer *peer, const struct prs_event *events, int count, struct prs_event *first)
{
    uint64_t now_ns = peer->measured ? prs_clock_ns() : 0;

    for (int i = 0; i < count; i++) {
        const struct prs_event *event = &events[i];
        int r;

        if (event->kind == PRS_EVENT_ARRIVAL) {
            r = take_arrival(peer, event);
            if (unlikely(r))
                return r;
        } else if (event->kind == PRS_EVENT_DONE) {
            peer->completions++;
            r = prs_order_complete(&peer->order, event->queue, event->value, now_ns);
            if (unlikely(r < 0))
                return prs_peer_fail(peer, r, "completion of request %u on queue %u, which is not in flight",
                                     event->value, event->queue);
        } else if (event->queue < peer->queues && prs_peer_lost_path(peer, peer->order.queue[event->queue].path)) {
            continue; /* the request was flushed; the other side will say what has arrived */
        } else if (event->queue >= peer->queues && peer->failover &&
                   (r = prs_failover_lose_loopback(peer, event->queue - peer->queues)) != PRS_AGAIN) {
            if (r)
                return r;
        } else if (first->kind != PRS_EVENT_ERROR ||
                   (first->error == -ECONNRESET && event->error != -ECONNRESET)) { /* else it was flushed, too */
            *first = *event;
        }
    }
    return 0;
}

/* A request on this link failed: drain the other completions before deciding on the cause. */
static PRS_COLD int diagnose_failure(struct prs_peer *peer, struct prs_link *link, struct prs_event *first)
{
    struct prs_event events[PRS_POLL_MOST];

    for (int polls = 0; polls < FAILURE_POLLS && first->error == -ECONNRESET; polls++) {
        int count = peer->nic->poll(link, events), r;

        if (count <= 0)
            break;
        r = take_events(peer, events, count, first);
        if (r)
            return r;
    }
    return prs_health_judge(peer, first);
}

/* Return 0 or -errno. */
static PRS_COLD int check_health(struct prs_peer *peer)
{
    int r = prs_health_check(peer);

    return r || !peer->order.dirty ? r : prs_peer_post(peer);
}

/* Return 0 or -errno. */
static PRS_COLD int check_health_if_due(struct prs_peer *peer)
{
    /* A check that was requested is made at the next poll, and reads the clock itself. */
    bool asked = peer->idle_polls > PRS_PEER_IDLE_POLLS;

    if (!asked) {
        uint64_t now_ns = prs_clock_ns();

        if (++peer->idle_looks < PRS_PEER_IDLE_LOOKS && now_ns - peer->checked_ns < PRS_PEER_IDLE_NS) {
            peer->idle_polls = 0;
            return 0;
        }
        peer->idle_looks = 0;
        peer->checked_ns = now_ns;
    }
    return check_health(peer);
}

static inline int count_idle_poll(struct prs_peer *peer)
{
    return unlikely(++peer->idle_polls >= PRS_PEER_IDLE_POLLS) ? check_health_if_due(peer) : 0;
}

/* There were events: post and raise what they have made possible. Return 0 or -errno. */
static inline int follow_events(struct prs_peer *peer)
{
    peer->idle_polls = peer->idle_start;
    if (unlikely(peer->records)) {
        int r = prs_records_raise(peer);

        if (unlikely(r))
            return r;
    }
    if (unlikely(peer->idle_start)) /* a busy peer may never be idle */
        return check_health(peer);
    /* there may be signals that were held, and puts that on_notify started */
    return peer->order.dirty ? prs_peer_post(peer) : 0;
}

/* Return 0 or -errno. count may be the -errno of polling. */
static inline int handle_events(struct prs_peer *peer, struct prs_link *link, const struct prs_event *events, int count)
{
    struct prs_event first;
    int r;

    first.kind = PRS_EVENT_DONE;
    if (unlikely(count < 0))
        return prs_peer_fail(peer, count, "polling a completion queue failed: %s; was it overrun?", strerror(-count));
    r = take_events(peer, events, count, &first);
    if (unlikely(first.kind == PRS_EVENT_ERROR))
        r = r ? r : diagnose_failure(peer, link, &first);
    return r;
}

/* Handle `count` events of path 0, then those of the other paths. Return how many, or -errno. */
static PRS_OUTLINED int poll_all_paths(struct prs_peer *peer, struct prs_event *events, int count)
{
    int handled = 0, r;
    uint32_t i = 0;

    for (;;) {
        r = count ? handle_events(peer, peer->link[i], events, count) : 0; /* which reads the clock */
        if (unlikely(r))
            return r;
        handled += count;
        if (++i == peer->path_count)
            break;
        count = peer->nic->poll(peer->link[i], events);
    }
    if (!handled)
        return count_idle_poll(peer);
    r = follow_events(peer);
    return unlikely(r) ? r : handled;
}

/* ---- progress ---- */

/* Compiled into both callers: a call would add to the cost of an idle peer. */
static PRS_SPECIALIZED int progress(struct prs_peer *peer)
{
    struct prs_event events[PRS_POLL_MOST]; /* on the stack, which is in a cache */
    int count;

    if (peer->order.dirty) {
        int r = prs_peer_post(peer);

        if (unlikely(r))
            return r;
    }
    /* Most calls find nothing, so they must be cheap. */
    count = peer->nic->poll(peer->link[0], events);
    return count || peer->path_count > 1 ? poll_all_paths(peer, events, count) : count_idle_poll(peer);
}

/* The thread of watch.c was here meanwhile: take what it has polled. Return how many events, or -errno. */
static PRS_COLD int take_kept_events(struct prs_peer *peer)
{
    struct prs_failover *failover = peer->failover;
    /* take_events() does not change it: the paths of these events are given up, so their failures are ignored */
    struct prs_event first = {.kind = PRS_EVENT_DONE};
    int count = (int)failover->kept_count, r;

    prs_failover_catch_up(peer);
    failover->kept_count = 0;
    r = take_events(peer, failover->kept, count, &first);
    r = r ? r : follow_events(peer);
    return r ? r : count;
}

static PRS_OUTLINED int progress_locked(struct prs_peer *peer)
{
    const struct prs_failover *failover = peer->failover;
    int kept = 0, r;

    prs_peer_lock(peer);
    if (unlikely(failover->attended))
        kept = take_kept_events(peer); /* before what is polled later */
    r = kept < 0 ? kept : progress(peer);
    if (unlikely(failover->away || failover->expect_until_ns) && r >= 0) {
        int attended = prs_failover_attend(peer);

        r = attended < 0 ? attended : r;
    }
    prs_peer_unlock(peer);
    return r < 0 ? r : kept + r;
}

int prs_peer_progress(struct prs_peer *peer)
{
    if (unlikely(peer->error))
        return prs_peer_error_again(peer);
    return unlikely(peer->failover) ? progress_locked(peer) : progress(peer);
}

/* ---- where completion queues are shared ---- */

static bool wants_checks(const struct prs_peer *peer)
{
    return peer->idle_polls >= PRS_PEER_IDLE_POLLS;
}

int prs_peer_adopt(struct prs_peer *peer, const struct prs_cq_group *cqs, struct prs_peer_list *list)
{
    bool shares = true;

    for (uint32_t i = 0; i < peer->path_count; i++) {
        int r = peer->link[i]->cqs ? peer->nic->adopt(peer->link[i]->cqs, peer->link[i], peer) : 0;

        if (r)
            return r;
        /* Not if the peer began to connect for an earlier context with the same id, which was closed meanwhile. */
        shares &= prs_cq_group_has(cqs, peer->link[i]->cqs);
    }
    peer->shares = shares;
    peer->list = list;
    peer->unlisted = true;
    prs_peer_want_progress(peer); /* the peer may have been used before */
    return 0;
}

int prs_peer_handle(struct prs_peer *peer, struct prs_link *link, const struct prs_event *events, int count)
{
    int r;

    if (unlikely(peer->error))
        return 0; /* flushed requests need no handling */
    r = handle_events(peer, link, events, count);
    r = r ? r : follow_events(peer);
    if (unlikely(wants_checks(peer)))
        prs_peer_want_progress(peer);
    return r;
}

int prs_peer_attend(struct prs_peer *peer)
{
    int r = 0;

    peer->unlisted = true;
    if (!peer->shares) {
        prs_peer_want_progress(peer); /* nobody else polls for it */
        return prs_peer_progress(peer);
    }
    if (unlikely(peer->error)) {
        prs_peer_want_progress(peer);
        return prs_peer_error_again(peer);
    }
    if (peer->order.dirty)
        r = prs_peer_post(peer);
    if (!r && wants_checks(peer))
        r = check_health(peer);
    if (wants_checks(peer))
        prs_peer_want_progress(peer);
    return r;
}

int prs_peer_look(struct prs_peer *peer)
{
    int r = 0;

    if (!peer->shares || peer->error || wants_checks(peer))
        return 0; /* it is in the list */
    if (peer->idle_polls)
        r = check_health(peer);
    peer->idle_polls = peer->idle_polls ? peer->idle_polls : 1; /* any event sets it to 0 */
    if (wants_checks(peer))
        prs_peer_want_progress(peer);
    return r;
}

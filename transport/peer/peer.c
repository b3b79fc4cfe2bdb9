/* SPDX-License-Identifier: Apache-2.0 */
/* The data path: from an op through the order engine to a queue, and back. */
#include "transport/peer/peer.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "transport/nic/verbs/cqs.h"
#include "transport/nic/verbs/gid.h"
#include "transport/peer/links.h"
#include "transport/peer/recovery.h"
#include "transport/util/clock.h"
#include "transport/util/compiler.h"
#include "transport/util/error.h"
#include "transport/util/log.h"
#include "transport/peer/watch.h"

enum {
    /* Wait this long for the farewell of the other side after its queues are gone. */
    FAREWELL_MS = 500,
    TOUCH_MS = 1000,                                    /* between two writes that ask whether the peer is alive */
    FAILURE_POLLS = 4 * PRS_NOTIFY_IDS / PRS_POLL_MOST, /* more than all flushed receives of several queues */
};

/* The peer wants to make progress at the next round of its thread. */
static inline void want_progress(struct prs_peer *peer)
{
    if (!peer->unlisted)
        return;
    peer->unlisted = false;
    peer->next_listed = peer->list->first;
    peer->list->first = peer;
}

/* ---- errors ---- */

int prs_peer_fail(struct prs_peer *peer, int code, const char *format, ...)
{
    char text[512];
    va_list args;

    if (peer->error)
        return peer->error;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    prs_failover_lock(peer);
    peer->error = code;
    snprintf(peer->error_text, sizeof(peer->error_text), "%s; %s", text, peer->description);
    prs_fail(code, "%s", peer->error_text);
    /* Before the ops are failed: their memory may be reused at once, so no NIC may still read or write it. */
    for (uint32_t i = 0; i < peer->path_count; i++)
        prs_nic_kill_link(peer->link[i]);
    prs_failover_tell_failure(peer, text);
    if (peer->records)
        prs_raise_drop(&peer->records->raise);
    prs_order_fail(&peer->order, code);
    prs_failover_unlock(peer);
    want_progress(peer); /* which returns the error */
    return code;
}

static PRS_COLD int repeat_error(struct prs_peer *peer)
{
    return prs_error_repeat(peer->error, peer->error_text);
}

/* What would let another rail replace one that is lost? */
static const char *advice(const struct prs_peer *peer)
{
    const struct prs_config *config = &peer->fabric->config;

    return !peer->nic->in_order ? ". These queues cannot replace a lost rail"
           : !config->failover  ? ". If only a rail is lost, NCCL_IB_RESILIENCY_PORT_FAILOVER=1 at both sides replaces "
                                  "it (a single rail: "
                                  "with PERSEUS_STANDBY_RAIL=1)"
           : peer->path_count == 1 && !config->standby
               ? ". If only a rail is lost, PERSEUS_STANDBY_RAIL=1 at both sides replaces it"
           : peer->order.policy != PRS_POLICY_COUNTED
               ? ". Lost rails are replaced under PERSEUS_ORDER=counted, or auto, only"
               : "";
}

/* A request has failed: name the rails of its queue. */
static int fail_completion(struct prs_peer *peer, const struct prs_event *event)
{
    uint32_t path = peer->order.queue[event->queue].path;
    const struct prs_rail_info *own = &peer->fabric->rail[peer->path[path].local_rail].info;
    const struct prs_wire_rail *other = &peer->path[path].peer;
    char gid[64], own_gid[64];

    prs_gid_text(other->gid, gid, sizeof(gid));
    prs_gid_text(peer->path[path].own.gid, own_gid, sizeof(own_gid));
    return prs_peer_fail(
        peer, event->error, "%s (status %d, vendor %#x) on queue %u, %s:%d GID %s to %s:%u GID %s at %s: %s%s",
        event->text, event->status, event->vendor, event->queue, own->name, own->port, own_gid, other->name,
        other->port, gid, peer->remote, event->cause, event->error == -ETIMEDOUT ? advice(peer) : "");
}

/* ---- start ---- */

static int post_waiting(struct prs_peer *peer)
{
    uint64_t now_ns = peer->measured ? prs_clock_ns() : 0;
    struct prs_chain chain;

    peer->unposted = 0;
    while (peer->order.dirty && prs_order_take(&peer->order, now_ns, &chain)) {
        const struct prs_order_queue *queue = &peer->order.queue[chain.queue];
        int r = peer->nic->post(peer->queue[chain.queue], queue->wr, queue->mask, chain.first, chain.count);

        if (unlikely(r))
            return prs_peer_fail(peer, r == -ENOMEM ? -EIO : r, "posting %u requests on queue %u failed: %s",
                                 chain.count, chain.queue, strerror(-r));
        peer->doorbells++;
        peer->work_requests += chain.count;
    }
    return 0;
}

/* Nothing in flight would report an op that waits: post it at once, unless the caller has more for its doorbell. */
static inline bool posts_at_once(const struct prs_peer *peer)
{
    return prs_order_idle(&peer->order) && !peer->batching;
}

void prs_peer_begin_batch(struct prs_peer *peer)
{
    if (!peer->batching)
        peer->batch_began_idle = prs_order_idle(&peer->order);
    peer->batching = true;
}

int prs_peer_end_batch(struct prs_peer *peer)
{
    bool post = peer->batching && peer->batch_began_idle && peer->order.dirty;

    peer->batching = false;
    if (unlikely(peer->error))
        return repeat_error(peer);
    return post ? post_waiting(peer) : 0;
}

/* An op was admitted: post it now, or later with the ops that follow? */
static inline int post_or_batch(struct prs_peer *peer, bool post_now)
{
    if (post_now || ++peer->unposted >= PRS_ORDER_BATCH)
        return post_waiting(peer);
    want_progress(peer);
    return 0;
}

static PRS_COLD int bad_put(const struct prs_peer *peer, const struct prs_put *put)
{
    if (put->flags & PRS_PUT_INLINE && put->len_bytes > PRS_INLINE_BYTES)
        return prs_fail(-EINVAL, "inline put of %zu bytes: at most %d", put->len_bytes, PRS_INLINE_BYTES);
    if (put->notify_id >= PRS_NOTIFY_IDS)
        return prs_fail(-EINVAL, "notify_id %u: must be below %d", put->notify_id, PRS_NOTIFY_IDS);
    if (!put->dst)
        return prs_fail(-EINVAL, "put of %zu bytes without remote keys", put->len_bytes);
    if (!put->src)
        return prs_fail(-EINVAL, "put of %zu bytes without a source region", put->len_bytes);
    return prs_fail(-EINVAL, "put from a region that is not registered on all rails of %s", peer->remote);
}

static inline bool region_fits(const struct prs_peer *peer, const struct prs_region *region)
{
    return region && !(peer->rail_mask & ~region->rail_mask);
}

int prs_peer_put(struct prs_peer *peer, struct prs_op *op, const struct prs_put *put)
{
    const uint32_t *local_keys = NULL;
    bool post_now;
    int r;

    if (unlikely(peer->error))
        return repeat_error(peer);
    if (put->flags & PRS_PUT_INLINE) {
        if (unlikely(put->len_bytes > PRS_INLINE_BYTES))
            return bad_put(peer, put);
    } else if (put->len_bytes) {
        if (unlikely(!region_fits(peer, put->src)))
            return bad_put(peer, put);
        local_keys = put->src->local_key;
    }
    if (unlikely((put->len_bytes && !put->dst) || put->notify_id >= PRS_NOTIFY_IDS))
        return bad_put(peer, put);
    if (unlikely(!put->len_bytes && !(put->flags & PRS_PUT_NOTIFY))) {
        op->status = 0; /* nothing to write or to notify */
        return 0;
    }
    post_now = posts_at_once(peer) || (put->len_bytes >= PRS_ORDER_PROMPT_BYTES && !peer->batching);
    r = prs_order_put(&peer->order, op, put, local_keys);
    if (r)
        return r;
    return post_or_batch(peer, post_now);
}

int prs_peer_get(struct prs_peer *peer, struct prs_op *op, const struct prs_get *get)
{
    bool post_now = posts_at_once(peer);
    int r;

    if (unlikely(peer->error))
        return repeat_error(peer);
    if (!get->len_bytes) {
        op->status = 0;
        return 0;
    }
    if (!region_fits(peer, get->dst) || !get->src)
        return prs_fail(-EINVAL,
                        "get of %zu bytes: no remote keys, or a region that is not registered on all rails of %s",
                        get->len_bytes, peer->remote);
    r = prs_order_get(&peer->order, op, get, get->dst->local_key);
    return r ? r : post_or_batch(peer, post_now);
}

int prs_peer_signal(struct prs_peer *peer, struct prs_op *op, const struct prs_signal *signal)
{
    bool post_now = posts_at_once(peer);
    int r;

    if (unlikely(peer->error))
        return repeat_error(peer);
    if (signal->dst_addr % sizeof(signal->value) || !signal->dst)
        return prs_fail(-EINVAL, "signal at %#llx: must be 8-byte aligned and have remote keys",
                        (unsigned long long)signal->dst_addr);
    r = prs_order_signal(&peer->order, op, signal);
    return r ? r : post_or_batch(peer, post_now);
}

int prs_peer_settle(struct prs_peer *peer)
{
    int r, posted;

    if (unlikely(peer->error))
        return repeat_error(peer);
    r = prs_order_settle(&peer->order);
    posted = peer->order.dirty ? post_waiting(peer) : 0;
    if (r == PRS_AGAIN && (peer->remote_closed || peer->remote_gone))
        return prs_peer_fail(peer, -ECONNRESET,
                             "the peer at %s has closed before it confirmed that all signals were raised",
                             peer->remote);
    return posted < 0 ? posted : r;
}

int prs_peer_flush(struct prs_peer *peer, struct prs_op *op, const struct prs_region *region, const void *addr)
{
    uint32_t rkey[PRS_MAX_RAILS];
    bool post_now = posts_at_once(peer);
    int r;

    if (unlikely(peer->error))
        return repeat_error(peer);
    if (!region_fits(peer, region))
        return prs_fail(-EINVAL, "flush of a region that is not registered on all rails of %s", peer->remote);
    if (!region->count) {
        op->status = 0; /* zero bytes: nothing was written there */
        return 0;
    }
    r = prs_links_open_loopbacks(peer);
    if (r)
        return r;
    for (uint32_t i = 0; i < peer->path_count; i++) {
        const struct prs_domain *domain = peer->link[i]->rail->domain;
        int at = 0;

        while (region->domain[at] != domain)
            at++; /* ends: the region is registered on all rails of the peer */
        rkey[i] = region->keys.rkey[at];
    }
    r = prs_links_probe(peer, op, (uintptr_t)addr, rkey);
    return r ? r : post_or_batch(peer, post_now);
}

/* ---- progress ---- */

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
    if (unlikely(imm.sized && !peer->sizes))
        return prs_peer_fail(peer, -EPROTO, "arrival with immediate %#x: no sizes were announced", event->value);
    r = prs_arrivals_add(peer->arriving, &imm, event->bytes, &notice);
    if (!r)
        return 0;
    if (unlikely(r < 0))
        return prs_peer_fail(peer, r, "arrival with immediate %#x contradicts earlier parts of id %u", event->value,
                             imm.id);
    /* The NIC wrote the size before the completion that was polled. */
    notify(peer, notice.first_id, notice.count,
           imm.sized ? __atomic_load_n(&peer->sizes[imm.id], __ATOMIC_RELAXED) : notice.bytes);
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
        } else if (event->queue < peer->queues && prs_failover_is_down(peer, peer->order.queue[event->queue].path)) {
            continue; /* flushed: the other side says what has arrived */
        } else if (event->queue >= peer->queues && peer->failover &&
                   (r = prs_failover_lose_loopback(peer, event->queue - peer->queues)) != PRS_AGAIN) {
            if (r)
                return r;
        } else if (first->kind != PRS_EVENT_ERROR || first->error == -ECONNRESET) {
            *first = *event;
        }
    }
    return 0;
}

/* Is a request to the other side in flight that a caller waits for? Requests to ourselves, credits and unsignaled lazy
 * puts do not count. */
static bool has_awaited_requests(const struct prs_order *order)
{
    for (uint32_t i = 0; i < order->data_queues; i++) {
        const struct prs_order_queue *queue = &order->queue[i];

        for (uint32_t at = queue->tail; at != queue->head; at++) {
            bool is_lazy = at - queue->signaled < queue->posted - queue->signaled;

            if (!is_lazy && queue->owner[at & queue->mask] && queue->owner[at & queue->mask] != &order->no_op)
                return true;
        }
    }
    return order->held_count != 0;
}

/* The other side does not answer any more, but no caller waits for the requests that failed: a credit, a lazy put, or a
 * write that only asked. If it has closed, or cannot be asked, only a caller that waits for it gets an error.
 * A farewell may still be on its way: wait for it, but not here. */
static void suspend_failure(struct prs_peer *peer, const struct prs_event *failure)
{
    if (peer->failure.kind != PRS_EVENT_ERROR)
        peer->failure = *failure;
    peer->remote_gone |= peer->remote_closed || peer->stream_lost;
    if (!peer->remote_gone && !peer->farewell_ns) {
        peer->farewell_ns = prs_clock_ns() + FAREWELL_MS * 1000000ull;
        peer->idle_start = PRS_PEER_IDLE_POLLS;
    }
}

/* May another rail do what this request could not? Not if the request itself is wrong. */
static bool replace_path(struct prs_peer *peer, const struct prs_event *failure)
{
    uint32_t path = peer->order.queue[failure->queue].path;
    char why[128];

    if (failure->error != -ETIMEDOUT && failure->error != -ECONNRESET && failure->error != -ENODEV)
        return false;
    snprintf(why, sizeof(why), "%s: %s", failure->text, failure->cause);
    if (!prs_failover_start(peer, path, why))
        return false;
    return failure->queue < peer->queues || !prs_failover_lose_loopback(peer, path);
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
    if ((first->error == -ETIMEDOUT || first->error == -ECONNRESET) && !has_awaited_requests(&peer->order)) {
        suspend_failure(peer, first);
        first->kind = PRS_EVENT_DONE;
        return 0;
    }
    if (replace_path(peer, first)) {
        first->kind = PRS_EVENT_DONE;
        return 0;
    }
    if (first->error == -ECONNRESET && peer->failure.kind == PRS_EVENT_ERROR)
        return fail_completion(peer, &peer->failure); /* which closed the queue */
    return fail_completion(peer, first);
}

/* Return 0, or -errno: no farewell has come, so the request failed for another reason. */
static PRS_COLD int await_farewell(struct prs_peer *peer)
{
    int r = prs_failover_read(peer);

    if (peer->error)
        return peer->error;
    if (r == PRS_AGAIN && prs_clock_ns() < peer->farewell_ns)
        return 0;
    peer->farewell_ns = 0;
    peer->idle_start = peer->idle_polls = 0;
    if (r == PRS_AGAIN && replace_path(peer, &peer->failure)) { /* the other side lives */
        peer->failure.kind = PRS_EVENT_DONE;
        return 0;
    }
    if (r)
        return fail_completion(peer, &peer->failure);
    peer->remote_gone = true;
    return 0;
}

/* The network of the TCP stream has failed, and with it the usual way to notice that a silent peer has died, but the
 * network of the rails may be well. So write no bytes to the peer now and then: the NIC reports whether it answers. */
static PRS_COLD int touch_peer(struct prs_peer *peer)
{
    uint64_t now_ns = prs_clock_ns();

    if (peer->remote_gone || now_ns < peer->touch_ns || prs_order_touch(&peer->order))
        return 0;
    peer->touch_ns = now_ns + TOUCH_MS * 1000000ull;
    return post_waiting(peer);
}

static PRS_COLD int lose_stream(struct prs_peer *peer, int error)
{
    PRS_WARN(
        "the TCP connection to %s was lost: %s; is the network of NCCL_SOCKET_IFNAME away? RDMA goes on, and shows "
        "whether the peer is alive",
        peer->remote, strerror(error));
    if (peer->failover)
        prs_watch_lose_stream(peer);
    close(peer->stream_fd);
    peer->stream_fd = -1;
    peer->stream_lost = true;
    if (peer->failover && peer->failover->active)
        return prs_peer_fail(peer, -error, "no agreement with %s that a rail is lost: the TCP connection is lost too",
                             peer->remote);
    return touch_peer(peer);
}

/* Nothing has arrived for many polls: is the other process still alive? */
static PRS_COLD int check_peer_alive(struct prs_peer *peer)
{
    int r;

    peer->idle_polls = peer->idle_start;
    if (peer->stream_lost)
        return touch_peer(peer);
    if (peer->stream_fd < 0)
        return 0;
    if (peer->remote_closed) {
        /* The farewell came at the last check, and all earlier answers have arrived since then: no more will come. The
         * NIC would report that too, but only after all its retries. */
        peer->remote_gone = true;
        return has_awaited_requests(&peer->order)
                   ? prs_peer_fail(peer, -ECONNRESET, "the peer at %s has closed while %u transfers were in flight",
                                   peer->remote, peer->order.ops)
                   : 0;
    }
    r = prs_failover_read(peer); /* when it comes: an error, at the next check, only if we still send or wait */
    if (r >= 0 || peer->error)
        return peer->error;
    if (r != -ECONNRESET && r != -EPIPE) /* a killed process causes these, too */
        return lose_stream(peer, -r);
    return prs_peer_fail(peer, -ECONNRESET, "the process at %s has died: its connection ended without a farewell",
                         peer->remote);
}

/* Nothing has arrived, but a signal waits for another peer of this process. */
static int retry_raising(struct prs_peer *peer)
{
    int r = prs_records_raise(peer);

    return r || !peer->order.dirty ? r : post_waiting(peer);
}

/* waiting: someone waits for transfers of this path or for arrivals. A port that is down is replaced at once, if it can
 * be, but is an error only after the NIC's retries. */
static int check_rail(struct prs_peer *peer, uint32_t path, bool waiting)
{
    int rail = peer->path[path].local_rail;

    if (prs_failover_is_down(peer, path))
        return prs_order_probe_idle(&peer->order, path) ? 0 : prs_fabric_check_rail(peer->fabric, rail, UINT64_MAX);
    if (peer->failover && prs_fabric_check_rail(peer->fabric, rail, 0) < 0 &&
        prs_failover_start(peer, path, prs_error_text()))
        return 0;
    return prs_fabric_check_rail(peer->fabric, rail, waiting ? prs_fabric_patience_ns(peer->fabric) : UINT64_MAX);
}

/* A lost device completes nothing any more, so waiting for its requests would never end. */
static int check_rails(struct prs_peer *peer, bool waiting)
{
    int r = 0;

    for (uint32_t i = 0; i < peer->path_count && r == 0; i++) {
        if (peer->fabric->config.return_async_events && __atomic_load_n(peer->link[i]->overrun, __ATOMIC_RELAXED))
            return prs_peer_fail(peer, -EIO, "%s: a completion queue was overrun, so completions are lost",
                                 peer->link[i]->rail->info.name);
        r = check_rail(peer, i, waiting);
    }
    return r < 0 ? prs_peer_fail(peer, r, "%s%s", prs_error_text(), advice(peer)) : 0;
}

static PRS_COLD int check_health(struct prs_peer *peer)
{
    int r;

    if (peer->farewell_ns)
        return await_farewell(peer);
    if (peer->records && peer->records->raise.refused_ns)
        return retry_raising(peer);
    r = check_rails(peer, has_awaited_requests(&peer->order));
    return r < 0 ? r : check_peer_alive(peer);
}

static inline int count_idle_poll(struct prs_peer *peer)
{
    return unlikely(++peer->idle_polls >= PRS_PEER_IDLE_POLLS) ? check_health(peer) : 0;
}

/* There were events: do what they have made possible. Return 0 or -errno. */
static inline int follow_events(struct prs_peer *peer)
{
    peer->idle_polls = peer->idle_start;
    if (unlikely(peer->records)) {
        int r = prs_records_raise(peer);

        if (unlikely(r))
            return r;
    }
    return peer->order.dirty ? post_waiting(peer) : 0; /* signals that were held, and puts that on_notify started */
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
static PRS_OUTLINED int poll_all_paths(struct prs_peer *peer, int count)
{
    int handled = 0, r;
    uint32_t i = 0;

    for (;;) {
        r = handle_events(peer, peer->link[i], peer->events, count);
        if (unlikely(r))
            return r;
        handled += count;
        if (++i == peer->path_count)
            break;
        count = peer->nic->poll(peer->link[i], peer->events);
    }
    if (!handled)
        return count_idle_poll(peer);
    r = follow_events(peer);
    return unlikely(r) ? r : handled;
}

static inline int progress(struct prs_peer *peer)
{
    int count;

    if (peer->order.dirty) {
        int r = post_waiting(peer);

        if (unlikely(r))
            return r;
    }
    /* Most calls find nothing, so they must be cheap. */
    count = peer->nic->poll(peer->link[0], peer->events);
    return count || peer->path_count > 1 ? poll_all_paths(peer, count) : count_idle_poll(peer);
}

/* The thread of watch.c was here meanwhile: take what it has polled. Return how many events, or -errno. */
static PRS_COLD int take_kept_events(struct prs_peer *peer)
{
    struct prs_failover *failover = peer->failover;
    struct prs_event first = {.kind = PRS_EVENT_DONE}; /* stays: their paths are given up */
    int count = (int)failover->kept_count, r;

    prs_failover_catch_up(peer);
    failover->kept_count = 0;
    r = take_events(peer, failover->kept, count, &first);
    r = r ? r : follow_events(peer);
    return r ? r : count;
}

/* Go on with paths that are given up or come back. Not only when nothing arrives: a busy peer may never be idle. */
static PRS_COLD int attend_paths(struct prs_peer *peer)
{
    const struct prs_failover *failover = peer->failover;
    int r = failover->active || failover->expect_until_ns ? prs_failover_step(peer) : 0;

    return !r && failover->recovering ? prs_recovery_look(peer) : r;
}

static PRS_OUTLINED int progress_locked(struct prs_peer *peer)
{
    const struct prs_failover *failover = peer->failover;
    int kept = 0, r;

    prs_failover_lock(peer);
    if (unlikely(failover->attended))
        kept = take_kept_events(peer); /* before what is polled later */
    r = kept < 0 ? kept : progress(peer);
    if (unlikely(failover->active || failover->recovering || failover->expect_until_ns) && r >= 0) {
        int attended = attend_paths(peer);

        r = attended < 0 ? attended : r;
    }
    prs_failover_unlock(peer);
    return r < 0 ? r : kept + r;
}

int prs_peer_progress(struct prs_peer *peer)
{
    if (unlikely(peer->error))
        return repeat_error(peer);
    return unlikely(peer->failover) ? progress_locked(peer) : progress(peer);
}

/* ---- progress where completion queues are shared ---- */

static bool wants_checks(const struct prs_peer *peer)
{
    return peer->idle_polls >= PRS_PEER_IDLE_POLLS;
}

int prs_peer_adopt(struct prs_peer *peer, const struct prs_cq_group *cqs, struct prs_peer_list *list)
{
    bool shares = true;

    for (uint32_t i = 0; i < peer->path_count; i++) {
        int r = peer->link[i]->cqs ? prs_cqs_adopt(peer->link[i]->cqs, peer->link[i], peer) : 0;

        if (r)
            return r;
        /* It began to connect to a context with the same id that has been closed meanwhile? */
        shares &= prs_cq_group_has(cqs, peer->link[i]->cqs);
    }
    peer->shares = shares;
    peer->list = list;
    peer->unlisted = true;
    want_progress(peer); /* it may have been used already */
    return 0;
}

int prs_peer_handle(struct prs_peer *peer, struct prs_link *link, const struct prs_event *events, int count)
{
    int r;

    if (unlikely(peer->error))
        return 0; /* what is flushed is no news */
    r = handle_events(peer, link, events, count);
    r = r ? r : follow_events(peer);
    if (unlikely(wants_checks(peer)))
        want_progress(peer);
    return r;
}

int prs_peer_attend(struct prs_peer *peer)
{
    int r = 0;

    peer->unlisted = true;
    if (!peer->shares) {
        want_progress(peer); /* nobody else polls for it */
        return prs_peer_progress(peer);
    }
    if (unlikely(peer->error)) {
        want_progress(peer);
        return repeat_error(peer);
    }
    if (peer->order.dirty)
        r = post_waiting(peer);
    if (!r && wants_checks(peer))
        r = check_health(peer);
    if (wants_checks(peer))
        want_progress(peer);
    return r;
}

int prs_peer_look(struct prs_peer *peer)
{
    int r = 0;

    if (!peer->shares || peer->error || wants_checks(peer))
        return 0; /* it is in the list */
    if (peer->idle_polls)
        r = check_health(peer);
    peer->idle_polls = peer->idle_polls ? peer->idle_polls : 1; /* an event sets it to 0 */
    if (wants_checks(peer))
        want_progress(peer);
    return r;
}

int prs_peer_check_remote(struct prs_peer *peer)
{
    int r;

    if (peer->error)
        return repeat_error(peer);
    prs_failover_lock(peer);
    r = check_rails(peer, true); /* the other side may be unable to reach us */
    prs_failover_unlock(peer);
    if (r)
        return r;
    if (peer->remote_gone && peer->stream_lost)
        return fail_completion(peer, &peer->failure);
    return peer->remote_gone ? prs_peer_fail(peer, -ECONNRESET,
                                             "the peer at %s has closed, so the awaited writes will never arrive; had "
                                             "it an error (see its log), or was it aborted?",
                                             peer->remote)
                             : 0;
}

/* ---- queries ---- */

void prs_peer_set_user(struct prs_peer *peer, void *user)
{
    peer->user = user;
}

const void *prs_peer_private(const struct prs_peer *peer, uint32_t *bytes)
{
    if (bytes)
        *bytes = peer->private_bytes;
    return peer->private_data;
}

const char *prs_peer_error(const struct prs_peer *peer)
{
    return peer->error_text;
}

const char *prs_peer_describe(const struct prs_peer *peer)
{
    return peer->description;
}

uint32_t prs_peer_queue_number(const struct prs_peer *peer)
{
    return peer->queue[0]->qp->qp_num;
}

PRS_READS_COUNTERS void prs_peer_stats(const struct prs_peer *peer, struct prs_stats *out)
{
    const struct prs_order_stats *order = &peer->order.stats;

    *out = (struct prs_stats){.puts = order->puts,
                              .gets = order->gets,
                              .signals = order->signals,
                              .notifications = peer->notifications,
                              .work_requests = peer->work_requests,
                              .doorbells = peer->doorbells,
                              .completions = peer->completions,
                              .arrivals = peer->arrivals,
                              .fences = order->fences,
                              .drains = order->drains,
                              .merged_signals = order->merged,
                              .bytes = order->bytes,
                              .signal_flushes = peer->records ? peer->records->flushes : 0};
    prs_failover_lock(peer); /* any thread may ask, and a link may be replaced */
    for (uint32_t i = 0; i < peer->path_count; i++) {
        out->receives += peer->link[i]->receives;
        out->rail_bytes[peer->path[i].position] = peer->queues == 1 ? order->bytes : order->path_bytes[i];
    }
    prs_failover_unlock(peer);
}

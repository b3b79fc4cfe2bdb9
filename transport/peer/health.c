/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/peer/health.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "transport/peer/fail.h"
#include "transport/peer/peer.h"
#include "transport/peer/watch.h"
#include "transport/util/clock.h"
#include "transport/util/compiler.h"
#include "transport/util/error.h"
#include "transport/util/fork.h"
#include "transport/util/log.h"

enum {
    /* Wait this long for the farewell of the other side after its queues are gone. */
    FAREWELL_MS = 500,
    TOUCH_MS = 1000, /* between two writes that test whether the peer is alive */
    /* From a note LOST to the error. What had arrived before the note is taken and raised in much less time. */
    LOSS_MS = 500,
};

static bool is_last_path(const struct prs_peer *peer)
{
    uint32_t living = 0;

    for (uint32_t path = 0; path < peer->path_count; path++)
        living += !prs_peer_lost_path(peer, path);
    return living <= 1;
}

/* Advice for the user: which setting would let another rail replace a lost one? */
static const char *advice(const struct prs_peer *peer)
{
    const struct prs_config *config = &peer->fabric->config;

    return !peer->nic->fails_over ? ". These queues cannot replace a lost rail"
           : !config->failover
               ? ". If only a rail is lost, others could replace it: NCCL_IB_RESILIENCY_PORT_FAILOVER=0 forbids it"
           : peer->path_count == 1 && !config->standby
               ? ". If only a rail is lost, PERSEUS_STANDBY_RAIL=1 at both sides replaces it"
           : peer->order.policy != PRS_POLICY_COUNTED
               ? ". Lost rails are replaced under PERSEUS_ORDER=counted, or auto, only"
           : !peer->failover ? ". If only a rail is lost, NCCL_IB_RESILIENCY_PORT_FAILOVER=1 at both sides replaces it"
           : is_last_path(peer) ? "; no other rail is left"
                                : "";
}

/* May the rail be the cause of this error, rather than the request? */
static bool is_of_rail(int error)
{
    return error == -ETIMEDOUT || error == -ECONNRESET || error == -ENODEV;
}

/* A request has failed: name the rails of its queue. */
static int fail_completion(struct prs_peer *peer, const struct prs_event *event)
{
    uint32_t path = peer->order.queue[event->queue].path;
    const struct prs_rail_info *own = &peer->fabric->rail[peer->path[path].local_rail].info;
    const struct prs_wire_rail *other = &peer->path[path].peer;
    bool advises = event->error == -ETIMEDOUT || (peer->failover && is_of_rail(event->error));
    char where[64], own_where[64];

    peer->nic->address_text(&other->address, where, sizeof(where));
    peer->nic->address_text(&peer->path[path].own.told, own_where, sizeof(own_where));
    return prs_peer_fail(peer, event->error, "%s (status %d, vendor %#x) on queue %u, %s:%d %s to %s:%u %s at %s: %s%s",
                         event->text, event->status, event->vendor, event->queue, own->name, own->port, own_where,
                         other->name, other->port, where, peer->remote, event->cause, advises ? advice(peer) : "");
}

static int fail_closed(struct prs_peer *peer)
{
    return prs_peer_fail(peer, -ECONNRESET, "the peer at %s has closed while %u transfers were in flight", peer->remote,
                         peer->order.ops);
}

/* Is a request to the other side in flight that a caller waits for? Requests to ourselves, credits and unsignaled lazy
 * puts do not count. */
static bool has_awaited_requests(const struct prs_order *order)
{
    for (uint32_t i = 0; i < order->data_queues; i++) {
        const struct prs_order_queue *queue = &order->queue[i];

        for (uint32_t at = queue->tail; at != queue->head; at++) {
            bool is_lazy = at - queue->signaled < queue->posted - queue->signaled;
            const struct prs_op *owner = queue->wr[at & queue->mask].owner;

            if (!is_lazy && owner && owner != &order->no_op)
                return true;
        }
    }
    return order->held_count != 0;
}

/* Where the path's failure is kept while it waits for a farewell. */
static struct prs_event *failure_on_path_of(struct prs_peer *peer, const struct prs_event *failure)
{
    return &peer->failure[peer->order.queue[failure->queue].path];
}

/* One of the failures that are kept. */
static const struct prs_event *kept_failure(const struct prs_peer *peer)
{
    uint32_t path = 0;

    while (path + 1 < peer->path_count && peer->failure[path].kind != PRS_EVENT_ERROR)
        path++;
    return &peer->failure[path];
}

/* The other side does not answer any more, but no caller waits for the requests that failed: a credit, a lazy put, or a
 * zero-byte write that tests whether the other side is alive. If the other side has closed, or its state cannot be
 * found out, only a caller that waits gets an error. The farewell of the other side may still arrive, so keep the
 * failure until then. */
static void suspend_failure(struct prs_peer *peer, const struct prs_event *failure)
{
    struct prs_event *kept = failure_on_path_of(peer, failure);

    if (kept->kind != PRS_EVENT_ERROR)
        *kept = *failure;
    peer->remote_gone |= peer->remote_closed || peer->stream_lost;
    if (!peer->remote_gone && !peer->farewell_ns) {
        peer->farewell_ns = prs_clock_ns() + FAREWELL_MS * 1000000ull;
        peer->idle_start = PRS_PEER_IDLE_POLLS;
    }
}

/* Can another rail carry this request? Not if the request itself is wrong. */
static bool replace_path(struct prs_peer *peer, const struct prs_event *failure)
{
    uint32_t path = peer->order.queue[failure->queue].path;
    char why[128];

    if (!is_of_rail(failure->error))
        return false;
    snprintf(why, sizeof(why), "%s: %s", failure->text, failure->cause);
    if (!prs_failover_start(peer, path, why))
        return false;
    return failure->queue < peer->queues || !prs_failover_lose_loopback(peer, path);
}

/* The other side is alive: give up all paths whose failure was kept. Return false if one of them cannot be replaced; it
 * is kept. */
static bool replace_failed_paths(struct prs_peer *peer)
{
    for (uint32_t path = 0; path < peer->path_count; path++) {
        struct prs_event *failure = &peer->failure[path];

        if (failure->kind == PRS_EVENT_ERROR && !replace_path(peer, failure))
            return false;
        failure->kind = PRS_EVENT_DONE;
    }
    return true;
}

/* Is it still unknown whether the other side has closed? Its farewell comes shortly after its queues are gone. A NIC
 * that retries for seconds reports missing queues after that; some providers of libfabric report them at once. */
static bool may_have_closed(const struct prs_peer *peer)
{
    return peer->nic->fails_early && !peer->remote_gone && !peer->remote_closed && peer->stream_fd >= 0;
}

int prs_health_judge(struct prs_peer *peer, const struct prs_event *failure)
{
    bool away = failure->error == -ETIMEDOUT || failure->error == -ECONNRESET;
    const struct prs_event *kept;

    /* A shared endpoint continues after one connection has closed, so this error means a wrong key. */
    if (failure->error == -EREMOTEIO && peer->nic->fails_early)
        away = may_have_closed(peer) || peer->remote_closed;
    if (away && (may_have_closed(peer) || !has_awaited_requests(&peer->order))) {
        suspend_failure(peer, failure);
        return 0;
    }
    if (away && peer->remote_closed)
        return fail_closed(peer);
    if (replace_path(peer, failure))
        return 0;
    kept = failure_on_path_of(peer, failure);
    if (failure->error == -ECONNRESET && kept->kind == PRS_EVENT_ERROR)
        return fail_completion(peer, kept); /* which closed the queue */
    return fail_completion(peer, failure);
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
    if (r == PRS_AGAIN && replace_failed_paths(peer))
        return 0; /* the other side lives */
    if (r)
        return fail_completion(peer, kept_failure(peer));
    peer->remote_gone = true;
    return has_awaited_requests(&peer->order) ? fail_closed(peer) : 0;
}

/* The network of the TCP stream has failed, so the stream no longer shows that a silent peer has died. The network of
 * the rails may still work. So post a zero-byte write to the peer now and then: the NIC reports whether it answers. */
static PRS_COLD int touch_peer(struct prs_peer *peer)
{
    uint64_t now_ns = prs_clock_ns();

    if (peer->remote_gone || now_ns < peer->touch_ns || prs_order_touch(&peer->order))
        return 0;
    peer->touch_ns = now_ns + TOUCH_MS * 1000000ull;
    return 0;
}

static PRS_COLD int lose_stream(struct prs_peer *peer, int error)
{
    PRS_WARN(
        "the TCP connection to %s was lost: %s; is the network of NCCL_SOCKET_IFNAME away? RDMA goes on, and shows "
        "whether the peer is alive",
        peer->remote, strerror(error));
    if (peer->failover)
        prs_watch_lose_stream(peer);
    prs_fork_close(peer->stream_fd);
    peer->stream_fd = -1;
    peer->stream_lost = true;
    if (peer->failover && prs_failover_is_active(peer))
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
        return has_awaited_requests(&peer->order) ? fail_closed(peer) : 0;
    }
    /* once it has arrived, the next check returns an error only if this side still sends or waits */
    r = prs_failover_read(peer);
    if (r >= 0 || peer->error)
        return peer->error;
    if (r != -ECONNRESET && r != -EPIPE) /* a killed process causes these, too */
        return lose_stream(peer, -r);
    return prs_peer_fail(peer, -ECONNRESET, "the process at %s has died: its connection ended without a farewell",
                         peer->remote);
}

/* The other side has said that it sends nothing more. Its requests were complete by then, and nothing has arrived for
 * long. */
static PRS_COLD int end_after_loss(struct prs_peer *peer)
{
    const struct prs_loss *loss = peer->loss;

    if (!loss->since_ns || prs_clock_ns() - loss->since_ns < LOSS_MS * 1000000ull || prs_records_busy(peer))
        return 0;
    return prs_peer_fail(peer, -ECONNRESET, "the peer at %s has lost rank %u: %s", peer->remote, loss->rank, loss->why);
}

/* waiting: a caller waits for transfers of this path or for arrivals. A port that is down is replaced at once, if it
 * can be, but is an error only after the NIC's retries. */
static int check_rail(struct prs_peer *peer, uint32_t path, bool waiting)
{
    int rail = peer->path[path].local_rail;

    if (prs_peer_lost_path(peer, path)) /* an unflushed link needs no check: failover.c ends it */
        return peer->link[path]->unflushed || prs_order_probe_idle(&peer->order, path)
                   ? 0
                   : prs_fabric_check_rail(peer->fabric, rail, UINT64_MAX);
    if (peer->failover && prs_fabric_check_rail(peer->fabric, rail, 0) < 0 &&
        prs_failover_start(peer, path, prs_error_text()))
        return 0;
    return prs_fabric_check_rail(peer->fabric, rail,
                                 waiting ? prs_config_patience_ns(&peer->fabric->config) : UINT64_MAX);
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

int prs_health_check(struct prs_peer *peer)
{
    int r;

    if (peer->farewell_ns)
        return await_farewell(peer);
    if (peer->records && peer->records->raise.refused_ns)
        return prs_records_raise(peer); /* a signal waits because another peer of this process has claimed its word */
    r = check_rails(peer, has_awaited_requests(&peer->order));
    if (!r && peer->loss)
        r = end_after_loss(peer);
    return r < 0 ? r : check_peer_alive(peer);
}

int prs_peer_check_remote(struct prs_peer *peer)
{
    int r;

    if (peer->error)
        return prs_peer_error_again(peer);
    prs_peer_lock(peer);
    r = check_rails(peer, true); /* perhaps the other side cannot reach us */
    prs_peer_unlock(peer);
    if (r)
        return r;
    if (peer->remote_gone && peer->stream_lost)
        return fail_completion(peer, kept_failure(peer));
    return peer->remote_gone ? prs_peer_fail(peer, -ECONNRESET,
                                             "the peer at %s has closed, so the awaited writes will never arrive; had "
                                             "it an error (see its log), or was it aborted?",
                                             peer->remote)
                             : 0;
}

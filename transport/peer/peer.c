/* SPDX-License-Identifier: Apache-2.0 */
/* From an op through the order engine to a queue. progress.c has the way back. */
#include "transport/peer/peer.h"

#include <errno.h>
#include <string.h>

#include "transport/peer/fail.h"
#include "transport/peer/links.h"
#include "transport/util/clock.h"
#include "transport/util/compiler.h"
#include "transport/util/dma.h"
#include "transport/util/error.h"

/* ---- start ---- */

static PRS_COLD int fail_post(struct prs_peer *peer, const struct prs_chain *chain, int error)
{
    if (error == -EKEYREJECTED)
        return prs_peer_fail(peer, -EREMOTEIO, "%s", prs_error_last());
    return prs_peer_fail(peer, error == -ENOMEM ? -EIO : error, "posting %u requests on queue %u failed: %s",
                         chain->count, chain->queue, strerror(-error));
}

/* Begin a batch of a peer with several rails. Meanwhile the thread of watch.c may destroy the queue pairs of a NIC that
 * has died. */
static PRS_COLD uint64_t begin_measured(struct prs_peer *peer)
{
    prs_peer_lock(peer);
    return prs_clock_ns();
}

int prs_peer_post(struct prs_peer *peer)
{
    uint64_t now_ns = unlikely(peer->measured) ? begin_measured(peer) : 0; /* 0: one rail */
    struct prs_chain chain;
    int r = 0;

    peer->unposted = 0;
    prs_dma_reads_before_post(); /* [nic-post] */
    while (peer->order.dirty && prs_order_take(&peer->order, now_ns, &chain)) {
        const struct prs_order_queue *queue = &peer->order.queue[chain.queue];

        if (unlikely(now_ns) && peer->link[queue->path]->unflushed)
            continue; /* its queue pairs may be gone; its requests are replayed */
        r = peer->nic->post(peer->queue[chain.queue], queue->wr, queue->mask, chain.first, chain.count);
        if (unlikely(r)) {
            r = fail_post(peer, &chain, r);
            break;
        }
        peer->doorbells++;
        peer->work_requests += chain.count;
    }
    if (unlikely(now_ns))
        prs_peer_unlock(peer);
    return r;
}

/* If nothing is in flight, no completion will come that would lead to posting later: post at once, unless the caller
 * has more for the same doorbell. */
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
        return prs_peer_error_again(peer);
    return post ? prs_peer_post(peer) : 0;
}

/* An op was admitted: post it now, or later with the ops that follow? */
static inline int post_or_batch(struct prs_peer *peer, bool post_now)
{
    if (post_now || ++peer->unposted >= PRS_ORDER_BATCH)
        return prs_peer_post(peer);
    prs_peer_want_progress(peer);
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

/* A peer whose caller said that it sends no signals would get PRS_BUSY for ever, so return an error. */
static PRS_COLD int refuse_signal(const struct prs_peer *peer, int r)
{
    if (r != PRS_BUSY || !peer->no_signals)
        return r;
    return prs_fail(-EINVAL,
                    "a signal, or under counted a put of a group, to %s: its connection was made without "
                    "signals (no_signals)",
                    peer->remote);
}

int prs_peer_put(struct prs_peer *peer, struct prs_op *op, const struct prs_put *put)
{
    const uint32_t *local_keys = NULL;
    bool post_now;
    int r;

    if (unlikely(peer->error))
        return prs_peer_error_again(peer);
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
        op->status = 0; /* there is nothing to write or to notify */
        return 0;
    }
    post_now = posts_at_once(peer) || (put->len_bytes >= PRS_ORDER_PROMPT_BYTES && !peer->batching);
    r = prs_order_put(&peer->order, op, put, local_keys);
    if (r)
        return put->group == PRS_GROUP_NONE || peer->order.policy != PRS_POLICY_COUNTED ? r : refuse_signal(peer, r);
    return post_or_batch(peer, post_now);
}

int prs_peer_get(struct prs_peer *peer, struct prs_op *op, const struct prs_get *get)
{
    bool post_now = posts_at_once(peer);
    int r;

    if (unlikely(peer->error))
        return prs_peer_error_again(peer);
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
        return prs_peer_error_again(peer);
    if (signal->dst_addr % sizeof(signal->value) || !signal->dst)
        return prs_fail(-EINVAL, "signal at %#llx: must be 8-byte aligned and have remote keys",
                        (unsigned long long)signal->dst_addr);
    r = prs_order_signal(&peer->order, op, signal);
    return r ? refuse_signal(peer, r) : post_or_batch(peer, post_now);
}

int prs_peer_settle(struct prs_peer *peer)
{
    int r, posted;

    if (unlikely(peer->error))
        return prs_peer_error_again(peer);
    r = prs_order_settle(&peer->order);
    posted = peer->order.dirty ? prs_peer_post(peer) : 0;
    if (r == PRS_AGAIN && (peer->remote_closed || peer->remote_gone))
        return prs_peer_fail(peer, -ECONNRESET,
                             "the peer at %s has closed before it confirmed that all signals were raised",
                             peer->remote);
    return posted < 0 ? posted : r;
}

int prs_peer_flush(struct prs_peer *peer, struct prs_op *op, const struct prs_region *region, const void *addr)
{
    uint64_t rkey[PRS_MAX_RAILS];
    bool post_now = posts_at_once(peer);
    int r;

    if (unlikely(peer->error))
        return prs_peer_error_again(peer);
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
    return peer->queue[0]->number;
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
    prs_peer_lock(peer); /* any thread may ask, and a link may be replaced */
    for (uint32_t i = 0; i < peer->path_count; i++) {
        out->receives += peer->link[i]->receives;
        out->rail_bytes[peer->path[i].position] = peer->queues == 1 ? order->bytes : order->path_bytes[i];
    }
    prs_peer_unlock(peer);
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/connect/setup.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "transport/peer/links.h"
#include "transport/peer/recovery.h"
#include "transport/util/clock.h"
#include "transport/util/error.h"
#include "transport/util/fork.h"
#include "transport/util/log.h"
#include "transport/peer/watch.h"

enum {
    DEFAULT_MAX_OPS = 256,
    LIMIT_OPS = 1 << 20, /* of max_ops: far more than a queue of any device holds */
    MOST_SLOTS = 256,    /* of a queue: more in flight gains nothing, and each peer pays for the memory */
    MAX_PART_BYTES = 1 << 30,
    MAX_SERVICE_LEVEL = 15,
};

int prs_setup_options(const struct prs_fabric *fabric, const struct prs_peer_options *options,
                      struct prs_setup_options *out)
{
    static const struct prs_peer_options none = {.traffic_class = -1};
    const struct prs_peer_options *from = options ? options : &none;
    int service_level = fabric->config.service_level;

    if (prs_check_reserved(from, "struct prs_peer_options"))
        return -EINVAL;
    if (from->private_bytes > PRS_PRIVATE_DATA_BYTES)
        return prs_fail(-EINVAL, "%u bytes of private data: at most %d", from->private_bytes, PRS_PRIVATE_DATA_BYTES);
    if (from->max_ops > LIMIT_OPS)
        return prs_fail(-EINVAL, "max_ops %u: at most %d", from->max_ops, LIMIT_OPS);
    if (from->queues_per_rail < 0 || from->queues_per_rail > PRS_ORDER_MAX_QUEUES_PER_RAIL)
        return prs_fail(-EINVAL, "%d queues per rail: at most %d", from->queues_per_rail,
                        PRS_ORDER_MAX_QUEUES_PER_RAIL);
    if (service_level < 0)
        service_level = from->traffic_class >= 0 && from->traffic_class <= MAX_SERVICE_LEVEL ? from->traffic_class : 0;
    *out = (struct prs_setup_options){
        .on_notify = from->on_notify,
        .user = from->user,
        .max_ops = from->max_ops ? from->max_ops : DEFAULT_MAX_OPS,
        .traffic_class = from->traffic_class >= 0 ? from->traffic_class : fabric->config.traffic_class,
        .service_level = service_level,
        .queues_per_rail = (uint32_t)(from->queues_per_rail ? from->queues_per_rail : fabric->config.queues_per_rail),
        .private_data.bytes = from->private_bytes,
        .exclusive_adds = from->exclusive_adds,
        .patient = from->patient,
        .replaces_rails = from->replaces_rails,
        .no_signals = from->no_signals,
        .timeout_ms = from->timeout_ms ? from->timeout_ms : fabric->config.timeout_ms,
    };
    if (from->private_bytes)
        memcpy(out->private_data.data, from->private_data, from->private_bytes);
    return prs_policy_parse(from->policy, (enum prs_policy)fabric->config.policy, &out->policy);
}

/* ---- describe ---- */

static void describe(struct prs_peer *peer, const char *why)
{
    size_t room = sizeof(peer->description);
    int at = snprintf(peer->description, room, "peer %s over", peer->remote[0] ? peer->remote : "(connecting)");

    for (uint32_t i = 0; i < peer->path_count && (size_t)at < room; i++) {
        const struct prs_rail_info *own = &peer->fabric->rail[peer->path[i].local_rail].info;
        const struct prs_wire_rail *other = &peer->path[i].peer;
        char where[64], own_where[64];

        peer->nic->address_text(&other->address, where, sizeof(where));
        peer->nic->address_text(&peer->path[i].own.told, own_where, sizeof(own_where));
        at += snprintf(peer->description + at, room - (size_t)at, "%s%s %s:%d (%s) to %s:%u (%s)", i ? "," : "",
                       other->standby ? " on standby" : "", own->name, own->port, own_where, other->name, other->port,
                       where);
    }
    if ((size_t)at < room)
        at += snprintf(peer->description + at, room - (size_t)at, "; %u queue%s, %s (%s)", peer->queues,
                       peer->queues == 1 ? "" : "s", prs_policy_names[peer->order.policy], why);
    if ((size_t)at < room && peer->traffic_class > 0)
        snprintf(peer->description + at, room - (size_t)at, "; traffic class %d", peer->traffic_class);
}

/* ---- open ---- */

static uint32_t power_of_two_up_to(uint32_t limit)
{
    uint32_t power = 1;

    while (power * 2 <= limit)
        power *= 2;
    return power;
}

/* How many slots a send queue has: max_ops, rounded up to a power of two, but at most MOST_SLOTS and what each device
 * allows. */
static uint32_t choose_depth(const struct prs_peer *peer, uint32_t max_ops)
{
    uint32_t wanted = power_of_two_up_to(2 * max_ops - 1);

    if (wanted > MOST_SLOTS)
        wanted = MOST_SLOTS;

    for (uint32_t i = 0; i < peer->path_count; i++) {
        const struct prs_rail *rail = &peer->fabric->rail[peer->path[i].local_rail];
        uint32_t most = rail->domain->max_send_wr;

        if (most && wanted > most) {
            PRS_INFO("%s:%d holds %u requests in a queue: %u send slots for %u ops", rail->info.name, rail->port, most,
                     power_of_two_up_to(most), max_ops);
            wanted = power_of_two_up_to(most);
        }
    }
    return wanted;
}

/* A longer write carries no immediate, on any path: an adaptive network sends all writes with immediate along a single
 * route, and a rail may have a limit of its own. 0: any write may carry an immediate. */
static uint64_t plain_bytes(const struct prs_peer *peer)
{
    uint64_t least = 0;

    for (uint32_t i = 0; i < peer->path_count; i++) {
        const struct prs_rail *rail = &peer->fabric->rail[peer->path[i].local_rail];
        uint64_t own = rail->info.adaptive_routing ? (uint64_t)peer->fabric->config.ar_bytes : rail->plain_bytes;

        if (own && (!least || own < least))
            least = own;
    }
    return least;
}

static bool replaces_rails(const struct prs_peer *peer, const struct prs_setup_options *options)
{
    int failover = peer->fabric->config.failover;

    return peer->nic->fails_over && (failover == PRS_FAILOVER_UNSET ? options->replaces_rails : failover != 0);
}

static int open_order(struct prs_peer *peer, const struct prs_setup_options *options, const uint32_t *remote_position,
                      uint32_t depth, char *why, size_t why_bytes)
{
    struct prs_order_options order = {.max_ops = options->max_ops,
                                      .in_order = peer->nic->in_order,
                                      .fence = peer->nic->fence,
                                      .path_count = peer->path_count,
                                      .queues_per_path = peer->queues_per_path,
                                      .depth = depth,
                                      .probe_depth = prs_links_loopback_depth(depth),
                                      .split_queues = peer->fabric->config.split_queues,
                                      .plain_bytes = plain_bytes(peer),
                                      .failover = replaces_rails(peer, options),
                                      .max_part_bytes = MAX_PART_BYTES};
    struct prs_policy_facts facts = {
        .in_order = peer->nic->in_order, .fence = peer->nic->fence, .queues = peer->queues};
    int r;

    for (uint32_t i = 0; i < peer->path_count; i++) {
        const struct prs_rail *rail = &peer->fabric->rail[peer->path[i].local_rail];
        uint32_t other = peer->path[i].peer.speed_mbps;
        uint32_t mbps = other && other < rail->info.speed_mbps ? other : rail->info.speed_mbps;

        facts.adaptive_routing |= rail->info.adaptive_routing;
        facts.relaxed_ordering |= rail->info.relaxed_ordering;
        order.path[i].local_rail = (uint32_t)peer->path[i].local_rail;
        order.path[i].remote_rail = remote_position[i];
        order.path[i].rate = (float)mbps / 8;
        order.path[i].standby = peer->path[i].peer.standby;
        if (rail->max_message_bytes < order.max_part_bytes)
            order.max_part_bytes = rail->max_message_bytes;
    }
    /* Only the simulator has ar_bytes 0: there the order engine takes queues to keep order even so. */
    order.adaptive_routing = facts.adaptive_routing && peer->fabric->config.ar_bytes;
    r = prs_policy_choose(options->policy, &facts, &order.policy, why, why_bytes);
    if (!r)
        r = prs_order_init(&peer->order, &order);
    if (!r && options->no_signals)
        prs_order_refuse_signals(&peer->order);
    return r;
}

/* Memory for copies of inline payloads. It is registered only where the NIC has no inline data. */
static int open_inline(struct prs_peer *peer, uint32_t depth)
{
    size_t each = (size_t)depth * PRS_INLINE_BYTES,
           loopback_each = (size_t)prs_links_loopback_depth(depth) * PRS_INLINE_BYTES;
    uint32_t loopbacks = peer->failover ? peer->path_count : 1; /* that may raise signals */
    int r = prs_own_memory_init(&peer->inline_bytes, each * peer->queues + loopback_each * loopbacks, "inline data");

    for (uint32_t q = 0; !r && q < peer->queues + loopbacks; q++) {
        /* The probe queue of a path is like its first queue. */
        uint32_t probe = q < peer->queues ? 0 : q - peer->queues;
        const struct prs_queue *like = peer->queue[q < peer->queues ? q : probe];
        struct prs_order_queue *queue = &peer->order.queue[q];

        queue->inline_bytes = (uint8_t *)peer->inline_bytes.addr + (q - probe) * each + probe * loopback_each;
        if (like->takes_inline)
            continue;
        r = prs_own_memory_register(&peer->inline_bytes, queue->path, like->link->rail->domain, PRS_ACCESS_LOCAL);
        queue->inline_key = prs_own_memory_local_key(&peer->inline_bytes, queue->path);
    }
    return r;
}

/* Memory to which the other side writes the sizes of messages that it sends as plain writes: these give the receiver no
 * byte count. */
static int open_sizes(struct prs_peer *peer)
{
    int r = prs_own_memory_init(&peer->sizes, PRS_NOTIFY_IDS * sizeof(uint64_t), "sizes of messages");

    for (uint32_t i = 0; i < peer->path_count && !r; i++)
        r = prs_own_memory_register(&peer->sizes, i, peer->link[i]->rail->domain, PRS_ACCESS_WRITTEN);
    return r;
}

/* Are signals sent as records? They need not be if NICs can add: the receiver's NIC performs an add, and our NIC must
 * be able to request it. */
static bool signals_are_records(const struct prs_peer *peer)
{
    bool adds = true;

    if (peer->no_signals)
        return false;
    for (uint32_t i = 0; i < peer->path_count; i++)
        adds &= peer->link[i]->rail->domain->adds && peer->path[i].peer.adds;
    return prs_policy_signals_are_records(peer->order.policy, adds);
}

int prs_setup_open(const struct prs_fabric *fabric, const struct prs_setup_options *options,
                   const struct prs_path *path, const uint32_t *remote_position, uint32_t path_count,
                   uint32_t queues_per_path, const struct prs_wire_queues *remote, struct prs_peer **out)
{
    struct prs_peer *peer = prs_lines_calloc(sizeof(*peer));
    char why[128];
    uint32_t depth;
    int r;

    if (!peer)
        return prs_fail(-ENOMEM, "no memory for a peer");
    peer->fabric = fabric;
    peer->nic = fabric->rail[path[0].local_rail].domain->nic; /* the same on all paths: prs_fabric_check_set() */
    peer->stream_fd = -1;
    peer->on_notify = options->on_notify;
    peer->user = options->user;
    peer->traffic_class = options->traffic_class;
    peer->service_level = options->service_level;
    peer->exclusive_adds = options->exclusive_adds;
    peer->no_signals = options->no_signals;
    peer->path_count = (uint16_t)path_count;
    peer->measured = path_count > 1;
    peer->queues_per_path = queues_per_path;
    peer->queues = path_count * queues_per_path;
    for (uint32_t i = 0; i < path_count; i++) {
        peer->path[i] = path[i];
        peer->rail_mask |= 1ull << path[i].local_rail;
    }
    depth = choose_depth(peer, options->max_ops);
    r = open_order(peer, options, remote_position, depth, why, sizeof(why));
    if (r)
        goto free_peer;
    if (options->on_notify) {
        peer->arriving = calloc(1, sizeof(*peer->arriving));
        if (!peer->arriving) {
            r = prs_fail(-ENOMEM, "no memory for notifications");
            goto close_order;
        }
    }
    r = prs_failover_open(peer);
    /* The thread of watch.c polls the queues of one peer alone. */
    peer->cqs = peer->failover || !peer->nic->shares_cqs ? NULL : options->cqs;
    if (!r)
        r = prs_links_open(peer, remote);
    if (!r)
        r = open_inline(peer, depth);
    if (!r && signals_are_records(peer))
        r = prs_records_open(peer);
    if (!r && peer->on_notify && peer->nic->in_order && plain_bytes(peer))
        r = open_sizes(peer);
    if (r) {
        prs_peer_close(peer);
        return r;
    }
    describe(peer, why);
    *out = peer;
    return 0;

close_order:
    prs_order_fini(&peer->order);
free_peer:
    prs_lines_free(peer);
    return r;
}

void prs_setup_addresses(const struct prs_peer *peer, struct prs_wire_queues *out)
{
    *out = (struct prs_wire_queues){
        .count = peer->queues, .counted = signals_are_records(peer), .failover = peer->failover != NULL};
    for (uint32_t q = 0; q < peer->queues; q++)
        peer->nic->address(peer->queue[q], &out->queue[q]);
    if (peer->records)
        prs_records_window(peer, &out->records, &out->credit);
    out->sizes.addr = (uintptr_t)peer->sizes.addr;
    for (uint32_t i = 0; i < peer->path_count; i++)
        out->sizes.key[i] = prs_own_memory_remote_key(&peer->sizes, i);
}

int prs_setup_accept_records(struct prs_peer *peer, const struct prs_wire_queues *remote)
{
    int r;

    if (!remote->counted)
        return 0;
    r = prs_links_open_loopbacks(peer);
    if (!r)
        r = prs_records_open(peer);
    if (!r)
        peer->records->credit = remote->credit;
    return r;
}

void prs_setup_send_sizes(struct prs_peer *peer, const struct prs_wire_window *sizes)
{
    if (sizes->addr)
        prs_order_set_sizes(&peer->order, sizes->addr, sizes->key);
}

int prs_setup_send_records(struct prs_peer *peer, const struct prs_wire_window *records)
{
    struct prs_wire_window own_ring, own_credit;

    if (!signals_are_records(peer))
        return 0;
    if (!records->addr)
        return prs_fail(-EPROTO, "the other side has no memory for signal records");
    prs_records_window(peer, &own_ring, &own_credit);
    return prs_order_set_records(&peer->order, records->addr, records->key,
                                 (const uint64_t *)(uintptr_t)own_credit.addr);
}

/* ---- connect ---- */

static int try_later(const struct prs_peer *peer, struct prs_setup_progress *progress, uint32_t path, int error)
{
    const struct prs_config *config = &peer->fabric->config;
    const struct prs_rail_info *own = &peer->fabric->rail[peer->path[path].local_rail].info;
    const struct prs_wire_rail *other = &peer->path[path].peer;
    char where[64], own_where[64];

    peer->nic->address_text(&other->address, where, sizeof(where));
    peer->nic->address_text(&peer->path[path].own.told, own_where, sizeof(own_where));
    if (progress->tries++ >= config->mqp_retry_count)
        return prs_fail(-error,
                        "%s:%d (%s) cannot reach %s:%u (%s): %s after %d tries; are the rails in one "
                        "network, and does it route between them?",
                        own->name, own->port, own_where, other->name, other->port, where, strerror(error),
                        progress->tries);
    PRS_INFO("%s:%d to %s:%u (%s): %s; trying again in %d ms", own->name, own->port, other->name, other->port, where,
             strerror(error), config->mqp_retry_ms);
    progress->again_ns = prs_clock_ns() + (uint64_t)config->mqp_retry_ms * 1000000;
    return PRS_AGAIN;
}

int prs_setup_connect(struct prs_peer *peer, const struct prs_wire_queues *remote, struct prs_setup_progress *progress)
{
    if (remote->count != peer->queues)
        return prs_fail(-EPROTO, "the other side has %u queues, expected %u", remote->count, peer->queues);
    if (!remote->failover)
        prs_failover_close(peer);
    if (progress->again_ns && prs_clock_ns() < progress->again_ns)
        return PRS_AGAIN;
    for (; progress->next_queue < peer->queues; progress->next_queue++) {
        uint32_t q = progress->next_queue, path = peer->order.queue[q].path;
        int error = 0;
        int r = peer->nic->connect(peer->queue[q], &remote->queue[q], &peer->path[path].peer.address, &error);

        if (r == PRS_AGAIN)
            return try_later(peer, progress, path, error);
        if (r)
            return r;
    }
    return 0;
}

void prs_setup_finish(struct prs_peer *peer, struct prs_stream *stream, const struct prs_wire_private *private_data)
{
    const char *rest = strchr(peer->description, ' ');
    char text[sizeof(peer->description)];

    peer->private_bytes = private_data->bytes;
    memcpy(peer->private_data, private_data->data, private_data->bytes);
    peer->stream_fd = stream->fd;
    stream->fd = -1;
    memcpy(peer->remote, stream->remote, sizeof(peer->remote));
    rest = strstr(rest ? rest : "", " over");
    snprintf(text, sizeof(text), "peer %s%s", peer->remote, rest ? rest : "");
    memcpy(peer->description, text, sizeof(text));
    PRS_INFO("connected: %s", peer->description);
    if (peer->failover)
        prs_watch_add(peer);
}

/* ---- close ---- */

void prs_peer_close(struct prs_peer *peer)
{
    if (!peer)
        return;
    if (peer->fabric->owner != getpid())
        return; /* in a forked child: the queues belong to the parent; copied memory ends with the child */
    if (peer->failover)
        prs_watch_remove(peer);
    for (uint32_t i = 0; i < peer->path_count; i++)
        if (peer->link[i])
            peer->nic->kill(peer->link[i]);
    prs_order_fail(&peer->order, -ECANCELED);
    for (uint32_t i = 0; i < peer->path_count; i++) {
        if (!peer->link[i])
            continue;
        peer->link[i]->stream_fd = peer->stream_fd;
        peer->nic->close(peer->link[i]);
    }
    prs_recovery_close(peer);
    prs_records_close(peer);
    prs_own_memory_fini(&peer->sizes);
    prs_own_memory_fini(&peer->inline_bytes);
    if (peer->stream_fd >= 0) {
        /* The farewell: this byte says that the end of the stream is deliberate. Without it, the process has died.
         * shutdown() is needed: a child may still hold the descriptor too, if clone() made it. */
        const char farewell = PRS_NOTE_FAREWELL;

        if (send(peer->stream_fd, &farewell, 1, MSG_DONTWAIT | MSG_NOSIGNAL) < 0)
            PRS_DEBUG("%s: had closed before us", peer->remote);
        shutdown(peer->stream_fd, SHUT_WR);
        prs_fork_close(peer->stream_fd);
    }
    prs_order_fini(&peer->order);
    prs_failover_close(peer);
    free(peer->arriving);
    prs_lines_free(peer);
}

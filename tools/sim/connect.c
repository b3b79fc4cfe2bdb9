/* SPDX-License-Identifier: Apache-2.0 */
/* Connections: what transport/connect/listener.c and connector.c do over TCP, as calls of setup.c. A connection is made
 * when it is first used. Above a limit, idle connections are closed, oldest first, and made again when they are needed.
 * That limits memory, and changes only the numbers of tags and records. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "tools/sim/memory.h"
#include "tools/sim/sim.h"
#include "transport/peer/peer.h"
#include "transport/connect/setup.h"

enum { LOOK_AT = 8 /* old connections that are examined before a new one is opened beyond the limit */ };

static int open_side(struct sim *sim, struct sim_end *end, struct prs_wire_queues *wire)
{
    struct prs_setup_options options = {.user = end,
                                        .max_ops = sim->options.window,
                                        .queues_per_rail = sim->options.queues_per_rail,
                                        .policy = sim->options.policy};
    struct prs_path path[PRS_MAX_RAILS];
    uint32_t position[PRS_MAX_RAILS];
    int r;

    if (sim->workload && sim->workload->notified)
        options.on_notify = sim_notified;
    memset(path, 0, sizeof(path));
    for (uint32_t i = 0; i < sim->rails; i++) {
        path[i].local_rail = (int)i;
        path[i].peer.speed_mbps = sim->fabric.rail[i].info.speed_mbps;
        path[i].peer.adds = sim_nic.adds;
        position[i] = i;
    }
    sim->opening = end;
    r = prs_setup_open(&sim->fabric, &options, path, position, sim->rails, sim->options.queues_per_rail, NULL,
                       &end->peer);
    if (!r)
        prs_setup_addresses(end->peer, wire);
    return r;
}

static int exchange(struct sim *sim, struct sim_pair *pair)
{
    struct prs_wire_queues wire[2];
    int r = 0;

    for (int i = 0; i < 2 && !r; i++)
        r = open_side(sim, &pair->end[i], &wire[i]);
    for (int i = 0; i < 2 && !r; i++) {
        sim->opening = &pair->end[i];
        r = prs_setup_accept_records(pair->end[i].peer, &wire[1 - i]);
    }
    for (int i = 0; i < 2 && !r; i++) {
        prs_setup_addresses(pair->end[1 - i].peer, &wire[1 - i]);
        r = prs_setup_send_records(pair->end[i].peer, &wire[1 - i].records);
    }
    for (int i = 0; i < 2 && !r; i++)
        r = sim_rails_connect(sim, &pair->end[i]);
    return r;
}

static void add_counts(struct sim_counts *to, const struct sim_end *end)
{
    const struct prs_peer *peer = end->peer;

    to->work_requests += peer->work_requests;
    to->doorbells += peer->doorbells;
    to->completions += peer->completions;
    to->arrivals += peer->arrivals;
    to->fences += peer->order.stats.fences;
    to->drains += peer->order.stats.drains;
    to->records += peer->order.tally ? peer->order.tally->next_number : 0;
    to->bytes += peer->order.stats.bytes;
}

static void append(struct sim *sim, struct sim_pair *pair)
{
    pair->older = sim->newest;
    pair->newer = NULL;
    *(sim->newest ? &sim->newest->newer : &sim->oldest) = pair;
    sim->newest = pair;
}

static void take_out(struct sim *sim, struct sim_pair *pair)
{
    *(pair->older ? &pair->older->newer : &sim->oldest) = pair->newer;
    *(pair->newer ? &pair->newer->older : &sim->newest) = pair->older;
}

static void close_pair(struct sim *sim, struct sim_pair *pair)
{
    for (int i = 0; i < 2; i++) {
        struct sim_end *end = &pair->end[i];
        struct prs_team *rank = end->rank;
        uint32_t other = pair->end[1 - i].rank->rank;

        if (end->peer) {
            add_counts(&rank->counts, end);
            sim_rails_disconnect(end);
            prs_peer_close(end->peer);
            rank->end[other] = NULL;
            rank->dispatch.queues[other].peer = NULL;
        }
    }
    take_out(sim, pair);
    sim->pairs_open--;
    sim_free(pair);
}

/* Is this side idle, with no signal left to raise? */
static bool is_settled(const struct sim_end *end)
{
    const struct prs_peer *peer = end->peer, *other = end->other->peer;
    const struct prs_order *order = &peer->order;

    if (end->events || end->listed || order->ops || order->dirty || order->held_count ||
        end->rank->dispatch.queues[end->other->rank->rank].count)
        return false;
    for (uint32_t i = 0; i < order->data_queues + order->probe_queues; i++)
        if (order->queue[i].posted != order->queue[i].tail && order->queue[i].signaled != order->queue[i].tail)
            return false;
    if (!order->tally)
        return true;
    return other->records && other->records->counts.raised == order->tally->next_number;
}

/* Examine the oldest connections. A connection that has not settled counts as new again, so that the next call examines
 * others. */
static void close_some(struct sim *sim)
{
    for (int i = 0; i < LOOK_AT && sim->oldest && sim->pairs_open >= sim->options.connections; i++) {
        struct sim_pair *pair = sim->oldest;

        if (is_settled(&pair->end[0]) && is_settled(&pair->end[1])) {
            close_pair(sim, pair);
        } else {
            take_out(sim, pair);
            append(sim, pair);
        }
    }
}

static void meet(struct prs_team *rank, uint32_t other, struct sim_end *end)
{
    rank->end[other] = end;
    rank->connected += !rank->met[other];
    rank->met[other] = true;
}

int sim_connect(struct sim *sim, uint32_t a, uint32_t b)
{
    struct sim_pair *pair;
    int r;

    if (sim->pairs_open >= sim->options.connections)
        close_some(sim);
    pair = sim_calloc(1, sizeof(*pair));
    if (!pair)
        return -ENOMEM;
    for (int i = 0; i < 2; i++) {
        pair->end[i].rank = &sim->rank[i ? b : a];
        pair->end[i].other = &pair->end[1 - i];
    }
    sim->pairs_made++;
    append(sim, pair);
    if (++sim->pairs_open > sim->pairs_most)
        sim->pairs_most = sim->pairs_open;
    r = exchange(sim, pair);
    if (r) {
        fprintf(stderr, "perseus-sim: cannot connect ranks %u and %u: %s\n", a, b, prs_error_text());
        return r;
    }
    meet(&sim->rank[a], b, &pair->end[0]);
    meet(&sim->rank[b], a, &pair->end[1]);
    return 0;
}

void sim_disconnect_all(struct sim *sim)
{
    while (sim->oldest)
        close_pair(sim, sim->oldest);
}

struct sim_counts sim_rank_counts(struct sim *sim, uint32_t index)
{
    const struct prs_team *rank = &sim->rank[index];
    struct sim_counts counts = rank->counts;

    for (uint32_t i = 0; i < sim->options.ranks; i++)
        if (rank->end[i])
            add_counts(&counts, rank->end[i]);
    counts.puts += rank->dispatch.stats.puts;
    counts.signals += rank->dispatch.stats.signals;
    counts.fences += rank->dispatch.stats.fences;
    return counts;
}

struct sim_counts sim_all_counts(struct sim *sim)
{
    struct sim_counts sum = {0};

    for (uint32_t i = 0; i < sim->options.ranks; i++) {
        struct sim_counts one = sim_rank_counts(sim, i);
        uint64_t *to = (uint64_t *)&sum, *from = (uint64_t *)&one;

        for (size_t k = 0; k < sizeof(sum) / sizeof(*to); k++)
            to[k] += from[k];
    }
    return sum;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* A rail-optimised fat tree of two levels: the NICs of one rail of neighbouring nodes share a leaf switch, and leaves
 * reach each other over spines. Each direction of each cable has a clock, and parts of messages take their turn in the
 * order in which they arrive. So messages of many senders to one port share its rate fairly. Switches drop nothing and
 * hold nobody back: an ideal congestion control. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "tools/sim/sim.h"

static uint64_t later(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

int sim_fabric_init(struct sim *sim)
{
    const struct sim_cluster *c = &sim->cluster;
    uint32_t local = (uint32_t)c->gpus_per_node, nodes = (sim->options.ranks + local - 1) / local;
    uint32_t each = (uint32_t)c->nodes_per_leaf, nics = local * sim->rails;
    uint32_t leaves = (nodes + each - 1) / each * nics;
    double up = each / c->oversubscription;

    sim->port = calloc((size_t)sim->options.ranks * sim->rails, sizeof(*sim->port));
    if (!sim->port)
        return -ENOMEM;
    for (uint32_t rank = 0; rank < sim->options.ranks; rank++)
        for (uint32_t rail = 0; rail < sim->rails; rail++) {
            struct sim_port *port = &sim->port[rank * sim->rails + rail];

            port->rank = rank;
            port->rail = rail;
            port->leaf = rank / local / each * nics + rank % local * sim->rails + rail;
        }
    if (leaves == 1)
        return 0;
    sim->uplinks = up < 1 ? 1 : (uint32_t)up;
    sim->uplink_gbps = c->link_gbps * up / sim->uplinks;
    sim->uplink = calloc((size_t)leaves * sim->uplinks, sizeof(*sim->uplink));
    sim->downlink = calloc((size_t)leaves * sim->uplinks, sizeof(*sim->downlink));
    return sim->uplink && sim->downlink ? 0 : -ENOMEM;
}

void sim_fabric_fini(struct sim *sim)
{
    free(sim->port);
    free(sim->uplink);
    free(sim->downlink);
}

static bool same_leaf(const struct sim_queue *queue)
{
    return queue->from->leaf == queue->to->leaf;
}

uint64_t sim_fabric_latency(const struct sim *sim, const struct sim_queue *queue)
{
    return sim_ps(sim->cluster.latency_ns + (same_leaf(queue) ? 0 : sim->cluster.hop_ns));
}

/* Spread queues over uplinks as a hash does (the finalizer of splitmix64). */
static uint32_t hash_way(const struct sim *sim, const struct sim_queue *queue)
{
    uint64_t x = sim->options.seed * 0x9e3779b97f4a7c15ull +
                 ((uint64_t)queue->from->rank << 40 | (uint64_t)queue->to->rank << 16 | queue->base.id);

    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return (uint32_t)((x ^ x >> 31) % sim->uplinks);
}

static uint32_t least_busy_way(struct sim *sim, const struct sim_queue *queue)
{
    const struct sim_clock *up = &sim->uplink[queue->from->leaf * sim->uplinks];
    uint32_t first = (uint32_t)sim_random(sim, sim->uplinks), best = first;

    for (uint32_t i = 0; i < sim->uplinks && up[best].free_ps > sim->events.now_ps; i++) {
        uint32_t way = (first + i) % sim->uplinks;

        if (up[way].free_ps < up[best].free_ps)
            best = way;
    }
    return best;
}

static uint32_t choose_way(struct sim *sim, struct sim_queue *queue)
{
    if (sim->cluster.routing == SIM_ROUTING_SPRAY)
        return (uint32_t)sim_random(sim, sim->uplinks);
    if (queue->sent_bytes)
        return queue->way;
    queue->way = sim->cluster.routing == SIM_ROUTING_ADAPTIVE ? least_busy_way(sim, queue) : hash_way(sim, queue);
    return queue->way;
}

void sim_fabric_send(struct sim *sim, struct sim_queue *queue, uint32_t position, uint32_t bytes, bool last,
                     uint64_t left_ps)
{
    uint64_t latency = sim_ps(sim->cluster.latency_ns);

    if (same_leaf(queue))
        sim_add_event(sim, left_ps + latency, SIM_ARRIVE, queue, position, sim_part(bytes, last, 0));
    else
        sim_add_event(sim, left_ps + latency / 2, SIM_UPLINK, queue, position,
                      sim_part(bytes, last, choose_way(sim, queue)));
}

/* A part takes its turn at a port. Switches begin to forward before all of a part has arrived. Return when it begins to
 * leave. */
static uint64_t forward(struct sim *sim, struct sim_clock *clock, uint64_t part)
{
    uint64_t begin = later(clock->free_ps, sim->events.now_ps);

    clock->free_ps = begin + sim_transfer_ps(sim_part_bytes(part), sim->uplink_gbps);
    return begin;
}

void sim_fabric_uplink(struct sim *sim, struct sim_queue *queue, uint32_t position, uint64_t part)
{
    struct sim_clock *clock = &sim->uplink[queue->from->leaf * sim->uplinks + sim_part_way(part)];

    sim_add_event(sim, forward(sim, clock, part) + sim_ps(sim->cluster.hop_ns / 2), SIM_DOWNLINK, queue, position,
                  part);
}

void sim_fabric_downlink(struct sim *sim, struct sim_queue *queue, uint32_t position, uint64_t part)
{
    struct sim_clock *clock = &sim->downlink[queue->to->leaf * sim->uplinks + sim_part_way(part)];
    uint64_t rest = sim_ps(sim->cluster.hop_ns / 2 + sim->cluster.latency_ns / 2);

    sim_add_event(sim, forward(sim, clock, part) + rest, SIM_ARRIVE, queue, position, part);
}

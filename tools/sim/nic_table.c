/* SPDX-License-Identifier: Apache-2.0 */
/* The NICs as the transport sees them: the table struct prs_nic_ops. What they do with requests is in nic.c. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "tools/sim/ledger.h"
#include "tools/sim/memory.h"
#include "tools/sim/sim.h"
#include "transport/nic/backends.h"
#include "transport/peer/peer.h"

static struct sim_queue *to_queue(struct prs_queue *queue)
{
    return (struct sim_queue *)queue; /* base is its first member */
}

static struct sim_link *to_link(struct prs_link *link)
{
    return (struct sim_link *)link;
}

/* ---- what the proxy sees ---- */

static int nic_poll(struct prs_link *base, struct prs_event *events)
{
    struct sim_link *link = to_link(base);
    struct prs_team *rank = link->end->rank;
    const struct sim_cluster *c = &rank->sim->cluster;
    int count = 0;

    for (; link->count && count < PRS_POLL_MOST; count++) {
        const struct sim_completion *from = &link->completion[link->first++ & (link->room - 1)];

        link->first &= link->room - 1;
        link->count--;
        if (from->kind == PRS_EVENT_ARRIVAL)
            to_queue(link->queues[from->queue / rank->sim->rails])->taken++;
        events[count] =
            (struct prs_event){.kind = from->kind, .queue = from->queue, .value = from->value, .bytes = from->bytes};
        if (from->kind == PRS_EVENT_ERROR) {
            events[count].error = -ETIMEDOUT;
            events[count].text = "no answer";
            events[count].cause = "the rail is lost";
        }
        rank->cpu_ps += sim_ps(from->kind == PRS_EVENT_DONE ? c->completion_ns : c->arrival_ns);
    }
    return count;
}

static int nic_post(struct prs_queue *base, const struct prs_wr *ring, uint32_t mask, uint32_t first, uint32_t count)
{
    struct sim_queue *queue = to_queue(base);
    struct prs_team *rank = queue->end->rank;
    struct sim *sim = rank->sim;

    if (mask != queue->mask)
        return -EINVAL; /* the depth differs from the one that the transport asked for */
    queue->ring = ring;
    rank->cpu_ps += sim_ps(sim->cluster.post_ns);
    sim_add_event(sim, rank->cpu_ps + sim_ps(sim->cluster.post_latency_ns), SIM_DOORBELL, queue, first + count, first);
    return 0;
}

/* ---- queues ---- */

/* A queue and its arrays are one piece of memory, since connections come and go. */
static int open_queue(struct sim_link *link, uint32_t id, uint32_t depth, bool loopback, struct prs_queue **out)
{
    struct sim *sim = link->end->rank->sim;
    bool software = sim->cluster.software && !loopback, parts = sim->cluster.routing == SIM_ROUTING_SPRAY && !loopback;
    size_t bytes = depth * sizeof(uint8_t);
    uint32_t rail = (uint32_t)(link->base.rail - sim->fabric.rail);
    struct sim_queue *queue;
    char *at;

    bytes += (software ? depth * sizeof(uint64_t) : 0) + (parts ? depth * sizeof(uint32_t) : 0);
    queue = sim_calloc(1, sizeof(*queue) + bytes);
    if (!queue)
        return -ENOMEM;
    *out = &queue->base;
    queue->base = (struct prs_queue){.link = &link->base, .id = id, .takes_inline = true};
    queue->end = link->end;
    queue->mask = depth - 1;
    queue->loopback = loopback;
    queue->from = &sim->port[link->end->rank->rank * sim->rails + rail];
    queue->to = loopback ? queue->from : &sim->port[link->end->other->rank->rank * sim->rails + rail];
    at = (char *)(queue + 1);
    if (software) {
        queue->done_ps = (uint64_t *)(void *)at;
        at += depth * sizeof(uint64_t);
    }
    if (parts) {
        queue->missing = (uint32_t *)(void *)at;
        at += depth * sizeof(uint32_t);
    }
    queue->state = (uint8_t *)at;
    return 0;
}

static void nic_close(struct prs_link *base)
{
    struct sim_link *link = to_link(base);

    for (uint32_t i = 0; i < base->queue_count; i++)
        sim_free(link->queues[i]);
    sim_free(base->loopback);
    sim_free(link->completion);
    sim_free(link);
}

static const bool never_overrun;

static int nic_open(const struct prs_link_options *options, struct prs_link **out)
{
    struct sim *sim = ((struct sim_device *)options->rail->domain)->sim;
    struct sim_link *link = sim_calloc(1, sizeof(*link));
    int r = link ? 0 : -ENOMEM;

    *out = link ? &link->base : NULL;
    if (r)
        return r;
    link->end = sim->opening;
    link->base.ops = &sim_nic;
    link->base.rail = options->rail;
    link->base.overrun = &never_overrun;
    link->base.queue = link->queues;
    link->loopback_depth = options->loopback_depth;
    for (; !r && link->base.queue_count < options->queues; link->base.queue_count++)
        r = open_queue(link, options->ids[link->base.queue_count], options->depth, false,
                       &link->queues[link->base.queue_count]);
    return r;
}

static int nic_loopback(struct prs_link *base, uint32_t id, struct prs_queue **out)
{
    int r = 0;

    if (!base->loopback)
        r = open_queue(to_link(base), id, to_link(base)->loopback_depth, true, &base->loopback);
    *out = base->loopback;
    return r;
}

static uint32_t nic_taken(const struct prs_queue *queue)
{
    return ((const struct sim_queue *)queue)->taken;
}

static bool nic_drained(const struct prs_link *base)
{
    const struct sim_link *link = (const struct sim_link *)base;

    for (uint32_t i = 0; i < link->count; i++)
        if (link->completion[(link->first + i) & (link->room - 1)].kind == PRS_EVENT_ARRIVAL)
            return false;
    return true;
}

static void nic_address(const struct prs_queue *queue, struct prs_nic_address *out)
{
    (void)queue; /* the simulator already knows which queues are connected */
    *out = (struct prs_nic_address){0};
}

static bool nic_is_port(const struct prs_nic_address *address)
{
    return !address->length;
}

static void nic_address_text(const struct prs_nic_address *port, char *text, size_t text_bytes)
{
    (void)port;
    snprintf(text, text_bytes, "-");
}

static void nic_kill(struct prs_link *link)
{
    (void)link; /* a connection is closed only when it is idle */
}

/* ---- the device: the NIC ports of each GPU are its ports ---- */

static int nic_devices(const struct prs_config *config, prs_nic_device_fn *fn, void *arg)
{
    struct sim *sim = (struct sim *)((char *)arg - offsetof(struct sim, fabric));
    struct prs_nic_device device = {&sim_nic, "sim", sim};

    fn(arg, &device);
    return 0;
}

static int nic_open_device(const struct prs_nic_device *which, struct prs_domain **out)
{
    struct sim_device *device = sim_calloc(1, sizeof(*device));

    if (!device)
        return -ENOMEM;
    device->sim = which->handle;
    device->base.nic = &sim_nic;
    device->base.adds = sim_nic.adds;
    device->base.ports = (int)device->sim->rails;
    *out = &device->base;
    return 0;
}

static void nic_close_device(struct prs_domain *domain)
{
    sim_free(domain);
}

static int nic_probe(const struct prs_config *config, struct prs_rail *rail, char *why, size_t why_bytes)
{
    const struct sim *sim = ((struct sim_device *)rail->domain)->sim;

    (void)config, (void)why, (void)why_bytes;
    rail->max_message_bytes = 1u << 30;
    rail->info.speed_mbps = (uint32_t)(sim->cluster.link_gbps * 1000);
    rail->info.mem_kinds = PRS_MEM_HOST;
    return 0;
}

/* No rail comes back to a connection here: NCCL_IB_RESILIENCY_PORT_RECOVERY is off. */
static int nic_locate(const struct prs_rail *rail, const struct prs_config *config, struct prs_rail_address *out,
                      char *why, size_t why_bytes)
{
    (void)config, (void)why, (void)why_bytes;
    *out = rail->address;
    return 0;
}

static int nic_register_memory(struct prs_domain *domain, const struct prs_memory_range *range,
                               struct prs_registration *out)
{
    (void)domain, (void)range;
    *out = (struct prs_registration){.local_key = SIM_KEY_MEMORY, .remote_key = SIM_KEY_MEMORY};
    return 0;
}

static int nic_release_memory(struct prs_domain *domain, struct prs_registration *registered)
{
    (void)domain, (void)registered;
    return 0;
}

struct prs_nic_ops sim_nic;
const struct prs_nic_ops *const prs_backends[] = {&sim_nic, NULL};

void sim_nic_init(const struct sim_cluster *cluster)
{
    bool in_order = cluster->in_order != 0;

    sim_nic = (struct prs_nic_ops){.name = "sim",
                                   .network = "simulated",
                                   .in_order = in_order,
                                   .fails_over = in_order,
                                   .fails_early = !in_order,
                                   .fence = in_order,
                                   .adds = cluster->adds != 0,
                                   .devices = nic_devices,
                                   .open_device = nic_open_device,
                                   .close_device = nic_close_device,
                                   .probe = nic_probe,
                                   .locate = nic_locate,
                                   .is_port = nic_is_port,
                                   .address_text = nic_address_text,
                                   .register_memory = nic_register_memory,
                                   .release_memory = nic_release_memory,
                                   .open = nic_open,
                                   .close = nic_close,
                                   .stop = sim_rails_stop,
                                   .kill = nic_kill,
                                   .address = nic_address,
                                   .loopback = nic_loopback,
                                   .taken = nic_taken,
                                   .drained = nic_drained,
                                   .post = nic_post,
                                   .poll = nic_poll};
}

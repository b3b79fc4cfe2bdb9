/* SPDX-License-Identifier: Apache-2.0 */
/* What the NICs do with the requests that were posted, in virtual time: the queues of a port take turns, messages
 * arrive, take effect and complete. */
#include <errno.h>
#include <string.h>

#include "tools/sim/ledger.h"
#include "tools/sim/memory.h"
#include "tools/sim/sim.h"
#include "transport/peer/peer.h"

static uint64_t later(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

static double port_gbps(const struct sim *sim)
{
    return sim->cluster.link_gbps < sim->cluster.pcie_gbps ? sim->cluster.link_gbps : sim->cluster.pcie_gbps;
}

static struct sim_link *to_link(struct prs_link *link)
{
    return (struct sim_link *)link;
}

/* ---- completions ---- */

static void push(struct sim_link *link, uint32_t kind, uint32_t queue, uint32_t value, uint32_t bytes)
{
    if (link->count == link->room) {
        uint32_t room = link->room ? 2 * link->room : 16;
        struct sim_completion *grown = sim_calloc(room, sizeof(*grown));

        if (!grown) {
            sim_fail(link->end->rank->sim, -ENOMEM);
            return;
        }
        for (uint32_t i = 0; i < link->count; i++)
            grown[i] = link->completion[(link->first + i) & (link->room - 1)];
        sim_free(link->completion);
        link->completion = grown;
        link->room = room;
        link->first = 0;
    }
    link->completion[(link->first + link->count++) & (link->room - 1)] =
        (struct sim_completion){kind, queue, value, bytes};
    sim_rank_list(link->end->rank, link->end);
}

/* ---- sending ---- */

static void schedule_port(struct sim *sim, struct sim_port *port, uint64_t at_ps)
{
    if (port->sending || !port->first)
        return;
    port->sending = true;
    sim_add_event(sim, at_ps, SIM_SEND, port, 0, 0);
}

static void join_turn(struct sim *sim, struct sim_queue *queue)
{
    struct sim_port *port = queue->from;

    if (queue->in_turn || queue->sending == queue->posted || queue->fenced || queue->silent)
        return;
    queue->in_turn = true;
    queue->next = NULL;
    if (port->first)
        port->last->next = queue;
    else
        port->first = queue;
    port->last = queue;
    schedule_port(sim, port, sim->events.now_ps);
}

static void leave_turn(struct sim_port *port)
{
    port->first->in_turn = false;
    port->first = port->first->next;
}

static void explain(struct prs_team *rank, enum sim_cause cause, uint64_t until_ps)
{
    if (rank->sim->options.explain)
        sim_explain_note(&rank->explain, cause, rank->sim->events.now_ps, until_ps);
}

/* When may a request with a fence be sent? Return false: only after another delivery. */
static bool fence_open_at(const struct sim *sim, const struct sim_queue *queue, uint32_t position, uint64_t *at_ps)
{
    uint32_t behind = sim->cluster.fence_strict ? position : queue->last_read;

    *at_ps = sim->cluster.fence_strict ? queue->last_done_ps : queue->last_read_ps;
    return (int32_t)(queue->delivered - behind) >= 0;
}

/* A request waits at its fence. Later requests of its queue continue, unless fences stall. */
static void stop_at_fence(struct sim *sim, struct sim_queue *queue, uint64_t open_ps, bool known)
{
    if (!known)
        queue->state[queue->sending & queue->mask] = SIM_REQUEST_WAITS_AT_FENCE;
    explain(queue->end->rank, SIM_FENCE, UINT64_MAX);
    queue->end->rank->fences_open++;
    if (known)
        sim_add_event(sim, open_ps, SIM_UNFENCE, queue, queue->sending, 0);
    if (sim->cluster.fence_stalls)
        queue->fenced = true;
    else
        queue->sending++;
}

/* Send up to this many bytes of a request. Return true if they were its last. */
static bool send_part(struct sim *sim, struct sim_queue *queue, uint32_t position)
{
    const struct prs_wr *wr = &queue->ring[position & queue->mask];
    struct sim_port *port = queue->from;
    const struct sim_cluster *c = &sim->cluster;
    uint32_t bytes = wr->len_bytes - queue->sent_bytes;
    uint64_t now = sim->events.now_ps, left;
    bool last = true;

    if (!queue->sent_bytes) {
        port->nic_free_ps = later(now, port->nic_free_ps) + sim_ps(c->wr_ns);
        if (wr->flags & PRS_WR_FENCE)
            port->nic_free_ps += sim_ps(c->fence_ns);
        if (wr->opcode == PRS_WR_ADD)
            queue->last_read = position + 1;
        if (queue->missing)
            queue->missing[position & queue->mask] = wr->len_bytes;
    }
    if (queue->loopback) {
        sim_add_event(sim, port->nic_free_ps + sim_ps(c->loopback_ns), SIM_DELIVER, queue, position, 0);
        return true;
    }
    if (!c->whole_messages && bytes > c->quantum_bytes) {
        bytes = (uint32_t)c->quantum_bytes;
        last = false;
    }
    left = later(later(now, port->nic_free_ps), port->send_free_ps);
    port->send_free_ps = left + sim_transfer_ps(bytes, port_gbps(sim));
    explain(queue->end->rank, SIM_LINK, port->send_free_ps);
    sim_fabric_send(sim, queue, position, bytes, last, left);
    queue->sent_bytes = last ? 0 : queue->sent_bytes + bytes;
    return last;
}

/* Return false: the queue leaves the turn. */
static bool serve(struct sim *sim, struct sim_queue *queue)
{
    const struct prs_wr *wr = &queue->ring[queue->sending & queue->mask];
    uint64_t open_ps = 0;
    bool known;

    if (!queue->sent_bytes && wr->flags & PRS_WR_FENCE) {
        known = fence_open_at(sim, queue, queue->sending, &open_ps);
        if (!known || open_ps > sim->events.now_ps) {
            stop_at_fence(sim, queue, open_ps, known);
            return !queue->fenced && queue->sending != queue->posted;
        }
    }
    if (send_part(sim, queue, queue->sending))
        queue->sending++;
    return queue->sending != queue->posted;
}

static void send_from(struct sim *sim, struct sim_port *port)
{
    struct sim_queue *queue = port->first;
    uint64_t wr_ps = sim_ps(sim->cluster.wr_ns), free_ps;

    /* port->sending is still set, so a queue that joins the turn here adds no event. */
    if (queue && (queue->silent || !serve(sim, queue))) {
        leave_turn(port);
    } else if (queue && queue->next) {
        leave_turn(port);
        join_turn(sim, queue);
    }
    /* The NIC prepares the next request while the link sends this one. */
    free_ps = port->send_free_ps > wr_ps ? port->send_free_ps - wr_ps : 0;
    port->sending = false;
    schedule_port(sim, port, later(port->nic_free_ps, free_ps));
}

/* ---- receiving ---- */

static void arrive(struct sim *sim, struct sim_queue *queue, uint32_t position, uint64_t part)
{
    struct sim_port *port = queue->to;
    uint32_t bytes = sim_part_bytes(part);
    uint64_t now = sim->events.now_ps, took = sim_transfer_ps(bytes, port_gbps(sim)), at_ps;

    if (later(now, port->receive_free_ps) > now)
        explain(&sim->rank[port->rank], SIM_INCAST, port->receive_free_ps);
    port->receive_free_ps = later(now, port->receive_free_ps) + took;
    explain(&sim->rank[port->rank], SIM_LINK, port->receive_free_ps);
    if (queue->missing) {
        queue->missing[position & queue->mask] -= bytes;
        if (queue->missing[position & queue->mask])
            return;
    } else if (!sim_part_last(part)) {
        return;
    }
    at_ps = port->receive_free_ps;
    if (queue->ring[position & queue->mask].opcode == PRS_WR_ADD)
        at_ps += sim_ps(sim->cluster.atomic_ns);
    if (sim->cluster.jitter_ns > 0)
        at_ps += sim_random(sim, sim_ps(sim->cluster.jitter_ns));
    sim_add_event(sim, at_ps, SIM_DELIVER, queue, position, 0);
}

/* The request takes effect at its target. */
void sim_nic_take_effect(struct sim *sim, struct sim_queue *queue, uint32_t position)
{
    const struct prs_wr *wr = &queue->ring[position & queue->mask];
    struct sim_end *to = queue->loopback ? queue->end : queue->end->other;

    switch (wr->remote_key) {
    case SIM_KEY_DATA:
        sim_ledger_arrive(sim->ledger, wr->remote_addr, wr->len_bytes);
        break;
    case SIM_KEY_SIGNAL:
        sim_raise(sim, wr->remote_addr);
        break;
    case SIM_KEY_MEMORY:
        memcpy((void *)(uintptr_t)wr->remote_addr, (const void *)(uintptr_t)wr->local_addr, wr->len_bytes);
        break;
    default:
        sim_fail(sim, wr->len_bytes ? -EFAULT : 0);
    }
    if (wr->opcode == PRS_WR_WRITE_IMM) {
        struct prs_link *link = to->peer->link[queue->base.link->rail - sim->fabric.rail];

        push(to_link(link), PRS_EVENT_ARRIVAL, queue->base.id, wr->imm, wr->len_bytes);
        sim_rank_wake(to->rank, sim->events.now_ps + sim_ps(sim->cluster.completion_latency_ns));
    }
}

/* All requests up to this one have arrived: the sender learns that it is complete. */
static void complete(struct sim *sim, struct sim_queue *queue, uint32_t position)
{
    const struct prs_wr *wr = &queue->ring[position & queue->mask];
    uint64_t back = queue->loopback ? 0 : sim_fabric_latency(sim, queue);

    queue->state[position & queue->mask] = SIM_REQUEST_NEW;
    queue->last_done_ps = later(queue->last_done_ps, sim->events.now_ps + back);
    if (wr->opcode == PRS_WR_ADD)
        queue->last_read_ps = queue->last_done_ps;
    if (queue->done_ps)
        queue->done_ps[position & queue->mask] = queue->last_done_ps + sim_ps(sim->cluster.completion_latency_ns);
    else if (wr->flags & PRS_WR_SIGNALED)
        sim_add_event(sim, queue->last_done_ps + sim_ps(sim->cluster.completion_latency_ns), SIM_DONE, queue, position,
                      0);
}

/* Everything before a request that waits at its fence has arrived: when does the fence open? */
static void look_at_fence(struct sim *sim, struct sim_queue *queue)
{
    uint8_t *state = &queue->state[queue->delivered & queue->mask];
    uint64_t open_ps;

    if (*state != SIM_REQUEST_WAITS_AT_FENCE || !fence_open_at(sim, queue, queue->delivered, &open_ps))
        return;
    *state = SIM_REQUEST_NEW;
    sim_add_event(sim, open_ps, SIM_UNFENCE, queue, queue->delivered, 0);
}

static void deliver(struct sim *sim, struct sim_queue *queue, uint32_t position)
{
    bool ordered = queue->loopback || (sim_nic.in_order && !sim->cluster.adaptive_unordered);

    queue->state[position & queue->mask] = SIM_REQUEST_ARRIVED;
    if (!ordered)
        sim_nic_take_effect(sim, queue, position);
    while (queue->state[queue->delivered & queue->mask] == SIM_REQUEST_ARRIVED) {
        if (ordered && !queue->done_ps)
            sim_nic_take_effect(sim, queue, queue->delivered);
        complete(sim, queue, queue->delivered++);
    }
    if (queue->done_ps && queue->executed != queue->delivered)
        sim_executor_due(queue);
    look_at_fence(sim, queue);
}

static void unfence(struct sim *sim, struct sim_queue *queue, uint32_t position)
{
    struct prs_team *rank = queue->end->rank;

    if (!--rank->fences_open && sim->options.explain)
        sim_explain_end(&rank->explain, SIM_FENCE, sim->events.now_ps);
    if (queue->fenced) {
        queue->fenced = false;
        join_turn(sim, queue);
        return;
    }
    (void)send_part(sim, queue, position); /* it is short: a signal or a record */
}

static void done(struct sim *sim, struct sim_queue *queue, uint32_t position)
{
    push(to_link(queue->base.link), PRS_EVENT_DONE, queue->base.id, position, 0);
    sim_rank_wake(queue->end->rank, sim->events.now_ps);
}

static void ring_doorbell(struct sim *sim, struct sim_queue *queue, uint32_t posted, uint32_t first)
{
    struct sim_port *port = queue->from;

    if (queue->posted != first) /* while the ring is empty, the next request may take any position */
        queue->sending = queue->delivered = queue->executed = queue->last_read = first;
    port->nic_free_ps = later(sim->events.now_ps, port->nic_free_ps) + sim_ps(sim->cluster.doorbell_ns);
    queue->posted = posted;
    if (queue->loopback && sim->cluster.whole_messages)
        while (queue->sending != posted) /* this one does not wait for long messages on the link */
            (void)send_part(sim, queue, queue->sending++);
    else
        join_turn(sim, queue);
}

void sim_nic_event(struct sim *sim, const struct sim_event *event)
{
    struct sim_queue *queue = event->object;

    if (event->kind == SIM_SEND) {
        send_from(sim, event->object);
        return;
    }
    queue->end->events--;
    if (queue->silent && event->kind != SIM_UNANSWERED) {
        sim_rails_silent_event(sim, event);
        return;
    }
    switch (event->kind) {
    case SIM_UNANSWERED:
        push(to_link(queue->base.link), PRS_EVENT_ERROR, queue->base.id, 0, 0);
        sim_rank_wake(queue->end->rank, sim->events.now_ps);
        break;
    case SIM_DOORBELL:
        ring_doorbell(sim, queue, event->a, (uint32_t)event->b);
        break;
    case SIM_UPLINK:
        sim_fabric_uplink(sim, queue, event->a, event->b);
        break;
    case SIM_DOWNLINK:
        sim_fabric_downlink(sim, queue, event->a, event->b);
        break;
    case SIM_ARRIVE:
        arrive(sim, queue, event->a, event->b);
        break;
    case SIM_DELIVER:
        deliver(sim, queue, event->a);
        break;
    case SIM_EXECUTED:
        sim_executor_event(queue, event->a);
        break;
    case SIM_UNFENCE:
        unfence(sim, queue, event->a);
        break;
    default:
        done(sim, queue, event->a);
    }
}

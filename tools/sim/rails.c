/* SPDX-License-Identifier: Apache-2.0 */
/* Simulates the loss of a node's rail. From that moment nothing crosses its ports, and a NIC that gets no answer
 * reports an error some time later. The transport's own failover.c and order_path.c handle that. This file has only the
 * queues that go silent, and the TCP streams over which both sides agree. */
#include <errno.h>
#include <string.h>

#include "tools/sim/host.h"
#include "tools/sim/memory.h"
#include "tools/sim/sim.h"
#include "transport/peer/peer.h"

enum { FIRST_FD = 1 << 28, STREAM_BYTES = 4 * sizeof(struct prs_wire_note) };

/* What has arrived on the TCP stream of one side. */
struct sim_stream {
    struct sim_end *end; /* NULL: closed */
    uint32_t bytes;
    uint8_t in[STREAM_BYTES];
};

/* A message that is on its way to a stream. */
struct note {
    size_t bytes;
    uint8_t data[];
};

/* ---- queues ---- */

/* The NIC of the sender waits for an answer, and reports an error later. */
static void go_unanswered(struct sim *sim, struct sim_queue *queue)
{
    if (queue->unanswered)
        return;
    queue->unanswered = true;
    sim_add_event(sim, sim->events.now_ps + sim_ps(sim->cluster.lost_ns), SIM_UNANSWERED, queue, 0, 0);
}

static void silence(struct sim *sim, struct sim_queue *queue)
{
    queue->silent = true;
    if (queue->posted != queue->delivered)
        go_unanswered(sim, queue);
}

void sim_rails_silent_event(struct sim *sim, const struct sim_event *event)
{
    struct sim_queue *queue = event->object;

    if (event->kind == SIM_DOORBELL)
        queue->posted = event->a;
    go_unanswered(sim, queue);
}

static struct sim_link *link_of(const struct sim_end *end, uint32_t rail)
{
    return (struct sim_link *)end->peer->link[rail];
}

static void silence_link(struct sim *sim, const struct sim_end *end, uint32_t rail)
{
    struct sim_link *link = link_of(end, rail);

    for (uint32_t i = 0; i < link->base.queue_count; i++)
        silence(sim, (struct sim_queue *)link->queues[i]);
}

/* The transport fences a path: requests of either side that are not delivered will not take effect. */
void sim_rails_stop(struct prs_link *base)
{
    const struct sim_end *end = ((struct sim_link *)base)->end;
    struct sim *sim = end->rank->sim;
    uint32_t rail = (uint32_t)(base->rail - sim->fabric.rail);

    silence_link(sim, end, rail);
    silence_link(sim, end->other, rail);
}

static bool is_down(const struct sim *sim, const struct sim_end *end, uint32_t rail)
{
    return sim->port[end->rank->rank * sim->rails + rail].down;
}

void sim_rails_event(struct sim *sim, bool down)
{
    const struct sim_loss *loss = &sim->options.loss;
    uint32_t gpus = (uint32_t)sim->cluster.gpus_per_node;

    for (uint32_t i = 0; i < gpus; i++)
        sim->port[(loss->node * gpus + i) * sim->rails + loss->rail].down = down;
    for (struct sim_pair *pair = sim->oldest; down && pair; pair = pair->newer)
        for (int i = 0; i < 2; i++)
            if (is_down(sim, &pair->end[0], loss->rail) || is_down(sim, &pair->end[1], loss->rail))
                silence_link(sim, &pair->end[i], loss->rail);
}

/* ---- connections ---- */

int sim_rails_connect(struct sim *sim, struct sim_end *end)
{
    const struct sim_loss *loss = &sim->options.loss;
    struct sim_stream *stream;

    if (!loss->wanted)
        return 0;
    if (sim->streams == sim->stream_room) {
        uint32_t room = sim->stream_room ? 2 * sim->stream_room : 64;
        struct sim_stream **grown = sim_calloc(room, sizeof(struct sim_stream *));

        if (!grown)
            return -ENOMEM;
        if (sim->streams)
            memcpy(grown, sim->stream, sim->streams * sizeof(struct sim_stream *));
        sim_free(sim->stream);
        sim->stream = grown;
        sim->stream_room = room;
    }
    stream = sim_calloc(1, sizeof(*stream));
    if (!stream)
        return -ENOMEM;
    stream->end = end;
    end->stream = stream;
    end->peer->stream_fd = FIRST_FD + (int)sim->streams;
    sim->stream[sim->streams++] = stream;
    /* The transport does not know yet that the rail is away: its first request finds out. */
    if (is_down(sim, end, loss->rail) || is_down(sim, end->other, loss->rail))
        silence_link(sim, end, loss->rail);
    return 0;
}

void sim_rails_disconnect(struct sim_end *end)
{
    if (!end->stream)
        return;
    end->rank->sim->stream[end->peer->stream_fd - FIRST_FD] = NULL;
    end->peer->stream_fd = -1; /* no farewell is needed: both sides close together */
    sim_free(end->stream);
}

bool sim_rails_agreeing(const struct sim_end *end)
{
    return end->stream && (end->stream->bytes || (end->peer->failover && prs_failover_is_active(end->peer)));
}

void sim_rails_poll(struct sim_end *end)
{
    if (end->stream && end->stream->bytes)
        end->peer->idle_polls = PRS_PEER_IDLE_POLLS; /* look at the stream in this round, not many rounds later */
}

/* ---- the TCP streams ---- */

static struct sim *the_sim; /* a stream is known by its number alone */

void sim_rails_open(struct sim *sim)
{
    const struct sim_loss *loss = &sim->options.loss;

    the_sim = sim;
    if (!loss->wanted)
        return;
    sim->fabric.config.failover = 1;
    sim->fabric.config.timeout_ms = 60000;
    sim_add_event(sim, loss->at_ps, SIM_RAIL, sim, true, 0);
    if (loss->back_ps)
        sim_add_event(sim, loss->back_ps, SIM_RAIL, sim, false, 0);
}

ssize_t sim_send(int fd, const void *data, size_t bytes, int flags)
{
    struct sim *sim = the_sim;
    struct sim_end *from = sim->stream[fd - FIRST_FD]->end, *to = from->other;
    struct note *note = sim_malloc(sizeof(*note) + bytes);

    (void)flags;
    if (!note) {
        errno = ENOMEM;
        return -1;
    }
    note->bytes = bytes;
    memcpy(note->data, data, bytes);
    to->events++; /* count this event, so that the connection stays open */
    sim_add_event(sim, from->rank->cpu_ps + sim_ps(sim->cluster.tcp_ns), SIM_NOTE, to, 0, (uintptr_t)note);
    return (ssize_t)bytes;
}

void sim_rails_note(struct sim_end *end, uint64_t token)
{
    struct note *note = (struct note *)(uintptr_t)token;
    struct sim *sim = end->rank->sim;

    end->events--;
    if (end->stream->bytes + note->bytes > STREAM_BYTES) {
        sim_fail(sim, -ENOBUFS);
    } else {
        memcpy(end->stream->in + end->stream->bytes, note->data, note->bytes);
        end->stream->bytes += (uint32_t)note->bytes;
    }
    sim_free(note);
    sim_rank_list(end->rank, end);
    sim_rank_wake(end->rank, sim->events.now_ps);
}

ssize_t sim_recv(int fd, void *data, size_t bytes, int flags)
{
    struct sim_stream *stream = the_sim->stream[fd - FIRST_FD];

    (void)flags;
    if (!stream->bytes) {
        errno = EAGAIN;
        return -1;
    }
    if (bytes > stream->bytes)
        bytes = stream->bytes;
    memcpy(data, stream->in, bytes);
    stream->bytes -= (uint32_t)bytes;
    memmove(stream->in, stream->in + bytes, stream->bytes);
    return (ssize_t)bytes;
}

/* ---- what it costs ---- */

int __real_prs_order_path_down(struct prs_order *order, uint32_t path, const uint32_t *taken,
                               struct prs_order_replay *out);
int __wrap_prs_order_path_down(struct prs_order *order, uint32_t path, const uint32_t *taken,
                               struct prs_order_replay *out);

/* The linker sends failover.c's call here. */
int __wrap_prs_order_path_down(struct prs_order *order, uint32_t path, const uint32_t *taken,
                               struct prs_order_replay *out)
{
    struct prs_peer *peer = (struct prs_peer *)(void *)((char *)order - offsetof(struct prs_peer, order));
    struct sim_end *end = sim_end_of(peer);
    struct sim *sim = end->rank->sim;
    uint64_t agree_ps = sim->events.now_ps - peer->failover->path[path].since_ns * SIM_PS_PER_NS;
    int r = __real_prs_order_path_down(order, path, taken, out);

    if (r < 0)
        return r;
    sim->lost.sides++;
    sim->lost.taken += out->taken;
    sim->lost.replayed += out->replayed;
    sim->lost.bytes += out->bytes;
    if (agree_ps > sim->lost.agree_ps)
        sim->lost.agree_ps = agree_ps;
    sim->lost.last_ps = sim->events.now_ps;
    end->rank->cpu_ps += out->replayed * sim_ps(sim->cluster.command_ns);
    return r;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/gpu/dispatch.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "transport/peer/fail.h"
#include "transport/peer/peer.h"
#include "transport/util/error.h"

enum {
    /* Commands per round: enough to fill a chain for several peers, few enough that completions are polled soon. */
    TAKE_BATCH = 64,
    MIN_ENTRIES = 4096, /* commands in flight are bounded by this or the ring, whichever is larger */
    NO_ENTRY = UINT32_MAX,
};

int prs_dispatch_init(struct prs_dispatch *d, struct prs_ring *ring, const struct prs_windows *windows,
                      struct prs_team *team, uint32_t context)
{
    int r;

    memset(d, 0, sizeof(*d));
    d->ring = ring;
    d->windows = windows;
    d->team = team;
    d->context = context;
    d->world = windows->world;
    d->entry_count = ring->slot_count > MIN_ENTRIES ? ring->slot_count : MIN_ENTRIES;
    d->entries = calloc(d->entry_count, sizeof(*d->entries));
    d->queues = calloc(d->world, sizeof(*d->queues));
    if (!d->entries || !d->queues) {
        prs_dispatch_fini(d);
        return prs_fail(-ENOMEM, "proxy: no memory for %" PRIu64 " commands in flight", d->entry_count);
    }
    for (uint32_t i = 0; i < d->world; i++)
        d->queues[i].first = d->queues[i].last = NO_ENTRY;
    r = prs_order_drain_init(&d->drain, prs_team_drains(team), d->world, PRS_CMD_GROUPS);
    if (r < 0)
        prs_dispatch_fini(d);
    return r;
}

void prs_dispatch_fini(struct prs_dispatch *d)
{
    prs_order_drain_fini(&d->drain);
    free(d->queues);
    free(d->entries);
    d->queues = NULL;
    d->entries = NULL;
}

static struct prs_dispatch_entry *entry_of(struct prs_dispatch *d, uint64_t position)
{
    return &d->entries[position & (d->entry_count - 1)];
}

bool prs_dispatch_idle(const struct prs_dispatch *d)
{
    return d->retired == d->ring->taken;
}

/* ---- taking commands ---- */

static void enqueue(struct prs_dispatch *d, uint64_t position)
{
    struct prs_dispatch_entry *entry = entry_of(d, position);
    struct prs_dispatch_queue *queue = &d->queues[entry->cmd.peer];
    uint32_t index = (uint32_t)(position & (d->entry_count - 1));

    entry->next = NO_ENTRY;
    if (queue->last == NO_ENTRY)
        queue->first = index;
    else
        d->entries[queue->last].next = index;
    queue->last = index;
    queue->count++;
    d->queued++;
}

/* Hand a command to the order engine. Return 0: enqueue it; PRS_BUSY: it waits, and so does all after it; or -errno. */
static int admit(struct prs_dispatch *d, const struct prs_cmd_fields *cmd, uint64_t position)
{
    int r;

    if (cmd->op == PRS_CMD_PUT) {
        d->stats.puts++;
        return prs_order_drain_put(&d->drain, cmd->peer, cmd->group);
    }
    d->stats.signals++;
    r = prs_order_drain_signal(&d->drain, cmd->peer, cmd->group, position);
    if (r == PRS_BUSY) {
        d->stats.fences++;
        d->stall_began_ns = prs_now_ns();
    }
    return r;
}

/* The newest command that was taken waits: enqueue it as soon as the order engine lets it go. Return false until
 * then. */
static bool end_stall(struct prs_dispatch *d)
{
    if (!prs_order_drain_release(&d->drain, d->retired))
        return false;
    d->stats.stall_ns += prs_now_ns() - d->stall_began_ns;
    enqueue(d, d->ring->taken - 1);
    return true;
}

/* Take the commands that are in the ring. Return how many, or the error of a refused command. */
static int take_commands(struct prs_dispatch *d)
{
    int taken = 0;

    if (d->drain.waits && !end_stall(d))
        return 0;
    while (taken < (int)TAKE_BATCH && d->ring->taken - d->retired < d->entry_count) {
        uint64_t position = d->ring->taken;
        struct prs_dispatch_entry *entry = entry_of(d, position);
        int r;

        if (!prs_ring_take(d->ring, &entry->cmd))
            break;
        taken++;
        r = prs_windows_check(d->windows, &entry->cmd);
        entry->op.status = r < 0 ? r : PRS_OP_PENDING;
        if (r < 0)
            return r;
        r = admit(d, &entry->cmd, position);
        if (r < 0)
            return r;
        if (r == PRS_BUSY)
            break;
        enqueue(d, position);
    }
    if (taken > 0) {
        d->stats.commands += (uint64_t)taken;
        d->stats.batches++;
        prs_ring_return(d->ring);
    }
    return taken;
}

/* ---- posting, retiring ---- */

static int post_command(struct prs_dispatch *d, struct prs_peer *peer, struct prs_dispatch_entry *entry)
{
    const struct prs_cmd_fields *cmd = &entry->cmd;
    const struct prs_window *to = &d->windows->window[cmd->dst_window];
    const struct prs_window *from = &d->windows->window[cmd->src_window];

    if (!to->remotes || (cmd->op == PRS_CMD_PUT && !from->remotes))
        return prs_windows_check(d->windows, cmd); /* the window was dropped while the command waited: this names it */
    if (cmd->op == PRS_CMD_PUT) {
        struct prs_put put = {
            .src = cmd->bytes ? from->region : NULL,
            .src_addr = (const void *)(uintptr_t)(from->base + cmd->src_offset),
            .dst_addr = to->remotes[cmd->peer].base + cmd->dst_offset,
            .dst = &to->remotes[cmd->peer].keys,
            .len_bytes = cmd->bytes,
            .group = cmd->group,
        };
        return prs_peer_put(peer, &entry->op, &put);
    }
    struct prs_signal signal = {
        .dst_addr = to->remotes[cmd->peer].base + cmd->dst_offset,
        .dst = &to->remotes[cmd->peer].keys,
        .value = cmd->bytes,
        .kind = cmd->op == PRS_CMD_SIGNAL_ADD ? PRS_SIGNAL_ADD : PRS_SIGNAL_SET,
        .group = cmd->group,
        .flags = cmd->flags & PRS_CMD_STRONG ? PRS_SIGNAL_STRONG : 0,
    };
    return prs_peer_signal(peer, &entry->op, &signal);
}

/* Post a rank's commands in order until its window is full. Return how many, or -errno. */
static int post_queue(struct prs_dispatch *d, uint32_t rank)
{
    struct prs_dispatch_queue *queue = &d->queues[rank];
    int posted = 0;
    int r;

    if (!queue->peer) {
        r = prs_team_peer(d->team, d->context, rank, &queue->peer);
        if (r)
            return r < 0 ? r : 0;
    }
    while (queue->first != NO_ENTRY) {
        struct prs_dispatch_entry *entry = &d->entries[queue->first];

        r = post_command(d, queue->peer, entry);
        if (r < 0)
            return r;
        if (r > 0)
            break;
        queue->first = entry->next;
        if (queue->first == NO_ENTRY)
            queue->last = NO_ENTRY;
        queue->count--;
        d->queued--;
        posted++;
    }
    return posted;
}

/* In the order of the ring: publishing a position as done promises that everything below it is complete. */
static int retire(struct prs_dispatch *d)
{
    uint64_t before = d->retired;

    while (d->retired != d->ring->taken) {
        int32_t status = entry_of(d, d->retired)->op.status;

        if (status == PRS_OP_PENDING)
            break;
        if (status < 0)
            return status;
        d->retired++;
    }
    prs_ring_done(d->ring, d->retired);
    return (int)(d->retired - before);
}

/* Post, progress, retire. */
static int advance(struct prs_dispatch *d)
{
    int did = 0;
    int r;

    for (uint32_t rank = 0; d->queued > 0 && rank < d->world; rank++) {
        if (d->queues[rank].count == 0)
            continue;
        r = post_queue(d, rank);
        if (r < 0)
            return r;
        did += r;
    }
    r = prs_team_progress(d->team, d->context);
    if (r < 0)
        return r;
    did += r;
    r = retire(d);
    return r < 0 ? r : did + r;
}

int prs_dispatch_step(struct prs_dispatch *d)
{
    int did = take_commands(d);
    int r;

    if (did < 0)
        return did;
    r = advance(d);
    return r < 0 ? r : did + r;
}

int prs_dispatch_finish(struct prs_dispatch *d)
{
    if (d->drain.waits)
        (void)end_stall(d);
    return advance(d);
}

/* How many commands to a rank are neither complete nor failed. */
static uint64_t count_pending(struct prs_dispatch *d, uint32_t rank)
{
    uint64_t pending = 0;

    for (uint64_t position = d->retired; position != d->ring->taken; position++) {
        const struct prs_dispatch_entry *entry = entry_of(d, position);

        /* A refused command is not pending. Its peer may be no rank at all. */
        pending += entry->op.status == PRS_OP_PENDING && entry->cmd.peer == rank;
    }
    return pending;
}

void prs_dispatch_cancel(struct prs_dispatch *d)
{
    if (prs_dispatch_idle(d))
        return;
    for (uint32_t rank = 0; rank < d->world; rank++) {
        uint64_t pending = d->queues[rank].peer ? count_pending(d, rank) : 0;

        if (pending > 0)
            (void)prs_peer_fail(d->queues[rank].peer, -ECANCELED,
                                "the proxy was closed with %" PRIu64 " commands to rank %u in flight", pending, rank);
    }
}

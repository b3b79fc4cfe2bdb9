/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/dispatch.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "transport/peer.h"
#include "transport/util/error.h"

enum {
    TAKE_BATCH = 64,    /* commands a round: enough to fill a doorbell's chain for several peers, short enough that
                           completions are not left waiting */
    MIN_ENTRIES = 4096, /* commands in flight are bounded by this or the ring, whichever is larger */
    NOBODY = UINT32_MAX,
};

int prs_dispatch_init(struct prs_dispatch *d, struct prs_ring *ring, const struct prs_windows *windows,
                      struct prs_team *team, uint32_t context)
{
    memset(d, 0, sizeof(*d));
    d->ring = ring;
    d->windows = windows;
    d->team = team;
    d->context = context;
    d->world = windows->world;
    d->drain = prs_team_drains(team);
    d->entry_count = ring->slot_count > MIN_ENTRIES ? ring->slot_count : MIN_ENTRIES;
    d->entries = calloc(d->entry_count, sizeof(*d->entries));
    d->queues = calloc(d->world, sizeof(*d->queues));
    if (!d->entries || !d->queues) {
        prs_dispatch_fini(d);
        return prs_fail(-ENOMEM, "proxy: no memory for %" PRIu64 " commands in flight", d->entry_count);
    }
    for (uint32_t i = 0; i < d->world; i++)
        d->queues[i].first = d->queues[i].last = NOBODY;
    return 0;
}

void prs_dispatch_fini(struct prs_dispatch *d)
{
    for (uint32_t i = 0; d->queues && i < d->world; i++)
        free(d->queues[i].dirty);
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

/* ------------------------------------------------------------------------------------------------------------------ */

static int mark_dirty(struct prs_dispatch *d, const struct prs_cmd_fields *cmd)
{
    struct prs_dispatch_queue *queue = &d->queues[cmd->peer];

    if (!queue->dirty)
        queue->dirty = calloc(PRS_CMD_GROUPS / 64, sizeof(uint64_t));
    if (!queue->dirty)
        return prs_fail(-ENOMEM, "proxy: no memory to tell the groups of rank %u apart", cmd->peer);
    queue->dirty[cmd->group / 64] |= 1ull << (cmd->group % 64);
    return 0;
}

/* Whether a signal needs a fence; asking takes the need away. */
static bool take_dirty(struct prs_dispatch *d, const struct prs_cmd_fields *cmd)
{
    uint64_t *dirty = d->queues[cmd->peer].dirty;
    uint64_t bit = 1ull << (cmd->group % 64);

    if (!dirty || !(dirty[cmd->group / 64] & bit))
        return false;
    dirty[cmd->group / 64] &= ~bit;
    return true;
}

static void enqueue(struct prs_dispatch *d, uint64_t position)
{
    struct prs_dispatch_entry *entry = entry_of(d, position);
    struct prs_dispatch_queue *queue = &d->queues[entry->cmd.peer];
    uint32_t index = (uint32_t)(position & (d->entry_count - 1));

    entry->next = NOBODY;
    if (queue->last == NOBODY)
        queue->first = index;
    else
        d->entries[queue->last].next = index;
    queue->last = index;
    queue->count++;
    d->queued++;
}

/* The fence at the newest position taken: return true when it holds no more. */
static bool fence_over(struct prs_dispatch *d)
{
    if (d->retired != d->ring->taken - 1)
        return false;
    d->stats.stall_ns += prs_now_ns() - d->fence_began_ns;
    d->fence_began_ns = 0;
    enqueue(d, d->ring->taken - 1);
    return true;
}

/* Take what is there. Return how many, or the error of a refused command. */
static int take_commands(struct prs_dispatch *d)
{
    int taken = 0;
    int r;

    if (d->fence_began_ns != 0 && !fence_over(d))
        return 0;
    while (taken < TAKE_BATCH && d->ring->taken - d->retired < d->entry_count) {
        uint64_t position = d->ring->taken;
        struct prs_dispatch_entry *entry = entry_of(d, position);

        if (!prs_ring_take(d->ring, &entry->cmd))
            break;
        taken++;
        r = prs_windows_check(d->windows, &entry->cmd);
        entry->op.status = r < 0 ? r : PRS_OP_PENDING;
        if (r < 0)
            return r;
        if (entry->cmd.op == PRS_CMD_PUT) {
            d->stats.puts++;
            if (d->drain && (r = mark_dirty(d, &entry->cmd)) < 0)
                return r;
        } else {
            d->stats.signals++;
            if (d->drain && take_dirty(d, &entry->cmd)) {
                d->stats.fences++;
                d->fence_began_ns = prs_now_ns();
                break; /* it is enqueued when everything before it is complete */
            }
        }
        enqueue(d, position);
    }
    if (taken > 0) {
        d->stats.commands += (uint64_t)taken;
        d->stats.batches++;
        prs_ring_return(d->ring);
    }
    return taken;
}

/* ------------------------------------------------------------------------------------------------------------------ */

static int post_command(struct prs_dispatch *d, struct prs_peer *peer, struct prs_dispatch_entry *entry)
{
    const struct prs_cmd_fields *cmd = &entry->cmd;
    const struct prs_window *to = &d->windows->window[cmd->dst_window];
    const struct prs_window *from = &d->windows->window[cmd->src_window];

    if (__builtin_expect(!to->remotes || (cmd->op == PRS_CMD_PUT && !from->remotes), 0))
        return prs_windows_check(d->windows, cmd); /* given back while the command waited: this says so */
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
        if (r != 0)
            return r < 0 ? r : 0;
    }
    while (queue->first != NOBODY) {
        struct prs_dispatch_entry *entry = &d->entries[queue->first];

        r = post_command(d, queue->peer, entry);
        if (r < 0)
            return r;
        if (r > 0)
            break;
        queue->first = entry->next;
        if (queue->first == NOBODY)
            queue->last = NOBODY;
        queue->count--;
        d->queued--;
        posted++;
    }
    return posted;
}

/* In ring order: done promises that everything below is complete. */
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
    if (d->fence_began_ns != 0)
        (void)fence_over(d);
    return advance(d);
}

/* Commands to a rank that are neither complete nor failed. */
static uint64_t count_pending(struct prs_dispatch *d, uint32_t rank)
{
    uint64_t pending = 0;

    for (uint64_t position = d->retired; position != d->ring->taken; position++) {
        const struct prs_dispatch_entry *entry = entry_of(d, position);

        /* A refused one is not pending, and its peer may be no rank at all. */
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
                                "the proxy was closed with %" PRIu64 " commands to rank %u under way", pending, rank);
    }
}

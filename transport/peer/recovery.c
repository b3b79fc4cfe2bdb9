/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/peer/recovery.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "transport/peer/links.h"
#include "transport/peer/note.h"
#include "transport/peer/peer.h"
#include "transport/util/clock.h"
#include "transport/util/log.h"

enum {
    LOOK_CALLS = 16, /* progress calls between two looks at the clock */
    LOOK_MS = 1,     /* time between two looks at the paths */
    /* the delay after a failed attempt is so many times the delay after the loss; it doubles each time */
    AGAIN = 10,
    DOUBLED_MOST = 5,  /* times */
    CONNECT_MS = 2000, /* limit for the network to become ready */
};

static struct prs_failover_path *path_of(struct prs_peer *peer, uint32_t path)
{
    return &peer->failover->path[path];
}

static void wait_ms(struct prs_failover_path *at, uint32_t ms)
{
    at->again_ns = prs_clock_ns() + ms * 1000000ull;
}

static uint32_t again_ms(const struct prs_peer *peer)
{
    return AGAIN * (uint32_t)peer->fabric->config.recovery_ms;
}

void prs_recovery_allow(struct prs_peer *peer, uint32_t path)
{
    if (!peer->fabric->config.recovery)
        return;
    wait_ms(path_of(peer, path),
            prs_order_path_is_lost(&peer->order, path) ? again_ms(peer) : (uint32_t)peer->fabric->config.recovery_ms);
}

/* ---- notes ---- */

/* Does the other side know of these queues, so that it may give them up? */
static bool is_accepted(const struct prs_failover_path *at)
{
    return at->accepted && at->attempt != PRS_ATTEMPT_NONE && at->attempt != PRS_ATTEMPT_ENDED;
}

bool prs_recovery_expects(const struct prs_peer *peer, const struct prs_wire_note *note)
{
    const struct prs_failover_path *at = &peer->failover->path[note->path];
    bool is_next = note->epoch == (uint8_t)(at->epoch + 1), can_connect = peer->nic->is_port(&note->where);

    switch (note->type) {
    case PRS_NOTE_DOWN:
        /* MUTANT(peer) only known queues are given up: s/&& is_accepted(at)// */
        return is_next && is_accepted(at);
    case PRS_NOTE_OFFER: /* it may arrive before this side has replayed, or drained */
        /* MUTANT(peer) an offer is for the next queues: s/is_next &&// */
        /* MUTANT(peer) one side offers: s/!peer->offers &&// */
        /* MUTANT(peer) an offer comes after the loss: s/at->told &&// */
        /* MUTANT(peer) an offer comes once: s/&& !at->asked// */
        /* MUTANT(peer) an offer can be connected: s/&& can_connect// */
        return is_next && !peer->offers && at->told && !at->asked && can_connect;
    case PRS_NOTE_ACCEPT:
        /* MUTANT(peer) an answer is for the next queues: s/is_next &&// */
        /* MUTANT(peer) an answer follows an offer: s/at->attempt == PRS_ATTEMPT_OFFERED &&// */
        /* MUTANT(peer) an answer can be connected: s/&& can_connect// */
        return is_next && peer->offers && at->attempt == PRS_ATTEMPT_OFFERED && !at->accepted && can_connect;
    case PRS_NOTE_READY: /* this side may have given the queues up meanwhile */
        /* MUTANT(peer) a path in use is not made ready: s/&& at->stage != PRS_PATH_UP// */
        /* MUTANT(peer) a path without queues is not made ready: s/&& at->stage != PRS_PATH_DOWN// */
        return note->epoch == at->epoch && !peer->offers && !at->confirmed && at->stage != PRS_PATH_UP &&
               at->stage != PRS_PATH_DOWN;
    default:
        return false;
    }
}

/* Send a DOWN for the new queues. Its counts are 0: this side does not use these queues yet, so nothing has arrived
 * over them, and it has sent no immediates. */
static void tell_nothing_taken(struct prs_peer *peer, uint32_t path, const char *why)
{
    struct prs_wire_note note = {
        .type = PRS_NOTE_DOWN, .path = (uint8_t)path, .epoch = (uint8_t)(path_of(peer, path)->epoch + 1)};

    snprintf(note.why, sizeof(note.why), "%s", why);
    prs_note_send(peer, &note);
}

bool prs_recovery_take(struct prs_peer *peer, const struct prs_wire_note *note)
{
    struct prs_failover_path *at = path_of(peer, note->path);

    if (note->type == PRS_NOTE_DOWN && note->epoch == at->epoch)
        return false;
    if (note->type == PRS_NOTE_READY) {
        at->confirmed = true;
    } else if (note->type == PRS_NOTE_DOWN) {
        /* MUTANT(peer) a side that gives queues up is answered: delete */
        if (at->attempt != PRS_ATTEMPT_GIVEN_UP)
            tell_nothing_taken(peer, note->path, "the other side gave it up");
        at->attempt = PRS_ATTEMPT_ENDED;
        at->epoch++;
    } else {
        at->theirs = *note;
        at->asked = note->type == PRS_NOTE_OFFER;
        at->accepted = note->type == PRS_NOTE_ACCEPT;
    }
    return true;
}

static void send_queues(struct prs_peer *peer, uint32_t path, enum prs_note_type type)
{
    struct prs_failover_path *at = path_of(peer, path);
    const struct prs_link *link = type == PRS_NOTE_ACCEPT ? peer->link[path] : at->next;
    struct prs_wire_note note = {.type = (uint8_t)type,
                                 .path = (uint8_t)path,
                                 .epoch = (uint8_t)(at->epoch + (type == PRS_NOTE_OFFER)),
                                 .where = link->own.told};

    for (uint32_t k = 0; k < peer->queues_per_path; k++)
        peer->nic->address(link->queue[k], &note.queue[k]);
    prs_note_send(peer, &note);
}

/* ---- queues ---- */

static void close_next(struct prs_peer *peer, struct prs_failover_path *at)
{
    if (at->next)
        peer->nic->close(at->next);
    at->next = NULL;
    at->done = 0;
}

void prs_recovery_close(struct prs_peer *peer)
{
    for (uint32_t i = 0; peer->failover && i < peer->path_count; i++)
        close_next(peer, path_of(peer, i));
}

static bool port_is_up(const struct prs_peer *peer, uint32_t path)
{
    return prs_fabric_check_rail(peer->fabric, peer->path[path].local_rail, 0) == 0;
}

/* Are all requests of the old queues done or replayed? */
static bool is_over(const struct prs_peer *peer, uint32_t path)
{
    return prs_order_probe_idle(&peer->order, path) && prs_order_path_is_empty(&peer->order, path);
}

/* Make new queues, and a new loopback queue where the path had one. Return 0 or -errno. */
static int open_next(struct prs_peer *peer, uint32_t path)
{
    struct prs_failover_path *at = path_of(peer, path);
    struct prs_rail_address own;
    struct prs_queue *loopback;
    uint32_t id = peer->queues + path;
    int r;

    if (at->next)
        return 0;
    prs_rail_locate(peer->link[path]->rail, &peer->fabric->config, &own);
    r = prs_links_open_path(peer, path, &own, NULL, &at->next);
    if (!r && at->next->queue[0]->takes_inline != peer->link[path]->queue[0]->takes_inline)
        r = prs_nic_fail(at->next->rail, EOPNOTSUPP, "new queues take inline data as the old ones did not");
    if (!r && peer->queue[id])
        r = peer->nic->loopback(at->next, id, &loopback);
    if (r)
        close_next(peer, at);
    return r;
}

/* Return 0 (all are connected), PRS_AGAIN or -errno. */
static int connect_next(struct prs_peer *peer, struct prs_failover_path *at)
{
    int error = 0, r = 0;

    for (; at->done < peer->queues_per_path; at->done++) {
        r = peer->nic->connect(at->next->queue[at->done], &at->theirs.queue[at->done], &at->theirs.where, &error);
        if (r)
            return r;
    }
    at->done = 0;
    return 0;
}

/* Forget the failure of the old queues, which does not concern the new ones. Failures of other paths still wait for a
 * farewell. */
static void forget_failure(struct prs_peer *peer, uint32_t path)
{
    bool others = false;

    if (peer->failure[path].kind != PRS_EVENT_ERROR)
        return;
    peer->failure[path].kind = PRS_EVENT_DONE;
    for (uint32_t i = 0; i < peer->path_count; i++)
        others |= peer->failure[i].kind == PRS_EVENT_ERROR;
    /* MUTANT(peer) the failure of another path still counts: s/if (others)/if (0)/ */
    if (others)
        return;
    peer->farewell_ns = 0;
    peer->idle_start = peer->idle_polls = 0;
}

/* The new queues take the place of the old ones, which are closed. */
static void swap_links(struct prs_peer *peer, uint32_t path)
{
    struct prs_failover_path *at = path_of(peer, path);
    struct prs_link *old = peer->link[path], *link = at->next;

    link->receives += old->receives;
    peer->link[path] = link;
    for (uint32_t k = 0; k < peer->queues_per_path; k++)
        peer->queue[k * peer->path_count + path] = link->queue[k];
    if (peer->queue[peer->queues + path])
        peer->queue[peer->queues + path] = link->loopback;
    peer->path[path].own = link->own;
    peer->path[path].peer.address = at->theirs.where;
    prs_order_probe_up(&peer->order, path);
    forget_failure(peer, path);
    at->next = NULL;
    at->done = 0;
    at->told = at->asked = at->accepted = at->confirmed = false;
    at->epoch++;
    peer->nic->close(old);
}

static void use_again(struct prs_peer *peer, uint32_t path)
{
    struct prs_failover_path *at = path_of(peer, path);
    const struct prs_rail_info *own = &peer->link[path]->rail->info;

    prs_failover_set_stage(peer->failover, path, PRS_PATH_UP);
    at->failures = 0;
    PRS_WARN("%s:%d to %s:%u at %s is used again, %.1f s after it was lost", own->name, own->port,
             peer->path[path].peer.name, peer->path[path].peer.port, peer->remote,
             (double)(prs_clock_ns() - at->lost_ns) / 1e9);
}

/* ---- the side that offers ---- */

static void give_up(struct prs_peer *peer, uint32_t path, const char *why)
{
    struct prs_failover_path *at = path_of(peer, path);

    PRS_INFO("%s:%d to %s is not used again yet: %s", peer->link[path]->rail->info.name,
             peer->link[path]->rail->info.port, peer->remote, why);
    close_next(peer, at);
    tell_nothing_taken(peer, path, why);
    at->attempt = PRS_ATTEMPT_GIVEN_UP;
}

/* Write no bytes over each queue: its completion shows that the other side answers. */
static int try_next(struct prs_peer *peer, struct prs_failover_path *at)
{
    static const struct prs_wr nothing = {.opcode = PRS_WR_WRITE, .flags = PRS_WR_SIGNALED};
    int r = 0;

    for (uint32_t k = 0; k < peer->queues_per_path && !r; k++)
        r = peer->nic->post(at->next->queue[k], &nothing, 0, 0, 1);
    return r;
}

/* Return 0 (all were answered), PRS_AGAIN or -errno; *why tells the failure. */
static int poll_next(struct prs_peer *peer, struct prs_failover_path *at, const char **why)
{
    struct prs_event events[PRS_POLL_MOST];
    int count = peer->nic->poll(at->next, events);

    *why = "polling its completion queue failed";
    for (int i = 0; i < count; i++) {
        *why = events[i].kind == PRS_EVENT_ERROR ? events[i].text : "the other side has sent too soon";
        if (events[i].kind != PRS_EVENT_DONE)
            return -EIO;
        at->done++;
    }
    return count < 0 ? count : at->done == peer->queues_per_path ? 0 : PRS_AGAIN;
}

/* An attempt makes and destroys queues in the threads of both owners. So a rail that carries nothing, though its ports
 * are up, is tried ever more rarely. */
static void wait_longer(struct prs_peer *peer, struct prs_failover_path *at)
{
    wait_ms(at, again_ms(peer) << at->failures);
    /* MUTANT(peer) attempts become rarer: delete */
    at->failures += at->failures < DOUBLED_MOST;
}

static void offer(struct prs_peer *peer, uint32_t path)
{
    struct prs_failover_path *at = path_of(peer, path);

    if (at->failures && !port_is_up(peer, path)) { /* the next attempt after the port is up may succeed */
        at->failures = 0;
        wait_ms(at, (uint32_t)peer->fabric->config.recovery_ms);
    }
    if (prs_clock_ns() < at->again_ns || !port_is_up(peer, path) || !is_over(peer, path))
        return;
    if (open_next(peer, path)) {
        wait_longer(peer, at);
        return;
    }
    send_queues(peer, path, PRS_NOTE_OFFER);
    at->attempt = PRS_ATTEMPT_OFFERED;
}

static void connect_and_try(struct prs_peer *peer, uint32_t path)
{
    struct prs_failover_path *at = path_of(peer, path);
    int r = port_is_up(peer, path) ? connect_next(peer, at) : -ENETDOWN;

    if (!r)
        r = try_next(peer, at);
    if (!r) {
        at->attempt = PRS_ATTEMPT_TRYING;
        at->again_ns = prs_clock_ns() + prs_config_patience_ns(&peer->fabric->config);
    } else if (r < 0 || prs_clock_ns() > at->again_ns) {
        give_up(peer, path, r == -ENETDOWN ? "its port is down" : "its queues cannot be connected");
    }
}

static void finish_try(struct prs_peer *peer, uint32_t path)
{
    struct prs_failover_path *at = path_of(peer, path);
    const char *why = "its port is down";
    int r = at->done == peer->queues_per_path ? 0 : poll_next(peer, at, &why);
    struct prs_wire_note note = {.type = PRS_NOTE_READY, .path = (uint8_t)path};

    /* MUTANT(peer) an answer comes in time: s/prs_clock_ns() > at->again_ns/false/ */
    if (r == PRS_AGAIN && prs_clock_ns() > at->again_ns) { /* TCP may try for much longer than a NIC */
        why = "the other side does not answer";
        r = -ETIMEDOUT;
    }
    if (r >= 0 && !port_is_up(peer, path)) {
        why = "its port is down";
        r = -ENETDOWN;
    }
    if (r < 0)
        give_up(peer, path, why);
    if (r || !is_over(peer, path) || prs_order_path_up(&peer->order, path))
        return;
    swap_links(peer, path);
    at->attempt = PRS_ATTEMPT_NONE;
    use_again(peer, path);
    note.epoch = at->epoch;
    prs_note_send(peer, &note);
}

static void step_offering(struct prs_peer *peer, uint32_t path)
{
    struct prs_failover_path *at = path_of(peer, path);

    if (at->attempt == PRS_ATTEMPT_ENDED) {
        close_next(peer, at);
        at->accepted = false;
        at->attempt = PRS_ATTEMPT_NONE;
        wait_longer(peer, at);
    } else if (at->attempt == PRS_ATTEMPT_NONE) {
        offer(peer, path);
    } else if (at->attempt == PRS_ATTEMPT_OFFERED && at->accepted) {
        at->attempt = PRS_ATTEMPT_CONNECTING;
        wait_ms(at, CONNECT_MS);
    }
    if (at->attempt == PRS_ATTEMPT_CONNECTING)
        connect_and_try(peer, path);
    else if (at->attempt == PRS_ATTEMPT_TRYING)
        finish_try(peer, path);
}

/* ---- the side that accepts ---- */

static void accept_queues(struct prs_peer *peer, uint32_t path)
{
    struct prs_failover_path *at = path_of(peer, path);
    int r;

    if (!at->asked || prs_clock_ns() < at->again_ns || !port_is_up(peer, path) || !is_over(peer, path))
        return;
    r = open_next(peer, path);
    if (!r)
        r = connect_next(peer, at);
    if (r < 0)
        close_next(peer, at);
    if (r) {
        wait_ms(at, r < 0 ? again_ms(peer) : (uint32_t)peer->fabric->config.mqp_retry_ms);
        return;
    }
    swap_links(peer, path);
    prs_failover_set_stage(peer->failover, path, PRS_PATH_JOINED);
    send_queues(peer, path, PRS_NOTE_ACCEPT);
}

static void step_accepting(struct prs_peer *peer, uint32_t path)
{
    struct prs_failover_path *at = path_of(peer, path);

    if (at->stage == PRS_PATH_DOWN)
        accept_queues(peer, path);
    else if (at->stage == PRS_PATH_JOINED && at->confirmed && prs_order_path_up(&peer->order, path) == 0)
        use_again(peer, path);
}

/* ---- the owner ---- */

bool prs_recovery_is_due(struct prs_peer *peer)
{
    struct prs_failover *failover = peer->failover;
    uint64_t now_ns;

    if (!failover->away || !peer->fabric->config.recovery || ++failover->looks < LOOK_CALLS || peer->stream_fd < 0 ||
        peer->remote_closed)
        return false;
    failover->looks = 0;
    now_ns = prs_clock_ns();
    if (now_ns < failover->look_ns)
        return false;
    failover->look_ns = now_ns + LOOK_MS * 1000000ull;
    return true;
}

int prs_recovery_step(struct prs_peer *peer)
{
    struct prs_failover *failover = peer->failover;

    for (uint32_t i = 0; i < peer->path_count && !peer->error; i++) {
        if (peer->offers && failover->path[i].stage == PRS_PATH_DOWN)
            step_offering(peer, i);
        else if (!peer->offers)
            step_accepting(peer, i);
    }
    return peer->error;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* A rank: its kernel issues commands, its proxy takes them. Also what dispatch.c asks of a team (perseus/team.h). */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/sim/ledger.h"
#include "tools/sim/memory.h"
#include "tools/sim/sim.h"
#include "transport/peer/peer.h"

enum {
    ISSUE_BATCH = 16, /* commands that appear in the ring together */
    EPOCH = 1,
};

/* ---- the team ---- */

uint32_t prs_team_rank(const struct prs_team *team)
{
    return team->rank;
}

uint32_t prs_team_world(const struct prs_team *team)
{
    return team->sim->options.ranks;
}

bool prs_team_drains(const struct prs_team *team)
{
    return team->sim->options.policy == PRS_POLICY_DRAIN;
}

int prs_team_peer(struct prs_team *team, uint32_t context, uint32_t rank, struct prs_peer **out)
{
    int r = team->end[rank] ? 0 : sim_connect(team->sim, team->rank, rank);

    (void)context;
    if (!r)
        *out = team->end[rank]->peer;
    return r;
}

struct prs_peer *sim_peer(struct sim *sim, uint32_t rank, uint32_t other)
{
    struct prs_peer *peer = NULL;
    int r = prs_team_peer(&sim->rank[rank], 0, other, &peer);

    if (r)
        sim_fail(sim, r);
    return peer;
}

struct sim_end *sim_end_of(struct prs_peer *peer)
{
    return peer->user;
}

void sim_rank_list(struct prs_team *rank, struct sim_end *end)
{
    if (end->listed)
        return;
    if (rank->listed_count == rank->listed_room) {
        uint32_t room = rank->listed_room ? 2 * rank->listed_room : 16;
        struct sim_end **grown = realloc(rank->listed, room * sizeof(struct sim_end *));

        if (!grown) {
            sim_fail(rank->sim, -ENOMEM);
            return;
        }
        rank->listed = grown;
        rank->listed_room = room;
    }
    end->listed = true;
    rank->listed[rank->listed_count++] = end;
}

static bool has_events(const struct prs_peer *peer)
{
    for (uint32_t i = 0; i < peer->path_count; i++)
        if (((const struct sim_link *)peer->link[i])->count)
            return true;
    return false;
}

/* Only peers with something to do: the others would find nothing, and the round is charged for looking at them. */
int prs_team_progress(struct prs_team *team, uint32_t context)
{
    uint32_t count = team->listed_count, kept = 0;
    int did = 0;

    (void)context;
    for (uint32_t i = 0; i < count; i++) {
        struct sim_end *end = team->listed[i];
        bool agreeing = sim_rails_agreeing(end);
        int r;

        sim_rails_poll(end);
        r = prs_peer_progress(end->peer);
        if (r < 0)
            return r;
        did += r;
        agreeing |= sim_rails_agreeing(end);
        team->agreeing |= agreeing;
        end->listed = has_events(end->peer) || end->peer->order.dirty || agreeing;
        if (end->listed)
            team->listed[kept++] = end;
    }
    for (uint32_t i = count; i < team->listed_count; i++)
        team->listed[kept++] = team->listed[i];
    team->listed_count = kept;
    return did;
}

int prs_team_settle(struct prs_team *team, uint32_t context)
{
    (void)team, (void)context;
    return 0;
}

/* The linker sends dispatch.c's calls here (--wrap), to charge the proxy and to note that the peer has to be
 * progressed. */
int __real_prs_peer_put(struct prs_peer *peer, struct prs_op *op, const struct prs_put *put);
int __real_prs_peer_signal(struct prs_peer *peer, struct prs_op *op, const struct prs_signal *signal);
int __wrap_prs_peer_put(struct prs_peer *peer, struct prs_op *op, const struct prs_put *put);
int __wrap_prs_peer_signal(struct prs_peer *peer, struct prs_op *op, const struct prs_signal *signal);

static int charge(struct prs_peer *peer, int r)
{
    struct sim_end *end = sim_end_of(peer);

    if (r == 0)
        end->rank->cpu_ps += sim_ps(end->rank->sim->cluster.command_ns);
    sim_rank_list(end->rank, end);
    return r;
}

int __wrap_prs_peer_put(struct prs_peer *peer, struct prs_op *op, const struct prs_put *put)
{
    return charge(peer, __real_prs_peer_put(peer, op, put));
}

int __wrap_prs_peer_signal(struct prs_peer *peer, struct prs_op *op, const struct prs_signal *signal)
{
    return charge(peer, __real_prs_peer_signal(peer, op, signal));
}

/* ---- life ---- */

static int open_windows(struct sim *sim, struct prs_team *rank)
{
    int r = prs_windows_init(&rank->windows, sim->options.ranks, EPOCH, SIM_WINDOWS);

    if (r)
        return r;
    /* All ranks share one table: a window has the same address and keys everywhere, and the ledger's numbers tell the
     * rest. */
    for (uint32_t w = 0; w < SIM_WINDOWS; w++)
        rank->windows.window[w] = (struct prs_window){.bytes = PRS_CMD_MAX_OFFSET,
                                                      .region = &sim->region,
                                                      .flags = w == SIM_WINDOW_SIGNALS ? PRS_WINDOW_SIGNALS : 0,
                                                      .remotes = sim->remotes + (size_t)w * sim->options.ranks};
    rank->windows.count = SIM_WINDOWS;
    return 0;
}

static int open_rank(struct sim *sim, uint32_t index)
{
    struct prs_team *rank = &sim->rank[index];
    int r;

    rank->sim = sim;
    rank->rank = index;
    rank->end = calloc(sim->options.ranks, sizeof(struct sim_end *));
    rank->met = calloc(sim->options.ranks, sizeof(*rank->met));
    if (!rank->end || !rank->met)
        return -ENOMEM;
    r = prs_ring_init(&rank->ring, sim->options.ring_slots);
    if (!r)
        r = open_windows(sim, rank);
    return r ? r : prs_dispatch_init(&rank->dispatch, &rank->ring, &rank->windows, rank, 0);
}

int sim_ranks_open(struct sim *sim)
{
    uint32_t ranks = sim->options.ranks;
    int r = 0;

    sim->rank = calloc(ranks, sizeof(*sim->rank));
    sim->remotes = calloc((size_t)SIM_WINDOWS * ranks, sizeof(*sim->remotes));
    if (!sim->rank || !sim->remotes)
        return -ENOMEM;
    for (uint32_t i = 0; i < SIM_WINDOWS * ranks; i++)
        for (uint32_t k = 0; k < PRS_MAX_RAILS; k++)
            sim->remotes[i].keys.rkey[k] = i < ranks ? SIM_KEY_DATA : SIM_KEY_SIGNAL;
    for (uint32_t i = 0; i < ranks && !r; i++)
        r = open_rank(sim, i);
    return r;
}

void sim_ranks_close(struct sim *sim)
{
    for (uint32_t i = 0; sim->rank && i < sim->options.ranks; i++) {
        struct prs_team *rank = &sim->rank[i];

        prs_dispatch_fini(&rank->dispatch);
        sim_free(rank->windows.window); /* remotes belong to all ranks */
        prs_ring_fini(&rank->ring);
        free(rank->end);
        free(rank->met);
        free(rank->listed);
        free(rank->command);
    }
    free(sim->rank);
    free(sim->remotes);
}

/* ---- the kernel ---- */

static void queue_command(struct prs_team *rank, const struct prs_cmd_fields *fields)
{
    struct sim *sim = rank->sim;

    if (rank->command_end - rank->command_first == rank->command_room) {
        uint32_t room = rank->command_room ? 2 * rank->command_room : 64;
        struct prs_cmd_fields *grown = malloc(room * sizeof(*grown));

        if (!grown) {
            sim_fail(sim, -ENOMEM);
            return;
        }
        for (uint64_t i = rank->command_first; i != rank->command_end; i++)
            grown[i & (room - 1)] = rank->command[i & (rank->command_room - 1)];
        free(rank->command);
        rank->command = grown;
        rank->command_room = room;
    }
    rank->command[rank->command_end++ & (rank->command_room - 1)] = *fields;
    rank->busy = true;
    if (sim->options.turn_commands) {
        sim_rank_wake(rank, sim->events.now_ps);
    } else if (!rank->issuing) {
        rank->issuing = true;
        sim_add_event(sim, sim->events.now_ps + sim_ps(sim->cluster.ring_latency_ns + sim->cluster.push_ns), SIM_ISSUE,
                      rank, 0, 0);
    }
}

/* Write as many commands into the ring as there is room for, up to a limit that counts a put with its signal as one if
 * that is asked for. */
static uint32_t write_commands(struct prs_team *rank, uint32_t most, bool pairs)
{
    uint32_t count = 0, turns = 0;

    for (; rank->command_first != rank->command_end && rank->claimed - rank->ring.returned < rank->ring.slot_count;
         count++) {
        const struct prs_cmd_fields *fields = &rank->command[rank->command_first & (rank->command_room - 1)];

        if (turns == most && !(pairs && fields->op != PRS_CMD_PUT))
            break;
        turns += !pairs || fields->op == PRS_CMD_PUT;
        rank->command_first++;
        rank->ring.slots[rank->claimed & (rank->ring.slot_count - 1)] =
            prs_cmd_pack(fields, prs_cmd_lap(rank->claimed, rank->ring.slot_count));
        rank->claimed++;
    }
    return count;
}

void sim_rank_issue(struct prs_team *rank)
{
    struct sim *sim = rank->sim;
    uint64_t left;
    uint32_t count = write_commands(rank, ISSUE_BATCH, false);

    rank->issuing = false;
    if (count)
        sim_rank_wake(rank, sim->events.now_ps);
    left = rank->command_end - rank->command_first;
    if (!left || !count)
        return; /* no free slot: the proxy's next round continues here */
    rank->issuing = true;
    sim_add_event(sim,
                  sim->events.now_ps + sim_ps(sim->cluster.push_ns * (double)(left < ISSUE_BATCH ? left : ISSUE_BATCH)),
                  SIM_ISSUE, rank, 0, 0);
}

static bool is_near(const struct sim *sim, uint32_t a, uint32_t b)
{
    uint32_t local = (uint32_t)sim->cluster.gpus_per_node;

    return a / local == b / local;
}

/* NVLink keeps the order of one GPU's stores. Return when the data has arrived. */
static uint64_t cross_nvlink(struct sim *sim, struct prs_team *rank, uint64_t bytes)
{
    uint64_t now = sim->events.now_ps;

    if (rank->nvlink_ps < now)
        rank->nvlink_ps = now;
    rank->nvlink_ps += sim_transfer_ps(bytes, sim->cluster.nvlink_gbps);
    return rank->nvlink_ps + sim_ps(sim->cluster.nvlink_latency_ns);
}

void sim_put(struct sim *sim, uint32_t put, uint32_t group)
{
    const struct sim_put *is = &sim->ledger->put[put];
    struct prs_team *rank = &sim->rank[is->from];
    struct prs_cmd_fields fields = {.op = PRS_CMD_PUT,
                                    .dst_offset = put * SIM_PUT_STRIDE,
                                    .bytes = is->bytes,
                                    .peer = is->to,
                                    .dst_window = SIM_WINDOW_DATA,
                                    .src_window = SIM_WINDOW_DATA,
                                    .group = group % PRS_CMD_GROUPS,
                                    .epoch = EPOCH};

    if (is_near(sim, is->from, is->to))
        sim_add_event(sim, cross_nvlink(sim, rank, is->bytes), SIM_NEAR, rank, put, 0);
    else
        queue_command(rank, &fields);
}

void sim_signal(struct sim *sim, uint32_t signal, uint32_t group)
{
    struct sim_signal *is = &sim->ledger->signal[signal];
    struct prs_team *rank = &sim->rank[is->from];
    struct prs_cmd_fields fields = {.op = PRS_CMD_SIGNAL_SET,
                                    .dst_offset = signal * 8ull,
                                    .bytes = 1,
                                    .peer = is->to,
                                    .dst_window = SIM_WINDOW_SIGNALS,
                                    .group = group % PRS_CMD_GROUPS,
                                    .epoch = EPOCH};

    is->issued_ps = sim->events.now_ps;
    if (is_near(sim, is->from, is->to))
        sim_add_event(sim, cross_nvlink(sim, rank, 8), SIM_NEAR, rank, signal, 1);
    else
        queue_command(rank, &fields);
}

void sim_compute(struct sim *sim, uint32_t index, double ns, uint64_t token)
{
    struct prs_team *rank = &sim->rank[index];
    uint64_t now = sim->events.now_ps;

    rank->compute_ps = (rank->compute_ps > now ? rank->compute_ps : now) + sim_ps(ns);
    if (sim->options.explain)
        sim_explain_note(&rank->explain, SIM_COMPUTE, now, rank->compute_ps);
    sim_call_at(sim, rank->compute_ps, index, token);
}

/* ---- the proxy ---- */

void sim_rank_wake(struct prs_team *rank, uint64_t at_ps)
{
    uint64_t from = at_ps + sim_ps(rank->sim->cluster.pickup_ns);

    if (rank->awake)
        return;
    rank->awake = true;
    sim_add_event(rank->sim, from > rank->cpu_ps ? from : rank->cpu_ps, SIM_STEP, rank, 0, 0);
}

/* Charge the time in which a drain asks every peer whether it is complete, in addition to the wait. */
static void charge_drains(struct prs_team *rank)
{
    const struct sim_cluster *c = &rank->sim->cluster;
    uint64_t drains = rank->dispatch.stats.fences - rank->fences_charged;

    rank->fences_charged += drains;
    rank->cpu_ps += drains * sim_ps(c->drain_ns + c->drain_peer_ns * rank->connected);
}

static void explain_round(struct prs_team *rank)
{
    uint64_t now = rank->sim->events.now_ps;

    if (rank->draining && !rank->dispatch.drain.waits)
        sim_explain_end(&rank->explain, SIM_FENCE, now);
    rank->draining = rank->dispatch.drain.waits;
    if (rank->draining)
        sim_explain_note(&rank->explain, SIM_FENCE, now, UINT64_MAX);
    sim_explain_note(&rank->explain, SIM_PROXY, now, rank->cpu_ps);
}

static void look_whether_quiet(struct prs_team *rank)
{
    struct sim *sim = rank->sim;
    double later_ns = sim->options.turn_commands ? 0 : sim->cluster.ring_latency_ns;

    if (!rank->busy || rank->command_first != rank->command_end || rank->dispatch.retired != rank->claimed)
        return;
    rank->busy = false;
    if (sim->workload->quiet)
        sim_add_event(sim, rank->cpu_ps + sim_ps(later_ns), SIM_QUIET, rank, 0, 0);
}

void sim_rank_step(struct prs_team *rank)
{
    struct sim *sim = rank->sim;
    const struct sim_cluster *c = &sim->cluster;
    uint32_t pushed = 0;
    int r;

    rank->awake = false;
    rank->cpu_ps = sim->events.now_ps;
    rank->agreeing = false;
    if (sim->options.turn_commands) {
        pushed = write_commands(rank, sim->options.turn_commands, sim->options.turn_pairs);
        rank->cpu_ps += pushed * sim_ps(c->push_ns);
    }
    r = prs_dispatch_step(&rank->dispatch);
    if (r < 0) {
        fprintf(stderr, "perseus-sim: rank %u: %s\n", rank->rank, prs_error_text());
        sim_fail(sim, r);
        return;
    }
    rank->cpu_ps += sim_ps(c->step_ns + c->poll_ns * rank->connected);
    charge_drains(rank);
    if (sim->options.explain)
        explain_round(rank);
    look_whether_quiet(rank);
    if (!sim->options.turn_commands && !rank->issuing && rank->command_first != rank->command_end) {
        rank->issuing = true; /* the kernel sees the credit, and continues to write */
        sim_add_event(sim, rank->cpu_ps + 2 * sim_ps(c->ring_latency_ns), SIM_ISSUE, rank, 0, 0);
    }
    if (rank->due_first && sim_executor_poll(rank)) {
        rank->awake = true;
        rank->polls_left = rank->connected - 1;
    } else if (r > 0 || pushed || rank->agreeing) {
        rank->awake = true;
        sim_add_event(sim, rank->cpu_ps, SIM_STEP, rank, 0, 0);
    }
}

void sim_rank_polled(struct prs_team *rank)
{
    if (!rank->polls_left-- || !sim_executor_poll(rank))
        sim_add_event(rank->sim, rank->cpu_ps, SIM_STEP, rank, 0, 0);
}

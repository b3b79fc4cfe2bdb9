/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/sim/moe.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/sim/ledger.h"
#include "tools/sim/work.h"

/* Qwen/Qwen3-30B-A3B, openai/gpt-oss-120b, deepseek-ai/DeepSeek-V3 (routed experts). */
const struct moe_model moe_models[] = {{128, 8, 2048, 768}, {128, 4, 2880, 2880}, {256, 8, 7168, 2048}};
const char *const moe_model_names[] = {"qwen3-30b", "gpt-oss-120b", "deepseek-v3", NULL};

enum { BYTES_OF_VALUE = 2, PRODUCTS = 3 /* gate, up, down */ };

/* A transfer is one rank's rows for one expert: from * experts + expert. Tokens of signals: transfer << 2 | leg. */
enum leg {
    DISPATCH, /* reaches the owner of the expert */
    COMBINE,  /* back at the rank that owns the tokens */
    DISPATCH_RELAY,
    COMBINE_RELAY, /* at a relaying rank, which sends the rows on */
    DIRECTIONS = 2
};

struct state {
    const struct work *work;
    struct moe_model model;
    uint32_t ranks, local, experts, experts_per_rank;
    uint32_t peers; /* destinations of a rank on other nodes that groups are counted for: ranks, or with relays nodes */
    uint32_t size;  /* transfers in a group; the last group may be smaller */
    uint32_t total; /* transfers to one destination */
    uint32_t groups;              /* groups of one destination */
    uint32_t *rows;               /* [transfer] */
    uint32_t *signal[DIRECTIONS]; /* [transfer]: signal of its leg over the network */
    uint16_t *sent[DIRECTIONS];   /* [(rank * peers + peer) * groups + group]: puts so far */
    uint32_t *missing;            /* [rank]: combine signals that have not arrived */
    double *finished_us;
    struct sim_explain *finished;
    struct work_result *result;
};

static struct state *state_of(struct sim *sim)
{
    return sim->workload_state;
}

/* ---- routing ---- */

double *moe_draw_shares(struct sim *sim, uint32_t experts, double zipf)
{
    double *share = calloc(experts, sizeof(*share)), sum = 0;

    for (uint32_t i = 0; share && i < experts; i++)
        sum += share[i] = pow(i + 1, -zipf);
    for (uint32_t i = experts; share && i-- > 0;) {
        uint32_t other = (uint32_t)sim_random(sim, i + 1);
        double now = share[i];

        share[i] = share[other];
        share[other] = now;
    }
    for (uint32_t i = 0; share && i < experts; i++)
        share[i] /= sum;
    return share;
}

uint32_t moe_draw_expert(struct sim *sim, const double *share, uint32_t experts)
{
    double left = (double)sim_random(sim, 1ull << 53) / (double)(1ull << 53);
    uint32_t expert = 0;

    while (expert + 1 < experts && left >= share[expert])
        left -= share[expert++];
    return expert;
}

/* A token never goes to one expert twice, so no expert gets more rows than there are tokens: the excess goes to the
 * others. */
static void limit_shares(double *share, uint32_t experts, uint32_t chosen)
{
    for (uint32_t round = 0; round < experts; round++) {
        double over = 0, rest = 0;

        for (uint32_t i = 0; i < experts; i++) {
            if (share[i] >= 1.0 / chosen) {
                over += share[i] - 1.0 / chosen;
                share[i] = 1.0 / chosen;
            } else {
                rest += share[i];
            }
        }
        if (over < 1e-12 || rest <= 0)
            return;
        for (uint32_t i = 0; i < experts; i++)
            if (share[i] < 1.0 / chosen)
                share[i] += over * share[i] / rest;
    }
}

static int draw_routes(struct sim *sim, struct state *state)
{
    double *share = moe_draw_shares(sim, state->experts, state->work->options->zipf);
    double rows = (double)state->work->options->tokens * state->model.chosen;

    if (!share)
        return -ENOMEM;
    limit_shares(share, state->experts, state->model.chosen);
    for (uint32_t from = 0; from < state->ranks; from++)
        for (uint32_t e = 0; e < state->experts; e++) {
            double exact = rows * share[e], part = exact - floor(exact);

            state->rows[from * state->experts + e] =
                (uint32_t)exact + (sim_random(sim, 1u << 30) < (uint64_t)(part * (1u << 30)));
        }
    free(share);
    return 0;
}

/* ---- sending ---- */

static uint32_t owner_of(const struct state *state, uint32_t expert)
{
    return expert / state->experts_per_rank;
}

static uint32_t node_of(const struct state *state, uint32_t rank)
{
    return rank / state->local;
}

/* The number of a transfer among those to its destination, dispatched or combined. With relays that is a node. */
static uint32_t lane_of(const struct state *state, uint32_t transfer)
{
    uint32_t expert = transfer % state->experts;

    return expert % (state->work->options->relay ? state->local * state->experts_per_rank : state->experts_per_rank);
}

static uint32_t put_rows(struct sim *sim, uint32_t from, uint32_t to, uint32_t transfer, uint64_t leg, uint32_t group)
{
    struct state *state = state_of(sim);
    uint64_t bytes = (uint64_t)state->rows[transfer] * state->model.hidden * BYTES_OF_VALUE;
    uint32_t signal = sim_ledger_signal(sim->ledger, from, to, (uint64_t)transfer << 2 | leg);

    if (bytes)
        sim_put(sim, sim_ledger_put(sim->ledger, from, to, bytes, signal), group);
    return signal;
}

/* Within a node each transfer has its signal at once. */
static void send_near(struct sim *sim, uint32_t from, uint32_t to, uint32_t transfer, uint64_t leg)
{
    sim_signal(sim, put_rows(sim, from, to, transfer, leg, 1), 1);
}

/* Send over the network. The signals of a group follow its last put. */
static void send_far(struct sim *sim, uint32_t from, uint32_t to, uint32_t transfer, uint32_t direction, uint64_t leg)
{
    struct state *state = state_of(sim);
    uint32_t lane = lane_of(state, transfer), group = lane / state->size, first = transfer - lane + group * state->size;
    uint32_t puts = state->total - group * state->size < state->size ? state->total - group * state->size : state->size;
    uint32_t peer = state->work->options->relay ? node_of(state, to) : to;
    uint16_t *sent = &state->sent[direction][((size_t)from * state->peers + peer) * state->groups + group];
    /* Both directions are in flight together, so they have groups of their own. */
    uint32_t number = 1 + group + direction * 16384;

    state->signal[direction][transfer] = put_rows(sim, from, to, transfer, leg, number);
    if (++*sent < puts)
        return;
    for (uint32_t i = first; i < first + puts; i++)
        sim_signal(sim, state->signal[direction][i], number);
}

/* Send from one rank to another, through the relay on the destination's node if relays are requested. */
static void send_rows(struct sim *sim, uint32_t from, uint32_t to, uint32_t transfer, uint32_t direction)
{
    struct state *state = state_of(sim);
    bool relay = state->work->options->relay && from % state->local != to % state->local;
    uint32_t hop = direction == DISPATCH ? node_of(state, to) * state->local + from % state->local
                                         : node_of(state, from) * state->local + to % state->local;

    if (node_of(state, from) == node_of(state, to))
        send_near(sim, from, to, transfer, direction);
    else if (!relay)
        send_far(sim, from, to, transfer, direction, direction);
    else if (direction == DISPATCH)
        send_far(sim, from, hop, transfer, direction, DISPATCH_RELAY);
    else
        send_near(sim, from, hop, transfer, COMBINE_RELAY);
}

/* Rank `from` sends its rows to all experts: the first expert of every owner, then the second; next rank first. */
static void dispatch(struct sim *sim, uint32_t from)
{
    struct state *state = state_of(sim);

    for (uint32_t k = 0; k < state->experts_per_rank; k++)
        for (uint32_t i = 1; i <= state->ranks; i++) {
            uint32_t to = (from + i) % state->ranks;

            send_rows(sim, from, to, from * state->experts + to * state->experts_per_rank + k, DISPATCH);
        }
}

static void compute(struct sim *sim, uint32_t rank, uint32_t transfer)
{
    struct state *state = state_of(sim);
    double work = 2.0 * PRODUCTS * state->rows[transfer] * state->model.hidden * state->model.inner;

    if (!state->work->options->compute)
        work = 0;
    sim_compute(sim, rank, work / (sim->cluster.tflops * 1e3), transfer);
}

/* The product of a transfer is done: send it back. */
static void combine(struct sim *sim, uint32_t rank, uint64_t transfer)
{
    send_rows(sim, rank, (uint32_t)transfer / state_of(sim)->experts, (uint32_t)transfer, COMBINE);
}

static void finish_rank(struct sim *sim, uint32_t rank)
{
    struct state *state = state_of(sim);

    sim_explain_advance(&sim->rank[rank].explain, sim->events.now_ps);
    state->finished[rank] = sim->rank[rank].explain;
    state->finished_us[rank] = sim_now_us(sim);
}

static void raised(struct sim *sim, uint32_t rank, uint32_t signal)
{
    struct state *state = state_of(sim);
    uint64_t token = sim->ledger->signal[signal].token;
    uint32_t transfer = (uint32_t)(token >> 2), from = transfer / state->experts;

    switch (token & 3) {
    case DISPATCH:
        compute(sim, rank, transfer);
        break;
    case DISPATCH_RELAY:
        send_near(sim, rank, owner_of(state, transfer % state->experts), transfer, DISPATCH);
        break;
    case COMBINE_RELAY:
        send_far(sim, rank, from, transfer, COMBINE, COMBINE);
        break;
    default:
        if (--state->missing[rank] == 0)
            finish_rank(sim, rank);
    }
}

static void start(struct sim *sim)
{
    struct state *state = state_of(sim);

    sim_fail(sim, draw_routes(sim, state));
    for (uint32_t rank = 0; rank < state->ranks && !sim->error; rank++) {
        state->missing[rank] = state->experts;
        dispatch(sim, rank);
    }
}

/* ---- a run ---- */

static int make_state(const struct work *work, struct state *state)
{
    size_t ranks = work->sim.ranks, all;

    state->model = moe_models[work->options->model];
    state->ranks = work->sim.ranks;
    state->experts = work->options->experts ? work->options->experts : state->model.experts;
    state->experts_per_rank = (uint32_t)((state->experts + ranks - 1) / ranks);
    state->experts = state->experts_per_rank * state->ranks;
    if (state->experts < state->model.chosen) {
        fprintf(stderr, "perseus-sim: %u experts, and each token goes to %u\n", state->experts, state->model.chosen);
        return -EINVAL;
    }
    all = ranks * state->experts;
    state->local = (uint32_t)work->sim.cluster->gpus_per_node;
    state->peers = work->options->relay ? state->ranks / state->local : state->ranks;
    state->total = state->experts_per_rank * (work->options->relay ? state->local : 1);
    state->size = work->group == GROUP_COUPLED ? 1 : work->group == GROUP_PEER ? state->total : (uint32_t)work->group;
    if (state->size > state->total)
        state->size = state->total;
    state->groups = (state->total + state->size - 1) / state->size;
    state->rows = calloc(all, sizeof(*state->rows));
    for (int i = 0; i < DIRECTIONS; i++) {
        state->signal[i] = calloc(all, sizeof(*state->signal[i]));
        state->sent[i] = calloc(ranks * state->peers * state->groups, sizeof(*state->sent[i]));
    }
    state->missing = calloc(ranks, sizeof(*state->missing));
    state->finished_us = calloc(ranks, sizeof(*state->finished_us));
    state->finished = calloc(ranks, sizeof(*state->finished));
    return state->rows && state->signal[0] && state->signal[1] && state->sent[0] && state->sent[1] && state->missing &&
                   state->finished_us && state->finished
               ? 0
               : -ENOMEM;
}

static void summarise(struct sim *sim, const struct state *state, struct work_result *result)
{
    uint32_t local = (uint32_t)sim->cluster.gpus_per_node;

    for (uint32_t rank = 0; rank < state->ranks; rank++)
        if (state->finished_us[rank] > result->us) {
            result->us = state->finished_us[rank];
            result->slowest = rank;
        }
    result->explain = state->finished[result->slowest];
    result->counts = sim_rank_counts(sim, 0);
    result->all = sim_all_counts(sim);
    result->transfers = (state->ranks - local) * state->experts_per_rank;
    result->bytes = result->counts.bytes;
    result->stall_us = (double)sim->rank[0].dispatch.stats.stall_ns / 1e3;
}

int moe_play(const struct work *work, struct work_result *result)
{
    static const struct sim_workload workload = {.start = start, .raised = raised, .call = combine};
    struct state state = {.work = work, .result = result};
    struct sim sim;
    int r = make_state(work, &state);

    if (!r) {
        r = sim_open(&sim, &work->sim);
        if (!r)
            r = sim_run(&sim, &workload, &state);
        if (!r) {
            summarise(&sim, &state, result);
            r = work_finish(&sim, result);
        }
        sim_close(&sim);
    }
    free(state.rows);
    for (int i = 0; i < DIRECTIONS; i++) {
        free(state.signal[i]);
        free(state.sent[i]);
    }
    free(state.missing);
    free(state.finished_us);
    free(state.finished);
    return r;
}

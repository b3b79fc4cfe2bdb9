/* SPDX-License-Identifier: Apache-2.0 */
/* MoE's dispatch and product as the fused kernel does them, by its own routing (fused/moe/route.h): a message to each
 * owner of experts and forwarding tables for counterparts; then each token once to each other node, by puts of several
 * rows and signals of several puts, and from the counterpart over NVLink to the owners there. A cluster of CTAs
 * multiplies one unit after another, each when all rows of its block are here. Copies within a GPU take no time, except
 * those to the memory that puts read. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fused/moe/route.h"
#include "tools/sim/fused.h"
#include "tools/sim/ledger.h"
#include "tools/sim/moe.h"

enum {
    CLUSTERS = 66,       /* clusters of two CTAs, on the 132 SMs of an H100 or H200 */
    ROUTING_NS = 25000,  /* counts, offsets, maps: ROUTING_US in fused/moe/plan.c */
    ROUTED = CLUSTERS,   /* a token of sim_call_at(); those below are clusters */
    PUTS = CLUSTERS + 1, /* from here on: a put of rows, as node << 20 | number */
};

/* What a signal stands for: kind, the rank whose rows or message it is, a number. */
enum kind { MESSAGE, GROUP, FORWARDED, PUSHED };

/* Tokens in the order in which a rank sends them to one destination. */
struct list {
    uint32_t *token;
    uint32_t count;
};

struct rank_state {
    struct prs_route r;
    uint16_t *chosen;     /* [token][choice] */
    uint32_t *index;      /* [token][choice]: among the choices of its expert here */
    uint32_t *rows;       /* [expert]: choices of this rank */
    struct list *to;      /* [owner's rank]: one entry a token */
    struct list *relayed; /* [node] */
    uint32_t *signal;     /* [node][group]: in the ledger */
    /* as an owner of experts */
    struct prs_moe_expert_rows *experts;
    uint32_t *base;    /* [sender's rank][own expert]: where its rows begin among the expert's */
    uint32_t *near;    /* [own expert] prs_route_near_blocks() */
    uint32_t *missing; /* [block]: rows that have not arrived */
    uint32_t messages_left, units, units_left;
    struct {
        struct prs_route_cursor cursor;
        uint32_t at, block;
        bool waiting;
    } cluster[CLUSTERS];
};

struct state {
    const struct work *work;
    struct moe_model model;
    struct rank_state *rank;
    double unit_ns;
    struct fused_end end;
};

static struct state *state_of(struct sim *sim)
{
    return sim->workload_state;
}

static struct rank_state *rank_of(struct sim *sim, uint32_t rank)
{
    return &state_of(sim)->rank[rank];
}

static uint64_t token_of(enum kind kind, uint32_t owner, uint32_t number)
{
    return (uint64_t)kind << 56 | (uint64_t)owner << 32 | number;
}

static uint32_t least(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* ---- routing ---- */

static void draw_choices(struct sim *sim, struct rank_state *s, const double *share)
{
    const struct prs_route *r = &s->r;

    for (uint32_t token = 0; token < r->tokens; token++) {
        uint16_t *chosen = &s->chosen[token * r->choices];

        for (uint32_t k = 0; k < r->choices;) {
            bool again = false;

            chosen[k] = (uint16_t)moe_draw_expert(sim, share, r->experts);
            for (uint32_t j = 0; j < k; j++)
                again |= chosen[j] == chosen[k];
            k += !again;
        }
    }
}

/* A rank's choices with this flag (PRS_ROUTE_LEAD or PRS_ROUTE_RELAY), sorted by the order of their experts, then by
 * token. Return how many. */
static uint32_t sort_choices(const struct rank_state *s, uint32_t flag, uint32_t *first, uint32_t *sorted)
{
    const struct prs_route *r = &s->r;
    uint32_t choices = r->tokens * r->choices, sum = 0;

    memset(first, 0, r->experts * sizeof(*first));
    for (int round = 0; round < 2; round++) {
        for (uint32_t i = 0; i < choices; i++) {
            uint32_t code = prs_route_code(r, &s->chosen[i / r->choices * r->choices], i % r->choices);
            uint32_t expert = code & PRS_ROUTE_NONE;
            uint32_t order = flag == PRS_ROUTE_LEAD ? expert : prs_route_relay_order(r, expert);

            if (code & flag && round == 0)
                first[order]++;
            else if (code & flag)
                sorted[first[order]++] = i;
        }
        for (uint32_t e = 0; e < r->experts && round == 0; e++) {
            uint32_t count = first[e];

            first[e] = sum;
            sum += count;
        }
    }
    return sum;
}

/* Lists the tokens for each owner, and those for each other node. */
static int make_lists(struct rank_state *s)
{
    const struct prs_route *r = &s->r;
    uint32_t choices = r->tokens * r->choices;
    uint32_t *first = calloc(r->experts, sizeof(*first)), *sorted = calloc(choices, sizeof(*sorted));
    int error = first && sorted ? 0 : -ENOMEM;

    for (int relay = 0; relay < 2 && !error; relay++) {
        uint32_t count = sort_choices(s, relay ? PRS_ROUTE_RELAY : PRS_ROUTE_LEAD, first, sorted);

        for (uint32_t i = 0; i < count; i++) {
            uint32_t owner = s->chosen[sorted[i]] / r->experts_per_rank;
            struct list *list = relay ? &s->relayed[owner / r->place.local_ranks] : &s->to[owner];

            list->token[list->count++] = sorted[i] / r->choices;
        }
    }
    for (uint32_t i = 0; i < choices && !error; i++)
        s->index[i] = s->rows[s->chosen[i]]++;
    free(first);
    free(sorted);
    return error;
}

/* An owner computes the places of its rows from the counts of all ranks. */
static int place_rows(struct state *state, uint32_t rank)
{
    struct rank_state *s = &state->rank[rank];
    const struct prs_route *r = &s->r;
    uint32_t blocks = 0;

    for (uint32_t e = 0; e < r->experts_per_rank; e++) {
        uint32_t rows = 0, near = 0;

        for (uint32_t i = 0; i < r->place.world; i++) {
            uint32_t from = prs_place_after(&r->place, prs_route_sender(r, i));

            near = i == r->place.local_ranks ? rows : near;
            s->base[from * r->experts_per_rank + e] = rows;
            rows += state->rank[from].rows[rank * r->experts_per_rank + e];
        }
        s->experts[e] = (struct prs_moe_expert_rows){blocks * PRS_TILE_M, rows};
        s->near[e] = prs_route_near_blocks(r, e, &s->experts[e], near);
        blocks += prs_route_expert_blocks(&s->experts[e]);
    }
    s->missing = calloc(blocks + 1, sizeof(*s->missing));
    if (!s->missing)
        return -ENOMEM;
    for (uint32_t e = 0; e < r->experts_per_rank; e++)
        for (uint32_t row = 0; row < s->experts[e].rows; row++)
            s->missing[(s->experts[e].first_row + row) / PRS_TILE_M]++;
    s->units = s->units_left = blocks * r->columns;
    return 0;
}

/* ---- the product ---- */

static void compute(struct sim *sim, uint32_t rank, uint32_t cluster)
{
    uint64_t until = sim->events.now_ps + sim_ps(state_of(sim)->unit_ns);

    if (sim->options.explain)
        sim_explain_note(&sim->rank[rank].explain, SIM_COMPUTE, sim->events.now_ps, until);
    sim_call_at(sim, until, rank, cluster);
}

static void begin_unit(struct sim *sim, uint32_t rank, uint32_t cluster)
{
    struct rank_state *s = rank_of(sim, rank);
    struct prs_route_unit unit;

    if (s->cluster[cluster].at >= s->units)
        return;
    prs_route_unit(&s->r, s->experts, s->r.place.nodes > 1 ? s->near : NULL, &s->cluster[cluster].cursor,
                   s->cluster[cluster].at, &unit);
    s->cluster[cluster].block = unit.block;
    s->cluster[cluster].waiting = s->missing[unit.block];
    if (!s->missing[unit.block])
        compute(sim, rank, cluster);
}

static void finish_unit(struct sim *sim, uint32_t rank, uint32_t cluster)
{
    struct rank_state *s = rank_of(sim, rank);

    s->cluster[cluster].at += CLUSTERS;
    begin_unit(sim, rank, cluster);
    if (--s->units_left == 0)
        fused_rank_ends(sim, &state_of(sim)->end, rank);
}

static void block_is_here(struct sim *sim, uint32_t rank, uint32_t block)
{
    struct rank_state *s = rank_of(sim, rank);

    for (uint32_t c = 0; c < CLUSTERS; c++)
        if (s->cluster[c].waiting && s->cluster[c].block == block) {
            s->cluster[c].waiting = false;
            compute(sim, rank, c);
        }
}

/* A sender's token has arrived: it makes a row for each of its choices here. */
static void take_token(struct sim *sim, uint32_t rank, uint32_t from, uint32_t token)
{
    struct rank_state *s = rank_of(sim, rank);
    const struct rank_state *sender = rank_of(sim, from);
    uint32_t each = s->r.experts_per_rank;

    for (uint32_t i = token * s->r.choices; i < (token + 1) * s->r.choices; i++) {
        uint32_t expert = sender->chosen[i], own = expert % each, block;

        if (expert / each != rank)
            continue;
        block = (s->experts[own].first_row + s->base[from * each + own] + sender->index[i]) / PRS_TILE_M;
        if (--s->missing[block] == 0)
            block_is_here(sim, rank, block);
    }
}

/* ---- sending ---- */

static void put_signal(struct sim *sim, uint32_t from, uint32_t to, uint64_t bytes, uint64_t token)
{
    uint32_t signal = sim_ledger_signal(sim->ledger, from, to, token);

    sim_put(sim, sim_ledger_put(sim->ledger, from, to, bytes, signal), 1);
    sim_signal(sim, signal, 1);
}

/* Like put_messages() of fused/moe/route.cuh for other nodes; stores do the same for the ranks of this node. */
static void send_messages(struct sim *sim, uint32_t rank)
{
    const struct rank_state *s = rank_of(sim, rank);
    const struct prs_route *r = &s->r;

    for (uint32_t p = 1; p < r->place.world; p++) {
        uint32_t to = prs_place_after(&r->place, p), node = prs_route_node_of(r, p), signal;
        uint64_t bytes = prs_route_entry_at(r, 0, 0, s->to[to].count);

        if (!node) {
            put_signal(sim, rank, to, bytes, token_of(MESSAGE, rank, 0));
            continue;
        }
        signal = sim_ledger_signal(sim->ledger, rank, to, token_of(MESSAGE, rank, 0));
        sim_put(sim, sim_ledger_put(sim->ledger, rank, to, bytes, signal), p);
        if (to == prs_place_counterpart(&r->place, node)) {
            uint32_t rows = s->relayed[to / r->place.local_ranks].count;

            bytes = 16 + ((uint64_t)rows * r->place.local_ranks * 4 + 15) / 16 * 16;
            sim_put(sim, sim_ledger_put(sim->ledger, rank, to, bytes, signal), p);
        }
        sim_signal(sim, signal, p);
    }
}

/* The rows of a put lie where it reads them; the last put of a group has its signal with it. */
static void put_rows(struct sim *sim, uint32_t rank, uint32_t node, uint32_t first)
{
    struct rank_state *s = rank_of(sim, rank);
    const struct prs_route *r = &s->r;
    uint32_t all = s->relayed[node].count, group = first / r->group, rows = prs_route_piece_rows(first, r->put, all);
    uint32_t to = prs_place_rank(&r->place, node, r->place.local_rank);
    uint32_t *signal = &s->signal[node * prs_route_groups(r) + group];

    if (first % r->group == 0)
        *signal = sim_ledger_signal(sim->ledger, rank, to, token_of(GROUP, rank, group));
    sim_put(sim, sim_ledger_put(sim->ledger, rank, to, (uint64_t)rows * r->row_bytes, *signal), group);
    if (first + rows == all || (first + rows) % r->group == 0)
        sim_signal(sim, *signal, group);
}

static uint32_t most_rows(const struct list *list, uint32_t first, uint32_t count, uint32_t own)
{
    uint32_t most = 0;

    for (uint32_t i = first; i < first + count; i++)
        most = i != own && list[i].count > most ? list[i].count : most;
    return most;
}

/* The routing messages of all ranks have arrived. The rows for other nodes go first, to all nodes in turn: a put begins
 * when the GPU has stored its rows in relay memory. Then the rows for this node go, by stores over NVLink. */
static void send_rows(struct sim *sim, uint32_t rank)
{
    struct rank_state *s = rank_of(sim, rank);
    const struct prs_route *r = &s->r;
    uint32_t first_local = r->place.node * r->place.local_ranks;
    uint64_t at_ps = sim->events.now_ps;

    for (uint32_t row = 0; row < most_rows(s->relayed, 0, r->place.nodes, r->place.node); row += r->put)
        for (uint32_t b = 1; b < r->place.nodes; b++) {
            uint32_t node = (r->place.node + b) % r->place.nodes;

            if (row >= s->relayed[node].count)
                continue;
            at_ps += sim_transfer_ps((uint64_t)prs_route_piece_rows(row, r->put, s->relayed[node].count) * r->row_bytes,
                                     sim->cluster.nvlink_gbps);
            sim_call_at(sim, at_ps, rank, PUTS + ((uint64_t)node << 20 | row));
        }
    for (uint32_t row = 0; row < most_rows(s->to, first_local, r->place.local_ranks, rank); row += r->put)
        for (uint32_t i = 1; i < r->place.local_ranks; i++) {
            uint32_t to = prs_place_neighbour(&r->place, i);

            if (row < s->to[to].count)
                put_signal(sim, rank, to, (uint64_t)prs_route_piece_rows(row, r->put, s->to[to].count) * r->row_bytes,
                           token_of(PUSHED, rank, row));
        }
}

/* ---- arrivals ---- */

static bool goes_to(const struct rank_state *sender, uint32_t token, uint32_t owner)
{
    for (uint32_t k = 0; k < sender->r.choices; k++)
        if (sender->chosen[token * sender->r.choices + k] / sender->r.experts_per_rank == owner)
            return true;
    return false;
}

/* A group of rows of another node: calls act() for those of an owner here. */
static uint32_t take_group(struct sim *sim, uint32_t owner, uint32_t from, uint32_t group, bool only_count)
{
    const struct rank_state *sender = rank_of(sim, from);
    const struct prs_route *r = &rank_of(sim, owner)->r;
    const struct list *list = &sender->relayed[r->place.node];
    uint32_t rows = 0;

    for (uint32_t i = group * r->group; i < least((group + 1) * r->group, list->count); i++)
        if (goes_to(sender, list->token[i], owner)) {
            rows++;
            if (!only_count)
                take_token(sim, owner, from, list->token[i]);
        }
    return rows;
}

static void forward_group(struct sim *sim, uint32_t rank, uint32_t from, uint32_t group)
{
    const struct prs_route *r = &rank_of(sim, rank)->r;

    for (uint32_t i = 1; i < r->place.local_ranks; i++) {
        uint32_t to = prs_place_neighbour(&r->place, i), rows = take_group(sim, to, from, group, true);

        if (rows)
            put_signal(sim, rank, to, (uint64_t)rows * r->row_bytes, token_of(FORWARDED, from, group));
    }
    take_group(sim, rank, from, group, false);
}

static void begin_product(struct sim *sim, uint32_t rank)
{
    struct rank_state *s = rank_of(sim, rank);

    send_rows(sim, rank);
    for (uint32_t i = 0; i < s->to[rank].count; i++)
        take_token(sim, rank, rank, s->to[rank].token[i]);
    for (uint32_t c = 0; c < CLUSTERS; c++) {
        s->cluster[c].at = c;
        begin_unit(sim, rank, c);
    }
    if (!s->units)
        fused_rank_ends(sim, &state_of(sim)->end, rank);
}

static void raised(struct sim *sim, uint32_t rank, uint32_t signal)
{
    uint64_t token = sim->ledger->signal[signal].token;
    uint32_t from = (uint32_t)(token >> 32) & 0xffff, number = (uint32_t)token;
    struct rank_state *s = rank_of(sim, rank);

    switch (token >> 56) {
    case MESSAGE:
        if (--s->messages_left == 0)
            begin_product(sim, rank);
        break;
    case GROUP:
        forward_group(sim, rank, from, number);
        break;
    case FORWARDED:
        take_group(sim, rank, from, number, false);
        break;
    default:
        for (uint32_t i = number; i < least(number + s->r.put, rank_of(sim, from)->to[rank].count); i++)
            take_token(sim, rank, from, rank_of(sim, from)->to[rank].token[i]);
    }
}

static void called(struct sim *sim, uint32_t rank, uint64_t token)
{
    if (token < CLUSTERS)
        finish_unit(sim, rank, (uint32_t)token);
    else if (token == ROUTED)
        send_messages(sim, rank);
    else
        put_rows(sim, rank, (uint32_t)((token - PUTS) >> 20), (uint32_t)(token - PUTS) & 0xfffff);
}

/* ---- a run ---- */

static int make_rank(struct state *state, uint32_t rank)
{
    const struct options *o = state->work->options;
    struct rank_state *s = &state->rank[rank];
    struct prs_route *r = &s->r;
    uint32_t world = state->work->sim.ranks;

    prs_place_init(&r->place, rank, world, state->work->nodes);
    r->experts = state->model.experts;
    r->experts_per_rank = r->experts / world;
    r->choices = state->model.chosen;
    r->tokens = o->tokens;
    r->blocks = UINT32_MAX / PRS_TILE_M;
    r->columns = prs_ceil_div(state->model.inner, 2 * PRS_TILE_N);
    r->row_bytes = state->model.hidden * 2;
    r->passes = o->passes;
    r->put = o->rows_per_put;
    r->group = o->rows_per_signal;
    prs_route_put_sizes(r->tokens, r->row_bytes, &r->put, &r->group);
    s->messages_left = world - 1;
    s->chosen = calloc((size_t)r->tokens * r->choices, sizeof(*s->chosen));
    s->index = calloc((size_t)r->tokens * r->choices, sizeof(*s->index));
    s->rows = calloc(r->experts, sizeof(*s->rows));
    s->to = calloc(world, sizeof(*s->to));
    s->relayed = calloc(r->place.nodes, sizeof(*s->relayed));
    s->signal = calloc((size_t)r->place.nodes * prs_route_groups(r), sizeof(*s->signal));
    s->experts = calloc(r->experts_per_rank, sizeof(*s->experts));
    s->base = calloc((size_t)world * r->experts_per_rank, sizeof(*s->base));
    s->near = calloc(r->experts_per_rank, sizeof(*s->near));
    if (!s->chosen || !s->index || !s->rows || !s->to || !s->relayed || !s->signal || !s->experts || !s->base ||
        !s->near)
        return -ENOMEM;
    for (uint32_t i = 0; i < world + r->place.nodes; i++) {
        struct list *list = i < world ? &s->to[i] : &s->relayed[i - world];

        list->token = calloc(r->tokens, sizeof(*list->token));
        if (!list->token)
            return -ENOMEM;
    }
    return 0;
}

static void drop_rank(struct rank_state *s)
{
    for (uint32_t i = 0; s->to && i < s->r.place.world; i++)
        free(s->to[i].token);
    for (uint32_t i = 0; s->relayed && i < s->r.place.nodes; i++)
        free(s->relayed[i].token);
    free(s->chosen);
    free(s->index);
    free(s->rows);
    free(s->to);
    free(s->relayed);
    free(s->signal);
    free(s->experts);
    free(s->base);
    free(s->near);
    free(s->missing);
}

static void start(struct sim *sim)
{
    struct state *state = state_of(sim);
    double *share = moe_draw_shares(sim, state->model.experts, state->work->options->zipf);
    int r = share ? 0 : -ENOMEM;

    for (uint32_t rank = 0; rank < sim->options.ranks && !r; rank++) {
        draw_choices(sim, &state->rank[rank], share);
        r = make_lists(&state->rank[rank]);
    }
    for (uint32_t rank = 0; rank < sim->options.ranks && !r; rank++) {
        r = place_rows(state, rank);
        sim_call_at(sim, sim_ps(ROUTING_NS), rank, ROUTED);
    }
    free(share);
    sim_fail(sim, r);
}

static int check(const struct work *work, const struct moe_model *model)
{
    if (work->sim.ranks <= PRS_ROUTE_MAX_WORLD && work->sim.ranks > 1 && model->experts % work->sim.ranks == 0)
        return 0;
    fprintf(stderr,
            "perseus-sim: the MoE kernel with %u experts over %u ranks: want as many for each, and 2 to %d ranks\n",
            model->experts, work->sim.ranks, PRS_ROUTE_MAX_WORLD);
    return -EINVAL;
}

int fused_moe_play(const struct work *work, struct work_result *result)
{
    static const struct sim_workload workload = {.start = start, .raised = raised, .call = called};
    struct state state = {.work = work, .model = moe_models[work->options->model]};
    int r = check(work, &state.model);

    if (r)
        return r;
    state.rank = calloc(work->sim.ranks, sizeof(*state.rank));
    state.unit_ns =
        2.0 * PRS_TILE_M * 2 * PRS_TILE_N * state.model.hidden * CLUSTERS / (work->sim.cluster->tflops * 1e3);
    r = state.rank ? 0 : -ENOMEM;
    for (uint32_t rank = 0; rank < work->sim.ranks && !r; rank++)
        r = make_rank(&state, rank);
    if (!r)
        r = fused_run(work, &workload, &state, &state.end, result);
    for (uint32_t rank = 0; state.rank && rank < work->sim.ranks; rank++)
        drop_rank(&state.rank[rank]);
    free(state.rank);
    return r;
}

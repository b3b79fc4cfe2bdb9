/* SPDX-License-Identifier: Apache-2.0 */
/* The fused matrix products between nodes, by their own schedule (fused/gemm/schedule.h): the order of units on each
 * rank, which tiles share a put and a signal, and what waits for what. A cluster of CTAs computes one unit after
 * another. Times of units are the tensor cores' rate alone. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "fused/gemm/schedule.h"
#include "tools/sim/fused.h"
#include "tools/sim/ledger.h"

enum {
    CLUSTERS = 66,      /* clusters of two CTAs, on the 132 SMs of an H100 or H200 */
    TILE_BYTES = 65536, /* PRS_PARTIAL_TILE in fused/core/partial_sums.h */
    STRIP_BYTES = PRS_STAGE_A * PRS_STRIP_STEPS,
    VALUE_BYTES = 2,
};

/* What a signal stands for: kind, then the rank whose data it is, then a number. */
enum kind { TILES, GROUP, STRIPS, STRIPS_FORWARDED, ROWS, ROWS_FORWARDED };

struct rank_state {
    struct prs_schedule s;
    uint32_t *unit_at;  /* [block][pair][column]: position */
    uint16_t *need;     /* [position]: what the unit still waits for */
    uint32_t *position; /* [cluster]: of its unit */
    bool *waiting;      /* [cluster] */
    uint16_t *counter;  /* [destination node][group]: tiles so far */
    uint16_t *row;      /* [row tile of this rank's block]: finished tiles */
    uint32_t units_left, rows_left;
};

struct state {
    const struct work *work;
    uint32_t op;
    uint32_t columns, inner; /* of this rank's product */
    struct rank_state *rank;
    double unit_ns;
    struct fused_end end;
};

static struct state *state_of(struct sim *sim)
{
    return sim->workload_state;
}

static uint64_t token_of(enum kind kind, uint32_t owner, uint32_t number)
{
    return (uint64_t)kind << 56 | (uint64_t)owner << 32 | number;
}

static void put_signal(struct sim *sim, uint32_t from, uint32_t to, uint64_t bytes, uint64_t token, uint32_t group)
{
    uint32_t signal = sim_ledger_signal(sim->ledger, from, to, token);

    sim_put(sim, sim_ledger_put(sim->ledger, from, to, bytes, signal), group);
    sim_signal(sim, signal, group);
}

static uint32_t *unit_at(struct rank_state *r, uint32_t block, uint32_t pair, uint32_t column)
{
    return &r->unit_at[(block * r->s.pairs + pair) * r->s.columns + column];
}

/* ---- clusters ---- */

static bool waits_first(const struct state *state)
{
    /* an all-gather waits for rows of A; the others wait for partial sums, after the product */
    return state->op == PRS_GEMM_ALLGATHER;
}

static void compute(struct sim *sim, uint32_t rank, uint32_t cluster)
{
    uint64_t until = sim->events.now_ps + sim_ps(state_of(sim)->unit_ns);

    if (sim->options.explain)
        sim_explain_note(&sim->rank[rank].explain, SIM_COMPUTE, sim->events.now_ps, until);
    sim_call_at(sim, until, rank, cluster);
}

static void maybe_end(struct sim *sim, uint32_t rank)
{
    struct rank_state *r = &state_of(sim)->rank[rank];

    if (!r->units_left && !r->rows_left)
        fused_rank_ends(sim, &state_of(sim)->end, rank);
}

static void begin_unit(struct sim *sim, uint32_t rank, uint32_t cluster)
{
    struct rank_state *r = &state_of(sim)->rank[rank];
    uint32_t at = r->position[cluster];

    if (at >= r->s.units)
        return;
    if (waits_first(state_of(sim)) && r->need[at])
        r->waiting[cluster] = true;
    else
        compute(sim, rank, cluster);
}

/* ---- reduce-scatter and all-reduce ---- */

/* A row tile of this rank's block is finished: all ranks get it. */
static void broadcast(struct sim *sim, uint32_t rank, uint32_t row_tile)
{
    const struct prs_schedule *s = &state_of(sim)->rank[rank].s;
    uint64_t bytes = (uint64_t)prs_schedule_tile_rows(s, row_tile) * state_of(sim)->columns * VALUE_BYTES;

    if (!bytes)
        return;
    for (uint32_t p = 1; p < s->place.local_ranks; p++)
        put_signal(sim, rank, prs_place_neighbour(&s->place, p), bytes, token_of(ROWS_FORWARDED, rank, row_tile), 1);
    for (uint32_t d = 1; d < s->place.nodes; d++)
        put_signal(sim, rank, prs_place_counterpart(&s->place, d), bytes, token_of(ROWS, rank, row_tile),
                   1 + prs_schedule_groups(s) + row_tile);
}

static void finish_own(struct sim *sim, uint32_t rank, const struct prs_unit *u)
{
    struct rank_state *r = &state_of(sim)->rank[rank];

    for (uint32_t cta = 0; cta < 2 && state_of(sim)->op == PRS_GEMM_ALLREDUCE; cta++)
        if (++r->row[u->pair * 2 + cta] == r->s.columns)
            broadcast(sim, rank, u->pair * 2 + cta);
}

/* This node's sums of a unit are complete: count its tiles, and put each group that is complete to its owner. */
static void relay(struct sim *sim, uint32_t rank, const struct prs_unit *u)
{
    struct rank_state *r = &state_of(sim)->rank[rank];
    const struct prs_schedule *s = &r->s;
    uint32_t node = u->block / s->place.local_ranks;

    for (uint32_t cta = 0; cta < 2; cta++) {
        struct prs_piece_group g = prs_schedule_group(s, u->pair * 2 + cta, u->column);
        uint32_t to = prs_index_after(node, s->place.node, s->place.nodes);

        if (++r->counter[to * prs_schedule_groups(s) + g.index] == g.pieces)
            put_signal(sim, rank, u->block, (uint64_t)g.pieces * TILE_BYTES, token_of(GROUP, rank, g.index),
                       1 + g.index);
    }
}

static void finish_sums(struct sim *sim, uint32_t rank, uint32_t at)
{
    struct rank_state *r = &state_of(sim)->rank[rank];
    struct prs_cursor cursor = {0};
    struct prs_unit u;

    prs_schedule_unit(&r->s, &cursor, at, &u);
    switch (prs_schedule_part(&r->s, u.block)) {
    case PRS_PART_OWN:
        finish_own(sim, rank, &u);
        break;
    case PRS_PART_RELAY:
        relay(sim, rank, &u);
        break;
    default:
        put_signal(sim, rank, prs_place_rank(&r->s.place, r->s.place.node, u.block % r->s.place.local_ranks),
                   2 * TILE_BYTES, token_of(TILES, rank, (u.block * r->s.pairs + u.pair) * r->s.columns + u.column), 1);
    }
}

static void finish_unit(struct sim *sim, uint32_t rank, uint32_t cluster)
{
    struct rank_state *r = &state_of(sim)->rank[rank];

    if (!waits_first(state_of(sim)))
        finish_sums(sim, rank, r->position[cluster]);
    r->units_left--;
    r->position[cluster] += CLUSTERS;
    begin_unit(sim, rank, cluster);
    maybe_end(sim, rank);
}

/* One of the things that a unit waits for is here. */
static void satisfy(struct sim *sim, uint32_t rank, uint32_t at)
{
    struct rank_state *r = &state_of(sim)->rank[rank];
    uint32_t cluster = at % CLUSTERS;

    if (--r->need[at] || !r->waiting[cluster] || r->position[cluster] != at)
        return;
    r->waiting[cluster] = false;
    if (waits_first(state_of(sim)))
        compute(sim, rank, cluster);
    else
        finish_unit(sim, rank, cluster);
}

static void computed(struct sim *sim, uint32_t rank, uint64_t cluster)
{
    struct rank_state *r = &state_of(sim)->rank[rank];

    if (cluster >= CLUSTERS) {
        fused_gather_send(sim, rank, (uint32_t)cluster - CLUSTERS);
        return;
    }
    if (!waits_first(state_of(sim)) && r->need[r->position[cluster]])
        r->waiting[cluster] = true;
    else
        finish_unit(sim, rank, (uint32_t)cluster);
}

/* ---- arrivals ---- */

/* The first piece of a group by its number. */
static struct prs_piece_group group_at(const struct prs_schedule *s, uint32_t index)
{
    uint32_t each = prs_schedule_band_groups(s), band = index / each, at = index % each * s->group;
    uint32_t rows = prs_schedule_band_rows(s, band), lanes = prs_schedule_lanes(s), tall = s->band * 2;

    return s->op == PRS_GEMM_ALLGATHER ? prs_schedule_group(s, band * tall + at / lanes, at % lanes)
                                       : prs_schedule_group(s, band * tall + at % rows, at / rows);
}

static void take_group(struct sim *sim, uint32_t rank, uint32_t index)
{
    struct rank_state *r = &state_of(sim)->rank[rank];
    struct prs_piece_group g = group_at(&r->s, index);
    uint32_t rows = prs_schedule_band_rows(&r->s, g.band), tall = r->s.band * 2;

    for (uint32_t i = g.first; i < g.first + g.pieces; i++)
        satisfy(sim, rank, *unit_at(r, rank, (g.band * tall + i % rows) / 2, i / rows));
}

static void take_strips(struct sim *sim, uint32_t rank, uint32_t owner, uint32_t index)
{
    struct rank_state *r = &state_of(sim)->rank[rank];
    struct prs_piece_group g = group_at(&r->s, index);
    uint32_t lanes = prs_schedule_lanes(&r->s), tall = r->s.band * 2;

    for (uint32_t i = g.first; i < g.first + g.pieces; i++)
        for (uint32_t column = 0; column < r->s.columns; column++)
            satisfy(sim, rank, *unit_at(r, owner, (g.band * tall + i / lanes) / 2, column));
}

/* Data that arrived at a counterpart goes from there to the other ranks of its node. */
static void forward(struct sim *sim, uint32_t rank, enum kind kind, uint32_t owner, uint32_t number)
{
    const struct prs_schedule *s = &state_of(sim)->rank[rank].s;
    struct prs_piece_group g = kind == STRIPS_FORWARDED ? group_at(s, number) : (struct prs_piece_group){0};
    uint64_t bytes = kind == STRIPS_FORWARDED
                         ? (uint64_t)g.pieces * STRIP_BYTES
                         : (uint64_t)prs_schedule_tile_rows(s, number) * state_of(sim)->columns * VALUE_BYTES;

    for (uint32_t p = 1; p < s->place.local_ranks; p++)
        put_signal(sim, rank, prs_place_neighbour(&s->place, p), bytes, token_of(kind, owner, number), 1);
}

static void raised(struct sim *sim, uint32_t rank, uint32_t signal)
{
    uint64_t token = sim->ledger->signal[signal].token;
    struct rank_state *r = &state_of(sim)->rank[rank];
    uint32_t owner = (uint32_t)(token >> 32) & 0xffff, number = (uint32_t)token;

    switch (token >> 56) {
    case TILES:
        satisfy(sim, rank, r->unit_at[number]);
        break;
    case GROUP:
        take_group(sim, rank, number);
        break;
    case STRIPS:
        forward(sim, rank, STRIPS_FORWARDED, owner, number);
        take_strips(sim, rank, owner, number);
        break;
    case STRIPS_FORWARDED:
        take_strips(sim, rank, owner, number);
        break;
    case ROWS:
        forward(sim, rank, ROWS_FORWARDED, owner, number);
        /* fall through */
    default:
        r->rows_left--;
        maybe_end(sim, rank);
    }
}

/* ---- all-gather: sending ---- */

/* A group of strips has been copied to where puts read it: stores send it to the neighbours, and a put and a signal to
 * each counterpart. */
void fused_gather_send(struct sim *sim, uint32_t rank, uint32_t index)
{
    const struct prs_schedule *s = &state_of(sim)->rank[rank].s;
    uint64_t bytes = (uint64_t)group_at(s, index).pieces * STRIP_BYTES;

    for (uint32_t d = 1; d < s->place.nodes; d++)
        put_signal(sim, rank, prs_place_counterpart(&s->place, d), bytes, token_of(STRIPS, rank, index), 1 + index);
    forward(sim, rank, STRIPS_FORWARDED, rank, index);
}

/* Groups are ready as fast as the GPU stores to its neighbours. */
static void start_gather(struct sim *sim, uint32_t rank)
{
    const struct prs_schedule *s = &state_of(sim)->rank[rank].s;
    uint64_t at_ps = 0;

    for (uint32_t band = 0; band < s->bands; band++) {
        uint32_t pieces = prs_schedule_band_rows(s, band) * prs_schedule_lanes(s);

        for (uint32_t i = 0; i < prs_ceil_div(pieces, s->group); i++) {
            uint32_t index = band * prs_schedule_band_groups(s) + i;

            at_ps += sim_transfer_ps((uint64_t)group_at(s, index).pieces * STRIP_BYTES * s->place.local_ranks,
                                     sim->cluster.nvlink_gbps);
            sim_call_at(sim, at_ps, rank, CLUSTERS + index);
        }
    }
}

static void start(struct sim *sim)
{
    for (uint32_t rank = 0; rank < sim->options.ranks; rank++) {
        if (waits_first(state_of(sim)))
            start_gather(sim, rank);
        for (uint32_t cluster = 0; cluster < CLUSTERS; cluster++)
            begin_unit(sim, rank, cluster);
    }
}

/* ---- a run ---- */

static uint16_t count_needs(const struct prs_schedule *s, const struct prs_unit *u)
{
    uint32_t need = 0;

    if (s->op != PRS_GEMM_ALLGATHER)
        return (uint16_t)(prs_schedule_part(s, u->block) == PRS_PART_SEND
                              ? 0
                              : s->place.local_ranks - 1 + (u->block == s->place.rank ? 2 * (s->place.nodes - 1) : 0));
    for (uint32_t cta = 0; cta < 2 && u->block != s->place.rank; cta++)
        need += prs_schedule_tile_rows(s, u->pair * 2 + cta) ? prs_schedule_strips(s) : 0;
    return (uint16_t)need;
}

static int make_rank(struct state *state, uint32_t rank)
{
    const struct options *o = state->work->options;
    struct rank_state *r = &state->rank[rank];
    struct prs_schedule *s = &r->s;
    struct prs_cursor cursor = {0};

    prs_schedule_init(s, state->op, rank, state->work->sim.ranks, state->work->nodes, o->size,
                      prs_ceil_div(state->columns, PRS_TILE_N), prs_ceil_div(state->inner * VALUE_BYTES, PRS_STAGE_ROW),
                      o->band_pairs);
    s->group = o->tiles_per_signal;
    r->unit_at = calloc(s->units, sizeof(*r->unit_at));
    r->need = calloc(s->units, sizeof(*r->need));
    r->position = calloc(CLUSTERS, sizeof(*r->position));
    r->waiting = calloc(CLUSTERS, sizeof(*r->waiting));
    r->counter = calloc((size_t)s->place.nodes * prs_schedule_groups(s), sizeof(*r->counter));
    r->row = calloc((size_t)s->pairs * 2, sizeof(*r->row));
    if (!r->unit_at || !r->need || !r->position || !r->waiting || !r->counter || !r->row)
        return -ENOMEM;
    for (uint32_t at = 0; at < s->units; at++) {
        struct prs_unit u;

        prs_schedule_unit(s, &cursor, at, &u);
        *unit_at(r, u.block, u.pair, u.column) = at;
        r->need[at] = count_needs(s, &u);
    }
    for (uint32_t cluster = 0; cluster < CLUSTERS; cluster++)
        r->position[cluster] = cluster;
    r->units_left = s->units;
    for (uint32_t row = 0; state->op == PRS_GEMM_ALLREDUCE && row < s->pairs * 2; row++)
        r->rows_left += prs_schedule_tile_rows(s, row) ? s->place.world - 1 : 0;
    return 0;
}

static void drop(struct state *state)
{
    for (uint32_t i = 0; state->rank && i < state->work->sim.ranks; i++) {
        free(state->rank[i].unit_at);
        free(state->rank[i].need);
        free(state->rank[i].position);
        free(state->rank[i].waiting);
        free(state->rank[i].counter);
        free(state->rank[i].row);
    }
    free(state->rank);
}

int fused_gemm_play(const struct work *work, struct work_result *result)
{
    static const struct sim_workload workload = {.start = start, .raised = raised, .call = computed};
    static const uint32_t ops[] = {PRS_GEMM_REDUCE_SCATTER, PRS_GEMM_ALLREDUCE, PRS_GEMM_ALLGATHER};
    const struct options *o = work->options;
    struct state state = {.work = work,
                          .op = ops[o->kernel],
                          .columns = o->kernel == FUSED_ALLGATHER ? o->size / work->sim.ranks : o->size,
                          .inner = o->kernel == FUSED_ALLGATHER ? o->size : o->size / work->sim.ranks,
                          .rank = calloc(work->sim.ranks, sizeof(struct rank_state))};
    int r = state.rank ? 0 : -ENOMEM;

    state.unit_ns = 2.0 * PRS_PAIR_M * PRS_TILE_N * state.inner * CLUSTERS / (work->sim.cluster->tflops * 1e3);

    if (!r && (o->size % work->sim.ranks || o->size / work->sim.ranks < PRS_TILE_M)) {
        fprintf(stderr, "perseus-sim: --size %u over %u ranks: want a multiple, and 128 rows a rank or more\n", o->size,
                work->sim.ranks);
        r = -EINVAL;
    }
    for (uint32_t rank = 0; rank < work->sim.ranks && !r; rank++)
        r = make_rank(&state, rank);
    if (!r)
        r = fused_run(work, &workload, &state, &state.end, result);
    drop(&state);
    return r;
}

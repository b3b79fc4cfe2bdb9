/* SPDX-License-Identifier: Apache-2.0 */
/* Ring attention between nodes by its own schedule (fused/attention/schedule.h): which task reads which keys in which
 * order, and which messages cross when. Everything is resident (as many buffers as groups). A CTA does one task after
 * another, span by span, and waits where a slice has not come. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "fused/attention/schedule.h"
#include "tools/sim/fused.h"
#include "tools/sim/ledger.h"

enum {
    CTAS = 132,
    TILE_ROWS = 128,
    BLOCK_ROWS = 128,
    CHUNK_ROWS = 64,
    SLAB_CHUNKS = 8,
    HEAD_DIM = 128,
    BATCH = 4,
    HEADS = 16,
    GROUP = 8, /* pairs */
    VALUE_BYTES = 2,
};

struct cta {
    uint32_t task; /* number of its task */
    struct prs_attention_task is;
    struct prs_attention_walk walk;
    bool waiting;
};

struct rank_state {
    struct prs_attention_schedule s;
    struct cta *cta;
    uint32_t *missing; /* [order][group]: slabs that have not arrived */
    uint32_t ctas_left;
};

struct state {
    const struct work *work;
    struct rank_state *rank;
    double block_ns;
    struct fused_end end;
};

static struct state *state_of(struct sim *sim)
{
    return sim->workload_state;
}

static uint32_t *missing_of(struct rank_state *r, uint32_t order, uint32_t group)
{
    return &r->missing[order * r->s.groups + group];
}

/* ---- tasks ---- */

static void compute_span(struct sim *sim, uint32_t rank, uint32_t index)
{
    struct cta *cta = &state_of(sim)->rank[rank].cta[index];
    uint64_t until = sim->events.now_ps + sim_ps(state_of(sim)->block_ns * cta->walk.blocks);

    if (sim->options.explain)
        sim_explain_note(&sim->rank[rank].explain, SIM_COMPUTE, sim->events.now_ps, until);
    sim_call_at(sim, until, rank, index);
}

/* Begin the CTA's present span, or wait for its slice; spans that the mask leaves empty are skipped. */
static void enter_span(struct sim *sim, uint32_t rank, uint32_t index)
{
    struct rank_state *r = &state_of(sim)->rank[rank];
    struct cta *cta = &r->cta[index];
    uint32_t spans = r->s.place.world * r->s.segments;

    while (cta->task < r->s.tasks) {
        while (cta->walk.span < spans && !cta->walk.blocks) {
            if (cta->walk.span + 1 == spans)
                break;
            prs_attention_enter(&r->s, &cta->is, &cta->walk, cta->walk.span + 1);
        }
        if (cta->walk.blocks) {
            cta->waiting = *missing_of(r, cta->walk.span / r->s.segments, cta->is.group) != 0;
            if (!cta->waiting)
                compute_span(sim, rank, index);
            return;
        }
        cta->task += CTAS;
        if (cta->task < r->s.tasks) {
            prs_attention_task_at(&r->s, cta->task, &cta->is);
            prs_attention_enter(&r->s, &cta->is, &cta->walk, 0);
        }
    }
    if (!--r->ctas_left)
        fused_rank_ends(sim, &state_of(sim)->end, rank);
}

static void computed(struct sim *sim, uint32_t rank, uint64_t index)
{
    struct rank_state *r = &state_of(sim)->rank[rank];
    struct cta *cta = &r->cta[index];

    if (cta->walk.span + 1 < r->s.place.world * r->s.segments)
        prs_attention_enter(&r->s, &cta->is, &cta->walk, cta->walk.span + 1);
    else
        cta->walk.blocks = 0;
    enter_span(sim, rank, (uint32_t)index);
}

/* ---- messages ---- */

/* The token of a signal for slabs of a group of rank `source`. far: the receiver must forward them in its node. */
static uint64_t token_of(uint32_t source, uint32_t group, uint32_t slabs, bool far)
{
    return (uint64_t)source << 40 | (uint64_t)group << 16 | slabs << 1 | far;
}

static void put_slabs(struct sim *sim, uint32_t from, uint32_t to, uint64_t bytes, uint64_t token, uint32_t group)
{
    uint32_t signal = sim_ledger_signal(sim->ledger, from, to, token);

    sim_put(sim, sim_ledger_put(sim->ledger, from, to, bytes, signal), group);
    sim_signal(sim, signal, group);
}

static uint64_t slab_bytes(const struct prs_attention_schedule *s)
{
    uint64_t rows = s->segment_rows < s->slab_chunks * s->chunk_rows ? s->segment_rows : s->slab_chunks * s->chunk_rows;

    return rows * HEAD_DIM * VALUE_BYTES;
}

/* Sends in the schedule's order: to the ranks of this node by stores, to the counterparts by a put and a signal for
 * each slab. */
static void send_own(struct sim *sim, uint32_t rank)
{
    const struct prs_attention_schedule *s = &state_of(sim)->rank[rank].s;
    struct prs_attention_message m;

    for (uint32_t at = 0; at < prs_attention_messages(s); at += s->slab_chunks) {
        if (!prs_attention_message_at(s, at, &m) || m.way != 0)
            continue;
        if (m.distance) {
            put_slabs(sim, rank, prs_place_neighbour(&s->place, s->place.local_ranks - m.distance), slab_bytes(s),
                      token_of(rank, m.group, 1, false), 1);
            continue;
        }
        for (uint32_t d = 1; d < s->place.nodes; d++)
            put_slabs(sim, rank, prs_place_counterpart(&s->place, d), slab_bytes(s), token_of(rank, m.group, 1, true),
                      1 + (((m.pair * 2 + m.kind) * s->segments + m.segment) * s->slabs + m.slab) % 16384);
    }
}

/* The position of a slice in the order in which a rank reads them. */
static uint32_t order_of(const struct prs_place *p, uint32_t source)
{
    uint32_t node = prs_place_node_distance(p, source);

    return node * p->local_ranks + prs_distance(p->local_rank, source % p->local_ranks, p->local_ranks);
}

static void raised(struct sim *sim, uint32_t rank, uint32_t signal)
{
    uint64_t token = sim->ledger->signal[signal].token;
    struct rank_state *r = &state_of(sim)->rank[rank];
    uint32_t source = (uint32_t)(token >> 40), group = (uint32_t)(token >> 16) & 0xffffff;
    uint32_t order = order_of(&r->s.place, source);

    for (uint32_t p = 1; token & 1 && p < r->s.place.local_ranks; p++)
        put_slabs(sim, rank, prs_place_neighbour(&r->s.place, p), slab_bytes(&r->s), token & ~1ull, 1);
    if (--*missing_of(r, order, group))
        return;
    for (uint32_t i = 0; i < CTAS; i++)
        if (r->cta[i].waiting && r->cta[i].is.group == group && r->cta[i].walk.span / r->s.segments == order) {
            r->cta[i].waiting = false;
            compute_span(sim, rank, i);
        }
}

static void start(struct sim *sim)
{
    for (uint32_t rank = 0; rank < sim->options.ranks; rank++) {
        struct rank_state *r = &state_of(sim)->rank[rank];

        send_own(sim, rank);
        for (uint32_t i = 0; i < CTAS; i++) {
            r->cta[i].task = i;
            if (i < r->s.tasks) {
                prs_attention_task_at(&r->s, i, &r->cta[i].is);
                prs_attention_enter(&r->s, &r->cta[i].is, &r->cta[i].walk, 0);
            }
            enter_span(sim, rank, i);
        }
    }
}

/* ---- a run ---- */

static int make_rank(struct state *state, uint32_t rank)
{
    struct prs_attention_slice slice = {
        BATCH, HEADS, HEADS, 0, state->work->options->size / state->work->sim.ranks, state->work->nodes};
    struct rank_state *r = &state->rank[rank];
    uint32_t world = state->work->sim.ranks;

    r->s = (struct prs_attention_schedule){.tile_rows = TILE_ROWS,
                                           .block_rows = BLOCK_ROWS,
                                           .group = GROUP,
                                           .depth = UINT32_MAX,
                                           .chunk_rows = CHUNK_ROWS,
                                           .slab_chunks = SLAB_CHUNKS};
    prs_attention_schedule_init(&r->s, rank, world, &slice);
    r->cta = calloc(CTAS, sizeof(*r->cta));
    r->missing = calloc((size_t)world * r->s.groups, sizeof(*r->missing));
    r->ctas_left = CTAS;
    if (!r->cta || !r->missing)
        return -ENOMEM;
    for (uint32_t order = 1; order < world; order++) /* this rank's slice is here */
        for (uint32_t group = 0; group < r->s.groups; group++)
            *missing_of(r, order, group) = prs_attention_group_pairs(&r->s, group) * 2 * r->s.segments * r->s.slabs;
    return 0;
}

int fused_attention_play(const struct work *work, struct work_result *result)
{
    static const struct sim_workload workload = {.start = start, .raised = raised, .call = computed};
    struct state state = {.work = work,
                          .rank = calloc(work->sim.ranks, sizeof(struct rank_state)),
                          .block_ns =
                              4.0 * TILE_ROWS * BLOCK_ROWS * HEAD_DIM * CTAS / (work->sim.cluster->tflops * 1e3)};
    int r = state.rank ? 0 : -ENOMEM;

    if (!r && (work->options->size % work->sim.ranks || work->options->size / work->sim.ranks < CHUNK_ROWS)) {
        fprintf(stderr, "perseus-sim: --size %u over %u ranks: want a multiple, and 64 keys a rank or more\n",
                work->options->size, work->sim.ranks);
        r = -EINVAL;
    }
    for (uint32_t rank = 0; rank < work->sim.ranks && !r; rank++)
        r = make_rank(&state, rank);
    if (!r)
        r = fused_run(work, &workload, &state, &state.end, result);
    for (uint32_t rank = 0; state.rank && rank < work->sim.ranks; rank++) {
        free(state.rank[rank].cta);
        free(state.rank[rank].missing);
    }
    free(state.rank);
    return r;
}

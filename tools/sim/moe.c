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

/* A transfer is the rows of one rank for one expert. Dispatch: source, expert. Combine: the same, back. Tokens of
 * signals: transfer << 1 | is it combine. */
struct state {
    const struct work *work;
    struct moe_model model;
    uint32_t ranks, experts, experts_per_rank;
    uint32_t *rows;     /* [source * experts + expert] */
    uint32_t *signal;   /* [the same] of combine, made with its put */
    uint32_t *computed; /* [owner * ranks + source]: experts of the owner that are done for the source */
    uint32_t *missing;  /* [rank]: combine signals that have not come */
    double *finished_us;
    struct sim_explain *finished;
    struct work_result *result;
};

static struct state *state_of(struct sim *sim)
{
    return sim->workload_state;
}

/* ---- routing ---- */

/* How popular each expert is, in random order. They sum up to 1. */
static double *draw_shares(struct sim *sim, uint32_t experts, double zipf)
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

/* A token never goes to one expert twice, so no expert gets more rows than there are tokens: what is over goes to the
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
    double *share = draw_shares(sim, state->experts, state->work->options->zipf);
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

static uint32_t group_of(const struct state *state, uint32_t expert)
{
    uint32_t local = expert % state->experts_per_rank;

    if (state->work->group == GROUP_COUPLED)
        return 1 + local;
    return state->work->group == GROUP_PEER ? 1 : 1 + (uint32_t)(local / state->work->group);
}

/* Is this expert's transfer the last of its group? */
static uint32_t group_end(const struct state *state, uint32_t expert, uint32_t *first)
{
    uint32_t each = state->experts_per_rank, base = expert / each * each, local = expert % each;
    uint32_t size = state->work->group == GROUP_COUPLED ? 1
                    : state->work->group == GROUP_PEER  ? each
                                                        : (uint32_t)state->work->group;
    uint32_t end = (local / size + 1) * size;

    *first = base + local / size * size;
    return base + (end < each ? end : each);
}

/* Combine has groups of its own, since both directions are in flight together. */
static uint32_t combine_group(const struct state *state, uint32_t expert)
{
    return 16384 + group_of(state, expert);
}

static void put_rows(struct sim *sim, uint32_t from, uint32_t to, uint32_t rows, uint32_t signal, uint32_t group)
{
    uint64_t bytes = (uint64_t)rows * state_of(sim)->model.hidden * BYTES_OF_VALUE;

    if (bytes)
        sim_put(sim, sim_ledger_put(sim->ledger, from, to, bytes, signal), group);
}

/* Rank `from` sends its rows to all experts: expert by expert of every owner, the next rank's first. A group's signals
 * follow its last put. */
static void dispatch(struct sim *sim, uint32_t from)
{
    struct state *state = state_of(sim);
    uint32_t each = state->experts_per_rank;
    uint32_t *signal = calloc(state->experts, sizeof(*signal));

    for (uint32_t k = 0; signal && k < each; k++)
        for (uint32_t i = 1; i <= state->ranks; i++) {
            uint32_t to = (from + i) % state->ranks, e = to * each + k, first, end;

            signal[e] = sim_ledger_signal(sim->ledger, from, to, (uint64_t)(from * state->experts + e) << 1);
            put_rows(sim, from, to, state->rows[from * state->experts + e], signal[e], group_of(state, e));
            end = group_end(state, e, &first);
            for (uint32_t s = first; e + 1 == end && s < end; s++)
                sim_signal(sim, signal[s], group_of(state, s));
        }
    free(signal);
}

static void compute(struct sim *sim, uint32_t rank, uint32_t transfer)
{
    struct state *state = state_of(sim);
    double work = 2.0 * PRODUCTS * state->rows[transfer] * state->model.hidden * state->model.inner;

    if (!state->work->options->compute)
        work = 0;
    sim_compute(sim, rank, work / (sim->cluster.tflops * 1e3), transfer);
}

/* The product of a transfer is done: send it back, and its group's signals when it was the last of them. */
static void combine(struct sim *sim, uint32_t rank, uint64_t transfer)
{
    struct state *state = state_of(sim);
    uint32_t from = (uint32_t)transfer / state->experts, e = (uint32_t)transfer % state->experts, first, end;
    uint32_t *computed = &state->computed[rank * state->ranks + from];

    state->signal[transfer] = sim_ledger_signal(sim->ledger, rank, from, transfer << 1 | 1);
    put_rows(sim, rank, from, state->rows[transfer], state->signal[transfer], combine_group(state, e));
    end = group_end(state, e, &first);
    ++*computed;
    if (state->work->group == GROUP_COUPLED) {
        sim_signal(sim, state->signal[transfer], combine_group(state, e));
        return;
    }
    for (uint32_t s = first; s < end; s++)
        if (!state->signal[from * state->experts + s])
            return;
    for (uint32_t s = first; s < end; s++)
        sim_signal(sim, state->signal[from * state->experts + s], combine_group(state, s));
}

static void raised(struct sim *sim, uint32_t rank, uint32_t signal)
{
    struct state *state = state_of(sim);
    uint64_t token = sim->ledger->signal[signal].token;

    if (token & 1) {
        if (--state->missing[rank] == 0) {
            sim_explain_advance(&sim->rank[rank].explain, sim->events.now_ps);
            state->finished[rank] = sim->rank[rank].explain;
            state->finished_us[rank] = sim_now_us(sim);
        }
    } else {
        compute(sim, rank, (uint32_t)(token >> 1));
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
    state->rows = calloc(all, sizeof(*state->rows));
    state->signal = calloc(all, sizeof(*state->signal));
    state->computed = calloc(ranks * ranks, sizeof(*state->computed));
    state->missing = calloc(ranks, sizeof(*state->missing));
    state->finished_us = calloc(ranks, sizeof(*state->finished_us));
    state->finished = calloc(ranks, sizeof(*state->finished));
    return state->rows && state->signal && state->computed && state->missing && state->finished_us && state->finished
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
    free(state.signal);
    free(state.computed);
    free(state.missing);
    free(state.finished_us);
    free(state.finished);
    return r;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* perseus-perf putsignal in the model: a sender has a fixed number of transfers in flight together, first without
 * signals, then each with one. Groups and the order of commands are those of tools/perf/putsignal.c. */
#include <stdlib.h>
#include <string.h>

#include "tools/sim/ledger.h"
#include "tools/sim/work.h"

enum {
    PAUSE_US = 200,     /* between iterations */
    MOST_PAUSES = 1000, /* pauses that receivers may take to raise all signals; after that, some will never come */
};

struct state {
    const struct work *work;
    uint32_t senders, running;
    uint32_t peers;
    uint32_t pauses;    /* since the senders were done */
    uint32_t iteration; /* even: puts alone; odd: with signals */
    uint64_t began_ps;
    double *us[2];
    struct sim_counts without, before, counts, all_before, all;
    uint64_t stall_before;
    struct work_result *result;
};

static struct state *state_of(struct sim *sim)
{
    return sim->workload_state;
}

static bool sends(const struct sim *sim, uint32_t rank)
{
    return rank == 0 || ((const struct state *)sim->workload_state)->work->options->all_send;
}

/* The i-th destination of a sender: ranks of other nodes, node by node round robin, beginning after its own. */
static uint32_t destination(const struct sim *sim, uint32_t rank, uint32_t i)
{
    uint32_t local = (uint32_t)sim->cluster.gpus_per_node, nodes = sim->options.ranks / local;
    uint32_t node = (rank / local + 1 + i % (nodes - 1)) % nodes;

    return node * local + (rank + i / (nodes - 1)) % local;
}

static uint32_t group_of(const struct state *state, uint32_t transfer)
{
    const struct work *work = state->work;

    if (work->group == GROUP_COUPLED)
        return 1 + transfer;
    if (work->group == GROUP_PEER)
        return 1;
    return 1 + (uint32_t)(transfer / state->peers / work->group);
}

static void send_all(struct sim *sim, uint32_t rank, bool with_signals)
{
    struct state *state = state_of(sim);
    uint32_t concurrency = state->work->concurrency;
    bool coupled = state->work->group == GROUP_COUPLED;
    uint32_t first = sim->ledger->signals;

    for (uint32_t t = 0; t < concurrency && with_signals; t++)
        (void)sim_ledger_signal(sim->ledger, rank, destination(sim, rank, t % state->peers), t);
    for (uint32_t t = 0; t < concurrency; t++) {
        uint32_t to = destination(sim, rank, t % state->peers), group = group_of(state, t);

        sim_put(sim,
                sim_ledger_put(sim->ledger, rank, to, state->work->bytes, with_signals ? first + t : SIM_NO_SIGNAL),
                group);
        if (with_signals && coupled)
            sim_signal(sim, first + t, group);
    }
    for (uint32_t peer = 0; peer < state->peers && with_signals && !coupled; peer++)
        for (uint32_t t = peer; t < concurrency; t += state->peers)
            sim_signal(sim, first + t, group_of(state, t));
}

static void begin(struct sim *sim)
{
    struct state *state = state_of(sim);

    if (state->iteration > 1)
        sim_fail(sim, sim_ledger_check(sim->ledger));
    sim_ledger_clear(sim->ledger);
    state->began_ps = sim->events.now_ps;
    state->running = state->senders;
    if (state->iteration == 2 * state->work->options->warmup)
        state->without = sim_rank_counts(sim, 0);
    if (state->iteration == 2 * state->work->options->warmup + 1) {
        state->before = sim_rank_counts(sim, 0);
        state->all_before = sim_all_counts(sim);
        state->stall_before = sim->rank[0].dispatch.stats.stall_ns;
        for (uint32_t rank = 0; rank < sim->options.ranks; rank++)
            sim_explain_restart(&sim->rank[rank].explain, sim->events.now_ps);
    }
    for (uint32_t rank = 0; rank < sim->options.ranks; rank++)
        if (sends(sim, rank))
            send_all(sim, rank, state->iteration % 2);
}

/* Count an iteration with signals separately from one without. */
static void count(struct sim *sim)
{
    struct state *state = state_of(sim);
    struct sim_counts now = sim_rank_counts(sim, 0), all = sim_all_counts(sim);

    state->counts = work_counts_since(&now, &state->before);
    state->all = work_counts_since(&all, &state->all_before);
    state->result->both = work_counts_since(&now, &state->without);
    state->result->stall_us = (double)(sim->rank[0].dispatch.stats.stall_ns - state->stall_before) / 1e3;
}

static void quiet(struct sim *sim, uint32_t rank)
{
    struct state *state = state_of(sim);
    uint32_t at = state->iteration / 2, warmup = state->work->options->warmup;
    double us = (double)(sim->events.now_ps - state->began_ps) / 1e6;

    if (--state->running)
        return;
    if (state->iteration == 2 * warmup + 1) {
        sim_explain_advance(&sim->rank[rank].explain, sim->events.now_ps);
        state->result->explain = sim->rank[rank].explain;
        state->result->slowest = rank;
    }
    if (at >= warmup)
        state->us[state->iteration % 2][at - warmup] = us;
    sim_call_at(sim, sim->events.now_ps + PAUSE_US * 1000000ull, 0, 0);
}

static void call(struct sim *sim, uint32_t rank, uint64_t token)
{
    struct state *state = state_of(sim);

    (void)rank, (void)token;
    /* As in perseus-perf, every receiver has seen its signals before the next iteration. */
    if (sim->ledger->raised < sim->ledger->signals && ++state->pauses < MOST_PAUSES) {
        sim_call_at(sim, sim->events.now_ps + PAUSE_US * 1000000ull, 0, 0);
        return;
    }
    state->pauses = 0;
    if (state->iteration == 2 * state->work->options->warmup + 1)
        count(sim);
    if (++state->iteration < 2 * (state->work->options->warmup + state->work->options->iterations))
        begin(sim);
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

int putsignal_play(const struct work *work, struct work_result *result)
{
    static const struct sim_workload workload = {.start = begin, .quiet = quiet, .call = call};
    struct state state = {.work = work, .result = result};
    uint32_t iterations = work->options->iterations;
    struct sim sim;
    int r = sim_open(&sim, &work->sim);

    state.peers = work->peers;
    state.senders = work->options->all_send ? work->sim.ranks : 1;
    state.us[0] = calloc(iterations, sizeof(double));
    state.us[1] = calloc(iterations, sizeof(double));
    if (!r)
        r = sim_run(&sim, &workload, &state);
    if (!r)
        r = work_finish(&sim, result);
    if (!r) {
        for (int i = 0; i < 2; i++)
            qsort(state.us[i], iterations, sizeof(double), compare);
        result->put_only_us = state.us[0][iterations / 2];
        result->us = state.us[1][iterations / 2];
        result->counts = state.counts;
        result->all = state.all;
        result->transfers = work->concurrency;
        result->bytes = work->bytes * work->concurrency;
    }
    free(state.us[0]);
    free(state.us[1]);
    sim_close(&sim);
    return r;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Every rank sends a block to every other, each with a signal. A limited number is in flight at a time; the next rank
 * comes first. */
#include <errno.h>
#include <stdlib.h>

#include "tools/sim/ledger.h"
#include "tools/sim/work.h"

struct state {
    const struct work *work;
    uint32_t *next;    /* [rank]: blocks issued */
    uint32_t *arrived; /* [rank] */
    double *finished_us;
    struct sim_explain *finished;
};

static struct state *state_of(struct sim *sim)
{
    return sim->workload_state;
}

/* Send the next block when one has arrived here, so that all ranks continue at one pace. */
static void issue(struct sim *sim, uint32_t rank)
{
    struct state *state = state_of(sim);
    uint32_t ranks = sim->options.ranks, to, signal, group;

    if (state->next[rank] + 1 >= ranks)
        return;
    to = (rank + ++state->next[rank]) % ranks;
    group = 1 + (state->work->group == GROUP_COUPLED ? state->next[rank] : 0);
    signal = sim_ledger_signal(sim->ledger, rank, to, 0);
    sim_put(sim, sim_ledger_put(sim->ledger, rank, to, state->work->bytes, signal), group);
    sim_signal(sim, signal, group);
}

static void start(struct sim *sim)
{
    uint32_t outstanding = state_of(sim)->work->options->outstanding;

    for (uint32_t rank = 0; rank < sim->options.ranks; rank++)
        for (uint32_t i = 0; i < outstanding; i++)
            issue(sim, rank);
}

static void raised(struct sim *sim, uint32_t rank, uint32_t signal)
{
    struct state *state = state_of(sim);

    (void)signal;
    if (++state->arrived[rank] == sim->options.ranks - 1) {
        sim_explain_advance(&sim->rank[rank].explain, sim->events.now_ps);
        state->finished[rank] = sim->rank[rank].explain;
        state->finished_us[rank] = sim_now_us(sim);
    }
    issue(sim, rank);
}

int alltoall_play(const struct work *work, struct work_result *result)
{
    static const struct sim_workload workload = {.start = start, .raised = raised};
    uint32_t ranks = work->sim.ranks;
    struct state state = {.work = work,
                          .next = calloc(ranks, sizeof(uint32_t)),
                          .arrived = calloc(ranks, sizeof(uint32_t)),
                          .finished_us = calloc(ranks, sizeof(double)),
                          .finished = calloc(ranks, sizeof(struct sim_explain))};
    bool made = state.next && state.arrived && state.finished_us && state.finished;
    struct sim sim;
    int r = made ? sim_open(&sim, &work->sim) : -ENOMEM;

    if (!r)
        r = sim_run(&sim, &workload, &state);
    for (uint32_t rank = 0; rank < ranks && !r; rank++)
        if (state.finished_us[rank] > result->us) {
            result->us = state.finished_us[rank];
            result->slowest = rank;
        }
    if (!r) {
        result->explain = state.finished[result->slowest];
        result->counts = sim_rank_counts(&sim, 0);
        result->all = sim_all_counts(&sim);
        result->transfers = ranks - (uint32_t)work->sim.cluster->gpus_per_node;
        result->bytes = result->counts.bytes;
        r = work_finish(&sim, result);
    }
    if (made)
        sim_close(&sim);
    free(state.next);
    free(state.arrived);
    free(state.finished_us);
    free(state.finished);
    return r;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/sim/fused.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

const char *const fused_kernel_names[] = {"reduce_scatter", "allreduce", "allgather", "attention", "moe", NULL};

void fused_rank_ends(struct sim *sim, struct fused_end *end, uint32_t rank)
{
    sim_explain_advance(&sim->rank[rank].explain, sim->events.now_ps);
    end->explain[rank] = sim->rank[rank].explain;
    end->us[rank] = sim_now_us(sim);
}

static int conclude(struct sim *sim, const struct fused_end *end, struct work_result *result)
{
    for (uint32_t rank = 0; rank < end->ranks; rank++) {
        if (end->us[rank] == 0) {
            fprintf(stderr, "perseus-sim: the kernel of rank %u does not end: it waits for what never comes\n", rank);
            return -EDEADLK;
        }
        if (end->us[rank] > result->us) {
            result->us = end->us[rank];
            result->slowest = rank;
        }
    }
    result->explain = end->explain[result->slowest];
    result->counts = sim_rank_counts(sim, 0);
    result->all = sim_all_counts(sim);
    result->transfers = (uint32_t)result->counts.puts;
    result->bytes = result->counts.bytes;
    return work_finish(sim, result);
}

int fused_run(const struct work *work, const struct sim_workload *workload, void *state, struct fused_end *end,
              struct work_result *result)
{
    struct sim sim;
    int r;

    end->ranks = work->sim.ranks;
    end->us = calloc(end->ranks, sizeof(*end->us));
    end->explain = calloc(end->ranks, sizeof(*end->explain));
    r = end->us && end->explain ? sim_open(&sim, &work->sim) : -ENOMEM;
    if (!r)
        r = sim_run(&sim, workload, state);
    if (!r)
        r = conclude(&sim, end, result);
    if (end->us && end->explain)
        sim_close(&sim);
    free(end->us);
    free(end->explain);
    return r;
}

int fused_play(const struct work *work, struct work_result *result)
{
    switch (work->options->kernel) {
    case FUSED_ATTENTION:
        return fused_attention_play(work, result);
    case FUSED_MOE:
        return fused_moe_play(work, result);
    default:
        return fused_gemm_play(work, result);
    }
}

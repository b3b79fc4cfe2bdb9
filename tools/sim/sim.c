/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/sim/sim.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tools/sim/host.h"
#include "tools/sim/ledger.h"
#include "tools/sim/memory.h"
#include "transport/nic/backends.h"

static bool is_of_queue(const struct sim_event *event)
{
    return event->kind >= SIM_DOORBELL && event->kind <= SIM_UNFENCE && event->kind != SIM_SEND;
}

void sim_add_event(struct sim *sim, uint64_t at_ps, enum sim_event_kind kind, void *object, uint32_t a, uint64_t b)
{
    struct sim_event event = {.object = object, .kind = (uint32_t)kind, .a = a, .b = b};

    if (is_of_queue(&event))
        ((struct sim_queue *)object)->end->events++;
    sim_events_add(&sim->events, at_ps, &event);
}

void sim_fail(struct sim *sim, int error)
{
    if (!sim->error)
        sim->error = error;
}

uint64_t sim_random(struct sim *sim, uint64_t n)
{
    uint64_t x = sim->random += 0x9e3779b97f4a7c15ull; /* splitmix64 */

    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return n ? (x ^ x >> 31) % n : 0;
}

/* ---- life ---- */

static int open_rails(struct sim *sim)
{
    int r;

    sim_nic_init(&sim->cluster);
    sim->fabric.owner = getpid();
    sim->fabric.config.adaptive_routing = sim->cluster.adaptive_unordered != 0;
    r = prs_fabric_find_rails(&sim->fabric, prs_backends);
    sim->region.rail_mask = (1ull << sim->rails) - 1;
    return r ? r : sim->fabric.rail_count == (int)sim->rails ? 0 : -ENOMEM;
}

static void close_rails(struct sim *sim)
{
    for (int i = 0; i < sim->fabric.rail_count; i++)
        prs_domain_close(sim->fabric.rail[i].domain);
}

int sim_open(struct sim *sim, const struct sim_options *options)
{
    int r;

    memset(sim, 0, sizeof(*sim));
    sim->options = *options;
    sim->cluster = *options->cluster;
    sim->rails = (uint32_t)sim->cluster.nics_per_gpu;
    sim->random = options->seed;
    sim->ledger = calloc(1, sizeof(*sim->ledger));
    r = sim->ledger ? sim_events_init(&sim->events) : -ENOMEM;
    if (!r)
        r = open_rails(sim);
    if (!r)
        r = sim_fabric_init(sim);
    if (!r)
        r = sim_ranks_open(sim);
    if (!r)
        sim_rails_open(sim);
    sim->ranks_bytes = sim_memory_used();
    if (r == -ENOMEM)
        fprintf(stderr, "perseus-sim: no memory for %u ranks\n", options->ranks);
    return r;
}

void sim_close(struct sim *sim)
{
    sim_disconnect_all(sim);
    sim_ranks_close(sim);
    sim_fabric_fini(sim);
    sim_free(sim->stream);
    sim_events_fini(&sim->events);
    if (sim->ledger)
        sim_ledger_fini(sim->ledger);
    free(sim->ledger);
    close_rails(sim);
    sim_memory_fini();
}

/* ---- events ---- */

void sim_call_at(struct sim *sim, uint64_t at_ps, uint32_t rank, uint64_t token)
{
    sim_add_event(sim, at_ps, SIM_CALL, &sim->rank[rank], rank, token);
}

void sim_raise(struct sim *sim, uint64_t address)
{
    uint32_t signal = (uint32_t)(address / 8);

    if (signal >= sim->ledger->signals) {
        sim_fail(sim, -EFAULT);
        return;
    }
    sim_ledger_raise(sim->ledger, signal, sim->events.now_ps);
    if (sim->workload->raised)
        sim_add_event(sim, sim->events.now_ps + sim_ps(sim->cluster.see_ns), SIM_SEEN,
                      &sim->rank[sim->ledger->signal[signal].to], signal, 0);
}

void sim_notified(void *user, uint32_t id, uint64_t bytes)
{
    struct sim_end *end = user;

    end->rank->sim->workload->notified(end->rank->sim, end->rank->rank, end->other->rank->rank, id, bytes);
}

static void handle(struct sim *sim, const struct sim_event *event)
{
    struct prs_team *rank = event->object;

    switch (event->kind) {
    case SIM_STEP:
        sim_rank_step(rank);
        break;
    case SIM_ISSUE:
        sim_rank_issue(rank);
        break;
    case SIM_NEAR:
        if (event->b)
            sim_raise(sim, event->a * 8ull);
        else
            sim_ledger_arrive(sim->ledger, event->a * SIM_PUT_STRIDE, sim->ledger->put[event->a].bytes);
        break;
    case SIM_SEEN:
        sim->workload->raised(sim, rank->rank, event->a);
        break;
    case SIM_QUIET:
        sim->workload->quiet(sim, rank->rank);
        break;
    case SIM_RAIL:
        sim_rails_event(sim, event->a);
        break;
    case SIM_NOTE:
        sim_rails_note(event->object, event->b);
        break;
    case SIM_CALL:
        sim->workload->call(sim, rank->rank, event->b);
        break;
    default:
        sim_nic_event(sim, event);
    }
}

int sim_run(struct sim *sim, const struct sim_workload *workload, void *state)
{
    struct sim_event event;

    sim->workload = workload;
    sim->workload_state = state;
    if (workload->start)
        workload->start(sim);
    while (!sim->error && sim_events_take(&sim->events, &event)) {
        sim_clock_set(sim->events.now_ps);
        handle(sim, &event);
    }
    for (uint32_t i = 0; sim->options.explain && i < sim->options.ranks; i++)
        sim_explain_advance(&sim->rank[i].explain, sim->events.now_ps);
    return sim->error;
}

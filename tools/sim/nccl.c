/* SPDX-License-Identifier: Apache-2.0 */
/* NCCL's ring all-reduce, and its all-to-all, over isend and irecv as plugin/request.c has them: the receiver writes a
 * clear-to-send record of 64 bytes, the sender puts with a notification. The host's thread progresses the peers, as a
 * proxy does for kernels. Kernels' times are not modelled: a chunk is ready when it has arrived. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "tools/sim/fused.h"
#include "tools/sim/ledger.h"
#include "transport/peer/peer.h"

enum {
    RECORD_BYTES = 64, /* PRS_PUT_INLINE */
    STEPS = 8,         /* NCCL_STEPS: receives that a ring posts ahead */
};

const char *const nccl_collective_names[] = {"allreduce", "alltoall", NULL};

struct rank_state {
    uint32_t clear;    /* ring: records that have arrived from the next rank */
    uint32_t ready;    /* ring: messages whose data is here; `clear` limits them, too */
    uint32_t sent;     /* messages */
    uint32_t posted;   /* ring: records written to the previous rank */
    uint32_t received; /* messages */
    struct prs_op *op; /* ops of puts and records, used in turn */
    uint32_t next_op;
};

struct state {
    const struct work *work;
    bool ring;
    uint32_t ranks, local, messages, slices, ops;
    uint64_t bytes; /* bytes of a message */
    struct rank_state *rank;
    struct fused_end end;
};

static struct state *state_of(struct sim *sim)
{
    return sim->workload_state;
}

static bool is_near(const struct state *state, uint32_t a, uint32_t b)
{
    return a / state->local == b / state->local;
}

static struct prs_op *take_op(struct state *state, uint32_t rank)
{
    struct rank_state *r = &state->rank[rank];

    return &r->op[r->next_op++ % state->ops];
}

static void check(struct sim *sim, int r)
{
    if (r)
        sim_fail(sim, r > 0 ? -EBUSY : r);
}

/* ---- messages ---- */

static void send_message(struct sim *sim, uint32_t rank, uint32_t to)
{
    static const struct prs_keys keys = {{SIM_KEY_DATA, SIM_KEY_DATA, SIM_KEY_DATA, SIM_KEY_DATA, SIM_KEY_DATA,
                                          SIM_KEY_DATA, SIM_KEY_DATA, SIM_KEY_DATA}};
    struct state *state = state_of(sim);
    struct rank_state *r = &state->rank[rank];
    struct prs_put put = {.src = &sim->region,
                          .dst = &keys,
                          .len_bytes = state->bytes,
                          .notify_id = r->sent % PRS_NOTIFY_IDS,
                          .group = PRS_GROUP_NONE,
                          .flags = PRS_PUT_NOTIFY};
    uint32_t number;

    if (is_near(state, rank, to)) {
        uint32_t signal = sim_ledger_signal(sim->ledger, rank, to, 0);

        sim_put(sim, sim_ledger_put(sim->ledger, rank, to, state->bytes, signal), 1);
        sim_signal(sim, signal, 1);
    } else {
        number = sim_ledger_put(sim->ledger, rank, to, state->bytes, SIM_NO_SIGNAL);
        put.dst_addr = number * SIM_PUT_STRIDE;
        check(sim, prs_peer_put(sim_peer(sim, rank, to), take_op(state, rank), &put));
    }
    r->sent++;
}

/* Write a clear-to-send record. The receiver sees it like a signal. */
static void write_record(struct sim *sim, uint32_t rank, uint32_t to)
{
    static const struct prs_keys keys = {{SIM_KEY_SIGNAL, SIM_KEY_SIGNAL, SIM_KEY_SIGNAL, SIM_KEY_SIGNAL,
                                          SIM_KEY_SIGNAL, SIM_KEY_SIGNAL, SIM_KEY_SIGNAL, SIM_KEY_SIGNAL}};
    static const uint8_t record[RECORD_BYTES];
    struct prs_put put = {.src_addr = record,
                          .dst = &keys,
                          .dst_addr = sim_ledger_signal(sim->ledger, rank, to, 1) * 8ull,
                          .len_bytes = RECORD_BYTES,
                          .group = PRS_GROUP_NONE,
                          .flags = PRS_PUT_INLINE | PRS_PUT_LAZY};

    check(sim, prs_peer_put(sim_peer(sim, rank, to), take_op(state_of(sim), rank), &put));
}

/* ---- ring ---- */

static void advance_ring(struct sim *sim, uint32_t rank)
{
    struct state *state = state_of(sim);
    struct rank_state *r = &state->rank[rank];
    uint32_t next = (rank + 1) % state->ranks, before = (rank + state->ranks - 1) % state->ranks;
    bool near = is_near(state, rank, next);

    while (!is_near(state, rank, before) && r->posted < state->messages && r->posted < r->received + STEPS) {
        r->posted++;
        write_record(sim, rank, before);
    }
    while (r->sent < r->ready && (near || r->sent < r->clear))
        send_message(sim, rank, next);
}

static void message_came(struct sim *sim, uint32_t rank)
{
    struct state *state = state_of(sim);
    struct rank_state *r = &state->rank[rank];

    r->received++;
    if (state->ring) {
        if (r->received + state->slices <= state->messages)
            r->ready++; /* the next step sends the data that arrived in this one */
        advance_ring(sim, rank);
    }
    if (r->received == state->messages)
        fused_rank_ends(sim, &state->end, rank);
}

/* ---- what happens ---- */

static void notified(struct sim *sim, uint32_t rank, uint32_t from, uint32_t id, uint64_t bytes)
{
    (void)from, (void)id, (void)bytes;
    message_came(sim, rank);
}

static void raised(struct sim *sim, uint32_t rank, uint32_t signal)
{
    struct state *state = state_of(sim);

    if (!sim->ledger->signal[signal].token) {
        message_came(sim, rank); /* over NVLink */
        return;
    }
    state->rank[rank].clear++;
    if (state->ring)
        advance_ring(sim, rank);
    else
        send_message(sim, rank, sim->ledger->signal[signal].from);
    sim_rank_wake(&sim->rank[rank], sim->events.now_ps);
}

static void start(struct sim *sim)
{
    struct state *state = state_of(sim);

    for (uint32_t rank = 0; rank < state->ranks; rank++) {
        struct rank_state *r = &state->rank[rank];

        if (state->ring) {
            r->ready = state->slices;
            advance_ring(sim, rank);
        }
        for (uint32_t i = 1; i < state->ranks && !state->ring; i++) {
            uint32_t other = (rank + state->ranks - i) % state->ranks;

            if (is_near(state, rank, other))
                send_message(sim, rank, other);
            else
                write_record(sim, rank, other);
        }
        sim_rank_wake(&sim->rank[rank], 0);
    }
}

/* ---- a run ---- */

static void shape(struct state *state)
{
    const struct options *o = state->work->options;
    uint64_t chunk;

    state->ring = o->collective == 0;
    if (!state->ring) {
        state->messages = state->ranks - 1;
        state->bytes = state->work->bytes;
        state->ops = state->ranks * 2;
        return;
    }
    chunk = (state->work->bytes + state->ranks - 1) / state->ranks;
    state->slices = (uint32_t)((chunk + o->slice_bytes - 1) / o->slice_bytes);
    state->bytes = (chunk + state->slices - 1) / state->slices;
    state->messages = 2 * (state->ranks - 1) * state->slices;
    state->ops = 4096;
}

int nccl_play(const struct work *work, struct work_result *result)
{
    static const struct sim_workload workload = {.start = start, .raised = raised, .notified = notified};
    struct state state = {.work = work,
                          .ranks = work->sim.ranks,
                          .local = (uint32_t)work->sim.cluster->gpus_per_node,
                          .rank = calloc(work->sim.ranks, sizeof(struct rank_state))};
    int r = state.rank ? 0 : -ENOMEM;

    shape(&state);
    for (uint32_t i = 0; i < state.ranks && !r; i++) {
        state.rank[i].op = calloc(state.ops, sizeof(struct prs_op));
        r = state.rank[i].op ? 0 : -ENOMEM;
    }
    if (!r)
        r = fused_run(work, &workload, &state, &state.end, result);
    for (uint32_t i = 0; state.rank && i < state.ranks; i++)
        free(state.rank[i].op);
    free(state.rank);
    if (!r) {
        result->transfers = state.messages;
        result->bytes =
            state.ring ? 2 * work->bytes * (state.ranks - 1) / state.ranks : work->bytes * (state.ranks - 1);
    }
    return r;
}

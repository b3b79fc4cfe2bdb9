/* SPDX-License-Identifier: Apache-2.0 */
/* A NIC in software (tools/softnic): requests that are due are carried out by threads of the sender's host. A queue is
 * run by one thread at a time. The proxy's thread runs queues when it polls. In addition the NIC has a thread of its
 * own, which leaves short requests to a thread that polls. */
#include "tools/sim/ledger.h"
#include "tools/sim/sim.h"

enum {
    /* Of tools/softnic: LIGHT_BYTES and RUN_BATCH_BYTES (nic/run.c), SN_WRITE_BATCH and SN_WRITE_BATCH_BYTES
     * (memory/host_copy.h). */
    LIGHT_BYTES = 16384,
    RUN_BYTES = 4 << 20,
    CALL_REQUESTS = 32,
    CALL_BYTES = 4096,
};

static const struct prs_wr *request(const struct sim_queue *queue, uint32_t position)
{
    return &queue->ring[position & queue->mask];
}

static bool may_share_call(const struct prs_wr *wr)
{
    return wr->opcode != PRS_WR_ADD && wr->len_bytes && wr->len_bytes <= CALL_BYTES && !(wr->flags & PRS_WR_FENCE);
}

/* Does the target of a request begin where the target of the request before it ends? The targets of puts with
 * consecutive numbers do, as in perseus-perf. */
static bool follows(const struct prs_wr *wr, const struct prs_wr *before)
{
    if (wr->remote_key != before->remote_key)
        return false;
    if (wr->remote_key == SIM_KEY_DATA)
        return wr->remote_addr / SIM_PUT_STRIDE == before->remote_addr / SIM_PUT_STRIDE + 1;
    return wr->remote_addr == before->remote_addr + before->len_bytes;
}

/* Begin a call of the kernel: as many short requests as are due, or one long one. */
static void begin_call(struct prs_team *rank, uint32_t thread, uint64_t at_ps)
{
    const struct sim_cluster *c = &rank->sim->cluster;
    struct sim_thread *is = &rank->thread[thread];
    struct sim_queue *queue = is->queue;
    double ns = c->call_ns;

    is->requests = 0;
    do {
        const struct prs_wr *wr = request(queue, queue->executed + is->requests);

        ns += c->request_ns + wr->len_bytes * 8.0 / c->copy_gbps;
        if (!is->requests || !follows(wr, request(queue, queue->executed + is->requests - 1)))
            ns += c->scatter_ns;
        is->bytes += wr->len_bytes;
        is->requests++;
        if (!may_share_call(wr))
            break;
    } while (is->requests < CALL_REQUESTS && queue->executed + is->requests != queue->delivered &&
             may_share_call(request(queue, queue->executed + is->requests)));
    at_ps += sim_ps(ns);
    if (thread == SIM_THREAD_PROXY)
        rank->cpu_ps = at_ps;
    sim_add_event(rank->sim, at_ps, SIM_EXECUTED, queue, thread, 0);
}

static void begin_run(struct prs_team *rank, uint32_t thread, struct sim_queue *queue, uint64_t at_ps)
{
    rank->thread[thread] = (struct sim_thread){.queue = queue, .first = queue->executed};
    begin_call(rank, thread, at_ps);
}

static void line_up(struct prs_team *rank, struct sim_queue *queue)
{
    queue->next_due = NULL;
    *(rank->due_first ? &rank->due_last->next_due : &rank->due_first) = queue;
    rank->due_last = queue;
}

/* Take the queue that has waited longest; with `heavy`, only a queue with long requests. */
static struct sim_queue *take_due(struct prs_team *rank, bool heavy)
{
    struct sim_queue *before = NULL, *queue = rank->due_first;

    while (queue && heavy && request(queue, queue->executed)->len_bytes <= LIGHT_BYTES) {
        before = queue;
        queue = queue->next_due;
    }
    if (!queue)
        return NULL;
    *(before ? &before->next_due : &rank->due_first) = queue->next_due;
    if (rank->due_last == queue)
        rank->due_last = before;
    return queue;
}

static void engine_looks(struct prs_team *rank)
{
    struct sim_queue *queue = rank->thread[SIM_THREAD_ENGINE].queue ? NULL : take_due(rank, true);

    if (queue)
        begin_run(rank, SIM_THREAD_ENGINE, queue, rank->sim->events.now_ps);
}

void sim_executor_due(struct sim_queue *queue)
{
    struct prs_team *rank = queue->end->rank;

    if (queue->lined_up)
        return;
    queue->lined_up = true;
    line_up(rank, queue);
    engine_looks(rank);
    sim_rank_wake(rank, rank->sim->events.now_ps);
}

bool sim_executor_poll(struct prs_team *rank)
{
    struct sim_queue *queue = rank->due_first ? take_due(rank, false) : NULL;

    if (queue)
        begin_run(rank, SIM_THREAD_PROXY, queue, rank->cpu_ps);
    return queue;
}

/* Completions come when a run ends, but not before the time that the model of the network gives. */
static void end_run(struct prs_team *rank, struct sim_thread *is)
{
    struct sim_queue *queue = is->queue;
    uint64_t now = rank->sim->events.now_ps;

    for (uint32_t i = is->first; i != queue->executed; i++) {
        uint64_t done = queue->done_ps[i & queue->mask];

        if (request(queue, i)->flags & PRS_WR_SIGNALED)
            sim_add_event(rank->sim, done > now ? done : now, SIM_DONE, queue, i, 0);
    }
    is->queue = NULL;
    queue->lined_up = queue->executed != queue->delivered;
    if (queue->lined_up)
        line_up(rank, queue);
}

void sim_executor_event(struct sim_queue *queue, uint32_t thread)
{
    struct prs_team *rank = queue->end->rank;
    struct sim_thread *is = &rank->thread[thread];

    for (; is->requests; is->requests--)
        sim_nic_take_effect(rank->sim, queue, queue->executed++);
    if (queue->executed != queue->delivered && is->bytes < RUN_BYTES) {
        begin_call(rank, thread, rank->sim->events.now_ps);
        return;
    }
    end_run(rank, is);
    if (thread == SIM_THREAD_PROXY)
        sim_rank_polled(rank);
    engine_looks(rank);
}

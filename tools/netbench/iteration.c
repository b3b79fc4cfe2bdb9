/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/netbench/iteration.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>

#include "tools/netbench/buffers.h"
#include "tools/netbench/pattern.h"

enum {
    COMPLAINTS_MAX = 10,
    CHECK_EVERY = 256, /* idle passes between checks of the clock */
};

static void prepare(struct rank *rank, size_t bytes, int slot, uint64_t iteration)
{
    const struct options *options = rank->options;
    size_t offset = (size_t)slot * buffers_slot_bytes(bytes);
    struct pattern own = pattern_of_rank(iteration, rank->id);
    struct range block = plan_block(bytes, rank->id, options->ranks);

    if (buffers_has_input(options->op))
        pattern_fill(&own, rank->input + offset, 0, bytes);
    if (buffers_has_scratch(options->op))
        pattern_fill(&own, rank->output + offset, 0, bytes);
    else
        pattern_poison(rank->output + offset, bytes);
    if (options->op == OP_ALLGATHER)
        pattern_fill(&own, rank->output + offset + block.offset, block.offset, block.len);
}

static uint64_t compare(struct rank *rank, const struct pattern *pattern, const uint8_t *data, size_t from, size_t len)
{
    size_t first = 0;
    size_t wrong = pattern_differs(pattern, data, from, len, &first);

    if (wrong && rank->complaints++ < COMPLAINTS_MAX)
        fprintf(stderr, "perseus-netbench: rank %d: %zu of %zu bytes are wrong, the first at %zu (%#x)\n", rank->id,
                wrong, len, from + first, data[first]);
    return wrong;
}

static uint64_t check(struct rank *rank, size_t bytes, int slot, uint64_t iteration)
{
    const struct options *options = rank->options;
    const uint8_t *data = rank->output + (size_t)slot * buffers_slot_bytes(bytes);
    struct pattern sum = pattern_of_sum(iteration, options->ranks), of;
    struct range block = plan_block(bytes, rank->id, options->ranks);
    uint64_t wrong = 0;

    switch (options->op) {
    case OP_SENDRECV:
        of = pattern_of_rank(iteration, (rank->id + options->ranks - 1) % options->ranks);
        return compare(rank, &of, data, 0, bytes);
    case OP_ALLREDUCE:
        return compare(rank, &sum, data, 0, bytes);
    case OP_REDUCESCATTER:
        return compare(rank, &sum, data + block.offset, block.offset, block.len);
    case OP_ALLGATHER:
        for (int q = 0; q < options->ranks; q++) {
            block = plan_block(bytes, q, options->ranks);
            of = pattern_of_rank(iteration, q);
            wrong += compare(rank, &of, data + block.offset, block.offset, block.len);
        }
        return wrong;
    default: /* alltoall: block q is the block that rank q has for this rank */
        block = plan_equal(bytes, rank->id, options->ranks);
        for (int q = 0; q < options->ranks; q++) {
            struct range to = plan_equal(bytes, q, options->ranks);

            of = pattern_of_rank(iteration, q);
            wrong += compare(rank, &of, data + to.offset, block.offset, block.len);
        }
        return wrong;
    }
}

/* In an alltoall, a rank's block for itself does not use the network. */
static void copy_own(struct rank *rank, size_t bytes, size_t offset)
{
    struct range block = plan_equal(bytes, rank->id, rank->options->ranks);

    if (rank->options->op == OP_ALLTOALL)
        memcpy(rank->output + offset + block.offset, rank->input + offset + block.offset, block.len);
}

static void report_waits(const struct rank *rank)
{
    for (int i = 0; i < rank->stream_count; i++) {
        char text[512];

        if (stream_is_done(&rank->streams[i]))
            continue;
        stream_describe(&rank->streams[i], text, sizeof(text));
        fprintf(stderr, "perseus-netbench: rank %d: %s\n", rank->id, text);
    }
}

static void beat(struct rank *rank)
{
    __atomic_add_fetch(&rank->job->rank[rank->id].beats, 1, __ATOMIC_RELAXED);
}

/* Return 0 to keep waiting, -ECANCELED or -ETIMEDOUT. */
static int check_limits(struct rank *rank, double since)
{
    beat(rank);
    if (job_stopped(rank->job))
        return -ECANCELED;
    return job_now() - since > rank->options->timeout_s * 1e6 ? -ETIMEDOUT : 0;
}

/* One operation. Return 0 or -errno. */
static int run_once(struct rank *rank, size_t bytes, int slot)
{
    size_t offset = (size_t)slot * buffers_slot_bytes(bytes);
    double since = job_now();
    int idle = 0, left = rank->stream_count;

    beat(rank); /* on a busy machine a pass takes milliseconds, and no wait is long enough for check_limits() */
    for (int i = 0; i < rank->stream_count; i++)
        stream_begin(&rank->streams[i], offset);
    copy_own(rank, bytes, offset);
    while (left > 0) {
        int happened = 0;

        left = 0;
        for (int i = 0; i < rank->stream_count; i++) {
            int r;

            if (stream_is_done(&rank->streams[i]))
                continue;
            r = stream_step(&rank->streams[i]);
            if (r < 0)
                return r;
            happened |= r;
            left += !stream_is_done(&rank->streams[i]);
        }
        if (happened) {
            idle = 0;
            continue;
        }
        if (idle++ == 0)
            since = job_now();
        if (idle % CHECK_EVERY == 0) {
            int r = check_limits(rank, since);

            if (r < 0) {
                report_waits(rank);
                return r;
            }
        }
        if (idle % rank->options->yield == 0)
            sched_yield(); /* there may be more ranks than cores */
    }
    return 0;
}

int iteration_run_batch(struct rank *rank, size_t bytes, int slots, int done, uint64_t *errors)
{
    const struct options *options = rank->options;
    double *usec = job_usec(rank->job, rank->id), before = 0;
    int total = options->warmup + options->iters - done + 1;
    int batch = slots < total ? slots : total;
    uint64_t first = rank->iteration;
    int r;

    rank->iteration += batch;
    for (int i = 0; i < batch; i++)
        if (options->check || done == 0)
            prepare(rank, bytes, i, first + i);
    r = job_barrier(rank->job, options->setup_timeout_s);
    for (int i = 0; i < batch && r == 0; i++) {
        double now;

        r = run_once(rank, bytes, i);
        now = job_now();
        if (i > 0 && done + i - 1 >= options->warmup)
            usec[done + i - 1 - options->warmup] = now - before;
        before = now;
    }
    if (r < 0)
        return r;
    for (int i = 0; options->check && i < batch; i++)
        *errors += check(rank, bytes, i, first + i);
    return batch - 1;
}

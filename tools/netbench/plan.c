/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/netbench/plan.h"

struct range plan_block(size_t bytes, int q, int n)
{
    size_t from = bytes * (size_t)q / (size_t)n;

    return (struct range){.offset = from, .len = bytes * (size_t)(q + 1) / (size_t)n - from};
}

struct range plan_equal(size_t bytes, int q, int n)
{
    return (struct range){.offset = bytes / (size_t)n * (size_t)q, .len = bytes / (size_t)n};
}

/** The comm's part of a block. */
static struct range part(struct range block, const struct share *share)
{
    struct range inner = plan_block(block.len, share->comm, share->comms);

    inner.offset += block.offset;
    return inner;
}

static int chunks_of(const struct plan *plan, const struct range *range)
{
    return range->len ? (int)((range->len + plan->chunk_bytes - 1) / plan->chunk_bytes) : 1;
}

int plan_chunks(const struct plan *plan, const struct range *range, int g)
{
    int left = chunks_of(plan, range) - g * plan->group;

    return left > plan->group ? plan->group : left > 0 ? left : 0;
}

struct range plan_chunk(const struct plan *plan, const struct range *range, int g, int i)
{
    size_t from = ((size_t)g * plan->group + i) * plan->chunk_bytes;
    size_t left = range->len - from;

    return (struct range){.offset = range->offset + from, .len = left < plan->chunk_bytes ? left : plan->chunk_bytes};
}

static int wrap(int q, int n)
{
    return ((q % n) + n) % n;
}

static void add_step(struct plan *plan, struct range send, struct range recv, bool is_added)
{
    struct step *step = &plan->step[plan->steps++];

    *step = (struct step){.send = send, .recv = recv, .is_added = is_added, .recv_before = plan->recv_groups};
    plan->recv_groups += (chunks_of(plan, &recv) + plan->group - 1) / plan->group;
}

/** n - 1 steps around the ring; in step s the rank sends block first - s and receives the one before it. */
static void add_ring(struct plan *plan, size_t bytes, const struct share *share, int first, bool is_added)
{
    for (int s = 0; s < share->ranks - 1; s++) {
        struct range send = plan_block(bytes, wrap(first - s, share->ranks), share->ranks);
        struct range recv = plan_block(bytes, wrap(first - s - 1, share->ranks), share->ranks);

        add_step(plan, part(send, share), part(recv, share), is_added);
    }
}

void plan_make(struct plan *plan, const struct options *options, size_t bytes, const struct share *share)
{
    struct range all = {.len = bytes};

    *plan = (struct plan){.chunk_bytes = options->chunk_bytes, .group = options->group, .is_chained = true};
    switch (options->op) {
    case OP_ALLREDUCE: /* block rank + 1 is complete here after the first round, and goes around in the second */
        add_ring(plan, bytes, share, share->rank, true);
        add_ring(plan, bytes, share, share->rank + 1, false);
        break;
    case OP_REDUCESCATTER: /* so that the block that ends here is the rank's own */
        add_ring(plan, bytes, share, share->rank - 1, true);
        break;
    case OP_ALLGATHER:
        add_ring(plan, bytes, share, share->rank, false);
        break;
    case OP_ALLTOALL:
        plan->is_chained = false;
        plan->is_own_input = true;
        add_step(plan, part(plan_equal(bytes, share->to, share->ranks), share),
                 part(plan_equal(bytes, share->from, share->ranks), share), false);
        break;
    default:
        plan->is_chained = false;
        plan->is_own_input = true;
        add_step(plan, part(all, share), part(all, share), false);
        break;
    }
}

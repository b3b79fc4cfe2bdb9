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

/* The part of a block that the comm carries. */
static struct range part(struct range block, const struct route *route)
{
    struct range inner = plan_block(block.len, route->comm, route->comms);

    inner.offset += block.offset;
    return inner;
}

static int chunks_of(const struct plan *plan, const struct range *range)
{
    return range->len ? (int)((range->len + plan->chunk_bytes - 1) / plan->chunk_bytes) : 1;
}

int plan_chunks(const struct plan *plan, const struct range *range, int multi)
{
    int left = chunks_of(plan, range) - multi * plan->per_receive;

    return left > plan->per_receive ? plan->per_receive : left > 0 ? left : 0;
}

struct range plan_chunk(const struct plan *plan, const struct range *range, int multi, int i)
{
    size_t from = ((size_t)multi * plan->per_receive + i) * plan->chunk_bytes;
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

    *step = (struct step){.send = send, .recv = recv, .is_added = is_added, .receives_before = plan->receives};
    plan->receives += (chunks_of(plan, &recv) + plan->per_receive - 1) / plan->per_receive;
}

/* n - 1 steps around the ring of ranks; in step s the rank sends block first - s and receives the one before it. */
static void add_ring(struct plan *plan, size_t bytes, const struct route *route, int first, bool is_added)
{
    for (int s = 0; s < route->ranks - 1; s++) {
        struct range send = plan_block(bytes, wrap(first - s, route->ranks), route->ranks);
        struct range recv = plan_block(bytes, wrap(first - s - 1, route->ranks), route->ranks);

        add_step(plan, part(send, route), part(recv, route), is_added);
    }
}

void plan_make(struct plan *plan, const struct options *options, size_t bytes, const struct route *route)
{
    struct range all = {.len = bytes};

    *plan = (struct plan){.chunk_bytes = options->chunk_bytes, .per_receive = options->per_receive, .is_chained = true};
    switch (options->op) {
    /* after the first round, this rank has the sum of block rank + 1; the second round passes it on */
    case OP_ALLREDUCE:
        add_ring(plan, bytes, route, route->rank, true);
        add_ring(plan, bytes, route, route->rank + 1, false);
        break;
    case OP_REDUCESCATTER: /* begins with block rank - 1, so that this rank's own block becomes complete here */
        add_ring(plan, bytes, route, route->rank - 1, true);
        break;
    case OP_ALLGATHER:
        add_ring(plan, bytes, route, route->rank, false);
        break;
    case OP_ALLTOALL:
        plan->is_chained = false;
        plan->is_own_input = true;
        add_step(plan, part(plan_equal(bytes, route->to, route->ranks), route),
                 part(plan_equal(bytes, route->from, route->ranks), route), false);
        break;
    default:
        plan->is_chained = false;
        plan->is_own_input = true;
        add_step(plan, part(all, route), part(all, route), false);
        break;
    }
}

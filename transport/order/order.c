/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/order/order.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "transport/order/op.h"
#include "transport/order/order_queue.h"
#include "transport/order/stripe.h"
#include "transport/order/wire.h"
#include "transport/util/error.h"

enum {
    MEASURE_MIN_BYTES = 65536, /* shorter intervals measure latency, not rate */
    MEASURE_OLD = 7,           /* weight of the former rate; that of a new sample is 1 */
};

/* Take `count` elements from the memory at *at, and advance it. Return NULL if count is 0. */
static void *carve(char **at, size_t count, size_t each)
{
    void *from = *at;

    *at += count * each;
    return count ? from : NULL;
}

/* Arrays with words of 8 bytes follow each other without gaps. */
enum { WORD = sizeof(uint64_t) };
static_assert(sizeof(struct prs_order_queue) % WORD == 0 && sizeof(struct prs_order_path) % WORD == 0 &&
                  sizeof(struct prs_order_group) % WORD == 0 && sizeof(struct prs_order_held) % WORD == 0 &&
                  sizeof(struct prs_wr) % WORD == 0 && sizeof(struct prs_order_aim) % WORD == 0,
              "make_room() keeps each array aligned only if the elements of the one before fill whole words");

/* Take a piece of memory for the state, and one for the slots, as large as these options need. Return 0 or -ENOMEM. */
static int make_room(struct prs_order *order, const struct prs_order_options *options, bool fails_over)
{
    uint32_t data = order->data_queues, paths = order->path_count, queues = data + paths;
    uint32_t groups = order->policy == PRS_POLICY_COUNTED ? 0 : PRS_ORDER_GROUPS;
    uint32_t held = order->may_hold ? PRS_ORDER_HELD : 0;
    uint32_t probe_depth = options->probe_depth ? options->probe_depth : options->depth;
    size_t positions = (size_t)(groups + held + 1) * data;
    size_t slots = (size_t)data * options->depth + (size_t)paths * probe_depth;
    size_t state_bytes;
    uint32_t aim_keys = 0;
    uint32_t *position;
    char *at;

    positions += positions % 2; /* to a whole word */
    state_bytes = queues * sizeof(*order->queue) + paths * sizeof(*order->path) + groups * sizeof(*order->group) +
                  held * sizeof(*order->held) + positions * sizeof(*position);
    for (uint32_t i = 0; i < paths; i++)
        if (options->path[i].remote_rail >= aim_keys)
            aim_keys = options->path[i].remote_rail + 1;
    order->slot_bytes =
        slots * sizeof(struct prs_wr) + (fails_over ? (size_t)data * options->depth * aim_bytes(aim_keys) : 0);
    order->state = at = prs_lines_calloc(state_bytes);
    order->slots = prs_pages_alloc(order->slot_bytes);
    if (!order->state || !order->slots) {
        prs_order_fini(order);
        return prs_fail(-ENOMEM, "order: no memory for %u queues of %u slots", queues, options->depth);
    }
    order->queue = carve(&at, queues, sizeof(*order->queue));
    order->path = carve(&at, paths, sizeof(*order->path));
    order->group = carve(&at, groups, sizeof(*order->group));
    order->held = carve(&at, held, sizeof(*order->held));
    position = carve(&at, positions, sizeof(*position));
    order->signal_last = position;
    for (uint32_t i = 0; i < groups; i++)
        order->group[i].last = position += data;
    for (uint32_t i = 0; i < held; i++)
        order->held[i].need_position = position += data;
    at = order->slots;
    for (uint32_t i = 0; i < queues; i++) {
        struct prs_order_queue *queue = &order->queue[i];
        uint32_t depth = i < data ? options->depth : probe_depth;

        queue->mask = depth - 1;
        queue->wr = carve(&at, depth, sizeof(*queue->wr));
        queue->aim_keys = aim_keys;
        queue->aim = carve(&at, fails_over && i < data ? depth : 0, aim_bytes(aim_keys));
    }
    return 0;
}

int prs_order_init(struct prs_order *order, const struct prs_order_options *options)
{
    uint32_t paths = options->path_count, data = paths * options->queues_per_path;
    bool fails_over = options->failover && paths > 1 && options->in_order && options->policy == PRS_POLICY_COUNTED;
    bool waits;
    int r;

    if (paths == 0 || paths > PRS_MAX_RAILS || data > PRS_ORDER_MAX_DATA_QUEUES || options->max_ops == 0 ||
        options->depth == 0 || (options->depth & (options->depth - 1)) ||
        (options->probe_depth & (options->probe_depth - 1)))
        return prs_fail(-EINVAL, "order: impossible shape: %u paths, %u queues, window %u, depth %u", paths, data,
                        options->max_ops, options->depth);
    memset(order, 0, sizeof(*order));
    order->policy = options->policy;
    order->max_ops = options->max_ops;
    order->ordered_writes = options->in_order && !options->adaptive_routing;
    waits = options->policy == PRS_POLICY_IN_ORDER && (data > 1 || !order->ordered_writes);
    order->tracks_groups = options->policy == PRS_POLICY_NIC_FENCE || waits;
    order->one_in_order = options->policy == PRS_POLICY_IN_ORDER && !waits;
    order->may_hold = options->policy == PRS_POLICY_DRAIN || waits ||
                      (options->policy == PRS_POLICY_NIC_FENCE && !order->ordered_writes);
    order->in_order = options->in_order;
    order->fence = options->fence;
    order->max_run = options->in_order ? PRS_IMM_MAX_RUN : 1;
    order->path_count = paths;
    order->data_queues = data;
    order->probe_queues = paths;
    order->split_queues = options->split_queues;
    order->max_part_bytes = options->max_part_bytes;
    order->split_bytes = data > 1 && options->policy != PRS_POLICY_NIC_FENCE ? 2 * STRIPE_MIN_BYTES : ~0ull;
    if (order->split_bytes > order->max_part_bytes)
        order->split_bytes = order->max_part_bytes;
    /* Without order on a queue, the second write could arrive before the first. */
    order->plain_bytes = options->plain_bytes && options->in_order ? options->plain_bytes : ~0ull;
    order->whole_bytes = order->plain_bytes < order->split_bytes ? order->plain_bytes : order->split_bytes;
    r = make_room(order, options, fails_over);
    if (r)
        return r;
    memcpy(order->path, options->path, paths * sizeof(*order->path));
    for (uint32_t i = 1; i < paths; i++)
        if (options->path[i].remote_rail < options->path[order->add_path].remote_rail)
            order->add_path = i;
    prs_op_start(&order->no_op, 1u << 31); /* so many parts that it is never done */
    for (uint32_t i = 0; i < data + paths; i++) {
        struct prs_order_queue *queue = &order->queue[i];

        queue->path = i < data ? i % paths : i - data;
        queue->local_rail = options->path[queue->path].local_rail;
        queue->remote_rail = options->path[queue->path].remote_rail;
    }
    prs_order_rest(order);
    return 0;
}

void prs_order_refuse_signals(struct prs_order *order)
{
    order->tally = &prs_tally_full;
}

void prs_order_fini(struct prs_order *order)
{
    if (order->tally != &prs_tally_full)
        free(order->tally);
    prs_pages_free(order->slots, order->slot_bytes);
    prs_lines_free(order->state);
    memset(order, 0, sizeof(*order));
}

int prs_order_set_records(struct prs_order *order, uint64_t record_addr, const uint64_t *record_key,
                          const uint64_t *credit_word)
{
    order->tally = malloc(sizeof(*order->tally));
    if (!order->tally)
        return prs_fail(-ENOMEM, "order: no memory to count groups");
    prs_tally_init(order->tally, credit_word);
    order->record_addr = record_addr;
    memcpy(order->record_key, record_key, sizeof(order->record_key));
    return 0;
}

void prs_order_set_sizes(struct prs_order *order, uint64_t size_addr, const uint64_t *size_key)
{
    order->size_addr = size_addr;
    memcpy(order->size_key, size_key, sizeof(order->size_key));
}

/* ---- post, complete ---- */

bool prs_order_take(struct prs_order *order, uint64_t now_ns, struct prs_chain *out)
{
    struct prs_order_queue *queue;
    uint32_t index;

    if (!order->dirty)
        return false;
    index = lowest(order->dirty);
    order->dirty &= order->dirty - 1;
    queue = &order->queue[index];
    *out = (struct prs_chain){index, queue->posted, queue->head - queue->posted};
    /* Unsignaled requests keep their slots and ops until a later one completes: that must not take long. */
    /* MUTANT(order) lazy requests are signaled now and then: s/queue->head - queue->signaled >= PRS_ORDER_LAZY ||// */
    /* MUTANT(order) a chain that is waited for ends signaled: s/eager || queue->// */
    if (queue->eager || queue->head - queue->signaled >= PRS_ORDER_LAZY || order->ops >= order->max_ops / 2)
        signal_request(order, queue, queue->head - 1);
    queue->eager = false;
    queue->posted = queue->head;
    /* MUTANT(order) a posted request is in no run any more: delete */
    end_run(queue); /* a posted request can no longer give its immediate away */
    if (now_ns && !order->path[queue->path].since_ns)
        order->path[queue->path].since_ns = now_ns;
    return true;
}

/* Update the rate of a path after bytes have completed on it. */
static void measure(struct prs_order_path *path, uint64_t bytes, uint64_t now_ns)
{
    path->done_bytes += bytes;
    if (path->since_ns && path->done_bytes >= MEASURE_MIN_BYTES && now_ns > path->since_ns) {
        float sample = (float)path->done_bytes * 1000 / (float)(now_ns - path->since_ns);

        /* MUTANT(order) a finished path is measured: delete */
        path->rate = (path->rate * MEASURE_OLD + sample) / (MEASURE_OLD + 1);
        path->done_bytes = 0;
        path->since_ns = now_ns;
    }
    if (path->inflight_bytes == 0) {
        path->done_bytes = 0;
        path->since_ns = 0;
    }
}

/* Subtract the requests that retire next from the backlog by which queues are chosen. */
static void remove_backlog(struct prs_order *order, struct prs_order_queue *queue, uint32_t count, uint64_t now_ns)
{
    struct prs_order_path *path = &order->path[queue->path];
    uint64_t bytes = 0;

    for (uint32_t i = 0; i < count; i++)
        bytes += queue->wr[(queue->tail + i) & queue->mask].len_bytes;
    queue->backlog_bytes -= bytes;
    path->inflight_bytes -= bytes;
    if (now_ns)
        measure(path, bytes, now_ns);
}

/* MUTANT(order) a completion retires all before it:
 * s/do done += retire(w[tail++ & mask].owner); while (tail != end)/done += retire(w[tail & mask].owner); tail = end/ */
int prs_order_complete(struct prs_order *order, uint32_t index, uint32_t position, uint64_t now_ns)
{
    struct prs_order_queue *queue = &order->queue[index];
    uint32_t tail = queue->tail, end = position + 1, mask = queue->mask, done = 0;
    const struct prs_wr *w = queue->wr;

    /* MUTANT(order) an impossible completion is refused: delete */
    if (position - tail >= queue->posted - tail)
        return -EPROTO;
    if (order->data_queues > 1 && index < order->data_queues)
        remove_backlog(order, queue, end - tail, now_ns);
    do
        done += retire(w[tail++ & mask].owner);
    while (tail != end);
    /* With many peers, a cache may have the first slot of an empty ring, and no other. */
    /* MUTANT(order) an empty ring goes on at its first slot: delete */
    if (tail == queue->head)
        queue->head = queue->posted = queue->signaled = tail = (tail | mask) + 1;
    queue->tail = tail;
    order->ops -= done;
    order->signaled--;
    order->no_op.parts = 1u << 31; /* so that it never reaches zero */
    /* MUTANT(order) a completion looks after held signals: delete */
    if (order->held_count)
        prs_order_release(order);
    /* MUTANT(order) a completion makes room for replays: delete */
    if (order->replaying)
        prs_order_replay(order);
    return (int)done;
}

void prs_order_fail(struct prs_order *order, int status)
{
    for (uint32_t i = 0; i < order->data_queues + order->probe_queues; i++) {
        struct prs_order_queue *queue = &order->queue[i];

        for (; queue->tail != queue->head; queue->tail++)
            for (struct prs_op *owner = queue->wr[queue->tail & queue->mask].owner; owner;)
                prs_op_fail(owner_pop(&owner), status);
        queue->posted = queue->head;
    }
    for (; order->held_count; order->held_count--) {
        /* MUTANT(order) failing ends held signals too: delete */
        prs_op_fail(order->held[order->held_first].op, status);
        order->held_first = (order->held_first + 1) % PRS_ORDER_HELD;
    }
    order->dirty = 0;
    order->replaying = 0;
    order->ops = 0;
    order->signaled = 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/order/order_cut.h"

#include <assert.h>
#include <errno.h>

#include "transport/order/wire.h"
#include "transport/util/error.h"

/* Choose the queue of a path for the next long message: the one with the least backlog, and among equal ones the next
 * in turn. */
static uint32_t take_turn(struct prs_order *order, uint32_t path)
{
    uint32_t each = order->data_queues / order->path_count, last = order->path[path].turn, best = 0;

    for (uint32_t k = 1; k <= each; k++) {
        uint32_t turn = (last + k) % each;
        uint64_t backlog = order->queue[turn * order->path_count + path].backlog_bytes;

        if (k == 1 || backlog < order->queue[best * order->path_count + path].backlog_bytes)
            best = turn;
    }
    order->path[path].turn = best;
    return best * order->path_count + path;
}

/* Use one queue of each path, so that there are no more requests than paths. */
static void cut_over_paths(struct prs_order *order, uint64_t len_bytes, struct prs_stripe *stripes)
{
    struct prs_stripe path[PRS_MAX_RAILS];

    for (uint32_t i = 0; i < order->path_count; i++)
        path[i] = (struct prs_stripe){.rate = order->path[i].rate, .backlog_bytes = order->path[i].inflight_bytes};
    prs_stripe_cut(path, order->path_count, len_bytes);
    for (uint32_t i = 0; i < order->data_queues; i++)
        stripes[i].bytes = 0;
    for (uint32_t i = 0; i < order->path_count; i++)
        if (path[i].bytes)
            stripes[take_turn(order, i)].bytes = path[i].bytes;
}

uint32_t prs_order_cut(struct prs_order *order, uint64_t len_bytes, int only_queue, uint32_t slots,
                       struct prs_stripe *stripes)
{
    uint32_t parts = 0;

    if (only_queue >= 0) {
        for (uint32_t i = 0; i < order->data_queues; i++)
            stripes[i].bytes = i == (uint32_t)only_queue ? len_bytes : 0;
    } else if (!order->split_queues) {
        cut_over_paths(order, len_bytes, stripes);
    } else {
        prs_order_backlogs(order, stripes);
        prs_stripe_cut(stripes, order->data_queues, len_bytes);
    }
    for (uint32_t i = 0; i < order->data_queues; i++) {
        const struct prs_order_queue *queue = &order->queue[i];
        uint64_t here = (stripes[i].bytes + order->max_part_bytes - 1) / order->max_part_bytes;

        /* MUTANT(order) a cut put needs room on each queue: delete */
        if (here * slots > queue->mask + 1 - (queue->head - queue->tail))
            return 0; /* no room on that queue now */
        parts += (uint32_t)here;
    }
    return parts;
}

bool prs_order_next_part(const struct prs_order *order, const struct prs_stripe *stripes, struct prs_order_part *part)
{
    /* MUTANT(order) the parts of a message do not overlap: delete */
    part->offset += part->bytes;
    part->left -= part->bytes;
    while (!part->left) {
        if (++part->queue == order->data_queues)
            return false;
        part->left = stripes[part->queue].bytes;
    }
    /* MUTANT(order) no part is longer than the NIC takes:
     * s/(part->left < order->max_part_bytes ? part->left : order->max_part_bytes)/part->left/ */
    part->bytes = (uint32_t)(part->left < order->max_part_bytes ? part->left : order->max_part_bytes);
    return true;
}

static_assert(PRS_ORDER_SURE_PARTS + PRS_ORDER_MAX_DATA_QUEUES <= PRS_IMM_MAX_PARTS,
              "as prs_order_check_parts() has it");

int prs_order_check_parts(const struct prs_order *order, const char *what, uint64_t len_bytes, bool notified,
                          bool one_queue)
{
    uint64_t parts = len_bytes / order->max_part_bytes, most = UINT64_MAX;

    if (notified)
        most = PRS_IMM_MAX_PARTS - order->data_queues; /* worst case: every queue adds one partly filled request */
    if ((one_queue || order->data_queues == 1) && most > order->queue[0].mask)
        most = order->queue[0].mask;
    return parts <= most ? 0
                         : prs_fail(-EINVAL, "%s of %llu bytes: more than %llu parts of %llu bytes", what,
                                    (unsigned long long)len_bytes, (unsigned long long)most,
                                    (unsigned long long)order->max_part_bytes);
}

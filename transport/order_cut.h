/* SPDX-License-Identifier: Apache-2.0 */
/* Inside the order engine: a long message cut over queues and into requests. Nobody else includes it. */
#ifndef TRANSPORT_ORDER_CUT_H
#define TRANSPORT_ORDER_CUT_H

#include "transport/order.h"
#include "transport/stripe.h"

/* How fast each data queue is, and what waits there. lanes: of PRS_ORDER_MAX_DATA_QUEUES. In each small put. */
static inline void prs_order_lanes(const struct prs_order *order, struct prs_lane *lanes)
{
    float queues_per_path = (float)(order->data_queues / order->path_count);

    for (uint32_t i = 0; i < order->data_queues; i++) {
        lanes[i].rate = order->path[order->queue[i].path].rate / queues_per_path;
        lanes[i].backlog_bytes = order->queue[i].backlog_bytes;
    }
}

/* What could never leave is refused: a notification tells of so many parts at most, and a queue has so many slots.
 * what: for the error. 0 or -EINVAL. */
int prs_order_check_parts(const struct prs_order *order, const char *what, uint64_t len_bytes, bool notified,
                          bool one_queue);

/* Shares a message out, by speed and backlog or all to only_queue (-1: to any); shares longer than max_part_bytes are
 * cut again on their queue. Returns how many requests that makes, 0 when a queue has no room for its own now. */
uint32_t prs_order_cut(struct prs_order *order, uint64_t len_bytes, int only_queue, struct prs_lane *lanes);

/* One request of a message that has been shared out. */
struct prs_order_part {
    uint32_t queue;
    uint32_t bytes;
    uint64_t offset;
    uint64_t left; /* of the queue's share, with this part */
};

#define PRS_ORDER_FIRST_PART ((struct prs_order_part){.queue = UINT32_MAX}) /* before it */

/* The next; false: that was the last. */
bool prs_order_next_part(const struct prs_order *order, const struct prs_lane *lanes, struct prs_order_part *part);

#endif

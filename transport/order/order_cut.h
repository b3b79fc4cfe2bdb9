/* SPDX-License-Identifier: Apache-2.0 */
/* Private to the order engine: how a long message is cut over queues and into requests. */
#ifndef TRANSPORT_ORDER_CUT_H
#define TRANSPORT_ORDER_CUT_H

#include "transport/order/order.h"
#include "transport/order/stripe.h"

/* Fill in the rate and backlog of each data queue, into PRS_ORDER_MAX_DATA_QUEUES stripes. Inline: small puts call
 * it. */
static inline void prs_order_backlogs(const struct prs_order *order, struct prs_stripe *stripes)
{
    float queues_per_path = (float)(order->data_queues / order->path_count);

    for (uint32_t i = 0; i < order->data_queues; i++) {
        stripes[i].rate = order->path[order->queue[i].path].rate / queues_per_path;
        stripes[i].backlog_bytes = order->queue[i].backlog_bytes;
    }
}

/* Refuse a message that could never be posted: the parts of a notification and the slots of a queue are limited. what:
 * the op's name in the error. Return 0 or -EINVAL. */
int prs_order_check_parts(const struct prs_order *order, const char *what, uint64_t len_bytes, bool notified,
                          bool one_queue);

/* Cut a message over the queues, by speed and backlog, or give all to only_queue (-1: any). A stripe longer than
 * max_part_bytes becomes several parts, and each part takes `slots` slots. Return the number of parts; 0 when a queue
 * has no room for its parts now. */
uint32_t prs_order_cut(struct prs_order *order, uint64_t len_bytes, int only_queue, uint32_t slots,
                       struct prs_stripe *stripes);

/* One request of a message that has been cut. */
struct prs_order_part {
    uint32_t queue;
    uint32_t bytes;
    uint64_t offset;
    uint64_t left; /* of the stripe, this part included */
};

#define PRS_ORDER_FIRST_PART ((struct prs_order_part){.queue = UINT32_MAX}) /* the one before it */

/* Go on to the next part. Return false after the last. */
bool prs_order_next_part(const struct prs_order *order, const struct prs_stripe *stripes, struct prs_order_part *part);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* Lets an order engine begin as if it had run for long: all its counters have this value. Near 2^32 they wrap. */
#ifndef TEST_SUPPORT_ORDER_START_H
#define TEST_SUPPORT_ORDER_START_H

#include "transport/order/order.h"

static inline void order_start(struct prs_order *order, uint32_t position)
{
    for (uint32_t q = 0; q < order->data_queues + order->probe_queues; q++) {
        struct prs_order_queue *queue = &order->queue[q];

        queue->head = queue->posted = queue->tail = queue->signaled = position;
        queue->last_read = queue->last_transfer = queue->last_ordered = position; /* all done */
        queue->immediates = position;
    }
    order->last_word = order->last_touch = position;
    if (order->tally)
        order->tally->next_number = order->tally->credited = order->tally->asked = position;
}

#endif

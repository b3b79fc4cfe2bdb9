/* SPDX-License-Identifier: Apache-2.0 */
/* The loss of a rail that a row describes, and what tests of lost rails share. */
#ifndef TEST_TRANSPORT_LOSS_H
#define TEST_TRANSPORT_LOSS_H

#include "test/transport/pair.h"

enum { SLOTS = 16, SLOT_BYTES = 256 << 10, MESSAGES = 400, ACK = 512, EMPTY = 0xee };

enum fault {
    RAIL_ERROR = 3,  /* as QUEUE_ERROR, also with the queue to this side itself, by which it flushes */
    QUEUE_ERROR = 1, /* this side's queues of the path go to the error state */
    DEVICE_DEAD = 4, /* this side's NIC takes no command and completes nothing any more */
    PORT_DOWN = 2,   /* this side's NIC reports that its port is down. The queues work: what is under way still lands */
};

struct loss {
    int side; /* 0: the sender loses it, 1: the receiver */
    enum fault fault;
    uint32_t path, at; /* the number of the message */
};

extern struct loss loss; /* of the row, in this process and its sides */

/* In a side: read the row that run_row() has given. */
void find_loss(void);
/* Run both sides of a row. */
void run_row(const struct loss *row, pair_fn *a, pair_fn *b);
void run_row_of(const struct loss *row, pair_fn *a, pair_fn *b, bool words_on_device);

size_t length_of(uint32_t message);
void progress(struct pair *pair);
/* Nothing was written to the slot since it was emptied. */
void must_be_empty(const struct pair *pair, uint32_t slot);

#endif

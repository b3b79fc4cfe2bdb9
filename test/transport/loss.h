/* SPDX-License-Identifier: Apache-2.0 */
/* The rails that a row loses, and what tests of lost rails share. */
#ifndef TEST_TRANSPORT_LOSS_H
#define TEST_TRANSPORT_LOSS_H

#include "test/transport/pair.h"

enum { SLOTS = 16, SLOT_BYTES = 256 << 10, MESSAGES = 400, ACK = 512, EMPTY = 0xee, MOST_LOSSES = 3 };

enum fault {
    RAIL_ERROR = 3,  /* as QUEUE_ERROR, also with the queue to this side itself, by which it flushes */
    QUEUE_ERROR = 1, /* this side's queues of the path go to the error state */
    DEVICE_DEAD = 4, /* this side's NIC takes no command and completes nothing any more */
    /* this side's NIC reports that its port is down. The queues work: requests in flight still arrive */
    PORT_DOWN = 2,
};

struct loss {
    int side; /* 0: the sender loses it, 1: the receiver */
    enum fault fault;
    uint32_t path, at; /* the number of the message */
    bool after;        /* the loss before this one has been agreed on */
};

/* Losses of the row, in this process and its sides. Most rows lose one rail. */
extern struct loss loss[MOST_LOSSES];
extern uint32_t losses;

/* In a side: read the row that run_row() has given. */
void find_loss(void);
/* In a side: lose the rails that the row loses at this message. */
void lose_rails(struct pair *pair, uint32_t message);
/* Has this side given up the path of loss number i? */
bool is_down(const struct pair *pair, uint32_t i);
bool are_down(const struct pair *pair); /* all of them? */
/* Run both sides of a row. */
void run_row(const struct loss *row, pair_fn *a, pair_fn *b);
void run_row_of(const struct loss *row, pair_fn *a, pair_fn *b, bool words_on_device);
/* Likewise with one rail, for which another stands by. */
void run_single_row(const struct loss *row, pair_fn *a, pair_fn *b, bool words_on_device);
/* Run both sides of a row that loses `count` of `rails` rails. */
void run_losses(const struct loss *row, uint32_t count, int rails, pair_fn *a, pair_fn *b);

/* The sides of a row: MESSAGES messages go on, arrive once each and whole, and nothing is written late. */
void send_messages(struct pair *pair);
void receive_messages(struct pair *pair);

size_t length_of(uint32_t message);
void progress(struct pair *pair);
/* Nothing was written to the slot since it was emptied. */
void must_be_empty(const struct pair *pair, uint32_t slot);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What one comm sends and receives in one iteration of an operation: steps, each of a range to send and a range to
 * receive. A range is cut into chunks, one message each; a multi-receive is one irecv for several chunks. A chunk of a
 * step may be sent when the multi-receive that holds it in the previous step is complete (and added). */
#ifndef NETBENCH_PLAN_H
#define NETBENCH_PLAN_H

#include "tools/netbench/options.h"

struct range {
    size_t offset, len; /* in the rank's buffer */
};

struct step {
    struct range send, recv;
    bool is_added;       /* arriving data is added to the buffer; else it replaces the buffer */
    int receives_before; /* multi-receives of the earlier steps */
};

struct plan {
    int steps;
    bool is_chained;   /* a step sends the data that the previous one received */
    bool is_own_input; /* sent from an input buffer, not from the buffer that is received into */
    size_t chunk_bytes;
    int per_receive; /* chunks of a multi-receive */
    int receives;    /* multi-receives of all steps */
    struct step step[2 * RANKS_MAX];
};

/* The ranks that a comm connects, and which of the comms it is. */
struct route {
    int rank, ranks, to, from, comm, comms;
};

void plan_make(struct plan *plan, const struct options *options, size_t bytes, const struct route *route);

/* Block q of n of all bytes. */
struct range plan_block(size_t bytes, int q, int n);

/* Block q of n equal ones; the rest of the bytes is left out, as in an alltoall. */
struct range plan_equal(size_t bytes, int q, int n);

/* How many chunks a multi-receive of a range has; 0 when there is no such multi-receive. An empty range has one chunk,
 * of no bytes. */
int plan_chunks(const struct plan *plan, const struct range *range, int multi);
struct range plan_chunk(const struct plan *plan, const struct range *range, int multi, int i);

#endif

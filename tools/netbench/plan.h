/* SPDX-License-Identifier: Apache-2.0 */
/**
 * What one comm sends and receives in one iteration of an operation: steps, each a range sent and a range received, cut
 * into groups of chunks. A group of a step may be sent when the same group of the step before has been received (and
 * added).
 */
#ifndef NETBENCH_PLAN_H
#define NETBENCH_PLAN_H

#include "tools/netbench/options.h"

struct range {
    size_t offset, len; /* in the rank's buffer */
};

struct step {
    struct range send, recv;
    bool is_added;   /* what arrives is added to what is there; else it replaces it */
    int recv_before; /* groups of the earlier steps */
};

struct plan {
    int steps;
    bool is_chained;   /* a step needs the one before */
    bool is_own_input; /* sent from a buffer of its own rather than from the one received into */
    size_t chunk_bytes;
    int group;
    int recv_groups; /* of all steps */
    struct step step[2 * RANKS_MAX];
};

/** One comm's neighbours and share. */
struct share {
    int rank, ranks, to, from, comm, comms;
};

void plan_make(struct plan *plan, const struct options *options, size_t bytes, const struct share *share);

/** Block q of n of all bytes. */
struct range plan_block(size_t bytes, int q, int n);

/** Block q of n equal ones; the rest of the bytes is left out, as in an alltoall. */
struct range plan_equal(size_t bytes, int q, int n);

/** Chunks in group g of a range (at least one chunk, of no bytes, even in an empty range); 0 when there is no such
 * group. */
int plan_chunks(const struct plan *plan, const struct range *range, int g);
struct range plan_chunk(const struct plan *plan, const struct range *range, int g, int i);

#endif

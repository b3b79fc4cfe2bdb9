/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels' protocol on threads: the schedules and flags of fused/gemm/schedule.h, with one word in place of each
 * piece of data. Data are plain memory, flags are atomics with the kernels' memory orders, so that ThreadSanitizer
 * finds a wait that is missing or too weak. Each cluster is a thread that computes, one that stores and one that pushes
 * or spreads; they claim their work from counters, and only some clusters of a launch may run at a time. Ranks run
 * free, with random delays, through many epochs that begin shortly before the epoch wraps.
 * Between nodes one thread per rank plays proxy and NIC: puts are done in any order, a signal after the puts of its
 * group. */
#ifndef TEST_FUSED_MODEL_H
#define TEST_FUSED_MODEL_H

#include "fused/core/sync.h"
#include "fused/gemm/schedule.h"
#include "test/fused/nic.h"

enum { WORLD = 4, CLUSTERS = 3, ROLES = 3, HALVES = 2, CTAS = 2, SLABS = 2 };

/* A slab that a computing thread hands to its storing thread. */
struct slab {
    struct prs_unit unit; /* block WORLD: there are no more slabs */
    uint32_t cta, half, value;
    uint32_t full; /* atomic: 1 full, 0 free */
};

struct cluster {
    struct model *model;
    uint32_t rank, index;
    struct slab slabs[SLABS];
    struct slab left[CTAS * HALVES]; /* what each warpgroup keeps in registers, as in multiply.cuh */
    bool any_left[CTAS * HALVES];
    uint32_t filled, stored;
    uint32_t random[ROLES];
    uint32_t exits; /* atomic: roles that have left, over all epochs */
};

struct rank {
    struct prs_schedule most, s;  /* most: for the most rows; s: of this epoch */
    uint32_t claimed[PRS_CLAIMS]; /* atomic */
    uint32_t flag_bank;
    uint32_t *staging[2];        /* plain */
    uint32_t *result;            /* plain */
    uint32_t *flags, *done;      /* atomic */
    uint32_t *signals, *counter; /* atomic; between nodes */
    uint32_t epoch, exits;       /* atomic: as in prs_plan_words */
    uint32_t finished;           /* atomic: clusters that have left, over all epochs */
    struct nic nic;
};

struct model_run {
    uint32_t op, nodes, m, n, k, band, segments, group;
    uint32_t epochs, lost_after; /* the last node stops after lost_after epochs; 0: it does not stop */
    uint32_t resident;           /* clusters of a rank that run at a time; 0: all */
    bool any_rows;               /* each epoch has its own number of rows, at most m */
};

struct model {
    struct rank ranks[WORLD];
    struct cluster clusters[WORLD][CLUSTERS];
    struct watch watch;
    uint32_t epochs;
    struct model_run run;
};

/* Runs the model, and returns it for the test's checks; model_close() frees it. */
struct model *model_run(const struct model_run *run);
void model_close(struct model *m);

/* ---- shared by the roles ---- */
/* Takes the next piece of this kind of work. */
uint32_t model_claim(struct rank *r, enum prs_gemm_claims kind);
/* All-gather: an arrival counter, and an all-reduce's counter of broadcasts, in the bank of the epoch. */
uint32_t *model_arrivals(struct rank *r, uint32_t epoch, uint32_t index);
uint32_t *model_done(struct rank *r, uint32_t epoch, uint32_t slot);
uint32_t model_product(uint32_t epoch, uint32_t rank, uint32_t block, uint32_t piece);

/* ---- between nodes (model_far.c) ---- */
void far_relay_tile(struct model *m, uint32_t rank, uint32_t epoch, uint32_t block, uint32_t tile);
void far_put_rows(struct model *m, uint32_t rank, uint32_t epoch, uint32_t row_tile);
void far_relay_chunk(struct model *m, uint32_t rank, uint32_t epoch, const struct prs_chunk *c);
/* at: the first chunk, which is already claimed; this rank's chunks come before those of other nodes. */
bool far_forward_chunks(struct cluster *c, uint32_t epoch, uint32_t at);
bool far_forward_rows(struct cluster *c, uint32_t epoch);

#endif

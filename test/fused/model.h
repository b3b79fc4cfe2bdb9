/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels' protocol on threads: the schedules and flags of fused/gemm/schedule.h, with one word in place of each
 * piece of data. Data are plain memory, flags are atomics with the kernels' memory orders, so that ThreadSanitizer
 * finds a wait that is missing or too weak. Each cluster is a thread that computes, one that stores and one that pushes
 * or spreads; ranks run free, with random delays, through many epochs that begin shortly before the epoch wraps.
 * Between nodes one thread per rank plays proxy and NIC: puts are done in any order, a signal after the puts of its
 * group. */
#ifndef TEST_FUSED_MODEL_H
#define TEST_FUSED_MODEL_H

#include "fused/gemm/schedule.h"
#include "test/fused/nic.h"

enum { WORLD = 4, CLUSTERS = 2, ROLES = 3, HALVES = 2, CTAS = 2, SLABS = 2 };

/* A slab that a computing thread hands to its storing thread. */
struct slab {
    struct prs_unit unit;
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
};

struct rank {
    struct prs_schedule s;
    uint32_t *staging[2];        /* plain */
    uint32_t *result;            /* plain */
    uint32_t *flags, *done;      /* atomic */
    uint32_t *signals, *counter; /* atomic; between nodes */
    uint32_t epoch, exits;       /* atomic: as in prs_plan_words */
    struct nic nic;
};

struct model {
    struct rank ranks[WORLD];
    struct cluster clusters[WORLD][CLUSTERS];
    struct watch watch;
    uint32_t epochs;
};

struct model_run {
    uint32_t op, nodes, m, n, k, band, segments, group;
    uint32_t epochs, lost_after; /* the last node stops after so many; 0: it does not */
};

/* Runs the model, and returns it for the test's checks; model_close() frees it. */
struct model *model_run(const struct model_run *run);
void model_close(struct model *m);

/* ---- shared by the roles ---- */
uint32_t model_product(uint32_t epoch, uint32_t rank, uint32_t block, uint32_t piece);

/* ---- between nodes (model_far.c) ---- */
void far_relay_tile(struct model *m, uint32_t rank, uint32_t epoch, uint32_t block, uint32_t tile);
void far_put_rows(struct model *m, uint32_t rank, uint32_t epoch, uint32_t row_tile);
void far_relay_chunk(struct model *m, uint32_t rank, uint32_t epoch, const struct prs_chunk *c);
bool far_forward_chunks(struct cluster *c, uint32_t epoch);
bool far_forward_rows(struct cluster *c, uint32_t epoch);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels' protocol on threads: the schedules and flags of fused/schedule.h, with one word in place of each piece
 * of data. Data are plain memory, flags are atomics with the orders the kernels use, so that ThreadSanitizer sees a
 * wait that is missing or too weak. Each cluster is a thread that computes, one that stores and one that pushes or
 * spreads; ranks run free, with random delays, through many epochs that begin shortly before the epoch wraps. Between
 * nodes a thread a rank plays proxy and NIC: puts are done in any order, a signal behind the puts of its group. */
#ifndef TEST_FUSED_MODEL_H
#define TEST_FUSED_MODEL_H

#include <pthread.h>
#include <stdbool.h>

#include "fused/schedule.h"

enum { WORLD = 4, CLUSTERS = 2, ROLES = 3, HALVES = 2, CTAS = 2, SLABS = 2, NIC_COMMANDS = 4096 };

#define FIRST_EPOCH 0xfffffff0u

/* One piece on its way from a computing thread to its storing thread. */
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

/* A put (words != 0), or a signal that sets *to to value. */
struct nic_command {
    uint32_t *to;
    const uint32_t *from;
    uint32_t words, value, peer, group;
};

struct nic {
    pthread_mutex_t lock; /* protects the commands */
    struct nic_command commands[NIC_COMMANDS];
    uint32_t count, random;
    uint64_t puts, signals;
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
    uint32_t epochs, wait_seconds;
    uint32_t lost_node, lost_after; /* ranks of this node stop after so many epochs; lost_after 0: never */
    uint32_t stop;                  /* atomic: for the NICs */
    uint32_t failed;                /* atomic: 1 somebody gave up or found a wrong value, 2 and the text is whole */
    char text[160];
};

struct model_run {
    uint32_t kind, nodes, m, n, k, band, lag, segments, in_turn, group;
    uint32_t epochs, wait_seconds, lost_after; /* the last node is the lost one */
};

/* Runs it; gives the model for what the test wants to look at, to be freed by model_close(). */
struct model *model_run(const struct model_run *run);
void model_close(struct model *m);

/* ---- shared by the roles ----------------------------------------------------------------------------------------- */
uint32_t model_load(const uint32_t *p);    /* acquire */
void model_raise(uint32_t *p, uint32_t v); /* release */
void model_fail(struct model *m, const char *what, uint32_t rank, uint32_t index, uint32_t from, uint32_t want,
                uint32_t seen);
/* False: gave up, or somebody else failed. from: the rank that should have raised the flag. */
bool model_wait(struct model *m, const uint32_t *flag, uint32_t want, const char *what, uint32_t rank, uint32_t index,
                uint32_t from);
void model_dawdle(uint32_t *random);
uint32_t model_product(uint32_t epoch, uint32_t rank, uint32_t block, uint32_t piece);

/* ---- between nodes (model_far.c) --------------------------------------------------------------------------------- */
void *nic_thread(void *rank_index_of_model);
struct nic_thread_args {
    struct model *model;
    uint32_t rank;
};
/* Everything that was put has been read, as prs_quiet() says. */
bool far_quiet(struct model *m, uint32_t rank);
void far_relay_tile(struct model *m, uint32_t rank, uint32_t epoch, uint32_t block, uint32_t tile);
void far_put_rows(struct model *m, uint32_t rank, uint32_t epoch, uint32_t row_tile);
void far_relay_chunk(struct model *m, uint32_t rank, uint32_t epoch, const struct prs_chunk *c);
bool far_forward_chunks(struct cluster *c, uint32_t epoch);
bool far_forward_rows(struct cluster *c, uint32_t epoch);

#endif

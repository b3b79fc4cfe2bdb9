/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of MoE: shapes and choices that any rank can recompute, launched by all ranks and compared with a reference. */
#ifndef TEST_HOPPER_MOE_ROWS_H
#define TEST_HOPPER_MOE_ROWS_H

#include <pthread.h>

#include "test/hopper/ranks.h"

enum { MAX_EPOCHS = 64, COLUMNS_PER_ROW = 9, CONTEXT_KEY = 9000 };

/* How tokens choose experts. NO_EXPERT: a token of rank 0 chooses one that does not exist. NO_PLACE: rank 0's map names
 * places that do not exist. */
enum mode { EVEN, ONE_EXPERT, HALF_EMPTY, SOME_NONE, NO_EXPERT, NO_PLACE };

struct row {
    uint32_t world, tokens, hidden, columns, experts, top_k, n_h, epochs;
    enum mode mode;
    uint32_t capacity_of_last; /* 0: room for all rows */
    struct prs_moe_tuning tuning;
    uint32_t lost;              /* 1: the last rank skips the last launch */
    uint32_t nodes;             /* nodes over which the ranks are split; 0: one */
    uint32_t logical, replicas; /* of the map, which differs between launches and ranks; 0: no map */
};

struct run {
    const struct row *row;
    pthread_mutex_t lock;
    uint64_t rows, wrong, dropped; /* rows checked; wrong: map entries and values */
    uint64_t absent, outside;      /* choices */
    int result[RANKS_MAX];
    struct prs_fused_error error[RANKS_MAX];
    char first[200];
};

uint32_t key_of_weights(uint32_t rank);
/* What a rank launches in an epoch. */
void make_batch(const struct row *w, uint32_t rank, uint32_t epoch, uint32_t capacity, const void *weights,
                struct prs_moe_batch *b);
/* Run a row on all its ranks; what they found is in `run`. */
void run_row(const struct row *w, struct run *run);
/* The same; the test fails unless everything is right. i: the number of the row, for messages. */
void run_right(const struct row *row, size_t i, struct run *found);
void assert_right(const struct row *rows, size_t count);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* The protocol of MoE dispatch on threads, as model.h is for the matrix products: fused/moe/route.h with one word in
 * place of each row. Data are plain memory, flags are atomics with the kernels' memory orders, so that ThreadSanitizer
 * finds a wait that is missing or too weak. Every CTA is three threads (load with multiply, place, push), which claim
 * all work from counters, and together also run the rank's two kernels one after the other; ranks run free, with random
 * delays, from shortly before the epoch wraps. Between nodes a rank also has a NIC (nic.h). Choices are new in every
 * epoch: even, all to one expert, half of the experts empty, a node without any, ranks without tokens. */
#ifndef TEST_FUSED_MOE_MODEL_H
#define TEST_FUSED_MOE_MODEL_H

#include "fused/moe/route.h"
#include "test/fused/nic.h"

enum {
    WORLD = 4,
    CTAS = 3,
    CHUNKS = 4,
    THREADS = 3,
    LOCAL = 3,
    EXPERTS = WORLD * LOCAL,
    CHOICES = 3,
    TOKENS = 50,
    COLUMNS = 2
};
enum { BLOCKS = TOKENS * WORLD * CHOICES / PRS_TILE_M + LOCAL + 1, ROWS = BLOCKS * PRS_TILE_M };
enum { NIC_WORDS = WORLD + (WORLD - 1) * TOKENS }; /* signal words at most */

struct rank {
    struct prs_route r;
    /* plain */
    uint16_t chosen[TOKENS][CHOICES]; /* experts, or PRS_ROUTE_NONE */
    uint32_t tokens[TOKENS], count;
    uint32_t chunks[CHUNKS][EXPERTS][3]; /* choices, leads, relay leads */
    uint32_t sent[WORLD][TOKENS], sent_count[WORLD];
    uint32_t relayed[WORLD][TOKENS], relayed_count[WORLD]; /* [distance of the node] */
    uint8_t *messages;
    uint32_t staging[(WORLD - 1) * TOKENS];
    uint32_t relay[2 * (WORLD - 1) * TOKENS];
    struct prs_route_delivery *deliveries[WORLD * TOKENS]; /* each of prs_route_delivery_bytes() */
    struct prs_moe_expert_rows experts[LOCAL];
    uint32_t near[LOCAL]; /* blocks */
    struct prs_moe_row map[ROWS];
    uint32_t blocks, item_count, rows[ROWS], out[ROWS][COLUMNS];
    uint32_t dropped, drops;       /* rows without room in this launch; launches with some */
    uint64_t puts, signals, words; /* expected numbers for other nodes so far */
    /* atomic */
    uint32_t message_flags[WORLD], staging_flags[(WORLD - 1) * TOKENS], ready[BLOCKS];
    uint32_t signal[NIC_WORDS], counters[2 * (WORLD - 1) * TOKENS];
    /* Claimed or counted in this launch: as in struct prs_moe_claims. */
    uint32_t claimed, counted, chunks_sent, parts, units, lists, pushed, relays, forwarded;
    uint32_t exits; /* threads of this launch */
    /* routed, ended: CTAs that have ended the first and the second kernel, over all launches; epoch: launches */
    uint32_t routed, ended, epoch;
    uint32_t early; /* rows of other nodes that were forwarded before all own rows were sent */
    struct nic nic;
};

struct cta {
    struct model *model;
    uint32_t rank, index, role;
    uint32_t random;
};

/* Claims the next position of a list. */
static inline uint32_t model_claim(uint32_t *counter)
{
    return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED);
}

struct model {
    struct rank ranks[WORLD];
    struct cta ctas[WORLD][CTAS][THREADS];
    struct watch watch;
    uint32_t roles_ended[WORLD][CTAS]; /* atomic: over all launches */
    uint32_t epochs, resident;
};

struct model_run {
    uint32_t nodes, put, group;
    uint32_t blocks_of_last;     /* capacity of the last rank */
    uint32_t epochs, lost_after; /* the last node stops after lost_after epochs; 0: it does not stop */
    /* CTAs of a rank that run at a time; one that is not among the first starts when another has left. 0: as many as
     * the rank's number, or all. */
    uint32_t resident;
};

/* Runs the model, and returns it for the test's checks; model_close() frees it. */
struct model *model_run(const struct model_run *run);
void model_close(struct model *m);

/* ---- a launch's two kernels ---- */
/* Tokens and choices of the epoch. */
void model_make_input(struct rank *me, uint32_t epoch);
/* Checks by definition, not by the kernels' tables; then overwrites the results for the next epoch. */
void model_check(struct model *m, uint32_t rank, uint32_t epoch);

bool model_route(struct cta *c, uint32_t epoch);
bool model_place(struct cta *c, uint32_t epoch);
bool model_multiply(struct cta *c, uint32_t epoch);
bool model_send_rows(struct cta *c, uint32_t epoch);

/* ---- values that every rank can compute for every other (moe_check.c) ---- */
uint32_t model_product(uint32_t row, uint32_t expert, uint32_t column);
uint32_t model_weight_bits(uint32_t token, uint32_t slot);

#endif

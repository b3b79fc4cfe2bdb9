/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks as threads of a test, over the emulated GPUs; inputs by chance and a reference in double precision. */
#ifndef TEST_HOPPER_RANKS_H
#define TEST_HOPPER_RANKS_H

#include <perseus/fused.h>
#include <pthread.h>
#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    RANKS_MAX = 8,
    RANKS_PATIENCE_MS = 3000, /* limit of waits where a rank does not come: others may be slow, on a full machine */
};

/* What the ranks meet at. Give ranks_allgather and a struct ranks_seat to prs_fused_config. */
struct ranks_team {
    uint32_t world;
    pthread_barrier_t barrier;
    const void *given[RANKS_MAX];
};
struct ranks_seat {
    struct ranks_team *team;
    uint32_t rank;
};
int ranks_allgather(void *user, const void *mine, void *all, size_t bytes);

/* Calls body(rank, seat, user) on `world` threads and waits for them. */
typedef void ranks_body(uint32_t rank, struct ranks_seat *seat, void *user);
void ranks_run(uint32_t world, ranks_body *body, void *user);

/* The context of one rank, on the GPU of its number. The ranks are split over so many nodes; 0: no word of nodes. */
int ranks_open(struct ranks_seat *seat, uint32_t nodes, uint32_t timeout_ms, struct prs_fused **out);
/* Skips a test of several nodes where there is no verbs device. Each has a process of its own, and looks there. */
void ranks_need_a_device(void);

/* Uniform in [-1, 1), rounded to bf16; the same for the same key. */
float ranks_element(uint32_t key, uint64_t at);
uint16_t ranks_bf16(float v);
float ranks_float(uint16_t v);
/* Device memory on the current device holding elements 0 .. count of a key. */
void *ranks_upload(uint32_t key, uint64_t count);

/* One product on all ranks, `epochs` launches without waiting in between, all checked. */
struct ranks_product {
    struct prs_fused_shape shape;
    struct prs_fused_tuning tuning; /* path: fused unless it says otherwise */
    uint32_t world, epochs, timeout_ms;
    uint32_t replays; /* of a graph that holds all epochs; 0: launched without one */
    uint32_t nodes;   /* ranks are split over so many; 0: one */
};
struct ranks_verdict {
    uint64_t checked, beyond; /* elements; beyond the bound of doc/fused-notes.md, or not written */
    char first[160];          /* the first of those */
    int result;               /* what the calls returned */
};
void ranks_multiply(const struct ranks_product *p, struct ranks_verdict *v);
/* The same on eight new GPUs; the test fails unless all that was checked is right. */
void ranks_assert_right(const struct ranks_product *p);

#ifdef __cplusplus
}
#endif

#endif

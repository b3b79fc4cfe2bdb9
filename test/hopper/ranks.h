/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks as threads of a test, or of a process for each node, on emulated GPUs; random inputs and a reference in double
 * precision. */
#ifndef TEST_HOPPER_RANKS_H
#define TEST_HOPPER_RANKS_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include <perseus/attention.h>
#include <perseus/gemm.h>
#include <perseus/moe.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    RANKS_MAX = 8,
    RANKS_PATIENCE_MS = 3000, /* limit of waits that are long on a busy host */
    RANKS_LOST_MS = 1000,     /* limit of waits for a lost rank of this node; the emulator computes until then */
};

/* The ranks' barrier and all-gather. Give ranks_allgather and a struct ranks_self to prs_fused_config. */
struct ranks_team { /* in memory that processes share */
    uint32_t world;
    pthread_barrier_t barrier;
    uint8_t given[RANKS_MAX][1 << 20];
};
struct ranks_self {
    struct ranks_team *team;
    uint32_t rank;
};
int ranks_allgather(void *user, const void *mine, void *all, size_t bytes);

/* Zeroed memory that processes share; ends the program if there is none. */
void *ranks_map_shared(size_t bytes);
/* Calls body(rank, self, user) on `world` threads and waits for them. */
typedef void ranks_body(uint32_t rank, struct ranks_self *self, void *user);
void ranks_run(uint32_t world, ranks_body *body, void *user);
/* The same, with one process for the ranks of each node. Each process is a node of softnic. `user` is shared memory;
 * this process must not have opened a verbs device, or set up the emulator, before. */
void ranks_run_apart(uint32_t world, uint32_t nodes, ranks_body *body, void *user);
/* Skips the test if softnic's world has fewer nodes. */
void ranks_need_nodes(uint32_t nodes);

/* Opens the context of one rank, on the GPU of the same number. nodes: how many the ranks are split over; 0: not
 * said. */
int ranks_open(struct ranks_self *self, uint32_t nodes, uint32_t timeout_ms, struct prs_fused **out);
/* Sets up one emulated GPU of 4 SMs, and opens a world of one rank on it. */
struct prs_fused *ranks_open_alone(void);
/* Skips the test if there is no verbs device. Each test of several nodes calls it, in its own process. */
void ranks_need_a_device(void);

/* A number that looks random, of three numbers. */
uint32_t ranks_mix(uint32_t a, uint32_t b, uint32_t c);
/* Fills memory of the GPU with a byte, and waits: cudaMemset() returns before it is done, and streams made with
 * cudaStreamNonBlocking do not wait for it. */
void ranks_fill(void *at, int fill, size_t bytes);
/* Memory of the GPU, and a little more, filled with a byte. */
void *ranks_device(size_t bytes, int fill);
/* Memory of the GPU with a copy of memory of the host. */
void *ranks_copy(const void *from, size_t bytes);

/* Rounds to bf16, to nearest even. These four are here because references spend most of their time in them. */
static inline uint16_t ranks_bf16(float v)
{
    uint32_t bits;
    memcpy(&bits, &v, sizeof(bits));
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline float ranks_float(uint16_t v)
{
    uint32_t bits = (uint32_t)v << 16;
    float f;
    memcpy(&f, &bits, sizeof(f));
    return f;
}

/* Uniform in [-1, 1); the same key and index always give the same value. */
static inline float ranks_drawn(uint32_t key, uint64_t at)
{
    uint64_t x = at + ((uint64_t)key << 40);
    x ^= x >> 33, x *= 0xff51afd7ed558ccdull, x ^= x >> 33, x *= 0xc4ceb9fe1a85ec53ull, x ^= x >> 33;
    return (float)(int32_t)(uint32_t)x * 0x1p-31f;
}

/* The same, rounded to bf16. */
static inline float ranks_element(uint32_t key, uint64_t at)
{
    return ranks_float(ranks_bf16(ranks_drawn(key, at)));
}

/* Returns memory of the current device that holds the first `count` elements of a key. */
void *ranks_upload(uint32_t key, uint64_t count);

/* The same for an element type of products (enum prs_dtype). With RANKS_POSITIVE in its key a number is in [1, 2). */
enum { RANKS_POSITIVE = 1 << 23 };
float ranks_element_of(uint32_t dtype, uint32_t key, uint64_t at);
uint16_t ranks_bits(uint32_t dtype, float v); /* rounds to nearest even */
float ranks_value(uint32_t dtype, uint16_t bits);
void *ranks_upload_of(uint32_t dtype, uint32_t key, uint64_t count);

/* A sum of products of e4m3 as Hopper's tensor cores compute it, with the largest error that they may make. They add 32
 * products at a time to what they hold, cut all to 14 bits from the largest exponent among them, and then the sum to 14
 * bits: each loses less than the last of these bits (tools/hopper/wgmma_math.cpp). */
struct ranks_fp8_sum {
    double held, held_lost; /* in the tensor cores' accumulator */
    double sum, lost;       /* what has been promoted */
};
void ranks_fp8_add(struct ranks_fp8_sum *s, const double *products, uint32_t count);
/* Adds the tensor cores' sum, times a factor, to the total, and clears it. */
void ranks_fp8_promote(struct ranks_fp8_sum *s, double factor);

enum ranks_residual { RANKS_NO_RESIDUAL, RANKS_RESIDUAL, RANKS_RESIDUAL_IS_C };

/* One product on all ranks: `epochs` launches without a wait in between, and a check of each. */
struct ranks_product {
    struct prs_gemm_shape shape;
    struct prs_gemm_tuning tuning; /* path: PRS_GEMM_PATH_AUTO means fused here */
    uint32_t world, epochs, timeout_ms;
    uint32_t replays; /* replays of a graph of all epochs; 0: launched without a graph */
    uint32_t nodes;   /* nodes over which the ranks are split; 0: one */
    bool apart;       /* each on a node of softnic, as by ranks_run_apart() */
    bool bias, keeps; /* keeps: the gathered A is written too */
    /* the stream copies the result right after each launch, and the copy is checked */
    bool copied;
    bool positive;                         /* A and B have numbers in [1, 2) */
    uint32_t scale_a_pitch, c_scale_pitch; /* c_scale_pitch: of a C in e4m3 */
    enum ranks_residual residual;
    uint32_t sms; /* of each GPU; 0: 4 */
    bool chosen;  /* the plan has no tuning */
    /* Rows of each launch, at most shape.m; NULL: shape.m. on_device: the kernel finds them on the device. */
    const uint32_t *rows;
    bool on_device;
};
enum { RANKS_EPOCHS_MAX = 128 };
struct ranks_verdict {
    uint64_t checked, beyond; /* elements; beyond: outside the bound of doc/fused-notes.md, or not written */
    char first[160];          /* describes the first such element */
    int result;               /* what the calls returned */
};
void ranks_multiply(const struct ranks_product *p, struct ranks_verdict *v);
/* Multiplies on eight GPUs; the test fails if a call fails or an element is wrong. */
void ranks_assert_right(const struct ranks_product *p);

/* The same for rows of a table. */
struct ranks_row {
    enum prs_gemm_op op;
    uint32_t world, m, n, k, nk, epochs;
    struct prs_gemm_tuning tuning;
};

void ranks_assert_rows_right(const struct ranks_row *rows, size_t count);

/* For a file with rows of its own: assert_right(rows, count) of that file runs them. */
#define ASSERT_RIGHT(...)                                                                                              \
    do {                                                                                                               \
        static const struct row rows_[] = {__VA_ARGS__};                                                               \
        assert_right(rows_, sizeof(rows_) / sizeof(*rows_));                                                           \
    } while (0)

#ifdef __cplusplus
}
#endif

#endif

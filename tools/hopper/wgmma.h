/* SPDX-License-Identifier: Apache-2.0 */
/* The tensor cores: each warpgroup has a queue of operations. */
#ifndef TOOLS_HOPPER_WGMMA_H
#define TOOLS_HOPPER_WGMMA_H

#include <deque>

#include "tools/hopper/device_memory.h"

namespace hopper
{

/* K of an operation: WGMMA_K for types of two bytes, WGMMA_MOST_K for types of one. Either is two chunks of a row. */
enum : uint32_t { WGMMA_M = 64, WGMMA_K = 16, WGMMA_MOST_K = 32, WGMMA_MOST_N = 256, CHUNK = 16 };

/* Accumulators that operations in flight write to. The registers of a thread hold not-a-numbers until it has waited. */
struct accumulators {
    uint32_t n, held;
    float value[WGMMA_M * WGMMA_MOST_N];
    float *home[WARPGROUP];   /* the thread's registers; NULL: not in flight for this thread */
    uint64_t last[WARPGROUP]; /* the number of the thread's last operation on them */
};

struct wgmma_op {
    struct wgmma_call call;
    uint32_t joined;
    struct accumulators *target;
    uint32_t registers[WARPGROUP][4];
    std::vector<uint32_t> a_chunks, b_chunks; /* shared offsets of the 16-byte chunks of the operands */
    uint64_t sum;
};

struct warpgroup {
    struct cta *block;
    uint32_t index;
    std::deque<std::unique_ptr<wgmma_op>> ops; /* operations that have not been executed yet */
    uint64_t executed;
    std::vector<std::unique_ptr<accumulators>> in_flight;
    std::vector<fiber *> waiting;
};

std::shared_ptr<warpgroup> warpgroup_new(struct cta *c);
void wgmma_thread_left(struct fiber *f);

/* wgmma_math.cpp: d[64][n] += a[64][16] b[16][n] */
void wgmma_multiply(float *d, const float *a, const float *b, uint32_t n);
/* d[64][n] += a[64][32] b[32][n], with the precision of FP8 */
void wgmma_multiply_e4m3(float *d, const float *a, const float *b, uint32_t n);

} // namespace hopper

#endif

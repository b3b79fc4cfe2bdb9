/* SPDX-License-Identifier: Apache-2.0 */
/* cuBLASLt, opened at run time: this library loads without it, because only the unfused path needs it. */
#ifndef PERSEUS_FUSED_LT_H
#define PERSEUS_FUSED_LT_H

#include <cuda_runtime_api.h>
#include <stdbool.h>

#include <perseus/gemm.h>

#include "fused/core/element.h"
#include "fused/core/scales.h"

struct prs_lt;

enum { PRS_LT_WORKSPACE = 32 << 20 };

/* Whether cuBLASLt writes its product to other memory, from which another kernel makes C, even if no other rank adds to
 * it. */
static inline bool prs_lt_apart(const struct prs_gemm_shape *s)
{
    return s->gated || s->c_dtype == PRS_DTYPE_E4M3;
}

/* The type of the product that cuBLASLt writes: the type of sums, if it is sent or another kernel makes C from it; else
 * the type of C. */
static inline uint32_t prs_lt_result(const struct prs_gemm_shape *s)
{
    bool result = (s->op == PRS_GEMM_ALONE || s->op == PRS_GEMM_ALLGATHER) && !prs_lt_apart(s);
    return result ? s->c_dtype : s->sum_dtype;
}

/* What a product reads and writes. */
struct prs_lt_operands {
    const void *a, *b;
    const void *add; /* added to the product; laid out like C, and may be C; or NULL */
    void *c;
    /* Scales of e4m3, as in struct prs_gemm_operands. Scales of blocks are prs_lt_scale_pitch() floats apart for A, and
     * prs_lt_block_pitch() for B. */
    const float *scale_a, *scale_b;
};

/* Floats from the scales of one block of K to those of the next, for A of m rows. */
static inline uint64_t prs_lt_scale_pitch(uint32_t m)
{
    return ((uint64_t)m + 3) / 4 * 4;
}

/* Floats from the scales of 128 columns of B to those of the next. */
static inline uint64_t prs_lt_block_pitch(uint32_t k)
{
    return ((uint64_t)k / PRS_SCALE_BLOCK + 3) / 4 * 4;
}

/* For C [m, n] = A [m, k] B on the current device, with any m up to that of the shape. Loads all kernels that
 * prs_lt_run() may launch. *handle: NULL at first; all products of the device share it, and prs_lt_release() releases
 * it after them. workspace: PRS_LT_WORKSPACE bytes that nothing else uses while a product runs. sms: how many SMs it
 * may use at most; 0: all. 0, -ENOTSUP (no cuBLASLt, or none of its kernels fits), -ENOMEM, -EIO. */
int prs_lt_open(void **handle, void *workspace, const struct prs_gemm_shape *shape, uint32_t sms, struct prs_lt **out);
void prs_lt_close(struct prs_lt *lt);
void prs_lt_release(void *handle);
int prs_lt_run(struct prs_lt *lt, uint32_t m, const struct prs_lt_operands *x, cudaStream_t stream);

#endif

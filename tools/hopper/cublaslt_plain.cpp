/* SPDX-License-Identifier: Apache-2.0 */
/* Replaces fused/gemm/unfused/lt.c: a plain kernel in place of cuBLASLt, so that the rest of the unfused path runs on
 * emulated GPUs, in streams and in graphs. */
#include <errno.h>
#include <stdlib.h>

#include "fused/core/launch.cuh"

extern "C" {
#include "fused/gemm/unfused/lt.h"
}

struct prs_lt {
    struct prs_fused_shape shape;
};

struct product_args {
    struct prs_fused_shape shape;
    const __nv_bfloat16 *a, *b;
    const __nv_bfloat16 *add;
    __nv_bfloat16 *c;
};

/* Each thread computes one element at a time. Sums are fp32, as they are with cuBLASLt. */
static __global__ void multiply(const struct product_args p)
{
    uint64_t n = p.shape.n, k = p.shape.k, all = p.shape.m * n;
    for (uint64_t at = blockIdx.x * blockDim.x + threadIdx.x; at < all; at += gridDim.x * blockDim.x) {
        const __nv_bfloat16 *a = p.a + at / n * k, *b = p.b + (p.shape.b_is_n_k ? at % n * k : at % n);
        float sum = p.add ? __bfloat162float(p.add[at]) : 0;
        for (uint64_t i = 0; i < k; i++)
            sum += __bfloat162float(a[i]) * __bfloat162float(b[p.shape.b_is_n_k ? i : i * n]);
        p.c[at] = __float2bfloat16(sum);
    }
}

static const struct launch_shape few_threads = {1, 64, 0};

extern "C" int prs_lt_open(void **, void *, const struct prs_fused_shape *shape, uint32_t, struct prs_lt **out)
{
    uint32_t clusters;
    if (launch_prepare(multiply, &few_threads, &clusters) != 0)
        return -ENOTSUP;
    *out = (struct prs_lt *)calloc(1, sizeof(**out));
    if (!*out)
        return -ENOMEM;
    (*out)->shape = *shape;
    return 0;
}

extern "C" void prs_lt_close(struct prs_lt *lt)
{
    free(lt);
}

extern "C" void prs_lt_release(void *)
{
}

extern "C" int prs_lt_run(struct prs_lt *lt, uint32_t m, const void *a, const void *b, const void *add, void *c,
                          cudaStream_t stream)
{
    struct product_args args = {lt->shape, (const __nv_bfloat16 *)a, (const __nv_bfloat16 *)b,
                                (const __nv_bfloat16 *)add, (__nv_bfloat16 *)c};
    args.shape.m = m;
    return launch_kernel(multiply, &few_threads, 4, stream, args);
}

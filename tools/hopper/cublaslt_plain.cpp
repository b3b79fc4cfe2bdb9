/* SPDX-License-Identifier: Apache-2.0 */
/* Replaces fused/gemm/unfused/lt.c: a plain kernel in place of cuBLASLt, so that the rest of the unfused path runs on
 * emulated GPUs, in streams and in graphs. */
#include <errno.h>
#include <stdlib.h>

#include "fused/core/element.cuh"
#include "fused/core/launch.cuh"

extern "C" {
#include "fused/gemm/unfused/lt.h"
}

struct prs_lt {
    struct prs_gemm_shape shape;
};

struct product_args {
    struct prs_gemm_shape shape;
    struct prs_lt_operands x;
};

/* Looked up, since converting each factor again took most of the time of a product. */
static const struct e4m3_values {
    float values[256];
    e4m3_values(void)
    {
        for (uint32_t i = 0; i < 256; i++)
            values[i] = __half2float(__half(__nv_cvt_fp8_to_halfraw((__nv_fp8_storage_t)i, __NV_E4M3)));
    }
} e4m3;

template <int TYPE> PRS_DEVICE float load_factor(const void *from, uint64_t i)
{
    if constexpr (TYPE == PRS_DTYPE_E4M3)
        return e4m3.values[((const uint8_t *)from)[i]];
    else
        return load_element<TYPE>(from, i);
}

/* The scale of A in this row times the scale of B in this column, at i along K. */
PRS_DEVICE float scale_of(const struct product_args &p, uint64_t row, uint64_t column, uint64_t i)
{
    uint64_t block = i / PRS_SCALE_BLOCK;
    switch (p.shape.scaling) {
    case PRS_SCALING_NONE:
        return 1;
    case PRS_SCALING_TENSOR:
        return *p.x.scale_a * *p.x.scale_b;
    case PRS_SCALING_ROWS:
        return p.x.scale_a[row] * p.x.scale_b[column];
    default:
        return p.x.scale_a[block * prs_lt_scale_pitch(p.shape.m) + row] *
               p.x.scale_b[column / PRS_SCALE_BLOCK * prs_lt_block_pitch(p.shape.k) + block];
    }
}

/* Each thread computes one element at a time. Sums are fp32, as they are with cuBLASLt. */
template <int TYPE, int RESULT> static __global__ void multiply(const struct product_args p)
{
    uint64_t n = p.shape.n, k = p.shape.k, all = p.shape.m * n;
    for (uint64_t at = blockIdx.x * blockDim.x + threadIdx.x; at < all; at += gridDim.x * blockDim.x) {
        uint64_t row = at / n, column = at % n, b = p.shape.b_transposed ? column * k : column;
        float sum = p.x.add ? load_element<RESULT>(p.x.add, at) : 0;
        for (uint64_t from = 0; from < k; from += PRS_SCALE_BLOCK) {
            float part = 0;
            for (uint64_t i = from; i < k && i < from + PRS_SCALE_BLOCK; i++)
                part += load_factor<TYPE>(p.x.a, row * k + i) *
                        load_factor<TYPE>(p.x.b, b + (p.shape.b_transposed ? i : i * n));
            sum += part * scale_of(p, row, column, from);
        }
        store_element<RESULT>(p.x.c, at, sum);
    }
}

struct instance {
    uint32_t type, result;
    void (*kernel)(const struct product_args);
};

template <int TYPE, int RESULT> static constexpr struct instance make(void)
{
    return {TYPE, RESULT, multiply<TYPE, RESULT>};
}

static const struct instance instances[] = {
    make<PRS_DTYPE_BF16, PRS_DTYPE_BF16>(), make<PRS_DTYPE_BF16, PRS_DTYPE_FP32>(),
    make<PRS_DTYPE_FP16, PRS_DTYPE_FP16>(), make<PRS_DTYPE_FP16, PRS_DTYPE_FP32>(),
    make<PRS_DTYPE_E4M3, PRS_DTYPE_BF16>(), make<PRS_DTYPE_E4M3, PRS_DTYPE_FP32>(),
};

static void (*kernel_of(const struct prs_gemm_shape &shape))(const struct product_args)
{
    for (const struct instance &i : instances)
        if (i.type == shape.dtype && i.result == prs_lt_result(&shape))
            return i.kernel;
    return NULL; /* this never happens: plans refuse types without a line */
}

static const struct launch_shape few_threads = {1, 64, 0};

extern "C" int prs_lt_open(void **, void *, const struct prs_gemm_shape *shape, uint32_t, struct prs_lt **out)
{
    uint32_t clusters;
    if (launch_prepare(kernel_of(*shape), &few_threads, &clusters) != 0)
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

extern "C" int prs_lt_run(struct prs_lt *lt, uint32_t m, const struct prs_lt_operands *x, cudaStream_t stream)
{
    struct product_args args = {lt->shape, *x};
    args.shape.m = m;
    return launch_kernel(kernel_of(args.shape), &few_threads, 4, stream, args);
}

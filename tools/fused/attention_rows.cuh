/* SPDX-License-Identifier: Apache-2.0 */
/* Where the rows of ring attention's tensors lie, and their inputs. */
#ifndef TOOLS_FUSED_ATTENTION_ROWS_CUH
#define TOOLS_FUSED_ATTENTION_ROWS_CUH

#include "tools/fused/attention.h"
#include "tools/fused/element.cuh"

/* Inputs, each with a seed of its own. OF_RESULT: the gradient of the result. */
enum tensor { QUERIES = 0, KEYS = 1, VALUES = 2, OF_RESULT = 3, TENSORS = 4 };

static __host__ __device__ uint64_t index_of(const struct bench_attention *p, uint32_t heads, uint32_t batch,
                                             uint32_t head, uint32_t row)
{
    uint64_t rows = p->shape.seq / p->world;
    return p->shape.heads_first != 0 ? ((uint64_t)batch * heads + head) * rows + row
                                     : ((uint64_t)batch * rows + row) * heads + head;
}

static __device__ double input(const struct bench_attention *p, enum tensor which, uint32_t rank, uint64_t at)
{
    return bench_element(p->seed * TENSORS + (uint32_t)which, p->loopback != 0 ? p->rank : rank, 0, at);
}

/* Which rank has a position of the sequence, and in which row (perseus/attention.h: zigzag when causal). */
static __device__ uint32_t holder_of(const struct bench_attention *p, uint32_t position, uint32_t *row)
{
    uint32_t rows = p->shape.seq / p->world, half = rows / 2, chunk;
    if (p->shape.causal == 0 || p->world == 1) {
        *row = position % rows;
        return position / rows;
    }
    chunk = position / half;
    *row = position % half + (chunk < p->world ? 0 : half);
    return chunk < p->world ? chunk : 2 * p->world - 1 - chunk;
}

static __device__ uint32_t position_of(const struct bench_attention *p, uint32_t row)
{
    uint32_t rows = p->shape.seq / p->world, half = rows / 2;
    if (p->shape.causal == 0 || p->world == 1)
        return p->rank * rows + row;
    return row < half ? p->rank * half + row : (2 * p->world - 1 - p->rank) * half + row - half;
}

#endif

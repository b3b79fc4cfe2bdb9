/* SPDX-License-Identifier: Apache-2.0 */
/* The kernel before the backward pass: computes the terms of each query row, and stores them at all ranks. These are 8
 * bytes for each row; its query and gradient have 512. */
#ifndef PERSEUS_FUSED_ATTENTION_BACKWARD_TERMS_CUH
#define PERSEUS_FUSED_ATTENTION_BACKWARD_TERMS_CUH

#include "fused/attention/backward/layout.h"
#include "fused/core/element.cuh"
#include "fused/core/sync.cuh"

/* A part of the sum of out * dout of a row: that of a vector of 16 bytes. */
template <int TYPE> PRS_DEVICE float delta_of_vector(const void *out, const void *dout, uint64_t at)
{
    float a[element<TYPE>::in_vector], b[element<TYPE>::in_vector], sum = 0;
    unpack_vector<TYPE>(*(const uint4 *)((const typename element<TYPE>::bits *)out + at), a);
    unpack_vector<TYPE>(*(const uint4 *)((const typename element<TYPE>::bits *)dout + at), b);
#pragma unroll
    for (uint32_t i = 0; i < element<TYPE>::in_vector; i++)
        sum = fmaf(a[i], b[i], sum);
    return sum;
}

/* A whole warp calls it, for 32 rows of a segment, from `row` on. Returns the sum of row + lane. first: element of the
 * segment's first row. */
template <int TYPE, int HEAD_DIM>
PRS_DEVICE float delta_of_rows(const struct prs_terms_args &args, uint64_t first, uint32_t row)
{
    constexpr uint32_t lanes = HEAD_DIM / element<TYPE>::in_vector, together = 32 / lanes;
    uint32_t lane = threadIdx.x % 32;
    float mine = 0;
#pragma unroll 4
    for (uint32_t i = 0; i < lanes; i++) {
        uint32_t at = row + i * together + lane / lanes;
        float sum = 0;
        if (at < args.schedule.segment_rows)
            sum = delta_of_vector<TYPE>(args.out, args.dout,
                                        first + at * args.strides.row + lane % lanes * element<TYPE>::in_vector);
#pragma unroll
        for (uint32_t step = 1; step < lanes; step *= 2)
            sum += __shfl_xor_sync(~0u, sum, step);
        sum = __shfl_sync(~0u, sum, lane % together * lanes);
        mine = lane / together == i ? sum : mine;
    }
    return mine;
}

/* One warp: 32 rows of one head. */
template <int TYPE, int HEAD_DIM> PRS_DEVICE void send_terms(const struct prs_terms_args &args, uint32_t at)
{
    const struct prs_attention_schedule *s = &args.schedule;
    const struct prs_attention_strides *x = &args.strides;
    uint32_t parts = prs_backward_term_rows(s) / 32, row = at % parts * 32, segment = at / parts % s->segments;
    uint32_t pair = at / parts / s->segments, mine = row + threadIdx.x % 32;
    /* MUTANT(emulator attention_backward/several_ranks_are_right) terms have two banks: s/= prs_/= 0 * prs_/ */
    uint32_t bank = prs_backward_bank(launch_epoch(&args.sync));
    uint64_t first = pair / s->heads_q * x->batch + pair % s->heads_q * x->head + segment * x->segment;
    struct prs_backward_term term = {0, delta_of_rows<TYPE, HEAD_DIM>(args, first, row)};
    uint64_t to = prs_backward_term(s, bank, s->place.rank, pair,
                                    args.mirrored != 0 ? prs_backward_segment(s, segment) : segment);
    if (mine < s->segment_rows) {
        uint64_t i = (uint64_t)(pair * s->segments + segment) * s->segment_rows + mine;
        term.lse = args.lse[i] * 1.44269504f;
        if (args.dlse)
            term.delta -= args.dlse[i];
    }
    for (uint32_t p = 0; p < s->place.local_ranks; p++) /* [terms] */
        args.terms[p][to + mine] = term;
}

template <int TYPE, int HEAD_DIM>
__global__ void __launch_bounds__(32 * PRS_BACKWARD_WARPS)
    terms_kernel(const __grid_constant__ struct prs_terms_args args)
{
    const struct prs_attention_schedule *s = &args.schedule;
    uint32_t units = s->pairs * s->segments * (prs_backward_term_rows(s) / 32);
    for (uint32_t at = blockIdx.x * PRS_BACKWARD_WARPS + threadIdx.x / 32; at < units;
         at += gridDim.x * PRS_BACKWARD_WARPS)
        send_terms<TYPE, HEAD_DIM>(args, at);
}

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* The backward pass of ring attention: the shape of its kernels. The roles of a CTA share the same as in the forward
 * pass (fused/attention/cta.cuh): claimed pieces, which are whole tasks here, and stages, which hold the two tensors of
 * the stream. */
#ifndef PERSEUS_FUSED_ATTENTION_BACKWARD_CTA_CUH
#define PERSEUS_FUSED_ATTENTION_BACKWARD_CTA_CUH

#include "fused/attention/backward/layout.h"
#include "fused/attention/cta.cuh"

template <int TYPE, int HEAD_DIM, int STRIPED, int CAPPED, int FAR> struct backward {
    static constexpr int type = TYPE;
    static constexpr int head_dim = HEAD_DIM;
    static constexpr int block = PRS_BACKWARD_BLOCK / HEAD_DIM;
    static constexpr int warpgroups = PRS_BACKWARD_TILE / 64;
    static constexpr bool far = FAR != 0;
    static constexpr bool terms = far;            /* terms travel with the queries */
    static constexpr bool striped = STRIPED != 0; /* stripes.h */
    static constexpr bool capped = CAPPED != 0;   /* striped only; a kernel of its own, because registers are few */
    static constexpr bool mirrored = !striped;
    static constexpr int adds = PRS_BACKWARD_SUMS; /* buffers for what is added to dq */
    static constexpr int together = 16;            /* elements that a thread turns into operands at a time */
    static constexpr int threads = 128 * (warpgroups + 1);
    static constexpr int tile_rows = PRS_BACKWARD_TILE;
    /* columns of the gradients of results, which travel as values do in the forward pass */
    static constexpr int value_dim = HEAD_DIM;
    static constexpr int row_bytes = HEAD_DIM * element<TYPE>::bytes;
    static constexpr int value_bytes = row_bytes;
    static constexpr int block_bytes = block * row_bytes;
    static constexpr uint32_t piece_rows = PRS_ATTENTION_PUSH_BYTES / row_bytes;
    static constexpr int rows_bytes = 64 * row_bytes; /* own rows of one warpgroup, of one tensor */
    static constexpr int terms_bytes = block * sizeof(struct prs_backward_term);
    static constexpr int gradients_bytes = 64 * block * element<TYPE>::bytes; /* dS of a block and a warpgroup */
    /* By how many blocks warpgroup 0 computes dq later than dk and dv (core.cuh). Head_dim 128 has no room for it. */
    static constexpr int behind = HEAD_DIM == 64 ? 1 : 0;
    static constexpr int gradients_slots = 2 + behind; /* for dS: 1 + behind of warpgroup 0, one of warpgroup 1 */
    static constexpr int sum_bytes = PRS_BACKWARD_BLOCK / 2 * sizeof(float); /* half of dq of a block */
    static constexpr int launch_registers = 65536 / threads / 8 * 8;
    static constexpr int producer_registers = 40;
    static constexpr int consumer_registers = 232;
    static_assert(producer_registers + warpgroups * consumer_registers <= (warpgroups + 1) * launch_registers,
                  "else setmaxnreg never returns");
    /* Offsets in dynamic shared memory. */
    static constexpr int at_q = 0; /* the first own tensor */
    static constexpr int at_second = at_q + warpgroups * rows_bytes;
    static constexpr int at_k = at_second + warpgroups * rows_bytes;
    static constexpr int at_v = at_k + PRS_ATTENTION_STAGES * block_bytes;
    static constexpr int at_push = at_v + PRS_ATTENTION_STAGES * block_bytes;
    static constexpr int at_gradients = at_push + PRS_ATTENTION_PUSH_SLOTS * PRS_ATTENTION_PUSH_BYTES;
    static constexpr int at_sums = at_gradients + gradients_slots * gradients_bytes;
    static constexpr int at_terms = at_sums + adds * warpgroups * sum_bytes;
    static constexpr int at_barriers = at_terms + PRS_ATTENTION_STAGES * terms_bytes;
    static constexpr int shared_bytes = at_barriers + PRS_ATTENTION_BARRIER_BYTES;
    static_assert(shared_bytes <= 232448, "a Hopper CTA has 227 KB of shared memory");
};

/* The segment of the tensors that has this number in the pass. */
template <class E> PRS_DEVICE uint32_t tensor_segment(const struct prs_attention_schedule *s, uint32_t segment)
{
    return E::mirrored ? prs_backward_segment(s, segment) : segment;
}

#endif

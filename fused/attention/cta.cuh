/* SPDX-License-Identifier: Apache-2.0 */
/* Ring attention: what the roles of a CTA share. */
#ifndef PERSEUS_FUSED_ATTENTION_CTA_CUH
#define PERSEUS_FUSED_ATTENTION_CTA_CUH

#include "fused/attention/layout.h"
#include "fused/core/element.cuh"
#include "fused/core/sync.cuh"

/* Bits of OVERLAP. The first two are always set: the scores of a block are computed during the softmax of the block
 * before it, and the warpgroups take turns: one uses the tensor cores while another computes its softmax. KEEPS_TOP:
 * probabilities are relative to an earlier maximum until they could exceed 2^8, so that the result rarely has to be
 * multiplied. */
enum { OVERLAP_BLOCKS = 1, OVERLAP_WARPGROUPS = 2, OVERLAP_KEEPS_TOP = 4 };

/* Bytes of a row of a head in a stage. */
static constexpr int stage_bytes(int row_bytes)
{
    return (row_bytes + PRS_STAGE_ROW - 1) / PRS_STAGE_ROW * PRS_STAGE_ROW;
}

/* prs_attention_piece_rows(), when kernels are compiled. */
static constexpr uint32_t rows_of_piece(int row_bytes)
{
    uint32_t rows = PRS_ATTENTION_PUSH_BYTES / PRS_STAGE_ROW;
    while (rows * row_bytes > PRS_ATTENTION_PUSH_BYTES)
        rows /= 2;
    return rows;
}

/* Compile-time shape of one kernel. */
template <int TYPE, int HEAD_DIM, int BLOCK, int WARPGROUPS, int OVERLAP, int FAR, int STRIPED, int VALUE_DIM>
struct attention {
    static constexpr int type = TYPE;           /* enum prs_dtype of queries, keys, values and results */
    static constexpr int head_dim = HEAD_DIM;   /* columns of queries and keys */
    static constexpr int value_dim = VALUE_DIM; /* columns of values and results */
    static constexpr int block = BLOCK;         /* keys in a block */
    static constexpr int warpgroups = WARPGROUPS;
    static constexpr bool keeps_top = (OVERLAP & OVERLAP_KEEPS_TOP) != 0;
    static constexpr bool far = FAR != 0;         /* there are other nodes; the calls that reach them need registers */
    static constexpr bool striped = STRIPED != 0; /* stripes.h; with caps and sinks */
    static constexpr int adds = 0;                /* buffers for sums in memory (backward/add.cuh) */
    static constexpr bool mirrored = false;       /* segments are numbered backwards (backward/schedule.h) */
    /* rows cross together with their terms of the backward pass (far.cuh) */
    static constexpr bool terms = false;
    static constexpr int threads = 128 * (WARPGROUPS + 1);
    static constexpr int tile_rows = 64 * WARPGROUPS;
    static constexpr int row_bytes = HEAD_DIM * element<TYPE>::bytes; /* one position of one head */
    static constexpr int value_bytes = VALUE_DIM * element<TYPE>::bytes;
    /* In a stage, a row takes whole stage rows; columns beyond the tensor are zero. */
    static constexpr int block_bytes = BLOCK * stage_bytes(row_bytes);
    static constexpr int values_bytes = BLOCK * stage_bytes(value_bytes);
    static constexpr uint32_t piece_rows = rows_of_piece(row_bytes > value_bytes ? row_bytes : value_bytes);
    static constexpr int rows_bytes = 64 * stage_bytes(row_bytes); /* query rows of one warpgroup */
    /* A launch gives every thread of a CTA the same number of registers; the roles then redistribute them. */
    static constexpr int launch_registers = 65536 / threads / 8 * 8;
    static constexpr bool wide = HEAD_DIM == 128 && BLOCK > 128; /* consumers want all they can get */
    static constexpr int producer_registers = WARPGROUPS == 3 ? 32 : FAR != 0 ? 88 : wide ? 40 : 56;
    static constexpr int consumer_registers = WARPGROUPS == 3 ? 160 : FAR != 0 ? 208 : wide ? 232 : 224;
    static_assert(producer_registers + WARPGROUPS * consumer_registers <= (WARPGROUPS + 1) * launch_registers,
                  "else setmaxnreg never returns");
    /* Offsets in dynamic shared memory. */
    static constexpr int at_q = 0;
    static constexpr int at_k = at_q + WARPGROUPS * rows_bytes;
    static constexpr int at_v = at_k + PRS_ATTENTION_STAGES * block_bytes;
    static constexpr int at_push = at_v + PRS_ATTENTION_STAGES * values_bytes;
    static constexpr int at_barriers = at_push + PRS_ATTENTION_PUSH_SLOTS * PRS_ATTENTION_PUSH_BYTES;
    static constexpr int shared_bytes = at_barriers + PRS_ATTENTION_BARRIER_BYTES;
    static_assert(shared_bytes <= 232448, "a Hopper CTA has 227 KB of shared memory");
    static_assert(BLOCK % element<TYPE>::product_k == 0 && BLOCK <= 256,
                  "probabilities are multiplied so many at a time; a box has 256 rows");
};

struct attention_memory {
    uint8_t *base;
    uint64_t *q_full, *q_empty;                    /* [warpgroups] */
    uint64_t *k_full, *k_empty, *v_full, *v_empty; /* [PRS_ATTENTION_STAGES] */
    uint64_t *pushed;                              /* [PRS_ATTENTION_PUSH_SLOTS] */
    /* [PRS_ATTENTION_PIECE_SLOTS]: a piece is claimed; all roles know it; all its keys and values have been read. */
    uint64_t *piece_full, *piece_empty, *piece_read;
    /* [2], backward only: a buffer of columns to be added to the sums is full, or empty */
    uint64_t *sum_full, *sum_empty;
    uint32_t *piece;                  /* [PRS_ATTENTION_PIECE_SLOTS]: index of the piece */
    struct prs_attention_step *steps; /* [PRS_ATTENTION_STAGES], striped or backward */
};

template <class E> PRS_DEVICE struct attention_memory attention_memory_map(uint8_t *base)
{
    struct attention_memory m;
    m.base = base;
    m.q_full = (uint64_t *)(base + E::at_barriers);
    m.q_empty = m.q_full + E::warpgroups;
    m.k_full = m.q_empty + E::warpgroups;
    m.k_empty = m.k_full + PRS_ATTENTION_STAGES;
    m.v_full = m.k_empty + PRS_ATTENTION_STAGES;
    m.v_empty = m.v_full + PRS_ATTENTION_STAGES;
    m.pushed = m.v_empty + PRS_ATTENTION_STAGES;
    m.piece_full = m.pushed + PRS_ATTENTION_PUSH_SLOTS;
    m.piece_empty = m.piece_full + PRS_ATTENTION_PIECE_SLOTS;
    m.piece_read = m.piece_empty + PRS_ATTENTION_PIECE_SLOTS;
    m.sum_full = m.piece_read + PRS_ATTENTION_PIECE_SLOTS;
    m.sum_empty = m.sum_full + E::adds;
    m.piece = (uint32_t *)(m.sum_empty + E::adds);
    m.steps = (struct prs_attention_step *)(m.piece + PRS_ATTENTION_PIECE_SLOTS);
    static_assert((2 * E::warpgroups + 2 * E::adds + 4 * PRS_ATTENTION_STAGES + PRS_ATTENTION_PUSH_SLOTS +
                   3 * PRS_ATTENTION_PIECE_SLOTS) *
                              8 +
                          PRS_ATTENTION_PIECE_SLOTS * 4 + PRS_ATTENTION_STAGES * sizeof(struct prs_attention_step) <=
                      PRS_ATTENTION_BARRIER_BYTES,
                  "barriers, pieces and steps fit");
    return m;
}

template <class E> PRS_DEVICE void attention_memory_init(const struct attention_memory *m)
{
    for (int i = 0; i < E::warpgroups; i++) {
        mbarrier_init(&m->q_full[i], 1);
        mbarrier_init(&m->q_empty[i], E::adds != 0 ? 4 * E::warpgroups : 4); /* one arrival per warp that reads them */
    }
    for (int i = 0; i < PRS_ATTENTION_STAGES; i++) {
        mbarrier_init(&m->k_full[i], 1);
        mbarrier_init(&m->k_empty[i], 4 * E::warpgroups);
        mbarrier_init(&m->v_full[i], 1);
        mbarrier_init(&m->v_empty[i], 4 * E::warpgroups);
    }
    for (int i = 0; i < PRS_ATTENTION_PUSH_SLOTS; i++)
        mbarrier_init(&m->pushed[i], 1);
    for (int i = 0; i < PRS_ATTENTION_PIECE_SLOTS; i++) {
        mbarrier_init(&m->piece_full[i], 1);
        /* consumer warps, and the threads that count and add */
        mbarrier_init(&m->piece_empty[i], 4 * E::warpgroups + 1 + (E::adds != 0 ? 1 : 0));
        mbarrier_init(&m->piece_read[i], 1);
    }
    for (int i = 0; i < E::adds; i++) {
        mbarrier_init(&m->sum_full[i], 4 * E::warpgroups);
        mbarrier_init(&m->sum_empty[i], 1);
    }
    mbarrier_init_fence();
}

/* ---- claimed pieces ----
 * A piece is claimed only when the loads of the previous one have been issued: so pieces go to the CTAs that are first
 * free, as deal.h expects. Its index goes to all roles through two slots. An index beyond the last piece ends them. */
PRS_DEVICE uint32_t claim_piece(const struct prs_attention_args &args)
{
    return atomicAdd(&args.claims->pieces, 1u);
}

/* One thread calls it. turn: how many pieces came before. */
PRS_DEVICE void pass_piece(const struct attention_memory &m, uint32_t turn, uint32_t piece)
{
    uint32_t slot = turn % PRS_ATTENTION_PIECE_SLOTS, phase = turn / PRS_ATTENTION_PIECE_SLOTS & 1;
    mbarrier_wait(&m.piece_empty[slot], phase ^ 1);
    *(volatile uint32_t *)&m.piece[slot] = piece;
    mbarrier_arrive(&m.piece_full[slot]);
}

PRS_DEVICE uint32_t await_piece(const struct attention_memory &m, uint32_t turn)
{
    uint32_t slot = turn % PRS_ATTENTION_PIECE_SLOTS, phase = turn / PRS_ATTENTION_PIECE_SLOTS & 1;
    mbarrier_wait(&m.piece_full[slot], phase);
    return *(volatile uint32_t *)&m.piece[slot];
}

/* A whole warp calls it. */
PRS_DEVICE uint32_t take_piece(const struct attention_memory &m, uint32_t turn)
{
    uint32_t piece = await_piece(m, turn);
    __syncwarp(); /* all lanes have read it before the slot is released */
    if (threadIdx.x % 32 == 0)
        mbarrier_arrive(&m.piece_empty[turn % PRS_ATTENTION_PIECE_SLOTS]);
    return piece;
}

/* ---- steps of striped attention ----
 * The loader knows the walk. With each stage of keys it leaves what consumers need to know of the block, before it
 * expects the keys. They read it when the keys have come, and before they release the stage. */
PRS_DEVICE void pass_step(const struct attention_memory &m, uint32_t stage, const struct prs_attention_step &step)
{
    volatile struct prs_attention_step *to = &m.steps[stage];
    to->position = step.position;
    to->flags = step.flags;
}

/* A whole warp calls it. */
PRS_DEVICE struct prs_attention_step read_step(const struct attention_memory &m, uint32_t stage)
{
    const volatile struct prs_attention_step *from = &m.steps[stage];
    struct prs_attention_step step = {from->position, from->flags};
    __syncwarp(); /* all lanes have read it before the stage is released */
    return step;
}

/* An arrival counter of this launch. */
PRS_DEVICE uint32_t *arrival_at(const struct prs_attention_args &args, uint32_t peer, uint32_t epoch, uint32_t index)
{
    return args.arrivals[peer] + (epoch & 1) * args.arrival_words + index;
}

/* The stage of block number `step` of the keys, or of the values. */
PRS_DEVICE uint32_t stage_of(uint32_t step)
{
    return step % PRS_ATTENTION_STAGES;
}

PRS_DEVICE uint32_t phase_of(uint32_t step)
{
    return step / PRS_ATTENTION_STAGES & 1;
}

/* The last two coordinates of a segment of one head in a tensor (struct prs_attention_args). */
struct attention_coordinate {
    int32_t u, v;
};

PRS_DEVICE struct attention_coordinate attention_coordinate_of(const struct prs_attention_args &args, uint32_t batch,
                                                               uint32_t head, uint32_t heads, uint32_t segment)
{
    struct attention_coordinate sequence_first = {(int32_t)head, (int32_t)(batch * args.schedule.segments + segment)};
    struct attention_coordinate heads_first = {(int32_t)segment, (int32_t)(batch * heads + head)};
    return args.heads_first ? heads_first : sequence_first;
}

#endif

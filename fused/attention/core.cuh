/* SPDX-License-Identifier: Apache-2.0 */
/* Ring attention, warps 4 and up: consumer warpgroups, 64 query rows each. */
#ifndef PERSEUS_FUSED_ATTENTION_CORE_CUH
#define PERSEUS_FUSED_ATTENTION_CORE_CUH

#include "fused/attention/merge.cuh"
#include "fused/attention/softmax.cuh"

enum { FIRST_TURN_BARRIER = 1 }; /* 0 is __syncthreads() */

/* The state of a consumer warpgroup that lasts from piece to piece. */
struct attention_consumer {
    uint32_t half;   /* number of the warpgroup */
    uint32_t pieces; /* finished so far */
    uint32_t step;   /* blocks so far; the values of the last one are not multiplied yet */
};

/* Operands of the next two products: the first keys of one block, and the first values of the block before it. */
struct attention_operands {
    uint64_t q, k, v;
};

/* Shows the compiler that all lanes hold the same value. It then computes descriptors once per warp, not once per lane,
 * and puts no moves between two tensor core instructions. */
PRS_DEVICE uint32_t uniform(uint32_t x)
{
    return __shfl_sync(~0u, x, 0);
}

template <class E>
PRS_DEVICE struct attention_operands find_operands(const struct attention_memory &m, const struct attention_consumer &c)
{
    uint32_t base = smem_address(m.base), half = uniform(c.half), stage = uniform(stage_of(c.step));
    static_assert(PRS_ATTENTION_STAGES == 2, "the values are in the other one");
    return {matrix_descriptor(base + E::at_q + half * E::rows_bytes, 16),
            matrix_descriptor(base + E::at_k + stage * E::block_bytes, 16),
            matrix_descriptor(base + E::at_v + (stage ^ 1) * E::values_bytes, E::block * PRS_STAGE_ROW)};
}

/* Issues scores = queries x keys of the stage and returns while it runs. */
template <class E> PRS_DEVICE void issue_scores(float (&s)[E::block / 2], const struct attention_operands &x)
{
    typedef element<E::type> in;
    constexpr int each = in::in_row / in::product_k, across = in::product_k * in::bytes;
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < E::head_dim / (int)in::product_k; i++) { /* a row's 128 bytes are contiguous, then the next */
        int q_at = i / each * (64 * PRS_STAGE_ROW) + i % each * across;
        int k_at = i / each * (E::block * PRS_STAGE_ROW) + i % each * across;
        in::template multiply<0>(s, x.q + q_at / 16, x.k + k_at / 16, i != 0);
    }
    wgmma_commit();
}

/* Issues result += probabilities x values of the stage. */
template <class E>
PRS_DEVICE void issue_values(float (&o)[E::value_dim / 2], const uint32_t (&p)[E::block / 4],
                             const struct attention_operands &x)
{
    typedef element<E::type> in;
    constexpr int down = in::product_k * PRS_STAGE_ROW;
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < E::block / (int)in::product_k; i++)
        in::template multiply<1>(o, &p[4 * i], x.v + i * (down / 16), 1);
    wgmma_commit();
}

/* Says that this warp has read the stage or the queries. */
PRS_DEVICE void release(uint64_t *empty)
{
    if (threadIdx.x % 32 == 0)
        mbarrier_arrive(empty);
}

/* The warpgroups take turns: one uses the tensor cores while another computes its softmax. */
template <class E> PRS_DEVICE void take_turn(const struct attention_consumer &c)
{
    barrier_sync(FIRST_TURN_BARRIER + c.half, 256);
}

template <class E> PRS_DEVICE void give_turn(const struct attention_consumer &c)
{
    barrier_arrive(FIRST_TURN_BARRIER + (c.half + 1) % E::warpgroups, 256);
}

template <class E>
PRS_DEVICE void mask_block(float (&s)[E::block / 2], const struct prs_attention_args &args,
                           const struct prs_attention_task &t, const struct prs_attention_walk &w)
{
    uint32_t first = t.tile * E::tile_rows + (threadIdx.x / 128 - 1) * 64; /* row of this warpgroup in the segment */
    uint32_t row = first + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    if (prs_attention_limit(&args.schedule, &w, first) < E::block)
        mask_scores(s, prs_attention_limit(&args.schedule, &w, row), prs_attention_limit(&args.schedule, &w, row + 8));
}

/* Striped attention: caps the scores of a block, and masks those of keys that a row does not meet. */
template <class E>
PRS_DEVICE void mask_step(float (&s)[E::block / 2], const struct prs_attention_args &args,
                          const struct prs_attention_task &t, const struct prs_attention_step &step)
{
    struct key_range rows[2];
    uint32_t row =
        prs_stripe_tile(&args.stripes, &args.schedule, &t) + (threadIdx.x / 32 - 4) * 16 + threadIdx.x % 32 / 4;
    if (args.cap != 0)
        cap_scores(args, s);
    if ((step.flags & PRS_STEP_MASKED) == 0)
        return;
#pragma unroll
    for (int h = 0; h < 2; h++)
        rows[h] = find_range(args, row + h * 8, step.position);
    mask_ranges(s, rows);
}

/* A task's state, all in registers. p: probabilities that are not multiplied by their values yet. So o lacks the last
 * block, and must be multiplied by shrink before that product is added. */
template <class E> struct attention_state {
    struct prs_attention_walk walk;
    bool more; /* the walk is at a block whose scores are not computed yet */
    struct row_state rows;
    float shrink[2];
    bool shrinks;          /* for this warp; only with keeps_top */
    float s[E::block / 2]; /* scores, then probabilities */
    float o[E::value_dim / 2];
    uint32_t p[E::block / 4];
};

/* Turns s, the scores of the walk's block, into probabilities, and moves the walk to the next block. */
template <class E>
PRS_DEVICE void take_scores(float (&s)[E::block / 2], const struct prs_attention_args &args,
                            const struct attention_memory &m, const struct prs_attention_task &t,
                            struct attention_consumer *c, struct attention_state<E> *x)
{
    struct prs_attention_step step = {0, 0};
    if constexpr (E::striped)
        step = read_step(m, stage_of(c->step));
    release(&m.k_empty[stage_of(c->step)]);
    bool last = E::striped ? (step.flags & PRS_STEP_LAST) != 0 : x->walk.left == 1;
    if (last) /* the next piece's queries may be loaded during this softmax and product */
        release(&m.q_empty[c->half]);
    if constexpr (E::striped)
        mask_step<E>(s, args, t, step);
    else
        mask_block<E>(s, args, t, x->walk);
    soften<E::keeps_top, E::striped>(s, &x->rows, x->shrink, args.scale_log2);
    if (E::keeps_top)
        x->shrinks = __any_sync(~0u, x->shrink[0] != 1 || x->shrink[1] != 1);
    registers_pin(s);
    x->more = E::striped ? !last : prs_attention_next(&args.schedule, &t, &x->walk);
}

/* Goes from the probabilities of one block to those of the next. The product of the first block with its values and the
 * scores of the next one run at the same time: the next block's softmax starts when its scores are complete, while the
 * product with the values still runs. */
template <class E>
PRS_DEVICE void attend_block(const struct prs_attention_args &args, const struct attention_memory &m,
                             const struct prs_attention_task &t, struct attention_consumer *c,
                             struct attention_state<E> *x)
{
    float(&s)[E::block / 2] = x->s;
    struct attention_operands at =
        find_operands<E>(m, *c); /* before taking the turn: meanwhile its holder keeps the tensor cores busy */
    mbarrier_wait(&m.k_full[stage_of(c->step)], phase_of(c->step));
    take_turn<E>(*c);
    issue_scores<E>(s, at);
    if (!E::keeps_top || x->shrinks)
        shrink_result(x->o, x->shrink);
    mbarrier_wait(&m.v_full[stage_of(c->step - 1)], phase_of(c->step - 1));
    issue_values<E>(x->o, x->p, at);
    give_turn<E>(*c);
    wgmma_wait<1>();
    registers_pin(s);
    take_scores<E>(s, args, m, t, c, x);
    wgmma_wait<0>();
    registers_pin(x->o);
    release(&m.v_empty[stage_of(c->step - 1)]);
    pack_probabilities<E::type>(x->p, s);
    c->step++;
}

/* Issues a piece's first scores. */
template <class E>
PRS_DEVICE void issue_first(const struct attention_memory &m, const struct attention_consumer &c,
                            struct attention_state<E> *x)
{
    struct attention_operands at = find_operands<E>(m, c);
    mbarrier_wait(&m.q_full[c.half], c.pieces & 1);
    mbarrier_wait(&m.k_full[stage_of(c.step)], phase_of(c.step));
    issue_scores<E>(x->s, at);
}

/* Computes a query tile against all keys, or some of them. The caller has issued its first scores. */
template <class E>
PRS_DEVICE void attend_piece(const struct prs_attention_args &args, const struct attention_memory &m,
                             const struct prs_attention_piece &piece, struct attention_consumer *c,
                             struct attention_state<E> *x)
{
    x->walk = piece.begin;
    x->rows = {{-INFINITY, -INFINITY}, {0, 0}};
#pragma unroll
    for (int i = 0; i < E::value_dim / 2; i++)
        x->o[i] = 0;
    take_scores<E>(x->s, args, m, piece.task, c, x);
    pack_probabilities<E::type>(x->p, x->s);
    c->step++;
    while (x->more)
        attend_block<E>(args, m, piece.task, c, x);
    c->pieces++;
    if (!E::keeps_top || x->shrinks)
        shrink_result(x->o, x->shrink);
    mbarrier_wait(&m.v_full[stage_of(c->step - 1)], phase_of(c->step - 1));
    issue_values<E>(x->o, x->p, find_operands<E>(m, *c));
    wgmma_wait<0>();
    registers_pin(x->o);
    release(&m.v_empty[stage_of(c->step - 1)]);
}

/* Writes the result of a piece, or leaves its part of a result for merge_parts(). */
template <class E>
PRS_DEVICE void leave_piece(const struct prs_attention_args &args, const struct prs_attention_piece &piece,
                            struct attention_state<E> *x)
{
    uint32_t first = piece.task.tile * E::tile_rows + (threadIdx.x / 32 - 4) * 16;
    if (E::striped && args.sinks)
        add_sink(args, args.sinks[piece.task.head], x->o, &x->rows);
    if (E::striped || piece.part == 0 || merge_parts<E>(args, piece.part - 1, x->o, &x->rows))
        write_rows<E::type>(args, piece.task, first, x->o, x->rows);
}

/* The first scores of a piece are computed while the result of the piece before it is written. (Not during that piece's
 * last product too: the compiler would then serialise all products, warning C7514.) */
template <class E> PRS_DEVICE void attend_tasks(const struct prs_attention_args &args, const struct attention_memory &m)
{
    struct attention_consumer c = {threadIdx.x / 128 - 1, 0, 0};
    uint32_t at = take_piece(m, 0);
    struct prs_attention_piece piece, next;
    struct attention_state<E> x;
    if (c.half == E::warpgroups - 1)
        give_turn<E>(c);
    if (at < args.pieces_count) {
        piece = args.pieces[at];
        issue_first<E>(m, c, &x);
        wgmma_wait<0>();
        registers_pin(x.s);
        for (;;) {
            attend_piece<E>(args, m, piece, &c, &x);
            if (threadIdx.x == 128)
                mbarrier_arrive(&m.piece_read[(c.pieces - 1) % PRS_ATTENTION_PIECE_SLOTS]);
            at = take_piece(m, c.pieces);
            if (at >= args.pieces_count)
                break;
            next = args.pieces[at];
            issue_first<E>(m, c, &x);
            leave_piece<E>(args, piece, &x);
            wgmma_wait<0>();
            registers_pin(x.s);
            piece = next;
        }
        leave_piece<E>(args, piece, &x);
    }
    if (c.half == 0)
        take_turn<E>(c); /* takes the turn that the last warpgroup passed on when it ended */
}

#endif

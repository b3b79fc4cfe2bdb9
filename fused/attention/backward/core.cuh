/* SPDX-License-Identifier: Apache-2.0 */
/* The backward pass, warps 4 and up: consumer warpgroups, 64 keys each. From their rows k and v, and a block q, dout of
 * the stream:
 *
 *     P = exp(scale * k qT - lse)     dP = v doutT     dS = P * (dP - delta)
 *     dk += dS q                      dv += P dout     dq of the block += dST k, over the keys of both warpgroups
 *
 * P and dS are the A operands of dv and dk, in registers; those of dq are in shared memory. */
#ifndef PERSEUS_FUSED_ATTENTION_BACKWARD_CORE_CUH
#define PERSEUS_FUSED_ATTENTION_BACKWARD_CORE_CUH

#include "fused/attention/backward/cta.cuh"
#include "fused/attention/softmax.cuh"

/* The state of a consumer warpgroup. */
template <class E> struct backward_state {
    uint32_t half;         /* number of the warpgroup */
    uint32_t step;         /* blocks so far */
    float s[E::block / 2]; /* scores, then P */
    float d[E::block / 2]; /* dP, then dS */
    float dk[E::head_dim / 2], dv[E::head_dim / 2];
    uint32_t p[E::block / 4], g[E::block / 4]; /* P and dS as operands */
    float query[32];                           /* half of a block's part of dq: 64 rows and 64 columns */
};

/* Issues d = rows of this warpgroup x rows of the stream. */
template <class E> PRS_DEVICE void issue_rows(float (&d)[E::block / 2], uint32_t own, uint32_t stream)
{
    typedef element<E::type> in;
    constexpr int each = in::in_row / in::product_k, across = in::product_k * in::bytes;
    uint64_t a = matrix_descriptor(own, 16), b = matrix_descriptor(stream, 16);
#pragma unroll
    for (int i = 0; i < E::head_dim / (int)in::product_k; i++) { /* a row's 128 bytes are contiguous, then the next */
        int a_at = i / each * (64 * PRS_STAGE_ROW) + i % each * across;
        int b_at = i / each * (E::block * PRS_STAGE_ROW) + i % each * across;
        in::template multiply<0>(d, a + a_at / 16, b + b_at / 16, i != 0);
    }
    wgmma_commit();
}

/* Issues sum += factors x columns of the stream. */
template <class E>
PRS_DEVICE void issue_sum(float (&sum)[E::head_dim / 2], const uint32_t (&factor)[E::block / 4], uint32_t stream)
{
    typedef element<E::type> in;
    constexpr int down = in::product_k * PRS_STAGE_ROW;
    uint64_t b = matrix_descriptor(stream, E::block * PRS_STAGE_ROW);
#pragma unroll
    for (int i = 0; i < E::block / (int)in::product_k; i++)
        in::template multiply<1>(sum, &factor[4 * i], b + i * (down / 16), 1);
    wgmma_commit();
}

/* All lanes hold the same value: the compiler then computes descriptors once per warp. */
PRS_DEVICE uint32_t same_in_warp(uint32_t x)
{
    return __shfl_sync(~0u, x, 0);
}

/* Issues the scores of a block, and then dP. */
template <class E> PRS_DEVICE void issue_block(const struct attention_memory &m, struct backward_state<E> *x)
{
    uint32_t base = smem_address(m.base), half = same_in_warp(x->half), stage = same_in_warp(stage_of(x->step));
    mbarrier_wait(&m.k_full[stage], phase_of(x->step));
    mbarrier_wait(&m.v_full[stage], phase_of(x->step));
    wgmma_fence();
    issue_rows<E>(x->s, base + E::at_q + half * E::rows_bytes, base + E::at_k + stage * E::block_bytes);
    issue_rows<E>(x->d, base + E::at_second + half * E::rows_bytes, base + E::at_v + stage * E::block_bytes);
}

/* lse and delta of four elements of a thread, two columns of the stream: (lse, delta, lse, delta). */
template <class E>
PRS_DEVICE uint4 terms_of_stream(const struct attention_memory &m, const struct backward_state<E> *x, int i)
{
    uint32_t column = (uint32_t)i / 4 * 8 + threadIdx.x % 4 * 2;
    return load_shared_v4(smem_address(m.base) + E::at_terms + stage_of(x->step) * E::terms_bytes +
                          column * (uint32_t)sizeof(struct prs_backward_term));
}

/* The rows of the block that row `row` of the task's tile meets. */
template <class E>
PRS_DEVICE struct key_range range_of_row(const struct prs_backward_args &args, const struct prs_attention_task &t,
                                         const struct prs_attention_step &step, uint32_t row)
{
    const struct prs_attention_schedule *s = &args.stream.schedule;
    if (E::striped)
        return find_range(args.stream, prs_stripe_tile(&args.stream.stripes, s, &t) + row, step.position);
    struct prs_attention_walk w = {0, step.position, 0, 0, (step.flags & PRS_STEP_DIAGONAL) != 0};
    struct prs_backward_range r = prs_backward_range(s, &w, t.tile * E::tile_rows + row);
    return {r.from, max(r.from, r.to)}; /* a row beyond the segment meets none */
}

/* Masks the scores of rows of the stream that this task's rows do not meet. Elements are ordered as in softmax.cuh. */
template <class E>
PRS_DEVICE void mask_block(const struct prs_backward_args &args, const struct prs_attention_task &t,
                           const struct prs_attention_step &step, struct backward_state<E> *x)
{
    struct key_range rows[2];
    if ((step.flags & PRS_STEP_MASKED) == 0)
        return;
#pragma unroll
    for (int h = 0; h < 2; h++)
        rows[h] = range_of_row<E>(args, t, step, (threadIdx.x / 32 - 4) * 16 + threadIdx.x % 32 / 4 + h * 8);
    mask_ranges(x->s, rows);
}

/* Turns scores into P, and dP into dS, as operands. One loop does both: exponentials keep one unit of an SM busy, the
 * rest another one. After some elements the warp meets: else the compiler loads all terms first, and spills. Of a
 * capped score y = cap * tanh(x), dS also has the factor dy / dx = 1 - tanh(x)^2. */
template <class E>
PRS_DEVICE void form_gradients(const struct prs_backward_args &args, const struct attention_memory &m,
                               struct backward_state<E> *x)
{
    float scale = E::capped ? 1 : args.stream.scale_log2, inverse = E::capped ? 1 / args.stream.cap : 0;
#pragma unroll
    for (int at = 0; at < E::block / 2; at += E::together) {
#pragma unroll
        for (int i = at; i < at + E::together; i += 4) {
            uint4 terms = terms_of_stream(m, x, i);
            float lse[2] = {__uint_as_float(terms.x), __uint_as_float(terms.z)};
            float delta[2] = {__uint_as_float(terms.y), __uint_as_float(terms.w)};
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float tanh = E::capped ? fmaxf(x->s[i + e] * inverse, -1) : 0; /* a masked score is -INFINITY */
                x->s[i + e] = exp2_fast(fmaf(x->s[i + e], scale, -lse[e & 1]));
                x->d[i + e] = x->s[i + e] * (x->d[i + e] - delta[e & 1]);
                if (E::capped)
                    x->d[i + e] *= 1 - tanh * tanh;
            }
#pragma unroll
            for (int e = 0; e < 4; e += 2) {
                x->p[(i + e) / 2] = element<E::type>::pack(x->s[i + e], x->s[i + e + 1]);
                x->g[(i + e) / 2] = element<E::type>::pack(x->d[i + e], x->d[i + e + 1]);
            }
        }
        __syncwarp();
    }
}

template <class E> PRS_DEVICE void release_stage(const struct attention_memory &m, uint32_t stage)
{
    __syncwarp(); /* all lanes have read the terms */
    if (threadIdx.x % 32 == 0) {
        mbarrier_arrive(&m.k_empty[stage]);
        mbarrier_arrive(&m.v_empty[stage]);
    }
}

/* ---- dq of a block, over the 128 keys of both warpgroups. Each computes 64 rows and 64 columns: half of the columns,
 * or, with head_dim 64, half of the rows.
 *
 * A warpgroup writes dS into a slot of its own, and both read it. Warpgroup 1 multiplies dS of the block that it has
 * just formed; warpgroup 0 too, or, E::behind, that of the block before. Then neither waits for the other in each step:
 * one forms dS while the tensor cores work for the other. ---- */
/* Named barriers; number 0 is that of __syncthreads(). Of each slot: WRITTEN: its owner has written dS. READ: the other
 * warpgroup has read it. With E::behind, warpgroup 0 has one product more in a task than there are blocks. Warpgroup 1
 * waits once for each block, so warpgroup 0 does not arrive after the last product. */
enum { WRITTEN_BARRIER = 1, READ_BARRIER = 4 };

/* The slot in which warpgroup `half` writes dS of block number `step`. */
template <class E> PRS_DEVICE uint32_t gradients_slot(uint32_t half, uint32_t step)
{
    return half == 0 ? step % (1 + E::behind) : 1 + E::behind;
}

/* Writes dS where both warpgroups read it: rows of keys, with the swizzle of an operand. */
template <class E> PRS_DEVICE void store_gradients(const struct attention_memory &m, const struct backward_state<E> *x)
{
    uint32_t lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
    uint32_t slot = gradients_slot<E>(x->half, x->step);
    uint32_t to = smem_address(m.base) + E::at_gradients + slot * E::gradients_bytes + row * PRS_STAGE_ROW;
    constexpr int across = 64 * PRS_STAGE_ROW; /* from 64 queries to the next */
    /* MUTANT(emulator attention_backward/one_rank_alone_is_right) what the slot had has been read: delete */
    if (x->step >= (x->half == 0 ? 1 + E::behind : 1 - E::behind))
        barrier_sync(READ_BARRIER + slot, 128 * E::warpgroups);
#pragma unroll
    for (int i = 0; i < E::block / 8; i += 2)
        store_matrix_x4(to + i / 8 * across + ((i % 8 + lane / 16) ^ row % 8) * 16, x->g[2 * i], x->g[2 * i + 1],
                        x->g[2 * i + 2], x->g[2 * i + 3]);
}

/* Issues query = dS x keys, of block number `step`, when the other warpgroup has written its dS. Without `given` there
 * is no such block: it multiplies what the slots have, and nobody uses the result. Products that are not always issued
 * would be serialised (C7520). */
template <class E>
PRS_DEVICE void issue_queries(const struct attention_memory &m, struct backward_state<E> *x, uint32_t step, bool given)
{
    typedef element<E::type> in;
    constexpr int down = in::product_k * PRS_STAGE_ROW, each = 64 / in::product_k;
    uint32_t base = smem_address(m.base), half = same_in_warp(x->half), number = same_in_warp(step);
    uint32_t rows = E::head_dim == 64 ? half * (64 * PRS_STAGE_ROW) : 0;
    uint32_t columns = E::head_dim == 128 ? half * (64 * PRS_STAGE_ROW) : 0;
    uint64_t b = matrix_descriptor(base + E::at_q + columns, 16);
    /* MUTANT(emulator attention_backward/one_rank_alone_is_right) dS of both warpgroups is there: delete */
    if (given)
        barrier_sync(WRITTEN_BARRIER + gradients_slot<E>(half ^ 1, number), 128 * E::warpgroups);
    wgmma_fence();
#pragma unroll
    for (int of = 0; of < E::warpgroups; of++) {
        uint32_t slot = gradients_slot<E>(of, number);
        uint64_t a = matrix_descriptor(base + E::at_gradients + slot * E::gradients_bytes + rows, 16);
#pragma unroll
        for (int i = 0; i < each; i++)
            in::multiply_outer(x->query, a + i * (down / 16), b + (of * E::rows_bytes + i * down) / 16,
                               of != 0 || i != 0);
    }
    wgmma_commit();
}

/* Gives this warpgroup's half of dq of block number `step` to the thread that adds them to the sums. */
template <class E>
PRS_DEVICE void give_queries(const struct attention_memory &m, const struct backward_state<E> *x, uint32_t step)
{
    uint32_t buffer = step % E::adds, phase = step / E::adds & 1;
    uint32_t to =
        smem_address(m.base) + E::at_sums + (buffer * E::warpgroups + x->half) * E::sum_bytes + threadIdx.x % 128 * 16;
    mbarrier_wait(&m.sum_empty[buffer], phase ^ 1);
#pragma unroll
    for (int i = 0; i < 32; i += 4)
        store_shared_v4(to + i * 512, __float_as_uint(x->query[i]), __float_as_uint(x->query[i + 1]),
                        __float_as_uint(x->query[i + 2]), __float_as_uint(x->query[i + 3]));
    fence_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        mbarrier_arrive(&m.sum_full[buffer]);
}

/* One block: the caller has issued its scores and dP. Issues those of the next block before it returns true. Operands
 * in registers are written while no product of this warpgroup runs; the other warpgroup computes meanwhile. Otherwise
 * the compiler would serialise all products (warnings C7513 and C7515). */
template <class E>
PRS_DEVICE bool sum_block(const struct prs_backward_args &args, const struct attention_memory &m,
                          const struct prs_attention_task &t, bool first, struct backward_state<E> *x)
{
    uint32_t stage = same_in_warp(stage_of(x->step)), base = smem_address(m.base), step;
    bool given; /* whether there is a block whose dq this warpgroup computes */
    struct prs_attention_step block = read_step(m, stage);
    bool more = (block.flags & PRS_STEP_LAST) == 0;
    /* MUTANT(emulator attention_backward/one_rank_alone_is_right) scores and dP are complete: delete */
    wgmma_wait<0>();
    registers_pin(x->s);
    registers_pin(x->d);
    if (E::capped)
        cap_scores(args.stream, x->s);
    mask_block<E>(args, t, block, x);
    form_gradients<E>(args, m, x);
    store_gradients<E>(m, x);
    wgmma_fence();
    issue_sum<E>(x->dv, x->p, base + E::at_v + stage * E::block_bytes);
    fence_async_shared(); /* dS; it waits for the stores, and dv is computed meanwhile */
    barrier_arrive(WRITTEN_BARRIER + gradients_slot<E>(x->half, x->step), 128 * E::warpgroups);
    step = x->half == 0 ? x->step - E::behind : x->step;
    given = E::behind == 0 || x->half != 0 || !first;
    if (E::behind != 0) /* this order is faster with head_dim 64, the other one with 128 */
        issue_sum<E>(x->dk, x->g, base + E::at_k + stage * E::block_bytes);
    issue_queries<E>(m, x, step, given);
    if (E::behind == 0)
        issue_sum<E>(x->dk, x->g, base + E::at_k + stage * E::block_bytes);
    wgmma_wait<1>();
    x->step++; /* before the branch: else products of striped attention are serialised (C7515) */
    if (E::behind != 0) {
        release_stage<E>(m, stage);
        wgmma_wait<0>();
    }
    registers_pin(x->query);
    barrier_arrive(READ_BARRIER + gradients_slot<E>(x->half ^ 1, step), 128 * E::warpgroups);
    if (given)
        give_queries<E>(m, x, step);
    if (E::behind == 0) {
        /* MUTANT(emulator attention_backward/several_ranks_are_right) sums have read their stage: delete */
        wgmma_wait<0>();
        release_stage<E>(m, stage);
    }
    if (!more)
        return false;
    issue_block<E>(m, x);
    return true;
}

/* What is left of dq after the last block of a task. */
template <class E> PRS_DEVICE void end_queries(const struct attention_memory &m, struct backward_state<E> *x)
{
    if (E::behind != 0 && x->half == 0) {
        issue_queries<E>(m, x, x->step - 1, true);
        wgmma_wait<0>();
        registers_pin(x->query);
        give_queries<E>(m, x, x->step - 1);
    }
    if (threadIdx.x % 32 == 0) /* the keys of both warpgroups have been read */
        for (int half = 0; half < E::warpgroups; half++)
            mbarrier_arrive(&m.q_empty[half]);
}

/* Writes a result of a task from registers. first: row of this warp's first row in the segment. */
template <class E, int RESULT>
PRS_DEVICE void write_result(const struct prs_backward_args &args, const struct prs_attention_task &t, uint32_t first,
                             const float (&sum)[E::head_dim / 2])
{
    typedef element<E::type> out;
    const struct prs_attention_schedule *s = &args.stream.schedule;
    const struct prs_attention_strides *to = &args.stream.out_strides;
    uint32_t lane = threadIdx.x % 32, row = first + lane / 4, w[E::head_dim / 32][4];
    typename out::bits *at = (typename out::bits *)args.result[RESULT] + t.batch * to->batch + t.head * to->head +
                             tensor_segment<E>(s, t.segment) * to->segment;
#pragma unroll
    for (int h = 0; h < 2; h++, row += 8) {
        round_row<E::type>(w, sum, h, RESULT == 0 ? args.stream.scale : 1.0f);
        if (row >= s->segment_rows)
            continue;
#pragma unroll
        for (int i = 0; i < E::head_dim / 32; i++)
            *(uint4 *)(at + row * to->row + i * 32 + lane % 4 * out::in_vector) =
                make_uint4(w[i][0], w[i][1], w[i][2], w[i][3]);
    }
}

template <class E>
PRS_DEVICE void sum_task(const struct prs_backward_args &args, const struct attention_memory &m,
                         const struct prs_attention_piece &piece, uint32_t turn, struct backward_state<E> *x)
{
#pragma unroll
    for (int i = 0; i < E::head_dim / 2; i++)
        x->dk[i] = x->dv[i] = 0;
    registers_pin(x->dk);
    registers_pin(x->dv);
    for (int half = 0; half < E::warpgroups; half++) /* the first product of issue_queries() may read both */
        mbarrier_wait(&m.q_full[half], turn & 1);
    issue_block<E>(m, x);
    for (bool first = true; sum_block<E>(args, m, piece.task, first, x);)
        first = false;
    end_queries<E>(m, x);
    registers_pin(x->dk);
    registers_pin(x->dv);
}

template <class E> PRS_DEVICE void sum_tasks(const struct prs_backward_args &args, const struct attention_memory &m)
{
    struct backward_state<E> x;
    x.half = threadIdx.x / 128 - 1;
    x.step = 0;
    for (uint32_t turn = 0, at; (at = take_piece(m, turn)) < args.stream.pieces_count; turn++) {
        struct prs_attention_piece piece = args.stream.pieces[at];
        uint32_t first = piece.task.tile * E::tile_rows + (threadIdx.x / 32 - 4) * 16;
        sum_task<E>(args, m, piece, turn, &x);
        if (threadIdx.x == 128)
            mbarrier_arrive(&m.piece_read[turn % PRS_ATTENTION_PIECE_SLOTS]);
        write_result<E, 0>(args, piece.task, first, x.dk);
        write_result<E, 1>(args, piece.task, first, x.dv);
    }
}

#endif

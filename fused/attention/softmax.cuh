/* SPDX-License-Identifier: Apache-2.0 */
/* Ring attention: the work of a consumer warpgroup between two products: mask and softmax; and how it writes the
 * result. */
#ifndef PERSEUS_FUSED_ATTENTION_SOFTMAX_CUH
#define PERSEUS_FUSED_ATTENTION_SOFTMAX_CUH

#include "fused/attention/cta.cuh"

/* In a warpgroup's accumulators, element i of a thread is in column i / 4 * 8 + lane % 4 * 2 + i % 2 and in row lane /
 * 4 of its warp's 16 rows, or, if i & 2, eight rows below. So a thread has two rows, and four threads share each
 * row. */
struct row_state {
    float top[2]; /* largest score so far, before scaling, or a slightly smaller value: see soften() */
    float sum[2]; /* sum of this thread's probabilities, relative to top */
};

PRS_DEVICE float quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

PRS_DEVICE float quad_sum(float x)
{
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

/* Masks the scores of keys that a row may not attend to. upper, lower: how many keys of the block each row may. */
template <int N> PRS_DEVICE void mask_scores(float (&s)[N], int32_t upper, int32_t lower)
{
    int32_t shift = (int32_t)(threadIdx.x % 4) * 2;
    upper -= shift;
    lower -= shift;
#pragma unroll
    for (int i = 0; i < N; i++)
        if (i / 4 * 8 + (i & 1) >= ((i & 2) != 0 ? lower : upper))
            s[i] = -INFINITY;
}

/* The keys of a block that a row meets: from .. to - 1. */
struct key_range {
    int32_t from, to;
};

/* Masks the scores of keys that a row does not meet. */
template <int N> PRS_DEVICE void mask_ranges(float (&s)[N], const struct key_range (&rows)[2])
{
    int32_t shift = (int32_t)(threadIdx.x % 4) * 2;
    uint32_t from[2] = {(uint32_t)(rows[0].from - shift), (uint32_t)(rows[1].from - shift)};
    uint32_t count[2] = {(uint32_t)(rows[0].to - rows[0].from), (uint32_t)(rows[1].to - rows[1].from)};
#pragma unroll
    for (int i = 0; i < N; i++) /* below `from` the unsigned difference is huge */
        if ((uint32_t)(i / 4 * 8 + (i & 1)) - from[i >> 1 & 1] >= count[i >> 1 & 1])
            s[i] = -INFINITY;
}

/* The keys of a block that the row at `position` meets. first: position of the block's first key. */
PRS_DEVICE struct key_range find_range(const struct prs_attention_args &args, uint32_t position, uint32_t first)
{
    struct prs_span span = prs_stripe_meets(&args.stripes, position);
    return {(int32_t)(span.from - first), (int32_t)(span.to - first)};
}

/* cap * tanh(x * cap_inner / 2): tanh by the exponential, whose error is far below that of tanh.approx. */
PRS_DEVICE float cap_score(const struct prs_attention_args &args, float x)
{
    return args.cap - divide_fast(2 * args.cap, 1 + exp2_fast(x * args.cap_inner));
}

template <int N> PRS_DEVICE void cap_scores(const struct prs_attention_args &args, float (&s)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++)
        s[i] = cap_score(args, s[i]);
}

/* Turns scores into probabilities. shrink: the factor for earlier probabilities and their products. With KEEP it stays
 * 1 as long as no probability exceeds 2^8. That loses nothing, because the result is divided by the sum. BARE: a row
 * may have met no key until now. */
template <bool KEEP, bool BARE, int N>
PRS_DEVICE void soften(float (&s)[N], struct row_state *rows, float (&shrink)[2], float scale_log2)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float top = rows->top[h], sum = 0, base;
#pragma unroll
        for (int i = 2 * h; i < N; i += 4)
            top = fmaxf(top, fmaxf(s[i], s[i + 1]));
        top = quad_max(top);
        if (KEEP && (top - rows->top[h]) * scale_log2 <= 8.0f) /* at first the difference is infinite */
            top = rows->top[h];
        base = BARE && top == -INFINITY ? 0 : top;
        shrink[h] = exp2_fast((rows->top[h] - base) * scale_log2);
        rows->top[h] = top;
        base *= scale_log2;
#pragma unroll
        for (int i = 2 * h; i < N; i += 4) {
            s[i] = exp2_fast(fmaf(s[i], scale_log2, -base));
            s[i + 1] = exp2_fast(fmaf(s[i + 1], scale_log2, -base));
            sum += s[i] + s[i + 1];
        }
        rows->sum[h] = fmaf(rows->sum[h], shrink[h], sum);
    }
}

/* Probabilities as the A operand of the next product: the accumulators of two times 8 columns hold exactly what one
 * step of 16 needs. */
template <int TYPE, int N> PRS_DEVICE void pack_probabilities(uint32_t (&p)[N / 2], const float (&s)[N])
{
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        p[i] = element<TYPE>::pack(s[2 * i], s[2 * i + 1]);
}

template <int N> PRS_DEVICE void shrink_result(float (&o)[N], const float (&shrink)[2])
{
#pragma unroll
    for (int i = 0; i < N; i++)
        o[i] *= shrink[i >> 1 & 1];
}

/* Adds a sink, a score without a value, to both rows of a thread. Four threads share a row: one of them counts it. */
template <int N>
PRS_DEVICE void add_sink(const struct prs_attention_args &args, float sink, float (&o)[N], struct row_state *rows)
{
    float shrink[2];
    sink *= 1.44269504f;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float top = rows->top[h] * args.scale_log2, most = fmaxf(top, sink);
        shrink[h] = exp2_fast(top - most);
        /* MUTANT(emulator attention_striped/sinks_are_right) a sink counts once: s/threadIdx.x % 4 == 0/true/ */
        rows->sum[h] = rows->sum[h] * shrink[h] + (threadIdx.x % 4 == 0 ? exp2_fast(sink - most) : 0);
        rows->top[h] = most / args.scale_log2;
    }
    shrink_result(o, shrink);
}

/* Four threads of one row each hold 4 bytes of each of four 16-byte vectors. Afterwards each holds one whole vector. */
PRS_DEVICE void transpose_quad(uint32_t (&w)[4])
{
    uint32_t lane = threadIdx.x % 4;
#pragma unroll
    for (int step = 1; step <= 2; step *= 2) {
        bool odd = (lane & step) != 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if ((i & step) == 0) {
                uint32_t other = __shfl_xor_sync(~0u, odd ? w[i] : w[i + step], step);
                w[i] = odd ? other : w[i];
                w[i + step] = odd ? w[i + step] : other;
            }
        }
    }
}

/* Writes one of the two rows of a quad of threads. Each thread gathers 16 bytes of every 32 columns. */
template <int TYPE, int N>
PRS_DEVICE void round_row(uint32_t (&w)[N / 16][4], const float (&o)[N], int half, float factor)
{
#pragma unroll
    for (int i = 0; i < N / 16; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++)
            w[i][j] =
                element<TYPE>::pack(o[i * 16 + j * 4 + half * 2] * factor, o[i * 16 + j * 4 + half * 2 + 1] * factor);
        transpose_quad(w[i]);
    }
}

/* Writes directly from registers: shared memory has room only where the queries are, and the next task's queries are
 * there by now. No branch stands between the shuffles, because each shuffle would then wait for the previous one.
 * first: row of this warp's first row in the segment. */
template <int TYPE, int N>
PRS_DEVICE void write_rows(const struct prs_attention_args &args, const struct prs_attention_task &t, uint32_t first,
                           const float (&o)[N], const struct row_state &rows)
{
    const struct prs_attention_schedule *s = &args.schedule;
    const struct prs_attention_strides *to = &args.out_strides;
    uint32_t lane = threadIdx.x % 32, row = first + lane / 4;
    uint64_t head = (uint64_t)t.batch * s->heads_q + t.head;
    typename element<TYPE>::bits *out =
        (typename element<TYPE>::bits *)args.out + t.batch * to->batch + t.head * to->head + t.segment * to->segment;
    float *lse = !args.lse ? NULL : args.lse + (head * s->segments + t.segment) * s->segment_rows;
    float sum[2] = {quad_sum(rows.sum[0]), quad_sum(rows.sum[1])};
    uint32_t w[2][N / 16][4];
#pragma unroll
    for (int h = 0; h < 2; h++)
        round_row<TYPE>(w[h], o, h, 1.0f / sum[h]);
#pragma unroll
    for (int h = 0; h < 2; h++, row += 8) {
        if (row >= s->segment_rows)
            continue;
#pragma unroll
        for (int i = 0; i < N / 16; i++)
            *(uint4 *)(out + row * to->row + i * 32 + lane % 4 * element<TYPE>::in_vector) =
                make_uint4(w[h][i][0], w[h][i][1], w[h][i][2], w[h][i][3]);
        if (lse && lane % 4 == 0)
            lse[row] = fmaf(rows.top[h], args.scale, logf(sum[h]));
    }
}

#endif

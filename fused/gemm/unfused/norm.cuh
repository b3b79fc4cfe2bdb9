/* SPDX-License-Identifier: Apache-2.0 */
/* The norm of a sum's rows. A cluster has whole rows, and its CTAs divide the items of each. Sums stay in shared memory
 * in fp32 until the norm of their row is known, so nothing is rounded before it. All ranks divide rows alike: they add
 * up squares in the same order, and get the same bits. */
#ifndef PERSEUS_FUSED_NORM_CUH
#define PERSEUS_FUSED_NORM_CUH

#include "fused/core/quantise.cuh"
#include "fused/gemm/unfused/inbox.cuh"

enum {
    ROW_MOST_CTAS = 8, /* of a cluster */
    ROW_MOST_WARPS = 16,
    /* shared memory: the cluster's number; two sets of what its warps have; of each item 8 sums and 8 weights */
    ROW_SLOTS = 16,
    ROW_SLOT_WORDS = ROW_MOST_CTAS * ROW_MOST_WARPS,
    ROW_ITEMS = ROW_SLOTS + 2 * ROW_SLOT_WORDS * 4,
    ROW_ITEM_BYTES = 48,
    ROW_BLOCK = PRS_SCALE_BLOCK / PRS_INBOX_ITEM /* items that share a scale */
};

/* How many items of a row each CTA has: whole blocks, except perhaps for the last CTAs. */
static __host__ __device__ inline uint32_t row_step(uint32_t items, uint32_t ctas)
{
    return prs_ceil_div(prs_ceil_div(items, ctas), ROW_BLOCK) * ROW_BLOCK;
}

struct row_cta {
    uint32_t rank, ctas;   /* in the cluster */
    uint32_t items;        /* of a row */
    uint32_t first, count; /* those of this CTA */
    uint32_t turn;         /* of row_total() */
};

PRS_DEVICE struct row_cta row_cta_here(const struct prs_row_norm &n)
{
    struct row_cta c = {blockIdx.x % n.ctas, n.ctas, n.columns / PRS_INBOX_ITEM, 0, 0, 0};
    uint32_t step = row_step(c.items, c.ctas);
    c.first = min(c.rank * step, c.items);
    c.count = min(step, c.items - c.first);
    return c;
}

/* ---- shared memory ---- */
PRS_DEVICE uint4 *kept_at(const struct row_cta &c, uint32_t k, uint32_t vector)
{
    return (uint4 *)(dynamic_shared() + ROW_ITEMS) + (vector * c.count + k);
}

PRS_DEVICE void keep_item(const struct row_cta &c, uint32_t k, const float (&s)[PRS_INBOX_ITEM])
{
    *kept_at(c, k, 0) = pack_vector<PRS_DTYPE_FP32>(&s[0]);
    *kept_at(c, k, 1) = pack_vector<PRS_DTYPE_FP32>(&s[4]);
}

PRS_DEVICE void kept_item(const struct row_cta &c, uint32_t k, float (&s)[PRS_INBOX_ITEM])
{
    unpack_vector<PRS_DTYPE_FP32>(*kept_at(c, k, 0), &s[0]);
    unpack_vector<PRS_DTYPE_FP32>(*kept_at(c, k, 1), &s[4]);
}

PRS_DEVICE void keep_weights(const struct row_cta &c, const struct prs_row_norm &n)
{
    for (uint32_t k = threadIdx.x; n.weight && k < c.count; k += blockDim.x)
        *kept_at(c, k, 2) = ((const uint4 *)n.weight)[c.first + k];
}

/* ---- the cluster ---- */
/* Begins a cluster whose CTAs draw one number together. Meanwhile the weights are loaded. */
PRS_DEVICE uint32_t begin_and_draw(const struct row_cta &c, const struct prs_row_norm &n, uint32_t *drawn)
{
    uint32_t *shared = (uint32_t *)dynamic_shared(), number = 0;
    bool draws = c.rank == 0 && threadIdx.x == 0;
    cluster_arrive();
    keep_weights(c, n);
    if (draws)
        number = draw_one(drawn, gridDim.x / c.ctas);
    __syncwarp();
    cluster_wait(); /* all CTAs have begun, so that their shared memory may be written */
    for (uint32_t i = 0; draws && i < c.ctas; i++)
        store_shared_at(shared, number, i);
    __syncwarp();
    cluster_arrive();
    cluster_wait();
    return *(volatile uint32_t *)shared;
}

/* The sum, or the largest, of what all threads of the cluster have; all of them call it. A set of slots is written
 * again two turns later, when all CTAs have passed the barrier of the next turn, and so have read it. */
template <bool LARGEST> PRS_DEVICE float row_total(struct row_cta *c, float x)
{
    uint32_t warps = blockDim.x / 32, lane = threadIdx.x % 32;
    /* MUTANT(emulator norm/rows_are_normalised) two sets of slots: s/& 1/& 0/ */
    uint32_t *slots = (uint32_t *)(dynamic_shared() + ROW_SLOTS) + (c->turn++ & 1) * ROW_SLOT_WORDS;
    float total = 0;
#pragma unroll
    for (int d = 16; d != 0; d /= 2) {
        float other = __shfl_xor_sync(~0u, x, d);
        x = LARGEST ? fmaxf(x, other) : x + other;
    }
    if (lane < c->ctas)
        store_shared_at(slots + c->rank * warps + threadIdx.x / 32, __float_as_uint(x), lane);
    __syncwarp();
    cluster_arrive();
    /* MUTANT(emulator norm/rows_are_normalised) the warps of a cluster wait for each other: delete */
    cluster_wait();
    for (uint32_t i = 0; i < c->ctas * warps; i++) {
        float other = __uint_as_float(((volatile uint32_t *)slots)[i]);
        total = LARGEST ? fmaxf(total, other) : total + other;
    }
    return total;
}

/* ---- a row ---- */
/* Adds 8 elements of an array to s. */
template <int TYPE> PRS_DEVICE void add_vectors(float (&s)[PRS_INBOX_ITEM], const void *from, uint64_t at)
{
    typedef element<TYPE> e;
#pragma unroll
    for (uint32_t j = 0; j < PRS_INBOX_ITEM; j += e::in_vector) {
        float x[e::in_vector];
        unpack_vector<TYPE>(*(const uint4 *)((const typename e::bits *)from + at + j), x);
#pragma unroll
        for (uint32_t i = 0; i < e::in_vector; i++)
            s[j + i] += x[i];
    }
}

PRS_DEVICE float squares_of(const float (&s)[PRS_INBOX_ITEM])
{
    float x = 0;
#pragma unroll
    for (uint32_t i = 0; i < PRS_INBOX_ITEM; i++)
        x += s[i] * s[i];
    return x;
}

PRS_DEVICE void store_quantised(const struct prs_row_norm &n, const struct row_cta &c, uint64_t row, uint32_t k,
                                const float (&y)[PRS_INBOX_ITEM], float inverse)
{
    uint32_t packed[2];
    quantise(y, inverse, packed);
    *(uint2 *)(n.quantised + row * n.columns + (c.first + k) * PRS_INBOX_ITEM) = make_uint2(packed[0], packed[1]);
}

/* One scale for the row. */
PRS_DEVICE void quantise_row(const struct prs_row_norm &n, struct row_cta *c, uint64_t row, float largest)
{
    /* MUTANT(emulator norm/rows_are_quantised) a row's scale is that of all its columns:
     * s/row_total<true>(c, largest)/largest/ */
    float scale = scale_of_largest(row_total<true>(c, largest)), y[PRS_INBOX_ITEM];
    if (c->rank == 0 && threadIdx.x == 0)
        n.scale[row] = scale;
    for (uint32_t k = threadIdx.x; k < c->count; k += blockDim.x) {
        kept_item(*c, k, y);
        store_quantised(n, *c, row, k, y, 1.0f / scale);
    }
}

/* Divides the row that is kept by its root mean square, times the weights. squares: of this thread's elements. All
 * threads of the cluster call it. */
template <int TYPE>
PRS_DEVICE void finish_row(const struct prs_row_norm &n, struct row_cta *c, uint64_t row, float squares)
{
    /* MUTANT(emulator norm/rows_are_normalised) the mean is of all columns: s#/ (float)n.columns#/ (float)c->count# */
    float factor = 1.0f / sqrtf(row_total<false>(c, squares) / (float)n.columns + n.eps), largest = 0;
    uint32_t lane = threadIdx.x % 32;
    for (uint32_t k = threadIdx.x; k - lane < c->count; k += blockDim.x) { /* whole warps */
        float y[PRS_INBOX_ITEM] = {}, w[PRS_INBOX_ITEM] = {};
        bool inside = k < c->count;
        if (inside) {
            kept_item(*c, k, y);
            if (n.weight)
                add_eight<TYPE>(w, *kept_at(*c, k, 2));
#pragma unroll
            for (uint32_t i = 0; i < PRS_INBOX_ITEM; i++)
                y[i] = n.weight ? y[i] * factor * w[i] : y[i] * factor;
            if (n.normed)
                store_eight<TYPE, true>(n.normed, row * n.columns + (c->first + k) * PRS_INBOX_ITEM, y, PRS_INBOX_ITEM);
        }
        if (n.scaling == PRS_SCALING_BLOCKS) {
            /* MUTANT(emulator norm/rows_are_quantised) a block has 128 columns: s/<ROW_BLOCK>/<8>/ */
            float scale = scale_of_largest(largest_of_lanes<ROW_BLOCK>(largest_magnitude(y)));
            if (inside)
                store_quantised(n, *c, row, k, y, 1.0f / scale);
            if (inside && lane % ROW_BLOCK == 0)
                n.scale[(c->first + k) / ROW_BLOCK * n.scale_pitch + row] = scale;
        } else if (n.scaling == PRS_SCALING_ROWS && inside) {
            keep_item(*c, k, y);
            largest = fmaxf(largest, largest_magnitude(y));
        } else if (n.scaling == PRS_SCALING_TENSOR && inside) {
            store_quantised(n, *c, row, k, y, 1.0f / *n.scale);
        }
    }
    if (n.scaling == PRS_SCALING_ROWS)
        quantise_row(n, c, row, largest);
}

/* ---- a sum by inboxes ---- */
/* The rows of every rank's part that a cluster handles at a time. */
struct row_range {
    uint32_t first, count;
};

PRS_DEVICE struct row_range row_range_of(const struct prs_unfused_row_sum &a, uint32_t number, uint32_t clusters)
{
    uint32_t rows = a.sum.part / a.norm.columns, each = prs_ceil_div(rows, clusters);
    uint32_t first = number * each, left = first < rows ? rows - first : 0;
    return {first, min(each, left)};
}

/* The items of those rows that this CTA has. A cluster of several CTAs has one row. */
PRS_DEVICE struct inbox_share row_share_of(const struct prs_unfused_row_sum &a, const struct row_cta &c,
                                           const struct row_range &rows, uint32_t number)
{
    struct inbox_share share;
    share.bank = bank_of(a.sum, number);
    share.items = (uint32_t)prs_inbox_items(a.sum.part);
    share.first = rows.first * c.items + c.first;
    share.count = rows.count == 0 ? 0 : (rows.count - 1) * c.items + c.count;
    return share;
}

template <int TYPE, int RESULT>
PRS_DEVICE void sum_row(const struct prs_unfused_row_sum &a, const struct inbox_share &share, struct row_cta *c,
                        uint32_t part_row)
{
    const struct prs_epilogue &e = a.sum.epilogue;
    uint64_t row = a.sum.c_first / a.norm.columns + part_row;
    float squares = 0;
    for (uint32_t k = threadIdx.x; k < c->count; k += blockDim.x) {
        uint32_t i = part_row * c->items + c->first + k, column = (c->first + k) * PRS_INBOX_ITEM;
        float s[PRS_INBOX_ITEM] = {}, residual[PRS_INBOX_ITEM] = {};
        if (e.residual) /* before the wait */
            add_vectors<RESULT>(residual, e.residual, row * e.residual_pitch + column);
        add_partials<TYPE, true>(a.sum, share, i, PRS_INBOX_ITEM, s);
        if (e.bias)
            add_vectors<TYPE>(s, e.bias, column);
        activate(e.activation, s);
#pragma unroll
        for (uint32_t j = 0; j < PRS_INBOX_ITEM; j++)
            s[j] += residual[j];
        store_eight<RESULT, true>(a.sum.c, row * a.norm.columns + column, s, PRS_INBOX_ITEM);
        keep_item(*c, k, s);
        /* MUTANT(emulator norm/rows_are_normalised) squares of all items of a thread: s/+=/=/ */
        squares += squares_of(s);
    }
    finish_row<TYPE>(a.norm, c, row, squares);
}

/* In one hop: every rank adds up all rows that it needs. A cluster waits only for clusters of its own number on other
 * ranks, so any number of resident clusters makes progress. */
template <int TYPE, int RESULT>
static __global__ void sum_rows_by_inbox(const __grid_constant__ struct prs_unfused_row_sum a)
{
    struct row_cta c = row_cta_here(a.norm);
    uint32_t number = begin_and_draw(c, a.norm, &((struct prs_inbox *)a.sum.inbox[0])->drawn);
    struct row_range rows = row_range_of(a, number % PRS_INBOX_LAUNCH, gridDim.x / c.ctas);
    struct inbox_share share = row_share_of(a, c, rows, number);
    /* The normed rows may lie where the partial sums were: row_total() has a barrier before the first. */
    send_partials<TYPE, true>(a.sum, share);
    for (uint32_t r = rows.first; r < rows.first + rows.count; r++)
        sum_row<TYPE, RESULT>(a, share, &c, r);
}

/* ---- rows that are there ---- */
template <int TYPE, int RESULT> static __global__ void norm_rows(const __grid_constant__ struct prs_unfused_norm_rows a)
{
    struct row_cta c = row_cta_here(a.norm);
    uint32_t clusters = gridDim.x / c.ctas, rows = a.rows;
    if (a.rows_on_device)
        rows = min(rows, *a.rows_on_device / a.rows_divisor);
    cluster_arrive();
    keep_weights(c, a.norm);
    cluster_wait(); /* as in begin_and_draw() */
    for (uint64_t row = blockIdx.x / c.ctas; row < rows; row += clusters) {
        float squares = 0;
        for (uint32_t k = threadIdx.x; k < c.count; k += blockDim.x) {
            uint64_t at = row * a.pitch + (c.first + k) * PRS_INBOX_ITEM;
            float s[PRS_INBOX_ITEM] = {};
            add_vectors<RESULT>(s, a.from, at);
            if (a.copy)
                store_eight<RESULT, true>(a.copy, at, s, PRS_INBOX_ITEM);
            keep_item(c, k, s);
            squares += squares_of(s);
        }
        finish_row<TYPE>(a.norm, &c, row, squares);
    }
}

#endif

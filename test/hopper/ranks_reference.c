/* SPDX-License-Identifier: Apache-2.0 */
#include "test/hopper/ranks_reference.h"

#include <math.h>
#include <stdlib.h>

/* Relative error of one rounding to the type of sums. */
static double rounding(const struct ranks_product *p)
{
    return p->shape.dtype == PRS_DTYPE_FP16 ? 0x1.02p-11 : 0x1.02p-8;
}

/* The relative error of the last rounding. Unfused, a gated product is rounded before it is finished. A fused one in
 * e4m3 is quantised of fp32, in which the activations are approximations. */
static double last_rounding(const struct ranks_product *p)
{
    if (is_quantised(p))
        return p->tuning.path == PRS_GEMM_PATH_FUSED ? 0x1p-19 : rounding(p);
    return is_wide(p) && !p->shape.gated ? 0x1.02p-24 : rounding(p);
}

/* The node of the rank that adds up this element; every other node rounds its partial sum. The fused and the
 * unfused all-reduce assign elements to the same ranks wherever both can run. */
static uint32_t owner_node(const struct ranks_product *p, uint32_t rank, uint64_t element)
{
    uint64_t each = ((uint64_t)p->shape.m * columns_of(p) + p->world - 1) / p->world;
    uint32_t owner = p->shape.op == PRS_GEMM_ALLREDUCE ? (uint32_t)(element / ((each + 7) / 8 * 8)) : rank;
    return owner / (p->world / p->nodes);
}

static double activated(uint32_t activation, double x)
{
    switch (activation) {
    case PRS_ACTIVATION_RELU:
        return x > 0 ? x : 0;
    case PRS_ACTIVATION_GELU:
        return x * (1 + erf(x / sqrt(2))) / 2;
    case PRS_ACTIVATION_GELU_TANH:
        return x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))) / 2;
    case PRS_ACTIVATION_SILU:
        return x / (1 + exp(-x));
    default:
        return x;
    }
}

static double bias_of(const struct ranks_product *p, uint32_t rank, uint64_t column)
{
    return p->bias ? ranks_element_of(sum_type(p), key_bias(p, rank), column) : 0;
}

/* Applies the epilogue to a sum; up: of the same column, if gated. The steepest activation multiplies an error by 1.13.
 * The unfused path also rounds what it adds up in between. */
static struct estimate finished(const struct ranks_product *p, uint32_t rank, uint64_t row, uint64_t column,
                                struct estimate sum, struct estimate up)
{
    double bias = bias_of(p, rank, column), x = sum.value + bias, bound = sum.bound, size = fabs(bias);
    if (!p->bias && p->residual == RANKS_NO_RESIDUAL && p->shape.activation == PRS_ACTIVATION_NONE && !p->shape.gated)
        return sum;
    x = activated(p->shape.activation, x);
    if (p->shape.gated) {
        double factor = up.value + bias_of(p, rank, columns_of(p) + column);
        bound = bound * (fabs(factor) + up.bound) + fabs(x) * up.bound;
        x *= factor;
    }
    if (p->residual != RANKS_NO_RESIDUAL) {
        double residual =
            residual_element(p, key_residual(p, rank), row * pitch_of(p->shape.ldc, columns_of(p)) + column);
        x += residual, size += fabs(residual);
    }
    return (struct estimate){x, bound * 1.15 + (fabs(x) + size) * last_rounding(p) + 0x1p-18};
}

/* Where a sum over K finds its operands: number i of K at start + i * step. */
struct operand {
    uint32_t key;
    uint64_t start, step;
};

/* The numbers of an operand. Samples share rows of A and columns of B, and drawing and rounding the numbers takes much
 * longer than multiplying them, so each rank's thread keeps what it has drawn until ranks_reference_end(). */
enum { VECTORS = 4096 };
struct vector {
    struct operand from;
    uint32_t dtype, count;
    float *numbers;
};
static _Thread_local struct vector *vectors; /* indexed by a hash of where they start: those of A, then those of B */

static const float *numbers_of(const struct ranks_product *p, bool of_b, const struct operand *x)
{
    struct vector *v;
    if (!vectors)
        vectors = calloc(2 * VECTORS, sizeof(*vectors));
    if (!vectors)
        abort();
    v = &vectors[of_b * VECTORS + ranks_mix(x->key, (uint32_t)x->start, (uint32_t)x->step) % VECTORS];
    if (v->numbers && v->from.key == x->key && v->from.start == x->start && v->from.step == x->step &&
        v->dtype == p->shape.dtype && v->count == p->shape.k)
        return v->numbers;
    free(v->numbers);
    *v = (struct vector){*x, p->shape.dtype, p->shape.k, malloc(p->shape.k * sizeof(*v->numbers))};
    if (!v->numbers)
        abort();
    for (uint32_t i = 0; i < p->shape.k; i++)
        v->numbers[i] = input(p, x->key, x->start + i * x->step);
    return v->numbers;
}

void ranks_reference_end(void)
{
    for (uint32_t i = 0; vectors && i < 2 * VECTORS; i++)
        free(vectors[i].numbers);
    free(vectors);
    vectors = NULL;
}

static struct estimate exact_sum(const struct ranks_product *p, const float *a, const float *b)
{
    double sum = 0, magnitude = 0;
    for (uint64_t i = 0; i < p->shape.k; i++) {
        double x = (double)a[i] * b[i];
        sum += x;
        magnitude += fabs(x);
    }
    return (struct estimate){sum, magnitude * 0x1p-21};
}

/* The scales of one row of A and one column of B, at a place of K. */
static double scale_of(const struct ranks_product *p, uint32_t key_a, uint32_t key_b, uint64_t row, uint64_t column,
                       uint64_t k)
{
    uint64_t block = k / 128;
    if (p->shape.scaling == PRS_SCALING_BLOCKS)
        return scale(key_a, block * scaled_rows(p) + row) * scale(key_b, column / 128 * (p->shape.k / 128) + block);
    return p->shape.scaling == PRS_SCALING_TENSOR ? scale(key_a, 0) * scale(key_b, 0)
                                                  : scale(key_a, row) * scale(key_b, column);
}

/* The sum of e4m3, of this row of the rank's A, with what the tensor cores may lose. Scaling rounds a few times in
 * fp32. */
static struct estimate scaled_sum(const struct ranks_product *p, const float *a, const float *b, uint32_t scale_a,
                                  uint32_t scale_b, uint64_t row, uint64_t column)
{
    bool promotes = !p->shape.fast_accumulation, blocks = p->shape.scaling == PRS_SCALING_BLOCKS;
    double products[32], factor = blocks ? 1 : scale_of(p, scale_a, scale_b, row, column, 0), magnitude = 0;
    struct ranks_fp8_sum s = {0};
    for (uint64_t i = 0; i < p->shape.k; i += 32) {
        uint32_t count = p->shape.k - i < 32 ? (uint32_t)(p->shape.k - i) : 32;
        for (uint32_t j = 0; j < count; j++)
            products[j] = (double)a[i + j] * b[i + j];
        ranks_fp8_add(&s, products, count);
        if ((promotes && i % 128 == 96) || i + 32 >= p->shape.k) {
            double held = blocks ? scale_of(p, scale_a, scale_b, row, column, i) : 1;
            magnitude += fabs(s.held * held);
            ranks_fp8_promote(&s, held);
        }
    }
    return (struct estimate){s.sum * factor, (s.lost + magnitude * 0x1p-21) * factor};
}

/* Returns one element of the product, which the owner of the element of C `result` adds up. The error that is allowed:
 * one rounding of each partial sum, of the sum of each other node and of the result, and fp32 accumulation. */
static struct estimate product(const struct ranks_product *p, uint32_t rank, uint32_t epoch, uint64_t row,
                               uint64_t column, uint64_t result)
{
    const struct prs_gemm_shape *s = &p->shape;
    bool reduces = s->op == PRS_GEMM_REDUCE_SCATTER || s->op == PRS_GEMM_ALLREDUCE;
    uint64_t a_row = row;
    double total = 0, partials = 0, lost = 0, node = 0;
    uint32_t locals = p->world / p->nodes, owner = owner_node(p, rank, result);
    if (s->op == PRS_GEMM_REDUCE_SCATTER)
        a_row += rank * rows_of(p, PRS_GEMM_REDUCE_SCATTER);
    for (uint32_t t = 0; t < (reduces ? p->world : 1); t++) {
        uint32_t a_rank = reduces ? t : rank, b_rank = reduces ? t : rank;
        uint64_t r = a_row;
        struct operand from_a, from_b;
        const float *a, *b;
        struct estimate sum;
        if (s->op == PRS_GEMM_ALLGATHER) {
            a_rank = (uint32_t)(row / (s->m / p->world));
            r = row % (s->m / p->world);
        }
        from_a = (struct operand){key_a(p, epoch, a_rank), r * pitch_of(s->lda, s->k), 1};
        from_b = s->b_transposed ? (struct operand){key_b(p, b_rank), column * pitch_of(s->ldb, s->k), 1}
                                 : (struct operand){key_b(p, b_rank), column, pitch_of(s->ldb, s->n)};
        b = numbers_of(p, true, &from_b);
        a = numbers_of(p, false, &from_a);
        sum = is_scaled(p) ? scaled_sum(p, a, b, key_scale_a(p, epoch, a_rank), KEY_SCALE_B + b_rank, r, column)
                           : exact_sum(p, a, b);
        lost += sum.bound;
        total += sum.value;
        partials += reduces ? fabs(sum.value) : 0;
        node = t % locals == 0 ? sum.value : node + sum.value;
        if (reduces && t % locals == locals - 1 && t / locals != owner)
            partials += fabs(node);
    }
    return (struct estimate){total, fabs(total) * last_rounding(p) + partials * rounding(p) + lost};
}

struct estimate ranks_reference(const struct ranks_product *p, uint32_t rank, uint32_t epoch, uint64_t row,
                                uint64_t column)
{
    uint64_t columns = columns_of(p), result = row * columns + column;
    struct estimate sum = product(p, rank, epoch, row, column, result), up = {0, 0};
    if (p->shape.gated)
        up = product(p, rank, epoch, row, columns + column, result);
    return finished(p, rank, row, column, sum, up);
}

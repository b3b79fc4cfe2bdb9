/* SPDX-License-Identifier: Apache-2.0 */
#include "fused/gemm/scales.h"

#include <errno.h>

#include "transport/util/error.h"

static bool is_scaled(const struct prs_gemm_shape *s)
{
    return s->dtype == PRS_DTYPE_E4M3;
}

static int check_blocks(const struct prs_gemm_shape *s)
{
    if (s->k % PRS_SCALE_BLOCK != 0)
        return prs_fail(-EINVAL, "fused: scales of blocks need a k that is a multiple of %u, and k is %u",
                        PRS_SCALE_BLOCK, s->k);
    if (s->gated && s->n % (2 * PRS_SCALE_BLOCK) != 0)
        return prs_fail(-EINVAL,
                        "fused: a gated product of %u columns with scales of blocks: they must be a multiple of %u, so "
                        "that no block has columns of both halves",
                        s->n, 2 * PRS_SCALE_BLOCK);
    if (s->fast_accumulation)
        return prs_fail(-EINVAL,
                        "fused: fast_accumulation is set, but scales of blocks differ every %u of k: the sums "
                        "of each block are promoted",
                        PRS_SCALE_BLOCK);
    return 0;
}

/* C in e4m3. */
static int check_quantised(const struct prs_gemm_shape *s)
{
    uint32_t columns = prs_result_columns(s);
    if (s->op != PRS_GEMM_ALONE && s->op != PRS_GEMM_ALLGATHER)
        return prs_fail(-EINVAL,
                        "fused: c_dtype %u (e4m3) of operation %d: a sum over ranks is bf16 or fp32, and what its norm "
                        "makes of it may be e4m3 (quantised)",
                        s->c_dtype, (int)s->op);
    if (s->norm)
        return prs_fail(-EINVAL, "fused: c_dtype %u (e4m3): C has scales, and a norm takes rows without", s->c_dtype);
    if (columns % PRS_SCALE_BLOCK != 0)
        return prs_fail(-EINVAL, "fused: C in e4m3 has a scale for each %u columns, which do not divide %u",
                        PRS_SCALE_BLOCK, columns);
    return 0;
}

int prs_scales_check_shape(const struct prs_gemm_shape *s)
{
    const char *type = prs_element_find(s->dtype)->name;
    if (!is_scaled(s) && (s->scaling != PRS_SCALING_NONE || s->fast_accumulation))
        return prs_fail(-EINVAL,
                        "fused: scaling %u, fast_accumulation %u: only products of e4m3 have them, and A and B "
                        "are %s",
                        s->scaling, s->fast_accumulation, type);
    if (!is_scaled(s))
        return 0;
    if (s->scaling == PRS_SCALING_NONE || s->scaling > PRS_SCALING_BLOCKS)
        return prs_fail(-EINVAL, "fused: scaling %u: a product of %s needs PRS_SCALING_TENSOR, _ROWS or _BLOCKS",
                        s->scaling, type);
    if (!s->b_transposed)
        return prs_fail(-EINVAL,
                        "fused: B of a product of %s must be [n, k] (b_transposed): the tensor cores take no "
                        "other layout of one-byte types",
                        type);
    if (s->c_dtype == PRS_DTYPE_E4M3) {
        int r = check_quantised(s);
        if (r)
            return r;
    }
    return s->scaling == PRS_SCALING_BLOCKS ? check_blocks(s) : 0;
}

uint64_t prs_scales_rows_of_a(const struct prs_gemm_plan *p, const struct prs_gemm_operands *x)
{
    uint64_t rows = x->m != 0 ? x->m : p->shape.m;
    return p->shape.op == PRS_GEMM_ALLGATHER ? rows / p->args.schedule.place.world : rows;
}

int prs_scales_check_result(const struct prs_gemm_plan *p, const struct prs_gemm_operands *x)
{
    uint64_t rows = x->m != 0 ? x->m : p->shape.m;
    if (x->residual)
        return prs_fail(-EINVAL, "fused: residual %p: C is e4m3, and nothing is added to it", x->residual);
    if (x->quantised_scaling != PRS_SCALING_BLOCKS)
        return prs_fail(-EINVAL,
                        "fused: quantised_scaling %u: C in e4m3 has a scale for each row and %u columns "
                        "(PRS_SCALING_BLOCKS)",
                        x->quantised_scaling, PRS_SCALE_BLOCK);
    if (x->quantised || x->normed || x->norm_weight || x->norm_eps != 0)
        return prs_fail(-EINVAL, "fused: normed %p, quantised %p, norm_weight %p: the plan's shape has no norm",
                        x->normed, x->quantised, x->norm_weight);
    if (!x->quantised_scale || (uintptr_t)x->quantised_scale % sizeof(float) != 0)
        return prs_fail(-EINVAL, "fused: quantised_scale %p: the pointer must be 4-byte aligned, and not NULL",
                        (void *)x->quantised_scale);
    if (x->quantised_scale_pitch != 0 && x->quantised_scale_pitch < rows)
        return prs_fail(-EINVAL, "fused: quantised_scale_pitch %llu: it must be at least the %llu rows of C",
                        (unsigned long long)x->quantised_scale_pitch, (unsigned long long)rows);
    return 0;
}

int prs_scales_check_operands(const struct prs_gemm_plan *p, const struct prs_gemm_operands *x)
{
    const struct prs_gemm_shape *s = &p->shape;
    bool blocks = s->scaling == PRS_SCALING_BLOCKS;
    uint64_t rows = prs_scales_rows_of_a(p, x), pitch = x->scale_a_pitch != 0 ? x->scale_a_pitch : rows;
    uintptr_t alignment = s->scaling == PRS_SCALING_TENSOR ? sizeof(float) : 16;
    if (!is_scaled(s) && (x->scale_a || x->scale_b))
        return prs_fail(-EINVAL, "fused: scale_a %p, scale_b %p: this plan is of %s, which has no scales",
                        (const void *)x->scale_a, (const void *)x->scale_b, prs_element_find(s->dtype)->name);
    if (!blocks && x->scale_a_pitch != 0)
        return prs_fail(-EINVAL, "fused: scale_a_pitch is %llu, but only scales of blocks have one",
                        (unsigned long long)x->scale_a_pitch);
    if (!is_scaled(s))
        return 0;
    if (!x->scale_a || !x->scale_b || ((uintptr_t)x->scale_a | (uintptr_t)x->scale_b) % alignment != 0)
        return prs_fail(-EINVAL, "fused: scale_a %p, scale_b %p: pointers must be %u-byte aligned, and not NULL",
                        (const void *)x->scale_a, (const void *)x->scale_b, (uint32_t)alignment);
    if (blocks && (pitch < rows || pitch % 4 != 0))
        return prs_fail(-EINVAL,
                        "fused: scale_a has %llu floats from one block of k to the next, for %llu rows of A: they must "
                        "be at least as many, and a multiple of 4 (scale_a_pitch)",
                        (unsigned long long)pitch, (unsigned long long)rows);
    return 0;
}

void prs_scales_fill(struct prs_gemm_plan *p)
{
    const struct prs_gemm_operands *x = &p->operands;
    struct prs_scales *s = &p->args.scales;
    uint32_t scaling = p->shape.scaling;
    s->a = x->scale_a;
    s->b = x->scale_b;
    s->a_step = s->b_step = scaling == PRS_SCALING_ROWS;
    s->k_blocks = scaling == PRS_SCALING_BLOCKS ? p->shape.k / PRS_SCALE_BLOCK : 0;
    s->a_pitch = x->scale_a_pitch != 0 ? x->scale_a_pitch : prs_scales_rows_of_a(p, x);
    p->args.quantised = (struct prs_quantised_result){.to = NULL};
    if (p->shape.c_dtype == PRS_DTYPE_E4M3)
        p->args.quantised = (struct prs_quantised_result){
            .to = x->c,
            .scales = x->quantised_scale,
            .pitch = prs_pitch(p->shape.ldc, p->args.n),
            .scales_pitch = x->quantised_scale_pitch != 0 ? x->quantised_scale_pitch : p->rows};
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "fused/gemm/norm.h"

#include <errno.h>
#include <math.h>

#include "fused/gemm/scales.h"
#include "fused/gemm/unfused/inbox.h"
#include "transport/util/error.h"

int prs_norm_check_shape(const struct prs_gemm_shape *s)
{
    uint32_t columns = prs_result_columns(s);
    if (s->norm == PRS_NORM_NONE)
        return 0;
    if (s->norm != PRS_NORM_RMS)
        return prs_fail(-EINVAL, "fused: norm %u is not known", s->norm);
    if (s->op == PRS_GEMM_ALLGATHER)
        return prs_fail(-EINVAL, "fused: an ALLGATHER has no norm: each rank has a part of the columns");
    if (columns % PRS_INBOX_ITEM != 0 || columns > PRS_NORM_MOST_COLUMNS)
        return prs_fail(-EINVAL, "fused: a norm of %u columns: they must be a multiple of %u, and at most %u", columns,
                        PRS_INBOX_ITEM, PRS_NORM_MOST_COLUMNS);
    return 0;
}

/* Rows of C on this rank, in a launch of m rows. */
static uint64_t rows_of(const struct prs_gemm_plan *p, uint32_t m)
{
    return p->shape.op == PRS_GEMM_REDUCE_SCATTER ? m / p->args.schedule.place.world : m;
}

static int check_quantised(const struct prs_gemm_plan *p, const struct prs_gemm_operands *x)
{
    uint64_t rows = rows_of(p, x->m != 0 ? x->m : p->shape.m);
    bool blocks = x->quantised_scaling == PRS_SCALING_BLOCKS;
    if (!x->quantised_scaling != !x->quantised || !x->quantised_scale != !x->quantised)
        return prs_fail(-EINVAL, "fused: quantised %p, quantised_scale %p, quantised_scaling %u: all are set, or none",
                        x->quantised, (void *)x->quantised_scale, x->quantised_scaling);
    if (x->quantised_scaling > PRS_SCALING_BLOCKS)
        return prs_fail(-EINVAL, "fused: quantised_scaling %u is not known", x->quantised_scaling);
    if (((uintptr_t)x->quantised % 16 | (uintptr_t)x->quantised_scale % 4) != 0)
        return prs_fail(-EINVAL, "fused: quantised %p must be 16-byte aligned, quantised_scale %p 4-byte", x->quantised,
                        (void *)x->quantised_scale);
    if (blocks && p->args.n % PRS_SCALE_BLOCK != 0)
        return prs_fail(-EINVAL, "fused: quantised_scaling by blocks of %u columns, which do not divide %u",
                        PRS_SCALE_BLOCK, p->args.n);
    if (x->quantised_scale_pitch != 0 && (!blocks || x->quantised_scale_pitch < rows))
        return prs_fail(-EINVAL, "fused: quantised_scale_pitch %llu: it is of scales by blocks, and at least %llu rows",
                        (unsigned long long)x->quantised_scale_pitch, (unsigned long long)rows);
    return 0;
}

int prs_norm_check_operands(const struct prs_gemm_plan *p, const struct prs_gemm_operands *x)
{
    bool any = x->norm_weight || x->normed || x->quantised || x->quantised_scale || x->quantised_scaling ||
               x->quantised_scale_pitch || x->norm_eps != 0;
    if (p->shape.c_dtype == PRS_DTYPE_E4M3)
        return prs_scales_check_result(p, x);
    if (p->shape.norm == PRS_NORM_NONE)
        return any ? prs_fail(-EINVAL, "fused: normed %p, quantised %p, norm_weight %p: the plan's shape has no norm",
                              x->normed, x->quantised, x->norm_weight)
                   : 0;
    if (!x->normed && !x->quantised)
        return prs_fail(-EINVAL, "fused: neither normed nor quantised is set, but the plan's shape has a norm");
    if (((uintptr_t)x->normed | (uintptr_t)x->norm_weight) % 16 != 0)
        return prs_fail(-EINVAL, "fused: normed %p, norm_weight %p: pointers must be 16-byte aligned", x->normed,
                        x->norm_weight);
    if (x->normed == x->c || x->quantised == x->c || (x->normed == x->a && p->shape.k != 0))
        return prs_fail(-EINVAL, "fused: normed %p, quantised %p: neither may be C (%p), nor A (%p) of a product",
                        x->normed, x->quantised, x->c, x->a);
    if (!isfinite(x->norm_eps) || x->norm_eps < 0)
        return prs_fail(-EINVAL, "fused: norm_eps %g: it must be finite, and not negative", (double)x->norm_eps);
    return check_quantised(p, x);
}

struct prs_row_norm prs_norm_of(const struct prs_gemm_plan *p)
{
    const struct prs_gemm_operands *x = &p->operands;
    return (struct prs_row_norm){.weight = x->norm_weight,
                                 .normed = x->normed,
                                 .quantised = x->quantised,
                                 .scale = x->quantised_scale,
                                 .scale_pitch =
                                     x->quantised_scale_pitch != 0 ? x->quantised_scale_pitch : rows_of(p, p->rows),
                                 .scaling = x->quantised_scaling,
                                 .eps = x->norm_eps,
                                 .columns = p->args.n};
}

int prs_norm_launch(struct prs_gemm_plan *p, void *copy, cudaStream_t stream)
{
    struct prs_unfused_norm_rows a = {.norm = prs_norm_of(p),
                                      .from = p->operands.c,
                                      .copy = copy,
                                      .pitch = prs_pitch(p->shape.ldc, p->args.n),
                                      .rows = (uint32_t)rows_of(p, p->rows),
                                      .rows_on_device = p->operands.m_on_device,
                                      .rows_divisor =
                                          p->shape.op == PRS_GEMM_REDUCE_SCATTER ? p->args.schedule.place.world : 1,
                                      .type = p->shape.sum_dtype,
                                      .result = p->shape.c_dtype};
    return prs_unfused_norm_rows(&a, stream) == 0
               ? 0
               : prs_fail(-EIO, "fused: CUDA refused to launch a norm: %s", cudaGetErrorString(cudaGetLastError()));
}

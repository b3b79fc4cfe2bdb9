/* SPDX-License-Identifier: Apache-2.0 */
/* Grouped products of a plan: tensor maps and launches, also of the products of rows of any width that gradients
 * need. */
#include <errno.h>

#include "fused/core/tensor_map.h"
#include "fused/moe/plan.h"
#include "transport/util/error.h"

int prs_moe_enqueue_product(struct prs_moe_plan *p, const struct prs_moe_args *args, bool n_k, cudaStream_t stream)
{
    const struct prs_moe_tuning *t = &p->info.tuning;
    return prs_moe_kernels_product(args, !n_k, t->cluster, t->ctas / t->cluster, stream);
}

int prs_moe_encode_rows(const struct prs_moe_plan *p, const void *rows, uint32_t columns, CUtensorMap *map)
{
    uint32_t type = p->args.type;
    struct prs_tensor t = {.base = rows,
                           .type = type,
                           .columns = columns,
                           .rows = p->info.capacity,
                           .pitch = prs_moe_row_bytes(type, columns) / prs_element_bytes(type),
                           .box_rows = PRS_TILE_M / p->info.tuning.cluster,
                           .swizzled = true};
    return prs_tensor_map_encode(&t, map);
}

static void set_scales(struct prs_moe_args *args, const void *rows, const struct prs_moe_matrices *m)
{
    args->scales = (struct prs_scales){.a = (const float *)((const uint8_t *)rows + m->k),
                                       .b = m->scales,
                                       .a_pitch = 1,
                                       .a_step = prs_moe_scaled_bytes(m->k) / sizeof(float),
                                       .k_blocks = m->k / PRS_SCALE_BLOCK};
}

int prs_moe_encode_product(const struct prs_moe_plan *p, struct prs_moe_args *args, const void *rows,
                           const struct prs_moe_matrices *m, void *to)
{
    uint32_t type = p->args.type;
    struct prs_tensor weights = {.base = m->at, .type = type, .planes = args->route.experts_per_rank, .swizzled = true};
    struct prs_tensor out = {.base = to,
                             .type = PRS_MOE_TYPE,
                             .columns = args->n,
                             .rows = p->info.capacity,
                             .box_rows = 64,
                             .swizzled = true};
    int r;
    if (m->n_k)
        weights.columns = m->k, weights.rows = m->n,
        weights.box_rows = prs_epilogue_columns(&args->epilogue, prs_moe_tile_columns());
    else
        weights.columns = m->n, weights.rows = m->k, weights.box_rows = prs_element_step(type);
    if (prs_moe_is_scaled(p))
        set_scales(args, rows, m);
    r = prs_tensor_map_encode(&weights, &args->experts);
    return r != 0 ? r : prs_tensor_map_encode(&out, &args->out);
}

int prs_moe_encode_plain(const struct prs_moe_plan *p, struct prs_moe_args *args, const void *rows,
                         const struct prs_moe_matrices *m, void *to)
{
    int r = prs_moe_encode_rows(p, rows, m->k, &args->rows);
    args->epilogue = (struct prs_epilogue){0};
    args->n = m->n;
    args->k_steps = prs_ceil_div(m->k, prs_element_step(args->type));
    args->route.columns = prs_ceil_div(m->n, prs_moe_tile_columns() * p->info.tuning.cluster);
    args->ends = 0;
    return r != 0 ? r : prs_moe_encode_product(p, args, rows, m, to);
}

static int multiply(struct prs_plan *base, cudaStream_t stream)
{
    struct prs_moe_plan *p = prs_moe_self(base);
    return prs_moe_enqueue_product(p, &p->first, p->first_is_n_k, stream);
}

static prs_launch_step_fn *const multiply_steps[] = {multiply, NULL};

int prs_moe_multiply(struct prs_moe_plan *p, const struct prs_moe_product *x, struct CUstream_st *stream)
{
    struct prs_moe_matrices m = {x->weights, x->k, x->n, x->weights_transposed != 0, NULL};
    uint32_t vector = prs_element_vector(PRS_MOE_TYPE);
    int before, r = prs_moe_check_gradients(p, "prs_moe_multiply()");
    if (r)
        return r;
    if (((uintptr_t)x->rows | (uintptr_t)x->weights | (uintptr_t)x->out) % 16 != 0 || !x->rows || !x->weights ||
        !x->out)
        return prs_fail(-EINVAL, "fused: MoE product: rows %p, weights %p, out %p: 16-byte aligned, not NULL", x->rows,
                        x->weights, x->out);
    if (x->k == 0 || x->n == 0 || x->k % vector != 0 || x->n % vector != 0)
        return prs_fail(-EINVAL, "fused: MoE product of rows of %u and %u columns: both must be multiples of %u", x->k,
                        x->n, vector);
    if ((uintptr_t)x->maps % 256 != 0)
        return prs_fail(-EINVAL, "fused: MoE product: maps %p must be 256-byte aligned", x->maps);
    r = prs_check_reserved(x, "struct prs_moe_product");
    if (!r)
        r = prs_plan_enter(&p->base, &before);
    if (r)
        return r;
    prs_moe_use_maps(p, x->maps);
    p->first = p->args;
    p->first.dispatches = 0;
    p->first_is_n_k = m.n_k;
    r = prs_moe_encode_plain(p, &p->first, x->rows, &m, x->out);
    if (!r)
        r = prs_moe_launch(p, multiply_steps, false, 0, stream);
    prs_cuda_leave(before);
    return r;
}

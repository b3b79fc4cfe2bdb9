/* SPDX-License-Identifier: Apache-2.0 */
/* The MoE calls that gradients need, except combine: dispatch along the maps of an earlier launch, values of rows back
 * to their tokens, and the gradient of a layer's activation. */
#include <errno.h>

#include "fused/moe/plan.h"
#include "transport/util/error.h"

int prs_moe_check_gradients(const struct prs_moe_plan *p, const char *what)
{
    if (prs_moe_is_scaled(p))
        return prs_fail(-EINVAL, "fused: %s of a MoE plan of e4m3, which has no gradients: use a plan of bf16", what);
    return 0;
}

static int dispatch_again(struct prs_plan *base, cudaStream_t stream)
{
    struct prs_moe_plan *p = prs_moe_self(base);
    struct prs_moe_args a = p->args;
    a.push_gap = 0; /* no product whose loads the rows could delay */
    return prs_moe_kernels_dispatch_again(&a, p->info.tuning.ctas, stream);
}

static prs_launch_step_fn *const again_steps[] = {dispatch_again, NULL};
static prs_launch_step_fn *const clear_again_steps[] = {dispatch_again, prs_moe_clear_fill, NULL};

int prs_moe_dispatch_again(struct prs_moe_plan *p, const struct prs_moe_again *x, struct CUstream_st *stream)
{
    uintptr_t all = (uintptr_t)x->tokens | (uintptr_t)x->out | (uintptr_t)x->beside | (uintptr_t)x->products;
    uint8_t *own_rows = p->args.row_bytes;
    int before, r = prs_moe_check_gradients(p, "prs_moe_dispatch_again()");
    if (r)
        return r;
    if (all % 16 != 0 || !x->out)
        return prs_fail(
            -EINVAL,
            "fused: MoE dispatch again: tokens %p, out %p, beside %p, products %p: 16-byte aligned; out not "
            "NULL",
            x->tokens, x->out, x->beside, (void *)x->products);
    if (!x->beside != !x->products)
        return prs_fail(-EINVAL, "fused: MoE dispatch again: beside %p, products %p: both or neither", x->beside,
                        (void *)x->products);
    if ((uintptr_t)x->maps % 256 != 0)
        return prs_fail(-EINVAL, "fused: MoE dispatch again: maps %p must be 256-byte aligned", x->maps);
    r = prs_check_reserved(x, "struct prs_moe_again");
    if (!r)
        r = prs_plan_enter(&p->base, &before);
    if (r)
        return r;
    prs_moe_use_maps(p, x->maps);
    p->args.tokens = x->tokens;
    p->args.row_bytes = x->out;
    p->args.beside = x->beside;
    p->args.products = x->products;
    p->args.unweighted = !x->weighted;
    r = prs_moe_launch(p, x->clear_fill ? clear_again_steps : again_steps, false, 2, stream);
    p->args.row_bytes = own_rows;
    prs_cuda_leave(before);
    return r;
}

static int split_values(struct prs_plan *base, cudaStream_t stream)
{
    struct prs_moe_plan *p = prs_moe_self(base);
    return prs_moe_kernels_split_values(&p->args, p->info.tuning.ctas, stream);
}

/* Values are combined as short rows. */
static struct prs_moe_args args_of_values(const struct prs_moe_plan *p)
{
    struct prs_moe_args a = p->args;
    a.route.row_bytes = prs_moe_value_bytes(&a.route);
    a.results = a.value_rows;
    a.combined = a.value_sums;
    a.residual = NULL;
    a.unweighted = 1;
    return a;
}

static int combine_values(struct prs_plan *base, cudaStream_t stream)
{
    struct prs_moe_plan *p = prs_moe_self(base);
    struct prs_moe_args a = args_of_values(p);
    return prs_moe_kernels_combine(&a, p->info.tuning.ctas, stream);
}

static int join_values(struct prs_plan *base, cudaStream_t stream)
{
    struct prs_moe_plan *p = prs_moe_self(base);
    struct prs_moe_args a = args_of_values(p);
    return prs_moe_kernels_join_values(&a, p->info.tuning.ctas, stream);
}

static prs_launch_step_fn *const value_steps[] = {split_values, combine_values, join_values, NULL};

int prs_moe_return_values(struct prs_moe_plan *p, const struct prs_moe_values *x, struct CUstream_st *stream)
{
    uintptr_t all = (uintptr_t)x->values | (uintptr_t)x->rows | (uintptr_t)x->out;
    int before, r = prs_moe_check_gradients(p, "prs_moe_return_values()");
    if (r)
        return r;
    if (all % 16 != 0 || !x->values || !x->rows)
        return prs_fail(-EINVAL,
                        "fused: MoE values: values %p, rows %p, out %p: 16-byte aligned; values, rows not NULL",
                        (const void *)x->values, (const void *)x->rows, (void *)x->out);
    if ((uintptr_t)x->maps % 256 != 0)
        return prs_fail(-EINVAL, "fused: MoE values: maps %p must be 256-byte aligned", x->maps);
    if (p->shape.hidden < PRS_MOE_VALUE_PARTS * p->shape.top_k) /* memory with room for rows also has room for values */
        return prs_fail(-EINVAL,
                        "fused: MoE values in a plan of hidden %u, top %u: hidden must be at least %d times top",
                        p->shape.hidden, p->shape.top_k, PRS_MOE_VALUE_PARTS);
    r = prs_check_reserved(x, "struct prs_moe_values");
    if (!r)
        r = prs_plan_enter(&p->base, &before);
    if (r)
        return r;
    prs_moe_use_maps(p, x->maps);
    p->args.values = x->values;
    p->args.origins = x->rows;
    p->args.returned = x->out;
    r = prs_moe_launch(p, value_steps, false, 2, stream);
    prs_cuda_leave(before);
    return r;
}

static int activation_back(struct prs_plan *base, cudaStream_t stream)
{
    struct prs_moe_plan *p = prs_moe_self(base);
    return prs_moe_kernels_activation_back(&p->args, p->info.tuning.ctas, stream);
}

static prs_launch_step_fn *const activation_back_steps[] = {activation_back, NULL};

int prs_moe_activation_back(struct prs_moe_plan *p, const struct prs_moe_activation *x, struct CUstream_st *stream)
{
    const void *all[] = {x->columns, x->gradients, x->rows, x->of_columns, x->weighted, x->products};
    int before, r = prs_moe_check_gradients(p, "prs_moe_activation_back()");
    if (r)
        return r;
    if (p->shape.columns == 0)
        return prs_fail(-EINVAL, "fused: an activation in a MoE plan without columns: only dispatch and combine");
    for (size_t i = 0; i < sizeof(all) / sizeof(*all); i++)
        if (!all[i] || (uintptr_t)all[i] % 16 != 0)
            return prs_fail(-EINVAL,
                            "fused: MoE activation: columns %p, gradients %p, rows %p, of_columns %p, weighted %p, "
                            "products %p: 16-byte aligned, not NULL",
                            x->columns, x->gradients, (const void *)x->rows, x->of_columns, x->weighted,
                            (void *)x->products);
    if ((uintptr_t)x->maps % 256 != 0)
        return prs_fail(-EINVAL, "fused: MoE activation: maps %p must be 256-byte aligned", x->maps);
    r = prs_check_reserved(x, "struct prs_moe_activation");
    if (!r)
        r = prs_plan_enter(&p->base, &before);
    if (r)
        return r;
    prs_moe_use_maps(p, x->maps);
    p->args.columns = x->columns;
    p->args.of_activated = x->gradients;
    p->args.origins = x->rows;
    p->args.of_columns = x->of_columns;
    p->args.activated = x->weighted;
    p->args.products = x->products;
    r = prs_moe_launch(p, activation_back_steps, false, 0, stream);
    prs_cuda_leave(before);
    return r;
}

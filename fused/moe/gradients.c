/* SPDX-License-Identifier: Apache-2.0 */
/* What gradients need of MoE beside combine: dispatch along earlier maps, values of rows on their way back, and the way
 * back through a layer's activation. */
#include <errno.h>

#include "fused/moe/plan.h"
#include "transport/util/error.h"

static int run_dispatch_again(struct prs_moe_plan *p, cudaStream_t stream)
{
    struct prs_moe_args a = p->args;
    int r;
    a.push_gap = 0; /* no product whose loads the rows could delay */
    r = prs_moe_kernels_dispatch_again(&a, p->info.tuning.ctas, stream);
    return r != 0 || !p->clears_fill ? r : prs_moe_kernels_clear_fill(&a, p->info.tuning.ctas, stream);
}

int prs_moe_dispatch_again(struct prs_moe_plan *p, const struct prs_moe_again *x, struct CUstream_st *stream)
{
    uintptr_t all = (uintptr_t)x->tokens | (uintptr_t)x->out | (uintptr_t)x->beside | (uintptr_t)x->products;
    uint8_t *own_rows = p->args.row_bytes;
    int before, r;
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
    p->clears_fill = x->clear_fill != 0;
    r = prs_moe_launch(p, run_dispatch_again, false, 2, stream);
    p->args.row_bytes = own_rows;
    prs_cuda_leave(before);
    return r;
}

/* Values are combined as short rows. */
static int run_return_values(struct prs_moe_plan *p, cudaStream_t stream)
{
    struct prs_moe_args a = p->args;
    int r = prs_moe_kernels_split_values(&a, p->info.tuning.ctas, stream);
    a.route.row_bytes = prs_moe_value_bytes(&a.route);
    a.results = a.value_rows;
    a.combined = a.value_sums;
    a.residual = NULL;
    a.unweighted = 1;
    if (!r)
        r = prs_moe_kernels_combine(&a, p->info.tuning.ctas, stream);
    return r != 0 ? r : prs_moe_kernels_join_values(&a, p->info.tuning.ctas, stream);
}

int prs_moe_return_values(struct prs_moe_plan *p, const struct prs_moe_values *x, struct CUstream_st *stream)
{
    uintptr_t all = (uintptr_t)x->values | (uintptr_t)x->rows | (uintptr_t)x->out;
    int before, r;
    if (all % 16 != 0 || !x->values || !x->rows)
        return prs_fail(-EINVAL,
                        "fused: MoE values: values %p, rows %p, out %p: 16-byte aligned; values, rows not NULL",
                        (const void *)x->values, (const void *)x->rows, (void *)x->out);
    if ((uintptr_t)x->maps % 256 != 0)
        return prs_fail(-EINVAL, "fused: MoE values: maps %p must be 256-byte aligned", x->maps);
    if (p->shape.hidden < PRS_MOE_VALUE_PARTS * p->shape.top_k) /* where rows have room, values do */
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
    r = prs_moe_launch(p, run_return_values, false, 2, stream);
    prs_cuda_leave(before);
    return r;
}

static int run_activation_back(struct prs_moe_plan *p, cudaStream_t stream)
{
    return prs_moe_kernels_activation_back(&p->args, p->info.tuning.ctas, stream);
}

int prs_moe_activation_back(struct prs_moe_plan *p, const struct prs_moe_activation *x, struct CUstream_st *stream)
{
    const void *all[] = {x->columns, x->gradients, x->rows, x->of_columns, x->weighted, x->products};
    int before, r;
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
    r = prs_moe_launch(p, run_activation_back, false, 0, stream);
    prs_cuda_leave(before);
    return r;
}

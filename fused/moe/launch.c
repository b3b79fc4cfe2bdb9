/* SPDX-License-Identifier: Apache-2.0 */
/* The forward launches of a MoE plan: dispatch, products of the experts, combine, and the layer of all three. */
#include <errno.h>

#include "fused/moe/plan.h"
#include "transport/util/error.h"

/* ---- steps ---- */
/* A product whose weights are laid out as shape says. */
static int enqueue_product(struct prs_moe_plan *p, const struct prs_moe_args *args, cudaStream_t stream)
{
    return prs_moe_enqueue_product(p, args, p->shape.weights_transposed != 0, stream);
}

static int route(struct prs_plan *base, cudaStream_t stream)
{
    return prs_moe_kernels_route(&prs_moe_self(base)->args, stream);
}

/* e4m3: this rank's tokens become rows that travel with their scales. */
static int scale_tokens(struct prs_plan *base, cudaStream_t stream)
{
    struct prs_moe_plan *p = prs_moe_self(base);
    return prs_moe_kernels_scale_tokens(&p->args, p->info.tuning.ctas, stream);
}

static int multiply(struct prs_plan *base, cudaStream_t stream)
{
    struct prs_moe_plan *p = prs_moe_self(base);
    return enqueue_product(p, &p->args, stream);
}

static int multiply_down(struct prs_plan *base, cudaStream_t stream)
{
    struct prs_moe_plan *p = prs_moe_self(base);
    return enqueue_product(p, &p->down, stream);
}

static int multiply_first(struct prs_plan *base, cudaStream_t stream)
{
    struct prs_moe_plan *p = prs_moe_self(base);
    return enqueue_product(p, &p->first, stream);
}

static int clear_kept_fill(struct prs_plan *base, cudaStream_t stream)
{
    struct prs_moe_plan *p = prs_moe_self(base);
    return prs_moe_kernels_clear_fill(&p->first, p->info.tuning.ctas, stream);
}

int prs_moe_clear_fill(struct prs_plan *base, cudaStream_t stream)
{
    struct prs_moe_plan *p = prs_moe_self(base);
    return prs_moe_kernels_clear_fill(&p->args, p->info.tuning.ctas, stream);
}

static int activate(struct prs_plan *base, cudaStream_t stream)
{
    struct prs_moe_plan *p = prs_moe_self(base);
    return prs_moe_kernels_activate(&p->args, p->info.tuning.ctas, stream);
}

static int dispatch(struct prs_plan *base, cudaStream_t stream)
{
    struct prs_moe_plan *p = prs_moe_self(base);
    struct prs_moe_args a = p->args;
    a.push_gap = 0; /* no product whose loads the rows could delay */
    return prs_moe_kernels_dispatch(&a, p->info.tuning.ctas, stream);
}

/* Arguments of combine: the rows that come back are results. */
static struct prs_moe_args args_of_combine(const struct prs_moe_plan *p)
{
    struct prs_moe_args a = p->args;
    a.route.row_bytes = prs_moe_result_bytes(p);
    return a;
}

static int combine(struct prs_plan *base, cudaStream_t stream)
{
    struct prs_moe_plan *p = prs_moe_self(base);
    struct prs_moe_args a = args_of_combine(p);
    return prs_moe_kernels_combine(&a, p->info.tuning.ctas, stream);
}

/* Combine of a layer: its last kernel ends the launch. */
static int combine_and_end(struct prs_plan *base, cudaStream_t stream)
{
    struct prs_moe_plan *p = prs_moe_self(base);
    struct prs_moe_args last = args_of_combine(p);
    last.ends = 1;
    last.returns_early = p->down.returns_early;
    return prs_moe_kernels_combine(&last, p->info.tuning.ctas, stream);
}

/* ---- launches ---- */
static prs_launch_step_fn *const dispatch_gemm_steps[] = {route, multiply, NULL};
static prs_launch_step_fn *const gemm_steps[] = {multiply, NULL};
static prs_launch_step_fn *const dispatch_steps[] = {route, dispatch, NULL};
static prs_launch_step_fn *const clear_dispatch_steps[] = {route, dispatch, prs_moe_clear_fill, NULL};
static prs_launch_step_fn *const combine_steps[] = {combine, NULL};
static prs_launch_step_fn *const layer_steps[] = {route, multiply, multiply_down, combine_and_end, NULL};
static prs_launch_step_fn *const kept_layer_steps[] = {
    route, clear_kept_fill, multiply_first, activate, multiply_down, combine_and_end, NULL};
/* e4m3 */
static prs_launch_step_fn *const scaled_dispatch_gemm_steps[] = {scale_tokens, route, multiply, NULL};
static prs_launch_step_fn *const scaled_dispatch_steps[] = {scale_tokens, route, dispatch, NULL};
static prs_launch_step_fn *const scaled_clear_dispatch_steps[] = {scale_tokens, route, dispatch, prs_moe_clear_fill,
                                                                  NULL};
static prs_launch_step_fn *const scaled_layer_steps[] = {scale_tokens,  route,           multiply_first,
                                                         multiply_down, combine_and_end, NULL};

static struct prs_moe_matrices first_of(const struct prs_moe_plan *p, const struct prs_moe_batch *b)
{
    return (struct prs_moe_matrices){b->weights, p->shape.hidden, p->shape.columns, p->shape.weights_transposed != 0,
                                     b->weight_scales};
}

static int encode(struct prs_moe_plan *p, const struct prs_moe_batch *b)
{
    struct prs_moe_matrices first = first_of(p, b);
    return prs_moe_encode_product(p, &p->args, p->args.row_bytes, &first, b->out);
}

/* A layer's first product, whose result becomes rows of e4m3. */
static int encode_quantising(struct prs_moe_plan *p, const struct prs_moe_matrices *first)
{
    p->first = p->args;
    p->first.dispatches = 1, p->first.ends = 0;
    p->first.quantises = 1;
    p->first.activated = p->activations;
    return prs_moe_encode_product(p, &p->first, p->args.row_bytes, first, p->activations);
}

/* A layer's two products. The results of the second take the place of the tokens' rows, which the first has read. */
static int encode_layer(struct prs_moe_plan *p, const struct prs_moe_batch *b)
{
    struct prs_moe_matrices first = first_of(p, b),
                            second = {b->down, p->args.n, p->shape.hidden, first.n_k, b->down_scales};
    int r;
    p->down = p->args;
    p->down.dispatches = 0;
    r = prs_moe_encode_plain(p, &p->down, p->activations, &second, p->args.row_bytes);
    if (r)
        return r;
    if (p->info.tuning.returns == PRS_MOE_RETURNS_EARLY) {
        p->down.returns_early = 1;
        p->down.route.row_bytes = prs_moe_result_bytes(p);
    }
    if (prs_moe_is_scaled(p))
        return encode_quantising(p, &first);
    if (!b->kept_rows)
        return prs_moe_encode_product(p, &p->args, p->args.row_bytes, &first, p->activations);
    p->args.columns = b->kept_columns, p->args.activated = p->activations;
    p->first = p->args;
    p->first.dispatches = 1;
    p->first.row_bytes = b->kept_rows;
    return prs_moe_encode_plain(p, &p->first, b->kept_rows, &first, b->kept_columns);
}

/* needed: whether the call multiplies with such weights. */
static int check_weight_scales(const struct prs_moe_plan *p, const float *scales, const char *what, bool needed)
{
    if (!prs_moe_is_scaled(p) && scales)
        return prs_fail(-EINVAL, "fused: MoE batch: %s %p in a plan of bf16, which has no scales", what,
                        (const void *)scales);
    if (prs_moe_is_scaled(p) && needed && (!scales || (uintptr_t)scales % sizeof(float) != 0))
        return prs_fail(-EINVAL, "fused: MoE batch of e4m3: %s %p: 4-byte aligned, not NULL", what,
                        (const void *)scales);
    return 0;
}

static int check_product(const struct prs_moe_plan *p, const struct prs_moe_batch *b)
{
    if (p->shape.columns == 0)
        return prs_fail(-EINVAL, "fused: a product in a MoE plan without columns: only dispatch and combine");
    if ((uintptr_t)b->weights % 16 != 0 || !b->weights)
        return prs_fail(-EINVAL, "fused: MoE batch: weights %p: 16-byte aligned, not NULL", b->weights);
    return check_weight_scales(p, b->weight_scales, "weight_scales", true);
}

/* Checks what every call needs of its batch. */
static int check_out(const struct prs_moe_batch *b)
{
    if ((uintptr_t)b->out % 16 != 0 || !b->out)
        return prs_fail(-EINVAL, "fused: MoE batch: out %p: 16-byte aligned, not NULL", b->out);
    return prs_check_reserved(b, "struct prs_moe_batch");
}

/* Checks the maps in which a product tells which rows it has made. */
static int check_row_maps(const struct prs_moe_batch *b)
{
    if (!b->rows || !b->expert_rows)
        return prs_fail(-EINVAL, "fused: MoE batch: rows %p, expert_rows %p: not NULL", (void *)b->rows,
                        (void *)b->expert_rows);
    return 0;
}

/* What routing reads and writes. */
static int check_routing(const struct prs_moe_plan *p, const struct prs_moe_batch *b)
{
    uintptr_t all = (uintptr_t)b->tokens | (uintptr_t)b->chosen | (uintptr_t)b->router_weights | (uintptr_t)b->rows |
                    (uintptr_t)b->expert_rows | (uintptr_t)b->status;
    if (all % 16 != 0)
        return prs_fail(
            -EINVAL,
            "fused: MoE batch: tokens %p, chosen %p, router_weights %p, rows %p, expert_rows %p, status %p: "
            "16-byte aligned",
            b->tokens, (const void *)b->chosen, (const void *)b->router_weights, (void *)b->rows,
            (void *)b->expert_rows, (void *)b->status);
    if ((uintptr_t)b->count_on_device % 4 != 0 || (uintptr_t)b->maps % 256 != 0)
        return prs_fail(-EINVAL, "fused: MoE batch: count_on_device %p must be 4-byte aligned, maps %p 256-byte",
                        (const void *)b->count_on_device, b->maps);
    if ((b->count != 0 || b->count_on_device) && (!b->tokens || !b->chosen || !b->router_weights))
        return prs_fail(-EINVAL, "fused: MoE batch of %u tokens: tokens %p, chosen %p, router_weights %p: not NULL",
                        b->count, b->tokens, (const void *)b->chosen, (const void *)b->router_weights);
    if ((p->shape.logical_experts == 0) != (b->placement == NULL) || (uintptr_t)b->placement % 4 != 0)
        return prs_fail(-EINVAL,
                        "fused: MoE batch: placement %p in a plan with shape.logical_experts %u: 4-byte aligned with a "
                        "map, NULL without",
                        (const void *)b->placement, p->shape.logical_experts);
    if (!b->count_on_device && b->count > p->shape.tokens)
        return prs_fail(-EINVAL, "fused: %u tokens in a MoE plan for at most %u", b->count, p->shape.tokens);
    if ((!prs_moe_is_scaled(p) && b->token_scales) || (uintptr_t)b->token_scales % sizeof(float) != 0)
        return prs_fail(-EINVAL, "fused: MoE batch: token_scales %p: 4-byte aligned in a plan of e4m3, else NULL",
                        (const void *)b->token_scales);
    return 0;
}

static int check_layer(const struct prs_moe_plan *p, const struct prs_moe_batch *b)
{
    if (!p->shape.layer)
        return prs_fail(-EINVAL, "fused: a MoE layer in a plan that was opened without shape.layer");
    if ((uintptr_t)b->down % 16 != 0 || !b->down || (uintptr_t)b->residual % 16 != 0)
        return prs_fail(-EINVAL, "fused: MoE layer: down %p, residual %p: 16-byte aligned; down not NULL", b->down,
                        b->residual);
    if (((uintptr_t)b->kept_rows | (uintptr_t)b->kept_columns) % 16 != 0 || !b->kept_rows != !b->kept_columns)
        return prs_fail(-EINVAL, "fused: MoE layer: kept_rows %p, kept_columns %p: 16-byte aligned, both or neither",
                        b->kept_rows, b->kept_columns);
    if (b->kept_rows && prs_moe_is_scaled(p))
        return prs_moe_check_gradients(p, "kept_rows and kept_columns");
    return check_weight_scales(p, b->down_scales, "down_scales", true);
}

static void set_routing(struct prs_moe_plan *p, const struct prs_moe_batch *b)
{
    struct prs_moe_args *a = &p->args;
    prs_moe_use_maps(p, b->maps);
    a->tokens = prs_moe_is_scaled(p) ? a->scaled_tokens : b->tokens;
    a->unscaled = b->tokens, a->token_scales = b->token_scales;
    a->count = b->count, a->count_on_device = b->count_on_device;
    a->status = b->status;
    a->chosen = b->chosen, a->weights = b->router_weights;
    a->placement = b->placement;
    a->row_map = b->rows;
    a->expert_map = b->expert_rows;
}

int prs_moe_dispatch_gemm(struct prs_moe_plan *p, const struct prs_moe_batch *b, struct CUstream_st *stream)
{
    int before, r = check_product(p, b);
    if (!r)
        r = check_out(b);
    if (!r)
        r = check_row_maps(b);
    if (!r)
        r = check_routing(p, b);
    if (!r)
        r = prs_plan_enter(&p->base, &before);
    if (r)
        return r;
    set_routing(p, b);
    r = encode(p, b);
    if (!r)
        r = prs_moe_launch(p, prs_moe_is_scaled(p) ? scaled_dispatch_gemm_steps : dispatch_gemm_steps, true, 1, stream);
    prs_cuda_leave(before);
    return r;
}

int prs_moe_gemm(struct prs_moe_plan *p, const struct prs_moe_batch *b, struct CUstream_st *stream)
{
    int before, r = check_product(p, b);
    if (!r)
        r = check_out(b);
    if (!r && !prs_plan_has_scratch(&p->base))
        r = prs_fail(-EINVAL, "fused: a MoE product of rows that are no longer there: since this plan's last dispatch "
                              "another plan was launched that uses the same memory (of MoE, of attention, or of a "
                              "product with scales of blocks), or the context slept");
    if (!r)
        r = prs_plan_enter(&p->base, &before);
    if (r)
        return r;
    prs_moe_use_maps(p, b->maps);
    r = encode(p, b);
    if (!r)
        r = prs_moe_launch(p, gemm_steps, false, 0, stream);
    prs_cuda_leave(before);
    return r;
}

static prs_launch_step_fn *const *steps_of_dispatch(const struct prs_moe_plan *p, bool clears)
{
    if (prs_moe_is_scaled(p))
        return clears ? scaled_clear_dispatch_steps : scaled_dispatch_steps;
    return clears ? clear_dispatch_steps : dispatch_steps;
}

static prs_launch_step_fn *const *steps_of_layer(const struct prs_moe_plan *p, bool keeps)
{
    if (prs_moe_is_scaled(p))
        return scaled_layer_steps;
    return keeps ? kept_layer_steps : layer_steps;
}

int prs_moe_dispatch(struct prs_moe_plan *p, const struct prs_moe_batch *b, struct CUstream_st *stream)
{
    uint8_t *own_rows = p->args.row_bytes;
    int before, r = check_out(b);
    if (!r && !b->expert_rows)
        r = prs_fail(-EINVAL, "fused: MoE batch: expert_rows NULL: nothing would say where the rows are");
    if (!r)
        r = check_routing(p, b);
    if (!r)
        r = prs_plan_enter(&p->base, &before);
    if (r)
        return r;
    set_routing(p, b);
    p->args.row_bytes = b->out;
    r = prs_moe_launch(p, steps_of_dispatch(p, b->clear_fill != 0), true, 1, stream);
    p->args.row_bytes = own_rows;
    prs_cuda_leave(before);
    return r;
}

int prs_moe_combine(struct prs_moe_plan *p, const struct prs_moe_results *x, struct CUstream_st *stream)
{
    uintptr_t all = (uintptr_t)x->rows | (uintptr_t)x->out | (uintptr_t)x->residual;
    int before, r;
    if (all % 16 != 0 || !x->rows || !x->out)
        return prs_fail(-EINVAL,
                        "fused: MoE results: rows %p, out %p, residual %p: 16-byte aligned; rows, out not NULL",
                        x->rows, x->out, x->residual);
    if ((uintptr_t)x->maps % 256 != 0)
        return prs_fail(-EINVAL, "fused: MoE results: maps %p must be 256-byte aligned", x->maps);
    r = prs_check_reserved(x, "struct prs_moe_results");
    if (!r)
        r = prs_plan_enter(&p->base, &before);
    if (r)
        return r;
    prs_moe_use_maps(p, x->maps);
    p->args.results = x->rows;
    p->args.residual = x->residual;
    p->args.combined = x->out;
    p->args.unweighted = x->unweighted;
    r = prs_moe_launch(p, combine_steps, false, 2, stream);
    prs_cuda_leave(before);
    return r;
}

static int layer_of_kernels(struct prs_moe_plan *p, const struct prs_moe_batch *b, cudaStream_t stream)
{
    int r = encode_layer(p, b);
    return r != 0 ? r : prs_moe_launch(p, steps_of_layer(p, b->kept_rows != NULL), true, 0, stream);
}

int prs_moe_layer(struct prs_moe_plan *p, const struct prs_moe_batch *b, struct CUstream_st *stream)
{
    int before, r = check_layer(p, b);
    if (!r)
        r = check_product(p, b);
    if (!r)
        r = check_out(b);
    if (!r)
        r = check_routing(p, b);
    if (!r)
        r = prs_plan_enter(&p->base, &before);
    if (r)
        return r;
    set_routing(p, b);
    p->args.results = p->args.row_bytes;
    p->args.residual = b->residual;
    p->args.combined = b->out;
    p->args.unweighted = 0;
    r = prs_few_runs(p, b) ? prs_few_layer(p, b, stream) : layer_of_kernels(p, b, stream);
    prs_cuda_leave(before);
    return r;
}

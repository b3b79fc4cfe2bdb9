/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels of MoE and their launch. */
#include "fused/core/load.h"
#include "fused/core/launch.cuh"
#include "fused/core/plan_switch.cuh"
#include "fused/moe/activation.cuh"
#include "fused/moe/combine.cuh"
#include "fused/moe/dispatch.cuh"
#include "fused/moe/engine.cuh"
#include "fused/moe/route.cuh"
#include "fused/moe/scaled_rows.cuh"
#include "fused/moe/values.cuh"

typedef void (*moe_kernel_fn)(const struct prs_moe_args);

/* The kernels that depend on the type of rows and weights; NULL: the type has none. [nodes]: 0 for one node, 1 for
 * several. */
struct instances {
    uint32_t type;                  /* enum prs_dtype */
    moe_kernel_fn product[2][2][2]; /* [nodes][b_n_major][cluster - 1] */
    moe_kernel_fn dispatch[2], dispatch_again[2], combine[2];
    moe_kernel_fn activate, activation_back;
    moe_kernel_fn scale_tokens[2];         /* [whether they have scales] */
    moe_kernel_fn product_quantises[2][2]; /* [nodes][cluster - 1] */
};

template <int TYPE> static constexpr struct instances make(void)
{
    constexpr int SUM = element<TYPE>::sum; /* type of results and gradients */
    return {TYPE,
            {{{moe_kernel<moe_engine<TYPE, 0, 1, false>>, moe_kernel<moe_engine<TYPE, 0, 2, false>>},
              {moe_kernel<moe_engine<TYPE, 1, 1, false>>, moe_kernel<moe_engine<TYPE, 1, 2, false>>}},
             {{moe_kernel<moe_engine<TYPE, 0, 1, true>>, moe_kernel<moe_engine<TYPE, 0, 2, true>>},
              {moe_kernel<moe_engine<TYPE, 1, 1, true>>, moe_kernel<moe_engine<TYPE, 1, 2, true>>}}},
            {dispatch_kernel<SUM, false, false>, dispatch_kernel<SUM, true, false>},
            {dispatch_kernel<SUM, false, true>, dispatch_kernel<SUM, true, true>},
            {combine_kernel<SUM, false>, combine_kernel<SUM, true>},
            activate_kernel<SUM>,
            activation_back_kernel<SUM>,
            {NULL, NULL},
            {{NULL, NULL}, {NULL, NULL}}};
}

/* With scales: weights K-major, without gradients. Rows are moved as bytes, and results have type SUM. */
template <int TYPE> static constexpr struct instances make_scaled(void)
{
    constexpr int SUM = element<TYPE>::sum;
    return {TYPE,
            {{{moe_kernel<moe_engine<TYPE, 0, 1, false>>, moe_kernel<moe_engine<TYPE, 0, 2, false>>}, {NULL, NULL}},
             {{moe_kernel<moe_engine<TYPE, 0, 1, true>>, moe_kernel<moe_engine<TYPE, 0, 2, true>>}, {NULL, NULL}}},
            {dispatch_kernel<SUM, false, false>, dispatch_kernel<SUM, true, false>},
            {NULL, NULL},
            {combine_kernel<SUM, false>, combine_kernel<SUM, true>},
            NULL,
            NULL,
            {scale_tokens_kernel<SUM>, scale_tokens_kernel<TYPE>},
            {{moe_kernel<moe_engine<TYPE, 0, 1, false, true>>, moe_kernel<moe_engine<TYPE, 0, 2, false, true>>},
             {moe_kernel<moe_engine<TYPE, 0, 1, true, true>>, moe_kernel<moe_engine<TYPE, 0, 2, true, true>>}}};
}

/* A line for each type. */
static const struct instances instances[] = {
    make<PRS_DTYPE_BF16>(),
    make_scaled<PRS_DTYPE_E4M3>(),
};

static const struct instances *instances_of(uint32_t type)
{
    for (const struct instances &i : instances)
        if (i.type == type)
            return &i;
    return NULL; /* prs_moe_kernels_prepare() has refused it */
}

static uint32_t nodes_of(const struct prs_route *route)
{
    return route->place.nodes > 1;
}

static int load_if_any(moe_kernel_fn kernel)
{
    return kernel ? launch_load(kernel) : 0;
}

static int load_type(const struct instances *k)
{
    const moe_kernel_fn others[] = {k->activate, k->activation_back, k->scale_tokens[0], k->scale_tokens[1]};
    int r = 0;
    for (uint32_t i = 0; i < 8 && r == 0; i++)
        r = load_if_any(k->product[i >> 2][i >> 1 & 1][i & 1]);
    for (uint32_t nodes = 0; nodes < 2 && r == 0; nodes++) {
        r = load_if_any(k->dispatch[nodes]);
        r = r ? r : load_if_any(k->dispatch_again[nodes]);
        r = r ? r : load_if_any(k->combine[nodes]);
        r = r ? r : load_if_any(k->product_quantises[nodes][0]);
        r = r ? r : load_if_any(k->product_quantises[nodes][1]);
    }
    for (size_t i = 0; i < sizeof(others) / sizeof(*others) && r == 0; i++)
        r = load_if_any(others[i]);
    return r;
}

static int load(void)
{
    static const moe_kernel_fn others[] = {route_kernel, clear_fill_kernel, split_values_kernel, join_values_kernel};
    int r = launch_load(switch_plan);
    for (size_t i = 0; i < sizeof(others) / sizeof(*others) && r == 0; i++)
        r = launch_load(others[i]);
    for (const struct instances &k : instances)
        r = r ? r : load_type(&k);
    return r;
}
static const bool added = prs_load_add(load);

static struct launch_shape shape_of(uint32_t cluster)
{
    struct launch_shape shape = {cluster, PRS_THREADS, PRS_SMEM_BYTES};
    return shape;
}

static struct launch_shape shape_of_routing(const struct prs_route *route)
{
    struct launch_shape shape = {1, PRS_ROUTE_THREADS, prs_moe_route_shared(route)};
    return shape;
}

static const struct launch_shape shape_of_dispatch = {1, PRS_DISPATCH_WARPS * 32, PRS_DISPATCH_SHARED},
                                 shape_of_combine = {1, PRS_COMBINE_WARPS * 32, 0},
                                 shape_of_values = {1, PRS_VALUE_THREADS, 0},
                                 shape_of_activation = {1, PRS_ACTIVATION_THREADS, 0};

extern "C" int prs_moe_kernels_prepare(uint32_t type, const struct prs_route *route, uint32_t cluster,
                                       uint32_t *clusters)
{
    const struct instances *k = instances_of(type);
    uint32_t nodes = nodes_of(route);
    struct launch_shape routing = shape_of_routing(route), product = shape_of(cluster);
    uint32_t ctas; /* per GPU; the plan asks for fewer than there are SMs, and each fits one */
    int r;
    if (!k || !k->dispatch[nodes])
        return -ENOTSUP;
    /* this limit belongs to the kernel, and so to all plans of the process */
    if (routing.shared_bytes < PRS_SMEM_BYTES)
        routing.shared_bytes = PRS_SMEM_BYTES;
    r = launch_prepare(route_kernel, &routing, &ctas);
    if (!r)
        r = launch_prepare(k->dispatch[nodes], &shape_of_dispatch, &ctas);
    if (!r && k->dispatch_again[nodes])
        r = launch_prepare(k->dispatch_again[nodes], &shape_of_dispatch, &ctas);
    if (!r)
        r = launch_prepare(k->combine[nodes], &shape_of_combine, &ctas);
    *clusters = UINT32_MAX;
    for (int b_n_major = 0; b_n_major < 2 && r == 0; b_n_major++) {
        uint32_t fit;
        if (!k->product[nodes][b_n_major][cluster - 1])
            continue;
        r = launch_prepare(k->product[nodes][b_n_major][cluster - 1], &product, &fit);
        *clusters = r == 0 && fit < *clusters ? fit : *clusters;
    }
    if (!r && k->product_quantises[nodes][cluster - 1])
        r = launch_prepare(k->product_quantises[nodes][cluster - 1], &product, &ctas);
    return r;
}

/* CTAs of kernels that move rows: no more than there can be rows, so that thousands of warps do not claim a few
 * rows. */
static uint32_t row_ctas(const struct prs_moe_args *args, uint32_t ctas)
{
    uint32_t rows = args->route.place.world * args->route.tokens;
    return rows < ctas ? rows : ctas;
}

extern "C" int prs_moe_kernels_switch_plan(const struct prs_switch_args *args, cudaStream_t stream)
{
    return launch_switch_plan(args, stream);
}

extern "C" int prs_moe_kernels_route(const struct prs_moe_args *args, cudaStream_t stream)
{
    struct launch_shape routing = shape_of_routing(&args->route);
    return launch_kernel(route_kernel, &routing, args->route.chunks, stream, *args);
}

extern "C" int prs_moe_kernels_product(const struct prs_moe_args *args, int b_n_major, uint32_t cluster,
                                       uint32_t clusters, cudaStream_t stream)
{
    struct launch_shape product = shape_of(cluster);
    const struct instances *k = instances_of(args->type);
    uint32_t nodes = nodes_of(&args->route);
    moe_kernel_fn kernel = k->product[nodes][b_n_major][cluster - 1];
    return launch_kernel(args->quantises ? k->product_quantises[nodes][cluster - 1] : kernel, &product, clusters,
                         stream, *args);
}

extern "C" int prs_moe_kernels_scale_tokens(const struct prs_moe_args *args, uint32_t sms, cudaStream_t stream)
{
    uint32_t ctas = prs_ceil_div(scaled_parts(args->route.tokens, args->hidden), PRS_ACTIVATION_THREADS / 32);
    uint32_t most = sms * PRS_ACTIVATION_CTAS;
    return launch_kernel(instances_of(args->type)->scale_tokens[args->token_scales != NULL], &shape_of_activation,
                         ctas < most ? ctas : most, stream, *args);
}

extern "C" int prs_moe_kernels_dispatch(const struct prs_moe_args *args, uint32_t ctas, cudaStream_t stream)
{
    return launch_kernel(instances_of(args->type)->dispatch[nodes_of(&args->route)], &shape_of_dispatch,
                         row_ctas(args, ctas), stream, *args);
}

extern "C" int prs_moe_kernels_combine(const struct prs_moe_args *args, uint32_t ctas, cudaStream_t stream)
{
    return launch_kernel(instances_of(args->type)->combine[nodes_of(&args->route)], &shape_of_combine,
                         row_ctas(args, ctas), stream, *args);
}

extern "C" int prs_moe_kernels_dispatch_again(const struct prs_moe_args *args, uint32_t ctas, cudaStream_t stream)
{
    return launch_kernel(instances_of(args->type)->dispatch_again[nodes_of(&args->route)], &shape_of_dispatch,
                         row_ctas(args, ctas), stream, *args);
}

extern "C" int prs_moe_kernels_clear_fill(const struct prs_moe_args *args, uint32_t ctas, cudaStream_t stream)
{
    return launch_kernel(clear_fill_kernel, &shape_of_values, ctas, stream, *args);
}

extern "C" int prs_moe_kernels_split_values(const struct prs_moe_args *args, uint32_t ctas, cudaStream_t stream)
{
    return launch_kernel(split_values_kernel, &shape_of_values, ctas, stream, *args);
}

extern "C" int prs_moe_kernels_join_values(const struct prs_moe_args *args, uint32_t ctas, cudaStream_t stream)
{
    return launch_kernel(join_values_kernel, &shape_of_values, ctas, stream, *args);
}

extern "C" int prs_moe_kernels_activate(const struct prs_moe_args *args, uint32_t sms, cudaStream_t stream)
{
    return launch_kernel(instances_of(args->type)->activate, &shape_of_activation, sms * PRS_ACTIVATION_CTAS, stream,
                         *args);
}

extern "C" int prs_moe_kernels_activation_back(const struct prs_moe_args *args, uint32_t sms, cudaStream_t stream)
{
    return launch_kernel(instances_of(args->type)->activation_back, &shape_of_activation, sms * PRS_ACTIVATION_CTAS,
                         stream, *args);
}

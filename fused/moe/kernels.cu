/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels of MoE and their launch. */
#include "fused/core/load.h"
#include "fused/core/launch.cuh"
#include "fused/moe/activation.cuh"
#include "fused/moe/combine.cuh"
#include "fused/moe/dispatch.cuh"
#include "fused/moe/engine.cuh"
#include "fused/moe/route.cuh"
#include "fused/moe/values.cuh"

typedef void (*moe_kernel_fn)(const struct prs_moe_args);

template <bool FAR> static moe_kernel_fn kernel_of_layout(int b_n_major, uint32_t cluster)
{
    static const moe_kernel_fn table[2][2] = {
        {moe_kernel<moe_engine<0, 1, FAR>>, moe_kernel<moe_engine<0, 2, FAR>>},
        {moe_kernel<moe_engine<1, 1, FAR>>, moe_kernel<moe_engine<1, 2, FAR>>},
    };
    return table[b_n_major][cluster - 1];
}

static moe_kernel_fn kernel_of(const struct prs_route *route, int b_n_major, uint32_t cluster)
{
    return route->place.nodes > 1 ? kernel_of_layout<true>(b_n_major, cluster)
                                  : kernel_of_layout<false>(b_n_major, cluster);
}

static moe_kernel_fn dispatch_of(const struct prs_route *route)
{
    return route->place.nodes > 1 ? dispatch_kernel<true, false> : dispatch_kernel<false, false>;
}

static moe_kernel_fn dispatch_again_of(const struct prs_route *route)
{
    return route->place.nodes > 1 ? dispatch_kernel<true, true> : dispatch_kernel<false, true>;
}

static moe_kernel_fn combine_of(const struct prs_route *route)
{
    return route->place.nodes > 1 ? combine_kernel<true> : combine_kernel<false>;
}

static int load(void)
{
    static const moe_kernel_fn others[] = {route_kernel,
                                           dispatch_kernel<false, false>,
                                           dispatch_kernel<true, false>,
                                           dispatch_kernel<false, true>,
                                           dispatch_kernel<true, true>,
                                           combine_kernel<false>,
                                           combine_kernel<true>,
                                           clear_fill_kernel,
                                           split_values_kernel,
                                           join_values_kernel,
                                           activate_kernel,
                                           activation_back_kernel};
    int r = 0;
    for (size_t i = 0; i < sizeof(others) / sizeof(*others) && r == 0; i++)
        r = launch_load(others[i]);
    for (int variant = 0; variant < 8 && r == 0; variant++) {
        int b_n_major = variant & 1;
        uint32_t cluster = 1 + (variant >> 1 & 1);
        r = launch_load(variant < 4 ? kernel_of_layout<false>(b_n_major, cluster)
                                    : kernel_of_layout<true>(b_n_major, cluster));
    }
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

extern "C" int prs_moe_kernels_prepare(const struct prs_route *route, uint32_t cluster, uint32_t *clusters)
{
    struct launch_shape routing = shape_of_routing(route), product = shape_of(cluster);
    uint32_t ctas; /* per GPU; the plan asks for fewer than there are SMs, and each fits one */
    int r;
    if (routing.shared_bytes < PRS_SMEM_BYTES) /* the limit is the kernel's, and serves all plans of the process */
        routing.shared_bytes = PRS_SMEM_BYTES;
    r = launch_prepare(route_kernel, &routing, &ctas);
    if (!r)
        r = launch_prepare(dispatch_of(route), &shape_of_dispatch, &ctas);
    if (!r)
        r = launch_prepare(dispatch_again_of(route), &shape_of_dispatch, &ctas);
    if (!r)
        r = launch_prepare(combine_of(route), &shape_of_combine, &ctas);
    *clusters = UINT32_MAX;
    for (int b_n_major = 0; b_n_major < 2 && r == 0; b_n_major++) {
        uint32_t fit;
        r = launch_prepare(kernel_of(route, b_n_major, cluster), &product, &fit);
        *clusters = r == 0 && fit < *clusters ? fit : *clusters;
    }
    return r;
}

/* Of kernels that move rows: no more than there can be rows, so that few rows are not claimed by thousands of warps. */
static uint32_t row_ctas(const struct prs_moe_args *args, uint32_t ctas)
{
    uint32_t rows = args->route.place.world * args->route.tokens;
    return rows < ctas ? rows : ctas;
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
    return launch_kernel(kernel_of(&args->route, b_n_major, cluster), &product, clusters, stream, *args);
}

extern "C" int prs_moe_kernels_dispatch(const struct prs_moe_args *args, uint32_t ctas, cudaStream_t stream)
{
    return launch_kernel(dispatch_of(&args->route), &shape_of_dispatch, row_ctas(args, ctas), stream, *args);
}

extern "C" int prs_moe_kernels_combine(const struct prs_moe_args *args, uint32_t ctas, cudaStream_t stream)
{
    return launch_kernel(combine_of(&args->route), &shape_of_combine, row_ctas(args, ctas), stream, *args);
}

extern "C" int prs_moe_kernels_dispatch_again(const struct prs_moe_args *args, uint32_t ctas, cudaStream_t stream)
{
    return launch_kernel(dispatch_again_of(&args->route), &shape_of_dispatch, row_ctas(args, ctas), stream, *args);
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
    return launch_kernel(activate_kernel, &shape_of_activation, sms * PRS_ACTIVATION_CTAS, stream, *args);
}

extern "C" int prs_moe_kernels_activation_back(const struct prs_moe_args *args, uint32_t sms, cudaStream_t stream)
{
    return launch_kernel(activation_back_kernel, &shape_of_activation, sms * PRS_ACTIVATION_CTAS, stream, *args);
}

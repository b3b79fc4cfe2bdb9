/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels of MoE dispatch + grouped product and their launch. */
#include "fused/core/load.h"
#include "fused/core/launch.cuh"
#include "fused/moe/engine.cuh"
#include "fused/moe/route.cuh"

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

static int load(void)
{
    int r = launch_load(route_kernel);
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

extern "C" int prs_moe_kernels_prepare(const struct prs_route *route, int b_n_major, uint32_t cluster,
                                       uint32_t *clusters)
{
    struct launch_shape routing = shape_of_routing(route), product = shape_of(cluster);
    uint32_t ctas; /* per GPU; the plan asks for fewer than there are SMs, and each fits one */
    int r = launch_prepare(route_kernel, &routing, &ctas);
    return r != 0 ? r : launch_prepare(kernel_of(route, b_n_major, cluster), &product, clusters);
}

extern "C" int prs_moe_kernels_launch(const struct prs_moe_args *args, int b_n_major, uint32_t cluster,
                                      uint32_t clusters, cudaStream_t stream)
{
    struct launch_shape routing = shape_of_routing(&args->route), product = shape_of(cluster);
    int r = args->dispatches == 0 ? 0 : launch_kernel(route_kernel, &routing, args->route.chunks, stream, *args);
    return r != 0 ? r : launch_kernel(kernel_of(&args->route, b_n_major, cluster), &product, clusters, stream, *args);
}

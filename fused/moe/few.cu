/* SPDX-License-Identifier: Apache-2.0 */
/* The kernel of few.cuh and its launch. */
#include "fused/core/launch.cuh"
#include "fused/core/load.h"
#include "fused/moe/few.cuh"

typedef void (*few_kernel_fn)(const struct prs_few_args);

struct few_instance {
    uint32_t type, tile; /* type: enum prs_dtype */
    few_kernel_fn kernel;
    struct launch_shape shape;
};

template <int TYPE, uint32_t TILE> static struct few_instance instance_of(void)
{
    typedef few_engine<TYPE, TILE> engine;
    return {TYPE, TILE, few_kernel<engine>, {1, FEW_THREADS, engine::smem_bytes}};
}

/* A line for each type. */
static const struct few_instance instances[] = {
    instance_of<PRS_DTYPE_BF16, PRS_FEW_NARROW>(),
    instance_of<PRS_DTYPE_BF16, PRS_FEW_WIDE>(),
    instance_of<PRS_DTYPE_E4M3, PRS_FEW_NARROW>(),
    instance_of<PRS_DTYPE_E4M3, PRS_FEW_WIDE>(),
};

static const struct few_instance *find(uint32_t type, uint32_t tile)
{
    for (const struct few_instance &i : instances)
        if (i.type == type && i.tile == tile)
            return &i;
    return NULL; /* prs_few_kernel_prepare() has refused it */
}

static int load(void)
{
    int r = 0;
    for (const struct few_instance &i : instances)
        r = r ? r : launch_load(i.kernel);
    return r;
}
static const bool added = prs_load_add(load);

extern "C" int prs_few_kernel_prepare(uint32_t type, uint32_t tile, uint32_t *ctas)
{
    const struct few_instance *i = find(type, tile);
    return i ? launch_prepare(i->kernel, &i->shape, ctas) : -ENOTSUP;
}

extern "C" int prs_few_kernel_launch(const struct prs_few_args *args, uint32_t ctas, cudaStream_t stream)
{
    const struct few_instance *i = find(args->moe.type, args->few.tile);
    return launch_kernel(i->kernel, &i->shape, ctas, stream, *args);
}

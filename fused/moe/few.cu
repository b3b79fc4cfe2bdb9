/* SPDX-License-Identifier: Apache-2.0 */
/* The kernel of few.cuh and its launch. */
#include "fused/core/launch.cuh"
#include "fused/core/load.h"
#include "fused/moe/few.cuh"

typedef void (*few_kernel_fn)(const struct prs_few_args);

/* A line for each type. */
static const struct few_instance {
    uint32_t type; /* enum prs_dtype */
    few_kernel_fn kernel;
} instances[] = {
    {PRS_DTYPE_BF16, few_kernel<few_engine<PRS_DTYPE_BF16>>},
    {PRS_DTYPE_E4M3, few_kernel<few_engine<PRS_DTYPE_E4M3>>},
};

static few_kernel_fn kernel_of(uint32_t type)
{
    for (const struct few_instance &i : instances)
        if (i.type == type)
            return i.kernel;
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

static const struct launch_shape shape = {1, FEW_THREADS, PRS_FEW_SMEM_BYTES};

extern "C" int prs_few_kernel_prepare(uint32_t type, uint32_t *ctas)
{
    few_kernel_fn kernel = kernel_of(type);
    return kernel ? launch_prepare(kernel, &shape, ctas) : -ENOTSUP;
}

extern "C" int prs_few_kernel_launch(const struct prs_few_args *args, uint32_t ctas, cudaStream_t stream)
{
    return launch_kernel(kernel_of(args->moe.type), &shape, ctas, stream, *args);
}

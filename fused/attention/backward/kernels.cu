/* SPDX-License-Identifier: Apache-2.0 */
/* The backward kernels of ring attention and their launch. */
#include "fused/attention/backward/engine.cuh"
#include "fused/attention/backward/terms.cuh"

#include "fused/attention/backward/kernels.h"
#include "fused/core/launch.cuh"
#include "fused/core/load.h"

struct instance {
    uint32_t type, head_dim;
    void (*terms)(const struct prs_terms_args);
    void (*pass[PRS_PASSES])(const struct prs_backward_args);
    struct launch_shape pass_shape[PRS_PASSES];
};

static const struct launch_shape terms_shape = {1, 32 * PRS_BACKWARD_WARPS, 0};

template <int TYPE, int HEAD_DIM> static constexpr struct instance make(void)
{
    using Q = backward<TYPE, HEAD_DIM, PRS_PASS_QUERIES>;
    using K = backward<TYPE, HEAD_DIM, PRS_PASS_KEYS>;
    return {TYPE,
            HEAD_DIM,
            terms_kernel<TYPE, HEAD_DIM>,
            {backward_kernel<Q>, backward_kernel<K>},
            {{1, Q::threads, Q::shared_bytes}, {1, K::threads, K::shared_bytes}}};
}

static const struct instance instances[] = {make<PRS_DTYPE_BF16, 128>(), make<PRS_DTYPE_BF16, 64>()};

static int load(void)
{
    int r = 0;
    for (const struct instance &i : instances) {
        r = r ? r : launch_load(i.terms);
        for (auto pass : i.pass)
            r = r ? r : launch_load(pass);
    }
    return r;
}
static const bool added = prs_load_add(load);

static const struct instance *find(uint32_t type, uint32_t head_dim)
{
    for (const struct instance &i : instances)
        if (i.type == type && i.head_dim == head_dim)
            return &i;
    return NULL;
}

extern "C" int prs_backward_kernels_prepare(uint32_t type, uint32_t head_dim, uint32_t *ctas)
{
    const struct instance *i = find(type, head_dim);
    uint32_t each[PRS_PASSES];
    int r = i ? 0 : -ENOTSUP;
    for (uint32_t p = 0; p < PRS_PASSES && !r; p++)
        r = launch_prepare(i->pass[p], &i->pass_shape[p], &each[p]);
    if (!r)
        *ctas = each[0] < each[1] ? each[0] : each[1];
    return r;
}

extern "C" int prs_backward_kernel_terms(uint32_t type, uint32_t head_dim, const struct prs_terms_args *args,
                                         uint32_t ctas, cudaStream_t stream)
{
    return launch_kernel(find(type, head_dim)->terms, &terms_shape, ctas, stream, *args);
}

extern "C" int prs_backward_kernel_pass(uint32_t type, uint32_t head_dim, const struct prs_backward_args *args,
                                        uint32_t ctas, cudaStream_t stream)
{
    const struct instance *i = find(type, head_dim);
    uint32_t pass = args->shape.pass;
    return launch_kernel(i->pass[pass], &i->pass_shape[pass], ctas, stream, *args);
}

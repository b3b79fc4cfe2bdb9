/* SPDX-License-Identifier: Apache-2.0 */
/* The backward kernels of ring attention and their launch. */
#include "fused/attention/backward/engine.cuh"
#include "fused/attention/backward/sinks.cuh"
#include "fused/attention/backward/sums.cuh"
#include "fused/attention/backward/terms.cuh"

#include "fused/attention/backward/kernels.h"
#include "fused/core/launch.cuh"
#include "fused/core/load.h"

struct instance {
    struct prs_backward_kernel choices;
    void (*terms)(const struct prs_terms_args);
    void (*finish)(const struct prs_finish_args);
    void (*pass[PRS_PASSES])(const struct prs_backward_args);
    struct launch_shape pass_shape[PRS_PASSES];
};

static const struct launch_shape terms_shape = {1, 32 * PRS_BACKWARD_WARPS, 0};
static const struct launch_shape finish_shape = {1, PRS_FINISH_THREADS, 0};

/* Only striped attention has it; else NULL. */
template <class E> static constexpr auto pass_for_queries(void) -> void (*)(const struct prs_backward_args)
{
    if constexpr (E::striped)
        return backward_kernel<E>;
    else
        return nullptr;
}

template <int TYPE, int HEAD_DIM, int STRIPED> static constexpr struct instance make(void)
{
    using Q = backward<TYPE, HEAD_DIM, PRS_PASS_QUERIES, STRIPED>;
    using K = backward<TYPE, HEAD_DIM, PRS_PASS_KEYS, STRIPED>;
    return {{TYPE, HEAD_DIM, STRIPED},
            terms_kernel<TYPE, HEAD_DIM>,
            finish_queries<TYPE, HEAD_DIM>,
            {pass_for_queries<Q>(), backward_kernel<K>},
            {{1, Q::threads, Q::shared_bytes}, {1, K::threads, K::shared_bytes}}};
}

static const struct instance instances[] = {make<PRS_DTYPE_BF16, 128, 0>(), make<PRS_DTYPE_BF16, 64, 0>(),
                                            make<PRS_DTYPE_BF16, 128, 1>(), make<PRS_DTYPE_BF16, 64, 1>()};

static int load(void)
{
    int r = launch_load(sum_sinks);
    for (const struct instance &i : instances) {
        r = r ? r : launch_load(i.terms);
        r = r ? r : launch_load(i.finish);
        for (auto pass : i.pass)
            r = r || !pass ? r : launch_load(pass);
    }
    return r;
}
static const bool added = prs_load_add(load);

static const struct instance *find(const struct prs_backward_kernel *wanted)
{
    for (const struct instance &i : instances)
        if (i.choices.type == wanted->type && i.choices.head_dim == wanted->head_dim &&
            i.choices.striped == wanted->striped)
            return &i;
    return NULL;
}

extern "C" int prs_backward_kernels_prepare(const struct prs_backward_kernel *kernel, uint32_t *ctas)
{
    const struct instance *i = find(kernel);
    uint32_t each, least = UINT32_MAX;
    int r = i ? 0 : -ENOTSUP;
    for (uint32_t p = 0; p < PRS_PASSES && !r; p++) {
        if (!i->pass[p])
            continue;
        r = launch_prepare(i->pass[p], &i->pass_shape[p], &each);
        least = !r && each < least ? each : least;
    }
    if (!r)
        *ctas = least;
    return r;
}

extern "C" int prs_backward_kernel_terms(const struct prs_backward_kernel *kernel, const struct prs_terms_args *args,
                                         uint32_t ctas, cudaStream_t stream)
{
    return launch_kernel(find(kernel)->terms, &terms_shape, ctas, stream, *args);
}

extern "C" int prs_backward_kernel_sinks(const struct prs_sinks_args *args, cudaStream_t stream)
{
    return launch_kernel(sum_sinks, &sum_sinks_shape, args->terms.schedule.heads_q, stream, *args);
}

extern "C" int prs_backward_kernel_finish(const struct prs_backward_kernel *kernel, const struct prs_finish_args *args,
                                          uint32_t ctas, cudaStream_t stream)
{
    return launch_kernel(find(kernel)->finish, &finish_shape, ctas, stream, *args);
}

extern "C" int prs_backward_kernel_pass(const struct prs_backward_kernel *kernel, const struct prs_backward_args *args,
                                        uint32_t ctas, cudaStream_t stream)
{
    const struct instance *i = find(kernel);
    uint32_t pass = args->shape.pass;
    return launch_kernel(i->pass[pass], &i->pass_shape[pass], ctas, stream, *args);
}

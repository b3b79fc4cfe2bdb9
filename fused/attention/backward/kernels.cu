/* SPDX-License-Identifier: Apache-2.0 */
/* The backward kernels of ring attention and their launch. */
#include "fused/attention/backward/engine.cuh"
#include "fused/attention/backward/lay.cuh"
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
    void (*pass)(const struct prs_backward_args);
    struct launch_shape pass_shape;
};

static const struct launch_shape terms_shape = {1, 32 * PRS_BACKWARD_WARPS, 0};
static const struct launch_shape finish_shape = {1, PRS_FINISH_THREADS, 0};

template <int TYPE, int HEAD_DIM, int STRIPED, int CAPPED, int FAR = 0> static constexpr struct instance make(void)
{
    using E = backward<TYPE, HEAD_DIM, STRIPED, CAPPED, FAR>;
    return {{TYPE, HEAD_DIM, STRIPED, CAPPED, FAR},
            terms_kernel<TYPE, HEAD_DIM>,
            finish_queries<TYPE, HEAD_DIM, E::far>,
            backward_kernel<E>,
            {1, E::threads, E::shared_bytes}};
}

static const struct instance instances[] = {make<PRS_DTYPE_BF16, 128, 0, 0>(),    make<PRS_DTYPE_BF16, 64, 0, 0>(),
                                            make<PRS_DTYPE_BF16, 128, 1, 0>(),    make<PRS_DTYPE_BF16, 64, 1, 0>(),
                                            make<PRS_DTYPE_BF16, 128, 1, 1>(),    make<PRS_DTYPE_BF16, 64, 1, 1>(),
                                            make<PRS_DTYPE_BF16, 128, 0, 0, 1>(), make<PRS_DTYPE_BF16, 64, 0, 0, 1>()};

static int load(void)
{
    int r = launch_load(sum_sinks);
    r = r ? r : launch_load(lay_tasks);
    for (const struct instance &i : instances) {
        r = r ? r : launch_load(i.terms);
        r = r ? r : launch_load(i.finish);
        r = r ? r : launch_load(i.pass);
    }
    return r;
}
static const bool added = prs_load_add(load);

static const struct instance *find(const struct prs_backward_kernel *wanted)
{
    for (const struct instance &i : instances)
        if (i.choices.type == wanted->type && i.choices.head_dim == wanted->head_dim &&
            i.choices.striped == wanted->striped && i.choices.capped == wanted->capped && i.choices.far == wanted->far)
            return &i;
    return NULL;
}

extern "C" int prs_backward_kernels_prepare(const struct prs_backward_kernel *kernel, uint32_t *ctas)
{
    const struct instance *i = find(kernel);
    return i ? launch_prepare(i->pass, &i->pass_shape, ctas) : -ENOTSUP;
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

extern "C" int prs_backward_kernel_lay(const struct prs_lay_tasks_args *args, cudaStream_t stream)
{
    uint32_t tasks = prs_backward_tasks(&args->schedule, &args->shape);
    return launch_kernel(lay_tasks, &lay_tasks_shape, prs_ceil_div(tasks, LAY_TASKS_THREADS), stream, *args);
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
    return launch_kernel(i->pass, &i->pass_shape, ctas, stream, *args);
}

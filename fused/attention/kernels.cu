/* SPDX-License-Identifier: Apache-2.0 */
/* Ring attention's kernels and their launch. */
#include "fused/attention/engine.cuh"

#include "fused/attention/kernels.h"
#include "fused/attention/lay.cuh"
#include "fused/attention/prepare.cuh"
#include "fused/core/begin_copies.cuh"
#include "fused/core/load.h"
#include "fused/core/plan_switch.cuh"

typedef void (*kernel_fn)(const struct prs_attention_args);

struct instance {
    struct prs_attention_kernel choices;
    kernel_fn fn;
    struct launch_shape shape;
};

template <int TYPE, int HEAD_DIM, int BLOCK, int WARPGROUPS, int OVERLAP, int FAR = 0, int STRIPED = 0,
          int VALUE_DIM = HEAD_DIM>
static constexpr struct instance make(void)
{
    using E = attention<TYPE, HEAD_DIM, BLOCK, WARPGROUPS, OVERLAP, FAR, STRIPED, VALUE_DIM>;
    return {{E::type, E::head_dim, E::value_dim, E::block, OVERLAP, E::far, E::striped, E::tile_rows},
            attention_kernel<E>,
            {1, E::threads, E::shared_bytes}};
}

enum { OVERLAP_BOTH = OVERLAP_BLOCKS | OVERLAP_WARPGROUPS };

/* If the tuning leaves a choice open, the first kernel that fits is used. */
static const struct instance instances[] = {
    make<PRS_DTYPE_BF16, 128, 176, 2, OVERLAP_BOTH>(),
    make<PRS_DTYPE_BF16, 128, 128, 2, OVERLAP_BOTH>(),
    make<PRS_DTYPE_BF16, 128, 176, 2, OVERLAP_BOTH | OVERLAP_KEEPS_TOP>(),
    make<PRS_DTYPE_BF16, 128, 128, 2, OVERLAP_BOTH | OVERLAP_KEEPS_TOP>(),
    make<PRS_DTYPE_BF16, 64, 128, 3, OVERLAP_BOTH>(),
    make<PRS_DTYPE_BF16, 64, 128, 3, OVERLAP_BOTH | OVERLAP_KEEPS_TOP>(),
    make<PRS_DTYPE_BF16, 128, 128, 2, OVERLAP_BOTH, 1>(),
    make<PRS_DTYPE_BF16, 64, 128, 2, OVERLAP_BOTH, 1>(),
    make<PRS_DTYPE_BF16, 128, 128, 2, OVERLAP_BOTH, 0, 1>(),
    make<PRS_DTYPE_BF16, 64, 128, 2, OVERLAP_BOTH, 0, 1>(),
    make<PRS_DTYPE_BF16, 96, 128, 2, OVERLAP_BOTH>(),
    make<PRS_DTYPE_BF16, 192, 128, 2, OVERLAP_BOTH, 0, 0, 128>(),
    make<PRS_DTYPE_BF16, 256, 64, 2, OVERLAP_BOTH>(),
};

static int load(void)
{
    int r = launch_load(switch_plan);
    r = r ? r : launch_load(begin_copies);
    r = r ? r : launch_load(prepare_stripes);
    r = r ? r : launch_load(lay_pieces);
    for (const struct instance &i : instances)
        r = r ? r : launch_load(i.fn);
    return r;
}
static const bool added = prs_load_add(load);

static const struct instance *find(const struct prs_attention_kernel *wanted)
{
    for (const struct instance &i : instances)
        if (i.choices.type == wanted->type && i.choices.head_dim == wanted->head_dim &&
            i.choices.value_dim == wanted->value_dim && i.choices.far == wanted->far &&
            i.choices.striped == wanted->striped &&
            (wanted->block_rows == 0 || i.choices.block_rows == wanted->block_rows) &&
            (wanted->overlap == 0 || i.choices.overlap == wanted->overlap))
            return &i;
    return NULL;
}

extern "C" int prs_attention_kernel_find(struct prs_attention_kernel *kernel)
{
    const struct instance *i = find(kernel);
    if (!i)
        return -ENOTSUP;
    *kernel = i->choices;
    return 0;
}

extern "C" int prs_attention_kernel_prepare(const struct prs_attention_kernel *kernel, uint32_t *ctas)
{
    const struct instance *i = find(kernel);
    return launch_prepare(i->fn, &i->shape, ctas);
}

extern "C" int prs_attention_kernel_launch(const struct prs_attention_kernel *kernel,
                                           const struct prs_attention_args *args, uint32_t ctas, cudaStream_t stream)
{
    const struct instance *i = find(kernel);
    return launch_kernel(i->fn, &i->shape, ctas, stream, *args);
}

extern "C" int prs_attention_kernel_prepare_stripes(const struct prs_prepare_args *args, cudaStream_t stream)
{
    uint32_t ctas = ctas_for_parts(args) + (args->assigned ? args->world : 0);
    return ctas != 0 ? launch_kernel(prepare_stripes, &prepare_shape, ctas, stream, *args) : 0;
}

extern "C" int prs_attention_kernel_lay(const struct prs_lay_args *args, cudaStream_t stream)
{
    return launch_kernel(lay_pieces, &lay_shape, prs_ceil_div(args->schedule.tasks, LAY_THREADS), stream, *args);
}

extern "C" int prs_attention_kernel_switch_plan(const struct prs_switch_args *args, cudaStream_t stream)
{
    return launch_switch_plan(args, stream);
}

extern "C" int prs_attention_kernel_begin_copies(const struct prs_attention_args *args, cudaStream_t stream)
{
    const struct prs_attention_schedule *s = &args->schedule;
    /* MUTANT(emulator attention/keys_that_are_copied_are_right) credit for all groups of copied keys:
     * s/prs_attention_credit(s, s->place.world, 0)/s->place.world - 1/ */
    uint32_t credits = prs_attention_credit(s, s->place.world, 0);
    return launch_begin_copies({args->sync, s->place, args->credits[0], NULL, &args->claims->groups_before, credits,
                                s->room_groups, s->place.world - 1, PRS_AWAIT_CREDIT},
                               stream);
}

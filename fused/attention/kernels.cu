/* SPDX-License-Identifier: Apache-2.0 */
/* Ring attention's kernels and their launch. */
#include "fused/attention/engine.cuh"

#include "fused/attention/kernels.h"
#include "fused/core/launch.cuh"

typedef void (*kernel_fn)(const struct prs_attention_args);

struct instance {
    struct prs_attention_kernel choices;
    kernel_fn fn;
    struct launch_shape shape;
};

template <int HEAD_DIM, int BLOCK, int WARPGROUPS, int OVERLAP, int FAR = 0> static constexpr struct instance make(void)
{
    using E = attention<HEAD_DIM, BLOCK, WARPGROUPS, OVERLAP, FAR>;
    return {
        {E::head_dim, E::block, OVERLAP, E::far, E::tile_rows}, attention_kernel<E>, {1, E::threads, E::shared_bytes}};
}

enum { OVERLAP_BOTH = OVERLAP_BLOCKS | OVERLAP_WARPGROUPS };

/* The first that fits is taken where the tuning leaves a choice open. */
static const struct instance instances[] = {
    make<128, 176, 2, OVERLAP_BOTH>(),
    make<128, 128, 2, OVERLAP_BOTH>(),
    make<128, 176, 2, OVERLAP_BOTH | OVERLAP_KEEPS_TOP>(),
    make<128, 128, 2, OVERLAP_BOTH | OVERLAP_KEEPS_TOP>(),
    make<64, 128, 3, OVERLAP_BOTH>(),
    make<64, 128, 3, OVERLAP_BOTH | OVERLAP_KEEPS_TOP>(),
    make<128, 128, 2, OVERLAP_BOTH, 1>(),
    make<64, 128, 2, OVERLAP_BOTH, 1>(),
};

static const struct instance *find(const struct prs_attention_kernel *wanted)
{
    for (const struct instance &i : instances)
        if (i.choices.head_dim == wanted->head_dim && i.choices.far == wanted->far &&
            (wanted->block_rows == 0 || i.choices.block_rows == wanted->block_rows) &&
            (wanted->overlap == 0 || i.choices.overlap == wanted->overlap))
            return &i;
    return NULL;
}

extern "C" int prs_attention_kernel_find(struct prs_attention_kernel *kernel)
{
    const struct instance *i = find(kernel);
    if (i == NULL)
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

/* Before the copy engines start: no other rank still reads what this one sent in the launch before; then the epoch that
 * they copy as their flag. One warp, and on the same stream before the kernel, which leaves no room for it. */
static __global__ void begin_copies(const __grid_constant__ struct prs_attention_args args)
{
    const struct prs_attention_schedule *s = &args.schedule;
    uint32_t epoch = launch_epoch(&args.sync);
    /* MUTANT(emulator attention/keys_that_are_copied_are_right) credit for all groups of copied keys:
     * s/prs_attention_credit(s, s->place.world, 0)/s->place.world - 1/ */
    /* MUTANT(emulator attention/keys_that_are_copied_are_right)
     * credit before copied keys of the last epoch are copied over: s/wait_flag/if (0) wait_flag/ */
    for (uint32_t i = threadIdx.x; i < prs_attention_credit(s, s->place.world, 0); i += 32)
        wait_flag(&args.sync, args.credits[0] + i, epoch - 1, PRS_AWAIT_CREDIT,
                  prs_place_after(&s->place, s->place.world - 1 - i / s->groups), i);
    __syncwarp();
    if (threadIdx.x == 0)
        args.sync.words->copying = epoch;
}

extern "C" int prs_attention_kernel_begin_copies(const struct prs_attention_args *args, cudaStream_t stream)
{
    static const struct launch_shape one_warp = {1, 32, 0};
    return launch_kernel(begin_copies, &one_warp, 1, stream, *args);
}

/* SPDX-License-Identifier: Apache-2.0 */
/* A kernel of one warp that runs before the copy engines of a launch start. It is on the fused kernel's stream and
 * before that kernel, which would leave it no room. */
#ifndef PERSEUS_FUSED_BEGIN_COPIES_CUH
#define PERSEUS_FUSED_BEGIN_COPIES_CUH

#include "fused/core/launch.cuh"
#include "fused/core/sync.cuh"

/* credits[i]: the number of the last launch in which the receiver has read what this rank now overwrites. The receiver
 * comes (1 + i / per_rank) * step after this rank; step world - 1 counts backwards. */
struct begin_copies_args {
    struct prs_sync sync;
    struct prs_place place;
    const uint32_t *credits;
    const uint32_t *copied; /* number of the launch to wait for; NULL: the previous epoch */
    const uint32_t *used;   /* how many of a rank's credits that launch gives; NULL: all */
    uint32_t count, per_rank, step;
    uint32_t what; /* enum prs_awaited */
};

/* Waits for the credits, then writes the epoch, which the copy engines copy as their flag. */
static __global__ void begin_copies(const __grid_constant__ struct begin_copies_args args)
{
    uint32_t epoch = launch_epoch(&args.sync);
    uint32_t read = args.copied ? *(volatile const uint32_t *)args.copied : epoch - 1;
    uint32_t used = args.per_rank;
    if (args.used) /* not `? :`, see compile.py */
        used = *(volatile const uint32_t *)args.used;
    /* MUTANT(emulator allgather_by_copy_engine_is_right) credit before rows are copied over those of the last epoch:
     * s/wait_flag/if (0) wait_flag/ */
    /* MUTANT(emulator attention/keys_that_are_copied_are_right)
     * credit before copied keys of the last epoch are copied over: s/wait_flag/if (0) wait_flag/ */
    /* MUTANT(emulator attention_lengths/of_fewer_sequences_that_are_copied_have_the_bits_of_their_own_plan)
     * no credit of groups that the launch before lacked: s/< used/< args.per_rank/ */
    for (uint32_t i = threadIdx.x; i < args.count; i += 32)
        if (i % args.per_rank < used)
            wait_flag(&args.sync, args.credits + i, read, args.what,
                      prs_place_after(&args.place, (1 + i / args.per_rank) * args.step), i);
    __syncwarp();
    if (threadIdx.x == 0)
        args.sync.words->copying = epoch;
}

static const struct launch_shape begin_copies_shape = {1, 32, 0};

static inline int launch_begin_copies(const struct begin_copies_args &args, cudaStream_t stream)
{
    return launch_kernel(begin_copies, &begin_copies_shape, 1, stream, args);
}

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* The step before a launch that uses staging memory of a pool (plan_switch.h): a kernel of one warp. */
#ifndef PERSEUS_FUSED_PLAN_SWITCH_CUH
#define PERSEUS_FUSED_PLAN_SWITCH_CUH

#include "fused/core/far.cuh"
#include "fused/core/launch.cuh"
#include "fused/core/plan_switch.h"

/* Tells all ranks that write here that this rank has finished the earlier launches. */
PRS_DEVICE void tell_switch(const struct prs_switch_args &args, uint32_t switches)
{
    const struct prs_place *at = &args.place;
    for (uint32_t p = 1 + threadIdx.x; p < at->local_ranks; p += 32) {
        uint32_t mine = prs_distance_back(p, at->local_ranks);
        /* [plan-switch]: the launches before, which were finished when this kernel began. Pairs with await_switch(). */
        store_release_sys((uint32_t *)(args.words[p] + prs_switch_neighbour_word(mine)), switches);
    }
    for (uint32_t b = 1; b < at->nodes && threadIdx.x == 0; b++)
        signal_far(args, prs_place_counterpart(at, b), prs_switch_node_word(at, prs_distance_back(b, at->nodes)),
                   switches, b);
}

/* Waits until all neighbours and counterparts have told this rank the same. */
PRS_DEVICE void await_switch(const struct prs_switch_args &args, uint32_t switches)
{
    const struct prs_place *at = &args.place;
    for (uint32_t word = 1 + threadIdx.x; word < prs_switch_words(at); word += 32) {
        uint32_t peer = word < at->local_ranks ? prs_place_neighbour(at, word)
                                               : prs_place_counterpart(at, word - at->local_ranks + 1);
        /* MUTANT(emulator sharing/attention_plans_by_turns_are_right) attention waits at a switch of plans: delete */
        /* MUTANT(emulator sharing/moe_plans_by_turns_are_right) MoE waits at a switch of plans: delete */
        wait_flag(&args.sync, (const uint32_t *)(args.words[0] + word), switches, PRS_AWAIT_SWITCH, peer, word);
    }
}

/* Says which launch this is, before all kernels that raise flags, and compares. The launch compares again at its end,
 * and counts (end.cuh of attention). */
PRS_DEVICE void say_switched(const struct prs_switch_args &args)
{
    if (args.size == 0 || !args.alarms[0])
        return;
    if (threadIdx.x == 0)
        say_launch(&args.sync, &args.place, args.alarms, *(volatile uint32_t *)&args.alarms[0]->launches, args.common,
                   args.size);
    __syncwarp();
    __threadfence_system(); /* [both-say] */
    refuse_difference(&args.sync, &args.place, threadIdx.x);
}

static __global__ void switch_plan(const __grid_constant__ struct prs_switch_args args)
{
    say_switched(args);
    volatile struct prs_switch_state *state = (volatile struct prs_switch_state *)args.words[0];
    uint32_t last = state->plan, switches = state->switches + 1;
    __syncwarp(); /* all lanes have read */
    /* MUTANT(emulator attention_lengths/of_stripes_wait_for_the_launch_before) striped launches wait:
     * s/ && args.always == 0// */
    if (last == args.plan && args.always == 0)
        return;
    if (last != 0) { /* else nobody has used the memory */
        tell_switch(args, switches);
        await_switch(args, switches);
    }
    if (threadIdx.x == 0) {
        state->plan = args.plan;
        state->switches = switches;
    }
}

static const struct launch_shape switch_plan_shape = {1, 32, 0};

static inline int launch_switch_plan(const struct prs_switch_args *args, cudaStream_t stream)
{
    return launch_kernel(switch_plan, &switch_plan_shape, 1, stream, *args);
}

#endif

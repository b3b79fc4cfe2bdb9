/* SPDX-License-Identifier: Apache-2.0 */
/* Ring attention: the end of a launch, or of a pass of the backward one. */
#ifndef PERSEUS_FUSED_ATTENTION_END_CUH
#define PERSEUS_FUSED_ATTENTION_END_CUH

#include "fused/attention/cta.cuh"
#include "fused/core/far.cuh"

/* All threads of the last CTA of the rank make the counters zero for the next launch. Other ranks add to this bank of
 * arrivals again in the launch after that one, which they begin only when this rank has ended this one. */
template <class E> PRS_DEVICE void reset_counters(const struct prs_attention_args &args, uint32_t epoch)
{
    uint32_t groups = (E::far ? 3 : 2) * args.schedule.groups, words = args.planes != 0 ? 0 : args.arrival_words;
    for (uint32_t i = threadIdx.x; i < groups; i += blockDim.x)
        args.finished[i] = 0;
    for (uint32_t i = threadIdx.x; i < words; i += blockDim.x)
        *arrival_at(args, 0, epoch, i) = 0;
    if (threadIdx.x == 0)
        /* MUTANT(emulator attention_lengths/of_fewer_sequences_have_the_bits_of_their_own_plan)
         * credit only of groups that this launch has: s/schedule.groups/schedule.room_groups/ */
        *args.claims = {0, 0, args.schedule.groups, epoch};
    /* Launches that announced their numbers of rows before they began (plan_switch.cuh) are compared a second time
     * here. */
    if (!args.sync.alarm || *(volatile uint64_t *)&args.sync.words->said == 0)
        return;
    if (threadIdx.x >= 64)
        refuse_difference(&args.sync, &args.schedule.place, threadIdx.x - 64);
    if (threadIdx.x == 0)
        *(volatile uint32_t *)&args.sync.alarm->launches += 1;
}

/* All threads call it when their roles have ended. */
template <class E> PRS_DEVICE void end_launch(const struct prs_attention_args &args)
{
    uint32_t epoch = launch_epoch(&args.sync);
    bool last = false;
    __syncthreads();
    if (threadIdx.x == 0)
        last = leave_epoch(&args.sync, epoch, gridDim.x);
    /* Credits are put last, and no rank waits for them in this launch. Without this wait a plan could be closed, with
     * its windows, before the proxy has put them. */
    if (E::far && last)
        network_quiet(&args.sync, &args.far.device);
    if (__syncthreads_or(last))
        reset_counters<E>(args, epoch);
}

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* The beginning and the end of a launch: its schedule, which follows from the number of rows, and its counters. */
#ifndef PERSEUS_FUSED_GEMM_LAUNCH_CUH
#define PERSEUS_FUSED_GEMM_LAUNCH_CUH

#include "fused/core/ptx.cuh"
#include "fused/core/sync.cuh"
#include "fused/gemm/layout.h"

PRS_DEVICE struct prs_launch *launch_here(void)
{
    return (struct prs_launch *)(dynamic_shared() + PRS_SMEM_LAUNCH);
}

PRS_DEVICE uint32_t *claim_counter(const struct prs_kernel_args &args, uint32_t kind)
{
    return &args.sync.words->claimed[kind];
}

/* The offset of this launch's bank in the staging memory of any rank. */
PRS_DEVICE uint64_t staging_bank(const struct prs_kernel_args &args)
{
    /* MUTANT(emulator epochs_run_into_each_other) one bank for all launches: s/->bank/->bank * 0/ */
    /* MUTANT(emulator plans_that_share_memory_may_be_launched_in_any_order) the bank of a launch is not that of its
     * plan's epoch: s/->bank/->epoch % 2 * args.staging_bank_bytes/ */
    return launch_here()->bank;
}

PRS_DEVICE uint32_t rows_of_launch(const struct prs_kernel_args &args)
{
    /* Not written as `? :`, which would be one load from either address, and the address of a parameter cannot be
     * loaded from. */
    if (args.m_on_device)
        return *(volatile const uint32_t *)args.m_on_device;
    return args.m;
}

/* Tells the neighbours which launch this is. Not the thread that calls launch_begin(): both run at the same time. */
PRS_DEVICE void launch_say(const struct prs_kernel_args &args)
{
    /* The count of struct prs_turns begins again at zero when its last plan is closed, and an old word would then match
     * a new launch. That of struct prs_alarm lasts as long as the context. */
    /* MUTANT(emulator errors/plans_that_come_and_go_make_no_difference) the words of a context have one count:
     * s/alarms[0]->launches/turns[0]->launches/ */
    if (args.turns[0] && args.alarms[0])
        say_launch(&args.sync, &args.schedule.place, args.alarms, *(volatile uint32_t *)&args.alarms[0]->launches,
                   args.plan, rows_of_launch(args));
}

/* Compares this launch with that of the neighbour `lane`. Lanes of the first CTA that have no role call it, after all
 * CTAs of their cluster have called launch_say(). */
PRS_DEVICE void launch_compare(const struct prs_kernel_args &args, uint32_t lane)
{
    if (!args.turns[0])
        return;
    /* [both-say]: this rank's word was written before the barrier of begin_roles(), and is ordered before the load of
     * theirs */
    __threadfence_system();
    refuse_difference(&args.sync, &args.schedule.place, lane);
}

/* One thread of each CTA calls it before the roles begin. With a number of rows that cannot be right nothing is
 * computed; all ranks have the same number, so none waits for another. */
PRS_DEVICE void launch_begin(const struct prs_kernel_args &args)
{
    struct prs_launch *launch = launch_here();
    uint32_t m = rows_of_launch(args);
    launch->schedule = args.schedule;
    launch->epoch = launch_epoch(&args.sync);
    launch->bank = args.turns[0] ? (*(volatile uint32_t *)&args.turns[0]->launches & 1) * args.staging_bank_bytes : 0;
    if (m != 0 && m <= args.most_rows && m % args.row_step == 0) {
        prs_schedule_rows(&launch->schedule, m, args.whole != 0);
        launch->m = m;
        return;
    }
    record_fault(&args.sync, PRS_FAULT_ROWS, args.schedule.place.rank, args.most_rows, args.row_step, m, 0);
    launch->schedule.block_rows = launch->schedule.pairs = launch->schedule.units = 0;
}

/* All threads of the last CTA: zeroes what the next launches count from zero, and takes the other bank. */
template <class E> PRS_DEVICE void launch_end(const struct prs_kernel_args &args)
{
    const struct prs_launch *launch = launch_here();
    const struct prs_schedule *s = &launch->schedule;
    uint32_t bank = launch->epoch & 1, count = 0;
    if (threadIdx.x >= 64 && args.turns[0])
        refuse_difference(&args.sync, &args.schedule.place, threadIdx.x - 64);
    if (threadIdx.x == 0 && args.turns[0])
        *(volatile uint32_t *)&args.turns[0]->launches += 1;
    if (threadIdx.x == 32 && args.turns[0] && args.alarms[0])
        *(volatile uint32_t *)&args.alarms[0]->launches += 1;
    if (threadIdx.x < PRS_CLAIMS)
        *(volatile uint32_t *)claim_counter(args, threadIdx.x) = 0;
    if (E::gathers && s->segments == 0 && s->place.world > 1)
        count = prs_schedule_arrival(s, prs_schedule_gathered_slots(s), 0, 0);
    /* MUTANT(emulator epochs_run_into_each_other) arrivals are counted from zero: s/count/0/ */
    for (uint32_t i = threadIdx.x; i < count; i += PRS_THREADS)
        args.flags[0][bank * args.flag_bank + i] = 0;
    /* MUTANT(emulator a_launch_ends_when_its_results_are_there) broadcasts are counted from zero:
     * s/+ 1 </+ 99 </ */
    if (E::broadcasts && threadIdx.x + 1 < s->place.local_ranks)
        args.done[0][bank * s->place.local_ranks + threadIdx.x] = 0;
}

#endif

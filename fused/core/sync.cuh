/* SPDX-License-Identifier: Apache-2.0 */
/* Waits on other GPUs, and the epoch. Flags only grow and are compared modulo 2^32, so they are never reset. */
#ifndef PERSEUS_FUSED_SYNC_CUH
#define PERSEUS_FUSED_SYNC_CUH

#include <perseus/ring.h>
#include <perseus/sync.h>

#include "fused/core/ptx.cuh"
#include "fused/core/geometry.h"
#include "fused/core/sync.h"

enum { SPINS_PER_CLOCK_READ = 256, EAGER_SPINS = 16, BACK_OFF_NS = 40 };

struct wait_clock {
    uint64_t begin;
    uint32_t spins;
};

/* The first fault of a rank stays. Kept out of line, as is the next: they cost the roles no registers. */
static __device__ __noinline__ void record_fault(const struct prs_sync *sync, uint32_t what, uint32_t from,
                                                 uint32_t index, uint32_t want, uint32_t seen, uint64_t waited)
{
    struct prs_fault *f = sync->fault;
    if (atomicCAS_system(&f->state, 0u, 1u) != 0u)
        return;
    f->what = what;
    f->from = from;
    f->index = index;
    f->want = want;
    f->seen = seen;
    f->waited_ns = waited;
    __threadfence_system(); /* F1: the record before its state. Pairs with the acquire in prs_fused_poll_error(). */
    *(volatile uint32_t *)&f->state = 2u;
}

/* The first wait to run out of time writes the fault record; it, and every later wait on this rank, stops waiting. */
static __device__ __noinline__ void give_up(const struct prs_sync *sync, uint32_t what, uint32_t from, uint32_t index,
                                            uint32_t want, uint32_t seen, uint64_t waited)
{
    struct prs_plan_words *words = sync->words;
    record_fault(sync, what, from, index, want, seen, waited);
#pragma unroll 1 /* the callers' registers pay for what this takes */
    for (uint32_t i = 0; i < words->neighbours; i++)
        *(volatile uint32_t *)words->alarm[i] = words->rank + 1;
    /* MUTANT(emulator nodes/sums_without_a_lost_rank_are_not_sent) a rank that gave up sends nothing: delete */
    if (words->network)
        *(volatile uint64_t *)words->network = PRS_DEVICE_ABORTED;
    /* G1: both before any thread of this rank goes on without what it waited for. Whatever it, or one that it raised a
     * flag for, then releases comes after: pairs with the acquire of who waits for that, and so with alarmed(). */
    __threadfence_system();
    atomicExch(&words->aborted, 1u);
}

/* True: keep spinning. */
PRS_DEVICE bool keep_waiting(const struct prs_sync *sync, struct wait_clock *clock, uint32_t what, uint32_t from,
                             uint32_t index, uint32_t want, uint32_t seen)
{
    /* Many pollers of one line hold up whoever wants to raise a flag in it. */
    if (++clock->spins > EAGER_SPINS)
        __nanosleep(BACK_OFF_NS);
    if (clock->spins % SPINS_PER_CLOCK_READ != 0)
        return true;
    if (*(volatile uint32_t *)&sync->words->aborted)
        return false;
    uint64_t now = global_timer_ns();
    if (clock->begin == 0)
        clock->begin = now;
    if (now - clock->begin < sync->limit_ns)
        return true;
    give_up(sync, what, from, index, want, seen, now - clock->begin);
    return false;
}

/* A1: acquires *flag >= want. Pairs with the release of whoever raises it (store_release_sys, add_release_sys), so that
 * what the raiser wrote before is visible after. */
PRS_DEVICE bool wait_flag(const struct prs_sync *sync, const uint32_t *flag, uint32_t want, uint32_t what,
                          uint32_t from, uint32_t index)
{
    struct wait_clock clock = {0, 0};
    for (;;) {
        uint32_t seen = load_acquire_sys(flag);
        if (prs_flag_reached(seen, want))
            return true;
        if (!keep_waiting(sync, &clock, what, from, index, want, seen))
            return false;
    }
}

enum { ALL_ARRIVED = ~0u >> 2 }; /* larger than any count, also after a few products */

/* A whole warp waits for counters in a row, one a lane: counters[index] for a lane where it exists. Gives how many of
 * them, from lane 0 on, have arrived, at least 1: so a row that is complete costs one look for every 32 counters.
 * ALL_ARRIVED when waiting was given up. from(): the rank that sends all of them; asked only for a fault, because a value
 * that is ready before the loop takes a register. */
template <class From>
PRS_DEVICE uint32_t wait_counters(const struct prs_sync *sync, const uint32_t *counters, uint32_t index, bool exists,
                                  uint32_t want, uint32_t what, From from)
{
    struct wait_clock clock = {0, 0};
    for (;;) {
        uint32_t seen = exists ? load_acquire_sys(counters + index) : 0;
        uint32_t missing = __ballot_sync(~0u, !prs_flag_reached(seen, want));
        if (missing == 0)
            return 32;
        if ((missing & 1) == 0)
            return __ffs(missing) - 1;
        bool go = keep_waiting(sync, &clock, what, from(), index, want, seen);
        if (!__shfl_sync(~0u, go, 0))
            return ALL_ARRIVED;
    }
}

/* Counts this thread's arrival; true for the one that makes the counter `whole`. What the others did before they
 * arrived is visible to it. */
PRS_DEVICE bool arrives_last(uint32_t *counter, uint32_t whole)
{
    return add_acq_rel_gpu(counter, 1) + 1 == whole;
}

/* The epoch of this launch. The word moves only when every CTA has left, so every CTA reads the same. */
PRS_DEVICE uint32_t launch_epoch(const struct prs_sync *sync)
{
    return *(volatile uint32_t *)&sync->words->epoch + 1;
}

PRS_DEVICE bool alarmed(const struct prs_sync *sync)
{
    return sync->alarm && *(volatile uint32_t *)sync->alarm != 0;
}

/* This rank has waited in vain for nothing, but what it took from a neighbour that gave up may be wrong. */
PRS_DEVICE void record_alarm(const struct prs_sync *sync)
{
    record_fault(sync, PRS_FAULT_NEIGHBOUR, *(volatile uint32_t *)sync->alarm - 1, 0, 0, 0, 0);
}

/* One thread per CTA, after all waits of its CTA, last thing. The counter is never reset: the last CTA of launch e is
 * arrival number grid * e. True for that one: the launch is over on this rank. */
PRS_DEVICE bool leave_epoch(const struct prs_sync *sync, uint32_t epoch, uint32_t ctas)
{
    uint64_t saw = alarmed(sync) ? 1 : 0, left = prs_add_acq_rel_gpu(&sync->words->left, 1ull << 32 | saw);
    if ((uint32_t)(left >> 32) + 1 != ctas * epoch)
        return false;
    if (((uint32_t)left | saw) != 0)
        record_alarm(sync);
    *(volatile uint32_t *)&sync->words->epoch = epoch;
    return true;
}

#endif

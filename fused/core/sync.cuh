/* SPDX-License-Identifier: Apache-2.0 */
/* Waits on other GPUs, and the epoch. Flags only grow and are compared modulo 2^32, so they are never reset. */
#ifndef PERSEUS_FUSED_SYNC_CUH
#define PERSEUS_FUSED_SYNC_CUH

#include <perseus/ring.h>
#include <perseus/sync.h>

#include "fused/core/ptx.cuh"
#include "fused/core/geometry.h"
#include "fused/core/sync.h"

enum {
    SPINS_PER_CLOCK_READ = 256,
    SPINS_PER_ABORT_READ = 2048, /* some 2 ms; rarely, because it is a read of host memory and many threads wait */
    EAGER_SPINS = 16,
    BACK_OFF_NS = 40
};

struct wait_clock {
    uint64_t begin;
    uint32_t spins;
};

/* Only the first fault of a rank is kept. This and the next function are out of line, so that the roles need no
 * registers for them. */
PRS_DEVICE_OUTLINED void record_fault(const struct prs_sync *sync, uint32_t what, uint32_t from, uint32_t index,
                                      uint32_t want, uint32_t seen, uint64_t waited)
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
    __threadfence_system(); /* [fault-record]: the report before its state. Pairs with the acquire in sync.c. */
    *(volatile uint32_t *)&f->state = 2u;
}

/* The first wait that times out writes the fault report. After that, no wait on this rank blocks. */
PRS_DEVICE_OUTLINED void give_up(const struct prs_sync *sync, uint32_t what, uint32_t from, uint32_t index,
                                 uint32_t want, uint32_t seen, uint64_t waited)
{
    struct prs_plan_words *words = sync->words;
    record_fault(sync, what, from, index, want, seen, waited);
#pragma unroll 1 /* unrolled, the callers would need more registers */
    for (uint32_t i = 0; i < words->neighbours; i++)
        *(volatile uint32_t *)&words->alarm[i]->raised =
            (words->rank + 1) | ((what & PRS_FAULT_ABORTED) != 0 ? PRS_ALARM_ABORT : 0);
    /* MUTANT(emulator nodes/sums_without_a_lost_rank_are_not_sent) a rank that gave up sends nothing: delete */
    if (words->network)
        *(volatile uint64_t *)words->network = PRS_DEVICE_ABORTED;
    /* [gave-up]: both writes come before any thread of this rank continues without what it waited for, and so before
     * every flag that it then raises. Pairs with the acquire of the rank that waits for such a flag and then calls
     * alarmed(). */
    __threadfence_system();
    atomicExch(&words->aborted, 1u);
}

/* Tells the neighbours which launch this rank runs: 4 bits of the launch's number (ranks are at most two launches
 * apart), 12 of the plan's, 48 of its size: rows, or prs_said_attention(). One thread of each CTA calls it before the
 * roles begin, so the word comes before every flag that the CTA raises [said]. at: [p] at neighbour p.
 * launch: counts the launches of the context that call this; plan: prs_plan.common. Both are the same on all ranks that
 * make the same launches. */
PRS_DEVICE void say_launch(const struct prs_sync *sync, const struct prs_place *place, struct prs_alarm *const *at,
                           uint32_t launch, uint32_t plan, uint64_t size)
{
    uint32_t number = (launch + 1) & 0xf;
    uint64_t said = (uint64_t)number << 60 | (uint64_t)(plan & 0xfff) << 48 | size;
    *(volatile uint64_t *)&sync->words->said = said;
#pragma unroll 1
    for (uint32_t p = 1; p < place->local_ranks; p++)
        *(volatile uint64_t *)&at[p]->said[number & 1][place->local_rank] = said;
}

/* Gives up, and tells the neighbours the reason: `other`, the word of the neighbour with number i in the node, differs
 * from `mine`. */
PRS_DEVICE_OUTLINED void refuse_word(const struct prs_sync *sync, uint32_t i, uint64_t mine, uint64_t other)
{
    struct prs_difference *d = &sync->fault->difference;
    uint32_t ranks = sync->words->neighbours + 1, rank = sync->words->rank;
    if (atomicCAS_system(&d->state, 0u, 1u) == 0u) {
        d->from = rank / ranks * ranks + i;
        d->mine = mine;
        d->other = other;
        __threadfence_system(); /* [fault-record] */
        *(volatile uint32_t *)&d->state = 2u;
    }
    /* A neighbour that sees the alarm must see the word, too, which may not have arrived there yet. */
#pragma unroll 1
    for (uint32_t p = 0; p + 1 < ranks; p++)
        *(volatile uint64_t *)&sync->words->alarm[p]->said[mine >> 60 & 1][i] = other;
    give_up(sync, PRS_FAULT_ABORTED, rank, 0, 0, 0, 0);
}

/* Compares the word of the neighbour with number i in the node. It waits for no word: one that has not arrived has the
 * number of an older launch. Each rank does it twice, so that of two ranks that differ one always sees it, and tells
 * the other by its alarm:
 * - when it has said its own word, after a fence [both-say]: of two ranks that say, fence and look, one sees the
 *   other's word;
 * - at the end. Where a rank needs flags of another one to end its launch, that one's word has arrived [said]; what
 *   copy engines move comes without such flags.
 * No wait does it: a call costs every role that waits registers. */
PRS_DEVICE void refuse_difference(const struct prs_sync *sync, const struct prs_place *place, uint32_t i)
{
    if (i >= place->local_ranks || i == place->local_rank)
        return;
    uint64_t mine = *(volatile uint64_t *)&sync->words->said;
    uint64_t other = *(volatile uint64_t *)&sync->alarm->said[mine >> 60 & 1][i];
    if (other != mine && other >> 60 == mine >> 60)
        refuse_word(sync, i, mine, other);
}

/* Whether this rank, or a neighbour that was waiting, was told to abort. */
PRS_DEVICE_OUTLINED bool told_to_abort(const struct prs_sync *sync)
{
    return *(volatile uint32_t *)&sync->fault->abort != 0 ||
           (sync->alarm && (*(volatile uint32_t *)&sync->alarm->raised & PRS_ALARM_ABORT) != 0);
}

/* True: keep spinning. */
PRS_DEVICE bool keep_waiting(const struct prs_sync *sync, struct wait_clock *clock, uint32_t what, uint32_t from,
                             uint32_t index, uint32_t want, uint32_t seen)
{
    /* Many pollers of one cache line delay the rank that raises a flag in it. */
    if (++clock->spins > EAGER_SPINS)
        __nanosleep(BACK_OFF_NS);
    if (clock->spins % SPINS_PER_CLOCK_READ != 0)
        return true;
    if (*(volatile uint32_t *)&sync->words->aborted)
        return false;
    uint64_t now = global_timer_ns();
    if (clock->begin == 0)
        clock->begin = now;
    if (clock->spins % SPINS_PER_ABORT_READ == 0 && told_to_abort(sync))
        what |= PRS_FAULT_ABORTED;
    else if (now - clock->begin < sync->limit_ns)
        return true;
    give_up(sync, what, from, index, want, seen, now - clock->begin);
    return false;
}

/* Waits until *flag >= want, and acquires: all that the raising rank wrote before its release is then visible. The
 * releases with a label in brackets pair with this wait. */
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

/* The ranks that launches continue without, one bit for each, as far as the kernels of this rank know. */
PRS_DEVICE uint32_t absent_ranks(const struct prs_sync *sync)
{
    return sync->alarm ? *(volatile uint32_t *)&sync->alarm->absent : 0;
}

/* Whether a wait is for a rank that was left out. If so, missing data will never arrive, so the caller reads once more
 * and continues. A wait for a rank asks at its first miss if `absent`, which the launch has read when it began,
 * contains the rank; every wait asks again from time to time. */
PRS_DEVICE_OUTLINED bool is_left_out(const struct prs_sync *sync, uint32_t from)
{
    if (!sync->alarm)
        return false;
    /* [left-out]: both loads come before what the caller reads again. The rank had ended before the host said so. */
    uint32_t absent = load_acquire_sys(&sync->alarm->absent);
    if ((absent >> from & 1) == 0) {
        absent = load_acquire_sys(&sync->fault->absent);
        if (absent != 0)
            atomicOr(&sync->alarm->absent, absent);
    }
    return (absent >> from & 1) != 0;
}

PRS_DEVICE bool asks_for_absent(const struct wait_clock &clock, uint32_t absent, uint32_t from)
{
    return clock.spins % SPINS_PER_ABORT_READ == SPINS_PER_ABORT_READ - 1 ||
           (clock.spins == 0 && (absent >> from & 1) != 0);
}

/* Counts this thread's arrival; true for the arrival that brings the counter to `whole`. That thread sees what the
 * others wrote before they arrived. */
PRS_DEVICE bool arrives_last(uint32_t *counter, uint32_t whole)
{
    return add_acq_rel_gpu(counter, 1) + 1 == whole;
}

/* The epoch of this launch. The word changes only when every CTA has left, so every CTA reads the same value. */
PRS_DEVICE uint32_t launch_epoch(const struct prs_sync *sync)
{
    return *(volatile uint32_t *)&sync->words->epoch + 1;
}

PRS_DEVICE bool alarmed(const struct prs_sync *sync)
{
    return sync->alarm && *(volatile uint32_t *)&sync->alarm->raised != 0;
}

/* For a launch in which no wait of this rank failed, but a neighbour gave up, so that its data may be wrong. */
PRS_DEVICE void record_alarm(const struct prs_sync *sync)
{
    uint32_t from = (*(volatile uint32_t *)&sync->alarm->raised & ~(uint32_t)PRS_ALARM_ABORT) - 1;
    record_fault(sync, PRS_FAULT_NEIGHBOUR, from, 0, 0, 0, 0);
}

/* One thread per CTA calls this after all waits of its CTA. True for the last CTA, which resets the counter: the launch
 * is then over on this rank. */
PRS_DEVICE bool leave_epoch(const struct prs_sync *sync, uint32_t epoch, uint32_t ctas)
{
    uint64_t saw = alarmed(sync) ? 1 : 0, left = prs_add_acq_rel_gpu(&sync->words->left, 1ull << 32 | saw);
    if ((uint32_t)(left >> 32) + 1 != ctas)
        return false;
    if (((uint32_t)left | saw) != 0)
        record_alarm(sync);
    *(volatile uint64_t *)&sync->words->left = 0;
    *(volatile uint32_t *)&sync->words->epoch = epoch;
    return true;
}

#endif

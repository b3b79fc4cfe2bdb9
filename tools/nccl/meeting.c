/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/nccl/meeting.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

#include "transport/util/clock.h"

void meeting_wait(const struct options *options, struct meeting *meeting, uint32_t rank)
{
    uint32_t round = atomic_load(&meeting->round);
    uint64_t start;

    if (atomic_fetch_add(&meeting->arrived, 1) + 1 == options->ranks) {
        atomic_store(&meeting->arrived, 0);
        /* [nccl-meeting]: lets the other ranks leave the barrier; everything that the ranks wrote before is visible to
         * them. Its pair is the load below. */
        atomic_fetch_add(&meeting->round, 1);
        return;
    }
    start = prs_clock_ms();
    while (atomic_load(&meeting->round) == round) { /* [nccl-meeting] */
        if (atomic_load(&meeting->failed))
            exit(1); /* the rank that failed has printed why */
        if (prs_clock_ms() - start > options->timeout_s * 1000ull) {
            atomic_store(&meeting->failed, true);
            fprintf(stderr, "perseus-nccl: rank %u waited %u s for the others: %u of %u came\n", rank,
                    options->timeout_s, atomic_load(&meeting->arrived), options->ranks);
            exit(1);
        }
        sched_yield();
    }
}

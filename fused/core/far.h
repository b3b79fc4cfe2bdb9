/* SPDX-License-Identifier: Apache-2.0 */
/* What a kernel needs to reach its counterparts on other nodes: the ranks with the same local rank there. */
#ifndef PERSEUS_FUSED_FAR_H
#define PERSEUS_FUSED_FAR_H

#include <perseus/device.h>
#include <stdint.h>

#include "fused/core/place.h"

/* A put's source must be in a window too, so staging memory also has slots for data to be sent.
 *
 * Why a bank of either side may be written again two epochs later: a rank in epoch e + 2 has finished e + 1. For that
 * it needed the data that each counterpart sent in e + 1. So each counterpart had finished e: it had received and read
 * everything that was put in e. Rows of the result are put straight from the result, so a launch ends only when its
 * puts are complete. */
struct prs_far {
    struct prs_device device;
    /* this rank's words, which counterparts set to the epoch. Kernels wait for their low halves like for flags */
    uint64_t *signals;
    uint32_t *counters;                   /* this rank's counters, which tell which CTA is the last to arrive */
    uint8_t *result[PRS_MAX_LOCAL_RANKS]; /* all-reduce: [p]: C of neighbour p */
    uint64_t result_offset;               /* offset of C in its window */
    uint32_t staging_window, signal_window, result_window;
};

#endif

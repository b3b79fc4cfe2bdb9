/* SPDX-License-Identifier: Apache-2.0 */
/* How long an all-gather on one node takes, simulated step by step or estimated. The plan chooses by it. Plain C, no
 * CUDA. */
#ifndef PERSEUS_FUSED_GATHER_TIME_H
#define PERSEUS_FUSED_GATHER_TIME_H

#include "fused/gemm/schedule.h"

/* One K step of a cluster's unit: 1040 clocks at 1.6 GHz; the lower bound is 1024. */
static const double PRS_STEP_US = 0.65;

/* By copy engines, in the bands and segments of the schedule: microseconds from the launch to the end of the last unit.
 * Products of thousands of units are estimated. */
double prs_gather_copied_us(const struct prs_schedule *s, uint32_t clusters);

/* The same without copies: all rows are present. */
double prs_gather_product_us(const struct prs_schedule *s, uint32_t clusters);

/* The same when `ctas` CTAs push the rows, spread over at least `spread_us`. */
double prs_gather_pushed_us(const struct prs_schedule *s, uint32_t clusters, double spread_us);

/* Sets band and segments, where they are 0, to the fastest choice in the simulation: the fewest pieces whose time is
 * within a hundredth of the best. Returns the time. */
double prs_gather_best_pieces(const struct prs_schedule *shape, uint32_t clusters, uint32_t *band, uint32_t *segments);

#endif

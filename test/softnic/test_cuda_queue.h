/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TEST_SOFTNIC_CUDA_FLIGHT_H
#define TEST_SOFTNIC_CUDA_FLIGHT_H

#include "test/softnic/cuda_side.h"

void a_signal_comes_after_its_data(struct side *side);
void an_immediate_comes_after_its_data(struct side *side);
void completions_come_in_order(struct side *side);

/* On the driver of fake_cuda only: it counts calls, and fails them. */
void a_burst_is_given_away_at_once(struct side *side);
void an_error_in_a_burst_flushes_what_is_behind(struct side *side);

/* Print what a write costs the poster, and how many there are in a second. */
void flight_figures(struct side *side);

#endif

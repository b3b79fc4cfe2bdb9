/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TEST_SOFTNIC_CUDA_FLIGHT_H
#define TEST_SOFTNIC_CUDA_FLIGHT_H

#include "tools/softnic/test/cuda_side.h"

void a_signal_comes_after_its_data(struct side *side);
void an_immediate_comes_after_its_data(struct side *side);
void completions_come_in_order(struct side *side);

/* Only with fake_cuda: it counts calls, and makes them fail. */
void a_burst_is_given_away_at_once(struct side *side);
void an_error_in_a_burst_flushes_what_is_behind(struct side *side);

/* Print how long a post of a write takes, and the number of writes per second. */
void flight_figures(struct side *side);

#endif

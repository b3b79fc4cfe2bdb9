/* SPDX-License-Identifier: Apache-2.0 */
/* Claims about worlds with a copier, a separate process that copies device memory; both sides call each. */
#ifndef TEST_SOFTNIC_CUDA_COPIER_H
#define TEST_SOFTNIC_CUDA_COPIER_H

#include "tools/softnic/test/cuda_side.h"

/* Only with fake_cuda. */
void copies_go_on_while_the_application_holds_the_drivers_lock(struct side *side);
void deregistered_memory_is_closed_soon(struct side *side);

/* Only with a real GPU, because it runs kernels. */
void kernels_are_reached_while_a_copy_waits_for_them(struct side *side);

/* After this test the world has no copier. */
void a_killed_copier_ends_in_errors_soon(struct side *side);

#endif

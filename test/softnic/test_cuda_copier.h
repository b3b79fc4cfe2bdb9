/* SPDX-License-Identifier: Apache-2.0 */
/* Claims about worlds in which a process of the NIC's own copies device memory; both sides call each. */
#ifndef TEST_SOFTNIC_CUDA_COPIER_H
#define TEST_SOFTNIC_CUDA_COPIER_H

#include "test/softnic/cuda_side.h"

/* On the driver of fake_cuda only. */
void copies_go_on_while_the_application_holds_the_drivers_lock(struct side *side);
void deregistered_memory_is_closed_soon(struct side *side);

/* Where there are kernels. */
void kernels_are_reached_while_a_copy_waits_for_them(struct side *side);

/** Afterwards there is none. */
void a_killed_copier_ends_in_errors_soon(struct side *side);

#endif

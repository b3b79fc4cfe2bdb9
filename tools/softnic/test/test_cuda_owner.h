/* SPDX-License-Identifier: Apache-2.0 */
/* Claims about device memory that only its owner can reach; both sides call each. */
#ifndef TEST_SOFTNIC_CUDA_OWNER_H
#define TEST_SOFTNIC_CUDA_OWNER_H

#include <sys/types.h>

#include "tools/softnic/test/cuda_side.h"

void a_busy_owner_copies(struct side *side);
void more_queue_pairs_than_slots_are_served(struct side *side);
void atomics_of_many_queue_pairs_add_up(struct side *side, enum memory memory);
void a_queue_pair_may_go_while_a_copy_is_under_way(struct side *side, bool initiator_first);
void a_deregistered_region_is_refused(struct side *side);

/* Print how long copies and atomics by the owner take. */
void owner_figures(struct side *side);

/* owner: the target's process, a child of the initiator; not used in the target. */
void a_stopped_owner_ends_in_retry_exceeded(struct side *side, pid_t owner);

/* Does not return in the target, which is killed. */
void a_killed_owner_ends_in_retry_exceeded(struct side *side);

#endif

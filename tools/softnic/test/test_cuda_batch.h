/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TEST_SOFTNIC_CUDA_BATCH_H
#define TEST_SOFTNIC_CUDA_BATCH_H

#include "tools/softnic/test/cuda_side.h"

void adds_to_one_word_each_return_the_value_before_them(struct side *side, enum memory memory);
void words_far_apart_are_changed_like_neighbours(struct side *side);
void words_in_between_are_left_alone(struct side *side);
void an_atomic_behind_a_write_to_its_word_finds_it(struct side *side);
void an_atomic_finds_what_the_word_was_when_it_was_posted(struct side *side);
void signals_and_writes_are_seen_in_their_order(struct side *side, bool from_host, bool flags, bool apart);
void requests_that_meet_keep_their_order(struct side *side);
void flags_among_reads_atomics_and_fences_keep_their_order(struct side *side);
/* After this the initiator makes a call for each copy and each word. */
void what_the_driver_refuses_is_copied_alone(struct side *side);
void atomics_of_two_queue_pairs_on_one_word_lose_nothing(struct side *side, enum memory memory);
void a_batch_ends_before_an_atomic_that_is_refused(struct side *side);

/* Only with fake_cuda: it counts calls, and makes them fail. */
void atomics_behind_each_other_share_their_copies(struct side *side);
void a_driver_error_in_a_batch_gives_its_locks_back(struct side *side);

/* Print how long bursts of atomics take. */
void batch_figures(struct side *side);

/* From here on one process uses two GPUs, also for the memory of other tests; so this comes late. */
void words_on_another_gpu_of_the_process_are_changed(struct side *side, enum memory memory);
void memory_of_two_gpus_that_see_only_their_own_is_copied(struct side *side);
void apart_figures(struct side *side);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* Iterations of the operation on one plugin. */
#ifndef NETBENCH_ITERATION_H
#define NETBENCH_ITERATION_H

#include "tools/netbench/rank_state.h"

/* Fill all slots, run them back to back, check them. The first iteration is not timed: the ranks leave the barrier one
 * after the other, and it absorbs that. Return the number of timed iterations or -errno. */
int iteration_run_batch(struct rank *rank, size_t bytes, int slots, int done, uint64_t *errors);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* The buffers of a rank: slots, which the iterations of a batch use one after the other. */
#ifndef NETBENCH_BUFFERS_H
#define NETBENCH_BUFFERS_H

#include "tools/netbench/rank_state.h"

/* The bytes of a slot, and the number of slots, for messages of that size. */
size_t buffers_slot_bytes(size_t bytes);
int buffers_slots(const struct options *options, size_t bytes);
/* Whether the operation reads another buffer than it writes, and whether it needs room for sums. */
bool buffers_has_input(enum op op);
bool buffers_has_scratch(enum op op);
/* Map the buffers for the largest size. Return 0 or -errno, reported. */
int buffers_map(struct rank *rank);
void buffers_unmap(struct rank *rank);

#endif

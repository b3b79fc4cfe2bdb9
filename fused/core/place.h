/* SPDX-License-Identifier: Apache-2.0 */
/* Finds where a rank is: which node, and which GPU of it. */
#ifndef PERSEUS_FUSED_PLACE_H
#define PERSEUS_FUSED_PLACE_H

#include <perseus/fused.h>
#include <stdint.h>

#include "fused/core/geometry.h"

/* Finds the place from the node ids of all ranks. 0, or -EINVAL when nodes differ in size, their ranks are scattered,
 * or one has more than PRS_MAX_LOCAL_RANKS. */
int prs_place_find(const uint64_t *ids, uint32_t rank, uint32_t world, struct prs_place *out);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
#include "fused/core/place.h"

#include <errno.h>

#include "transport/util/error.h"

int prs_place_find(const uint64_t *ids, uint32_t rank, uint32_t world, struct prs_place *out)
{
    uint32_t local_ranks = 1;
    while (local_ranks < world && ids[local_ranks] == ids[0])
        local_ranks++;
    if (local_ranks > PRS_MAX_LOCAL_RANKS)
        return prs_fail(-EINVAL, "fused: %u ranks share a node (PERSEUS_NODE, or the boot id); at most %d can",
                        local_ranks, PRS_MAX_LOCAL_RANKS);
    if (world % local_ranks != 0)
        return prs_fail(-EINVAL, "fused: %u ranks, but %u on the first node: every node must have as many", world,
                        local_ranks);
    for (uint32_t r = 0; r < world; r++) {
        uint32_t first = r / local_ranks * local_ranks;
        if (ids[r] != ids[first])
            return prs_fail(-EINVAL,
                            "fused: rank %u is not on the node of rank %u: every node must have as many ranks "
                            "as the first (%u), with consecutive numbers (mpirun --map-by slot)",
                            r, first, local_ranks);
        for (uint32_t other = 0; r == first && other < first; other += local_ranks)
            if (ids[r] == ids[other])
                return prs_fail(-EINVAL,
                                "fused: ranks %u and %u share a node, ranks between them do not: ranks of a "
                                "node must be consecutive (mpirun --map-by slot)",
                                other, r);
    }
    prs_place_init(out, rank, world, world / local_ranks);
    return 0;
}

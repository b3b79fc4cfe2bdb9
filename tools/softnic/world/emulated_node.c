/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/world/emulated_node.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>

#include "tools/softnic/world/quantity.h"
#include "tools/softnic/world/world.h"

/* RANK comes before Slurm's variables: under sbatch all processes that torchrun starts inherit the batch script's
 * SLURM_PROCID. */
static const struct {
    const char *rank, *size;
} launchers[] = {
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
    {"PMI_RANK", "PMI_SIZE"},
    {"RANK", "WORLD_SIZE"},
    {"SLURM_PROCID", "SLURM_NTASKS"},
};

int sn_node_of_process(uint32_t nodes, uint32_t *node)
{
    const char *forced = getenv(SN_NODE_ENV);
    uint64_t number, rank, size;

    *node = UINT32_MAX;
    if (forced && *forced) {
        if (sn_quantity_count(forced, 0, nodes - 1, &number)) {
            sn_log("%s=%s: this world has nodes 0 to %u (softnic-run --nodes)", SN_NODE_ENV, forced, nodes - 1);
            return -EINVAL;
        }
        *node = (uint32_t)number;
        return 0;
    }
    for (size_t i = 0; i < sizeof(launchers) / sizeof(launchers[0]); i++) {
        const char *r = getenv(launchers[i].rank), *s = getenv(launchers[i].size);
        if (r && s && !sn_quantity_count(s, 1, UINT32_MAX, &size) && !sn_quantity_count(r, 0, size - 1, &rank)) {
            *node = (uint32_t)(rank * nodes / size);
            return 0;
        }
    }
    return 0;
}

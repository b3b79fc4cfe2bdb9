/* SPDX-License-Identifier: Apache-2.0 */
/* Which emulated node a process is on: decides which NICs it sees. */
#ifndef SOFTNIC_EMULATED_NODE_H
#define SOFTNIC_EMULATED_NODE_H

#include <stdint.h>

/** The calling process's node, 0 .. nodes-1: SOFTNIC_NODE, else its share of the ranks by what the launcher left in the
 *  environment (Open MPI, PMI, torchrun's RANK/WORLD_SIZE, Slurm), ranks being dealt out in blocks as a launcher does.
 *  Without any of these *node becomes UINT32_MAX: no node in particular, such a process sees every device.
 *  Return 0, or -EINVAL when SOFTNIC_NODE names no node of this world (logged). */
int sn_node_of_process(uint32_t nodes, uint32_t *node);

#endif

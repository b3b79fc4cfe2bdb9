/* SPDX-License-Identifier: Apache-2.0 */
/* The emulated node of a process, which decides the NICs that it sees. */
#ifndef SOFTNIC_EMULATED_NODE_H
#define SOFTNIC_EMULATED_NODE_H

#include <stdint.h>

/* The calling process's node, 0 .. nodes-1: SOFTNIC_NODE, else from its rank in the variables of the launcher (Open
 * MPI, PMI, torchrun's RANK/WORLD_SIZE, Slurm); consecutive ranks share a node. Without any of these *node becomes
 * UINT32_MAX, and the process sees every device. Return 0, or -EINVAL when SOFTNIC_NODE names no node of this world
 * (logged). */
int sn_node_of_process(uint32_t nodes, uint32_t *node);

#endif

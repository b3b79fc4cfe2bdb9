/* SPDX-License-Identifier: Apache-2.0 */
/* Which ranks share a node: those with equal numbers. */
#ifndef UTIL_NODE_H
#define UTIL_NODE_H

#include <stdint.h>

/* From the text of PERSEUS_NODE, else from the machine's boot id and the container's network; never 0. */
uint64_t prs_node_id(void);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* Identifies the node: ranks with equal numbers share one. */
#ifndef UTIL_NODE_H
#define UTIL_NODE_H

#include <stdint.h>

/* From PERSEUS_NODE if set, else from the boot id and the network namespace; never 0. */
uint64_t prs_node_id(void);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/** Connecting, registering and closing all lanes of a rank: what NCCL's service thread does. */
#ifndef NETBENCH_LINK_H
#define NETBENCH_LINK_H

#include "tools/netbench/lane.h"
#include "tools/netbench/world.h"

/** Listen, publish handles, connect and accept until every lane has both comms. Return 0 or -errno after printing why.
 */
int link_open(struct world *world, struct lane *lanes, int count);
/** Register every lane's buffers on its comms. */
int link_register(struct lane *lanes, int count);
/** Register and deregister memory of its own on the comms of one lane, as for user buffers. */
int link_churn(struct lane *lane);
int link_deregister(struct lane *lanes, int count);
int link_close(struct lane *lanes, int count);

#endif

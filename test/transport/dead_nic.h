/* SPDX-License-Identifier: Apache-2.0 */
/* A NIC that has died: it takes no command, and reports only completions from before its death. */
#ifndef TEST_TRANSPORT_DEAD_NIC_H
#define TEST_TRANSPORT_DEAD_NIC_H

#include "transport/nic/nic.h"

/* The NIC of this link dies, once in a process. The caller holds the peer's lock. */
void dead_nic_kill(const struct prs_link *link);

#endif

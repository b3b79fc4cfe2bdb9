/* SPDX-License-Identifier: Apache-2.0 */
/* The side that waits: it answers the requests of a client until the client says goodbye. */
#ifndef HWCHECK_SERVE_H
#define HWCHECK_SERVE_H

#include "tools/hwcheck/control.h"
#include "tools/hwcheck/network.h"

/* Fill in the description of this side and of a rail, and read the rail's counters. */
void describe_rail(struct prs_fabric *fabric, int rail, struct network *network, struct side *side);
/* Tell which of its counters have grown since then. */
void describe_growth(const struct network *network, struct side *side);

/* Read the client's first message, which must come soon. Return 0, or -errno after telling the client: -EPROTO when it
 * is another program, or another version; -EACCES: it has another cookie. */
int welcome(struct prs_fabric *fabric, int control, const char *cookie);
/* Answer the client until it ends. Return 0, or -errno: the client is gone. */
int serve(struct prs_fabric *fabric, int control);

#endif

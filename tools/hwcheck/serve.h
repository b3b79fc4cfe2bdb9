/* SPDX-License-Identifier: Apache-2.0 */
/* The side that waits: it answers the requests of a client until that one says goodbye. */
#ifndef HWCHECK_SERVE_H
#define HWCHECK_SERVE_H

#include "tools/hwcheck/control.h"

/* Fill in what a side says of a rail. */
void describe_rail(struct prs_fabric *fabric, int rail, struct message *message);

/* Return 0, or -errno: -EPROTO when the client is another program, or another version. */
int serve(struct prs_fabric *fabric, int control);

#endif

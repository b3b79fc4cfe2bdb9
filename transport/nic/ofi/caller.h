/* SPDX-License-Identifier: Apache-2.0 */
/* Connections to an endpoint that the other side has begun, and on which it has not yet asked for anything. net and tcp
 * of 2.x keep a pointer from such a connection to the endpoint that accepts it, and read through it when the request
 * comes or the connection ends, also when the endpoint has been closed and freed meanwhile. */
#ifndef TRANSPORT_OFI_CALLER_H
#define TRANSPORT_OFI_CALLER_H

#include <stdbool.h>

struct prs_ofi_endpoint;

/* End them, and accept no more, under the lock of the endpoint. Return whether there were any: then read the completion
 * queue, by which the provider sees that they have ended, and call this again. When there were none, the endpoint may
 * be closed. *listening is -1 at the first call. */
bool prs_ofi_hang_up(struct prs_ofi_endpoint *endpoint, int *listening);

#endif

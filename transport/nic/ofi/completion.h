/* SPDX-License-Identifier: Apache-2.0 */
/* Completions of an endpoint, and requests of its links. All but prs_ofi_progress() are called under its lock. */
#ifndef TRANSPORT_OFI_COMPLETION_H
#define TRANSPORT_OFI_COMPLETION_H

#include <stdint.h>

#include "transport/nic/nic.h"

struct prs_ofi_endpoint;
struct prs_ofi_link;
struct prs_ofi_queue;

/* Read what the provider has completed, as long as there is room for arrivals, and let it move data. Return false if
 * there was nothing. */
bool prs_ofi_read_completions(struct prs_ofi_endpoint *endpoint);
/* For the thread of attend.c: read completions, and post what waits, unless the owners of the links do that. */
void prs_ofi_progress(struct prs_ofi_endpoint *endpoint);

/* Requests posted there, and on other queues to the same side, take no effect from now on. The owner learns that when
 * it polls. */
void prs_ofi_break_queue(struct prs_ofi_queue *queue, int error);
/* The link ends and reads what has arrived: make room for that, even if too many arrivals wait for its owner. */
void prs_ofi_make_room(struct prs_ofi_link *link);
/* Links that share the endpoint are crowded, but reading cannot wait: from now on any number of arrivals may wait for
 * them. */
void prs_ofi_uncrowd(struct prs_ofi_endpoint *endpoint);
/* Post what the queue has from next up to upto, as far as the provider takes it. */
void prs_ofi_push(struct prs_ofi_link *link, struct prs_ofi_queue *queue);
void prs_ofi_push_waiting(struct prs_ofi_link *link);

/* Return how many events. */
int prs_ofi_report(struct prs_ofi_link *link, struct prs_event *events);

#endif

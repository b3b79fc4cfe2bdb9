/* SPDX-License-Identifier: Apache-2.0 */
/* The model: when a request would be delivered and completed on a NIC with these rates, latencies and costs. */
#ifndef SOFTNIC_MODEL_H
#define SOFTNIC_MODEL_H

#include "tools/softnic/nic/queue_pair.h"

/* Set due_exec and due_done of w, the request at position, from the virtual clocks of both ports, when it is posted.
 * first: it rang the doorbell. now: the same for all requests of a doorbell, so the time that the poster takes between
 * them (it may be preempted) changes nothing. The caller holds the mutex. Does nothing when the model is
 * off. */
void sn_model_stamp(struct sn_qp *qp, struct sn_wqe *w, uint32_t position, bool first, uint64_t now);

#endif

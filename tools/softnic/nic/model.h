/* SPDX-License-Identifier: Apache-2.0 */
/* The model: when a request would be delivered and completed on a NIC with this rate, latency and cost. */
#ifndef SOFTNIC_MODEL_H
#define SOFTNIC_MODEL_H

#include "tools/softnic/nic/queue_pair.h"

/** Stamp w, the request at position, at posting, with due_exec and due_done from the virtual clocks of both ports.
 * first: it rang the doorbell, at now, the same for all of its requests: how long the poster takes from one to the next
 * (it may be kept off its core in between) changes nothing. The caller holds the mutex. Does nothing when the model is
 * off. */
void sn_model_stamp(struct sn_qp *qp, struct sn_wqe *w, uint32_t position, bool first, uint64_t now);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* What a failed completion means. */
#ifndef TRANSPORT_VERBS_STATUS_H
#define TRANSPORT_VERBS_STATUS_H

#include "transport/nic/nic.h"
#include "transport/nic/verbs/verbs.h"

/* Fill in an error event. Of a failed completion only wr_id, status, vendor_err and qp_num are valid. Error and cause
 * are those common to all kinds of queues, which replace them where they know more. */
void prs_verbs_error_event(const struct ibv_wc *wc, uint32_t queue, struct prs_event *out);

#endif

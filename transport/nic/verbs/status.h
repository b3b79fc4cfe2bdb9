/* SPDX-License-Identifier: Apache-2.0 */
/* What a failed completion means. */
#ifndef TRANSPORT_VERBS_STATUS_H
#define TRANSPORT_VERBS_STATUS_H

#include "transport/nic/nic.h"
#include "transport/nic/verbs/verbs.h"

/* Fill in an error event: on a queue of RC, or of SRD, where EFA's driver has its own codes for some causes. */
void prs_verbs_rc_error(const struct ibv_wc *wc, uint32_t queue, struct prs_event *out);
void prs_verbs_srd_error(const struct ibv_wc *wc, uint32_t queue, struct prs_event *out);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* A port of a verbs device: what it can do, and where it is. prs_nic_ops.probe and locate. */
#ifndef TRANSPORT_VERBS_PORT_H
#define TRANSPORT_VERBS_PORT_H

#include "transport/nic/rail.h"

int prs_verbs_probe(const struct prs_config *config, struct prs_rail *rail, char *why, size_t why_bytes);
int prs_verbs_locate(const struct prs_rail *rail, const struct prs_config *config, struct prs_rail_address *out,
                     char *why, size_t why_bytes);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* Registers memory with a verbs device: prs_nic_ops.register_memory and release_memory. */
#ifndef TRANSPORT_VERBS_MEMORY_H
#define TRANSPORT_VERBS_MEMORY_H

#include "transport/nic/registration.h"

struct prs_domain;

int prs_verbs_register_memory(struct prs_domain *domain, const struct prs_memory_range *range,
                              struct prs_registration *out);
int prs_verbs_release_memory(struct prs_domain *domain, struct prs_registration *registered);

#endif

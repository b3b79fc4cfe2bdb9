/* SPDX-License-Identifier: Apache-2.0 */
/* Registers memory with a verbs device (prs_nic_ops.register_memory and release_memory), and checks remote keys. */
#ifndef TRANSPORT_VERBS_MEMORY_H
#define TRANSPORT_VERBS_MEMORY_H

#include "transport/nic/nic.h"

int prs_verbs_register_memory(struct prs_domain *domain, const struct prs_memory_range *range,
                              struct prs_registration *out);
int prs_verbs_release_memory(struct prs_domain *domain, struct prs_registration *registered);

/* Remote keys come from the wire and have 64 bits there; those of verbs have 32. post() has found one that has more,
 * among these requests from the first on. Return -EKEYREJECTED, with a text. */
int prs_verbs_refuse_key(const struct prs_queue *queue, const struct prs_wr *ring, uint32_t mask, uint32_t first)
    __attribute__((cold));

#endif

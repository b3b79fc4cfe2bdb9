/* SPDX-License-Identifier: Apache-2.0 */
/* Registers memory with a verbs device (prs_nic_ops.register_memory and release_memory), and checks remote keys. */
#ifndef TRANSPORT_VERBS_MEMORY_H
#define TRANSPORT_VERBS_MEMORY_H

#include "transport/nic/nic.h"

int prs_verbs_register_memory(struct prs_domain *domain, const struct prs_memory_range *range,
                              struct prs_registration *out);
int prs_verbs_release_memory(struct prs_domain *domain, struct prs_registration *registered);

/* Remote keys have 64 bits on the wire, but 32 in verbs. post() has found a longer one among these requests. Return
 * -EKEYREJECTED, with a text that names it. */
int prs_verbs_refuse_key(const struct prs_queue *queue, const struct prs_wr *ring, uint32_t mask, uint32_t first)
    __attribute__((cold));

#endif

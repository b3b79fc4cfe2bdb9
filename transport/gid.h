/* SPDX-License-Identifier: Apache-2.0 */
/* Which GID a port speaks with. Chosen per host and per port; an index never leaves this process. */
#ifndef TRANSPORT_GID_H
#define TRANSPORT_GID_H

#include "transport/config.h"
#include "transport/verbs.h"

enum prs_gid_type { PRS_GID_EMPTY = 0, PRS_GID_IB, PRS_GID_ROCE_V1, PRS_GID_ROCE_V2 };

struct prs_gid {
    uint8_t raw[16];
    int index;
    enum prs_gid_type type;
};

/* Pure: the best of table for this configuration: forced index; else right RoCE version, right family, routable, lowest
 * index, in this order; outside NCCL_IB_ADDR_RANGE never. Return its position in table or -ENOENT. */
int prs_gid_choose(const struct prs_gid *table, int count, const struct prs_config *config);

/* Read the port's table and choose. Return 0 or -ENOENT (why_not says what was seen; not logged). */
int prs_gid_query(struct ibv_context *context, uint8_t port, int table_length, bool is_roce,
                  const struct prs_config *config, struct prs_gid *out, char *why_not, size_t why_not_bytes);

/* As IPv6 text; an IPv4-mapped GID reads ::ffff:a.b.c.d. */
void prs_gid_text(const uint8_t raw[16], char *text, size_t text_bytes);

#endif

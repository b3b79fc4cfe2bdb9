/* SPDX-License-Identifier: Apache-2.0 */
/* Chooses the GID of a port. The choice is local: the index is never sent to another process. */
#ifndef TRANSPORT_GID_H
#define TRANSPORT_GID_H

#include "transport/host/config.h"
#include "transport/nic/verbs/verbs.h"

enum prs_gid_type { PRS_GID_EMPTY = 0, PRS_GID_IB, PRS_GID_ROCE_V1, PRS_GID_ROCE_V2 };

struct prs_gid {
    uint8_t raw[16];
    int index;
    enum prs_gid_type type;
};

/* The best GID of the table. Of a RoCE port: the index that is forced, else by RoCE version, then family, then whether
 * it is routable, then lowest index; never one outside NCCL_IB_ADDR_RANGE. Of another port, which those settings are
 * not about: the routable one (NCCL_IB_ROUTABLE_FLID_GID_INDEX), else the first. Pure. Return its position in table or
 * -ENOENT. */
int prs_gid_choose(const struct prs_gid *table, int count, bool is_roce, const struct prs_config *config);

/* Are two InfiniBand GIDs of one subnet? */
bool prs_gid_same_subnet(const uint8_t a[16], const uint8_t b[16]);
/* The LID by which routers of InfiniBand know the port (FLID), or 0: the GID has none. */
uint16_t prs_gid_flid(const uint8_t raw[16]);

/* Read the port's table and choose. Return 0 or -ENOENT (not logged; why_not says what was found). */
int prs_gid_query(struct ibv_context *context, uint8_t port, int table_length, bool is_roce,
                  const struct prs_config *config, struct prs_gid *out, char *why_not, size_t why_not_bytes);

/* Format as IPv6; an IPv4-mapped GID becomes ::ffff:a.b.c.d. */
void prs_gid_text(const uint8_t raw[16], char *text, size_t text_bytes);

#endif

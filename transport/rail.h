/* SPDX-License-Identifier: Apache-2.0 */
/* One usable NIC port: its name, location and abilities. */
#ifndef TRANSPORT_RAIL_H
#define TRANSPORT_RAIL_H

#include "transport/config.h"
#include "transport/domain.h"
#include <perseus/perseus.h>

struct prs_rail {
    struct prs_domain *domain;
    struct prs_rail_info info;
    uint8_t gid[16];
    uint16_t lid;
    uint8_t mtu; /* enum ibv_mtu */
    uint8_t port;
    uint64_t max_message_bytes;
};

/* Examine one port of an open device. Return 0, or 1: the port is unusable, for the reason in why. */
int prs_rail_probe(struct prs_domain *domain, uint8_t port, const struct prs_config *config, struct prs_rail *out,
                   char *why, size_t why_bytes);

#endif

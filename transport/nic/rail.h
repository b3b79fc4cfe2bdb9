/* SPDX-License-Identifier: Apache-2.0 */
/* One usable NIC port: its name, location and abilities. */
#ifndef TRANSPORT_RAIL_H
#define TRANSPORT_RAIL_H

#include "transport/host/config.h"
#include "transport/nic/address.h"
#include "transport/nic/domain.h"
#include <perseus/perseus.h>

struct prs_rail {
    struct prs_domain *domain;
    struct prs_rail_info info;
    struct prs_rail_address address; /* when the fabric was opened */
    uint8_t port;
    uint64_t max_message_bytes;
    uint64_t plain_bytes; /* a longer write should carry no immediate; 0: any may */
};

/* Examine one port of an open device. Return 0, or 1: the port is unusable, for the reason in why. */
int prs_rail_probe(struct prs_domain *domain, uint8_t port, const struct prs_config *config, struct prs_rail *out,
                   char *why, size_t why_bytes);

/* Read the rail's present address. If that fails, for example because its port is down, return the address that it
 * had. */
void prs_rail_locate(const struct prs_rail *rail, const struct prs_config *config, struct prs_rail_address *out);

#endif

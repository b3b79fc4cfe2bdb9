/* SPDX-License-Identifier: Apache-2.0 */
/* Addresses of ports and queues as verbs knows them, and as bytes for the other side. */
#ifndef TRANSPORT_VERBS_ADDRESS_H
#define TRANSPORT_VERBS_ADDRESS_H

#include <stdbool.h>
#include <stddef.h>

#include "transport/nic/address.h"

struct prs_verbs_port {
    uint8_t gid[16];
    uint16_t lid;
    uint8_t mtu;   /* enum ibv_mtu */
    uint8_t reads; /* reads and atomics of the other side that a queue serves at a time */
};

/* The address of a port of this host, with members that are not sent to the other side. */
struct prs_verbs_own_port {
    struct prs_verbs_port port;
    int gid_index;
    bool grh_required; /* an InfiniBand port that takes no packet without a global header */
};

struct prs_verbs_queue {
    uint32_t number;
    uint32_t start; /* RC: first sequence number; SRD: the key that a request must show */
    /* RC: what both NICs could do beyond the standard (congestion control, adaptive routing, selective repeat). The
     * listener's queues offer it; the connector's queues accept what they support. vendor 0: nothing. */
    struct {
        uint32_t vendor, options, mask;
    } ece;
};

void prs_verbs_tell_port(const struct prs_verbs_own_port *port, struct prs_rail_address *out);
void prs_verbs_tell_queue(const struct prs_verbs_queue *queue, struct prs_nic_address *out);

struct prs_verbs_own_port prs_verbs_own_port(const struct prs_rail_address *address);
/* Return 0 or -EPROTO: impossible values. */
int prs_verbs_read_port(const struct prs_nic_address *address, struct prs_verbs_port *out);
int prs_verbs_read_queue(const struct prs_nic_address *address, struct prs_verbs_queue *out);

/* prs_nic_ops.is_port, and address_text: the GID. */
bool prs_verbs_is_port(const struct prs_nic_address *address);
void prs_verbs_address_text(const struct prs_nic_address *port, char *text, size_t text_bytes);

#endif

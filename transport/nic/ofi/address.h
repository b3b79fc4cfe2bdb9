/* SPDX-License-Identifier: Apache-2.0 */
/* Addresses of ports and endpoints, as bytes for the other side. */
#ifndef TRANSPORT_OFI_ADDRESS_H
#define TRANSPORT_OFI_ADDRESS_H

#include <stdbool.h>
#include <stddef.h>

#include "transport/nic/address.h"

enum { PRS_OFI_PROVIDER_BYTES = 22 };
/* In format: device.h, rows.h, endpoint.h. */
enum { PRS_OFI_OFFSETS = 1 << 15, PRS_OFI_ROWS = 1 << 14, PRS_OFI_SHARED = 1 << 13 };

struct prs_ofi_port {
    union {
        uint64_t landing;   /* memory for requests of no bytes, as the provider counts */
        uint64_t table_key; /* with PRS_OFI_ROWS: landing is at offset 0 */
    };
    uint64_t landing_key; /* the provider's */
    uint32_t protocol;
    uint16_t protocol_version, format;
    char provider[PRS_OFI_PROVIDER_BYTES];
    uint8_t host[16]; /* the port's IP address, for texts; IPv4 is mapped; zeros: it has no IP address */
};

static inline uint64_t prs_ofi_landing(const struct prs_ofi_port *port)
{
    return port->format & PRS_OFI_ROWS ? 0 : port->landing;
}

/* The host of a struct sockaddr, or NULL, and as text: "" for zeros. */
void prs_ofi_read_host(const void *socket_address, uint8_t host[16]);
void prs_ofi_host_text(const uint8_t host[16], char *text, size_t text_bytes);

void prs_ofi_tell_port(const struct prs_ofi_port *port, struct prs_nic_address *out);
/* Return 0 or -EPROTO, logged: impossible values. */
int prs_ofi_read_port(const struct prs_nic_address *address, struct prs_ofi_port *out);

/* prs_nic_ops.is_port, and address_text: the provider and the host's address. */
bool prs_ofi_is_port(const struct prs_nic_address *address);
void prs_ofi_address_text(const struct prs_nic_address *port, char *text, size_t text_bytes);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/nic/ofi/address.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "transport/util/error.h"

enum { PORT_BYTES = 62 /* without the padding of the structure */ };
static_assert(offsetof(struct prs_ofi_port, host) + 16 == PORT_BYTES, "part of the wire format");
static_assert((int)PORT_BYTES <= (int)PRS_NIC_ADDRESS_BYTES, "fits");

void prs_ofi_read_host(const void *socket_address, uint8_t host[16])
{
    const struct sockaddr_in *v4 = socket_address;
    const struct sockaddr_in6 *v6 = socket_address;

    memset(host, 0, 16);
    if (v4 && v4->sin_family == AF_INET) {
        host[10] = host[11] = 0xff;
        memcpy(host + 12, &v4->sin_addr, 4);
    } else if (v4 && v4->sin_family == AF_INET6) {
        memcpy(host, &v6->sin6_addr, 16);
    }
}

void prs_ofi_host_text(const uint8_t host[16], char *text, size_t text_bytes)
{
    struct in6_addr address;

    memcpy(&address, host, sizeof(address));
    text[0] = 0;
    if (IN6_IS_ADDR_V4MAPPED(&address))
        inet_ntop(AF_INET, host + 12, text, (socklen_t)text_bytes);
    else if (!IN6_IS_ADDR_UNSPECIFIED(&address))
        inet_ntop(AF_INET6, host, text, (socklen_t)text_bytes);
}

void prs_ofi_tell_port(const struct prs_ofi_port *port, struct prs_nic_address *out)
{
    *out = (struct prs_nic_address){.length = PORT_BYTES};
    memcpy(out->bytes, port, PORT_BYTES);
}

bool prs_ofi_is_port(const struct prs_nic_address *address)
{
    struct prs_ofi_port port;

    memcpy(&port, address->bytes, PORT_BYTES);
    return address->length == PORT_BYTES && port.provider[0] && memchr(port.provider, 0, sizeof(port.provider));
}

int prs_ofi_read_port(const struct prs_nic_address *address, struct prs_ofi_port *out)
{
    *out = (struct prs_ofi_port){0};
    if (!prs_ofi_is_port(address))
        return prs_fail(-EPROTO, "impossible address of a port: %u bytes, or no name of a provider", address->length);
    memcpy(out, address->bytes, PORT_BYTES);
    return 0;
}

void prs_ofi_address_text(const struct prs_nic_address *port, char *text, size_t text_bytes)
{
    struct prs_ofi_port known = {0};
    char host[INET6_ADDRSTRLEN] = "";

    if (prs_ofi_is_port(port))
        memcpy(&known, port->bytes, PORT_BYTES);
    prs_ofi_host_text(known.host, host, sizeof(host));
    snprintf(text, text_bytes, "%s%s%s", known.provider, host[0] ? " " : "", host);
}

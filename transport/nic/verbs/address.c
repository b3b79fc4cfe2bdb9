/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/nic/verbs/address.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "transport/nic/verbs/gid.h"
#include "transport/util/error.h"

static_assert(sizeof(struct prs_verbs_port) == 20 && sizeof(struct prs_verbs_queue) == 20, "part of the wire format");
static_assert(sizeof(struct prs_verbs_port) <= PRS_NIC_ADDRESS_BYTES, "fits");

enum { GRH_REQUIRED = 1 << 16 /* in prs_rail_address.own, above the index of the GID */ };

static void tell(const void *bytes, size_t length, struct prs_nic_address *out)
{
    *out = (struct prs_nic_address){.length = (uint8_t)length};
    memcpy(out->bytes, bytes, length);
}

void prs_verbs_tell_port(const struct prs_verbs_own_port *port, struct prs_rail_address *out)
{
    tell(&port->port, sizeof(port->port), &out->told);
    out->own = (uint16_t)port->gid_index | (port->grh_required ? GRH_REQUIRED : 0u);
}

void prs_verbs_tell_queue(const struct prs_verbs_queue *queue, struct prs_nic_address *out)
{
    tell(queue, sizeof(*queue), out);
}

struct prs_verbs_own_port prs_verbs_own_port(const struct prs_rail_address *address)
{
    struct prs_verbs_own_port own = {.gid_index = (uint16_t)address->own, .grh_required = address->own & GRH_REQUIRED};

    memcpy(&own.port, address->told.bytes, sizeof(own.port));
    return own;
}

bool prs_verbs_is_port(const struct prs_nic_address *address)
{
    struct prs_verbs_port port;

    memcpy(&port, address->bytes, sizeof(port));
    return address->length == sizeof(port) && port.mtu >= 1 && port.mtu <= 5 && port.reads >= 1;
}

int prs_verbs_read_port(const struct prs_nic_address *address, struct prs_verbs_port *out)
{
    memcpy(out, address->bytes, sizeof(*out));
    if (!prs_verbs_is_port(address))
        return prs_fail(-EPROTO, "impossible address of a port: %u bytes, MTU code %u, %u reads at a time",
                        address->length, out->mtu, out->reads);
    return 0;
}

int prs_verbs_read_queue(const struct prs_nic_address *address, struct prs_verbs_queue *out)
{
    memcpy(out, address->bytes, sizeof(*out));
    if (address->length != sizeof(*out) || out->number > 0xffffff)
        return prs_fail(-EPROTO, "impossible address of a queue: %u bytes, number %#x", address->length, out->number);
    return 0;
}

void prs_verbs_address_text(const struct prs_nic_address *port, char *text, size_t text_bytes)
{
    char gid[64];

    prs_gid_text(port->bytes, gid, sizeof(gid));
    snprintf(text, text_bytes, "GID %s", gid);
}

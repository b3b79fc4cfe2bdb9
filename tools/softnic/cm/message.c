/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/cm/message.h"

#include <stdio.h>
#include <string.h>

socklen_t cm_socket_name(struct sockaddr_un *name, uint64_t world, unsigned port_space, uint32_t dev, uint16_t port)
{
    int n;

    *name = (struct sockaddr_un){.sun_family = AF_UNIX};
    n = snprintf(name->sun_path + 1, sizeof(name->sun_path) - 1, "softnic-cm.%016llx.%04x.%u.%u",
                 (unsigned long long)world, port_space, dev, port);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

uint8_t cm_private_bytes(enum cm_type type, bool datagram)
{
    switch (type) {
    case CM_REQUEST:
        return datagram ? 180 : 56; /* after the 36 bytes that hold both addresses */
    case CM_REPLY:
        return datagram ? 136 : 196;
    case CM_REJECT:
        return datagram ? 136 : 148;
    case CM_READY:
        return 0;
    }
    return 0;
}

static bool family_known(const struct cm_address *address)
{
    return address->family == AF_INET || address->family == AF_INET6;
}

const char *cm_message_wrong(const void *bytes, size_t len)
{
    struct cm_message m;

    if (len != sizeof(m))
        return "length";
    memcpy(&m, bytes, sizeof(m));
    if (m.magic != CM_MAGIC || m.version != CM_VERSION)
        return "magic or version";
    if (m.type < CM_REQUEST || m.type > CM_REJECT || m.datagram > 1)
        return "type";
    if (m.private_len > cm_private_bytes(m.type, m.datagram))
        return "length of the private data";
    if (m.qpn > CM_QPN_MAX || m.psn > CM_QPN_MAX)
        return "queue pair number or PSN of more than 24 bits";
    if (m.retry_count > 7 || m.rnr_retry_count > 7)
        return "retry count over 7";
    if (m.type == CM_REQUEST && !(family_known(&m.from) && family_known(&m.to)))
        return "address family";
    return NULL;
}

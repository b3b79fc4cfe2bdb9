/* SPDX-License-Identifier: Apache-2.0 */
/* What two connection managers agree on: the names of their sockets, and their messages: one struct for all, one
 * datagram each (SOCK_SEQPACKET). */
#ifndef SOFTNIC_CM_MESSAGE_H
#define SOFTNIC_CM_MESSAGE_H

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/un.h>

enum { CM_MAGIC = 0x534e434d, CM_VERSION = 1, CM_PRIVATE_MAX = 196, CM_QPN_MAX = 0xffffff };

enum cm_type { CM_REQUEST = 1, CM_REPLY, CM_READY, CM_REJECT };

/* Why a connection was refused: numbers of the InfiniBand specification, which programs print. */
enum {
    CM_REJ_INVALID_SERVICE = 8, /* nobody listens there */
    CM_REJ_CONSUMER = 28,       /* the program refused, or is gone */
    CM_REJ_VENDOR_OPTION = 35,
    CM_SIDR_UNSUPPORTED = 1, /* the same two, for datagrams */
    CM_SIDR_REJECT = 2,
};

struct cm_address {
    uint16_t family; /* AF_INET: the last four bytes of ip */
    uint16_t port;   /* network byte order, as in a sockaddr */
    uint8_t ip[16];
};

struct cm_message {
    uint32_t magic;
    uint8_t version, type, datagram /* UD */, private_len;
    uint32_t qpn, psn, qkey;
    uint32_t reason; /* reason in a CM_REJECT */
    uint8_t gid[16]; /* GID of the sender's device */
    /* as the sender sees them */
    uint8_t responder_resources, initiator_depth, flow_control, retry_count, rnr_retry_count, srq;
    uint8_t reserved[2];
    struct cm_address from, to; /* in a CM_REQUEST: the sender's address, and the destination's */
    uint8_t private_data[CM_PRIVATE_MAX];
};
static_assert(sizeof(struct cm_message) == 48 + 2 * sizeof(struct cm_address) + CM_PRIVATE_MAX, "no padding");

/* The name of the socket that stands for a port of a device. Return its length. */
socklen_t cm_socket_name(struct sockaddr_un *name, uint64_t world, unsigned port_space, uint32_t dev, uint16_t port);

/* How many bytes of private data such a message carries on hardware. Receivers see as many, the rest 0. */
uint8_t cm_private_bytes(enum cm_type type, bool datagram);

/* NULL when these bytes are a message; otherwise a text that says what is wrong. In a message the queue pair number,
 * the GID and the addresses are well formed, but need not exist. */
const char *cm_message_wrong(const void *bytes, size_t len);

#endif

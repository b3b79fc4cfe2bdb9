/* SPDX-License-Identifier: Apache-2.0 */
/* TCP for connecting: which interface, and sockets that never block. */
#ifndef TRANSPORT_SOCKET_H
#define TRANSPORT_SOCKET_H

#include <netinet/in.h>
#include <stddef.h>

#include "transport/config.h"

union prs_address {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
};

enum { PRS_ADDRESS_TEXT = 80 };

/* "10.0.0.1:4711", "[fd00::1]:4711" */
void prs_address_text(const union prs_address *address, char text[PRS_ADDRESS_TEXT]);

/* The address to listen on: NCCL_SOCKET_IFNAME and NCCL_SOCKET_FAMILY; without a name, what is neither loopback nor
 * docker first. name gets the interface's. Return 0 or -ENODEV (the text lists what there is). */
int prs_socket_interface(const struct prs_config *config, union prs_address *out, char *name, size_t name_bytes);

/* A link-local address of another host: reach it by the interface that we would listen on, whose number is not the one
 * that the other host has for its own. Return 0 or -ENODEV. */
int prs_socket_scope(const struct prs_config *config, union prs_address *address);

/* Listen on a port that the kernel chooses; *address is completed with it. Return the descriptor or -errno. */
int prs_socket_listen(union prs_address *address);
/* Return 0, PRS_AGAIN (nobody waits) or -errno. */
int prs_socket_accept(int listen_fd, union prs_address *from, int *fd);
/* Begin to connect. Return the descriptor or -errno. */
int prs_socket_connect(const union prs_address *address);
/* Has it connected? Return 0, PRS_AGAIN or -errno (not logged). */
int prs_socket_connected(int fd);

#endif

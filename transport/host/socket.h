/* SPDX-License-Identifier: Apache-2.0 */
/* TCP for connecting: the choice of the interface, and non-blocking sockets. */
#ifndef TRANSPORT_SOCKET_H
#define TRANSPORT_SOCKET_H

#include <netinet/in.h>
#include <stddef.h>

#include "transport/host/config.h"

union prs_address {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
};

enum { PRS_ADDRESS_TEXT = 80 };

/* "10.0.0.1:4711", "[fd00::1]:4711" */
void prs_address_text(const union prs_address *address, char text[PRS_ADDRESS_TEXT]);

/* Choose the address to listen on, by NCCL_SOCKET_IFNAME and NCCL_SOCKET_FAMILY. Without a name, loopback and container
 * interfaces come last. name gets the name of the interface. Return 0 or -ENODEV (the text lists all interfaces). */
int prs_socket_interface(const struct prs_config *config, union prs_address *out, char *name, size_t name_bytes);

/* If this is a link-local address of another host, set its scope id to the interface that we would listen on: the scope
 * id of the other host means nothing here. Return 0 or -ENODEV. */
int prs_socket_scope(const struct prs_config *config, union prs_address *address);

/* Descriptors: a forked child closes them. End them by prs_fork_close() (fork.h). */

/* Listen on a port that the kernel chooses, and store it in *address. Return the descriptor or -errno. */
int prs_socket_listen(union prs_address *address);
/* Return 0, PRS_AGAIN (no connection waits) or -errno. */
int prs_socket_accept(int listen_fd, union prs_address *from, int *fd);
/* Start to connect. Return the descriptor or -errno. */
int prs_socket_connect(const union prs_address *address);
/* Is the connection established? Return 0, PRS_AGAIN or -errno (not logged). */
int prs_socket_connected(int fd);

#endif

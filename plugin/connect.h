/* SPDX-License-Identifier: Apache-2.0 */
/* Making and closing comms. Nothing here waits: NCCL calls connect and accept until they yield a comm. */
#ifndef PERSEUS_PLUGIN_CONNECT_H
#define PERSEUS_PLUGIN_CONNECT_H

#include <stdbool.h>

#include "plugin/abi.h"

struct context;

net_result connect_listen(void *context, int device, void *handle, void **listen_comm);
net_result connect_connect(void *context, int device, void *handle, void **send_comm,
                           struct net_device_handle **offload);
net_result connect_accept(void *listen_comm, void **recv_comm, struct net_device_handle **offload);
net_result connect_close_send(void *send_comm);
net_result connect_close_recv(void *recv_comm);
net_result connect_close_listen(void *listen_comm);

/* v10 gives the traffic class with each connection; -1: the context's. */
net_result connect_with_class(struct context *context, int device, int traffic_class, void *handle, void **send_comm);
/* Drop the connections of a context that NCCL began and never finished. */
void connect_abandon(struct context *context);
/* Whether this process has any comm. */
bool connect_in_use(void);

#endif

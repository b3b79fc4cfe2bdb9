/* SPDX-License-Identifier: Apache-2.0 */
/* Opens and closes comms. Nothing here blocks: NCCL calls connect and accept again until they return a comm. */
#ifndef PERSEUS_PLUGIN_CONNECT_H
#define PERSEUS_PLUGIN_CONNECT_H

#include <stdbool.h>

#include "plugin/abi.h"

struct plugin_context;

net_result connect_listen(void *context, int device, void *handle, void **listen_comm);
net_result connect_connect(void *context, int device, void *handle, void **send_comm,
                           struct net_device_handle **offload);
net_result connect_accept(void *listen_comm, void **recv_comm, struct net_device_handle **offload);
net_result connect_close_send(void *send_comm);
net_result connect_close_recv(void *recv_comm);
net_result connect_close_listen(void *listen_comm);

/* As connect_connect(), with a traffic class for this connection (v10); -1: the fabric's. */
net_result connect_with_class(struct plugin_context *context, int device, int traffic_class, void *handle,
                              void **send_comm);
/* NCCL's finalize: close the connections that NCCL began and never finished, then the context. */
net_result connect_finalize(void *context);
/* Whether this process has any comm, finished or not. */
bool connect_has_comms(void);

#endif

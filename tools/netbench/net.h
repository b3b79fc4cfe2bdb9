/* SPDX-License-Identifier: Apache-2.0 */
/* A plugin of any version of NCCL's table, called with the newest signatures. */
#ifndef NETBENCH_NET_H
#define NETBENCH_NET_H

#include "plugin/abi.h"

struct net {
    int version;
    const char *name;
    const char *file;
    void *library;
    void *context; /* v11 on */
    union {
        const void *any;
        const struct net_v6 *v6; /* also for the members that are the same in every version */
        const struct net_v7 *v7;
        const struct net_v8 *v8;
        const struct net_v9 *v9;
        const struct net_v10 *v10;
        const struct net_v11 *v11;
        const struct net_v12 *v12;
    } table;
};

/* Load a plugin and take its table of that version (0: the newest). Return 0, or -errno after printing why. */
int net_load(struct net *net, const char *file, int version);
net_result net_init(struct net *net);
net_result net_finalize(struct net *net);
void net_unload(struct net *net);

net_result net_properties(const struct net *net, int device, struct net_properties_v12 *out);
/* Return NET_INVALID_USAGE where the version or the plugin has no virtual devices. */
net_result net_make_vdevice(const struct net *net, int *device, const struct net_vdevice_v12 *members);
net_result net_listen(const struct net *net, int device, void *handle, void **listen_comm);
net_result net_connect(const struct net *net, int device, void *handle, void **send_comm);
net_result net_accept(const struct net *net, void *listen_comm, void **recv_comm);
net_result net_reg(const struct net *net, void *comm, void *data, size_t size, void **mhandle);
net_result net_isend(const struct net *net, void *comm, void *data, size_t size, int tag, void *mhandle,
                     void **request);
net_result net_irecv(const struct net *net, void *comm, int n, void **data, size_t *sizes, int *tags, void **mhandles,
                     void **request);
/* devices, dereg, iflush, test and close_*: net->table.v6->... */

const char *net_result_text(net_result result);

#endif

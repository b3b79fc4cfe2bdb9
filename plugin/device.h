/* SPDX-License-Identifier: Apache-2.0 */
/* The devices of this process (one for each rail, then the virtual ones that NCCL made), and NCCL's contexts. */
#ifndef PERSEUS_PLUGIN_DEVICE_H
#define PERSEUS_PLUGIN_DEVICE_H

#include <stdbool.h>

#include <perseus/perseus.h>
#include "plugin/abi.h"

struct send_comm;

/* NCCL's context: one for each communicator (v11 on), or one for the process (older tables). */
struct plugin_context {
    struct prs_fabric *fabric;    /* NULL: PERSEUS_REQUIRED is set, but there is no usable device */
    int traffic_class;            /* -1: the fabric's */
    struct send_comm *connecting; /* unfinished: NCCL may abort and never call connect again. device_lock() */
    net_log_fn *log;              /* of the NCCL that made the context; may be NULL */
    net_profile_fn *profile;      /* likewise */
    struct plugin_context *next;  /* the one made before it. device_lock() */
};

/* Protects the device table, the list of contexts and each context's list of connections. */
void device_lock(void);
void device_unlock(void);

/* The rails of a device. Return 0, -EINVAL (no such device) or -ENODEV (PERSEUS_REQUIRED, and there are no rails). */
int device_rails(const struct plugin_context *context, int device, struct prs_rail_set *out);

/* The traffic class of a connection; -1: the fabric's. As in NCCL's own IB transport, NCCL_IB_TC overrides config. */
int device_traffic_class(const struct net_config *config);

net_result device_init(void **context, uint64_t comm_id, struct net_config *config, net_log_fn *log,
                       net_profile_fn *profile);
net_result device_finalize(void *context);
/* Before v11: another NCCL of this process uses the same context, and its log replaces the previous one. Return false
 * if the context belongs to the parent of a fork and cannot be used here. */
bool device_reuse(struct plugin_context *context, net_log_fn *log);
net_result device_count(int *count);
net_result device_properties(int device, struct net_properties_v12 *properties);
net_result device_make_virtual(int *device, struct net_vdevice_v12 *members);
net_result device_set_attributes(void *context, struct net_attributes *attributes);

#endif

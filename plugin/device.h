/* SPDX-License-Identifier: Apache-2.0 */
/* The process's devices (one a rail, then the virtual ones that NCCL made) and the contexts of its communicators. */
#ifndef PERSEUS_PLUGIN_DEVICE_H
#define PERSEUS_PLUGIN_DEVICE_H

#include <stdbool.h>

#include <perseus/perseus.h>
#include "plugin/abi.h"

struct send_comm;

/* One a communicator (v11 on); older versions share one a process. */
struct context {
    struct prs_fabric *fabric;    /* NULL: PERSEUS_REQUIRED is set and there is nothing to use */
    int traffic_class;            /* -1: the fabric's */
    struct send_comm *connecting; /* unfinished; an aborting NCCL never calls connect again. device_lock() */
    net_log_fn *log;              /* of the NCCL that made it; may be NULL */
    struct context *next;         /* made before it. device_lock() */
};

/* Guards the device table, the count of contexts and each context's list. */
void device_lock(void);
void device_unlock(void);

/* Rails of a device and its fabric. Return 0, -EINVAL (no such device), or why PERSEUS_REQUIRED refuses to go on. */
int device_rails(const struct context *context, int device, struct prs_rail_set *out);

/* What a connection asks for; -1: the fabric's. As with NCCL's own IB, NCCL_IB_TC wins over the configuration. */
int device_traffic_class(const struct net_config *config);

net_result device_init(void **context, uint64_t comm_id, struct net_config *config, net_log_fn *log,
                       net_profile_fn *profile);
net_result device_finalize(void *context);
/* Another NCCL of this process shares the context (before v11): its log takes over. Return false: it is of the parent
 * of a fork, and of no use here. */
bool device_share(struct context *context, net_log_fn *log);
net_result device_count(int *count);
net_result device_properties(int device, struct net_properties_v12 *properties);
net_result device_make_virtual(int *device, struct net_vdevice_v12 *members);
net_result device_set_attributes(void *context, struct net_attributes *attributes);

#endif

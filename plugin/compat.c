/* SPDX-License-Identifier: Apache-2.0 */
#include "plugin/compat.h"

#include <errno.h>

#include "plugin/comm.h"
#include "plugin/connect.h"
#include "plugin/device.h"
#include "plugin/memory.h"
#include "plugin/request.h"
#include "plugin/result.h"
#include "transport/util/error.h"

/* Versions before 11 know no context: all their comms share this one, from the first init on. */
static struct context *shared;

/* ---- init and properties ---- */

net_result compat_init_v6(net_log_fn *log)
{
    void *context;
    net_result result;

    /* These versions have no finalize either. NCCL inits once a load, so this is another NCCL of the process, whose
     * comms would lose their devices with the context; or one that unloaded the plugin in between, while something else
     * kept it: what the first left behind goes now. */
    if (shared && connect_in_use() && device_share(shared, log))
        return NET_SUCCESS;
    device_finalize(shared);
    shared = NULL;
    result = device_init(&context, 0, NULL, log, NULL);
    if (result == NET_SUCCESS)
        shared = context;
    return result;
}

net_result compat_init_v10(net_log_fn *log, net_profile_fn *profile)
{
    (void)profile;
    return compat_init_v6(log);
}

/* Members that every version has under the same name. */
#define COPY_COMMON(to, from)                                                                                          \
    do {                                                                                                               \
        (to)->name = (from)->name;                                                                                     \
        (to)->pci_path = (from)->pci_path;                                                                             \
        (to)->guid = (from)->guid;                                                                                     \
        (to)->ptr_support = (from)->ptr_support;                                                                       \
        (to)->speed = (from)->speed;                                                                                   \
        (to)->port = (from)->port;                                                                                     \
        (to)->latency = (from)->latency;                                                                               \
        (to)->max_comms = (from)->max_comms;                                                                           \
        (to)->max_recvs = (from)->max_recvs;                                                                           \
    } while (0)

#define COPY_DEVICE_TYPE(to, from)                                                                                     \
    do {                                                                                                               \
        (to)->device_type = (from)->device_type;                                                                       \
        (to)->device_version = (from)->device_version;                                                                 \
    } while (0)

net_result compat_properties_v6(int device, struct net_properties_v6 *properties)
{
    struct net_properties_v12 full;
    net_result result = device_properties(device, &full);

    if (result == NET_SUCCESS)
        COPY_COMMON(properties, &full);
    return result;
}

net_result compat_properties_v7(int device, struct net_properties_v7 *properties)
{
    struct net_properties_v12 full;
    net_result result = device_properties(device, &full);

    if (result == NET_SUCCESS) {
        COPY_COMMON(properties, &full);
        COPY_DEVICE_TYPE(properties, &full);
    }
    return result;
}

net_result compat_properties_v8(int device, struct net_properties_v8 *properties)
{
    struct net_properties_v12 full;
    net_result result = device_properties(device, &full);

    if (result == NET_SUCCESS) {
        COPY_COMMON(properties, &full);
        COPY_DEVICE_TYPE(properties, &full);
        properties->reg_is_global = full.reg_is_global;
    }
    return result;
}

/* Four members fit: a wider device, which only v12 can have made, names its first four. */
static struct net_vdevice_v9 narrow(const struct net_vdevice_v12 *wide)
{
    struct net_vdevice_v9 narrowed = {.count = wide->count < NET_VDEVICE_MAX_V9 ? wide->count : NET_VDEVICE_MAX_V9};

    for (int i = 0; i < narrowed.count; i++)
        narrowed.device[i] = wide->device[i];
    return narrowed;
}

#define COPY_LIMITS(to, from)                                                                                          \
    do {                                                                                                               \
        (to)->reg_is_global = (from)->reg_is_global;                                                                   \
        (to)->force_flush = (from)->force_flush;                                                                       \
        (to)->vdevice = narrow(&(from)->vdevice);                                                                      \
        (to)->max_p2p_bytes = (from)->max_p2p_bytes;                                                                   \
        (to)->max_coll_bytes = (from)->max_coll_bytes;                                                                 \
    } while (0)

net_result compat_properties_v9(int device, struct net_properties_v9 *properties)
{
    struct net_properties_v12 full;
    net_result result = device_properties(device, &full);

    if (result == NET_SUCCESS) {
        COPY_COMMON(properties, &full);
        COPY_DEVICE_TYPE(properties, &full);
        COPY_LIMITS(properties, &full);
    }
    return result;
}

net_result compat_properties_v11(int device, struct net_properties_v11 *properties)
{
    struct net_properties_v12 full;
    net_result result = device_properties(device, &full);

    if (result == NET_SUCCESS) {
        COPY_COMMON(properties, &full);
        COPY_DEVICE_TYPE(properties, &full);
        COPY_LIMITS(properties, &full);
        properties->max_multi_request = full.max_multi_request;
    }
    return result;
}

net_result compat_make_vdevice_v9(int *device, struct net_vdevice_v9 *members)
{
    struct net_vdevice_v12 wide = {.count = members->count};

    if (members->count < 0 || members->count > NET_VDEVICE_MAX_V9)
        return result_from_errno(prs_fail(-EINVAL, "virtual device of %d members; this NCCL knows at most %d",
                                          members->count, NET_VDEVICE_MAX_V9));
    for (int i = 0; i < members->count; i++)
        wide.device[i] = members->device[i];
    return device_make_virtual(device, &wide);
}

/* ---- connecting ---- */

static net_result not_initialised(void)
{
    return result_from_errno(prs_fail(-EINVAL, "called before init, or after an init that failed"));
}

net_result compat_listen_v6(int device, void *handle, void **listen_comm)
{
    return shared ? connect_listen(shared, device, handle, listen_comm) : not_initialised();
}

net_result compat_connect_v6(int device, void *handle, void **send_comm)
{
    return shared ? connect_with_class(shared, device, NET_UNDEFINED, handle, send_comm) : not_initialised();
}

net_result compat_connect_v7(int device, void *handle, void **send_comm, struct net_device_handle **offload)
{
    (void)offload;
    return compat_connect_v6(device, handle, send_comm);
}

net_result compat_connect_v10(int device, struct net_config *config, void *handle, void **send_comm,
                              struct net_device_handle **offload)
{
    (void)offload;
    if (!shared)
        return not_initialised();
    return connect_with_class(shared, device, device_traffic_class(config), handle, send_comm);
}

net_result compat_accept_v6(void *listen_comm, void **recv_comm)
{
    return connect_accept(listen_comm, recv_comm, NULL);
}

net_result compat_reg_v6(void *comm, void *data, int size, int type, void **mhandle)
{
    if (size < 0) {
        *mhandle = NULL;
        return result_from_errno(prs_fail(-EINVAL, "registration of %d bytes", size));
    }
    return memory_register(comm, data, (size_t)size, type, mhandle);
}

/* ---- data ---- */

net_result compat_isend_v9(void *comm, void *data, size_t size, int tag, void *mhandle, void **request)
{
    return request_isend(comm, data, size, tag, mhandle, NULL, request);
}

net_result compat_irecv_v9(void *comm, int n, void **data, size_t *sizes, int *tags, void **mhandles, void **request)
{
    return request_irecv(comm, n, data, sizes, tags, mhandles, NULL, request);
}

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

/* The tables before v11 have no contexts: all their comms use this one, which the first init makes. */
static struct plugin_context *only_context;

/* ---- init and properties ---- */

static net_result init_only_context(net_log_fn *log, net_profile_fn *profile)
{
    void *context;
    net_result result;

    /* These tables have no finalize either, and NCCL calls init once each time it loads the plugin. A second init
     * may come from another NCCL of this process. Then the context stays, because the comms of the first NCCL need
     * its devices. Or it comes from an NCCL that has unloaded and reloaded the plugin. Then the old context is freed
     * now. */
    if (only_context && connect_has_comms() && device_reuse(only_context, log))
        return NET_SUCCESS;
    connect_finalize(only_context);
    only_context = NULL;
    result = device_init(&context, 0, NULL, log, profile);
    if (result == NET_SUCCESS)
        only_context = context;
    return result;
}

net_result compat_init_v6(net_log_fn *log)
{
    return init_only_context(log, NULL);
}

net_result compat_init_v10(net_log_fn *log, net_profile_fn *profile)
{
    return init_only_context(log, profile);
}

/* Four members fit. A wider device, which only v12 can have made, is cut to its first four. */
static struct net_vdevice_v9 narrow(const struct net_vdevice_v12 *wide)
{
    struct net_vdevice_v9 narrowed = {.count = wide->count < NET_VDEVICE_MAX_V9 ? wide->count : NET_VDEVICE_MAX_V9};

    for (int i = 0; i < narrowed.count; i++)
        narrowed.device[i] = wide->device[i];
    return narrowed;
}

/* The members of v7, and those that v8, v9 and v11 added. */
#define V7_MEMBERS                                                                                                     \
    .name = full.name, .pci_path = full.pci_path, .guid = full.guid, .ptr_support = full.ptr_support,                  \
    .speed = full.speed, .port = full.port, .latency = full.latency, .max_comms = full.max_comms,                      \
    .max_recvs = full.max_recvs, .device_type = full.device_type, .device_version = full.device_version
#define V8_MEMBERS V7_MEMBERS, .reg_is_global = full.reg_is_global
#define V9_MEMBERS                                                                                                     \
    V8_MEMBERS, .force_flush = full.force_flush, .vdevice = narrow(&full.vdevice),                                     \
                .max_p2p_bytes = full.max_p2p_bytes, .max_coll_bytes = full.max_coll_bytes
#define V11_MEMBERS V9_MEMBERS, .max_multi_request = full.max_multi_request

#define DEFINE_PROPERTIES(version, ...)                                                                                \
    net_result compat_properties_##version(int device, struct net_properties_##version *properties)                    \
    {                                                                                                                  \
        struct net_properties_v12 full;                                                                                \
        net_result result = device_properties(device, &full);                                                          \
                                                                                                                       \
        if (result == NET_SUCCESS)                                                                                     \
            *properties = (struct net_properties_##version){__VA_ARGS__};                                              \
        return result;                                                                                                 \
    }
DEFINE_PROPERTIES(v7, V7_MEMBERS)
DEFINE_PROPERTIES(v8, V8_MEMBERS)
DEFINE_PROPERTIES(v9, V9_MEMBERS)
DEFINE_PROPERTIES(v11, V11_MEMBERS)

net_result compat_make_vdevice_v9(int *device, struct net_vdevice_v9 *members)
{
    struct net_vdevice_v12 wide = {.count = members->count};

    if (members->count < 0 || members->count > NET_VDEVICE_MAX_V9)
        return result_from_errno(prs_fail(-EINVAL,
                                          "virtual device of %d members: this version of NCCL knows at most %d",
                                          members->count, NET_VDEVICE_MAX_V9));
    for (int i = 0; i < members->count; i++)
        wide.device[i] = members->device[i];
    return device_make_virtual(device, &wide);
}

/* ---- connecting ---- */

static net_result not_initialised(void)
{
    return result_from_errno(prs_fail(-EINVAL, "called before init, or after a failed init"));
}

net_result compat_listen_v6(int device, void *handle, void **listen_comm)
{
    return only_context ? connect_listen(only_context, device, handle, listen_comm) : not_initialised();
}

net_result compat_connect_v7(int device, void *handle, void **send_comm, struct net_device_handle **offload)
{
    (void)offload;
    if (!only_context)
        return not_initialised();
    return connect_with_class(only_context, device, NET_UNDEFINED, handle, send_comm);
}

net_result compat_connect_v10(int device, struct net_config *config, void *handle, void **send_comm,
                              struct net_device_handle **offload)
{
    (void)offload;
    if (!only_context)
        return not_initialised();
    return connect_with_class(only_context, device, device_traffic_class(config), handle, send_comm);
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

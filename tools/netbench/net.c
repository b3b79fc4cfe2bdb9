/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/netbench/net.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

enum { NEWEST = 12, OLDEST = 6 };

/* The logger that the plugin gets. NCCL_DEBUG sets its level, as in NCCL. */
static void log_line(int level, unsigned long subsystems, const char *file, int line, const char *format, ...)
{
    const char *wanted = getenv("NCCL_DEBUG");
    int most = NET_LOG_WARN;
    char text[1024];
    va_list args;

    (void)subsystems;
    if (wanted && strcasecmp(wanted, "INFO") == 0)
        most = NET_LOG_INFO;
    if (wanted && strcasecmp(wanted, "TRACE") == 0)
        most = NET_LOG_TRACE;
    if (level > most)
        return;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    if (level == NET_LOG_WARN)
        fprintf(stderr, "[%d] %s:%d WARN %s\n", (int)getpid(), file ? file : "?", line, text);
    else
        fprintf(stderr, "[%d] %s\n", (int)getpid(), text);
}

int net_load(struct net *net, const char *file, int version)
{
    *net = (struct net){.version = version, .file = file};
    net->library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (!net->library) {
        fprintf(stderr, "perseus-netbench: %s\n", dlerror());
        return -ENOENT;
    }
    for (int v = version ? version : NEWEST; v >= (version ? version : OLDEST); v--) {
        char symbol[32];

        snprintf(symbol, sizeof(symbol), "ncclNetPlugin_v%d", v);
        net->table.any = dlsym(net->library, symbol);
        if (net->table.any) {
            net->version = v;
            net->name = net->table.v6->name;
            return 0;
        }
    }
    if (version)
        fprintf(stderr, "perseus-netbench: %s does not export ncclNetPlugin_v%d\n", file, version);
    else
        fprintf(stderr, "perseus-netbench: %s exports no table of version %d to %d\n", file, OLDEST, NEWEST);
    dlclose(net->library);
    net->library = NULL;
    return -ENOENT;
}

void net_unload(struct net *net)
{
    if (net->library)
        dlclose(net->library);
    net->library = NULL;
}

net_result net_init(struct net *net)
{
    struct net_config config = {.traffic_class = NET_UNDEFINED};

    if (net->version >= 11)
        return net->table.v11->init(&net->context, 1, &config, log_line, NULL);
    if (net->version == 10)
        return net->table.v10->init(log_line, NULL);
    return net->table.v6->init(log_line);
}

net_result net_finalize(struct net *net)
{
    return net->version >= 11 ? net->table.v11->finalize(net->context) : NET_SUCCESS;
}

/* The members that all versions have, under the same names. */
#define TAKE(out, from)                                                                                                \
    do {                                                                                                               \
        (out)->name = (from).name;                                                                                     \
        (out)->pci_path = (from).pci_path;                                                                             \
        (out)->guid = (from).guid;                                                                                     \
        (out)->ptr_support = (from).ptr_support;                                                                       \
        (out)->speed = (from).speed;                                                                                   \
        (out)->port = (from).port;                                                                                     \
        (out)->latency = (from).latency;                                                                               \
        (out)->max_comms = (from).max_comms;                                                                           \
        (out)->max_recvs = (from).max_recvs;                                                                           \
    } while (0)

net_result net_properties(const struct net *net, int device, struct net_properties_v12 *out)
{
    union {
        struct net_properties_v6 v6;
        struct net_properties_v7 v7;
        struct net_properties_v8 v8;
        struct net_properties_v9 v9;
        struct net_properties_v11 v11;
    } old;
    net_result result;

    memset(&old, 0, sizeof(old));
    memset(out, 0, sizeof(*out));
    switch (net->version) {
    case 6:
        result = net->table.v6->properties(device, &old.v6);
        TAKE(out, old.v6);
        return result;
    case 7:
        result = net->table.v7->properties(device, &old.v7);
        TAKE(out, old.v7);
        return result;
    case 8:
        result = net->table.v8->properties(device, &old.v8);
        TAKE(out, old.v8);
        return result;
    case 9:
    case 10:
        result = net->table.v9->properties(device, &old.v9);
        TAKE(out, old.v9);
        return result;
    case 11:
        result = net->table.v11->properties(device, &old.v11);
        TAKE(out, old.v11);
        return result;
    default:
        return net->table.v12->properties(device, out);
    }
}

net_result net_make_vdevice(const struct net *net, int *device, const struct net_vdevice_v12 *members)
{
    struct net_vdevice_v12 wide = *members;
    struct net_vdevice_v9 narrow = {.count = members->count};

    if (net->version < 9 || !net->table.v9->make_vdevice)
        return NET_INVALID_USAGE;
    if (net->version >= 12)
        return net->table.v12->make_vdevice(device, &wide);
    if (members->count > NET_VDEVICE_MAX_V9)
        narrow.count = NET_VDEVICE_MAX_V9;
    memcpy(narrow.device, members->device, narrow.count * sizeof(int));
    return net->table.v9->make_vdevice(device, &narrow);
}

net_result net_listen(const struct net *net, int device, void *handle, void **listen_comm)
{
    if (net->version >= 11)
        return net->table.v11->listen(net->context, device, handle, listen_comm);
    return net->table.v6->listen(device, handle, listen_comm);
}

net_result net_connect(const struct net *net, int device, void *handle, void **send_comm)
{
    struct net_config config = {.traffic_class = NET_UNDEFINED};
    struct net_device_handle *offload = NULL;

    if (net->version >= 11)
        return net->table.v11->connect(net->context, device, handle, send_comm, &offload);
    if (net->version == 10)
        return net->table.v10->connect(device, &config, handle, send_comm, &offload);
    if (net->version >= 7)
        return net->table.v7->connect(device, handle, send_comm, &offload);
    return net->table.v6->connect(device, handle, send_comm);
}

net_result net_accept(const struct net *net, void *listen_comm, void **recv_comm)
{
    struct net_device_handle *offload = NULL;

    if (net->version >= 7)
        return net->table.v7->accept(listen_comm, recv_comm, &offload);
    return net->table.v6->accept(listen_comm, recv_comm);
}

net_result net_reg(const struct net *net, void *comm, void *data, size_t size, void **mhandle)
{
    if (net->version >= 8)
        return net->table.v8->reg(comm, data, size, NET_PTR_HOST, mhandle);
    if (size > INT32_MAX)
        return NET_INVALID_ARGUMENT;
    return net->table.v6->reg(comm, data, (int)size, NET_PTR_HOST, mhandle);
}

net_result net_isend(const struct net *net, void *comm, void *data, size_t size, int tag, void *mhandle, void **request)
{
    if (net->version >= 10)
        return net->table.v10->isend(comm, data, size, tag, mhandle, NULL, request);
    if (net->version == 9)
        return net->table.v9->isend(comm, data, size, tag, mhandle, request);
    return net->table.v6->isend(comm, data, (int)size, tag, mhandle, request);
}

net_result net_irecv(const struct net *net, void *comm, int n, void **data, size_t *sizes, int *tags, void **mhandles,
                     void **request)
{
    void *profiles[8] = {NULL};
    int narrow[8];

    if (net->version >= 10)
        return net->table.v10->irecv(comm, n, data, sizes, tags, mhandles, profiles, request);
    if (net->version == 9)
        return net->table.v9->irecv(comm, n, data, sizes, tags, mhandles, request);
    for (int i = 0; i < n; i++)
        narrow[i] = (int)sizes[i];
    return net->table.v6->irecv(comm, n, data, narrow, tags, mhandles, request);
}

const char *net_result_text(net_result result)
{
    static const char *const text[] = {"success",          "CUDA error",    "system error", "internal error",
                                       "invalid argument", "invalid usage", "remote error", "in progress"};

    return result >= 0 && result < (int)(sizeof(text) / sizeof(text[0])) ? text[result] : "unknown result";
}

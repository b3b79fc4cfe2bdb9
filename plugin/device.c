/* SPDX-License-Identifier: Apache-2.0 */
#include "plugin/device.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "plugin/banner.h"
#include "plugin/comm.h"
#include "plugin/result.h"
#include "transport/util/env.h"
#include "transport/util/error.h"
#include "transport/util/fork.h"
#include "transport/util/log.h"

enum {
    DEVICES_MAX = 64,
    DEVICE_MAX_P2P = 1 << 30, /* test() returns sizes as int, and NCCL itself splits at 1 GiB */
};

struct device {
    struct net_properties_v12 properties; /* strings point into this struct */
    struct prs_rail_set rails;
    char name[512];
    char pci_path[256];
};

/* The first context fills it, the last one clears it. */
static struct {
    pthread_mutex_t lock;
    int contexts;
    struct plugin_context *newest; /* its log is the one in use */
    pid_t owner;                   /* a child of a fork inherits the table, but not the state of the NICs */
    struct prs_fabric *fabric;
    bool is_placeholder; /* PERSEUS_REQUIRED without a rail: one device, whose listen and connect fail */
    char no_device_reason[256];
    int physical, count;
    struct device device[DEVICES_MAX];
} net = {.lock = PTHREAD_MUTEX_INITIALIZER};
PRS_RENEW_IN_CHILD(net, net.lock)

void device_lock(void)
{
    pthread_mutex_lock(&net.lock);
}

void device_unlock(void)
{
    pthread_mutex_unlock(&net.lock);
}

/* prs_log_fn: pass every line to NCCL's logger. */
static void log_to_nccl(void *user, enum prs_log_level level, const char *file, int line, const char *text)
{
    static const int levels[] = {[PRS_LOG_ERROR] = NET_LOG_WARN,
                                 [PRS_LOG_WARN] = NET_LOG_WARN,
                                 [PRS_LOG_INFO] = NET_LOG_INFO,
                                 [PRS_LOG_DEBUG] = NET_LOG_TRACE};
    net_log_fn *log = (net_log_fn *)(uintptr_t)user;

    log(levels[level], NET_LOG_INIT | NET_LOG_NET, file, line, "NET/Perseus: %s", text);
}

/* Called when a context was made or freed: the log of an NCCL that may be unloaded must not stay in use. */
static void choose_log_locked(void)
{
    const struct plugin_context *context = net.newest;

    while (context && !context->log)
        context = context->next;
    if (context)
        prs_log_set(log_to_nccl, (void *)(uintptr_t)context->log);
    else
        prs_log_set(NULL, NULL);
}

/* ---- the table ---- */

/* Two ports of a chip have the same name in verbs, but NCCL needs different names. */
static void name_device(struct device *device, const struct prs_rail_info *info, int index)
{
    bool is_ambiguous = false;

    for (int i = 0; i < prs_fabric_rails(net.fabric); i++) {
        struct prs_rail_info other;

        if (i != index && prs_rail_query(net.fabric, i, &other) == 0 && strcmp(other.name, info->name) == 0)
            is_ambiguous = true;
    }
    if (is_ambiguous)
        snprintf(device->name, sizeof(device->name), "%s:%d", info->name, info->port);
    else
        snprintf(device->name, sizeof(device->name), "%s", info->name);
}

static void describe_rail(struct device *device, const struct prs_rail_info *info, int index)
{
    size_t most = info->max_put_bytes < DEVICE_MAX_P2P ? info->max_put_bytes : DEVICE_MAX_P2P;

    memset(device, 0, sizeof(*device));
    name_device(device, info, index);
    snprintf(device->pci_path, sizeof(device->pci_path), "%s", info->pci_path);
    device->rails = (struct prs_rail_set){.count = 1, .rail = {index}};
    device->properties = (struct net_properties_v12){
        .name = device->name,
        .pci_path = device->pci_path[0] ? device->pci_path : NULL,
        .guid = info->guid,
        .ptr_support = (info->mem_kinds & PRS_MEM_HOST ? NET_PTR_HOST : 0) |
                       (info->mem_kinds & PRS_MEM_CUDA ? NET_PTR_CUDA : 0) |
                       (info->mem_kinds & PRS_MEM_DMABUF ? NET_PTR_DMABUF : 0),
        .reg_is_global = 1,
        /* From sm90 on NCCL assumes that data is visible to the GPU when its completion is. That is true if the NIC
         * writes in order. If not, a read after the data is needed. */
        .force_flush = !info->in_order,
        .speed = (int)info->speed_mbps,
        .port = info->chip_port, /* NCCL takes devices of equal guid and port for one link, and shares its bandwidth */
        /* NCCL adds this to the latencies that its own IB transport was tuned with, which reports 0. */
        .latency = info->in_order ? 0 : info->latency_us,
        .max_comms = info->max_peers > INT32_MAX ? INT32_MAX : (int)info->max_peers,
        .max_recvs = COMM_MAX_RECVS,
        .device_type = NET_DEVICE_HOST,
        .device_version = NET_DEVICE_VERSION,
        .vdevice = {.count = 1, .device = {index}},
        .max_p2p_bytes = most,
        .max_coll_bytes = most,
        .max_multi_request = 1,
        .rail_id = info->rail_id,
        .plane_id = info->plane_id,
    };
}

static void describe_placeholder(void)
{
    struct device *device = &net.device[0];

    memset(device, 0, sizeof(*device));
    snprintf(device->name, sizeof(device->name), "perseus-required");
    device->properties = (struct net_properties_v12){
        .name = device->name,
        .ptr_support = NET_PTR_HOST,
        .speed = 10000,
        .port = 1,
        .max_comms = 1,
        .max_recvs = 1,
        .vdevice = {.count = 1, .device = {0}},
        .max_p2p_bytes = DEVICE_MAX_P2P,
        .max_coll_bytes = DEVICE_MAX_P2P,
        .max_multi_request = 1,
        .rail_id = NET_UNDEFINED,
        .plane_id = NET_UNDEFINED,
    };
    net.is_placeholder = true;
    net.physical = net.count = 1;
}

/* NCCL's protocols LL and LL128 poll flags among the data: 8 and 128 bytes must become visible at once or in order. A
 * rail that does not keep order (EFA's SRD) does not guarantee that, and there is no property to tell NCCL so. So set
 * NCCL_PROTO, which NCCL reads after init. */
static void avoid_flags_in_data(const struct prs_rail_info *info)
{
    const char *protocols = prs_env_text("NCCL_PROTO");

    if (info->in_order || (protocols && strcasecmp(protocols, "Simple") == 0))
        return;
    if (protocols) {
        PRS_WARN("NCCL_PROTO=%s: %s does not keep the order that LL and LL128 rely on; their data may be wrong",
                 protocols, info->name);
        return;
    }
    setenv("NCCL_PROTO", "Simple", 1);
    PRS_INFO("NCCL_PROTO is set to Simple: %s does not keep the order that LL and LL128 rely on", info->name);
}

/* Return 0 or -errno, logged. */
static int fill_table(void)
{
    int rails = prs_fabric_rails(net.fabric);

    if (rails > DEVICES_MAX) {
        PRS_WARN("%d rails: only the first %d are used", rails, DEVICES_MAX);
        rails = DEVICES_MAX;
    }
    for (int i = 0; i < rails; i++) {
        struct prs_rail_info info;
        int r = prs_rail_query(net.fabric, i, &info);

        if (r < 0)
            return r;
        describe_rail(&net.device[i], &info, i);
        avoid_flags_in_data(&info);
    }
    net.physical = net.count = rails;
    banner_log(net.fabric);
    return 0;
}

/* Called for the first context. When init fails NCCL uses another network, unless PERSEUS_REQUIRED forbids that. */
static int open_devices(void)
{
    const char *required = prs_env_text("PERSEUS_REQUIRED");
    /* Any value but "0" counts, also one such as "yes", which prs_fabric_open() refuses: such a job must not use
     * another network. */
    bool is_required = required && strcmp(required, "0");
    int r;

    net.is_placeholder = false;
    net.count = net.physical = 0;
    r = prs_fabric_open(NULL, &net.fabric);
    if (!r && prs_fabric_rails(net.fabric) > 0) {
        r = fill_table();
        if (r < 0)
            goto close_fabric;
        return 0;
    }
    snprintf(net.no_device_reason, sizeof(net.no_device_reason), "%s",
             r < 0 ? prs_error_text() : "no RDMA device with a usable port");
    if (is_required) {
        PRS_WARN("PERSEUS_REQUIRED=1, so the first connection will fail (perseus-info says more): no usable device: %s",
                 net.no_device_reason);
        describe_placeholder();
        return 0;
    }
    PRS_INFO("no usable device, so NCCL will use another network: %s (PERSEUS_REQUIRED=1 makes this an error)",
             net.no_device_reason);
    if (r < 0)
        return r;
    r = -ENODEV;
close_fabric:
    prs_fabric_close(net.fabric);
    net.fabric = NULL;
    return r;
}

int device_rails(const struct plugin_context *context, int device, struct prs_rail_set *out)
{
    int r = 0;

    device_lock();
    if (net.is_placeholder || !context->fabric)
        r = prs_fail(-ENODEV, "PERSEUS_REQUIRED=1, but there is no usable device: %s", net.no_device_reason);
    else if (device < 0 || device >= net.count)
        r = prs_fail(-EINVAL, "device %d: there are only %d devices", device, net.count);
    else
        *out = net.device[device].rails;
    device_unlock();
    return r;
}

int device_traffic_class(const struct net_config *config)
{
    return config && !prs_env_text("NCCL_IB_TC") ? config->traffic_class : NET_UNDEFINED;
}

/* ---- what NCCL calls ---- */

net_result device_init(void **out, uint64_t comm_id, struct net_config *config, net_log_fn *log,
                       net_profile_fn *profile)
{
    struct plugin_context *context;
    int r = 0;

    (void)comm_id;
    *out = NULL;
    context = calloc(1, sizeof(*context));
    if (!context) {
        if (log) /* no context has it yet */
            log(NET_LOG_WARN, NET_LOG_INIT | NET_LOG_NET, __FILE__, __LINE__, "NET/Perseus: init: out of memory");
        return NET_SYSTEM_ERROR;
    }
    context->log = log;
    context->profile = profile;
    device_lock();
    if (net.contexts > 0 && net.owner != getpid()) {
        net.contexts = 0; /* the parent's contexts can be neither used nor freed here */
        net.newest = NULL;
    }
    context->next = net.newest;
    net.newest = context;
    choose_log_locked();
    if (net.contexts == 0)
        r = open_devices();
    if (!r) {
        net.owner = getpid();
        net.contexts++;
        context->fabric = net.fabric;
    } else {
        net.newest = context->next;
        choose_log_locked();
    }
    device_unlock();
    if (r < 0) {
        free(context);
        return result_from_errno(r);
    }
    context->traffic_class = device_traffic_class(config);
    *out = context;
    return NET_SUCCESS;
}

net_result device_finalize(void *handle)
{
    struct plugin_context *context = handle, **link;

    if (!context)
        return NET_SUCCESS;
    device_lock();
    if (net.owner == getpid()) {
        for (link = &net.newest; *link && *link != context; link = &(*link)->next)
            ;
        if (*link)
            *link = context->next;
        if (--net.contexts == 0) {
            prs_fabric_close(net.fabric);
            net.fabric = NULL;
            net.count = net.physical = 0;
        }
        choose_log_locked();
    }
    device_unlock();
    free(context);
    return NET_SUCCESS;
}

bool device_reuse(struct plugin_context *context, net_log_fn *log)
{
    bool ours;

    device_lock();
    ours = net.owner == getpid();
    if (ours && log) {
        context->log = log;
        choose_log_locked();
    }
    device_unlock();
    return ours;
}

net_result device_count(int *count)
{
    device_lock();
    *count = net.count;
    device_unlock();
    return NET_SUCCESS;
}

net_result device_properties(int device, struct net_properties_v12 *properties)
{
    net_result result = NET_SUCCESS;

    device_lock();
    if (device < 0 || device >= net.count)
        result = result_from_errno(
            prs_fail(-EINVAL, "properties of device %d: there are only %d devices", device, net.count));
    else
        *properties = net.device[device].properties;
    device_unlock();
    return result;
}

/* Return 0 or -EINVAL, logged. */
static int check_members(const struct net_vdevice_v12 *members)
{
    if (members->count < 1 || members->count > PRS_MAX_RAILS)
        return prs_fail(-EINVAL, "virtual device of %d members: 1 to %d are possible", members->count, PRS_MAX_RAILS);
    for (int i = 0; i < members->count; i++) {
        if (members->device[i] < 0 || members->device[i] >= net.physical)
            return prs_fail(-EINVAL, "virtual device: member %d is device %d, but there are only %d physical devices",
                            i, members->device[i], net.physical);
        for (int j = 0; j < i; j++) {
            if (members->device[i] == members->device[j])
                return prs_fail(-EINVAL, "virtual device: device %d is a member twice", members->device[i]);
        }
    }
    return 0;
}

static void append_name(struct device *device, const char *text)
{
    size_t used = strlen(device->name);
    size_t fits = strnlen(text, sizeof(device->name) - used - 1);

    memmove(device->name + used, text, fits);
    device->name[used + fits] = '\0';
}

/* The properties of a virtual device: the sum of the speeds, and otherwise what is true of every member. */
static void describe_virtual(struct device *device, const struct net_vdevice_v12 *members)
{
    const struct device *first = &net.device[members->device[0]];
    struct net_properties_v12 *all = &device->properties;

    memset(device, 0, sizeof(*device));
    memcpy(device->pci_path, first->pci_path, sizeof(device->pci_path));
    *all = first->properties;
    all->name = device->name;
    all->pci_path = device->pci_path[0] ? device->pci_path : NULL;
    all->speed = 0;
    all->vdevice = *members;
    for (int i = 0; i < members->count; i++) {
        const struct device *member = &net.device[members->device[i]];
        const struct net_properties_v12 *one = &member->properties;

        if (i)
            append_name(device, "+");
        append_name(device, member->name);
        all->speed += one->speed;
        all->ptr_support &= one->ptr_support;
        all->force_flush |= one->force_flush;
        all->max_comms = one->max_comms < all->max_comms ? one->max_comms : all->max_comms;
        all->max_p2p_bytes = one->max_p2p_bytes < all->max_p2p_bytes ? one->max_p2p_bytes : all->max_p2p_bytes;
        all->max_coll_bytes = all->max_p2p_bytes;
        all->latency = one->latency > all->latency ? one->latency : all->latency;
        all->rail_id = one->rail_id == all->rail_id ? all->rail_id : NET_UNDEFINED;
        all->plane_id = one->plane_id == all->plane_id ? all->plane_id : NET_UNDEFINED;
        device->rails.rail[device->rails.count++] = member->rails.rail[0];
    }
}

/* Return the device, or -errno, logged. */
static int make_virtual(const struct net_vdevice_v12 *members)
{
    int is_allowed = prs_env_clamp("NCCL_IB_MERGE_NICS", 1, 0, 1);
    int r = check_members(members);

    if (r < 0)
        return r;
    if (members->count == 1)
        return members->device[0];
    if (!is_allowed) {
        PRS_INFO("virtual device of %d rails refused: NCCL_IB_MERGE_NICS=0", members->count);
        return -EOPNOTSUPP;
    }
    for (int i = net.physical; i < net.count; i++) {
        const struct net_vdevice_v12 *known = &net.device[i].properties.vdevice;

        if (known->count == members->count && memcmp(known->device, members->device, members->count * sizeof(int)) == 0)
            return i;
    }
    if (net.count == DEVICES_MAX)
        return prs_fail(-ENOMEM, "virtual device: there are already %d devices", net.count);
    describe_virtual(&net.device[net.count], members);
    PRS_INFO("device %d is %s, %d Mb/s", net.count, net.device[net.count].name, net.device[net.count].properties.speed);
    return net.count++;
}

net_result device_make_virtual(int *device, struct net_vdevice_v12 *members)
{
    int r;

    device_lock();
    r = make_virtual(members);
    device_unlock();
    if (r < 0)
        return r == -EOPNOTSUPP ? NET_INVALID_USAGE : result_from_errno(r);
    *device = r;
    return NET_SUCCESS;
}

net_result device_set_attributes(void *context, struct net_attributes *attributes)
{
    (void)context; /* hints about expected flows: not needed, since queues are made with each connection */
    (void)attributes;
    return NET_SUCCESS;
}

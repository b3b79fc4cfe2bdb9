/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/verbs/devices.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tools/softnic/memory/agent.h"
#include "tools/softnic/memory/copier_client.h"
#include "tools/softnic/memory/device_mem.h"
#include "tools/softnic/nic/srd.h"
#include "tools/softnic/verbs/cq.h"
#include "tools/softnic/verbs/efadv.h"
#include "tools/softnic/verbs/qp.h"
#include "tools/softnic/verbs/srq.h"
#include "tools/softnic/world/object.h"
#include "tools/softnic/world/wake.h"

enum { COMP_VECTORS = 8, GBPS_WITHOUT_MODEL = 400 };

static struct sn_device *device_new(uint32_t index)
{
    const struct sn_dev *dev = &sn_self->world->devs[index];
    struct sn_device *d = calloc(1, sizeof(*d));

    if (!d)
        return NULL;
    d->index = index;
    d->ibv.node_type = dev->efa ? IBV_NODE_UNSPECIFIED : IBV_NODE_CA;
    d->ibv.transport_type = dev->efa ? IBV_TRANSPORT_UNSPECIFIED : IBV_TRANSPORT_IB;
    snprintf(d->ibv.name, sizeof(d->ibv.name), "%s", dev->name);
    snprintf(d->ibv.dev_name, sizeof(d->ibv.dev_name), "uverbs%u", index);
    snprintf(d->ibv.dev_path, sizeof(d->ibv.dev_path), "/sys/class/infiniband_verbs/uverbs%u", index);
    snprintf(d->ibv.ibdev_path, sizeof(d->ibv.ibdev_path), "/sys/class/infiniband/%s", dev->name);
    return d;
}

/* One for each device, kept as long as the process lives: programs free the list while its devices are open. */
static struct sn_device *device_get(uint32_t index)
{
    static struct sn_device *devices[SN_MAX_DEVS];
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    struct sn_device *d;

    pthread_mutex_lock(&mutex);
    if (!devices[index])
        devices[index] = device_new(index);
    d = devices[index];
    pthread_mutex_unlock(&mutex);
    return d;
}

struct ibv_device **ibv_get_device_list(int *count)
{
    struct sn_self *self = sn_self_get(sn_device_mem_choose);
    struct ibv_device **list;
    uint32_t node, n = 0;

    if (count)
        *count = 0;
    if (!self)
        return NULL;
    list = calloc(self->world->dev_count + 1, sizeof(*list));
    if (!list)
        return NULL;
    node = self->world->procs[self->proc].node;
    for (uint32_t i = 0; i < self->world->dev_count; i++) {
        struct sn_device *d = node == SN_NONE || self->world->devs[i].node == node ? device_get(i) : NULL;

        if (d)
            list[n++] = &d->ibv;
    }
    if (count)
        *count = (int)n;
    return list;
}

void ibv_free_device_list(struct ibv_device **list)
{
    free(list);
}

const char *ibv_get_device_name(struct ibv_device *device)
{
    return device->name;
}

int ibv_get_device_index(struct ibv_device *device)
{
    return (int)((struct sn_device *)device)->index;
}

__be64 ibv_get_device_guid(struct ibv_device *device)
{
    return sn_self->world->devs[((struct sn_device *)device)->index].guid;
}

/* What an opened device's command descriptor holds: enough to find the device again. */
struct command_file {
    uint64_t nonce; /* that of this process */
    struct sn_ctx *ctx;
};

static int command_file_open(struct sn_ctx *ctx)
{
    struct command_file file = {sn_self->nonce, ctx};
    int fd = memfd_create("softnic", MFD_CLOEXEC), r;

    if (fd < 0)
        return -errno;
    if (pwrite(fd, &file, sizeof(file), 0) == (ssize_t)sizeof(file))
        return fd;
    r = errno ? -errno : -EIO;
    close(fd);
    return r;
}

/* A copy of the descriptor may outlive the device. */
static void command_file_close(int fd)
{
    static const struct command_file nothing;

    if (pwrite(fd, &nothing, sizeof(nothing), 0) != (ssize_t)sizeof(nothing))
        sn_log("close_device: a copy of its command descriptor could not be invalidated");
    close(fd);
}

/* Here an imported device is the opened one, once more: both end with the last ibv_close_device. A device of another
 * process cannot be imported, since its objects live in that process. */
struct ibv_context *ibv_import_device(int cmd_fd)
{
    struct command_file file;

    if (!sn_self || pread(cmd_fd, &file, sizeof(file), 0) != (ssize_t)sizeof(file) || !file.ctx ||
        file.nonce != sn_self->nonce) {
        errno = EOPNOTSUPP;
        return NULL;
    }
    __atomic_add_fetch(&file.ctx->opened, 1, __ATOMIC_RELAXED);
    close(cmd_fd); /* it is the library's from here on */
    return &file.ctx->verbs.context;
}

struct ibv_context *ibv_open_device(struct ibv_device *device)
{
    struct sn_self *self = sn_self_get(sn_device_mem_choose);
    struct sn_ctx *ctx;
    int r;

    if (!self)
        return NULL;
    ctx = calloc(1, sizeof(*ctx));
    if (!ctx)
        return NULL;
    ctx->dev = ((struct sn_device *)device)->index;
    r = sn_ctx_shm_take(self->world, self->proc, ctx->dev, &ctx->index);
    if (r < 0)
        goto free_ctx;
    ctx->world = self->world;
    ctx->shm = &self->world->ctxs[ctx->index];
    r = sn_wake_open(self->world, &ctx->shm->wake_id);
    if (r < 0)
        goto give_shm;
    ctx->verbs.context.async_fd = r;
    r = command_file_open(ctx);
    if (r < 0)
        goto close_async;
    ctx->verbs.context.cmd_fd = r;
    ctx->opened = 1;
    sn_engine_init(&ctx->engine, sn_model_on(&self->world->config));
    pthread_mutex_init(&ctx->qp_mutex, NULL);
    sn_ops_fill(&ctx->verbs, self->world->devs[ctx->dev].efa);
    ctx->verbs.context.device = device;
    ctx->verbs.context.num_comp_vectors = COMP_VECTORS;
    pthread_mutex_init(&ctx->verbs.context.mutex, NULL);
    return &ctx->verbs.context;
close_async:
    close(ctx->verbs.context.async_fd);
give_shm:
    sn_ctx_shm_give(self->world, ctx->index);
free_ctx:
    free(ctx);
    sn_log("open_device %s: %s", device->name, strerror(-r));
    errno = -r;
    return NULL;
}

int ibv_close_device(struct ibv_context *context)
{
    struct sn_ctx *ctx = sn_ctx_of(context);
    int fd = context->async_fd;

    if (__atomic_sub_fetch(&ctx->opened, 1, __ATOMIC_ACQ_REL))
        return 0; /* imported, and still in use */
    sn_engine_fini(&ctx->engine);
    sn_agent_stop(&ctx->agent);
    if (sn_device_mem)
        sn_device_mem->settle();
    sn_ctx_shm_give(sn_self->world, ctx->index); /* before the descriptor is closed: no event may go to its next user */
    close(fd);
    command_file_close(context->cmd_fd);
    pthread_mutex_destroy(&ctx->qp_mutex);
    free(ctx);
    return 0;
}

int sn_device_query(struct ibv_context *context, struct ibv_device_attr *attr)
{
    const struct sn_dev *dev = sn_ctx_dev(sn_ctx_of(context));

    *attr = (struct ibv_device_attr){.node_guid = dev->guid,
                                     .sys_image_guid = dev->guid,
                                     .max_mr_size = SN_MAX_MR_BYTES,
                                     .page_size_cap = 0xfffffffffffff000ull,
                                     .vendor_id = 0x5052,
                                     .vendor_part_id = 1,
                                     .hw_ver = SN_WORLD_VERSION,
                                     .max_qp = SN_MAX_QPS - 1,
                                     .max_qp_wr = SN_MAX_QP_WR,
                                     .device_cap_flags = IBV_DEVICE_RC_RNR_NAK_GEN | IBV_DEVICE_CURR_QP_STATE_MOD |
                                                         IBV_DEVICE_PORT_ACTIVE_EVENT | IBV_DEVICE_SYS_IMAGE_GUID |
                                                         IBV_DEVICE_MEM_WINDOW_TYPE_2B,
                                     .max_sge = SN_MAX_SGE,
                                     .max_sge_rd = SN_MAX_SGE,
                                     .max_cq = SN_MAX_CQS,
                                     .max_cqe = SN_MAX_CQE,
                                     .max_mr = SN_MAX_MRS - 1,
                                     .max_mw = SN_MAX_MRS - 1,
                                     .max_pd = 1 << 16,
                                     .max_qp_rd_atom = SN_MAX_RD_ATOMIC,
                                     .max_res_rd_atom = SN_MAX_RD_ATOMIC * SN_MAX_QPS,
                                     .max_qp_init_rd_atom = SN_MAX_RD_ATOMIC,
                                     .atomic_cap = (enum ibv_atomic_cap)dev->atomic_cap,
                                     .max_ah = 1 << 16,
                                     .max_srq = SN_MAX_SRQS,
                                     .max_srq_wr = SN_MAX_SRQ_WR,
                                     .max_srq_sge = SN_MAX_SGE,
                                     .max_pkeys = 1,
                                     .local_ca_ack_delay = 15,
                                     .phys_port_cnt = 1};
    if (dev->efa)
        sn_efa_limits(attr);
    snprintf(attr->fw_ver, sizeof(attr->fw_ver), "softnic-%s", PRS_VERSION);
    return 0;
}

int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attr)
{
    return sn_device_query(context, attr);
}

static const struct ibv_odp_caps odp_caps = {
    .general_caps = IBV_ODP_SUPPORT | IBV_ODP_SUPPORT_IMPLICIT,
    .per_transport_caps = {.rc_odp_caps = IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV | IBV_ODP_SUPPORT_WRITE |
                                          IBV_ODP_SUPPORT_READ | IBV_ODP_SUPPORT_ATOMIC | IBV_ODP_SUPPORT_SRQ_RECV,
                           .uc_odp_caps = IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV | IBV_ODP_SUPPORT_WRITE,
                           .ud_odp_caps = IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV}};

int sn_device_query_ex(struct ibv_context *context, const struct ibv_query_device_ex_input *input,
                       struct ibv_device_attr_ex *attr, size_t attr_size)
{
    struct ibv_device_attr_ex mine = {.completion_timestamp_mask = UINT64_MAX,
                                      .hca_core_clock = 1000000 /* kHz: time in ns */,
                                      .phys_port_cnt_ex = 1};

    if ((input && input->comp_mask) || attr_size < sizeof(struct ibv_device_attr))
        return EINVAL;
    sn_device_query(context, &mine.orig_attr);
    if (!sn_ctx_dev(sn_ctx_of(context))->efa) {
        mine.odp_caps = odp_caps;
        mine.max_dm_size = SN_MAX_DM_BYTES;
    }
    memset(attr, 0, attr_size); /* the caller's structure may be longer or shorter than ours */
    memcpy(attr, &mine, attr_size < sizeof(mine) ? attr_size : sizeof(mine));
    return 0;
}

/* Find the width and speed codes whose product is nearest to the modelled rate, from below: programs compute bandwidth
 * from them. */
static void speed_code(uint64_t rate_bps, struct ibv_port_attr *attr)
{
    static const struct {
        unsigned gbps;
        uint8_t width, speed;
    } codes[] = {{5, 1, 2},   {10, 1, 4},   {14, 1, 16},  {25, 1, 32},   {40, 2, 4},   {50, 1, 64},
                 {56, 2, 16}, {100, 2, 32}, {200, 2, 64}, {400, 2, 128}, {800, 4, 128}};
    uint64_t gbps = rate_bps ? rate_bps / 1000000000 : GBPS_WITHOUT_MODEL;

    attr->active_width = 1;
    attr->active_speed = 1;
    for (unsigned i = 0; i < sizeof(codes) / sizeof(codes[0]); i++) {
        if (codes[i].gbps > gbps)
            break;
        attr->active_width = codes[i].width;
        attr->active_speed = codes[i].speed;
    }
}

int sn_port_query(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr, size_t attr_len)
{
    const struct sn_dev *dev = sn_ctx_dev(sn_ctx_of(context));
    bool up = __atomic_load_n(&dev->port_up, __ATOMIC_ACQUIRE);
    struct ibv_port_attr mine = {.state = up ? IBV_PORT_ACTIVE : IBV_PORT_DOWN,
                                 .max_mtu = IBV_MTU_4096,
                                 .active_mtu = IBV_MTU_4096,
                                 .gid_tbl_len = SN_MAX_GIDS,
                                 .port_cap_flags = IBV_PORT_CM_SUP | IBV_PORT_IP_BASED_GIDS,
                                 .max_msg_sz = 1u << 31,
                                 .pkey_tbl_len = 1,
                                 .lid = (uint16_t)dev->lid,
                                 .max_vl_num = 1,
                                 .phys_state = up ? 5 : 3,
                                 .link_layer = IBV_LINK_LAYER_ETHERNET};

    if (port != 1)
        return EINVAL;
    if (dev->efa) {
        mine.link_layer = IBV_LINK_LAYER_UNSPECIFIED;
        mine.gid_tbl_len = (int)sn_gid_count(dev);
        mine.max_msg_sz = SN_SRD_MAX_SEND;
        mine.lid = 0;
        mine.port_cap_flags = 0;
    }
    speed_code(__atomic_load_n(&dev->rate_bps, __ATOMIC_RELAXED), &mine);
    /* The caller's structure may be longer (newer headers) or shorter (the old symbol) than ours. */
    memset(attr, 0, attr_len);
    memcpy(attr, &mine, attr_len < sizeof(mine) ? attr_len : sizeof(mine));
    return 0;
}

#undef ibv_query_port
/* The old symbol: its callers' structure ends with flags. */
int ibv_query_port(struct ibv_context *context, uint8_t port, struct _compat_ibv_port_attr *attr)
{
    return sn_port_query(context, port, (struct ibv_port_attr *)attr, offsetof(struct ibv_port_attr, port_cap_flags2));
}

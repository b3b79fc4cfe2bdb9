/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "test/support/fake_verbs.h"
#include "transport/nic/verbs/verbs.h"

struct fake_verbs fake_verbs;

static int count_receives(struct ibv_qp *to, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    for (; wr; wr = wr->next, fake_verbs.posted_receives++)
        fake_verbs.receive_pieces += (uint32_t)wr->num_sge;
    return 0;
}

static int count_sends(struct ibv_qp *to, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
    fake_verbs.send_calls++;
    for (; wr; wr = wr->next)
        fake_verbs.send_ids[fake_verbs.sends++ % 256] = wr->wr_id;
    return 0;
}

static int bring(struct ibv_cq *from, int most, struct ibv_wc *wc)
{
    int count = 0;

    while (count < most && fake_verbs.queued_taken < fake_verbs.queued_count)
        wc[count++] = fake_verbs.queued[fake_verbs.queued_taken++];
    return count;
}

static struct ibv_cq *make_cq(struct ibv_context *on, int cqe, void *user, struct ibv_comp_channel *channel, int vector)
{
    fake_verbs.cq.context = on;
    fake_verbs.cq.cq_context = user;
    return &fake_verbs.cq;
}

static int resize_cq(struct ibv_cq *which, int cqe)
{
    return 0;
}

static int drop_cq(struct ibv_cq *which)
{
    return 0;
}

static struct ibv_qp *make_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
    if (attr->cap.max_inline_data > fake_verbs.max_inline) {
        errno = EINVAL;
        return NULL;
    }
    fake_verbs.asked_receives = attr->cap.max_recv_wr;
    fake_verbs.qp.qp_base.context = &fake_verbs.extended.context;
    return &fake_verbs.qp.qp_base;
}

static int change_qp(struct ibv_qp *which, struct ibv_qp_attr *attr, int mask)
{
    if (attr->qp_state == IBV_QPS_INIT)
        fake_verbs.init = *attr;
    if (attr->qp_state == IBV_QPS_RTR) {
        fake_verbs.rtr = *attr;
        fake_verbs.ece.options &= fake_verbs.asked_ece.options;
    }
    if (attr->qp_state == IBV_QPS_RTS)
        fake_verbs.rts = *attr;
    return 0;
}

static int drop_qp(struct ibv_qp *which)
{
    return 0;
}

static int query_ece(struct ibv_qp *which, struct ibv_ece *ece)
{
    *ece = fake_verbs.ece;
    return 0;
}

static int set_ece(struct ibv_qp *which, struct ibv_ece *ece)
{
    fake_verbs.asked_ece = *ece;
    return 0;
}

static struct ibv_qp_ex *to_ex(struct ibv_qp *which)
{
    return &fake_verbs.qp;
}

static struct ibv_ah *make_ah(struct ibv_pd *pd, struct ibv_ah_attr *attr)
{
    return &fake_verbs.ah;
}

static int drop_ah(struct ibv_ah *which)
{
    return 0;
}

static const char *name_status(enum ibv_wc_status status)
{
    return "a status";
}

/* ---- the device ---- */

static struct ibv_context *open_device(struct ibv_device *device)
{
    struct ibv_context *context = &fake_verbs.extended.context;

    context->device = device;
    context->async_fd = eventfd(0, EFD_CLOEXEC);
    return context;
}

static int close_device(struct ibv_context *context)
{
    close(context->async_fd);
    return 0;
}

static const char *name_device(struct ibv_device *device)
{
    return device->name;
}

static int query_device(struct ibv_context *context, struct ibv_device_attr *attr)
{
    *attr = fake_verbs.attr;
    return 0;
}

/* Fills what fits, as libibverbs does. The last field is active_speed_ex, which the headers may lack or have. */
static int query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr, size_t bytes)
{
    enum {
        OLD_BYTES = offsetof(struct ibv_port_attr, port_cap_flags2) + sizeof(uint16_t),
        SPEED_AT = (OLD_BYTES + 3) / 4 * 4
    };
    uint8_t known[SPEED_AT + sizeof(fake_verbs.speed_ex)] = {0};

    memcpy(known, &fake_verbs.port, OLD_BYTES);
    memcpy(known + SPEED_AT, &fake_verbs.speed_ex, sizeof(fake_verbs.speed_ex));
    memcpy(attr, known, bytes < sizeof(known) ? bytes : sizeof(known));
    return 0;
}

static int query_port_speed(struct ibv_context *context, uint32_t port, uint64_t *hundreds_of_mbps)
{
    *hundreds_of_mbps = fake_verbs.port_speed;
    return fake_verbs.port_speed ? 0 : EOPNOTSUPP;
}

static int query_gid(struct ibv_context *context, uint32_t port, uint32_t index, struct ibv_gid_entry *entry,
                     uint32_t flags, size_t bytes)
{
    *entry = fake_verbs.gid[index];
    return index < FAKE_GIDS && entry->gid.raw[0] ? 0 : ENODATA;
}

/* Of fake_verbs.event: the thread of a device takes it. */
static pthread_mutex_t event_lock = PTHREAD_MUTEX_INITIALIZER;

static int take_event(struct ibv_context *context, struct ibv_async_event *event)
{
    uint64_t count;

    if (read(context->async_fd, &count, sizeof(count)) != sizeof(count))
        return -1;
    pthread_mutex_lock(&event_lock);
    *event = fake_verbs.event;
    pthread_mutex_unlock(&event_lock);
    return 0;
}

static void acknowledge(struct ibv_async_event *event)
{
}

static const char *name_event(enum ibv_event_type type)
{
    return "an event";
}

static struct ibv_pd *make_pd(struct ibv_context *context)
{
    fake_verbs.pd.context = context;
    return &fake_verbs.pd;
}

static int drop_pd(struct ibv_pd *pd)
{
    return 0;
}

static struct ibv_mr *make_mr(struct ibv_pd *pd, void *addr, size_t bytes, int access)
{
    errno = fake_verbs.registration_error;
    if (errno)
        return NULL;
    fake_verbs.access = access;
    fake_verbs.registrations++;
    return &fake_verbs.mr;
}

static int drop_mr(struct ibv_mr *mr)
{
    fake_verbs.registrations--;
    return 0;
}

void fake_verbs_install(void)
{
    fake_verbs.device = (struct ibv_device){.name = "fake0", .transport_type = IBV_TRANSPORT_IB};
    fake_verbs.attr = (struct ibv_device_attr){
        .phys_port_cnt = 1, .max_qp = 1024, .max_qp_wr = 1024, .atomic_cap = IBV_ATOMIC_HCA, .sys_image_guid = 1};
    fake_verbs.max_inline = 64;
    fake_verbs.mr = (struct ibv_mr){.lkey = 5, .rkey = 6};
    fake_verbs.extended.sz = sizeof(fake_verbs.extended);
    fake_verbs.extended.query_port = query_port;
    fake_verbs.extended.context.abi_compat = __VERBS_ABI_IS_EXTENDED;
    fake_verbs.port = (struct ibv_port_attr){.state = IBV_PORT_ACTIVE,
                                             .active_mtu = IBV_MTU_4096,
                                             .gid_tbl_len = FAKE_GIDS,
                                             .lid = 7,
                                             .active_width = 2,
                                             .active_speed = 128,
                                             .link_layer = IBV_LINK_LAYER_INFINIBAND};
    memset(fake_verbs.gid, 0, sizeof(fake_verbs.gid));
    fake_verbs.gid[0] = (struct ibv_gid_entry){.gid.raw = {0xfe, 0x80, [15] = 1}};
    prs_verbs.open_device = open_device;
    prs_verbs.close_device = close_device;
    prs_verbs.get_device_name = name_device;
    prs_verbs.query_device = query_device;
    prs_verbs.query_port_speed = query_port_speed;
    prs_verbs.query_gid_ex = query_gid;
    prs_verbs.get_async_event = take_event;
    prs_verbs.ack_async_event = acknowledge;
    prs_verbs.event_type_str = name_event;
    prs_verbs.alloc_pd = make_pd;
    prs_verbs.dealloc_pd = drop_pd;
    prs_verbs.reg_mr = make_mr;
    prs_verbs.dereg_mr = drop_mr;
    fake_verbs.extended.context.ops.post_recv = count_receives;
    fake_verbs.extended.context.ops.poll_cq = bring;
    fake_verbs.extended.context.ops.post_send = count_sends;
    prs_verbs.create_cq = make_cq;
    prs_verbs.resize_cq = resize_cq;
    prs_verbs.destroy_cq = drop_cq;
    prs_verbs.create_qp = make_qp;
    prs_verbs.modify_qp = change_qp;
    prs_verbs.destroy_qp = drop_qp;
    prs_verbs.query_ece = query_ece;
    prs_verbs.set_ece = set_ece;
    prs_verbs.qp_to_qp_ex = to_ex;
    prs_verbs.create_ah = make_ah;
    prs_verbs.destroy_ah = drop_ah;
    prs_verbs.wc_status_str = name_status;
}

void fake_verbs_complete(struct ibv_wc wc)
{
    if (fake_verbs.queued_count == sizeof(fake_verbs.queued) / sizeof(*fake_verbs.queued))
        abort();
    fake_verbs.queued[fake_verbs.queued_count++] = wc;
}

void fake_verbs_report(struct ibv_async_event event)
{
    uint64_t one = 1;

    pthread_mutex_lock(&event_lock);
    fake_verbs.event = event;
    pthread_mutex_unlock(&event_lock);
    if (write(fake_verbs.extended.context.async_fd, &one, sizeof(one)) != sizeof(one))
        abort();
}

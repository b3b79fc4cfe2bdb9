/* SPDX-License-Identifier: Apache-2.0 */
/* Reliable connected queues: the NIC keeps the order. */
#include "transport/nic/verbs/rc.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "transport/nic/verbs/device.h"
#include "transport/nic/verbs/gid.h"
#include "transport/nic/verbs/verbs_nic.h"
#include "transport/util/error.h"
#include "transport/util/log.h"

enum {
    /* 0.08 ms: a running receiver replenishes its queue in that time. With 0.64 ms, a sender of counted puts that is
     * faster than its receiver would transfer only a quarter of the time. */
    MIN_RNR_TIMER = 6,
    RNR_FOREVER = 7, /* a slow receiver is not an error */
};

/* ---- queues ---- */

static void prepare_flags(struct rc_queue *queue)
{
    queue->wr_id_high = (uint64_t)queue->name << 32;
    for (unsigned i = 0; i < 8; i++)
        queue->ibv_flags[i] =
            (uint8_t)((i & PRS_WR_SIGNALED ? IBV_SEND_SIGNALED : 0u) | (i & PRS_WR_FENCE ? IBV_SEND_FENCE : 0u) |
                      (i & PRS_WR_INLINE && queue->base.takes_inline ? IBV_SEND_INLINE : 0u));
}

/* A driver that knows which kinds of requests will be posted makes the send ring only as large as these need; for mlx5
 * that is a quarter of what all kinds need. Posting is the same. Drivers without this call get the older one. */
static struct ibv_qp *create_sized(struct prs_verbs_device *device, struct ibv_qp_init_attr *attr)
{
    struct verbs_context *extended = verbs_get_ctx_op(device->context, create_qp_ex);
    struct ibv_qp_init_attr_ex ex = {
        .send_cq = attr->send_cq,
        .recv_cq = attr->recv_cq,
        .cap = attr->cap,
        .qp_type = attr->qp_type,
        .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
        .pd = device->pd,
        .send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ |
                          IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD,
    };
    struct ibv_qp *qp = extended ? extended->create_qp_ex(device->context, &ex) : NULL;

    if (!qp)
        return prs_verbs.create_qp(device->pd, attr);
    attr->cap = ex.cap;
    return qp;
}

static int create_qp(struct rc_link *link, struct rc_queue *queue, uint32_t depth, uint32_t receive_depth)
{
    struct prs_verbs_device *device = prs_verbs_device(link->base.rail->domain);
    struct ibv_qp_init_attr attr = {
        .send_cq = link->cq->cq,
        .recv_cq = link->cq->cq,
        .cap = {.max_send_wr = depth,
                .max_recv_wr = receive_depth,
                .max_send_sge = 1,
                .max_recv_sge = 1,
                .max_inline_data = PRS_INLINE_BYTES},
        .qp_type = IBV_QPT_RC,
    };

    /* All queues of a link must be like the first: its inline limit decided whether inline payloads are registered. */
    if (link->base.queue_count && !link->base.queue[0]->takes_inline)
        attr.cap.max_inline_data = 0;
    queue->qp = create_sized(device, &attr);
    if (!queue->qp && !link->base.queue_count) { /* some devices have no inline data at all */
        attr.cap.max_inline_data = 0;
        errno = 0;
        queue->qp = create_sized(device, &attr);
    }
    if (queue->qp)
        queue->base.number = queue->qp->qp_num;
    queue->base.takes_inline = attr.cap.max_inline_data >= PRS_INLINE_BYTES;
    return queue->qp
               ? 0
               : prs_nic_fail(link->base.rail, errno, "cannot create a queue pair; out of queues or locked memory?");
}

static int to_init(struct rc_link *link, struct rc_queue *queue)
{
    struct ibv_qp_attr attr = {
        .qp_state = IBV_QPS_INIT,
        .pkey_index = (uint16_t)link->config->pkey_index,
        .port_num = link->base.rail->port,
        .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
                           (link->base.rail->domain->adds ? IBV_ACCESS_REMOTE_ATOMIC : 0),
    };
    int r = prs_verbs.modify_qp(queue->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);

    return r ? prs_nic_fail(link->base.rail, r, "queue pair to INIT; is NCCL_IB_PKEY right?") : 0;
}

/* Destroying a queue pair returns only when the NIC no longer uses the memory of its requests. */
static void destroy_qp(struct rc_queue *queue)
{
    int r = queue->qp ? prs_verbs.destroy_qp(queue->qp) : 0;

    if (r)
        PRS_WARN("%s: cannot destroy queue pair %u: %s", queue->base.link->rail->info.name, queue->base.number,
                 strerror(r));
    queue->qp = NULL;
}

/* NULL is allowed: a loopback queue that was never used. */
static void queue_close(struct prs_queue *base)
{
    struct rc_queue *queue = to_rc_queue(base);
    struct prs_cqs *cqs;

    if (!queue)
        return;
    cqs = to_rc_link(base->link)->cqs;
    prs_cqs_silence(cqs, queue->name);
    destroy_qp(queue);
    prs_cqs_unname(cqs, queue->name);
    prs_lines_free(queue);
}

static int queue_open(struct prs_link *base, uint32_t id, uint32_t depth, const struct prs_receive_sizes *sizes,
                      struct prs_queue **out)
{
    struct rc_link *link = to_rc_link(base);
    struct rc_queue *queue = prs_lines_calloc(sizeof(*queue));
    int r;

    if (!queue)
        return prs_nic_fail(base->rail, ENOMEM, "queue");
    queue->base = (struct prs_queue){.link = base, .id = id};
    r = prs_cqs_name(link->cqs, &queue->base, &queue->name);
    if (r) {
        prs_lines_free(queue);
        return r;
    }
    r = create_qp(link, queue, depth, sizes->depth);
    if (!r)
        r = to_init(link, queue);
    if (!r && getrandom(&queue->start, sizeof(queue->start), 0) != sizeof(queue->start))
        r = prs_nic_fail(base->rail, errno, "getrandom");
    queue->start &= 0xffffff;
    if (!r)
        prepare_flags(queue);
    if (!r)
        r = prs_receives_open(&queue->receives, &queue->base, queue->qp, queue->name, sizes, NULL);
    if (r) {
        queue_close(&queue->base);
        return r;
    }
    *out = &queue->base;
    return 0;
}

static void rc_close(struct prs_link *base)
{
    struct rc_link *link = to_rc_link(base);

    for (uint32_t i = 0; i < base->queue_count; i++)
        queue_close(base->queue[i]);
    queue_close(base->loopback);
    if (link->cq)
        prs_cqs_release(link->cqs, link->cq, link->cq_entries);
    prs_cqs_drop(link->cqs);
    free(base->queue);
    prs_lines_free(link);
}

static int open_cq(struct rc_link *link, const struct prs_link_options *options)
{
    uint32_t entries = options->queues * (options->depth + link->receives.depth) + options->loopback_depth;
    int r;

    link->cqs = options->shared ? prs_cqs_of(options->shared) : NULL;
    if (link->cqs)
        prs_cqs_hold(link->cqs);
    r = link->cqs ? 0 : prs_cqs_open(options->rail, false, &link->cqs);
    if (!r)
        r = prs_cqs_reserve(link->cqs, entries, &link->cq);
    if (r)
        return r;
    link->cq_entries = entries;
    link->own_cq = options->shared ? NULL : link->cq->cq;
    link->queues = link->cqs->queue;
    link->base.cqs = options->shared;
    link->base.overrun = &link->cq->overrun;
    return 0;
}

static int open_queues(struct prs_link *base, const struct prs_link_options *options)
{
    base->queue = calloc(options->queues, sizeof(*base->queue));
    if (!base->queue)
        return prs_nic_fail(base->rail, ENOMEM, "link");
    for (; base->queue_count < options->queues; base->queue_count++) {
        int r = queue_open(base, options->ids[base->queue_count], options->depth, &to_rc_link(base)->receives,
                           &base->queue[base->queue_count]);

        if (r)
            return r;
    }
    return 0;
}

static int rc_open(const struct prs_link_options *options, struct prs_link **out)
{
    struct rc_link *link = prs_lines_calloc(sizeof(*link));
    int r;

    if (!link)
        return prs_nic_fail(options->rail, ENOMEM, "link");
    link->base = (struct prs_link){.ops = &prs_nic_rc, .rail = options->rail, .own = *options->own};
    link->config = options->config;
    link->traffic_class = options->traffic_class;
    link->service_level = options->service_level;
    link->loopback_depth = options->loopback_depth;
    link->receives = prs_receives_sizes(options->receive_depth);
    r = open_cq(link, options);
    if (!r)
        r = open_queues(&link->base, options);
    if (r) {
        rc_close(&link->base);
        return r;
    }
    *out = &link->base;
    return 0;
}

static const struct prs_config *config_of(const struct prs_queue *base)
{
    return to_rc_link(base->link)->config;
}

static void rc_address(const struct prs_queue *base, struct prs_nic_address *out)
{
    const struct rc_queue *queue = (const struct rc_queue *)base;
    struct prs_verbs_queue address = {.number = base->number, .start = queue->start};
    struct ibv_ece ece = {0};

    /* The library or the device may have no ECE. */
    if (config_of(base)->ece && prs_verbs.query_ece && prs_verbs.set_ece && !prs_verbs.query_ece(queue->qp, &ece)) {
        address.ece.vendor = ece.vendor_id;
        address.ece.options = ece.options;
        address.ece.mask = ece.comp_mask;
    }
    prs_verbs_tell_queue(&address, out);
}

/* ---- connect ---- */

/* Within a subnet of InfiniBand the LID is enough, unless the port wants more. Between subnets, packets go to a router,
 * by the LID under which it knows the remote port. */
static struct ibv_ah_attr address_vector(const struct rc_link *link, const struct prs_verbs_port *remote)
{
    const struct prs_verbs_own_port own = prs_verbs_own_port(&link->base.own);
    bool is_roce = link->base.rail->info.is_roce, near = !is_roce && prs_gid_same_subnet(own.port.gid, remote->gid);
    uint16_t flid = prs_gid_flid(remote->gid);
    struct ibv_ah_attr ah = {.dlid = remote->lid,
                             .sl = (uint8_t)link->service_level,
                             .port_num = link->base.rail->port,
                             .is_global = !near || own.grh_required};

    if (!ah.is_global)
        return ah;
    if (!near && !is_roce && flid)
        ah.dlid = flid;
    memcpy(ah.grh.dgid.raw, remote->gid, sizeof(remote->gid));
    ah.grh.sgid_index = (uint8_t)own.gid_index;
    ah.grh.hop_limit = 255;
    ah.grh.traffic_class = (uint8_t)link->traffic_class;
    return ah;
}

static int to_ready_to_receive(struct rc_link *link, struct rc_queue *queue, const struct prs_verbs_queue *address,
                               const struct prs_verbs_port *remote)
{
    uint8_t mtu = prs_verbs_own_port(&link->base.own).port.mtu;
    struct ibv_qp_attr attr = {
        .qp_state = IBV_QPS_RTR,
        .path_mtu = (enum ibv_mtu)(mtu < remote->mtu ? mtu : remote->mtu),
        .dest_qp_num = address->number,
        .rq_psn = address->start & 0xffffff,
        .max_dest_rd_atomic = prs_verbs_reads(prs_verbs_device(link->base.rail->domain)),
        .min_rnr_timer = MIN_RNR_TIMER,
        .ah_attr = address_vector(link, remote),
    };

    return prs_verbs.modify_qp(queue->qp, &attr,
                               IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                   IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
}

static int to_ready_to_send(struct rc_link *link, struct rc_queue *queue, const struct prs_verbs_port *remote)
{
    int most = prs_verbs_device(link->base.rail->domain)->attr.max_qp_init_rd_atom;
    uint8_t own = prs_verbs_limit_reads(most);
    struct ibv_qp_attr attr = {
        .qp_state = IBV_QPS_RTS,
        .timeout = (uint8_t)link->config->timeout,
        .retry_cnt = (uint8_t)link->config->retry_count,
        .rnr_retry = RNR_FOREVER,
        .sq_psn = queue->start,
        .max_rd_atomic = own < remote->reads ? own : remote->reads,
    };

    return prs_verbs.modify_qp(queue->qp, &attr,
                               IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                                   IBV_QP_MAX_QP_RD_ATOMIC);
}

/* Take over what the other side's NIC can do; the driver drops what this one cannot. */
static void negotiate(struct rc_queue *queue, const struct prs_verbs_queue *address)
{
    struct ibv_ece ece = {
        .vendor_id = address->ece.vendor, .options = address->ece.options, .comp_mask = address->ece.mask};
    int r;

    if (!ece.vendor_id || !config_of(&queue->base)->ece || !prs_verbs.query_ece || !prs_verbs.set_ece)
        return;
    r = prs_verbs.set_ece(queue->qp, &ece);
    if (r)
        PRS_INFO("%s: no enhanced connection establishment with this peer: %s", queue->base.link->rail->info.name,
                 strerror(r > 0 ? r : -r));
}

static int rc_connect(struct prs_queue *base, const struct prs_nic_address *told, const struct prs_nic_address *port,
                      int *error)
{
    struct rc_link *link = to_rc_link(base->link);
    struct rc_queue *queue = to_rc_queue(base);
    struct prs_verbs_queue address;
    struct prs_verbs_port remote;
    int r;

    if (queue->connected)
        return 0;
    r = prs_verbs_read_queue(told, &address);
    if (!r)
        r = prs_verbs_read_port(port, &remote);
    if (r)
        return r;
    negotiate(queue, &address);
    r = to_ready_to_receive(link, queue, &address, &remote);
    if (r == ETIMEDOUT || r == EHOSTUNREACH || r == ENETUNREACH) {
        *error = r; /* no ARP reply yet, or an unstable link */
        return PRS_AGAIN;
    }
    if (r)
        return prs_nic_fail(link->base.rail, r, "queue pair to RTR; is the remote GID in the same network?");
    r = to_ready_to_send(link, queue, &remote);
    if (r)
        return prs_nic_fail(link->base.rail, r, "queue pair to RTS");
    queue->connected = true;
    return 0;
}

static int rc_loopback(struct prs_link *base, uint32_t id, struct prs_queue **out)
{
    const struct prs_receive_sizes none = prs_receives_sizes(0);
    struct prs_nic_address address;
    int error, r;

    if (!base->loopback) {
        r = queue_open(base, id, to_rc_link(base)->loopback_depth, &none, &base->loopback);
        if (r)
            return r;
    }
    rc_address(base->loopback, &address);
    r = rc_connect(base->loopback, &address, &base->own.told, &error);
    if (r > 0)
        r = prs_nic_fail(base->rail, error, "cannot connect a queue to itself");
    *out = base->loopback;
    return r;
}

/* ---- the end of a connection ---- */

/* A dead device or a failed command of its firmware may refuse it. EINVAL: the queue is in that state already. */
static void kill_queue(struct prs_queue *base)
{
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_ERR};
    struct rc_queue *queue = to_rc_queue(base);
    int r = queue->qp ? prs_verbs.modify_qp(queue->qp, &attr, IBV_QP_STATE) : 0; /* none: the link has ended */

    if (!r || r == EINVAL)
        return;
    PRS_WARN("%s:%d: queue %u cannot be moved to the error state: %s", base->link->rail->info.name,
             base->link->rail->port, base->number, strerror(r));
    base->link->unflushed = true;
}

static void rc_stop(struct prs_link *link)
{
    link->stopped = true; /* first: only what was posted before the change of state is sure to complete */
    for (uint32_t i = 0; i < link->queue_count; i++)
        kill_queue(link->queue[i]);
}

static void rc_end(struct prs_link *base)
{
    for (uint32_t i = 0; i < base->queue_count; i++)
        destroy_qp(to_rc_queue(base->queue[i]));
    if (base->loopback)
        destroy_qp(to_rc_queue(base->loopback));
    to_rc_link(base)->own_cq = NULL; /* some drivers leave the completions of a destroyed queue pair there */
}

static void rc_kill(struct prs_link *link)
{
    rc_stop(link);
    if (link->loopback)
        kill_queue(link->loopback);
    if (link->unflushed) /* the memory of its requests may be used again after this */
        rc_end(link);
}

static uint32_t rc_taken(const struct prs_queue *queue)
{
    return prs_receives_taken(&((const struct rc_queue *)queue)->receives);
}

static bool rc_drained(const struct prs_link *link)
{
    for (uint32_t i = 0; i < link->queue_count; i++)
        if (!prs_receives_drained(&((const struct rc_queue *)link->queue[i])->receives))
            return false;
    return true;
}

struct ibv_qp *prs_rc_queue_pair(struct prs_queue *queue)
{
    return to_rc_queue(queue)->qp;
}

static int rc_open_cqs(const struct prs_rail *rail, struct prs_shared_cqs **out)
{
    struct prs_cqs *cqs;
    int r = prs_cqs_open(rail, true, &cqs);

    if (!r)
        *out = &cqs->base;
    return r;
}

static void rc_drop_cqs(struct prs_shared_cqs *cqs)
{
    prs_cqs_drop(prs_cqs_of(cqs));
}

static int rc_adopt(struct prs_shared_cqs *cqs, struct prs_link *link, void *user)
{
    return prs_cqs_adopt(prs_cqs_of(cqs), link, user);
}

const struct prs_nic_ops prs_nic_rc = {
    .name = "rc",
    .chip_guids = true,
    .in_order = true,
    .fails_over = true,
    .fence = true,
    .adds = true,
    .shares_cqs = true,
    PRS_VERBS_DEVICE_OPS,
    .open = rc_open,
    .close = rc_close,
    .stop = rc_stop,
    .kill = rc_kill,
    .address = rc_address,
    .connect = rc_connect,
    .loopback = rc_loopback,
    .post = prs_rc_post,
    .taken = rc_taken,
    .drained = rc_drained,
    .end = rc_end,
    .poll = prs_rc_poll,
    .open_cqs = rc_open_cqs,
    .drop_cqs = rc_drop_cqs,
    .adopt = rc_adopt,
    .poll_shared = prs_rc_poll_shared,
};

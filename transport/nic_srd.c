/* SPDX-License-Identifier: Apache-2.0 */
/* AWS EFA's scalable reliable datagrams (SRD). Every byte arrives once, but nothing keeps order: neither the requests
 * of one queue nor their completions. Here each queue still talks to one other queue only, so arrivals need not name
 * their source. The layers above learn what EFA lacks from the properties of prs_nic_srd: no order, no fence, no
 * atomics, and no inline payload. */
#include <arpa/inet.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "transport/nic.h"
#include "transport/efa.h"
#include "transport/reorder.h"
#include "transport/receives.h"
#include "transport/util/compiler.h"
#include "transport/util/error.h"
#include "transport/util/log.h"

enum {
    RNR_FOREVER = 7, /* a slow receiver is not an error */
    LOOPBACK = 63,   /* bit of the loopback queue in srd_link.unreported, above those of all data queues */
};
static_assert((int)PRS_ORDER_MAX_QUEUES_PER_RAIL <= (int)LOOPBACK, "each queue of a link has its own bit");

struct srd_queue {
    struct prs_queue base;
    struct ibv_qp_ex *ex; /* base.qp, for posting */
    struct ibv_ah *ah;    /* of the rail that it sends to; the link owns it */
    uint32_t remote_number, remote_key;
    uint32_t key; /* that a sender to this queue must show */
    uint32_t bit; /* in srd_link.unreported */
    uint64_t wr_id_high;
    struct prs_reorder reorder;
    struct prs_receives receives;
};

struct srd_link {
    struct prs_link base;
    uint32_t loopback_depth;
    struct prs_receive_sizes receives;
    uint16_t pkey_index;
    int traffic_class;
    struct ibv_ah *ah, *own_ah; /* of the peer's rail, made when the first queue connects; of our own rail */
    /* Memory that receives and writes of zero bytes name. Writes with immediate deliver no data into it, but EFA's
     * driver posts nothing for a receive without memory. */
    struct ibv_sge dummy_sge;
    uint64_t unreported; /* bits of queues that may have completions to report */
    struct ibv_wc wc[PRS_POLL_MOST];
};

static struct srd_link *to_srd_link(struct prs_link *link)
{
    return (struct srd_link *)link; /* base is its first member */
}

static struct srd_queue *to_srd_queue(struct prs_queue *queue)
{
    return (struct srd_queue *)queue;
}

/* ---- queues ---- */

static int create_qp(struct srd_link *link, struct srd_queue *queue, uint32_t depth, uint32_t receive_depth)
{
    const struct prs_domain *domain = link->base.rail->domain;
    struct ibv_qp_init_attr_ex attr = {
        .send_cq = link->base.cq,
        .recv_cq = link->base.cq,
        .cap = {.max_send_wr = depth,
                .max_recv_wr = receive_depth ? receive_depth : 1,
                .max_send_sge = 1,
                .max_recv_sge = 1},
        .sq_sig_all = 1, /* EFA completes every request anyway */
        .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
        .pd = domain->pd,
        .send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ,
    };

    errno = 0;
    queue->base.qp = prs_efa_create_srd(domain->context, &attr);
    if (!queue->base.qp)
        return prs_nic_fail(link->base.rail, errno,
                            "cannot create an SRD queue; out of queues (an EFA has 256, and each connection takes "
                            "one or two) or of locked memory?");
    queue->ex = prs_verbs.qp_to_qp_ex(queue->base.qp);
    return queue->ex ? 0 : prs_nic_fail(link->base.rail, ENOSYS, "an SRD queue does not support posting by ibv_wr");
}

/* Bring the queue to RTS at once: a datagram queue needs no remote address for that. */
static int start_qp(struct srd_link *link, struct srd_queue *queue)
{
    const struct prs_rail *rail = link->base.rail;
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT,
                               .pkey_index = link->pkey_index,
                               .port_num = rail->port,
                               .qkey = queue->key,
                               .rnr_retry = RNR_FOREVER};
    int rnr = rail->domain->rnr_retry ? IBV_QP_RNR_RETRY : 0, r;

    r = prs_verbs.modify_qp(queue->base.qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY);
    if (r)
        return prs_nic_fail(rail, r, "SRD queue to INIT; is NCCL_IB_PKEY right?");
    attr.qp_state = IBV_QPS_RTR;
    r = prs_verbs.modify_qp(queue->base.qp, &attr, IBV_QP_STATE);
    if (r)
        return prs_nic_fail(rail, r, "SRD queue to RTR");
    attr.qp_state = IBV_QPS_RTS;
    r = prs_verbs.modify_qp(queue->base.qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN | rnr);
    return r ? prs_nic_fail(rail, r, "SRD queue to RTS") : 0;
}

static void queue_close(struct prs_queue *base)
{
    struct srd_queue *queue = to_srd_queue(base);

    if (!queue)
        return;
    if (base->qp && prs_verbs.destroy_qp(base->qp))
        PRS_WARN("%s: cannot destroy SRD queue %u", base->link->rail->info.name, base->qp->qp_num);
    prs_reorder_fini(&queue->reorder);
    free(queue);
}

static int queue_open(struct prs_link *base, uint32_t id, uint32_t depth, const struct prs_receive_sizes *sizes,
                      struct prs_queue **out)
{
    struct srd_link *link = to_srd_link(base);
    struct srd_queue *queue = calloc(1, sizeof(*queue));
    int r;

    if (!queue)
        return prs_nic_fail(base->rail, ENOMEM, "queue");
    queue->base = (struct prs_queue){.link = base, .id = id};
    queue->bit = base->queue_count; /* position among the data queues; srd_loopback() sets LOOPBACK */
    queue->wr_id_high = (uint64_t)id << 32;
    r = prs_reorder_init(&queue->reorder, depth) ? prs_nic_fail(base->rail, ENOMEM, "queue") : 0;
    /* Random, so that requests meant for an earlier queue with this number are refused. */
    if (!r && getrandom(&queue->key, sizeof(queue->key), 0) != sizeof(queue->key))
        r = prs_nic_fail(base->rail, errno, "getrandom");
    queue->key &= 0x7fffffff; /* the upper half belongs to privileged users */
    if (!r)
        r = create_qp(link, queue, depth, sizes->depth);
    if (!r)
        r = start_qp(link, queue);
    if (!r)
        r = prs_receives_open(&queue->receives, &queue->base, sizes, &link->dummy_sge);
    if (r) {
        queue_close(&queue->base);
        return r;
    }
    *out = &queue->base;
    return 0;
}

static void destroy_ah(struct srd_link *link, struct ibv_ah *ah)
{
    if (ah && prs_verbs.destroy_ah(ah))
        PRS_WARN("%s: cannot destroy an address handle", link->base.rail->info.name);
}

static void srd_close(struct prs_link *base)
{
    struct srd_link *link = to_srd_link(base);

    prs_nic_close_link(base, queue_close);
    destroy_ah(link, link->ah); /* no queue uses them any more */
    destroy_ah(link, link->own_ah);
    free(link);
}

static int srd_open(const struct prs_link_options *options, struct prs_link **out)
{
    const struct prs_rail *rail = options->rail;
    struct srd_link *link = calloc(1, sizeof(*link));
    int r;

    if (!link)
        return prs_nic_fail(rail, ENOMEM, "link");
    link->base = (struct prs_link){.ops = &prs_nic_srd, .rail = rail, .own = *options->own};
    link->loopback_depth = options->loopback_depth;
    link->pkey_index = (uint16_t)options->config->pkey_index;
    link->traffic_class = options->traffic_class;
    link->receives = prs_receives_sizes(options->receive_depth);
    link->dummy_sge =
        (struct ibv_sge){(uintptr_t)rail->domain->scratch, PRS_DOMAIN_SCRATCH_BYTES, rail->domain->scratch_mr->lkey};
    r = prs_nic_open_link(&link->base, options, &link->receives, queue_open);
    if (r) {
        srd_close(&link->base);
        return r;
    }
    *out = &link->base;
    return 0;
}

static void srd_address(const struct prs_queue *base, struct prs_queue_address *out)
{
    *out = (struct prs_queue_address){.number = base->qp->qp_num, .start = ((const struct srd_queue *)base)->key};
}

static uint8_t srd_reads(const struct prs_rail *rail)
{
    (void)rail;
    return 1; /* EFA has no such limit */
}

/* ---- connect ---- */

/* Make the address handle of a rail. EFA rejects writes from peers that it has no address handle for, so both sides
 * make theirs before the handshake ends. */
static int make_ah(struct srd_link *link, const uint8_t gid[16], struct ibv_ah **out)
{
    const struct prs_rail *rail = link->base.rail;
    struct ibv_ah_attr attr = {.port_num = rail->port,
                               .is_global = 1,
                               .grh = {.sgid_index = (uint8_t)link->base.own.gid_index,
                                       .hop_limit = 255,
                                       .traffic_class = (uint8_t)link->traffic_class}};

    if (*out)
        return 0;
    memcpy(attr.grh.dgid.raw, gid, sizeof(attr.grh.dgid.raw));
    errno = 0;
    *out = prs_verbs.create_ah(rail->domain->pd, &attr);
    return *out ? 0 : errno ? -errno : -EIO;
}

static int srd_connect(struct prs_queue *base, const struct prs_queue_address *address,
                       const struct prs_link_remote *remote, int *error)
{
    struct srd_link *link = to_srd_link(base->link);
    struct srd_queue *queue = to_srd_queue(base);
    int r = make_ah(link, remote->gid, &link->ah);

    if (r == -ETIMEDOUT || r == -EHOSTUNREACH || r == -ENETUNREACH || r == -EAGAIN) {
        *error = -r;
        return PRS_AGAIN;
    }
    if (r)
        return prs_nic_fail(link->base.rail, -r,
                            "no address handle for the peer's GID; is it in the same subnet and security group?");
    queue->ah = link->ah;
    queue->remote_number = address->number;
    queue->remote_key = address->start;
    return 0;
}

static int srd_loopback(struct prs_link *base, uint32_t id, struct prs_queue **out)
{
    struct srd_link *link = to_srd_link(base);
    const struct prs_receive_sizes none = prs_receives_sizes(0);
    struct srd_queue *own;
    int r = make_ah(link, base->own.gid, &link->own_ah);

    if (r)
        return prs_nic_fail(base->rail, -r, "no address handle for our own GID");
    if (!base->loopback) {
        r = queue_open(base, id, link->loopback_depth, &none, &base->loopback);
        if (r)
            return r;
        base->by_id[id] = base->loopback;
    }
    own = to_srd_queue(base->loopback);
    own->bit = LOOPBACK;
    own->ah = link->own_ah;
    own->remote_number = base->loopback->qp->qp_num;
    own->remote_key = own->key;
    *out = base->loopback;
    return 0;
}

/* ---- data path ---- */

/* Return 0 or -EOPNOTSUPP: the layers above used a feature that prs_nic_srd does not offer. */
static int build_request(struct srd_queue *queue, const struct prs_wr *wr, uint32_t position)
{
    struct ibv_qp_ex *ex = queue->ex;
    const struct ibv_sge *dummy_sge = &to_srd_link(queue->base.link)->dummy_sge;

    ex->wr_id = queue->wr_id_high | position;
    ex->wr_flags = IBV_SEND_SIGNALED;
    if (wr->flags & PRS_WR_FENCE)
        return -EOPNOTSUPP;
    switch (wr->opcode) {
    case PRS_WR_WRITE:
        ibv_wr_rdma_write(ex, wr->remote_key, wr->remote_addr);
        break;
    case PRS_WR_WRITE_IMM:
        ibv_wr_rdma_write_imm(ex, wr->remote_key, wr->remote_addr, htonl(wr->imm));
        break;
    case PRS_WR_READ:
        ibv_wr_rdma_read(ex, wr->remote_key, wr->remote_addr);
        break;
    default:
        return -EOPNOTSUPP;
    }
    /* EFA checks the key even of zero bytes, so they name registered memory too. */
    if (wr->len_bytes)
        ibv_wr_set_sge(ex, wr->local_key, wr->local_addr, wr->len_bytes);
    else
        ibv_wr_set_sge(ex, dummy_sge->lkey, dummy_sge->addr, 0);
    ibv_wr_set_ud_addr(ex, queue->ah, queue->remote_number, queue->remote_key);
    return 0;
}

static int srd_post(struct prs_queue *base, const struct prs_wr *ring, uint32_t mask, uint32_t first, uint32_t count)
{
    struct srd_queue *queue = to_srd_queue(base);
    int r = 0;

    ibv_wr_start(queue->ex);
    for (uint32_t i = 0; !r && i < count; i++)
        r = build_request(queue, &ring[(first + i) & mask], first + i);
    if (r) {
        ibv_wr_abort(queue->ex);
        return r;
    }
    r = ibv_wr_complete(queue->ex);
    if (r)
        return r > 0 ? -r : r;
    for (uint32_t i = 0; i < count; i++)
        prs_reorder_post(&queue->reorder, ring[(first + i) & mask].flags & PRS_WR_SIGNALED);
    return 0;
}

/* Causes that EFA's driver reports by codes of its own choice. */
static void fill_error(const struct ibv_wc *wc, uint32_t queue, struct prs_event *out)
{
    prs_nic_error_event(wc, queue, out);
    switch (wc->status) {
    case IBV_WC_RESP_TIMEOUT_ERR:
        out->error = -ETIMEDOUT;
        out->cause = "the remote NIC is unresponsive or unreachable: the peer has died or closed, its link is down, or "
                     "its security group lets nothing through";
        break;
    case IBV_WC_REM_INV_RD_REQ_ERR:
        out->error = -ECONNRESET;
        out->cause = "the remote queue does not exist: the peer has died or closed";
        break;
    case IBV_WC_REM_OP_ERR:
        out->error = -ECONNRESET;
        out->cause = "the remote NIC does not know us: the peer holds no address handle of ours, or has closed";
        break;
    case IBV_WC_BAD_RESP_ERR:
        out->error = -EREMOTEIO;
        out->cause = "the remote NIC could not perform the request";
        break;
    case IBV_WC_LOC_QP_OP_ERR:
        out->cause = "the NIC refuses the operation or the address handle";
        break;
    case IBV_WC_LOC_LEN_ERR:
        out->cause = "longer than the NIC's largest transfer";
        break;
    default:
        break;
    }
}

static int fill_arrival(struct srd_link *link, struct srd_queue *queue, const struct ibv_wc *wc, struct prs_event *out)
{
    *out = (struct prs_event){
        .kind = PRS_EVENT_ARRIVAL, .queue = queue->base.id, .value = ntohl(wc->imm_data), .bytes = wc->byte_len};
    if (unlikely(wc->opcode != IBV_WC_RECV_RDMA_WITH_IMM))
        return -EPROTO;
    return prs_receives_consume(&queue->receives);
}

/* Report requests whose predecessors have all completed, up to the space left in events[]. Return the event count. */
static int report_completed(struct srd_link *link, struct prs_event *events, int count)
{
    while (link->unreported) {
        uint32_t bit = (uint32_t)__builtin_ctzll(link->unreported);
        struct srd_queue *queue = to_srd_queue(bit == LOOPBACK ? link->base.loopback : link->base.queue[bit]);
        uint32_t position;

        while (count < PRS_POLL_MOST && prs_reorder_next(&queue->reorder, &position))
            events[count++] = (struct prs_event){.kind = PRS_EVENT_DONE, .queue = queue->base.id, .value = position};
        if (count == PRS_POLL_MOST)
            break; /* the rest next time */
        link->unreported &= link->unreported - 1;
    }
    return count;
}

static PRS_OUTLINED int take_completions(struct srd_link *link, int taken, struct prs_event *events, int count)
{
    for (int i = 0; i < taken; i++) {
        const struct ibv_wc *wc = &link->wc[i];
        bool arrival = wc->wr_id & PRS_ARRIVAL_BIT;
        uint64_t id = arrival ? wc->wr_id : wc->wr_id >> 32;
        struct srd_queue *queue = to_srd_queue(link->base.by_id[id % PRS_ORDER_MAX_QUEUES]);
        int r = 0;

        if (unlikely(wc->status != IBV_WC_SUCCESS)) {
            fill_error(wc, queue->base.id, &events[count++]);
        } else if (arrival) {
            r = fill_arrival(link, queue, wc, &events[count++]);
        } else {
            r = prs_reorder_complete(&queue->reorder, (uint32_t)wc->wr_id);
            link->unreported |= 1ull << queue->bit;
        }
        if (r)
            return r;
    }
    return count;
}

static int srd_poll(struct prs_link *base, struct prs_event *events)
{
    struct srd_link *link = to_srd_link(base);
    int count = link->unreported ? report_completed(link, events, 0) : 0;
    int taken = count < PRS_POLL_MOST ? ibv_poll_cq(base->cq, PRS_POLL_MOST - count, link->wc) : 0;

    if (taken < 0)
        return -EIO;
    if (!taken)
        return count;
    count = take_completions(link, taken, events, count);
    return count < 0 ? count : report_completed(link, events, count);
}

const struct prs_nic_ops prs_nic_srd = {
    .name = "srd",
    .in_order = false,
    .fence = false,
    .adds = false,
    .open = srd_open,
    .close = srd_close,
    .address = srd_address,
    .reads = srd_reads,
    .connect = srd_connect,
    .loopback = srd_loopback,
    .post = srd_post,
    .poll = srd_poll,
};

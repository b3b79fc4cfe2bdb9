/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/nic/srd.h"

#include <stddef.h>

#include "tools/softnic/world/lock.h"

enum {
    /* Requests that may change places with each other, as many as a NIC has in flight. This limits the search; so many
     * requests to a target that does not answer hold up the others. */
    WINDOW = 64,
    PIECES = 4,
    PIECE_STEP = 8,         /* pieces begin at multiples of this, so that words stay whole */
    SCATTER_LEAST = 16,     /* bytes; shorter ones are written in one piece */
    PIECES_FROM = 64 << 10, /* bytes; shorter ones are cut in two */
    RNR_FOREVER = 7,        /* unless ibv_modify_qp says otherwise */
    RNR_TIMER = 12,         /* 0.64 ms; EFA has no such attribute */
    ACK_TIMEOUT = 12,       /* 17 ms for each loss; EFA has no such attributes, either */
    ACK_RETRIES = 7,
};

int sn_srd_caps_check(const struct ibv_qp_init_attr_ex *attr)
{
    const struct ibv_qp_cap *cap = &attr->cap;

    if (!attr->send_cq || !attr->recv_cq || !attr->pd)
        return EINVAL;
    if (attr->srq) {
        sn_log("create_qp: EFA has no shared receive queues");
        return EOPNOTSUPP;
    }
    if (cap->max_send_wr > SN_SRD_MAX_SQ_WR || cap->max_recv_wr > SN_SRD_MAX_RQ_WR ||
        cap->max_send_sge > SN_SRD_MAX_SQ_SGE || cap->max_recv_sge > SN_SRD_MAX_RQ_SGE ||
        cap->max_inline_data > SN_SRD_MAX_INLINE) {
        sn_log("create_qp: SRD: asks for %u/%u requests, %u/%u buffers, %u bytes inline; the limits of an EFA are "
               "%d/%d, %d/%d and %d",
               cap->max_send_wr, cap->max_recv_wr, cap->max_send_sge, cap->max_recv_sge, cap->max_inline_data,
               SN_SRD_MAX_SQ_WR, SN_SRD_MAX_RQ_WR, SN_SRD_MAX_SQ_SGE, SN_SRD_MAX_RQ_SGE, SN_SRD_MAX_INLINE);
        return EINVAL;
    }
    return 0;
}

/* EFA takes no access flags: what a memory region allows, every peer that knows the key may do. */
void sn_srd_defaults(struct sn_qp *qp)
{
    qp->shm->access = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
    qp->shm->min_rnr_timer = RNR_TIMER;
    qp->attr.rnr_retry = RNR_FOREVER;
    qp->attr.timeout = ACK_TIMEOUT;
    qp->attr.retry_cnt = ACK_RETRIES;
}

static const char *refusal(const struct sn_qp *qp, const struct sn_wqe *w)
{
    bool send = w->opcode == IBV_WR_SEND || w->opcode == IBV_WR_SEND_WITH_IMM;

    if (!(w->flags & IBV_SEND_SIGNALED))
        return "it is not signaled; EFA completes every request";
    if (w->flags & ~(uint32_t)(IBV_SEND_SIGNALED | IBV_SEND_INLINE))
        return "flags other than signaled and inline: EFA knows no fence and no solicited events";
    if (!w->dest_qpn)
        return "it has no target: ibv_wr_set_ud_addr";
    if (!send && (w->flags & IBV_SEND_INLINE))
        return "only sends can be inline";
    if (!send && w->num_sge > SN_SRD_MAX_RDMA_SGE)
        return "a read or write has one buffer";
    if (w->num_sge > qp->cap.max_send_sge)
        return "too many buffers";
    return NULL;
}

int sn_srd_check(const struct sn_qp *qp, struct sn_wqe *w)
{
    bool send = w->opcode == IBV_WR_SEND || w->opcode == IBV_WR_SEND_WITH_IMM;
    const char *why = refusal(qp, w);

    if (why) {
        sn_log("queue pair %u: SRD refuses a request, opcode %u, wr_id %llu: %s", qp->qpn, w->opcode,
               (unsigned long long)w->wr_id, why);
        return EINVAL;
    }
    if (w->length > (send ? SN_SRD_MAX_SEND : SN_SRD_MAX_RDMA)) {
        sn_log("queue pair %u: SRD: opcode %u, wr_id %llu: %llu bytes are more than %u", qp->qpn, w->opcode,
               (unsigned long long)w->wr_id, (unsigned long long)w->length, send ? SN_SRD_MAX_SEND : SN_SRD_MAX_RDMA);
        w->status = IBV_WC_LOC_LEN_ERR;
    }
    return 0;
}

/* Swap the entry that is due first to the front. Positions keep their meaning, so queues are freed and flushed as
 * usual. The poster only touches entries of positions from tail on, which are never swapped. */
static void bring_earliest(struct sn_qp *qp, uint32_t at, uint32_t end, size_t due_offset)
{
    uint32_t mask = qp->sq_size - 1, best = at;
    uint64_t least = UINT64_MAX;
    uint16_t turn;

    if (end - at > WINDOW)
        end = at + WINDOW;
    for (uint32_t i = at; i != end; i++) {
        uint64_t due = *(const uint64_t *)((const uint8_t *)sn_wqe_at(qp, i) + due_offset);

        if (due < least) {
            least = due;
            best = i;
        }
    }
    turn = qp->turn[at & mask];
    qp->turn[at & mask] = qp->turn[best & mask];
    qp->turn[best & mask] = turn;
}

void sn_srd_next_exec(struct sn_qp *qp, uint32_t at, uint32_t end)
{
    if (end - at > 1 && !sn_wqe_at(qp, at)->copying)
        bring_earliest(qp, at, end, offsetof(struct sn_wqe, due_exec));
}

void sn_srd_next_done(struct sn_qp *qp)
{
    if (qp->exec - qp->done > 1 && !sn_wqe_at(qp, qp->done)->copying)
        bring_earliest(qp, qp->done, qp->exec, offsetof(struct sn_wqe, due_done));
}

bool sn_srd_cables_up(const struct sn_qp *qp, const struct sn_wqe *w)
{
    const struct sn_world *world = sn_self->world;

    return w->dest_dev < world->dev_count && __atomic_load_n(&world->devs[qp->ctx->dev].port_up, __ATOMIC_RELAXED) &&
           __atomic_load_n(&world->devs[w->dest_dev].port_up, __ATOMIC_RELAXED);
}

/* Reproducible, as the model's draws are: from the seed, the queue pair and its position. */
static uint64_t draw(const struct sn_qp *qp, uint32_t purpose, uint64_t n)
{
    uint64_t x =
        (sn_self->world->config.seed * 64 + purpose) * 0x9e3779b97f4a7c15ull + ((uint64_t)qp->index << 32) + qp->exec;

    x = (x ^ x >> 29) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 32) * 0x94d049bb133111ebull;
    return (x ^ x >> 31) % n;
}

static bool all_host(const struct sn_span *span, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        if (span[i].kind != SN_MEM_HOST)
            return false;
    return true;
}

/* Cut both sides' lists at the same offsets and put the pieces together in another order. */
static uint32_t shuffle(struct sn_span *span, uint32_t count, const uint64_t *cut, const uint32_t *order,
                        uint32_t pieces)
{
    struct sn_span from[SN_MAX_SGE];
    uint32_t n = 0;

    for (uint32_t i = 0; i < count; i++)
        from[i] = span[i];
    for (uint32_t i = 0; i < pieces; i++)
        n += sn_spans_slice(span + n, from, count, cut[order[i]], cut[order[i] + 1] - cut[order[i]]);
    return n;
}

void sn_srd_scatter(const struct sn_qp *qp, struct sn_copy *c)
{
    uint32_t pieces = c->length < PIECES_FROM ? 2 : PIECES, order[PIECES];
    uint64_t cut[PIECES + 1], part = c->length / pieces / PIECE_STEP * PIECE_STEP;

    if (c->length <= SCATTER_LEAST || !all_host(c->dst, c->dst_count) || !all_host(c->src, c->src_count) ||
        c->dst_count + pieces > SN_MAX_SGE || c->src_count + pieces > SN_MAX_SGE)
        return;
    for (uint32_t i = 0; i < pieces; i++) {
        uint32_t with = (uint32_t)draw(qp, i, i + 1);

        cut[i] = i * part;
        order[i] = order[with];
        order[with] = i;
    }
    cut[pieces] = c->length;
    c->dst_count = shuffle(c->dst, c->dst_count, cut, order, pieces);
    c->src_count = shuffle(c->src, c->src_count, cut, order, pieces);
}

/* The status numbers of an EFA (enum efa_io_comp_status in rdma-core), which programs print. */
static uint32_t vendor_error(uint32_t status)
{
    static const uint8_t codes[] = {
        [IBV_WC_SUCCESS] = 0,          [IBV_WC_WR_FLUSH_ERR] = 1,       [IBV_WC_LOC_QP_OP_ERR] = 2,
        [IBV_WC_LOC_PROT_ERR] = 5,     [IBV_WC_LOC_LEN_ERR] = 6,        [IBV_WC_REM_ACCESS_ERR] = 7,
        [IBV_WC_REM_OP_ERR] = 8,       [IBV_WC_REM_INV_RD_REQ_ERR] = 9, [IBV_WC_RNR_RETRY_EXC_ERR] = 10,
        [IBV_WC_REM_INV_REQ_ERR] = 11, [IBV_WC_RESP_TIMEOUT_ERR] = 13};

    return status < sizeof(codes) ? codes[status] : 2;
}

/* EFA's driver reports writes as writes, and everything else, including reads, as sends. */
void sn_srd_cqe(const struct sn_wqe *w, struct sn_cqe *cqe)
{
    if (cqe->opcode != IBV_WC_RDMA_WRITE)
        cqe->opcode = IBV_WC_SEND;
    cqe->vendor_err = vendor_error(w->status);
}

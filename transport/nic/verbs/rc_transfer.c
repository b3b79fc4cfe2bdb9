/* SPDX-License-Identifier: Apache-2.0 */
/* Posting and completions of reliable connected queues: what each message passes through. */
#include "transport/nic/verbs/rc.h"

#include <arpa/inet.h>
#include <errno.h>

#include "transport/nic/verbs/memory.h"
#include "transport/nic/verbs/status.h"
#include "transport/util/compiler.h"

/* ---- posting and completions ---- */

static inline void fill_request(struct rc_queue *queue, struct ibv_send_wr *out, struct ibv_sge *sge,
                                const struct prs_wr *in, uint32_t position)
{
    static const uint8_t opcodes[] = {[PRS_WR_WRITE] = IBV_WR_RDMA_WRITE,
                                      [PRS_WR_WRITE_IMM] = IBV_WR_RDMA_WRITE_WITH_IMM,
                                      [PRS_WR_READ] = IBV_WR_RDMA_READ,
                                      [PRS_WR_ADD] = IBV_WR_ATOMIC_FETCH_AND_ADD};

    out->wr_id = queue->wr_id_high | position;
    out->next = out + 1; /* the last request's next becomes NULL below */
    out->sg_list = sge;
    out->num_sge = in->len_bytes != 0;
    out->opcode = opcodes[in->opcode];
    out->send_flags = queue->ibv_flags[in->flags];
    out->imm_data = htonl(in->imm);
    if (unlikely(in->opcode == PRS_WR_ADD)) {
        const struct prs_domain *domain = queue->base.link->rail->domain;

        sge->addr = (uintptr_t)domain->scratch.addr; /* receives the old value, which is not used */
        sge->lkey = prs_own_memory_local_key(&domain->scratch, 0);
        sge->length = in->len_bytes;
        out->wr.atomic.remote_addr = in->remote_addr;
        out->wr.atomic.rkey = (uint32_t)in->remote_key; /* checked, as below */
        out->wr.atomic.compare_add = in->value;
        return;
    }
    *sge = (struct ibv_sge){in->local_addr, in->len_bytes, in->local_key};
    out->wr.rdma.remote_addr = in->remote_addr;
    out->wr.rdma.rkey = (uint32_t)in->remote_key;
}

int prs_rc_post(struct prs_queue *base, const struct prs_wr *ring, uint32_t mask, uint32_t first, uint32_t count)
{
    /* On the stack, because the driver copies requests, and with many peers an array of each peer would not be in a
     * cache. */
    struct ibv_send_wr wr[PRS_RC_POST_MOST];
    struct ibv_sge sge[PRS_RC_POST_MOST];
    struct rc_queue *queue = to_rc_queue(base);
    uint32_t position = first;
    struct ibv_send_wr *bad;
    uint64_t keys = 0; /* the bits of all */
    int r;

    do { /* a chain has at least one request */
        uint32_t left = first + count - position, now = left < PRS_RC_POST_MOST ? left : PRS_RC_POST_MOST;

        for (uint32_t i = 0; i < now; i++, position++) {
            keys |= ring[position & mask].remote_key;
            fill_request(queue, &wr[i], &sge[i], &ring[position & mask], position);
        }
        if (unlikely(keys > UINT32_MAX))
            return prs_verbs_refuse_key(base, ring, mask, first);
        wr[now - 1].next = NULL;
        r = ibv_post_send(queue->qp, wr, &bad);
    } while (!r && position != first + count);
    return r > 0 ? -r : r;
}

static int fill_arrival(struct rc_queue *queue, const struct ibv_wc *wc, struct prs_event *out)
{
    out->kind = PRS_EVENT_ARRIVAL;
    out->value = ntohl(wc->imm_data);
    out->bytes = wc->byte_len;
    if (unlikely(wc->opcode != IBV_WC_RECV_RDMA_WITH_IMM))
        return -EPROTO;
    return prs_receives_consume(&queue->receives);
}

/* Return 0 or -errno. */
static inline int fill_event(struct prs_queue *base, const struct ibv_wc *wc, struct prs_event *out)
{
    struct rc_queue *queue = to_rc_queue(base);

    out->queue = base->id;
    if (wc->wr_id & PRS_ARRIVAL_BIT) {
        if (likely(wc->status == IBV_WC_SUCCESS))
            return fill_arrival(queue, wc, out);
        queue->receives.flushed++;
        prs_verbs_rc_error(wc, out->queue, out);
        return 0;
    }
    out->value = (uint32_t)wc->wr_id;
    out->kind = PRS_EVENT_DONE;
    if (unlikely(wc->status != IBV_WC_SUCCESS))
        prs_verbs_rc_error(wc, out->queue, out);
    return 0;
}

static PRS_OUTLINED int fill_events(struct rc_link *link, const struct ibv_wc *wc, int count, struct prs_event *events)
{
    struct prs_queue *const *queue = link->queues; /* nobody else makes queues */

    for (int i = 0; i < count; i++, wc++) {
        int r = fill_event(queue[prs_cqs_name_of(wc)], wc, &events[i]);

        if (unlikely(r))
            return r;
    }
    return count;
}

/* ---- shared completion queues ---- */

/* Take the completions of this link, and leave the others. Return how many events, or -errno. */
static int take_own_locked(struct prs_cqs *cqs, const struct prs_link *link, struct prs_event *events)
{
    uint32_t kept = cqs->at;
    int count = 0, r = 0;

    for (uint32_t i = cqs->at; i < cqs->count; i++) {
        struct prs_queue *queue = prs_cqs_find(cqs, &cqs->wc[i]);

        if (queue->link != link || count == PRS_POLL_MOST || r)
            cqs->wc[kept++] = cqs->wc[i];
        else if ((r = fill_event(queue, &cqs->wc[i], &events[count])) == 0)
            count++;
    }
    cqs->count = kept;
    return r ? r : count;
}

static PRS_COLD int poll_own_of_shared(struct prs_link *link, struct prs_event *events)
{
    struct prs_cqs *cqs = to_rc_link(link)->cqs;
    int count, more = 1;

    if (!link->cqs || !to_rc_queue(link->queue[0])->qp)
        return 0; /* it has ended */
    prs_spin_lock(&cqs->locked);
    while ((count = take_own_locked(cqs, link, events)) == 0 && more > 0)
        more = prs_cqs_poll_locked(cqs);
    prs_spin_unlock(&cqs->locked);
    return more < 0 ? more : count;
}

int prs_rc_poll(struct prs_link *base, struct prs_event *events)
{
    struct rc_link *link = to_rc_link(base);
    struct ibv_wc wc[PRS_POLL_MOST];
    int count;

    if (unlikely(!link->own_cq))
        return poll_own_of_shared(base, events);
    count = ibv_poll_cq(link->own_cq, PRS_POLL_MOST, wc);
    if (likely(count <= 0))
        return count < 0 ? -EIO : 0;
    return fill_events(link, wc, count, events);
}

static PRS_OUTLINED int take_any_locked(struct prs_cqs *cqs, struct prs_link **link, struct prs_event *events)
{
    int count = 0, r;

    while (cqs->at < cqs->count && count < PRS_POLL_MOST) {
        const struct ibv_wc *wc = &cqs->wc[cqs->at];
        struct prs_queue *queue = prs_cqs_find(cqs, wc);

        if (unlikely(queue == &prs_cqs_silent)) {
            cqs->at++;
            continue;
        }
        if (unlikely(!queue->link->user)) {
            r = prs_cqs_hold_back_locked(cqs);
            if (r)
                return r;
            continue;
        }
        if (*link && *link != queue->link)
            break;
        *link = queue->link;
        cqs->at++;
        r = fill_event(queue, wc, &events[count]);
        if (unlikely(r))
            return r;
        count++;
    }
    return count;
}

int prs_rc_poll_shared(struct prs_shared_cqs *base, struct prs_link **link, struct prs_event *events, bool *more)
{
    struct prs_cqs *cqs = prs_cqs_of(base);
    int count = 0;

    *link = NULL;
    prs_spin_lock(&cqs->locked);
    if (likely(cqs->at == cqs->count))
        count = prs_cqs_poll_locked(cqs);
    if (count >= 0 && cqs->at != cqs->count)
        count = take_any_locked(cqs, link, events);
    *more = cqs->at != cqs->count;
    prs_spin_unlock(&cqs->locked);
    return count;
}

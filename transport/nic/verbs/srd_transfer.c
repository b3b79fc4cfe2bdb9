/* SPDX-License-Identifier: Apache-2.0 */
/* Posting and completions of SRD queues: what each message passes through. */
#include "transport/nic/verbs/srd.h"

#include <arpa/inet.h>
#include <errno.h>

#include "transport/nic/verbs/memory.h"
#include "transport/nic/verbs/status.h"
#include "transport/util/compiler.h"

/* ---- posting ---- */

static PRS_COLD void break_end(struct prs_srd_end *end, int error)
{
    end->broken = error;
    end->kept = true;
    prs_srd_leave_mail(end);
}

/* Return 0 or -EOPNOTSUPP: the layers above used a feature that prs_nic_srd does not offer. */
static PRS_SPECIALIZED int build_request(struct prs_srd_end *end, const struct prs_wr *wr, uint32_t position)
{
    struct ibv_qp_ex *ex = end->qp->ex;
    const struct ibv_sge *dummy_sge = &end->qp->dummy_sge;
    uint32_t key = (uint32_t)wr->remote_key; /* checked */

    ex->wr_id = end->wr_id_high | position;
    ex->wr_flags = IBV_SEND_SIGNALED;
    if (wr->flags & PRS_WR_FENCE)
        return -EOPNOTSUPP;
    switch (wr->opcode) {
    case PRS_WR_WRITE:
        ibv_wr_rdma_write(ex, key, wr->remote_addr);
        break;
    case PRS_WR_WRITE_IMM:
        ibv_wr_rdma_write_imm(ex, key, wr->remote_addr, htonl(wr->imm));
        break;
    case PRS_WR_READ:
        ibv_wr_rdma_read(ex, key, wr->remote_addr);
        break;
    default:
        return -EOPNOTSUPP;
    }
    /* EFA checks the key even of zero bytes, so they name registered memory too. */
    if (wr->len_bytes)
        ibv_wr_set_sge(ex, wr->local_key, wr->local_addr, wr->len_bytes);
    else
        ibv_wr_set_sge(ex, dummy_sge->lkey, dummy_sge->addr, 0);
    ibv_wr_set_ud_addr(ex, end->ah, end->remote_number, end->remote_key);
    return 0;
}

static void join_line(struct prs_srd_end *end)
{
    struct prs_srd_qp *qp = end->qp;

    end->in_line = true;
    end->behind = NULL;
    *(qp->line ? &qp->line_last->behind : &qp->line) = end;
    qp->line_last = end;
}

static void leave_line(struct prs_srd_end *end)
{
    struct prs_srd_qp *qp = end->qp;
    struct prs_srd_end *before = NULL;

    if (!end->in_line)
        return;
    for (struct prs_srd_end *at = qp->line; at != end; at = at->behind)
        before = at;
    *(before ? &before->behind : &qp->line) = end->behind;
    if (qp->line_last == end)
        qp->line_last = before;
    end->in_line = false;
}

/* Give requests to the NIC, which has room for them, with one doorbell. Return 0 or -errno. */
static PRS_SPECIALIZED int push(struct prs_srd_end *end, const struct prs_wr *ring, uint32_t mask, uint32_t first,
                                uint32_t count)
{
    struct prs_srd_qp *qp = end->qp;
    int r = 0;

    prs_reorder_begin(&end->reorder, first); /* an empty ring goes on elsewhere */
    ibv_wr_start(qp->ex);
    for (uint32_t i = 0; !r && i < count; i++)
        r = build_request(end, &ring[(first + i) & mask], first + i);
    if (r) {
        ibv_wr_abort(qp->ex);
        return r;
    }
    r = ibv_wr_complete(qp->ex);
    if (r)
        return r > 0 ? -r : r;
    for (uint32_t i = 0; i < count; i++)
        prs_reorder_post(&end->reorder, ring[(first + i) & mask].flags & PRS_WR_SIGNALED);
    end->in_flight += count;
    qp->in_flight += count;
    return 0;
}

/* Post what waits at the front of the line, as far as there is room. */
static PRS_COLD void serve_line(struct prs_srd_qp *qp)
{
    while (qp->line && qp->in_flight < qp->depth) {
        struct prs_srd_end *end = qp->line;
        uint32_t room = qp->depth - qp->in_flight, count = end->upto - end->next;
        int r;

        if (count > room)
            count = room;
        r = push(end, end->ring, end->ring_mask, end->next, count);
        if (r)
            break_end(end, r);
        end->next += count;
        if (r || end->next == end->upto)
            leave_line(end);
    }
}

/* The NIC has no room for these, or others wait already. */
static PRS_COLD void wait_in_line(struct prs_srd_end *end, const struct prs_wr *ring, uint32_t mask, uint32_t first,
                                  uint32_t count)
{
    end->ring = ring;
    end->ring_mask = mask;
    if (!end->in_line) {
        end->next = first;
        join_line(end);
    }
    end->upto = first + count;
    serve_line(end->qp);
}

int prs_srd_post(struct prs_queue *base, const struct prs_wr *ring, uint32_t mask, uint32_t first, uint32_t count)
{
    struct prs_srd_end *end = prs_srd_end_of(base);
    struct prs_srd_qp *qp = end->qp;
    uint64_t keys = 0; /* the bits of all */
    int r = 0;

    for (uint32_t i = 0; i < count; i++)
        keys |= ring[(first + i) & mask].remote_key;
    if (unlikely(keys > UINT32_MAX))
        return prs_verbs_refuse_key(base, ring, mask, first);
    prs_srd_lock(qp);
    if (unlikely(end->closed))
        r = -ECONNRESET;
    else if (likely(!qp->line && count <= qp->depth - qp->in_flight))
        r = push(end, ring, mask, first, count);
    else
        wait_in_line(end, ring, mask, first, count);
    prs_srd_unlock(qp);
    return r;
}

/* ---- what waits for another thread ---- */

/* Of several failures the most informative one stays, as in take_events() of progress.c. */
static void keep_failure(struct prs_srd_end *end, const struct prs_event *failure)
{
    if (end->failure.kind != PRS_EVENT_ERROR || end->failure.error == -ECONNRESET)
        end->failure = *failure;
    end->kept = true;
    if (end->mail)
        prs_srd_leave_mail(end);
}

static void keep_arrival(struct prs_srd_end *end, const struct ibv_wc *wc)
{
    struct prs_srd_qp *qp = end->qp;
    uint32_t at = qp->free_arrival;
    struct prs_srd_arrival *arrival = &qp->arrival[at];

    qp->free_arrival = arrival->next;
    *arrival = (struct prs_srd_arrival){ntohl(wc->imm_data), wc->byte_len, PRS_SRD_NONE};
    *(end->first == PRS_SRD_NONE ? &end->first : &qp->arrival[end->last].next) = at;
    end->last = at;
    end->kept = true;
    prs_srd_leave_mail(end);
}

/* Take the first arrival that waits, and replace its receive. Return 0 or -errno. */
static int take_kept_arrival(struct prs_srd_end *end, struct prs_event *out)
{
    struct prs_srd_qp *qp = end->qp;
    uint32_t at = end->first;
    struct prs_srd_arrival *arrival = &qp->arrival[at];

    *out = (struct prs_event){
        .kind = PRS_EVENT_ARRIVAL, .queue = end->base.id, .value = arrival->value, .bytes = arrival->bytes};
    end->first = arrival->next;
    arrival->next = qp->free_arrival;
    qp->free_arrival = at;
    return prs_receives_consume(&qp->receives);
}

/* Return the event count, or -errno. */
static PRS_OUTLINED int take_kept(struct prs_srd_end *end, struct prs_event *events, int count)
{
    if (end->broken)
        return end->broken;
    if (end->failure.kind == PRS_EVENT_ERROR && count < PRS_POLL_MOST) {
        events[count++] = end->failure;
        end->failure.kind = PRS_EVENT_DONE;
    }
    while (count < PRS_POLL_MOST && end->first != PRS_SRD_NONE) {
        int r = take_kept_arrival(end, &events[count]);

        if (r)
            return r;
        count++;
        end->base.link->receives++;
    }
    end->kept = end->failure.kind == PRS_EVENT_ERROR || end->first != PRS_SRD_NONE;
    return count;
}

/* Report what waits at an end, up to the space left in events[]. Return the event count, or -errno. */
static inline int take_mail_of(struct prs_srd_end *end, struct prs_event *events, int count)
{
    uint32_t position;

    if (unlikely(end->kept))
        count = take_kept(end, events, count);
    /* Requests whose predecessors have all completed. */
    while (count >= 0 && count < PRS_POLL_MOST && prs_reorder_next(&end->reorder, &position))
        events[count++] = (struct prs_event){.kind = PRS_EVENT_DONE, .queue = end->base.id, .value = position};
    return count;
}

static int take_mail(struct srd_link *link, struct srd_use *use, struct prs_event *events, int count)
{
    uint64_t mail = use->mail;

    while (mail) {
        uint32_t bit = (uint32_t)__builtin_ctzll(mail);

        count = take_mail_of(prs_srd_end_of(bit == PRS_SRD_LOOPBACK ? link->base.loopback : link->base.queue[bit]),
                             events, count);
        if (count < 0 || count == PRS_POLL_MOST)
            break; /* the rest next time */
        mail &= mail - 1;
    }
    if (mail != use->mail)
        __atomic_store_n(&use->mail, mail, __ATOMIC_RELAXED);
    return count;
}

void prs_srd_stop_locked(struct prs_srd_end *end)
{
    struct prs_event dropped;

    end->stopped = true;
    end->closed = true;
    leave_line(end);
    while (end->first != PRS_SRD_NONE)
        (void)take_kept_arrival(end, &dropped);
}

/* ---- completions ---- */

/* The queue pair is in the error state: nothing of any of its connections takes effect any more. */
static PRS_COLD void fail_all(struct prs_srd_qp *qp, const struct ibv_wc *wc)
{
    if (qp->failed)
        return;
    qp->failed = true;
    for (uint32_t i = 0; i < qp->slots; i++) {
        struct prs_event failure = {0};

        if (!qp->end[i] || qp->end[i]->stopped)
            continue;
        prs_verbs_srd_error(wc, qp->end[i]->base.id, &failure);
        if (qp->killed)
            failure.cause = "the queue that connections share was closed, because requests of another one did not end";
        keep_failure(qp->end[i], &failure);
    }
}

/* Return the event count, or -errno. */
static int take_arrival(struct prs_srd_qp *qp, const struct prs_link *own, const struct ibv_wc *wc,
                        struct prs_event *events, int count)
{
    struct prs_srd_end *end = prs_srd_find(qp, wc->slid, wc->src_qp);

    if (unlikely(!end || end->stopped)) /* the end has closed, and its peer did not know that yet */
        return prs_receives_consume(&qp->receives) ?: count;
    if (unlikely(wc->opcode != IBV_WC_RECV_RDMA_WITH_IMM)) {
        break_end(end, -EPROTO);
        return prs_receives_consume(&qp->receives) ?: count;
    }
    if (end->base.link != own) {
        keep_arrival(end, wc);
        return count;
    }
    end->base.link->receives++;
    events[count] = (struct prs_event){
        .kind = PRS_EVENT_ARRIVAL, .queue = end->base.id, .value = ntohl(wc->imm_data), .bytes = wc->byte_len};
    return prs_receives_consume(&qp->receives) ?: count + 1;
}

static void take_completion(struct prs_srd_qp *qp, const struct ibv_wc *wc)
{
    struct prs_srd_end *end = qp->end[wc->wr_id >> 32];
    int r;

    qp->in_flight--;
    if (unlikely(!end)) /* its connection has left; the queue pair was already in the error state */
        return;
    end->in_flight--;
    if (unlikely(end->stopped))
        return;
    if (unlikely(wc->status != IBV_WC_SUCCESS)) {
        struct prs_event failure = {0};

        prs_verbs_srd_error(wc, end->base.id, &failure);
        keep_failure(end, &failure);
        return;
    }
    r = prs_reorder_complete(&end->reorder, (uint32_t)wc->wr_id);
    if (unlikely(r))
        break_end(end, r);
    prs_srd_leave_mail(end);
}

PRS_OUTLINED int prs_srd_take_completions(struct prs_srd_qp *qp, int taken, const struct prs_link *own,
                                          struct prs_event *events, int count)
{
    if (unlikely(taken < 0))
        return -EIO;
    for (int i = 0; i < taken; i++) {
        const struct ibv_wc *wc = &qp->wc[i];

        if (!(wc->wr_id & PRS_ARRIVAL_BIT))
            take_completion(qp, wc);
        else if (likely(wc->status == IBV_WC_SUCCESS))
            count = take_arrival(qp, own, wc, events, count);
        else
            fail_all(qp, wc);
        if (unlikely(count < 0))
            return count;
    }
    if (unlikely(qp->line))
        serve_line(qp);
    return count;
}

/* Return the event count, or -errno. */
static inline int poll_use(struct srd_link *link, struct srd_use *use, struct prs_event *events, int count)
{
    struct prs_srd_qp *qp = use->qp;
    int taken = 0;

    if (unlikely(!prs_srd_trylock(qp))) {
        if (!__atomic_load_n(&use->mail, __ATOMIC_RELAXED))
            return count; /* another thread polls, and leaves our completions here */
        prs_srd_lock(qp);
    }
    if (unlikely(use->mail))
        count = take_mail(link, use, events, count);
    if (likely(count >= 0 && count < PRS_POLL_MOST))
        taken = ibv_poll_cq(qp->cq, PRS_POLL_MOST - count, qp->wc);
    if (taken) {
        count = prs_srd_take_completions(qp, taken, &link->base, events, count);
        if (count >= 0 && use->mail)
            count = take_mail(link, use, events, count);
    }
    if (unlikely(__atomic_load_n(&qp->overrun, __ATOMIC_RELAXED))) /* the event thread sets it */
        link->overrun = true;
    prs_srd_unlock(qp);
    return count;
}

int prs_srd_poll(struct prs_link *base, struct prs_event *events)
{
    struct srd_link *link = to_srd_link(base);
    int count;

    if (likely(link->use_count == 1))
        return poll_use(link, &link->use[0], events, 0);
    link->turn++; /* else the last would starve while the first always fills the events */
    count = 0;
    for (uint32_t i = 0; i < link->use_count && count >= 0 && count < PRS_POLL_MOST; i++)
        count = poll_use(link, &link->use[(link->turn + i) % link->use_count], events, count);
    return count;
}

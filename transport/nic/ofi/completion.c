/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/nic/ofi/completion.h"

#include <errno.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <stdlib.h>

#include "transport/nic/ofi/device.h"
#include "transport/nic/ofi/link.h"
#include "transport/nic/ofi/status.h"
#include "transport/util/clock.h"
#include "transport/util/compiler.h"
#include "transport/util/log.h"
#include "transport/util/spin.h"

/* ---- failures ---- */

/* Of several failures the most informative one stays. */
static PRS_COLD void keep_failure(struct prs_ofi_link *link, int error, int provider_error, uint32_t queue)
{
    if (link->failure.kind == PRS_EVENT_ERROR && link->failure.error != -ECONNRESET)
        return;
    prs_ofi_error_event(error, provider_error, queue, &link->failure);
}

PRS_COLD void prs_ofi_break_queue(struct prs_ofi_queue *queue, int error)
{
    struct prs_ofi_link *link = prs_ofi_link_of(queue->base.link);

    keep_failure(link, error, 0, queue->base.id);
    queue->next = queue->upto;
    queue->halted = true;
    /* The queues share a connection. If the provider makes a new one, the other queues must send nothing over it,
     * either. */
    for (uint32_t i = 0; &queue->base != link->base.loopback && i < link->base.queue_count; i++)
        prs_ofi_queue_of(link->base.queue[i])->halted = true;
}

/* ---- posting ---- */

/* libfabric's cxi takes no fence with a write that carries completion data, so an empty write before it has the fence.
 * What is posted later waits for the fence, too. */
static ssize_t push_fence(struct prs_ofi_link *link, struct prs_ofi_queue *queue, uint32_t position)
{
    const struct prs_domain *domain = &link->endpoint->device->base;
    struct prs_ofi_request *request = &queue->fence[position & queue->mask];
    void *descriptor = prs_ofi_descriptor(prs_ofi_device(domain), prs_own_memory_local_key(&domain->scratch, 0));
    struct iovec local = {domain->scratch.addr, 0};
    struct fi_rma_iov remote = {queue->landing, 0, queue->landing_key};
    struct fi_msg_rma message = {.msg_iov = &local,
                                 .desc = &descriptor,
                                 .iov_count = 1,
                                 .addr = queue->to,
                                 .rma_iov = &remote,
                                 .rma_iov_count = 1,
                                 .context = &request->space};
    ssize_t r;

    *request = (struct prs_ofi_request){.link = link};
    r = fi_writemsg(link->endpoint->ep, &message, FI_COMPLETION | FI_FENCE | FI_DELIVERY_COMPLETE);
    if (!r) {
        queue->fenced = true;
        link->in_flight++;
    }
    return r;
}

/* A write with completion data over a shared endpoint: the upper half of the data is the link that it is for. */
static ssize_t push_data(struct prs_ofi_link *link, struct prs_ofi_queue *queue, const struct prs_wr *wr,
                         const struct fi_msg_rma *message, uint32_t position)
{
    const struct fi_rma_iov *remote = message->rma_iov;
    ssize_t r =
        wr->flags & PRS_WR_FENCE && link->base.ops->fence && !queue->fenced ? push_fence(link, queue, position) : 0;

    if (!r)
        r = fi_writedata(link->endpoint->ep, message->msg_iov->iov_base, wr->len_bytes, message->desc[0],
                         (uint64_t)queue->remote_number << 32 | wr->imm, queue->to, remote->addr, remote->key,
                         message->context);
    if (!r)
        queue->fenced = false;
    return r;
}

static ssize_t push_message(struct prs_ofi_link *link, const struct prs_ofi_queue *queue, const struct prs_wr *wr,
                            struct fi_msg_rma *message)
{
    uint64_t flags = FI_COMPLETION | (wr->flags & PRS_WR_FENCE ? FI_FENCE : 0);

    if (wr->opcode == PRS_WR_READ)
        return fi_readmsg(link->endpoint->ep, message, flags);
    if (wr->opcode == PRS_WR_WRITE_IMM) {
        /* Not all providers report the size of what has arrived, so the upper bits carry it. */
        message->data = (uint64_t)(queue->index << PRS_OFI_SIZE_BITS | wr->len_bytes) << 32 | wr->imm;
        flags |= FI_REMOTE_CQ_DATA;
    } else if (wr->opcode != PRS_WR_WRITE) {
        return -FI_EOPNOTSUPP;
    }
    /* A request is done when its bytes are there, as with verbs. */
    return fi_writemsg(link->endpoint->ep, message, flags | FI_DELIVERY_COMPLETE);
}

/* Where the request goes, as the provider counts. Return 0, -FI_EAGAIN: that is not known yet, or a negative error. */
static int aim(struct prs_ofi_link *link, const struct prs_ofi_queue *queue, const struct prs_wr *wr,
               struct fi_rma_iov *out)
{
    const struct prs_ofi_device *device = link->endpoint->device;

    if (unlikely(!wr->len_bytes))
        *out = (struct fi_rma_iov){queue->landing, 0, queue->landing_key};
    else if (device->rows.used)
        return prs_ofi_rows_aim(link, &queue->base == link->base.loopback, wr, out);
    else
        *out = prs_ofi_aim(device->offsets, wr->remote_addr, wr->remote_key, wr->len_bytes);
    return 0;
}

static void count_posted(struct prs_ofi_link *link, const struct prs_ofi_queue *queue, struct prs_ofi_request *request)
{
    link->in_flight++;
    if (&queue->base == link->base.loopback)
        return;
    link->unfinished++;
    request->number = link->posted++;
}

/* Give one request to the provider. Return 0 or a negative error of libfabric; -FI_EAGAIN: it has no room now. */
static ssize_t push_one(struct prs_ofi_link *link, struct prs_ofi_queue *queue, const struct prs_wr *wr,
                        struct fi_rma_iov *remote, uint32_t position)
{
    const struct prs_ofi_device *device = link->endpoint->device;
    const struct prs_own_memory *scratch = &device->base.scratch;
    struct prs_ofi_request *request = &queue->request[position & queue->mask];
    struct iovec local = {(void *)(uintptr_t)wr->local_addr, wr->len_bytes};
    uint32_t key = wr->local_key;
    void *descriptor;
    struct fi_msg_rma message = {.msg_iov = &local,
                                 .desc = &descriptor,
                                 .iov_count = 1,
                                 .addr = queue->to,
                                 .rma_iov = remote,
                                 .rma_iov_count = 1,
                                 .context = &request->space};
    ssize_t r;

    if (unlikely(!wr->len_bytes)) {
        local.iov_base = scratch->addr;
        key = prs_own_memory_local_key(scratch, 0);
    }
    if (unlikely(!prs_ofi_is_registered(device, key)))
        return -FI_ECANCELED; /* no longer: the memory may be gone, too */
    descriptor = prs_ofi_descriptor(device, key);
    request->position = position;
    if (link->endpoint->shared && wr->opcode == PRS_WR_WRITE_IMM)
        r = push_data(link, queue, wr, &message, position);
    else
        r = push_message(link, queue, wr, &message);
    if (!r)
        count_posted(link, queue, request);
    return r;
}

/* Has a request completed over the connection that this queue shares with others? */
static bool is_proven(const struct prs_ofi_link *link, const struct prs_ofi_queue *queue)
{
    bool any = queue->proven;

    for (uint32_t i = 0; &queue->base != link->base.loopback && i < link->base.queue_count; i++)
        any |= prs_ofi_queue_of(link->base.queue[i])->proven;
    return any;
}

/* The provider has been taking nothing for long, though it has nothing of ours to do: it cannot connect, at first or
 * again. A slow receiver is no error: what it has not taken is in flight. What others post to a shared endpoint may
 * fill it. */
static bool is_unreachable(const struct prs_ofi_link *link, struct prs_ofi_queue *queue)
{
    bool proven = is_proven(link, queue);

    if (link->endpoint->shared || (proven && (link->unfinished || &queue->base == link->base.loopback))) {
        queue->refused_ns = 0;
        return false;
    }
    if (!queue->refused_ns)
        queue->refused_ns = prs_clock_ns();
    return prs_clock_ns() - queue->refused_ns > (proven ? link->retry_ns : link->patience_ns);
}

/* Providers without a fence ignore FI_FENCE. Strong signals after reads carry it nevertheless, so this function is
 * their fence. */
static inline bool must_wait(const struct prs_ofi_queue *queue, const struct prs_wr *wr)
{
    return wr->flags & PRS_WR_FENCE && !queue->base.link->ops->fence && queue->reorder.tail != queue->reorder.head;
}

void prs_ofi_push(struct prs_ofi_link *link, struct prs_ofi_queue *queue)
{
    while (queue->next != queue->upto) {
        const struct prs_wr *wr = &queue->ring[queue->next & queue->ring_mask];
        struct fi_rma_iov remote;
        ssize_t r;

        if (unlikely(link->ended || queue->halted || (link->failed && &queue->base != link->base.loopback))) {
            prs_ofi_break_queue(queue, FI_ECANCELED);
            return;
        }
        if (unlikely(must_wait(queue, wr)))
            return;
        r = aim(link, queue, wr, &remote);
        if (r == -FI_EAGAIN)
            return;
        if (likely(!r))
            r = push_one(link, queue, wr, &remote, queue->next);
        if (r == -FI_EAGAIN && !is_unreachable(link, queue))
            return;
        if (unlikely(r)) {
            prs_ofi_break_queue(queue, r == -FI_EAGAIN ? ETIMEDOUT : (int)-r);
            return;
        }
        queue->refused_ns = 0;
        prs_reorder_post(&queue->reorder, wr->flags & PRS_WR_SIGNALED);
        queue->next++;
    }
}

void prs_ofi_push_waiting(struct prs_ofi_link *link)
{
    for (uint32_t i = 0; i < prs_ofi_queue_count(link); i++) {
        struct prs_ofi_queue *queue = prs_ofi_queue_at(link, i);

        if (unlikely(queue->next != queue->upto))
            prs_ofi_push(link, queue);
    }
}

/* ---- completions ---- */

/* The other links of the endpoint wait for this one, so log it. */
static void begin_crowd(struct prs_ofi_link *link)
{
    link->crowded = true;
    link->endpoint->crowded++;
    link->crowded_ns = prs_clock_ns();
    if (link->endpoint->shared && !link->told)
        PRS_WARN("%s: a connection is not polled while %u arrivals wait for it; all connections of the device share an "
                 "endpoint, and wait until it is polled, for at most %llu ms",
                 link->base.rail->info.name, link->last - link->first,
                 (unsigned long long)(link->patience_ns / 1000000));
    link->told = true;
}

static void end_crowd(struct prs_ofi_link *link)
{
    link->endpoint->crowded -= link->crowded;
    link->crowded = false;
}

/* Make room for one reading more, as long as there may be more. */
static PRS_COLD void grow(struct prs_ofi_link *link, bool at_any_cost)
{
    uint32_t most = at_any_cost || link->ended ? 1u << 31
                    : link->endpoint->shared   ? PRS_OFI_SHARED_ARRIVALS
                                               : PRS_OFI_ARRIVALS,
             count = link->last - link->first;
    struct prs_ofi_arrival *arrival = link->room < most ? calloc(2 * link->room, sizeof(*arrival)) : NULL;

    if (!arrival) {
        if (link->ended)
            link->broken = -ENOMEM; /* what has arrived cannot be counted */
        begin_crowd(link);
        return;
    }
    for (uint32_t i = 0; i < count; i++)
        arrival[i] = link->arrival[(link->first + i) % link->room];
    free(link->arrival);
    link->arrival = arrival;
    link->first = 0;
    link->last = count;
    link->room *= 2;
}

static void make_room(struct prs_ofi_link *link, bool at_any_cost)
{
    end_crowd(link);
    if (link->room - (link->last - link->first) < PRS_POLL_MOST)
        grow(link, at_any_cost);
}

PRS_COLD void prs_ofi_make_room(struct prs_ofi_link *link)
{
    make_room(link, false);
}

PRS_COLD void prs_ofi_uncrowd(struct prs_ofi_endpoint *endpoint)
{
    for (uint32_t i = 0; endpoint->crowded && i < endpoint->places; i++)
        if (endpoint->place[i].link && endpoint->place[i].link->crowded)
            make_room(endpoint->place[i].link, true);
}

/* A link that is not polled for too long is failed, so that the others, which wait for it, go on. */
static PRS_COLD void judge_crowd(struct prs_ofi_endpoint *endpoint)
{
    for (uint32_t i = 0; endpoint->shared && i < endpoint->places; i++) {
        struct prs_ofi_link *link = endpoint->place[i].link;

        if (!link || !link->crowded || prs_clock_ns() - link->crowded_ns < link->patience_ns)
            continue;
        PRS_WARN("%s: giving up a connection that was not polled for %llu ms while %u arrivals waited for it: others "
                 "share its endpoint",
                 link->base.rail->info.name, (unsigned long long)(link->patience_ns / 1000000),
                 link->last - link->first);
        link->broken = -ENOBUFS;
        link->first = link->last;
        end_crowd(link);
    }
}

static void take_arrival(struct prs_ofi_endpoint *endpoint, const struct fi_cq_data_entry *entry)
{
    uint32_t upper = (uint32_t)(entry->data >> 32);
    struct prs_ofi_link *link = endpoint->shared ? prs_ofi_endpoint_find(endpoint, upper) : endpoint->place[0].link;
    struct prs_ofi_arrival arrival;

    if (unlikely(endpoint->shared && upper == PRS_OFI_OWN_NUMBER)) {
        endpoint->own_arrived++;
        endpoint->own_data = entry->data;
        endpoint->own_bytes = entry->len;
        return;
    }
    if (unlikely(!link || (endpoint->shared && (link->ended || link->broken)))) /* late: it has ended here */
        return;
    arrival = (struct prs_ofi_arrival){.value = (uint32_t)entry->data,
                                       .bytes = upper & ((1u << PRS_OFI_SIZE_BITS) - 1),
                                       .queue = upper >> PRS_OFI_SIZE_BITS};
    if (endpoint->shared)
        arrival = (struct prs_ofi_arrival){.value = (uint32_t)entry->data, .bytes = (uint32_t)entry->len};
    if (unlikely(arrival.queue >= link->base.queue_count)) {
        link->broken = -EPROTO;
        return;
    }
    link->arrival[link->last++ % link->room] = arrival;
    if (unlikely(link->room - (link->last - link->first) < PRS_POLL_MOST && !link->crowded))
        grow(link, false);
}

/* If a request is done although an earlier one has failed, the provider has sent it over a new connection. Then the
 * requests that have arrived are not the first ones posted. That matters only where rails are replaced; elsewhere
 * requests after one with a wrong key may be done. */
static void finish_request(const struct prs_ofi_request *request, bool done)
{
    struct prs_ofi_link *link = request->link;

    if (&request->queue->base == link->base.loopback || link->endpoint->shared)
        return;
    link->unfinished--;
    if (likely(!link->failed && done))
        return;
    if (!done && (!link->failed || request->number < link->failed_number))
        link->failed_number = request->number;
    link->failed |= !done;
    if (done && request->number > link->failed_number && !link->broken && link->base.rail->domain->nic->fails_over) {
        PRS_WARN(
            "%s: a request is done though an earlier one has failed: the provider has connected again, and nothing "
            "tells what has arrived",
            link->base.rail->info.name);
        link->broken = -EPROTO;
    }
}

static void take_completion(struct prs_ofi_endpoint *endpoint, const struct fi_cq_data_entry *entry)
{
    struct prs_ofi_request *request = entry->op_context;

    if (entry->flags & FI_REMOTE_CQ_DATA) {
        take_arrival(endpoint, entry);
        return;
    }
    if (unlikely(!request->link)) {
        endpoint->own_done++;
        return;
    }
    request->link->in_flight--;
    if (unlikely(!request->queue)) {
        prs_ofi_rows_arrive(endpoint, request, true);
        return;
    }
    finish_request(request, true);
    request->queue->proven = true;
    if (unlikely(prs_reorder_complete(&request->queue->reorder, request->position)))
        request->link->broken = -EPROTO;
}

static PRS_COLD void take_error(struct prs_ofi_endpoint *endpoint)
{
    struct fi_cq_err_entry entry = {0};
    ssize_t r = fi_cq_readerr(endpoint->cq, &entry, 0);
    struct prs_ofi_request *request = entry.op_context;
    struct prs_ofi_link *link = request ? request->link : endpoint->shared ? NULL : endpoint->place[0].link;

    if (r == -FI_EAGAIN)
        return;
    if (r < 0) {
        endpoint->broken = prs_ofi_errno((int)-r);
        return;
    }
    if (!link) {
        endpoint->own_done += request ? 1 : 0; /* errors of the other side are reported there */
        return;
    }
    keep_failure(link, entry.err, entry.prov_errno,
                 request && request->queue ? request->queue->base.id : link->base.queue[0]->id);
    link->in_flight -= request ? 1 : 0;
    if (request && !request->queue)
        prs_ofi_rows_arrive(endpoint, request, false);
    else if (request)
        finish_request(request, false);
}

bool prs_ofi_read_completions(struct prs_ofi_endpoint *endpoint)
{
    struct fi_cq_data_entry entries[PRS_POLL_MOST];
    ssize_t count;

    if (unlikely(endpoint->crowded)) {
        judge_crowd(endpoint);
        if (endpoint->crowded)
            return false;
    }
    count = fi_cq_read(endpoint->cq, entries, PRS_POLL_MOST);
    for (ssize_t i = 0; i < count; i++)
        take_completion(endpoint, &entries[i]);
    if (unlikely(count == -FI_EAVAIL))
        take_error(endpoint);
    else if (unlikely(count < 0 && count != -FI_EAGAIN))
        endpoint->broken = prs_ofi_errno((int)-count);
    return count > 0 || count == -FI_EAVAIL;
}

void prs_ofi_progress(struct prs_ofi_endpoint *endpoint)
{
    if (!prs_spin_trylock(&endpoint->locked))
        return; /* an owner is there */
    if (!endpoint->polled && endpoint->ep)
        prs_ofi_read_completions(endpoint);
    endpoint->polled = false;
    for (uint32_t i = 0; i < endpoint->places; i++) {
        struct prs_ofi_link *link = endpoint->place[i].link;

        if (!link)
            continue;
        if (!link->polled && !link->ended)
            prs_ofi_push_waiting(link);
        link->polled = false;
    }
    prs_spin_unlock(&endpoint->locked);
}

int prs_ofi_report(struct prs_ofi_link *link, struct prs_event *events)
{
    int count = 0;

    if (unlikely(link->failure.kind == PRS_EVENT_ERROR)) {
        events[count++] = link->failure;
        link->failure.kind = PRS_EVENT_DONE;
    }
    if (unlikely(link->loopback_failed)) {
        prs_ofi_error_event(FI_ECANCELED, 0, link->base.loopback->id, &events[count++]);
        link->loopback_failed = false;
    }
    for (; count < PRS_POLL_MOST && link->first != link->last; link->base.receives++) {
        const struct prs_ofi_arrival *arrival = &link->arrival[link->first++ % link->room];

        prs_ofi_queue_of(link->base.queue[arrival->queue])->taken++;
        events[count++] = (struct prs_event){.kind = PRS_EVENT_ARRIVAL,
                                             .queue = link->base.queue[arrival->queue]->id,
                                             .value = arrival->value,
                                             .bytes = arrival->bytes};
    }
    if (unlikely(link->crowded && link->room - (link->last - link->first) >= PRS_POLL_MOST))
        end_crowd(link);
    for (uint32_t i = 0; i < prs_ofi_queue_count(link); i++) {
        struct prs_ofi_queue *queue = prs_ofi_queue_at(link, i);
        uint32_t position;

        while (count < PRS_POLL_MOST && prs_reorder_next(&queue->reorder, &position))
            events[count++] = (struct prs_event){.kind = PRS_EVENT_DONE, .queue = queue->base.id, .value = position};
    }
    return count;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/nic/ofi/link.h"

#include <errno.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <stdlib.h>
#include <string.h>

#include "transport/nic/ofi/attend.h"
#include "transport/nic/ofi/device.h"
#include "transport/nic/ofi/ofi_nic.h"
#include "transport/nic/ofi/status.h"
#include "transport/util/clock.h"
#include "transport/util/compiler.h"
#include "transport/util/error.h"
#include "transport/util/log.h"
#include "transport/util/spin.h"

enum {
    LAST_READS = 8, /* of the completion queue, before an endpoint is closed */
};

static struct prs_ofi_queue *to_queue(struct prs_queue *queue)
{
    return (struct prs_ofi_queue *)queue;
}

static struct prs_ofi_device *device_of(const struct prs_ofi_link *link)
{
    return prs_ofi_device(link->base.rail->domain);
}

static int fail(const struct prs_ofi_link *link, int error, const char *what)
{
    return prs_fail(prs_ofi_errno(error), "%s: %s: %s: %s", link->base.rail->info.name,
                    device_of(link)->info->fabric_attr->prov_name, what, prs_ofi.strerror(error));
}

/* ---- open, close ---- */

static void attend(struct prs_ofi_link *link);

static void free_queue(struct prs_queue *base)
{
    struct prs_ofi_queue *queue = base ? to_queue(base) : NULL;

    if (!queue)
        return;
    prs_reorder_fini(&queue->reorder);
    free(queue->request);
    free(queue);
}

/* depth: a power of two. Return NULL: no memory. */
static struct prs_ofi_queue *new_queue(struct prs_ofi_link *link, uint32_t id, uint32_t depth)
{
    static uint32_t numbers; /* atomic */
    struct prs_ofi_queue *queue = calloc(1, sizeof(*queue));

    if (!queue)
        return NULL;
    queue->base =
        (struct prs_queue){.link = &link->base, .id = id, .number = __atomic_add_fetch(&numbers, 1, __ATOMIC_RELAXED)};
    queue->to = FI_ADDR_UNSPEC;
    queue->mask = depth - 1;
    queue->request = calloc(depth, sizeof(*queue->request));
    if (!queue->request || prs_reorder_init(&queue->reorder, depth)) {
        free_queue(&queue->base);
        return NULL;
    }
    for (uint32_t i = 0; i < depth; i++)
        queue->request[i].queue = queue;
    return queue;
}

static void close_endpoint(struct prs_ofi_link *link)
{
    int r = link->ep ? fi_close(&link->ep->fid) : 0;

    if (r)
        PRS_WARN("%s: cannot close an endpoint: %s", link->base.rail->info.name, prs_ofi.strerror(-r));
    link->ep = NULL;
}

static void ofi_close(struct prs_link *base)
{
    struct prs_ofi_link *link = prs_ofi_link_of(base);
    int r;

    prs_ofi_attend_remove(link);
    close_endpoint(link); /* when it returns, the provider uses no memory of its requests */
    r = link->cq ? fi_close(&link->cq->fid) : 0;
    if (!r)
        r = link->av ? fi_close(&link->av->fid) : 0;
    if (r)
        PRS_WARN("%s: cannot close a completion queue or address vector: %s", base->rail->info.name,
                 prs_ofi.strerror(-r));
    for (uint32_t i = 0; i < base->queue_count; i++)
        free_queue(base->queue[i]);
    free_queue(base->loopback);
    free(base->queue);
    free(link->arrival);
    free(link);
}

static int open_endpoint(struct prs_ofi_link *link, uint32_t completions)
{
    struct prs_ofi_device *device = device_of(link);
    struct fi_cq_attr cq = {.size = completions, .format = FI_CQ_FORMAT_DATA, .wait_obj = FI_WAIT_NONE};
    struct fi_av_attr av = {.type = device->info->domain_attr->av_type, .count = 2};
    int r = fi_cq_open(device->domain, &cq, &link->cq, NULL);

    if (r)
        return fail(link, -r, "fi_cq_open");
    r = fi_av_open(device->domain, &av, &link->av, NULL);
    if (r)
        return fail(link, -r, "fi_av_open");
    r = fi_endpoint(device->domain, device->info, &link->ep, NULL);
    if (r)
        return fail(link, -r, "fi_endpoint; are there too many of them, or of descriptors (ulimit -n)?");
    r = fi_ep_bind(link->ep, &link->cq->fid, FI_TRANSMIT | FI_RECV);
    if (!r)
        r = fi_ep_bind(link->ep, &link->av->fid, 0);
    if (r)
        return fail(link, -r, "fi_ep_bind");
    r = fi_enable(link->ep);
    return r ? fail(link, -r, "fi_enable") : 0;
}

static int check_name(struct prs_ofi_link *link)
{
    uint8_t name[256];
    size_t bytes = sizeof(name);
    int r = fi_getname(&link->ep->fid, name, &bytes);

    if (r && r != -FI_ETOOSMALL)
        return fail(link, -r, "fi_getname");
    if (bytes > PRS_NIC_ADDRESS_BYTES)
        return prs_fail(-EOPNOTSUPP, "%s: %s: an endpoint's address has %zu bytes, of which %d can be told",
                        link->base.rail->info.name, device_of(link)->info->fabric_attr->prov_name, bytes,
                        PRS_NIC_ADDRESS_BYTES);
    return 0;
}

static int check_remote(struct prs_ofi_link *link, const struct prs_link_options *options)
{
    struct prs_ofi_port own;
    int r = prs_ofi_read_port(options->remote_port, &link->remote);

    if (!r)
        r = prs_ofi_read_port(&options->own->told, &own);
    if (r)
        return r;
    if (strcmp(own.provider, link->remote.provider) || own.protocol != link->remote.protocol ||
        own.protocol_version != link->remote.protocol_version || own.format != link->remote.format)
        return prs_fail(-EPROTO,
                        "%s uses libfabric's provider %s (protocol %#x, version %u, addresses %u), the other side %s "
                        "(%#x, %u, %u): PERSEUS_PROVIDER must be the same everywhere",
                        link->base.rail->info.name, own.provider, own.protocol, own.protocol_version, own.format,
                        link->remote.provider, link->remote.protocol, link->remote.protocol_version,
                        link->remote.format);
    return 0;
}

static int open_queues(struct prs_ofi_link *link, const struct prs_link_options *options)
{
    struct prs_link *base = &link->base;

    link->arrival = calloc(PRS_OFI_ARRIVALS, sizeof(*link->arrival));
    base->queue = calloc(options->queues, sizeof(*base->queue));
    while (link->arrival && base->queue && base->queue_count < options->queues) {
        struct prs_ofi_queue *queue = new_queue(link, options->ids[base->queue_count], options->depth);

        if (!queue)
            break;
        base->queue[base->queue_count++] = &queue->base;
    }
    return base->queue_count == options->queues ? 0 : prs_nic_fail(base->rail, ENOMEM, "link");
}

static int ofi_open(const struct prs_link_options *options, struct prs_link **out)
{
    struct prs_ofi_link *link = calloc(1, sizeof(*link));
    uint32_t requests = options->queues * options->depth + options->loopback_depth;
    int r;

    if (!link)
        return prs_nic_fail(options->rail, ENOMEM, "link");
    link->base = (struct prs_link){
        .ops = options->rail->domain->nic, .rail = options->rail, .own = *options->own, .stream_fd = -1};
    link->base.overrun = &link->overrun;
    link->patience_ns = options->config->timeout_ms * 1000000ull;
    link->loopback_depth = options->loopback_depth;
    r = check_remote(link, options);
    if (!r)
        r = open_queues(link, options);
    if (!r)
        r = open_endpoint(link, requests + options->receive_depth);
    if (!r)
        r = check_name(link);
    if (r) {
        ofi_close(&link->base);
        return r;
    }
    link->attend = attend;
    prs_ofi_attend_add(link);
    *out = &link->base;
    return 0;
}

/* ---- connect ---- */

static void ofi_address(const struct prs_queue *queue, struct prs_nic_address *out)
{
    struct prs_ofi_link *link = prs_ofi_link_of(queue->link);
    size_t bytes = sizeof(out->bytes);

    *out = (struct prs_nic_address){0};
    prs_spin_lock(&link->locked);
    if (link->ep && !fi_getname(&link->ep->fid, out->bytes, &bytes)) /* it worked before: check_name() */
        out->length = (uint8_t)bytes;
    prs_spin_unlock(&link->locked);
}

/* Endpoints need no connection: this names the other one. The first request makes the provider connect, if it does. */
static int insert(struct prs_ofi_link *link, const struct prs_nic_address *told, fi_addr_t *out)
{
    struct prs_nic_address own;
    int r;

    ofi_address(link->base.queue[0], &own);
    if (told->length != own.length)
        return prs_fail(-EPROTO, "impossible address of an endpoint: %u bytes, ours has %u", told->length, own.length);
    prs_spin_lock(&link->locked);
    r = link->ep ? fi_av_insert(link->av, told->bytes, 1, out, 0, NULL) : -FI_ECANCELED;
    prs_spin_unlock(&link->locked);
    return r == 1 ? 0 : fail(link, r < 0 ? -r : FI_EINVAL, "fi_av_insert of the other side's address");
}

static int ofi_connect(struct prs_queue *base, const struct prs_nic_address *told, const struct prs_nic_address *port,
                       int *error)
{
    struct prs_ofi_link *link = prs_ofi_link_of(base->link);
    struct prs_ofi_queue *queue = to_queue(base), *first = to_queue(link->base.queue[0]);
    int r = 0;

    (void)port, (void)error; /* open() was told it */
    if (queue != first && first->to != FI_ADDR_UNSPEC)
        queue->to = first->to; /* the other side's queues have one endpoint, too */
    else
        r = insert(link, told, &queue->to);
    queue->landing = link->remote.landing;
    queue->landing_key = link->remote.landing_key;
    return r;
}

static int ofi_loopback(struct prs_link *base, uint32_t id, struct prs_queue **out)
{
    struct prs_ofi_link *link = prs_ofi_link_of(base);
    struct prs_ofi_device *device = device_of(link);
    struct prs_nic_address own;
    struct prs_ofi_queue *queue;
    int r;

    if (!base->loopback) {
        queue = new_queue(link, id, link->loopback_depth);
        if (!queue)
            return prs_nic_fail(base->rail, ENOMEM, "queue");
        ofi_address(base->queue[0], &own);
        r = insert(link, &own, &queue->to);
        if (r) {
            free_queue(&queue->base);
            return r;
        }
        queue->landing = (uintptr_t)device->landing.addr;
        queue->landing_key = prs_own_memory_remote_key(&device->landing, 0);
        prs_spin_lock(&link->locked); /* the thread of attend.c */
        base->loopback = &queue->base;
        prs_spin_unlock(&link->locked);
    }
    *out = base->loopback;
    return 0;
}

/* ---- posting ---- */

/* Give one request to the provider. Return 0 or a negative error of libfabric; -FI_EAGAIN: it has no room now. */
static PRS_SPECIALIZED ssize_t push_one(struct prs_ofi_link *link, struct prs_ofi_queue *queue, const struct prs_wr *wr,
                                        uint32_t position)
{
    const struct prs_ofi_device *device = device_of(link);
    struct prs_ofi_request *request = &queue->request[position & queue->mask];
    struct iovec local = {(void *)(uintptr_t)wr->local_addr, wr->len_bytes};
    struct fi_rma_iov remote = prs_ofi_aim(device->offsets, wr->remote_addr, wr->remote_key, wr->len_bytes);
    uint64_t flags = FI_COMPLETION | (wr->flags & PRS_WR_FENCE ? FI_FENCE : 0);
    void *descriptor = NULL;
    struct fi_msg_rma message = {.msg_iov = &local,
                                 .desc = &descriptor,
                                 .iov_count = 1,
                                 .addr = queue->to,
                                 .rma_iov = &remote,
                                 .rma_iov_count = 1,
                                 .context = &request->space};

    request->position = position;
    if (likely(wr->len_bytes)) {
        descriptor = prs_ofi_descriptor(device, wr->local_key);
    } else {
        local.iov_base = device->base.scratch.addr;
        descriptor = prs_ofi_descriptor(device, prs_own_memory_local_key(&device->base.scratch, 0));
        remote = prs_ofi_aim(device->offsets, queue->landing, queue->landing_key, 0);
    }
    if (wr->opcode == PRS_WR_READ)
        return fi_readmsg(link->ep, &message, flags);
    if (wr->opcode == PRS_WR_WRITE_IMM) {
        /* Not all providers report the size of what has arrived, so it travels beside the immediate. */
        message.data = (uint64_t)wr->len_bytes << 32 | wr->imm;
        flags |= FI_REMOTE_CQ_DATA;
    } else if (wr->opcode != PRS_WR_WRITE) {
        return -FI_EOPNOTSUPP;
    }
    /* Done means that the bytes are there, as verbs has it. */
    return fi_writemsg(link->ep, &message, flags | FI_DELIVERY_COMPLETE);
}

/* Nothing of the queue has ever completed, and the provider has been taking nothing for long: it cannot connect. A slow
 * receiver later on is no error. */
static bool is_unreachable(const struct prs_ofi_link *link, struct prs_ofi_queue *queue)
{
    if (queue->proven)
        return false;
    if (!queue->refused_ns)
        queue->refused_ns = prs_clock_ns();
    return prs_clock_ns() - queue->refused_ns > link->patience_ns;
}

/* Of several failures the most informative one stays. */
static PRS_COLD void keep_failure(struct prs_ofi_link *link, int error, int provider_error, uint32_t queue)
{
    if (link->failure.kind == PRS_EVENT_ERROR && link->failure.error != -ECONNRESET)
        return;
    prs_ofi_error_event(error, provider_error, queue, &link->failure);
}

/* It completes nothing any more. The peer learns it when it polls, as of a request that failed later. */
static PRS_COLD void break_queue(struct prs_ofi_link *link, struct prs_ofi_queue *queue, int error)
{
    keep_failure(link, error, 0, queue->base.id);
    queue->next = queue->upto;
}

/* Providers without a fence ignore FI_FENCE. Strong signals after reads have it all the same: here is that fence. */
static inline bool must_wait(const struct prs_ofi_queue *queue, const struct prs_wr *wr)
{
    return wr->flags & PRS_WR_FENCE && !queue->base.link->ops->fence && queue->reorder.tail != queue->reorder.head;
}

static void push(struct prs_ofi_link *link, struct prs_ofi_queue *queue)
{
    while (queue->next != queue->upto) {
        const struct prs_wr *wr = &queue->ring[queue->next & queue->ring_mask];
        ssize_t r;

        if (unlikely(must_wait(queue, wr)))
            return;
        r = push_one(link, queue, wr, queue->next);
        if (r == -FI_EAGAIN && !is_unreachable(link, queue))
            return;
        if (unlikely(r)) {
            break_queue(link, queue, r == -FI_EAGAIN ? ETIMEDOUT : (int)-r);
            return;
        }
        queue->refused_ns = 0;
        prs_reorder_post(&queue->reorder, wr->flags & PRS_WR_SIGNALED);
        queue->next++;
    }
}

static int ofi_post(struct prs_queue *base, const struct prs_wr *ring, uint32_t mask, uint32_t first, uint32_t count)
{
    struct prs_ofi_link *link = prs_ofi_link_of(base->link);
    struct prs_ofi_queue *queue = to_queue(base);
    int r = 0;

    prs_spin_lock(&link->locked);
    if (unlikely(!link->ep)) {
        r = -ECONNRESET;
    } else {
        queue->ring = ring;
        queue->ring_mask = mask;
        if (queue->next == queue->upto)
            queue->next = first;
        queue->upto = first + count;
        push(link, queue);
    }
    prs_spin_unlock(&link->locked);
    return r;
}

/* ---- completions ---- */

static PRS_COLD void take_error(struct prs_ofi_link *link)
{
    struct fi_cq_err_entry entry = {0};
    ssize_t r = fi_cq_readerr(link->cq, &entry, 0);
    const struct prs_ofi_request *request = entry.op_context;

    if (r == -FI_EAGAIN)
        return;
    if (r < 0)
        link->broken = prs_ofi_errno((int)-r);
    else
        keep_failure(link, entry.err, entry.prov_errno, request ? request->queue->base.id : link->base.queue[0]->id);
}

static void take_completion(struct prs_ofi_link *link, const struct fi_cq_data_entry *entry)
{
    struct prs_ofi_request *request = entry->op_context;

    if (entry->flags & FI_REMOTE_CQ_DATA) {
        link->arrival[link->last++ % PRS_OFI_ARRIVALS] =
            (struct prs_ofi_arrival){(uint32_t)entry->data, (uint32_t)(entry->data >> 32)};
        return;
    }
    request->queue->proven = true;
    if (unlikely(prs_reorder_complete(&request->queue->reorder, request->position)))
        link->broken = -EPROTO;
}

/* Read what the provider has completed, as long as there is room for arrivals, and let it move data. */
static void read_completions(struct prs_ofi_link *link)
{
    struct fi_cq_data_entry entries[PRS_POLL_MOST];
    ssize_t count;

    if (PRS_OFI_ARRIVALS - (link->last - link->first) < PRS_POLL_MOST)
        return;
    count = fi_cq_read(link->cq, entries, PRS_POLL_MOST);
    for (ssize_t i = 0; i < count; i++)
        take_completion(link, &entries[i]);
    if (unlikely(count == -FI_EAVAIL))
        take_error(link);
    else if (unlikely(count < 0 && count != -FI_EAGAIN))
        link->broken = prs_ofi_errno((int)-count);
}

static inline struct prs_ofi_queue *queue_at(const struct prs_ofi_link *link, uint32_t i)
{
    return to_queue(i < link->base.queue_count ? link->base.queue[i] : link->base.loopback);
}

static inline uint32_t queue_count(const struct prs_ofi_link *link)
{
    return link->base.queue_count + (link->base.loopback ? 1 : 0);
}

static void push_waiting(struct prs_ofi_link *link)
{
    for (uint32_t i = 0; i < queue_count(link); i++) {
        struct prs_ofi_queue *queue = queue_at(link, i);

        if (unlikely(queue->next != queue->upto))
            push(link, queue);
    }
}

/* ---- polling ---- */

/* Return how many events. */
static int report(struct prs_ofi_link *link, struct prs_event *events)
{
    int count = 0;

    if (unlikely(link->failure.kind == PRS_EVENT_ERROR)) {
        events[count++] = link->failure;
        link->failure.kind = PRS_EVENT_DONE;
    }
    for (; count < PRS_POLL_MOST && link->first != link->last; link->base.receives++) {
        const struct prs_ofi_arrival *arrival = &link->arrival[link->first++ % PRS_OFI_ARRIVALS];

        events[count++] = (struct prs_event){.kind = PRS_EVENT_ARRIVAL,
                                             .queue = link->base.queue[0]->id,
                                             .value = arrival->value,
                                             .bytes = arrival->bytes};
    }
    for (uint32_t i = 0; i < queue_count(link); i++) {
        struct prs_ofi_queue *queue = queue_at(link, i);
        uint32_t position;

        while (count < PRS_POLL_MOST && prs_reorder_next(&queue->reorder, &position))
            events[count++] = (struct prs_event){.kind = PRS_EVENT_DONE, .queue = queue->base.id, .value = position};
    }
    return count;
}

static int ofi_poll(struct prs_link *base, struct prs_event *events)
{
    struct prs_ofi_link *link = prs_ofi_link_of(base);
    int r;

    prs_spin_lock(&link->locked);
    link->polled = true;
    if (likely(link->ep != NULL)) {
        read_completions(link);
        push_waiting(link);
    }
    r = link->broken ? link->broken : link->ep ? report(link, events) : 0;
    prs_spin_unlock(&link->locked);
    return r;
}

/* Read completions, and post what waits, unless the owner does that itself. */
static void attend(struct prs_ofi_link *link)
{
    if (!prs_spin_trylock(&link->locked))
        return; /* its owner is there */
    if (!link->polled && link->ep) {
        read_completions(link);
        push_waiting(link);
    }
    link->polled = false;
    prs_spin_unlock(&link->locked);
}

/* ---- the end ---- */

static void ofi_kill(struct prs_link *base)
{
    struct prs_ofi_link *link = prs_ofi_link_of(base);

    base->stopped = true;
    prs_spin_lock(&link->locked);
    /* The other side may wait for the acknowledgement of what it has written here. */
    for (int i = 0; i < LAST_READS && link->ep && !link->broken; i++) {
        link->first = link->last;
        read_completions(link);
    }
    close_endpoint(link);
    prs_spin_unlock(&link->locked);
}

/* ---- the tables: one for each set of promises ---- */

#define OFI_OPS                                                                                                        \
    .name = "ofi", .has_providers = true, .devices = prs_ofi_devices, .open_device = prs_ofi_open_device,              \
    .close_device = prs_ofi_close_device, .probe = prs_ofi_probe, .locate = prs_ofi_locate,                            \
    .is_port = prs_ofi_is_port, .address_text = prs_ofi_address_text, .register_memory = prs_ofi_register_memory,      \
    .release_memory = prs_ofi_release_memory, .open = ofi_open, .close = ofi_close, .kill = ofi_kill,                  \
    .address = ofi_address, .connect = ofi_connect, .loopback = ofi_loopback, .post = ofi_post, .poll = ofi_poll

const struct prs_nic_ops prs_nic_ofi = {OFI_OPS};
const struct prs_nic_ops prs_ofi_tables[] = {
    [0] = {OFI_OPS},
    [PRS_OFI_IN_ORDER] = {OFI_OPS, .in_order = true},
    [PRS_OFI_FENCE] = {OFI_OPS, .fence = true},
    [PRS_OFI_IN_ORDER | PRS_OFI_FENCE] = {OFI_OPS, .in_order = true, .fence = true},
};

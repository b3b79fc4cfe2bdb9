/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/nic/ofi/link.h"

#include <errno.h>
#include <rdma/fi_errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "transport/nic/ofi/attend.h"
#include "transport/nic/ofi/caller.h"
#include "transport/nic/ofi/completion.h"
#include "transport/nic/ofi/device.h"
#include "transport/nic/ofi/ofi_nic.h"
#include "transport/nic/ofi/status.h"
#include "transport/util/compiler.h"
#include "transport/util/error.h"
#include "transport/util/log.h"
#include "transport/util/patience.h"
#include "transport/util/spin.h"

enum {
    LAST_READS = 256, /* of the completion queue, before an endpoint is closed or others have their turn */
    EMPTY_READS = 8,  /* so many in a row that find nothing end them earlier */
    HANG_UPS = 16,    /* at most so many looks for connections that the other side has begun */
    FAIL_MS = 2000,   /* a provider ends all requests of a connection at once */
    /* limit for requests of a link in flight on a shared endpoint: the provider completes them, or gives them up */
    STOP_MS = 5000,
    LOOK_NS = 100000000, /* of these times; see prs_patience_begin() */
    NUMBER_BYTES = 4,
};

/* ---- open, close ---- */

static void free_queue(struct prs_queue *base)
{
    struct prs_ofi_queue *queue = base ? prs_ofi_queue_of(base) : NULL;

    if (!queue)
        return;
    prs_reorder_fini(&queue->reorder);
    free(queue->request);
    free(queue->fence);
    free(queue);
}

/* depth: a power of two. Return NULL: no memory. */
static struct prs_ofi_queue *new_queue(struct prs_ofi_link *link, uint32_t id, uint32_t depth)
{
    static uint32_t numbers; /* atomic */
    struct prs_ofi_queue *queue = calloc(1, sizeof(*queue));
    bool fences = link->endpoint->shared && link->base.ops->fence;

    if (!queue)
        return NULL;
    queue->base =
        (struct prs_queue){.link = &link->base, .id = id, .number = __atomic_add_fetch(&numbers, 1, __ATOMIC_RELAXED)};
    queue->to = FI_ADDR_UNSPEC;
    queue->mask = depth - 1;
    queue->request = calloc(depth, sizeof(*queue->request));
    queue->fence = fences ? calloc(depth, sizeof(*queue->fence)) : NULL;
    if (!queue->request || (fences && !queue->fence) || prs_reorder_init(&queue->reorder, depth)) {
        free_queue(&queue->base);
        return NULL;
    }
    for (uint32_t i = 0; i < depth; i++) {
        queue->request[i].link = link;
        queue->request[i].queue = queue;
    }
    return queue;
}

static void free_link(struct prs_ofi_link *link)
{
    for (uint32_t i = 0; i < link->base.queue_count; i++)
        free_queue(link->base.queue[i]);
    free_queue(link->base.loopback);
    free(link->base.queue);
    free(link->arrival);
    free(link->known);
    free(link);
}

static void ofi_kill(struct prs_link *base);

static void ofi_close(struct prs_link *base)
{
    struct prs_ofi_link *link = prs_ofi_link_of(base);
    struct prs_ofi_endpoint *endpoint = link->endpoint;

    if (link->joined)
        ofi_kill(base); /* the device's slots for rows that are being read are given back, too */
    if (endpoint && !endpoint->shared)
        prs_ofi_endpoint_close(endpoint);
    else if (link->joined && !prs_ofi_endpoint_leave(endpoint, link))
        return;
    free_link(link);
}

static int check_name(struct prs_ofi_link *link)
{
    uint8_t name[256];
    size_t bytes = prs_ofi_endpoint_name(link->endpoint, name, sizeof(name)),
           most = PRS_NIC_ADDRESS_BYTES - (link->endpoint->shared ? NUMBER_BYTES : 0);

    if (bytes > most || !bytes)
        return prs_fail(-EOPNOTSUPP, "%s: %s: an endpoint's address has %zu bytes, of which %zu can be told",
                        link->base.rail->info.name, link->endpoint->device->info->fabric_attr->prov_name, bytes, most);
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

    link->room = PRS_OFI_FEW_ARRIVALS;
    link->arrival = calloc(link->room, sizeof(*link->arrival));
    base->queue = calloc(options->queues, sizeof(*base->queue));
    while (link->arrival && base->queue && base->queue_count < options->queues) {
        struct prs_ofi_queue *queue = new_queue(link, options->ids[base->queue_count], options->depth);

        if (!queue)
            break;
        queue->index = base->queue_count;
        base->queue[base->queue_count++] = &queue->base;
    }
    return base->queue_count == options->queues ? 0 : prs_nic_fail(base->rail, ENOMEM, "link");
}

/* The endpoint of all links of the device, or one of its own. */
static int get_endpoint(struct prs_ofi_link *link, const struct prs_link_options *options)
{
    struct prs_ofi_device *device = prs_ofi_device(options->rail->domain);
    uint32_t requests = options->queues * options->depth + options->loopback_depth;

    link->endpoint = device->endpoint;
    return link->endpoint ? 0
                          : prs_ofi_endpoint_open(device, false, requests + options->receive_depth, &link->endpoint);
}

static int ofi_open(const struct prs_link_options *options, struct prs_link **out)
{
    struct prs_ofi_link *link = calloc(1, sizeof(*link));
    int r;

    if (!link)
        return prs_nic_fail(options->rail, ENOMEM, "link");
    link->base = (struct prs_link){
        .ops = options->rail->domain->nic, .rail = options->rail, .own = *options->own, .stream_fd = -1};
    link->base.overrun = &link->overrun;
    link->free = free_link;
    link->to = FI_ADDR_UNSPEC;
    link->patience_ns = options->config->timeout_ms * 1000000ull;
    link->retry_ns = prs_config_patience_ns(options->config);
    link->loopback_depth = options->loopback_depth;
    r = check_remote(link, options);
    if (!r)
        r = get_endpoint(link, options);
    if (!r)
        r = open_queues(link, options);
    if (!r)
        r = check_name(link);
    if (!r)
        r = prs_ofi_endpoint_join(link->endpoint, link, &link->number);
    if (r) {
        ofi_close(&link->base);
        return r;
    }
    link->joined = true;
    if (!link->endpoint->shared)
        prs_ofi_attend_add(link->endpoint);
    *out = &link->base;
    return 0;
}

/* ---- connect ---- */

static void ofi_address(const struct prs_queue *queue, struct prs_nic_address *out)
{
    const struct prs_ofi_link *link = prs_ofi_link_of(queue->link);

    *out = (struct prs_nic_address){0}; /* that it has room was seen before: check_name() */
    out->length = (uint8_t)prs_ofi_endpoint_name(link->endpoint, out->bytes, sizeof(out->bytes));
    if (out->length && link->endpoint->shared) {
        memcpy(out->bytes + out->length, &link->number, NUMBER_BYTES);
        out->length += NUMBER_BYTES;
    }
}

/* Endpoints need no connection, so this only names the other endpoint. Some providers connect at the first request. */
static int aim_at(struct prs_ofi_queue *queue, const struct prs_nic_address *told)
{
    struct prs_ofi_link *link = prs_ofi_link_of(queue->base.link);
    struct prs_nic_address own;

    ofi_address(&queue->base, &own);
    if (told->length != own.length)
        return prs_fail(-EPROTO, "impossible address of an endpoint: %u bytes, ours has %u", told->length, own.length);
    if (link->endpoint->shared)
        memcpy(&queue->remote_number, told->bytes + told->length - NUMBER_BYTES, NUMBER_BYTES);
    return prs_ofi_endpoint_insert(link->endpoint, told->bytes, &queue->to);
}

static int ofi_connect(struct prs_queue *base, const struct prs_nic_address *told, const struct prs_nic_address *port,
                       int *error)
{
    struct prs_ofi_link *link = prs_ofi_link_of(base->link);
    struct prs_ofi_queue *queue = prs_ofi_queue_of(base), *first = prs_ofi_queue_of(link->base.queue[0]);
    int r = 0;

    (void)port, (void)error; /* open() was told it */
    if (queue != first && first->to != FI_ADDR_UNSPEC) {
        queue->to = first->to; /* the other side's queues have one endpoint, too */
        queue->remote_number = first->remote_number;
    } else {
        r = aim_at(queue, told);
        link->to = queue->to;
    }
    queue->landing = prs_ofi_landing(&link->remote);
    queue->landing_key = link->remote.landing_key;
    return r;
}

static int ofi_loopback(struct prs_link *base, uint32_t id, struct prs_queue **out)
{
    struct prs_ofi_link *link = prs_ofi_link_of(base);
    struct prs_nic_address told;
    struct prs_ofi_port own;
    struct prs_ofi_queue *queue;
    int r;

    if (!base->loopback) {
        queue = new_queue(link, id, link->loopback_depth);
        if (!queue)
            return prs_nic_fail(base->rail, ENOMEM, "queue");
        ofi_address(base->queue[0], &told);
        r = prs_ofi_read_port(&base->own.told, &own);
        if (!r && told.length) /* else its endpoint has ended, and all that is posted fails */
            r = aim_at(queue, &told);
        if (r) {
            free_queue(&queue->base);
            return r;
        }
        queue->landing = prs_ofi_landing(&own);
        queue->landing_key = own.landing_key;
        prs_spin_lock(&link->endpoint->locked); /* the thread of attend.c */
        base->loopback = &queue->base;
        link->loopback_failed = link->ended;
        prs_spin_unlock(&link->endpoint->locked);
    }
    *out = base->loopback;
    return 0;
}

/* ---- posting, polling ---- */

static int ofi_post(struct prs_queue *base, const struct prs_wr *ring, uint32_t mask, uint32_t first, uint32_t count)
{
    struct prs_ofi_link *link = prs_ofi_link_of(base->link);
    struct prs_ofi_queue *queue = prs_ofi_queue_of(base);
    int r = 0;

    prs_spin_lock(&link->endpoint->locked);
    if (unlikely((link->ended && link->endpoint->shared) || link->endpoint->broken)) {
        r = -ECONNRESET;
    } else {
        queue->ring = ring;
        queue->ring_mask = mask;
        if (queue->next == queue->upto)
            queue->next = first;
        if (unlikely(queue->next == first)) /* an empty ring goes on elsewhere */
            prs_reorder_begin(&queue->reorder, first);
        queue->upto = first + count;
        prs_ofi_push(link, queue);
    }
    prs_spin_unlock(&link->endpoint->locked);
    return r;
}

static int ofi_poll(struct prs_link *base, struct prs_event *events)
{
    struct prs_ofi_link *link = prs_ofi_link_of(base);
    struct prs_ofi_endpoint *endpoint = link->endpoint;
    int r = 0;

    prs_spin_lock(&endpoint->locked);
    link->polled = endpoint->polled = true;
    if (likely(!link->ended)) {
        (void)prs_ofi_read_completions(endpoint);
        prs_ofi_push_waiting(link);
    }
    if (likely(!link->ended || !endpoint->shared))
        r = link->broken ? link->broken : endpoint->broken ? endpoint->broken : prs_ofi_report(link, events);
    link->drained = link->ended && !r;
    prs_spin_unlock(&endpoint->locked);
    return r;
}

/* ---- the end ---- */

/* Under the lock of the endpoint, like those that follow. One empty read is not enough: net and tcp take several to
 * accept a connection that the other side has begun, or to see that it has ended. */
static void read_rest(struct prs_ofi_link *link, int most, int most_empty)
{
    struct prs_ofi_endpoint *endpoint = link->endpoint;

    for (int empty = 0; most-- > 0 && empty < most_empty && !endpoint->broken;) {
        prs_ofi_make_room(link);
        empty = prs_ofi_read_completions(endpoint) ? 0 : empty + 1;
    }
}

/* All that the closed endpoint has acknowledged: a provider that never says that there is no more is wrong. */
static void read_all(struct prs_ofi_link *link)
{
    struct prs_ofi_endpoint *endpoint = link->endpoint;
    struct prs_patience patience = prs_patience_begin(LOOK_NS);

    do {
        prs_ofi_make_room(link);
        if (endpoint->broken || !prs_ofi_read_completions(endpoint))
            return;
    } while (!prs_patience_is_over(&patience, FAIL_MS));
    PRS_WARN("%s: the provider still reports completions %d ms after the endpoint was closed: nothing tells what has "
             "arrived",
             link->base.rail->info.name, FAIL_MS);
    link->broken = -EPROTO;
}

/* One request has failed: wait for the outcome of the others. If one of them is done, `broken` is set. */
static void await_failures(struct prs_ofi_link *link)
{
    struct prs_ofi_endpoint *endpoint = link->endpoint;
    struct prs_patience patience = prs_patience_begin(LOOK_NS);

    while (link->failed && link->unfinished && !link->broken && !endpoint->broken) {
        read_rest(link, LAST_READS, 1);
        if (prs_patience_is_over(&patience, FAIL_MS)) {
            PRS_WARN(
                "%s: %u requests are still in flight %d ms after an earlier one has failed: nothing tells what has "
                "arrived",
                link->base.rail->info.name, link->unfinished, FAIL_MS);
            link->broken = -EPROTO;
        }
        sched_yield();
    }
}

/* Read every acknowledged request, before the close or after it, so that both sides count the same. The other side may
 * also wait for acknowledgements, which are sent while the queue is read. */
static void end_own(struct prs_ofi_link *link, bool failed)
{
    struct prs_ofi_endpoint *endpoint = link->endpoint;
    int listening = -1, r;

    read_rest(link, LAST_READS, EMPTY_READS);
    if (failed)
        await_failures(link);
    for (int i = 0; i < HANG_UPS && prs_ofi_hang_up(endpoint, &listening); i++)
        read_rest(link, LAST_READS, EMPTY_READS);
    r = fi_close(&endpoint->ep->fid);
    if (r) {
        PRS_WARN("%s: cannot close an endpoint: %s", link->base.rail->info.name, prs_ofi.strerror(-r));
        link->broken = prs_ofi_errno(-r);
    }
    endpoint->ep = NULL;
    /* Elsewhere nobody asks what was acknowledged. */
    if (link->base.rail->domain->nic->fails_over)
        read_all(link);
    prs_ofi_rows_leave(link);
    link->in_flight = 0;
    link->loopback_failed = link->base.loopback;
    prs_ofi_break_queue(prs_ofi_queue_of(link->base.queue[0]), FI_ECANCELED);
}

/* Late requests of this link could do harm, since their source and target may be reused after this. If they do not end,
 * the endpoint ends for all its links, which is better than wrong bytes. */
static void end_shared(struct prs_ofi_link *link)
{
    struct prs_ofi_endpoint *endpoint = link->endpoint;
    struct prs_patience patience = prs_patience_begin(LOOK_NS);

    while (link->in_flight && !endpoint->broken) {
        int reads = LAST_READS; /* between two yields, each of which may take long where the CPU is busy */

        do
            prs_ofi_uncrowd(endpoint); /* else nothing is read, and the endpoint would end for all links */
        while (prs_ofi_read_completions(endpoint) && link->in_flight && --reads);
        if (link->in_flight && prs_patience_is_over(&patience, STOP_MS)) {
            PRS_WARN("%s: %u requests of a connection that ends are still in flight after %d ms: giving up the "
                     "endpoint, which all connections of the device share",
                     link->base.rail->info.name, link->in_flight, STOP_MS);
            endpoint->broken = -ECONNRESET;
        }
        prs_spin_unlock(&endpoint->locked);
        sched_yield(); /* others post and poll */
        prs_spin_lock(&endpoint->locked);
    }
}

static void end_link(struct prs_link *base, bool failed)
{
    struct prs_ofi_link *link = prs_ofi_link_of(base);

    base->stopped = true;
    prs_spin_lock(&link->endpoint->locked);
    if (!link->ended) {
        link->ended = true;
        for (uint32_t i = 0; i < prs_ofi_queue_count(link); i++)
            prs_ofi_queue_at(link, i)->next = prs_ofi_queue_at(link, i)->upto;
        if (link->endpoint->shared) {
            prs_ofi_make_room(link);
            end_shared(link);
        } else {
            end_own(link, failed);
        }
    }
    prs_spin_unlock(&link->endpoint->locked);
}

static void ofi_kill(struct prs_link *link)
{
    end_link(link, false);
}

/* Called only where each link has its own endpoint; the loopback queue ends with it. */
static void ofi_stop(struct prs_link *link)
{
    end_link(link, true);
}

static uint32_t ofi_taken(const struct prs_queue *queue)
{
    return ((const struct prs_ofi_queue *)queue)->taken;
}

static bool ofi_drained(const struct prs_link *base)
{
    return ((const struct prs_ofi_link *)base)->drained;
}

/* ---- the tables: one for each set of promises ---- */

#define OFI_OPS                                                                                                        \
    .name = "ofi", .fails_early = true, .has_providers = true, .devices = prs_ofi_devices,                             \
    .open_device = prs_ofi_open_device, .close_device = prs_ofi_close_device, .probe = prs_ofi_probe,                  \
    .locate = prs_ofi_locate, .is_port = prs_ofi_is_port, .address_text = prs_ofi_address_text,                        \
    .register_memory = prs_ofi_register_memory, .release_memory = prs_ofi_release_memory, .open = ofi_open,            \
    .close = ofi_close, .stop = ofi_stop, .kill = ofi_kill, .address = ofi_address, .connect = ofi_connect,            \
    .loopback = ofi_loopback, .post = ofi_post, .taken = ofi_taken, .drained = ofi_drained, .poll = ofi_poll

#define PROMISES(bits)                                                                                                 \
    [bits] = {OFI_OPS, .in_order = (bits)&PRS_OFI_IN_ORDER, .fence = (bits)&PRS_OFI_FENCE,                             \
              .fails_over = (bits)&PRS_OFI_FAILS_OVER}

const struct prs_nic_ops prs_nic_ofi = {OFI_OPS};
const struct prs_nic_ops prs_ofi_tables[] = {PROMISES(0), PROMISES(1), PROMISES(2), PROMISES(3),
                                             PROMISES(4), PROMISES(5), PROMISES(6), PROMISES(7)};

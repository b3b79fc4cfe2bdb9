/* SPDX-License-Identifier: Apache-2.0 */
#include "plugin/connect.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "plugin/comm.h"
#include "plugin/device.h"
#include "plugin/profile.h"
#include "plugin/request.h"
#include "plugin/result.h"
#include "plugin/sender_info.h"
#include "transport/util/error.h"
#include "transport/util/log.h"

static_assert(sizeof(struct prs_handle) <= NET_HANDLE_BYTES, "NCCL transfers the handle");

enum {
    FIRST_SEQUENCE = 1,                                /* not 0: see cts_check() */
    RECV_MAX_OPS = COMM_REQUESTS + COMM_ANNOUNCEMENTS, /* flushes and writes of records */
};

static int comms; /* atomic: number of comms, with the unfinished ones */

static void count_comm(int change)
{
    __atomic_add_fetch(&comms, change, __ATOMIC_RELAXED);
}

bool connect_has_comms(void)
{
    return __atomic_load_n(&comms, __ATOMIC_RELAXED) > 0;
}

/* ---- sender ---- */

/* Says which unfinished connection a call of connect continues. It is in the caller's bytes of the handle, since NCCL
 * passes the same memory to every call. The seal distinguishes it from the bytes of a foreign handle. */
struct connect_mark {
    uint64_t comm, seal;
};
static_assert(sizeof(struct connect_mark) == PRS_HANDLE_CALLER_BYTES, "fills the caller's bytes");

static uint64_t seal_of(uint64_t comm)
{
    return (comm ^ 0x9e3779b97f4a7c15u) * 0xff51afd7ed558ccdu;
}

static void *caller_bytes(void *handle)
{
    return (uint8_t *)handle + PRS_HANDLE_BYTES - PRS_HANDLE_CALLER_BYTES;
}

static struct send_comm *find_unfinished(struct plugin_context *context, void *handle)
{
    struct connect_mark mark;
    struct send_comm *comm;

    memcpy(&mark, caller_bytes(handle), sizeof(mark));
    if (mark.seal != seal_of(mark.comm))
        return NULL;
    device_lock();
    for (comm = context->connecting; comm && (uintptr_t)comm != mark.comm; comm = comm->next)
        ;
    device_unlock();
    return comm;
}

static void remember_unfinished(struct plugin_context *context, struct send_comm *comm, void *handle)
{
    struct connect_mark mark = {.comm = (uintptr_t)comm, .seal = seal_of((uintptr_t)comm)};

    memcpy(caller_bytes(handle), &mark, sizeof(mark));
    device_lock();
    comm->context = context;
    comm->next = context->connecting;
    context->connecting = comm;
    device_unlock();
}

static void forget_unfinished(struct send_comm *comm, void *handle)
{
    struct send_comm **link;

    memset(caller_bytes(handle), 0, PRS_HANDLE_CALLER_BYTES);
    device_lock();
    for (link = &comm->context->connecting; *link != comm; link = &(*link)->next)
        ;
    *link = comm->next;
    comm->context = NULL;
    device_unlock();
}

static void count_in_metrics(struct comm *comm)
{
    comm->metrics.peer = comm->peer;
    metrics_add(&comm->metrics, "net", comm->fabric, &comm->rails);
}

static void free_send(struct send_comm *comm)
{
    metrics_remove(&comm->base.metrics);
    prs_connector_close(comm->connector);
    prs_peer_close(comm->base.peer);
    cts_ring_close(comm->ring, comm->ring_region); /* after the queues, so that the peer can no longer write to it */
    profile_free(&comm->base);
    free(comm);
    count_comm(-1);
}

/* Return 0 or -errno, logged. */
static int start_connecting(struct plugin_context *context, int device, int traffic_class, const void *handle,
                            struct send_comm **out)
{
    /* NCCL asks again until the other rank accepts, which may wait for a third one that is minutes late. */
    struct prs_peer_options options = {.max_ops = COMM_REQUESTS,
                                       .traffic_class = traffic_class,
                                       .patient = true,
                                       .replaces_rails = true,
                                       .no_signals = true};
    struct sender_info info = {.magic = SENDER_INFO_MAGIC, .version = SENDER_INFO_VERSION, .ring_records = CTS_RING};
    struct prs_handle copy;
    struct send_comm *comm;
    int r;

    comm = calloc(1, sizeof(*comm));
    if (!comm)
        return prs_fail(-ENOMEM, "connect: out of memory");
    count_comm(1);
    comm->base.kind = COMM_SEND;
    comm->base.fabric = context->fabric;
    comm->base.profile = context->profile;
    comm->head = FIRST_SEQUENCE;
    comm->free = request_pool(comm->request, &comm->base);
    r = device_rails(context, device, &comm->base.rails);
    if (r < 0)
        goto free_comm;
    r = cts_ring_open(comm->base.fabric, &comm->base.rails, &comm->ring, &comm->ring_region);
    if (r < 0)
        goto free_comm;
    info.ring_addr = (uintptr_t)comm->ring;
    prs_region_keys(comm->ring_region, &info.ring_keys);
    options.private_data = &info;
    options.private_bytes = sizeof(info);
    memcpy(&copy, handle, sizeof(copy));
    r = prs_connect(comm->base.fabric, &comm->base.rails, &copy, &options, &comm->connector);
    if (r < 0)
        goto free_comm;
    *out = comm;
    return 0;
free_comm:
    comm->connector = NULL;
    free_send(comm);
    return r;
}

net_result connect_with_class(struct plugin_context *context, int device, int traffic_class, void *handle, void **out)
{
    struct send_comm *comm;
    int r;

    *out = NULL;
    comm = find_unfinished(context, handle);
    if (!comm) {
        r = start_connecting(context, device, traffic_class, handle, &comm);
        if (r < 0)
            return result_from_errno(r);
        remember_unfinished(context, comm, handle);
    }
    r = prs_connector_step(comm->connector, &comm->base.peer);
    if (r == PRS_AGAIN)
        return NET_SUCCESS;
    comm->connector = NULL; /* its last step has freed it */
    forget_unfinished(comm, handle);
    if (r < 0) {
        comm->base.peer = NULL;
        free_send(comm);
        return result_from_errno(r);
    }
    count_in_metrics(&comm->base);
    PRS_DEBUG("send comm on device %d: %s", device, prs_peer_describe(comm->base.peer));
    *out = comm;
    return NET_SUCCESS;
}

net_result connect_connect(void *context, int device, void *handle, void **send_comm,
                           struct net_device_handle **offload)
{
    (void)offload; /* only for plugins that a GPU drives */
    return connect_with_class(context, device, ((struct plugin_context *)context)->traffic_class, handle, send_comm);
}

net_result connect_finalize(void *handle)
{
    struct plugin_context *context = handle;
    struct send_comm *comm, *next;

    if (!context) /* NCCL 2.28 and 2.29 finalize a context whose init has failed */
        return NET_SUCCESS;
    device_lock();
    comm = context->connecting;
    context->connecting = NULL;
    device_unlock();
    for (; comm; comm = next) {
        next = comm->next;
        free_send(comm);
    }
    return device_finalize(context);
}

net_result connect_close_send(void *send_comm)
{
    if (send_comm)
        free_send(send_comm);
    return NET_SUCCESS;
}

/* ---- receiver ---- */

static void free_recv(struct recv_comm *comm)
{
    metrics_remove(&comm->base.metrics);
    prs_peer_close(comm->base.peer);
    cts_ring_close(comm->mirror, comm->mirror_region);
    profile_free(&comm->base);
    free(comm);
    count_comm(-1);
}

net_result connect_listen(void *handle_context, int device, void *handle, void **out)
{
    struct plugin_context *context = handle_context;
    struct prs_handle made = {{0}};
    struct listen_comm *comm;
    int r;

    *out = NULL;
    comm = calloc(1, sizeof(*comm));
    if (!comm)
        return result_from_errno(prs_fail(-ENOMEM, "listen: out of memory"));
    comm->base.kind = COMM_LISTEN;
    comm->base.fabric = context->fabric;
    comm->base.profile = context->profile;
    comm->traffic_class = context->traffic_class;
    r = device_rails(context, device, &comm->base.rails);
    if (!r)
        r = prs_listen(comm->base.fabric, &comm->base.rails, &made, &comm->listener);
    if (r < 0) {
        free(comm);
        return result_from_errno(r);
    }
    memset(caller_bytes(&made), 0, PRS_HANDLE_CALLER_BYTES);
    memcpy(handle, &made, sizeof(made));
    count_comm(1);
    *out = comm;
    return NET_SUCCESS;
}

/* Return 0 or -errno, logged. */
static int make_receiver(const struct listen_comm *listen, struct recv_comm **out)
{
    struct recv_comm *comm = calloc(1, sizeof(*comm));
    int r;

    if (!comm)
        return prs_fail(-ENOMEM, "accept: out of memory");
    comm->base.kind = COMM_RECV;
    comm->base.fabric = listen->base.fabric;
    comm->base.rails = listen->base.rails;
    comm->base.profile = listen->base.profile;
    comm->next = comm->announced = comm->tail = comm->written = comm->signaled = comm->arrived = FIRST_SEQUENCE;
    comm->free = request_pool(comm->request, &comm->base);
    r = cts_ring_open(comm->base.fabric, &comm->base.rails, &comm->mirror, &comm->mirror_region);
    if (r < 0) {
        free(comm);
        return r;
    }
    count_comm(1);
    *out = comm;
    return 0;
}

/* Check and keep the sender's private data. Return 0 or -EPROTO, logged. */
static int read_sender_info(struct recv_comm *comm)
{
    uint32_t bytes = 0;
    const void *private_data = prs_peer_private(comm->base.peer, &bytes);
    struct sender_info info;
    int r = sender_info_read(private_data, bytes, prs_peer_describe(comm->base.peer), &info);

    if (r)
        return r;
    comm->ring_addr = info.ring_addr;
    comm->ring_keys = info.ring_keys;
    return 0;
}

net_result connect_accept(void *listen_comm, void **out, struct net_device_handle **offload)
{
    struct listen_comm *listen = listen_comm;
    struct prs_peer_options options = {.on_notify = request_arrived,
                                       .max_ops = RECV_MAX_OPS,
                                       .traffic_class = listen->traffic_class,
                                       .replaces_rails = true,
                                       .no_signals = true};
    struct recv_comm *comm;
    int r;

    (void)offload;
    *out = NULL;
    if (!listen->accepting) {
        r = make_receiver(listen, &listen->accepting);
        if (r < 0)
            return result_from_errno(r);
    }
    comm = listen->accepting;
    r = prs_accept(listen->listener, &options, &comm->base.peer);
    if (r == PRS_AGAIN)
        return NET_SUCCESS;
    listen->accepting = NULL;
    if (r < 0) {
        comm->base.peer = NULL;
    } else {
        prs_peer_set_user(comm->base.peer, comm); /* of several handshakes at a time, any may be the first to end */
        r = read_sender_info(comm);
    }
    if (r < 0) {
        free_recv(comm);
        return result_from_errno(r);
    }
    count_in_metrics(&comm->base);
    PRS_DEBUG("receive comm: %s", prs_peer_describe(comm->base.peer));
    *out = comm;
    return NET_SUCCESS;
}

net_result connect_close_recv(void *recv_comm)
{
    if (recv_comm)
        free_recv(recv_comm);
    return NET_SUCCESS;
}

net_result connect_close_listen(void *listen_comm)
{
    struct listen_comm *comm = listen_comm;

    if (!comm)
        return NET_SUCCESS;
    prs_listener_close(comm->listener);
    if (comm->accepting)
        free_recv(comm->accepting);
    free(comm);
    count_comm(-1);
    return NET_SUCCESS;
}

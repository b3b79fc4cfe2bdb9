/* SPDX-License-Identifier: Apache-2.0 */
/* Event channels: the descriptor that programs poll, and the queue of events. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "tools/softnic/cm/cm.h"
#include "tools/softnic/world/world.h"

enum { SOCKETS_AT_ONCE = 16 };

struct cm_event {
    struct sn_rdma_event abi; /* first */
    struct cm_event *next;
    struct cm_id *counted; /* the id whose destruction waits for the acknowledgement */
    uint8_t private_data[CM_PRIVATE_MAX];
};

static pthread_cond_t acked = PTHREAD_COND_INITIALIZER;
static struct cm_channel *channels; /* all channels that are not destroyed yet */

static struct cm_channel *channel_of(struct cm_id *id)
{
    return (struct cm_channel *)id->abi.channel;
}

static int watch(struct cm_channel *channel, struct cm_socket *socket)
{
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = socket};

    return epoll_ctl(channel->abi.fd, EPOLL_CTL_ADD, socket->fd, &event) ? -errno : 0;
}

struct sn_rdma_channel *rdma_create_event_channel(void)
{
    struct cm_channel *channel = calloc(1, sizeof(*channel));
    int error = ENOMEM;

    if (!channel)
        return NULL;
    channel->events_end = &channel->events;
    channel->abi.fd = epoll_create1(EPOLL_CLOEXEC);
    channel->queued.fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    channel->timer.fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    if (channel->abi.fd >= 0 && channel->queued.fd >= 0 && channel->timer.fd >= 0 &&
        !watch(channel, &channel->queued) && !watch(channel, &channel->timer)) {
        cm_lock();
        channel->next = channels;
        channels = channel;
        cm_unlock();
        return &channel->abi;
    }
    error = errno;
    rdma_destroy_event_channel(&channel->abi);
    errno = error;
    return NULL;
}

static void close_if_open(int fd)
{
    if (fd >= 0)
        close(fd);
}

void rdma_destroy_event_channel(struct sn_rdma_channel *abi)
{
    struct cm_channel *channel = (struct cm_channel *)abi, **at = &channels;

    if (!channel)
        return;
    cm_lock();
    while (*at && *at != channel)
        at = &(*at)->next;
    if (*at)
        *at = channel->next;
    while (channel->ids) /* ids of a program that destroys the channel first: they get no more events */
        if (channel->ids->state == CM_ARRIVING)
            cm_id_free_locked(channel->ids);
        else
            cm_channel_leave_locked(channel->ids);
    cm_unlock();
    close_if_open(channel->timer.fd);
    close_if_open(channel->queued.fd);
    close_if_open(channel->abi.fd);
    free(channel);
}

/* ---- the ids of a channel ---- */

void cm_channel_join_locked(struct cm_channel *channel, struct cm_id *id)
{
    id->abi.channel = &channel->abi;
    id->next = channel->ids;
    id->link = &channel->ids;
    if (id->next)
        id->next->link = &id->next;
    channel->ids = id;
}

static void unlink_id(struct cm_id *id)
{
    *id->link = id->next;
    if (id->next)
        id->next->link = id->link;
    id->abi.channel = NULL;
}

void cm_watch_locked(struct cm_id *id)
{
    for (uint32_t i = 0; i < id->socket_count; i++) {
        int r = id->abi.channel ? watch(channel_of(id), &id->sockets[i]) : 0;

        id->sockets[i].watched = true;
        if (r)
            sn_log("rdma_cm: watching a socket: %s", strerror(-r));
    }
}

static bool unwatch(struct cm_id *id)
{
    bool watched = false;

    for (uint32_t i = 0; i < id->socket_count; i++) {
        watched |= id->sockets[i].watched;
        if (id->sockets[i].watched && id->abi.channel)
            epoll_ctl(id->abi.channel->fd, EPOLL_CTL_DEL, id->sockets[i].fd, NULL);
        id->sockets[i].watched = false;
    }
    return watched;
}

void cm_unwatch_locked(struct cm_id *id)
{
    unwatch(id);
}

/* Remove the events of an id from the queue, and return them in order. */
static struct cm_event *events_take(struct cm_channel *channel, const struct cm_id *id)
{
    struct cm_event *taken = NULL, **end = &taken;

    for (struct cm_event **at = &channel->events; *at;) {
        struct cm_event *event = *at;

        if (event->counted != id && event->abi.id != &id->abi) {
            at = &event->next;
            continue;
        }
        *at = event->next;
        event->next = NULL;
        *end = event;
        end = &event->next;
    }
    for (channel->events_end = &channel->events; *channel->events_end;)
        channel->events_end = &(*channel->events_end)->next;
    return taken;
}

static void queued_clear(struct cm_channel *channel)
{
    uint64_t count;

    if (!channel->events && read(channel->queued.fd, &count, sizeof(count)) < 0 && errno != EAGAIN)
        sn_log("rdma_cm: reading an eventfd: %s", strerror(errno));
}

static void event_put(struct cm_channel *channel, struct cm_event *event)
{
    static const uint64_t one = 1;

    event->next = NULL;
    *channel->events_end = event;
    channel->events_end = &event->next;
    if (channel->events == event && write(channel->queued.fd, &one, sizeof(one)) < 0)
        sn_log("rdma_cm: writing an eventfd: %s", strerror(errno));
}

void cm_channel_leave_locked(struct cm_id *id)
{
    struct cm_channel *channel = channel_of(id);

    if (!channel)
        return;
    unwatch(id);
    for (struct cm_event *event = events_take(channel, id), *next; event; event = next) {
        struct cm_id *child = event->abi.listen_id ? cm_id_of(event->abi.id) : NULL;

        next = event->next;
        free(event);
        if (child && child != id) /* the program has never seen it */
            cm_id_free_locked(child);
    }
    queued_clear(channel);
    unlink_id(id);
}

void cm_channel_move_locked(struct cm_id *id, struct cm_channel *to)
{
    struct cm_channel *from = channel_of(id);
    struct cm_event *events = NULL;
    bool watched = false;

    if (from == to)
        return;
    if (from) {
        for (struct cm_id *other = from->ids, *next; other; other = next) {
            next = other->next;
            if (other->listener == id)
                cm_channel_move_locked(other, to);
        }
        watched = unwatch(id);
        events = events_take(from, id);
        queued_clear(from);
        unlink_id(id);
    }
    cm_channel_join_locked(to, id);
    if (watched)
        cm_watch_locked(id);
    for (struct cm_event *event = events, *next; event; event = next) {
        next = event->next;
        event_put(to, event);
    }
    if (id->deadline_ns)
        cm_wake_at_locked(id, id->deadline_ns);
}

/* ---- time ---- */

static void timer_set(struct cm_channel *channel, uint64_t ns)
{
    struct itimerspec at = {.it_value = {(time_t)(ns / 1000000000), (long)(ns % 1000000000)}};

    channel->timer_ns = ns;
    if (timerfd_settime(channel->timer.fd, TFD_TIMER_ABSTIME, &at, NULL))
        sn_log("rdma_cm: setting a timer: %s", strerror(errno));
}

void cm_wake_at_locked(struct cm_id *id, uint64_t ns)
{
    struct cm_channel *channel = channel_of(id);

    id->deadline_ns = ns;
    if (channel && ns && (!channel->timer_ns || ns < channel->timer_ns))
        timer_set(channel, ns);
}

static void time_passed(struct cm_channel *channel)
{
    uint64_t now = sn_now_ns(), next_ns = 0, expirations;

    if (read(channel->timer.fd, &expirations, sizeof(expirations)) < 0 && errno != EAGAIN)
        sn_log("rdma_cm: reading a timer: %s", strerror(errno));
    for (struct cm_id *id = channel->ids, *next; id; id = next) {
        next = id->next;
        if (!id->deadline_ns || id->deadline_ns > now)
            continue;
        id->deadline_ns = 0;
        cm_timeout_locked(id); /* may free it */
    }
    for (struct cm_id *id = channel->ids; id; id = id->next)
        if (id->deadline_ns && (!next_ns || id->deadline_ns < next_ns))
            next_ns = id->deadline_ns;
    timer_set(channel, next_ns);
}

/* ---- events ---- */

static void ud_param(struct cm_event *event, const struct cm_message *said)
{
    struct sn_rdma_ud_param *ud = &event->abi.param.ud;

    ud->qp_num = said->qpn;
    ud->qkey = said->qkey;
    ud->ah_attr = (struct ibv_ah_attr){.is_global = 1, .port_num = 1, .grh = {.sgid_index = 1, .hop_limit = 64}};
    memcpy(ud->ah_attr.grh.dgid.raw, said->gid, sizeof(said->gid));
}

/* The peer's initiator depth is this side's responder resources, and the other way round. */
static void conn_param(struct cm_event *event, const struct cm_message *said)
{
    struct sn_rdma_conn_param *conn = &event->abi.param.conn;

    conn->responder_resources = said->initiator_depth;
    conn->initiator_depth = said->responder_resources;
    conn->flow_control = said->flow_control;
    conn->retry_count = said->retry_count;
    conn->rnr_retry_count = said->rnr_retry_count;
    conn->srq = said->srq;
    conn->qp_num = said->qpn;
}

static void tell(struct cm_id *counted, struct cm_id *id, enum sn_rdma_event_type type, int status,
                 const struct cm_message *said)
{
    struct cm_event *event = channel_of(counted) ? calloc(1, sizeof(*event)) : NULL;
    uint8_t bytes;

    if (!event) {
        if (counted->abi.channel)
            sn_log("rdma_cm: no memory for an event");
        return;
    }
    event->abi.id = &id->abi;
    event->abi.listen_id = counted == id ? NULL : &counted->abi;
    event->abi.event = type;
    event->abi.status = status;
    event->counted = counted;
    bytes = said ? cm_private_bytes(said->type, cm_is_datagram(id)) : 0;
    if (bytes)
        memcpy(event->private_data, said->private_data, said->private_len);
    if (cm_is_datagram(id)) {
        if (said)
            ud_param(event, said);
        event->abi.param.ud.private_data = bytes ? event->private_data : NULL;
        event->abi.param.ud.private_data_len = bytes;
    } else {
        if (said)
            conn_param(event, said);
        event->abi.param.conn.private_data = bytes ? event->private_data : NULL;
        event->abi.param.conn.private_data_len = bytes;
    }
    event_put(channel_of(counted), event);
}

void cm_tell_locked(struct cm_id *id, enum sn_rdma_event_type type, int status, const struct cm_message *said)
{
    tell(id, id, type, status, said);
}

void cm_tell_request_locked(struct cm_id *listener, struct cm_id *child)
{
    tell(listener, child, SN_RDMA_CONNECT_REQUEST, 0, &child->remote);
}

/* Handle one socket that is ready, or else the timer. Sockets come first, since a message that has arrived is not late.
 * Only one at a time: handling it may free ids that the other entries of `ready` point to. */
static void progress(struct cm_channel *channel)
{
    struct epoll_event ready[SOCKETS_AT_ONCE];
    int n = epoll_wait(channel->abi.fd, ready, SOCKETS_AT_ONCE, 0);
    bool late = false;

    for (int i = 0; i < n; i++) {
        struct cm_socket *socket = ready[i].data.ptr;

        if (socket->id) {
            cm_socket_event_locked(socket);
            return;
        }
        late |= socket == &channel->timer;
    }
    if (late)
        time_passed(channel);
}

static struct cm_event *event_get(struct cm_channel *channel)
{
    struct cm_event *event;

    if (!channel->events)
        progress(channel);
    event = channel->events;
    if (!event)
        return NULL;
    channel->events = event->next;
    if (!channel->events)
        channel->events_end = &channel->events;
    queued_clear(channel);
    event->counted->events_unacked++;
    return event;
}

static bool may_block(int fd)
{
    int flags = fcntl(fd, F_GETFL);

    return flags >= 0 && !(flags & O_NONBLOCK);
}

/* Take the lock to use a channel. Programs destroy a channel while a thread of theirs asks for events, as rping does
 * at its end. In the kernel such a thread keeps waiting, since closing a descriptor does not wake a thread that reads
 * from it. Here the thread may be awake, or may ask late. It then waits until the process ends or the thread is
 * cancelled. */
static void lock_channel(const struct cm_channel *channel)
{
    const struct cm_channel *found;

    cm_lock();
    for (found = channels; found && found != channel; found = found->next) {
    }
    if (found)
        return;
    cm_unlock();
    sn_log("rdma_get_cm_event: the channel was destroyed, so this thread waits until the process ends");
    for (;;)
        pause();
}

int rdma_get_cm_event(struct sn_rdma_channel *abi, struct sn_rdma_event **out)
{
    struct cm_channel *channel = (struct cm_channel *)abi;
    struct cm_event *event;
    bool migrate, block;

    if (!channel || !out)
        return cm_fail(EINVAL);
    for (;;) {
        struct pollfd fd = {.events = POLLIN};

        lock_channel(channel);
        fd.fd = abi->fd;
        block = may_block(fd.fd);
        cm_unlock();
        if (poll(&fd, 1, block ? -1 : 0) < 0)
            return -1; /* EINTR */
        lock_channel(channel);
        event = event_get(channel);
        migrate = event && event->abi.event == SN_RDMA_CONNECT_REQUEST && event->counted->sync;
        cm_unlock();
        if (event)
            break;
        if (!block && !fd.revents)
            return cm_fail(EAGAIN);
    }
    /* Requests for a synchronous listener are synchronous. */
    if (migrate && rdma_migrate_id(event->abi.id, NULL))
        sn_log("rdma_cm: a connection gets no channel of its own: %s", strerror(errno));
    *out = &event->abi;
    return 0;
}

int rdma_ack_cm_event(struct sn_rdma_event *abi)
{
    struct cm_event *event = (struct cm_event *)abi;

    if (!event)
        return cm_fail(EINVAL);
    cm_lock();
    event->counted->events_unacked--;
    pthread_cond_broadcast(&acked);
    cm_unlock();
    free(event);
    return 0;
}

void cm_wait_acked_locked(struct cm_id *id)
{
    while (id->events_unacked)
        pthread_cond_wait(&acked, &cm_mutex);
}

int cm_sync(struct cm_id *id)
{
    int status;

    if (id->abi.event)
        rdma_ack_cm_event(id->abi.event);
    id->abi.event = NULL;
    if (rdma_get_cm_event(id->abi.channel, &id->abi.event))
        return -1;
    status = id->abi.event->status;
    if (id->abi.event->event == SN_RDMA_REJECTED)
        return cm_fail(ECONNREFUSED);
    return status ? cm_fail(status < 0 ? -status : EIO) : 0;
}

const char *rdma_event_str(enum sn_rdma_event_type type)
{
    static const char *const names[SN_RDMA_EVENTS] = {
        "RDMA_CM_EVENT_ADDR_RESOLVED",  "RDMA_CM_EVENT_ADDR_ERROR",      "RDMA_CM_EVENT_ROUTE_RESOLVED",
        "RDMA_CM_EVENT_ROUTE_ERROR",    "RDMA_CM_EVENT_CONNECT_REQUEST", "RDMA_CM_EVENT_CONNECT_RESPONSE",
        "RDMA_CM_EVENT_CONNECT_ERROR",  "RDMA_CM_EVENT_UNREACHABLE",     "RDMA_CM_EVENT_REJECTED",
        "RDMA_CM_EVENT_ESTABLISHED",    "RDMA_CM_EVENT_DISCONNECTED",    "RDMA_CM_EVENT_DEVICE_REMOVAL",
        "RDMA_CM_EVENT_MULTICAST_JOIN", "RDMA_CM_EVENT_MULTICAST_ERROR", "RDMA_CM_EVENT_ADDR_CHANGE",
        "RDMA_CM_EVENT_TIMEWAIT_EXIT",
    };

    return (unsigned)type < SN_RDMA_EVENTS ? names[type] : "UNKNOWN EVENT";
}

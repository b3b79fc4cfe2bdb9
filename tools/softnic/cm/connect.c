/* SPDX-License-Identifier: Apache-2.0 */
/* The life of a connection: request, reply, ready; refusal; and its end, which is the end of the socket. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tools/softnic/cm/cm.h"
#include "tools/softnic/world/world.h"

#define MS 1000000ull

enum {
    ANSWER_MS = 60000, /* limit for a peer's program to answer: about the time of InfiniBand's 15 retries */
    REQUEST_MS = 5000, /* limit from a connection to its request, which its sender makes in one call */
    ACCEPT_PAUSE_MS = 100,
    /* time between two attempts, while the listener's queue is full, a cable is pulled, or nobody listens yet */
    REDIAL_MS = 5,
    /* time for a program to begin to listen: some need as long as a hardware NIC takes to connect */
    LISTEN_MS = 500,
    TIMEWAIT_MS = 1000, /* as on RoCE, whose packets may live that long */
    RETRIES = 7,
    BACKLOG = 1024,
};

static uint64_t in_ms(uint64_t ms)
{
    return sn_now_ns() + ms * MS;
}

/* The limit can be set, so that tests need not wait as long. */
static uint64_t answer_ms(void)
{
    const char *text = getenv("SOFTNIC_CM_TIMEOUT_MS");
    char *end;
    unsigned long ms;

    if (!text)
        return ANSWER_MS;
    ms = strtoul(text, &end, 10);
    if (*text >= '1' && *text <= '9' && !*end && ms <= ANSWER_MS)
        return ms;
    sn_log("SOFTNIC_CM_TIMEOUT_MS=%s: want a number of 1 to %d", text, ANSWER_MS);
    return ANSWER_MS;
}

/* ---- saying ---- */

static void start_message(struct cm_id *id, enum cm_type type)
{
    struct cm_message *m = &id->local;

    m->magic = CM_MAGIC;
    m->version = CM_VERSION;
    m->type = (uint8_t)type;
    m->datagram = cm_is_datagram(id);
    m->private_len = 0;
}

static int add_private(struct cm_message *m, const void *data, size_t len)
{
    if (len > cm_private_bytes(m->type, m->datagram) || (len && !data))
        return EINVAL;
    memset(m->private_data, 0, sizeof(m->private_data));
    if (len)
        memcpy(m->private_data, data, len);
    m->private_len = (uint8_t)len;
    return 0;
}

static int say(struct cm_id *id)
{
    ssize_t n = id->socket_count ? send(id->sockets[0].fd, &id->local, sizeof(id->local), MSG_NOSIGNAL) : -1;

    if (!id->socket_count)
        return ENOTCONN;
    return n < 0 ? errno : 0;
}

/* Fill in what a request or a reply says about this side. */
static int describe(struct cm_id *id, enum cm_type type, const struct sn_rdma_conn_param *param)
{
    struct cm_message *m = &id->local;
    uint32_t random;
    int r;

    start_message(id, type);
    if (getrandom(&random, sizeof(random), 0) != sizeof(random))
        random = (uint32_t)sn_now_ns();
    m->psn = random & CM_QPN_MAX;
    m->qpn = id->abi.qp ? id->abi.qp->qp_num : param ? param->qp_num : 0;
    m->qkey = SN_RDMA_UDP_QKEY;
    m->srq = id->abi.qp ? id->abi.qp->srq != NULL : param && param->srq;
    m->flow_control = param ? param->flow_control : 1;
    cm_gid_of(id->dev, m->gid);
    if (m->qpn > CM_QPN_MAX)
        return EINVAL;
    r = cm_is_datagram(id) ? 0 : cm_depth_check(id, &m->responder_resources);
    if (!r && !cm_is_datagram(id))
        r = cm_depth_check(id, &m->initiator_depth);
    return r ? r : add_private(m, param ? param->private_data : NULL, param ? param->private_data_len : 0);
}

/* ---- the end ---- */

static void end(struct cm_id *id, enum sn_rdma_event_type type, int status, const struct cm_message *said)
{
    cm_sockets_close_locked(id);
    id->state = CM_ENDED;
    id->deadline_ns = 0;
    cm_tell_locked(id, type, status, said);
}

/* With datagrams, a program gets the same event for a refusal as for no answer. */
static void refused(struct cm_id *id, int reason, const struct cm_message *said)
{
    end(id, cm_is_datagram(id) ? SN_RDMA_UNREACHABLE : SN_RDMA_REJECTED, reason, said);
}

static void gone(struct cm_id *id)
{
    id->disconnected = true;
    end(id, SN_RDMA_DISCONNECTED, 0, NULL);
    cm_wake_at_locked(id, in_ms(TIMEWAIT_MS));
}

static void peer_gone(struct cm_id *id)
{
    if (id->state == CM_ARRIVING)
        cm_id_free_locked(id);
    else if (id->state == CM_ESTABLISHED)
        gone(id);
    else
        refused(id, cm_is_datagram(id) ? CM_SIDR_REJECT : CM_REJ_CONSUMER, NULL);
}

void cm_timeout_locked(struct cm_id *id)
{
    switch (id->state) {
    case CM_ARRIVING:
        sn_log("rdma_listen: a connection brought no request for %d ms", REQUEST_MS);
        cm_id_free_locked(id);
        break;
    case CM_CONNECTING:
        cm_call_locked(id);
        break;
    case CM_ACCEPTED:
        end(id, SN_RDMA_UNREACHABLE, -ETIMEDOUT, NULL);
        break;
    case CM_LISTENING:
        cm_watch_locked(id);
        break;
    case CM_ENDED:
        cm_tell_locked(id, SN_RDMA_TIMEWAIT_EXIT, 0, NULL);
        break;
    default:
        break;
    }
}

/* ---- the active side ---- */

static void listener_missing(struct cm_id *id, int error)
{
    if (error == ECONNREFUSED)
        refused(id, cm_is_datagram(id) ? CM_SIDR_UNSUPPORTED : CM_REJ_INVALID_SERVICE, NULL);
    else
        end(id, SN_RDMA_UNREACHABLE, -error, NULL);
}

/* Connect and send the request, or try again soon, or give up. */
void cm_call_locked(struct cm_id *id)
{
    int r;

    if (sn_now_ns() >= id->give_up_ns) {
        end(id, SN_RDMA_UNREACHABLE, -ETIMEDOUT, NULL);
        return;
    }
    r = cm_dial_locked(id);
    if (r == EAGAIN || r == ENETDOWN || (r == ECONNREFUSED && sn_now_ns() < id->refuse_ns)) {
        cm_wake_at_locked(id, in_ms(REDIAL_MS));
        return;
    }
    if (!r)
        r = say(id);
    if (r) {
        listener_missing(id, r);
        return;
    }
    cm_watch_locked(id);
    cm_wake_at_locked(id, id->give_up_ns);
}

static int connect_locked(struct cm_id *id, const struct sn_rdma_conn_param *param, const void *data, size_t len)
{
    struct cm_message *m = &id->local;
    int r;

    if (id->state != CM_ROUTE_RESOLVED)
        return EINVAL;
    m->responder_resources = param ? param->responder_resources : SN_RDMA_MAX_DEPTH;
    m->initiator_depth = param ? param->initiator_depth : SN_RDMA_MAX_DEPTH;
    m->retry_count = param ? param->retry_count & 7 : RETRIES;
    m->rnr_retry_count = param ? param->rnr_retry_count & 7 : RETRIES;
    r = describe(id, CM_REQUEST, param);
    if (!r && len)
        r = add_private(m, data, len);
    if (r)
        return r;
    cm_address_write(&m->from, &id->abi.route.addr.src_storage);
    cm_address_write(&m->to, &id->abi.route.addr.dst_storage);
    id->state = CM_CONNECTING;
    id->refuse_ns = in_ms(LISTEN_MS);
    id->give_up_ns = in_ms(answer_ms());
    cm_call_locked(id);
    return 0;
}

int rdma_connect(struct sn_rdma_id *abi, struct sn_rdma_conn_param *param)
{
    struct cm_id *id = cm_id_of(abi);
    bool own_data = param && param->private_data && param->private_data_len;
    int r;

    cm_lock();
    /* rdma_getaddrinfo's data, unless there is other */
    r = connect_locked(id, param, own_data ? NULL : id->ep_data, own_data ? 0 : id->ep_data_len);
    cm_unlock();
    return cm_done(id, r ? cm_fail(r) : 0);
}

static void ready_say(struct cm_id *id)
{
    start_message(id, CM_READY);
    if (say(id)) {
        peer_gone(id);
        return;
    }
    id->state = CM_ESTABLISHED;
}

static void replied(struct cm_id *id)
{
    struct cm_message *local = &id->local;
    int r;

    id->deadline_ns = 0;
    if (cm_is_datagram(id)) {
        cm_sockets_close_locked(id);
        id->state = CM_ESTABLISHED;
        cm_tell_locked(id, SN_RDMA_ESTABLISHED, 0, &id->remote);
        return;
    }
    /* The listener may allow less than was asked for. */
    local->responder_resources = id->remote.initiator_depth;
    local->initiator_depth = id->remote.responder_resources;
    local->rnr_retry_count = id->remote.rnr_retry_count;
    if (!id->abi.qp) {
        id->state = CM_RESPONDED;
        cm_tell_locked(id, SN_RDMA_CONNECT_RESPONSE, 0, &id->remote);
        return;
    }
    r = cm_qp_connect(id);
    if (r) {
        start_message(id, CM_REJECT);
        local->reason = CM_REJ_CONSUMER;
        say(id);
        end(id, SN_RDMA_CONNECT_ERROR, -r, NULL);
        return;
    }
    ready_say(id);
    if (id->state == CM_ESTABLISHED)
        cm_tell_locked(id, SN_RDMA_ESTABLISHED, 0, &id->remote);
}

int rdma_establish(struct sn_rdma_id *abi)
{
    struct cm_id *id = cm_id_of(abi);
    int r = EINVAL;

    cm_lock();
    if (id->state == CM_RESPONDED && !abi->qp) {
        ready_say(id);
        r = id->state == CM_ESTABLISHED ? 0 : ECONNRESET;
    }
    cm_unlock();
    return r ? cm_fail(r) : 0;
}

/* ---- the passive side ---- */

int rdma_listen(struct sn_rdma_id *abi, int backlog)
{
    static const struct sockaddr_in any = {.sin_family = AF_INET};
    struct cm_id *id = cm_id_of(abi);
    int r;

    cm_lock();
    r = id->state == CM_IDLE ? cm_bind_locked(id, (const struct sockaddr *)&any) : 0;
    if (!r && id->state != CM_BOUND && id->state != CM_LISTENING)
        r = EINVAL;
    for (uint32_t i = 0; !r && i < id->socket_count; i++)
        if (listen(id->sockets[i].fd, backlog > 0 && backlog < BACKLOG ? backlog : BACKLOG))
            r = errno;
    if (!r && id->state == CM_BOUND) {
        id->state = CM_LISTENING;
        cm_watch_locked(id);
    }
    cm_unlock();
    return r ? cm_fail(r) : 0;
}

/* Without descriptors or memory the socket stays readable, so do not poll it for a while. */
static void accept_failed(struct cm_id *listener, int error)
{
    if (error == EAGAIN || error == ECONNABORTED || error == EINTR)
        return;
    sn_log("rdma_listen: accept: %s; trying again in %d ms", strerror(error), ACCEPT_PAUSE_MS);
    cm_unwatch_locked(listener);
    cm_wake_at_locked(listener, in_ms(ACCEPT_PAUSE_MS));
}

/* A socket of a listener is readable. */
static void arrived(struct cm_socket *socket)
{
    struct cm_id *listener = socket->id, *id;
    int fd = accept4(socket->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC), r;

    if (fd < 0) {
        accept_failed(listener, errno);
        return;
    }
    if (!cm_peer_is_ours(fd)) {
        sn_log("rdma_listen: refused a process of another user");
        goto close_fd;
    }
    id = cm_id_new_locked((struct cm_channel *)listener->abi.channel, listener->abi.context, listener->abi.ps,
                          listener->abi.qp_type);
    if (!id)
        goto close_fd;
    r = cm_socket_adopt_locked(id, fd, socket->dev);
    if (r) {
        cm_id_free_locked(id);
        goto close_fd;
    }
    id->listener = listener;
    id->state = CM_ARRIVING;
    cm_watch_locked(id);
    cm_wake_at_locked(id, in_ms(REQUEST_MS));
    return;
close_fd:
    close(fd);
}

/* The requested number of reads and atomics in flight, but at most what the device allows. */
static uint8_t at_most(struct cm_id *id, uint8_t asked)
{
    uint8_t most = SN_RDMA_MAX_DEPTH;

    return !cm_depth_check(id, &most) && most < asked ? most : asked;
}

static void requested(struct cm_id *id)
{
    struct cm_id *listener = id->listener;
    int r = cm_use_device_locked(id, id->sockets[0].dev);

    if (r) {
        sn_log("rdma_listen: opening the device of a request: %s", strerror(r));
        cm_id_free_locked(id);
        return;
    }
    cm_address_read(&id->abi.route.addr.src_storage, &id->remote.to);
    cm_address_read(&id->abi.route.addr.dst_storage, &id->remote.from);
    memcpy(id->abi.route.addr.ib.dgid.raw, id->remote.gid, sizeof(id->remote.gid));
    id->local.responder_resources = at_most(id, id->remote.initiator_depth);
    id->local.initiator_depth = at_most(id, id->remote.responder_resources);
    id->local.retry_count = id->remote.retry_count;
    id->local.rnr_retry_count = id->remote.rnr_retry_count;
    id->ack_timeout = listener->ack_timeout;
    id->has_ack_timeout = listener->has_ack_timeout;
    id->listener = NULL;
    id->deadline_ns = 0;
    id->state = CM_REQUESTED;
    cm_tell_request_locked(listener, id);
}

static int accept_locked(struct cm_id *id, const struct sn_rdma_conn_param *param)
{
    struct cm_message *m = &id->local;
    int r;

    if (id->state == CM_ENDED)
        return ECONNRESET;
    if (id->state != CM_REQUESTED)
        return EINVAL;
    if (param && param->responder_resources != SN_RDMA_MAX_DEPTH)
        m->responder_resources = param->responder_resources;
    if (param && param->initiator_depth != SN_RDMA_MAX_DEPTH)
        m->initiator_depth = param->initiator_depth;
    r = describe(id, CM_REPLY, param);
    if (!r)
        r = cm_qp_connect(id);
    if (!r && param) /* param is for the caller's queue pair; this queue pair's parameters came with the request */
        m->rnr_retry_count = param->rnr_retry_count & 7;
    if (!r)
        r = say(id);
    if (r)
        return r;
    id->state = cm_is_datagram(id) ? CM_ESTABLISHED : CM_ACCEPTED;
    if (cm_is_datagram(id))
        cm_sockets_close_locked(id);
    else
        cm_wake_at_locked(id, in_ms(answer_ms()));
    return 0;
}

int rdma_accept(struct sn_rdma_id *abi, struct sn_rdma_conn_param *param)
{
    struct cm_id *id = cm_id_of(abi);
    int r;

    cm_lock();
    r = accept_locked(id, param);
    cm_unlock();
    if (r)
        return cm_fail(r);
    return cm_is_datagram(id) ? 0 : cm_done(id, 0);
}

static int reject(struct sn_rdma_id *abi, const void *data, uint8_t len, uint32_t reason)
{
    struct cm_id *id = cm_id_of(abi);
    int r = 0;

    cm_lock();
    if (id->state != CM_REQUESTED && id->state != CM_RESPONDED)
        r = EINVAL;
    if (!r) {
        start_message(id, CM_REJECT);
        id->local.reason = reason;
        r = add_private(&id->local, data, len);
    }
    if (!r) {
        say(id); /* a peer that is gone needs no refusal */
        cm_sockets_close_locked(id);
        id->state = CM_ENDED;
    }
    cm_unlock();
    return r ? cm_fail(r) : 0;
}

int rdma_reject(struct sn_rdma_id *id, const void *data, uint8_t len)
{
    return reject(id, data, len, cm_is_datagram(cm_id_of(id)) ? CM_SIDR_REJECT : CM_REJ_CONSUMER);
}

int rdma_reject_ece(struct sn_rdma_id *id, const void *data, uint8_t len)
{
    return reject(id, data, len, CM_REJ_VENDOR_OPTION);
}

static void established(struct cm_id *id)
{
    id->deadline_ns = 0;
    id->state = CM_ESTABLISHED;
    cm_tell_locked(id, SN_RDMA_ESTABLISHED, 0, NULL);
}

/* Data arrived before the peer's last message, which may still be in flight. */
int rdma_notify(struct sn_rdma_id *abi, enum ibv_event_type event)
{
    struct cm_id *id = cm_id_of(abi);
    int r = 0;

    if (event != IBV_EVENT_COMM_EST)
        return cm_fail(EINVAL);
    cm_lock();
    if (id->state == CM_ACCEPTED)
        established(id);
    else if (id->state != CM_ESTABLISHED)
        r = EINVAL;
    cm_unlock();
    return r ? cm_fail(r) : 0;
}

int rdma_disconnect(struct sn_rdma_id *abi)
{
    struct cm_id *id = cm_id_of(abi);
    bool told = false;
    int r = 0;

    cm_lock();
    if (id->disconnected) {
        r = cm_qp_fail(id); /* this answers the end of the peer's connection */
    } else if (cm_is_datagram(id) || (id->state != CM_ESTABLISHED && id->state != CM_ACCEPTED)) {
        r = EINVAL;
    } else {
        r = cm_qp_fail(id);
        gone(id);
        told = true;
    }
    cm_unlock();
    if (r)
        return cm_fail(r);
    return told ? cm_done(id, 0) : 0;
}

/* ---- hearing ---- */

/* Whether a state expects this message. */
static bool expected(const struct cm_id *id, enum cm_type type)
{
    switch (id->state) {
    case CM_ARRIVING:
        return type == CM_REQUEST;
    case CM_CONNECTING:
        return type == CM_REPLY || type == CM_REJECT;
    case CM_ACCEPTED:
        return type == CM_READY || type == CM_REJECT;
    case CM_ESTABLISHED: /* after rdma_notify */
        return type == CM_READY;
    default:
        return false;
    }
}

static const char *wrong(const struct cm_id *id, const struct cm_message *m, size_t len)
{
    const char *what = cm_message_wrong(m, len);

    if (what)
        return what;
    if (!expected(id, m->type))
        return "type for this state";
    if (m->datagram != cm_is_datagram(id))
        return "kind of queue pair";
    if ((m->type == CM_REQUEST || m->type == CM_REPLY) && !cm_gid_known(m->gid))
        return "GID, which no device of this world has";
    return NULL;
}

static void heard(struct cm_id *id, const struct cm_message *m)
{
    if (m->type == CM_REQUEST || m->type == CM_REPLY)
        id->remote = *m;
    if (m->type == CM_REQUEST)
        requested(id);
    else if (m->type == CM_REPLY)
        replied(id);
    else if (m->type == CM_REJECT)
        refused(id, (int)m->reason, m);
    else if (id->state == CM_ACCEPTED)
        established(id);
}

void cm_socket_event_locked(struct cm_socket *socket)
{
    struct cm_id *id = socket->id;
    struct cm_message m;
    const char *what;
    ssize_t n;

    if (id->state == CM_LISTENING) {
        arrived(socket);
        return;
    }
    n = recv(socket->fd, &m, sizeof(m), MSG_TRUNC);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    what = n > 0 ? wrong(id, &m, (size_t)n) : NULL;
    if (what)
        sn_log("rdma_cm: the peer sent a message with a wrong %s", what);
    if (n <= 0 || what)
        peer_gone(id);
    else
        heard(id, &m);
}

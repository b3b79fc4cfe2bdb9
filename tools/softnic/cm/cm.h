/* SPDX-License-Identifier: Apache-2.0 */
/* The objects of the connection manager, and what its files offer each other.
 *
 * There is no thread. An event channel's descriptor is an epoll set: of the sockets of its identifiers, of a timer, and
 * of an eventfd that is readable while events are queued. Whoever asks for an event first does what the sockets and the
 * timer call for. One mutex guards everything; nothing waits while it is held. */
#ifndef SOFTNIC_CM_H
#define SOFTNIC_CM_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "tools/softnic/cm/message.h"
#include "tools/softnic/cm/rdma_calls.h"

struct cm_event;
struct cm_id;

/* epoll's data points to this; id is NULL for the channel's own two sockets. */
struct cm_socket {
    struct cm_id *id;
    int fd;
    uint32_t dev; /* the device of the world to which it is bound */
    bool watched; /* it is in its channel's epoll set, or must be put there */
};

struct cm_channel {
    struct sn_rdma_channel abi;     /* first; fd is the epoll set */
    struct cm_socket queued, timer; /* an eventfd and a timerfd */
    struct cm_event *events, **events_end;
    struct cm_id *ids;
    struct cm_channel *next; /* next channel that is not destroyed */
    uint64_t timer_ns;       /* when the timer goes off; 0: not set */
};

enum cm_state {
    CM_IDLE,
    CM_BOUND,
    CM_ADDR_RESOLVED,
    CM_ROUTE_RESOLVED,
    CM_LISTENING,
    CM_CONNECTING,  /* active: request sent, or waiting for room in the listener's queue */
    CM_RESPONDED,   /* active: reply received, but the program has its own queue pair and must call rdma_establish */
    CM_ARRIVING,    /* passive: connected, request not yet received; the program knows nothing of it */
    CM_REQUESTED,   /* passive: the program has been told, or will be */
    CM_ACCEPTED,    /* passive: reply sent */
    CM_ESTABLISHED, /* for datagrams: resolved, at both ends */
    CM_ENDED,       /* refused, timed out or disconnected */
};

struct cm_id {
    struct sn_rdma_id abi;      /* first: the program's pointer is ours */
    struct cm_id *next, **link; /* links in the channel's list */
    enum cm_state state;
    bool sync;         /* without a channel of the program's: calls wait for their event */
    bool disconnected; /* the program has been told, or will be */
    uint32_t dev;      /* device of the world; valid if abi.verbs is */
    struct cm_socket *sockets;
    uint32_t socket_count;
    struct cm_id *listener; /* CM_ARRIVING */
    uint64_t deadline_ns;   /* 0: none */
    uint64_t refuse_ns;     /* CM_CONNECTING: until then a program may begin to listen */
    uint64_t give_up_ns;    /* CM_CONNECTING: the last moment to dial */
    uint32_t events_unacked;
    struct cm_message local, remote; /* the last messages to the peer and from it */
    uint8_t ack_timeout;
    bool has_ack_timeout;
    /* of rdma_create_ep */
    struct ibv_pd *ep_pd;
    struct ibv_qp_init_attr *ep_attr;
    void *ep_data;
    size_t ep_data_len;
};

static inline struct cm_id *cm_id_of(struct sn_rdma_id *id)
{
    return (struct cm_id *)id;
}

static inline bool cm_is_datagram(const struct cm_id *id)
{
    return id->abi.qp_type == IBV_QPT_UD;
}

extern pthread_mutex_t cm_mutex;

static inline void cm_lock(void)
{
    pthread_mutex_lock(&cm_mutex);
}

static inline void cm_unlock(void)
{
    pthread_mutex_unlock(&cm_mutex);
}

/* Set errno and return -1. */
int cm_fail(int error);

/* ---- id.c ---- */
struct cm_id *cm_id_new_locked(struct cm_channel *channel, void *context, enum sn_rdma_port_space ps,
                               enum ibv_qp_type type);
void cm_id_free_locked(struct cm_id *id);

/* ---- channel.c ---- */
/* An id belongs to one channel: its sockets are in the channel's epoll set, its events in the channel's queue. */
void cm_channel_join_locked(struct cm_channel *channel, struct cm_id *id);
void cm_channel_leave_locked(struct cm_id *id); /* drops the events that are queued */
void cm_channel_move_locked(struct cm_id *id, struct cm_channel *to);
void cm_watch_locked(struct cm_id *id); /* watches its sockets, which are connected or listen */
void cm_unwatch_locked(struct cm_id *id);
void cm_wake_at_locked(struct cm_id *id,
                       uint64_t ns); /* sets its deadline; cm_timeout_locked is called then, or soon after */
/* Queue an event. Its parameters come from `said`, a message of the peer, or are empty. */
void cm_tell_locked(struct cm_id *id, enum sn_rdma_event_type type, int status, const struct cm_message *said);
void cm_tell_request_locked(struct cm_id *listener, struct cm_id *child);
void cm_wait_acked_locked(struct cm_id *id); /* waits until the program has acknowledged its events */
/* For a synchronous id: wait for its next event, keep it in id->event, and return its outcome. */
int cm_sync(struct cm_id *id);
/* With an asynchronous id the event comes by the channel. */
static inline int cm_done(struct cm_id *id, int r)
{
    return r || !id->sync ? r : cm_sync(id);
}

/* ---- address.c ---- */
/* Give the id sockets that are bound to its source address; set the port in it. 0 or an errno. */
int cm_bind_locked(struct cm_id *id, const struct sockaddr *addr);
int cm_resolve_locked(struct cm_id *id, const struct sockaddr *src, const struct sockaddr *dst);
int cm_use_device_locked(struct cm_id *id, uint32_t dev);
void cm_sockets_close_locked(struct cm_id *id);
int cm_socket_adopt_locked(struct cm_id *id, int fd, uint32_t dev); /* an accepted one */
/* Connect the id's socket to a listener of its destination. 0, EAGAIN (its queue is full), ENETDOWN (a cable is
 * pulled), or another errno. */
int cm_dial_locked(struct cm_id *id);
bool cm_peer_is_ours(int fd);          /* a process of this user */
bool cm_gid_known(const uint8_t *gid); /* a device of this world has it */
void cm_gid_of(uint32_t dev, uint8_t *gid);
void cm_address_write(struct cm_address *to, const struct sockaddr_storage *from);
void cm_address_read(struct sockaddr_storage *to, const struct cm_address *from);

/* ---- connect.c ---- */
void cm_socket_event_locked(struct cm_socket *socket);
void cm_timeout_locked(struct cm_id *id); /* may free it */
void cm_call_locked(struct cm_id *id);

/* ---- qp.c ---- */
/* Bring the id's queue pair, if the library made it, to RTS, or to the error state. 0 or an errno. */
int cm_qp_connect(struct cm_id *id);
int cm_qp_fail(struct cm_id *id);
/* Replace SN_RDMA_MAX_DEPTH by what the device has. EINVAL if the device has less than was asked for. */
int cm_depth_check(struct cm_id *id, uint8_t *depth);

#endif

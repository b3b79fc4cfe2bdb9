/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/test/cm_support.h"

#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>

struct sn_world *world;
struct side server, client;
struct sn_rdma_id *listener;

struct sockaddr *at(const char *ip, uint16_t port)
{
    static struct sockaddr_storage addr[4];
    static unsigned next;
    struct sockaddr_storage *a = &addr[next++ % 4];

    memset(a, 0, sizeof(*a));
    a->ss_family = strchr(ip, ':') ? AF_INET6 : AF_INET;
    if (a->ss_family == AF_INET6) {
        inet_pton(AF_INET6, ip, &((struct sockaddr_in6 *)a)->sin6_addr);
        ((struct sockaddr_in6 *)a)->sin6_port = htons(port);
    } else {
        inet_pton(AF_INET, ip, &((struct sockaddr_in *)a)->sin_addr);
        ((struct sockaddr_in *)a)->sin_port = htons(port);
    }
    return (struct sockaddr *)a;
}

static struct sn_rdma_event *next_event(struct sn_rdma_channel *channel, const char *what)
{
    struct pollfd fd = {.fd = channel->fd, .events = POLLIN};
    uint64_t end = now_ns() + WAIT_S * 1000000000ull;
    struct sn_rdma_event *event;

    do {
        require(poll(&fd, 1, WAIT_S * 1000) == 1, "no event while waiting for %s", what);
        if (!rdma_get_cm_event(channel, &event))
            return event;
        require(errno == EAGAIN, "get_cm_event: %s", strerror(errno));
    } while (now_ns() < end);
    require(false, "no event while waiting for %s", what);
    return NULL;
}

struct sn_rdma_event *want(struct sn_rdma_channel *channel, enum sn_rdma_event_type type, int status)
{
    struct sn_rdma_event *event = next_event(channel, rdma_event_str(type));

    require(event->event == type && event->status == status, "want %s, status %d: got %s, status %d",
            rdma_event_str(type), status, rdma_event_str(event->event), event->status);
    return event;
}

void ack(struct sn_rdma_channel *channel, enum sn_rdma_event_type type, int status)
{
    rdma_ack_cm_event(want(channel, type, status));
}

struct sn_rdma_event *event_within(struct sn_rdma_channel *channel, int ms)
{
    struct pollfd fd = {.fd = channel->fd, .events = POLLIN};
    struct sn_rdma_event *event;

    return poll(&fd, 1, ms) && !rdma_get_cm_event(channel, &event) ? event : NULL;
}

bool silent(struct sn_rdma_channel *channel, int ms)
{
    return !event_within(channel, ms);
}

struct sn_rdma_channel *channel_new(void)
{
    struct sn_rdma_channel *channel = rdma_create_event_channel();

    require(channel && !fcntl(channel->fd, F_SETFL, O_NONBLOCK), "event channel: %s", strerror(errno));
    return channel;
}

struct sn_rdma_id *id_new(struct sn_rdma_channel *channel, enum sn_rdma_port_space ps)
{
    struct sn_rdma_id *id;

    require(!rdma_create_id(channel, &id, channel, ps), "create_id: %s", strerror(errno));
    return id;
}

void listen_on(const char *ip, uint16_t port, enum sn_rdma_port_space ps, int backlog)
{
    server.channel = channel_new();
    listener = id_new(server.channel, ps);
    require(!rdma_bind_addr(listener, at(ip, port)) && !rdma_listen(listener, backlog), "listen: %s", strerror(errno));
}

void resolve(struct side *s, const char *from, const char *to, uint16_t port, enum sn_rdma_port_space ps)
{
    s->channel = s->channel ? s->channel : channel_new();
    s->id = id_new(s->channel, ps);
    require(!rdma_resolve_addr(s->id, from ? at(from, 0) : NULL, at(to, port), 1000), "resolve_addr: %s",
            strerror(errno));
    ack(s->channel, SN_RDMA_ADDR_RESOLVED, 0);
    require(!rdma_resolve_route(s->id, 1000), "resolve_route: %s", strerror(errno));
    ack(s->channel, SN_RDMA_ROUTE_RESOLVED, 0);
}

void queue_make(struct side *s)
{
    struct ibv_qp_init_attr attr = {.cap = {8, 8, 1, 1, 0}, .qp_type = s->id->qp_type, .sq_sig_all = 1};

    require(!rdma_create_qp(s->id, NULL, &attr), "create_qp: %s", strerror(errno));
    s->mr = ibv_reg_mr(s->id->pd, s->buf, sizeof(s->buf), ALL_ACCESS);
    require(s->mr != NULL, "reg_mr: %s", strerror(errno));
}

void take_request(void)
{
    struct sn_rdma_event *event = want(server.channel, SN_RDMA_CONNECT_REQUEST, 0);

    cr_assert_eq(event->listen_id, listener);
    server.id = event->id;
    rdma_ack_cm_event(event);
}

void side_close(struct side *s)
{
    if (s->mr)
        ibv_dereg_mr(s->mr);
    if (s->id && s->id->qp)
        rdma_destroy_qp(s->id);
    if (s->id)
        rdma_destroy_id(s->id);
}

void all_close(void)
{
    side_close(&client);
    side_close(&server);
    if (listener)
        rdma_destroy_id(listener);
    rdma_destroy_event_channel(server.channel);
    rdma_destroy_event_channel(client.channel);
}

void cm_setup(void)
{
    world = test_world(NULL);
    unsetenv("SOFTNIC_CM_TIMEOUT_MS");
    memset(&server, 0, sizeof(server));
    memset(&client, 0, sizeof(client));
    listener = NULL;
}

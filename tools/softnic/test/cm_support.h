/* SPDX-License-Identifier: Apache-2.0 */
/* Helpers of the tests of rdma_cm: two sides in one process, and bounded waits for events. */
#ifndef TEST_SOFTNIC_CM_SUPPORT_H
#define TEST_SOFTNIC_CM_SUPPORT_H

#include <sys/socket.h>

#include "tools/softnic/test/support.h"
#include "tools/softnic/cm/rdma_calls.h"

enum { PORT = 4711, BYTES = 256 };

#define DEVICE_0 "10.1.0.1"
#define DEVICE_1 "10.1.1.1"

/* One side: its channel, and the id that is to be connected. */
struct side {
    struct sn_rdma_channel *channel;
    struct sn_rdma_id *id;
    struct ibv_mr *mr;
    uint8_t buf[BYTES];
};

extern struct sn_world *world;
extern struct side server, client;
extern struct sn_rdma_id *listener;

/* An address of its own, until four more are asked for. */
struct sockaddr *at(const char *ip, uint16_t port);
/* Wait for an event, which must be this one. ack: and acknowledge it. */
struct sn_rdma_event *want(struct sn_rdma_channel *channel, enum sn_rdma_event_type type, int status);
void ack(struct sn_rdma_channel *channel, enum sn_rdma_event_type type, int status);

/* The event that comes within ms milliseconds, or NULL. */
struct sn_rdma_event *event_within(struct sn_rdma_channel *channel, int ms);
bool silent(struct sn_rdma_channel *channel, int ms);

/* Channels do not block. */
struct sn_rdma_channel *channel_new(void);
struct sn_rdma_id *id_new(struct sn_rdma_channel *channel, enum sn_rdma_port_space ps);

/* The steps of a connection of `client` to `listener`, whose request becomes `server`. */
void listen_on(const char *ip, uint16_t port, enum sn_rdma_port_space ps, int backlog);
void resolve(struct side *s, const char *from, const char *to, uint16_t port, enum sn_rdma_port_space ps);
void queue_make(struct side *s);
void take_request(void);
void side_close(struct side *s);
void all_close(void);

/* A new world of two devices. */
void cm_setup(void);

#endif

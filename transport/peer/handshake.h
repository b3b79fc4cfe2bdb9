/* SPDX-License-Identifier: Apache-2.0 */
/* The messages that two processes exchange over TCP to become peers.
 *
 *   connector                               listener
 *     HELLO  rails, queues, private data ->
 *                                        <- REPLY  rails, which pairs, its queues, private data   (or REFUSE)
 *     connects its queues
 *     QUEUES its queues                  ->
 *                                           connects its queues
 *                                        <- READY
 *
 * Either side may send REFUSE instead of its next frame; it says why the connection is given up.
 *
 * Each frame has a head with magic, version, type, length and the cookie of the handle. A frame that does not match is
 * refused. Both ends must be little-endian, which the magic shows. */
#ifndef TRANSPORT_HANDSHAKE_H
#define TRANSPORT_HANDSHAKE_H

#include "transport/nic/fabric.h"
#include "transport/nic/nic.h"
#include "transport/host/socket.h"
#include "transport/order/wire.h"

enum {
    PRS_HANDLE_MAGIC = 0x48535250, /* "PRSH" */
    PRS_FRAME_MAGIC = 0x46535250,  /* "PRSF" */
    PRS_TRANSPORT_RC = 1,
};

struct prs_handle_wire {
    uint32_t magic;
    uint16_t version;
    uint16_t length; /* of this struct */
    uint32_t check;  /* hash of the struct with this field zero */
    uint32_t transport;
    uint8_t cookie[16];
    uint8_t address[16];
    uint16_t family; /* 4 or 6 */
    uint16_t port;
    uint32_t scope;
    uint8_t reserved[8];
};
static_assert(sizeof(struct prs_handle_wire) == 64, "part of the wire format");
static_assert(sizeof(struct prs_handle_wire) <= PRS_HANDLE_BYTES - PRS_HANDLE_CALLER_BYTES, "the caller's bytes");

struct prs_frame_head {
    uint32_t magic;
    uint16_t version;
    uint16_t type;
    uint32_t length; /* of the body */
    uint32_t reserved;
    uint8_t cookie[16];
};
static_assert(sizeof(struct prs_frame_head) == 32, "part of the wire format");

enum prs_frame_type { PRS_FRAME_HELLO = 1, PRS_FRAME_REPLY, PRS_FRAME_QUEUES, PRS_FRAME_READY, PRS_FRAME_REFUSE };

struct prs_wire_rail {
    char name[63];
    uint8_t standby; /* 1: it is used only while the other rails are lost */
    struct prs_nic_address address;
    uint32_t speed_mbps;
    int16_t rail_id;
    int16_t plane_id;
    uint8_t port;
    uint8_t is_roce;
    uint8_t adds; /* 1: the NIC performs atomics */
    uint8_t reserved;
    char queue_kind[PRS_NIC_NAME_BYTES]; /* prs_nic_ops.name */
};
static_assert(sizeof(struct prs_wire_rail) == 148, "part of the wire format");

struct prs_wire_private {
    uint32_t bytes;
    uint8_t data[PRS_PRIVATE_DATA_BYTES];
};

struct prs_wire_hello {
    uint32_t rail_count;
    uint32_t queues_per_rail;
    struct prs_wire_rail rail[PRS_MAX_RAILS];
    struct prs_wire_private private_data;
};

struct prs_wire_pair {
    uint16_t connector_rail; /* indices in the two lists of rails */
    uint16_t listener_rail;
};

/* Strict memory that the other side writes to: the ring of signal records, or the word for credits. One key for each
 * path (pair of rails). addr 0: none. */
struct prs_wire_window {
    uint64_t addr;
    uint64_t key[PRS_MAX_RAILS];
};
static_assert(sizeof(struct prs_wire_window) == 72, "part of the wire format");

struct prs_wire_queues {
    uint32_t count;
    uint32_t counted;  /* 1: the sender's signals are records, and it takes credits */
    uint32_t failover; /* 1: the sender can replace a lost rail by another */
    uint32_t reserved;
    struct prs_nic_address queue[PRS_ORDER_MAX_DATA_QUEUES];
    struct prs_wire_window credit;
    struct prs_wire_window records; /* present if the other side has said `counted` */
    struct prs_wire_window sizes;   /* 8 bytes for each id, for the sizes of messages that arrive as plain writes */
};

struct prs_wire_ready {
    struct prs_wire_window records; /* as above */
};

struct prs_wire_reply {
    uint32_t rail_count;
    uint32_t pair_count;
    uint32_t queues_per_pair;
    struct prs_wire_rail rail[PRS_MAX_RAILS];
    struct prs_wire_pair pair[PRS_MAX_RAILS];
    struct prs_wire_queues queues;
    struct prs_wire_private private_data;
};

struct prs_wire_refusal {
    int32_t error; /* -errno */
    char text[252];
};

union prs_wire_any {
    struct prs_wire_hello hello;
    struct prs_wire_reply reply;
    struct prs_wire_queues queues;
    struct prs_wire_ready ready;
    struct prs_wire_refusal refusal;
};

/* A TCP connection that carries frames, one at a time in each direction. */
struct prs_stream {
    int fd;
    uint8_t cookie[16];
    char remote[PRS_ADDRESS_TEXT];
    bool is_stranger; /* no frame with the cookie has arrived: errors are not logged, since anybody may cause them */
    size_t in_bytes, out_bytes, out_done;
    struct {
        struct prs_frame_head head;
        union prs_wire_any body;
    } in, out;
};

/* Take over a connected or connecting descriptor. */
void prs_stream_init(struct prs_stream *stream, int fd, const union prs_address *remote, const uint8_t cookie[16]);
void prs_stream_close(struct prs_stream *stream);
/* Prepare one frame; prs_stream_flush() sends it. */
void prs_stream_put(struct prs_stream *stream, enum prs_frame_type type, const void *body, uint32_t bytes);
/* Return 0 (all sent), PRS_AGAIN or -errno. */
int prs_stream_flush(struct prs_stream *stream);
/* Return 0, or -errno, not logged: the connection has ended, and nothing waits to be read. */
int prs_stream_lost(const struct prs_stream *stream);
/* Return 0 (a frame of that type is in stream->in, until the next call), PRS_AGAIN, -EPROTO (an unexpected frame),
 * -ECONNRESET (the other side has closed) or the error in the other side's REFUSE. */
int prs_stream_get(struct prs_stream *stream, enum prs_frame_type type);

void prs_handle_fill(const uint8_t cookie[16], const union prs_address *address, struct prs_handle *out);
/* Return 0 or -EPROTO. */
int prs_handle_parse(const struct prs_handle *handle, uint8_t cookie[16], union prs_address *out);

/* Describe our own rails, with their present addresses, for the other side. standby: the last rail is a standby
 * rail. */
void prs_wire_rails(const struct prs_fabric *fabric, const struct prs_rail_set *rails, bool standby,
                    struct prs_rail_address *own, struct prs_wire_rail *out);
/* Pair the rails of two sides: by rail id where both know it, else by position. Rails with different ids are paired
 * only if no ids match; rails of different planes, link layers or kinds of queues never. Standby rails are paired with
 * each other, last. Return the number of pairs, as many as possible, or -ENETUNREACH (the text names both lists). */
int prs_wire_pair_rails(const struct prs_wire_rail *connector, uint32_t connector_count,
                        const struct prs_wire_rail *listener, uint32_t listener_count,
                        struct prs_wire_pair pair[PRS_MAX_RAILS]);
/* Check the values of a received frame, except for addresses, which the back ends check. Return 0 or -EPROTO. */
int prs_wire_check_hello(const struct prs_wire_hello *hello, const char *remote);
int prs_wire_check_reply(const struct prs_wire_reply *reply, uint32_t own_rails, const char *remote);

#endif

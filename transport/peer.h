/* SPDX-License-Identifier: Apache-2.0 */
/* One connection to one remote rank. setup.c makes and ends it, peer.c moves data. */
#ifndef TRANSPORT_PEER_H
#define TRANSPORT_PEER_H

#include "transport/arrival.h"
#include "transport/handshake.h"
#include "transport/nic.h"
#include "transport/order.h"
#include "transport/records.h"
#include "transport/region.h"

enum { PRS_PEER_IDLE_POLLS = 1 << 14 }; /* empty polls between two looks at the stream: a system call */

struct prs_path {              /* a pair of rails */
    int local_rail;            /* of the fabric */
    struct prs_wire_rail peer; /* what the other side said */
};

struct prs_peer {
    /* What every call touches. */
    int error; /* 0 or the sticky -errno */
    uint32_t unposted;
    uint32_t path_count;
    bool measured;   /* several paths: completions are timed */
    bool exclusive_adds; /* only peers of this process add to its words in device memory */
    uint32_t idle_polls;
    const struct prs_nic_ops *nic;
    prs_notify_fn *on_notify;
    void *user;
    uint64_t rail_mask; /* rails of the fabric that the paths use: a region must be on all of them */
    struct prs_link *link[PRS_MAX_RAILS];
    struct prs_queue *queue[PRS_ORDER_MAX_QUEUES];
    struct prs_records *records;            /* either side is counted */
    struct prs_event events[PRS_POLL_MOST]; /* of one poll */
    uint64_t doorbells, work_requests, completions, arrivals, notifications;
    struct prs_order order;
    struct prs_arrivals arriving;
    /* Set up once. */
    const struct prs_fabric *fabric;
    int traffic_class;
    uint32_t queues; /* data queues of all paths */
    uint32_t queues_per_path;
    struct prs_path path[PRS_MAX_RAILS];
    uint8_t *inline_bytes; /* of all data queues and of the first probe queue */
    size_t inline_room;
    struct ibv_mr *inline_mr[PRS_MAX_RAILS]; /* where the NIC cannot take them from the request */
    int stream_fd;      /* open as long as the peer: its end tells that the other process has died */
    bool remote_closed; /* its farewell has come */
    bool remote_gone;   /* and long after it nothing more */
    char remote[PRS_ADDRESS_TEXT];
    uint32_t private_bytes;
    uint8_t private_data[PRS_PRIVATE_DATA_BYTES];
    char error_text[1024];
    char description[1024];
};

/* First error wins: remember and log it, stop the queues, fail all ops. Return the code. */
int prs_peer_fail(struct prs_peer *peer, int code, const char *format, ...) __attribute__((format(printf, 3, 4), cold));

/* Read a byte at addr over each path's own queue to itself, by these keys: op is done when all that the paths' NICs had
 * written is visible there. The probes must be open. Return 0, PRS_BUSY or -errno. */
int prs_peer_probe(struct prs_peer *peer, struct prs_op *op, uint64_t addr, const uint32_t *rkey);

/* The queues that read from and write to our own memory; made when first asked for. Return 0 or -errno. */
int prs_peer_open_probes(struct prs_peer *peer);

#endif

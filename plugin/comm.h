/* SPDX-License-Identifier: Apache-2.0 */
/* What a comm holds, and the requests on it. A comm, in NCCL's words, is one direction of one connection.
 *
 * Threads: only NCCL's progress thread runs request.c. Its service thread connects, registers and closes. The two use a
 * comm at the same time only while memory is registered (memory.c), which touches nothing that changes later. */
#ifndef PERSEUS_PLUGIN_COMM_H
#define PERSEUS_PLUGIN_COMM_H

#include <perseus/perseus.h>
#include "plugin/abi.h"
#include "plugin/cts.h"
#include "plugin/metrics.h"

struct plugin_context;
struct profile_events;

enum {
    COMM_MAX_RECVS = CTS_MAX_ENTRIES,
    COMM_REQUESTS = NET_MAX_REQUESTS * COMM_MAX_RECVS,
    COMM_ANNOUNCEMENTS = 64,     /* writes of records in flight; further records wait and then share a write */
    COMM_LONG_BYTES = 16384,     /* the write of a record costs little compared with a message this long */
    COMM_UNFILLED_ENOUGH = 4,    /* announced entries that keep a sender busy for a round trip */
    COMM_CHECK_EVERY = 64,       /* calls without an event before the peer and the device are checked */
    COMM_MAX_BYTES = 0x7fffffff, /* test() returns sizes as int */
};

enum comm_kind { COMM_LISTEN = 1, COMM_SEND, COMM_RECV };

/* First member of every kind of comm, since NCCL passes any of them to regMr. */
struct comm {
    enum comm_kind kind;
    struct prs_fabric *fabric;
    struct prs_rail_set rails;
    struct prs_peer *peer; /* NULL for a listener */
    struct metrics_source metrics;
    net_profile_fn *profile;       /* NULL: NCCL's profiler gets no events */
    struct profile_events *events; /* made at the first request that has one */
};

/* What regMr returns. */
struct memory {
    struct prs_region *region;
    struct cts_keys keys;
    bool is_device; /* GPU memory: what a NIC has written there may need a flush */
};

enum request_kind { REQUEST_SEND = 1, REQUEST_RECV, REQUEST_FLUSH };

/* From the pool of its comm. */
struct request {
    struct prs_op op;     /* send, flush */
    struct request *next; /* of the free ones */
    struct comm *comm;
    uint8_t kind;
    uint8_t count;  /* entries */
    uint8_t left;   /* receive: entries that have not arrived */
    bool waiting;   /* flush: not started yet, since the peer was busy */
    bool profiled;  /* NCCL's profiler waits for its end */
    uint32_t first; /* receive: sequence number of entry 0, truncated */
    int size[COMM_MAX_RECVS];
    const struct memory *flush_memory;
    void *flush_addr;
};

struct listen_comm {
    struct comm base;
    struct prs_listener *listener;
    int traffic_class;
    struct recv_comm *accepting; /* made before accept, which takes it as the argument of on_notify */
};

struct send_comm {
    struct comm base;
    uint64_t head;   /* sequence number of entry 0 of the oldest receive with an entry to fill */
    uint32_t filled; /* mask of the entries of that receive that are filled */
    uint32_t misses; /* isends that found no record since the last check of the peer */
    struct request *free;
    struct cts_record *ring; /* CTS_RING records, strict memory */
    struct prs_region *ring_region;
    struct prs_keys keys;            /* keys of the record whose put is being posted */
    struct prs_connector *connector; /* while connecting */
    struct plugin_context *context;  /* this comm is in its list; NULL when connected */
    struct send_comm *next;

    struct request request[COMM_REQUESTS];
};

/* One write of records in flight. */
struct announcement {
    struct prs_op op;
    uint64_t end; /* sequence number after its last record */
};

/* Entries have sequence numbers, and tail <= announced <= next. The sender may fill those in [tail, announced); the
 * records of [announced, next) wait in the mirror. */
struct recv_comm {
    struct comm base;
    uint64_t next;      /* number of the entry that the next irecv makes */
    uint64_t announced; /* first entry whose record was not written to the sender yet */
    uint64_t tail;      /* all before it have arrived */
    uint64_t written;   /* the records of all earlier entries have left the mirror */
    uint64_t signaled;  /* a write that asks for a completion covers all earlier entries */
    uint64_t arrived;   /* FIRST_SEQUENCE plus the number of entries that have arrived, in any order */
    bool has_long;      /* a waiting record is for a long message */
    uint32_t misses;    /* calls that found no event since the last check of the peer */
    uint32_t announce_head, announce_tail; /* of announcement[]; they only grow */
    int error;                             /* -errno: on_notify was called for an entry that no receive expects */
    struct request *free;
    struct cts_record *mirror; /* CTS_RING records: what the sender's ring will hold */
    struct prs_region *mirror_region;
    uint64_t ring_addr; /* of the sender's clear-to-send ring */
    struct prs_keys ring_keys;
    struct request *entry[CTS_RING]; /* request of the entry in a slot; NULL when it has arrived */
    struct announcement announcement[COMM_ANNOUNCEMENTS];
    struct request request[COMM_REQUESTS];
};

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* What a communicator ("comm" in NCCL's words: one direction of one connection) holds, and the requests on it.
 *
 * Threads: NCCL's progress thread is the only one in request.c; its service thread connects, registers and closes. The
 * two meet only in registrations (memory.c), which touch nothing here that changes after connecting. */
#ifndef PERSEUS_PLUGIN_COMM_H
#define PERSEUS_PLUGIN_COMM_H

#include <perseus/perseus.h>
#include "plugin/abi.h"
#include "plugin/cts.h"

struct context;

enum {
    COMM_MAX_RECVS = CTS_GROUP_MAX,
    COMM_REQUESTS = NET_MAX_REQUESTS * COMM_MAX_RECVS,
    COMM_ANNOUNCEMENTS = 64,     /* writes of records in flight; more wait, they only get larger */
    COMM_PROMPT_BYTES = 16384,   /* beside a message this long the write of its record is nothing */
    COMM_UNFILLED_ENOUGH = 4,    /* announced entries that keep a sender busy for a round trip */
    COMM_CHECK_EVERY = 64,       /* fruitless calls between looks at the peer and at asynchronous events */
    COMM_MAX_BYTES = 0x7fffffff, /* test() tells sizes as int */
};

enum comm_kind { COMM_LISTEN = 1, COMM_SEND, COMM_RECV };

/* The part that all kinds share; first member of each, since NCCL hands regMr either of them. */
struct comm {
    enum comm_kind kind;
    struct prs_fabric *fabric;
    struct prs_rail_set rails;
    struct prs_peer *peer; /* NULL for a listener */
};

/* What regMr returns. */
struct memory {
    struct prs_region *region;
    struct prs_keys keys;
    uint64_t keys_check; /* cts_check_keys() of them */
    bool is_device;      /* written by NICs, read by a GPU: may need a flush */
};

enum request_kind { REQUEST_SEND = 1, REQUEST_RECV, REQUEST_FLUSH };

/* Pooled in its comm; free ones are a list. */
struct request {
    struct prs_op op; /* send, flush */
    struct request *next;
    struct comm *comm;
    uint8_t kind;
    uint8_t count;  /* entries */
    uint8_t left;   /* receive: entries that have not arrived */
    bool waiting;   /* flush: the peer was busy, not yet started */
    uint32_t first; /* receive: sequence number of entry 0, truncated */
    int size[COMM_MAX_RECVS];
    const struct memory *flush_memory;
    void *flush_addr;
};

struct listen_comm {
    struct comm base;
    struct prs_listener *listener;
    int traffic_class;
    struct recv_comm *accepting; /* made ahead, since accepting needs its callback's argument */
};

struct send_comm {
    struct comm base;
    uint64_t head;   /* sequence number of entry 0 of the oldest receive that is not filled */
    uint32_t filled; /* mask of its entries that are */
    uint32_t misses; /* fruitless isends since the last look at the peer */
    struct request *free;
    struct cts_record *ring; /* CTS_RING records, strict memory */
    struct prs_region *ring_region;
    struct prs_connector *connector; /* while connecting */
    struct context *context;         /* whose list of unfinished connections it is on; NULL when done */
    struct send_comm *next;

    struct request request[COMM_REQUESTS];
};

/* One write of records in flight. */
struct announcement {
    struct prs_op op;
    uint64_t end; /* sequence number behind its last record */
};

/* Sequence numbers of entries, oldest first: tail <= announced <= next.
 * [tail, announced) are out and the sender may fill them; [announced, next) wait in the mirror. */
struct recv_comm {
    struct comm base;
    uint64_t next;      /* of the entry that the next irecv makes */
    uint64_t announced; /* first that was not written to the sender */
    uint64_t tail;      /* all before it have arrived */
    uint64_t written;   /* all before it have left the mirror */
    uint64_t awaited;   /* behind the last record whose write is not lazy */
    uint64_t arrived;   /* how many have, in any order */
    bool is_prompt;     /* an entry that waits is for a long message */
    uint32_t misses;
    uint32_t announce_head, announce_tail; /* of announcement[], counted up */
    int error;                             /* -errno of what on_notify found */
    struct request *free;
    struct cts_record *mirror; /* CTS_RING records as the sender will have them */
    struct prs_region *mirror_region;
    uint64_t ring_addr; /* the sender's ring */
    struct prs_keys ring_keys;
    struct request *entry[CTS_RING]; /* whose entry a slot is; NULL when it has arrived */
    struct announcement announcement[COMM_ANNOUNCEMENTS];
    struct request request[COMM_REQUESTS];
};

#endif

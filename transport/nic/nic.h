/* SPDX-License-Identifier: Apache-2.0 */
/* A back end for one kind of NIC queue. The layers above ask only for its properties, never for its name. Each device's
 * domain holds the back end that drives it.
 *
 * in_order promises that requests of one queue take effect at the remote side in the order of posting, and that a
 * completion with immediate is seen there only after the bytes of its request and of all earlier ones of the queue.
 * Without in_order, only the bytes of the request itself precede its completion with immediate. */
#ifndef TRANSPORT_NIC_H
#define TRANSPORT_NIC_H

#include "transport/order/order.h"
#include "transport/nic/rail.h"
#include "transport/nic/registration.h"

struct prs_cqs;
struct ibv_qp;
struct ibv_wc;

/* Base of a back end's own struct; so is struct prs_link. */
struct prs_queue {
    struct prs_link *link;
    struct ibv_qp *qp;
    uint32_t id;       /* given by the caller; comes back in events */
    bool takes_inline; /* the NIC takes PRS_INLINE_BYTES from the request itself */
};

/* Queues of one peer over one rail. */
struct prs_link {
    const struct prs_nic_ops *ops;
    const struct prs_rail *rail;
    struct prs_rail_address own;
    const bool *overrun; /* its completion queue has lost completions. The event thread sets it */
    struct prs_cqs *cqs; /* that it shares with other links; NULL: none */
    void *user;          /* who takes its completions, where it shares them; NULL: nobody yet */
    bool stopped;        /* by prs_nic_stop_queues() or kill() */
    bool unflushed;    /* the NIC did not take a queue to the error state: it may go on, or complete nothing any more */
    int stream_fd;     /* when it is closed: the TCP stream, which ends when the other side has closed; -1: none */
    uint64_t receives; /* posted; for the counters */
    struct prs_queue **queue;
    uint32_t queue_count;
    struct prs_queue *loopback; /* NULL until first used */
};

struct prs_link_options {
    const struct prs_rail *rail;
    const struct prs_rail_address *own; /* of the rail, as the other side was told */
    const struct prs_config *config;
    int traffic_class;
    int service_level;
    uint32_t queues;
    const uint32_t *ids; /* one for each queue */
    const uint8_t *remote_gid;
    const struct prs_queue_address *remote; /* of the other side's queues, by id; NULL: it knows ours first */
    uint32_t depth;                         /* send slots of each queue; a power of two */
    uint32_t loopback_depth;                /* of the loopback queue */
    uint32_t receive_depth;                 /* of each queue: arrivals that may wait to be polled */
    struct prs_cqs *shared;                 /* completion queues for all links of a thread; NULL: its own */
};

/* What the other side needs to reach a queue. */
struct prs_queue_address {
    uint32_t number;
    uint32_t start; /* RC: first sequence number; SRD: the key that a request must show */
    /* RC: what both NICs could do beyond the standard (congestion control, adaptive routing, selective repeat). The
     * listener's queues name it, the connector's accept what they can of it. vendor 0: nothing. */
    struct {
        uint32_t vendor, options, mask;
    } ece;
};

struct prs_link_remote {
    uint8_t gid[16];
    uint16_t lid;
    uint8_t mtu;
    uint8_t reads; /* reads and atomics that the remote side serves at a time */
};

enum prs_event_kind { PRS_EVENT_DONE, PRS_EVENT_ARRIVAL, PRS_EVENT_ERROR };

struct prs_event {
    uint32_t kind;
    uint32_t queue;    /* prs_queue.id */
    uint32_t value;    /* DONE: position; ARRIVAL: immediate */
    uint32_t bytes;    /* ARRIVAL */
    int error;         /* ERROR, like the members below: -errno */
    int status;        /* enum ibv_wc_status */
    uint32_t vendor;   /* the vendor's code */
    const char *text;  /* name of the status */
    const char *cause; /* usual cause */
};

enum { PRS_POLL_MOST = 16, PRS_NIC_NAME_BYTES = 8 };

struct prs_nic_ops {
    char name[PRS_NIC_NAME_BYTES]; /* of its kind of queues, also for the other side: unlike kinds do not connect */
    const char *network;           /* of all its ports; NULL: the link layer of each port says what it is */
    bool chip_guids;               /* what its devices report as a guid is that of a chip */
    bool in_order;                 /* taken() and drained() are there */
    bool fence;                    /* a request can be held until earlier ones of its queue are complete */
    bool adds;                     /* supports PRS_WR_ADD; see prs_domain.adds */

    /* ---- memory. Any thread ---- */
    /* Return 0 or -errno, not logged. What is registered ends before its domain. */
    int (*register_memory)(struct prs_domain *domain, const struct prs_memory_range *range,
                           struct prs_registration *out);
    /* When it returns, the NIC does not use the memory any more. Return 0 or -errno, not logged. */
    int (*release_memory)(struct prs_domain *domain, struct prs_registration *registered);

    /* ---- queues ---- */
    /* Create the queues, ready to be connected. Return 0 or -errno. */
    int (*open)(const struct prs_link_options *options, struct prs_link **out);
    /* Flush, wait until the NIC no longer uses any memory, free. The driver bounds the wait. */
    void (*close)(struct prs_link *link);
    /* Let nothing that this side has posted take effect any more, and report nothing. NULL: its queues are its own, so
     * the error state does that. */
    void (*kill)(struct prs_link *link);
    void (*address)(const struct prs_queue *queue, struct prs_queue_address *out);
    /* How many reads and atomics of the other side this rail serves at a time. */
    uint8_t (*reads)(const struct prs_rail *rail);
    /* Return 0, PRS_AGAIN (the network is not ready: try later; *error is the cause, an errno) or -errno. */
    int (*connect)(struct prs_queue *queue, const struct prs_queue_address *address,
                   const struct prs_link_remote *remote, int *error);
    /* A queue of the link that is connected to itself, made at first use. Its events carry id. */
    int (*loopback)(struct prs_link *link, uint32_t id, struct prs_queue **out);
    /* Post ring[first] ... ring[first + count - 1] (modulo mask + 1) behind one doorbell. Return 0 or -errno, not
     * logged. */
    int (*post)(struct prs_queue *queue, const struct prs_wr *ring, uint32_t mask, uint32_t first, uint32_t count);
    /* How many writes with immediate of the queue have been polled since it was connected. */
    uint32_t (*taken)(const struct prs_queue *queue);
    /* After prs_nic_stop_queues(): have all receives been polled, so that taken() is final? */
    bool (*drained)(const struct prs_link *link);
    /* If the link is unflushed: destroy its queue pairs, which returns when the NIC uses no memory of theirs. Nothing is
     * polled any more, so taken() is final. */
    void (*end)(struct prs_link *link);
    /* Take at most PRS_POLL_MOST events. Return how many, or -errno. */
    int (*poll)(struct prs_link *link, struct prs_event *events);
    /* Take at most PRS_POLL_MOST events of any one link that has a user. *link is that link, also of an error; NULL: of
     * all. *more: others wait. Return how many, or -errno. NULL: links share no completion queues. */
    int (*poll_shared)(struct prs_cqs *cqs, struct prs_link **link, struct prs_event *events, bool *more);
};

extern const struct prs_nic_ops prs_nic_rc;  /* nic_rc.c: reliable connected queues */
extern const struct prs_nic_ops prs_nic_srd; /* nic_srd.c: AWS EFA's scalable reliable datagrams; not in all builds */

/* Log a failure with the name of the rail. error is an errno; 0: the library gave none. Return -errno. */
int prs_nic_fail(const struct prs_rail *rail, int error, const char *what);

/* Put all queues but the loopback queue into the error state. What is not complete will not take effect, and nothing of
 * the other side does any more. */
void prs_nic_stop_queues(struct prs_link *link);

/* Likewise with the loopback queue. Where connections share queues: kill(). */
void prs_nic_kill_link(struct prs_link *link);

/* Fill in an error event. Of a failed completion only wr_id, status, vendor_err and qp_num are valid. Error and cause
 * are those common to all back ends, which replace them where they know more. */
void prs_nic_error_event(const struct ibv_wc *wc, uint32_t queue, struct prs_event *out);

#endif

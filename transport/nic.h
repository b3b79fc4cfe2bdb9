/* SPDX-License-Identifier: Apache-2.0 */
/* What a kind of NIC queue must do for the layers above, which never ask for its name, only for its properties. Which
 * kind a device has is its domain's nic.
 *
 * in_order promises: requests of one queue take effect at the remote side in the order of posting, and a completion
 * with immediate is seen there only after the bytes of that request and of all earlier ones of the queue.
 * Without it, only the bytes of a request itself precede its own completion with immediate. */
#ifndef TRANSPORT_NIC_H
#define TRANSPORT_NIC_H

#include "transport/order.h"
#include "transport/rail.h"

struct ibv_cq;
struct ibv_qp;
struct ibv_wc;
struct prs_receive_sizes;

/* Made by a back end, which embeds it; so is the link. */
struct prs_queue {
    struct prs_link *link;
    struct ibv_qp *qp;
    uint32_t id;       /* the caller's name for it; comes back in events */
    bool takes_inline; /* the NIC takes PRS_INLINE_BYTES out of the request itself */
};

/* Queues of one peer over one rail, with one completion queue. */
struct prs_link {
    const struct prs_nic_ops *ops;
    const struct prs_rail *rail;
    struct ibv_cq *cq;
    uint64_t receives; /* posted; for the counters */
    struct prs_queue **queue;
    uint32_t queue_count;
    struct prs_queue *loopback;                    /* NULL until asked for */
    struct prs_queue *by_id[PRS_ORDER_MAX_QUEUES]; /* as completions name them; for RC without the loopback queue */
};

struct prs_link_options {
    const struct prs_rail *rail;
    const struct prs_config *config;
    int traffic_class;
    uint32_t queues;
    const uint32_t *ids;    /* one a queue */
    uint32_t depth;         /* send slots of each queue; a power of two */
    uint32_t receive_depth; /* arrivals that may wait to be polled, of each queue */
};

/* Where a queue is found by the other side. */
struct prs_queue_address {
    uint32_t number;
    uint32_t start; /* first sequence number (RC), or the key that a request must show (SRD) */
};

struct prs_link_remote {
    uint8_t gid[16];
    uint16_t lid;
    uint8_t mtu;
    uint8_t reads; /* that the remote side answers at a time */
};

enum prs_event_kind { PRS_EVENT_DONE, PRS_EVENT_ARRIVAL, PRS_EVENT_ERROR };

struct prs_event {
    uint32_t kind;
    uint32_t queue;    /* prs_queue.id */
    uint32_t value;    /* DONE: position; ARRIVAL: immediate */
    uint32_t bytes;    /* ARRIVAL */
    int error;         /* ERROR only, as the rest: -errno */
    int status;        /* the NIC's own code */
    uint32_t vendor;   /* the vendor's */
    const char *text;  /* what the NIC calls it */
    const char *cause; /* what it usually means */
};

enum { PRS_POLL_MOST = 16 };

struct prs_nic_ops {
    const char *name;
    bool in_order;
    bool fence; /* a request can be held until earlier ones of its queue are complete */
    bool adds;  /* PRS_WR_ADD; without it a signal is raised by its receiver's CPU (raise.h) */

    /* Create the completion queue and the queues, ready to be connected. Return 0 or -errno. */
    int (*open)(const struct prs_link_options *options, struct prs_link **out);
    /* Flush, let the NIC let go of all memory, free. Bounded by the driver. */
    void (*close)(struct prs_link *link);
    void (*address)(const struct prs_queue *queue, struct prs_queue_address *out);
    /* How many reads and atomics of the other side this rail answers at a time. */
    uint8_t (*reads)(const struct prs_rail *rail);
    /* Return 0, PRS_AGAIN (the network is not ready: try later; error holds the cause) or -errno. */
    int (*connect)(struct prs_queue *queue, const struct prs_queue_address *address,
                   const struct prs_link_remote *remote, int *error);
    /* A queue of the link that is connected to itself, made at first use; its event id is id. */
    int (*loopback)(struct prs_link *link, uint32_t id, struct prs_queue **out);
    /* Post ring[first] ... ring[first + count - 1] (modulo mask + 1) behind one doorbell. Return 0 or -errno, not
     * logged. */
    int (*post)(struct prs_queue *queue, const struct prs_wr *ring, uint32_t mask, uint32_t first, uint32_t count);
    /* Take at most PRS_POLL_MOST events. Return how many, or -errno. */
    int (*poll)(struct prs_link *link, struct prs_event *events);
};

extern const struct prs_nic_ops prs_nic_rc;  /* nic_rc.c: reliable connected queues */
extern const struct prs_nic_ops prs_nic_srd; /* nic_srd.c: AWS EFA's scalable reliable datagrams; not in all builds */

/* Fail with the rail's name: error is an errno, 0 when the library gave none. */
int prs_nic_fail(const struct prs_rail *rail, int error, const char *what);

/* For back ends: make a link's completion queue, with room for all that may complete at once, the loopback queue's
 * requests too, and its queues by open(). Return 0 or -errno, logged; what was made is left to prs_nic_close_link(). */
typedef int prs_queue_open_fn(struct prs_link *link, uint32_t id, const struct prs_receive_sizes *receives,
                              struct prs_queue **out);
int prs_nic_open_link(struct prs_link *link, const struct prs_link_options *options,
                      const struct prs_receive_sizes *receives, prs_queue_open_fn *open);

/* Close its queues, and with them the NIC's hold on the memory of their requests, and the completion queue. close()
 * takes NULL for a loopback queue that nobody has asked for. */
typedef void prs_queue_close_fn(struct prs_queue *queue);
void prs_nic_close_link(struct prs_link *link, prs_queue_close_fn *close);

/* All queues to the error state: nothing that is not complete will take effect. */
void prs_nic_kill_link(struct prs_link *link);

/* Of a failed completion only wr_id, status, vendor_err and qp_num mean anything. Error and cause are the back end's to
 * fill in. */
void prs_nic_error_event(const struct ibv_wc *wc, uint32_t queue, struct prs_event *out);

#endif

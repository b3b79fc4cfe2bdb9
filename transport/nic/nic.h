/* SPDX-License-Identifier: Apache-2.0 */
/* A back end: all that Perseus asks of one kind of NIC, from the list of its devices to its queues. The layers above
 * ask only for its properties, never for its name. Each device's domain holds the back end that drives it; backends.c
 * lists those that there are.
 *
 * in_order promises that requests of one queue take effect at the remote side in the order of posting. A completion
 * with immediate is then seen there only after the bytes of its request and of all earlier requests of the queue.
 * Without in_order, only the bytes of the request itself precede its completion with immediate. */
#ifndef TRANSPORT_NIC_H
#define TRANSPORT_NIC_H

#include "transport/order/order.h"
#include "transport/nic/rail.h"
#include "transport/nic/registration.h"

/* A device that a back end has found. Valid during the call of prs_nic_device_fn. */
struct prs_nic_device {
    const struct prs_nic_ops *nic;
    const char *name;
    void *handle; /* the back end's */
    /* which of several ways of its back end to drive a device of this name; NULL: there is one */
    const char *variant;
};
typedef void prs_nic_device_fn(void *arg, const struct prs_nic_device *device);

/* Base of a back end's own struct, like struct prs_link and struct prs_domain: completion queues of one rail that links
 * of one thread share. */
struct prs_shared_cqs {
    const struct prs_rail *rail;
};

struct prs_queue {
    struct prs_link *link;
    uint32_t id;       /* given by the caller; comes back in events */
    uint32_t number;   /* names it in other tools */
    bool takes_inline; /* the NIC takes PRS_INLINE_BYTES from the request itself */
};

/* Queues of one peer over one rail. */
struct prs_link {
    const struct prs_nic_ops *ops;
    const struct prs_rail *rail;
    struct prs_rail_address own;
    const bool *overrun;        /* whether its completion queue has lost completions; the event thread sets it */
    struct prs_shared_cqs *cqs; /* completion queues that it shares with other links; NULL: none */
    /* the object that takes its completions, where completion queues are shared; NULL: none yet */
    void *user;
    bool stopped; /* by stop() or kill() */
    /* the NIC did not move a queue to the error state: the queue may go on working, or complete nothing more */
    bool unflushed;
    /* set when the link is closed: the TCP stream, which ends when the other side has closed; -1: none */
    int stream_fd;
    uint64_t receives; /* posted; for the counters */
    struct prs_queue **queue;
    uint32_t queue_count;
    struct prs_queue *loopback; /* NULL until first used */
};

struct prs_link_options {
    const struct prs_rail *rail;
    const struct prs_rail_address *own; /* the rail's address, as the other side was told */
    const struct prs_config *config;
    int traffic_class;
    int service_level;
    uint32_t queues;
    const uint32_t *ids; /* one for each queue */
    const struct prs_nic_address *remote_port;
    /* addresses of the other side's queues, by id; NULL: not known yet, since the other side learns ours first */
    const struct prs_nic_address *remote;
    uint32_t depth;                /* send slots of each queue; a power of two */
    uint32_t loopback_depth;       /* of the loopback queue */
    uint32_t receive_depth;        /* of each queue: arrivals that may wait to be polled */
    struct prs_shared_cqs *shared; /* completion queues for all links of a thread; NULL: its own */
};

enum prs_event_kind { PRS_EVENT_DONE, PRS_EVENT_ARRIVAL, PRS_EVENT_ERROR };

struct prs_event {
    uint32_t kind;
    uint32_t queue;    /* prs_queue.id */
    uint32_t value;    /* DONE: position; ARRIVAL: immediate */
    uint32_t bytes;    /* ARRIVAL */
    int error;         /* ERROR, like the members below: -errno */
    int status;        /* the back end's own number for the error */
    uint32_t vendor;   /* the vendor's code */
    const char *text;  /* name of the status */
    const char *cause; /* usual cause */
};

enum { PRS_POLL_MOST = 16, PRS_NIC_NAME_BYTES = 8 };

struct prs_nic_ops {
    /* ---- properties ---- */
    /* names the kind of its queues, also for the other side: different kinds do not connect */
    char name[PRS_NIC_NAME_BYTES];
    const char *network; /* the kind of network of all its ports; NULL: probe() tells it for each port */
    bool chip_guids;     /* the guid that its devices report is that of a chip */
    bool in_order;       /* see above */
    bool fails_over;     /* a lost rail can be replaced: stop(), taken() and drained() are there */
    bool fails_early;    /* a request to a peer that has closed fails before the peer's farewell arrives */
    bool fence;          /* a request can be held until earlier ones of its queue are complete */
    bool adds;           /* supports PRS_WR_ADD; see prs_domain.adds */
    bool shares_cqs;     /* links of one thread can share completion queues: open_cqs() to poll_shared() */
    /* PERSEUS_PROVIDER chooses among its devices. If that is set, no other back end is asked. If not, this back end is
     * asked only where the others have found no device: a device that they passed over had a reason. */
    bool has_providers;

    /* ---- devices ---- */
    /* Call fn for each device that the back end finds. Return 0, or -errno (logged) if it cannot look for devices. */
    int (*devices)(const struct prs_config *config, prs_nic_device_fn *fn, void *arg);
    /* Fill in what struct prs_domain says, and report events by prs_domain_lose() and prs_domain_set_port() until the
     * close. domain->nic may become another table, which drives the device. Return 0 or -errno, logged. */
    int (*open_device)(const struct prs_nic_device *device, struct prs_domain **out);
    void (*close_device)(struct prs_domain *domain);
    /* Examine rail->port of rail->domain: fill in address, max_message_bytes, plain_bytes and, in info, speed_mbps,
     * link, is_roce, gid, gid_index, guid, adaptive_routing, max_peers, mem_kinds, mem_note, relaxed_ordering and
     * strict_is_last. Return 0, or 1: the port is unusable, for the reason in why. */
    int (*probe)(const struct prs_config *config, struct prs_rail *rail, char *why, size_t why_bytes);
    /* Read the rail's present address. Return 0 or -errno, not logged, with the reason in why. */
    int (*locate)(const struct prs_rail *rail, const struct prs_config *config, struct prs_rail_address *out, char *why,
                  size_t why_bytes);

    /* May this, from the other side, be the address of a port? */
    bool (*is_port)(const struct prs_nic_address *address);
    /* Write the address of a port, local or remote, as text. */
    void (*address_text)(const struct prs_nic_address *port, char *text, size_t text_bytes);

    /* ---- memory. Any thread ---- */
    /* Return 0 or -errno, not logged. Registrations end before their domain. */
    int (*register_memory)(struct prs_domain *domain, const struct prs_memory_range *range,
                           struct prs_registration *out);
    /* When it returns, the NIC does not use the memory any more. Return 0 or -errno, not logged. */
    int (*release_memory)(struct prs_domain *domain, struct prs_registration *registered);

    /* ---- queues ---- */
    /* Create the queues, ready to be connected. Return 0 or -errno, as connect() does. */
    int (*open)(const struct prs_link_options *options, struct prs_link **out);
    /* Flush, wait until the NIC no longer uses any memory of the link, and free the link. The driver bounds the
     * wait. */
    void (*close)(struct prs_link *link);
    /* Put all queues into the error state. If the loopback queue cannot be kept, it enters the error state too, and
     * reports that. Incomplete requests will not take effect, and neither will any request of the other side. */
    void (*stop)(struct prs_link *link);
    /* Make sure that from now on no request that this side has posted takes effect, not even on the loopback queue.
     * Where connections share queues, nothing is reported after this. */
    void (*kill)(struct prs_link *link);
    /* What the other side's connect() needs. */
    void (*address)(const struct prs_queue *queue, struct prs_nic_address *out);
    /* Return 0, PRS_AGAIN (the network is not ready: try later; *error is the cause, an errno) or -errno; -EPROTO: this
     * back end never sends such an address. */
    int (*connect)(struct prs_queue *queue, const struct prs_nic_address *address, const struct prs_nic_address *port,
                   int *error);
    /* A queue of the link that is connected to itself, made at first use. Its events carry id. */
    int (*loopback)(struct prs_link *link, uint32_t id, struct prs_queue **out);
    /* Post ring[first] ... ring[first + count - 1] (modulo mask + 1) behind one doorbell. Return 0 or -errno, not
     * logged; -EKEYREJECTED: a remote key is impossible for this kind of NIC; prs_error_last() names it. Positions are
     * consecutive, but while nothing is in flight, first may be any position. */
    int (*post)(struct prs_queue *queue, const struct prs_wr *ring, uint32_t mask, uint32_t first, uint32_t count);
    /* How many writes with immediate of the queue have been polled since it was connected. */
    uint32_t (*taken)(const struct prs_queue *queue);
    /* After stop(): have all receives been polled, so that taken() is final? */
    bool (*drained)(const struct prs_link *link);
    /* Only for a link whose `unflushed` is set; NULL in a back end that never sets it. Destroy the link's queue pairs;
     * on return the NIC uses none of their memory. Nothing more is polled, so taken() is final. */
    void (*end)(struct prs_link *link);
    /* Take at most PRS_POLL_MOST events. Return how many, or -errno. */
    int (*poll)(struct prs_link *link, struct prs_event *events);

    /* ---- completion queues that links share (decisions/0017) ---- */
    /* Return 0 or -ENOMEM. The caller has a reference; each link takes another. */
    int (*open_cqs)(const struct prs_rail *rail, struct prs_shared_cqs **out);
    void (*drop_cqs)(struct prs_shared_cqs *cqs);
    /* From now on user takes the completions of this link, including earlier ones. Return 0 or -ENOMEM. */
    int (*adopt)(struct prs_shared_cqs *cqs, struct prs_link *link, void *user);
    /* Take at most PRS_POLL_MOST events of any one link that has a user. *link is that link, also for an error; NULL:
     * the error concerns all links. *more: further events wait. Return how many, or -errno. */
    int (*poll_shared)(struct prs_shared_cqs *cqs, struct prs_link **link, struct prs_event *events, bool *more);
};

/* Log a failure with the name of the rail. error is an errno; 0: the library gave none. Return -errno. */
int prs_nic_fail(const struct prs_rail *rail, int error, const char *what);

#endif

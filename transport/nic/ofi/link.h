/* SPDX-License-Identifier: Apache-2.0 */
/* The queues of a peer over one rail. All post to one endpoint. */
#ifndef TRANSPORT_OFI_LINK_H
#define TRANSPORT_OFI_LINK_H

#include "transport/nic/nic.h"
#include "transport/nic/ofi/address.h"
#include "transport/nic/ofi/endpoint.h"
#include "transport/nic/ofi/rows.h"
#include "transport/nic/reorder.h"

struct prs_ofi_queue {
    struct prs_queue base; /* first */
    fi_addr_t to;          /* FI_ADDR_UNSPEC: not connected yet */
    uint64_t landing, landing_key;
    uint32_t remote_number; /* of the link at the other side's endpoint, if that is shared */
    uint32_t index;         /* in base.link->queue, likewise at the other side */
    uint32_t taken;         /* arrivals that the owner has polled */
    struct prs_reorder reorder;
    struct prs_ofi_request *request; /* [mask + 1], by position */
    /* [mask + 1], likewise: the empty writes that precede them; NULL: there are none */
    struct prs_ofi_request *fence;
    uint32_t mask;
    /* Posted, but not taken by the provider yet: from next up to upto in the ring. */
    const struct prs_wr *ring;
    uint32_t ring_mask, next, upto;
    bool fenced;         /* the empty write before the next one has been posted */
    uint64_t refused_ns; /* since when the provider takes nothing; 0: it does */
    bool proven;         /* a request of this queue has completed */
    bool halted;         /* a request could not be posted, so no later one is */
};

/* The upper half of completion data where each link has its endpoint: which queue it came from, and the size. */
enum { PRS_OFI_SIZE_BITS = 28 };
static_assert(PRS_ORDER_MAX_QUEUES_PER_RAIL <= 1 << (32 - PRS_OFI_SIZE_BITS), "a queue is named");

struct prs_ofi_arrival {
    uint32_t value, bytes, queue;
};

/* Arrivals that may wait for the owner, powers of two: at first; at most, and where links share an endpoint, since then
 * one that is not polled stops them all. */
enum { PRS_OFI_FEW_ARRIVALS = 64, PRS_OFI_ARRIVALS = 1024, PRS_OFI_SHARED_ARRIVALS = 1 << 16 };

struct prs_ofi_link {
    struct prs_link base;
    struct prs_ofi_endpoint *endpoint; /* its lock protects what follows */
    uint32_t number;                   /* of its place at the endpoint: arrivals name it */
    struct prs_ofi_link *next_dead;
    void (*free)(struct prs_ofi_link *link); /* for the endpoint */
    bool polled;                             /* by its owner, since the thread of attend.c last looked */
    bool joined;                             /* it has a place */
    bool ended;                              /* by kill() or stop() */
    bool drained;                            /* its owner has polled everything that had arrived */
    /* A request has failed: no other is posted. A provider may connect again, and would deliver it all the same. */
    bool failed;
    bool loopback_failed;           /* to be reported */
    uint64_t posted, failed_number; /* requests of base.queue[]; the first that has failed */
    uint32_t unfinished;            /* of them */
    struct prs_ofi_port remote;     /* the other side's */
    fi_addr_t to;                   /* likewise */
    uint64_t patience_ns;           /* to connect */
    uint64_t retry_ns;              /* time to connect again: as long as a NIC would try */
    uint32_t loopback_depth;
    bool overrun;
    uint32_t in_flight; /* requests */
    /* What waits for the owner, in addition to what is in the reorder buffers. */
    struct prs_ofi_arrival *arrival; /* a ring */
    uint32_t room, first, last;
    bool crowded;                /* one poll may need more slots than are free, and the ring cannot grow */
    bool told;                   /* that it was crowded, once */
    uint64_t crowded_ns;         /* when it became crowded; used where links share an endpoint */
    struct prs_event failure;    /* kind is PRS_EVENT_ERROR, if there is one */
    int broken;                  /* 0, or a -errno that polling returns */
    struct prs_ofi_known *known; /* rows of the other side's table, by number */
    uint32_t known_room;
};

static inline struct prs_ofi_link *prs_ofi_link_of(struct prs_link *link)
{
    return (struct prs_ofi_link *)link;
}

static inline struct prs_ofi_queue *prs_ofi_queue_of(struct prs_queue *queue)
{
    return (struct prs_ofi_queue *)queue;
}

static inline struct prs_ofi_queue *prs_ofi_queue_at(const struct prs_ofi_link *link, uint32_t i)
{
    return prs_ofi_queue_of(i < link->base.queue_count ? link->base.queue[i] : link->base.loopback);
}

static inline uint32_t prs_ofi_queue_count(const struct prs_ofi_link *link)
{
    return link->base.queue_count + (link->base.loopback ? 1 : 0);
}

#endif

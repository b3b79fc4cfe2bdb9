/* SPDX-License-Identifier: Apache-2.0 */
/* The queues of a peer over one rail: one endpoint of libfabric, with an address vector and a completion queue of its
 * own, so that all that arrives there is of this peer. All its queues post to that endpoint. */
#ifndef TRANSPORT_OFI_LINK_H
#define TRANSPORT_OFI_LINK_H

#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>

#include "transport/nic/nic.h"
#include "transport/nic/ofi/address.h"
#include "transport/nic/reorder.h"

/* Of a request in flight: what libfabric asks us to keep for it. */
struct prs_ofi_request {
    struct fi_context2 space; /* first; the provider's */
    struct prs_ofi_queue *queue;
    uint32_t position;
};

struct prs_ofi_queue {
    struct prs_queue base; /* first */
    fi_addr_t to;          /* FI_ADDR_UNSPEC: not connected yet */
    uint64_t landing, landing_key;
    struct prs_reorder reorder;
    struct prs_ofi_request *request; /* [mask + 1], by position */
    uint32_t mask;
    /* Posted, but not taken by the provider yet: from next up to upto in the ring. */
    const struct prs_wr *ring;
    uint32_t ring_mask, next, upto;
    uint64_t refused_ns; /* since when the provider takes nothing; 0: it does */
    bool proven;         /* a request of it has completed */
};

struct prs_ofi_arrival {
    uint32_t value, bytes;
};

enum { PRS_OFI_ARRIVALS = 1024 /* that may wait for the owner; a power of two */ };

struct prs_ofi_link {
    struct prs_link base;
    struct prs_ofi_link *next; /* in the device's list, under its lock, like the next */
    bool attended;
    void (*attend)(struct prs_ofi_link *link); /* called by the thread of attend.c */
    uint32_t locked;                           /* prs_spin_lock(); protects what follows */
    bool polled;                               /* by its owner, since the thread last looked */
    struct fid_ep *ep;                         /* NULL: closed by kill() */
    struct fid_cq *cq;
    struct fid_av *av;
    struct prs_ofi_port remote; /* the other side's */
    uint64_t patience_ns;
    uint32_t loopback_depth;
    bool overrun;
    /* What waits for the owner, beside what is in the reorder buffers. */
    struct prs_ofi_arrival *arrival; /* a ring */
    uint32_t first, last;
    struct prs_event failure; /* kind is PRS_EVENT_ERROR, if there is one */
    int broken;               /* 0, or a -errno that polling returns */
};

static inline struct prs_ofi_link *prs_ofi_link_of(struct prs_link *link)
{
    return (struct prs_ofi_link *)link;
}

#endif

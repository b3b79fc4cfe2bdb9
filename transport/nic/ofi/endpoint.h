/* SPDX-License-Identifier: Apache-2.0 */
/* An endpoint of libfabric, with its completion queue and address vector. A link has one of its own, so everything that
 * arrives there comes from its peer. Where registrations belong to an endpoint (FI_MR_ENDPOINT), all links of a device
 * share one. Each link has a place there, and an arrival carries the number of that place. A thread that polls keeps
 * the events of other links for their owners. */
#ifndef TRANSPORT_OFI_ENDPOINT_H
#define TRANSPORT_OFI_ENDPOINT_H

#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct prs_ofi_device;
struct prs_ofi_link;

/* What libfabric requires us to keep for a request in flight. */
struct prs_ofi_request {
    struct fi_context2 space;  /* first; the provider's */
    struct prs_ofi_link *link; /* NULL: a request of the device itself, of which only the completion matters */
    /* NULL: not a request of a queue, but one that must precede it: the read of a row (rows.h), or a fence */
    struct prs_ofi_queue *queue;
    uint32_t position;
    uint64_t number; /* of its link, in the order of posting */
};

struct prs_ofi_place {
    struct prs_ofi_link *link; /* NULL: free */
    uint32_t turn;             /* counts its uses: a late arrival must not reach a later link in the same place */
};

struct prs_ofi_endpoint {
    struct prs_ofi_device *device;
    struct prs_ofi_endpoint *next; /* in the device's list, under its lock, like the next */
    bool attended;
    uint32_t locked; /* prs_spin_lock(); protects what follows, and its links */
    bool shared;
    bool polled;       /* since the thread of attend.c last looked */
    struct fid_ep *ep; /* NULL: closed */
    struct fid_cq *cq;
    struct fid_av *av;
    int broken;       /* 0, or a -errno that polling returns */
    uint32_t crowded; /* links for which too many arrivals wait. Nothing is read until there are none */
    struct prs_ofi_place *place;
    uint32_t places;
    /* Links that have closed while the provider still had requests of theirs: freed when the endpoint closes. */
    struct prs_ofi_link *dead;
    uint32_t own_done, own_arrived; /* of the device's own requests, for the check of a shared one */
    uint64_t own_data;
    size_t own_bytes;
};

enum { PRS_OFI_PLACE_BITS = 16 };
#define PRS_OFI_OWN_NUMBER UINT32_MAX /* number of the device's own requests, which belong to no link */

/* completions: that may wait to be read. Return 0 or -errno, logged. */
int prs_ofi_endpoint_open(struct prs_ofi_device *device, bool shared, uint32_t completions,
                          struct prs_ofi_endpoint **out);
/* No link is left. The provider uses no memory of its requests when it returns. */
void prs_ofi_endpoint_close(struct prs_ofi_endpoint *endpoint);

/* Give the link a place. Return 0 or -ENOMEM; *number is what arrivals for it name. */
int prs_ofi_endpoint_join(struct prs_ofi_endpoint *endpoint, struct prs_ofi_link *link, uint32_t *number);
/* Keep nothing more for the link, and forget its addresses, including the one by which it reaches itself. Return false:
 * the provider still has requests of it, so the endpoint frees it. */
bool prs_ofi_endpoint_leave(struct prs_ofi_endpoint *endpoint, struct prs_ofi_link *link);
/* Under the lock. Return NULL: the link has left. */
static inline struct prs_ofi_link *prs_ofi_endpoint_find(const struct prs_ofi_endpoint *endpoint, uint32_t number)
{
    uint32_t at = number & ((1u << PRS_OFI_PLACE_BITS) - 1);

    if (at >= endpoint->places || (endpoint->place[at].turn << PRS_OFI_PLACE_BITS | at) != number)
        return NULL;
    return endpoint->place[at].link;
}

/* Write the endpoint's address, at most `room` bytes. Return how many; 0: it has no address any more. */
size_t prs_ofi_endpoint_name(struct prs_ofi_endpoint *endpoint, uint8_t *out, size_t room);
/* Name another endpoint. Return 0 or -errno, logged. */
int prs_ofi_endpoint_insert(struct prs_ofi_endpoint *endpoint, const uint8_t *name, fi_addr_t *out);

/* Log a failure with the names of device and provider; error: of libfabric, positive. Return -errno. */
int prs_ofi_fail(const struct prs_ofi_device *device, int error, const char *what);

#endif

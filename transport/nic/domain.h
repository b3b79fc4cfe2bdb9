/* SPDX-License-Identifier: Apache-2.0 */
/* An open device. A process opens each device once, reference-counted. */
#ifndef TRANSPORT_DOMAIN_H
#define TRANSPORT_DOMAIN_H

#include <stddef.h>
#include <sys/types.h>

#include "transport/nic/mr_cache.h"
#include "transport/nic/own_memory.h"
#include <perseus/perseus.h>

enum { PRS_DOMAIN_PORTS = 8 };

struct prs_nic_ops;
struct prs_nic_device;

/* Base of a back end's own struct. */
struct prs_domain {
    struct prs_domain *next; /* list of the process, under the list's lock */
    uint32_t refs;           /* likewise */
    pid_t owner;             /* a forked child must not touch the parent's device */
    char name[64];
    char variant[64];                 /* prs_nic_device.variant */
    const struct prs_nic_ops *lister; /* the back end that found the device; another one may drive it */
    struct prs_mr_cache mrs;
    /* Bytes that nobody reads: the target of flushes and of old values from atomics. Never exposed to peers. */
    struct prs_own_memory scratch;
    /* The back end's open_device() sets these. */
    const struct prs_nic_ops *nic;        /* that drives the device */
    char why_not[192];                    /* why the device cannot be used; "": it can be used */
    int ports;                            /* numbered from 1 */
    bool adds;                            /* the back end and the device have atomics */
    enum prs_atomic_scope atomic_scope;   /* that the device claims */
    uint32_t max_send_wr, max_receive_wr; /* requests that a queue may hold; 0: unknown */
    int max_registrations;                /* for error texts */
    /* Written by any thread of the back end, read by prs_domain_check(). */
    uint64_t down_since_ns[PRS_DOMAIN_PORTS]; /* [p]: when port p went down; 0: it is up */
    const char *fatal;                        /* what has made the device unusable; static text. NULL: nothing */
};

/* Open the device, or add a reference. Return 0 or -errno. */
int prs_domain_open(const struct prs_nic_device *device, struct prs_domain **out);
void prs_domain_close(struct prs_domain *domain);

/* For the back end: the device is unusable from now on; a port went down, or is up again. Any thread. */
void prs_domain_lose(struct prs_domain *domain, const char *event);
void prs_domain_set_port(struct prs_domain *domain, int port, bool up);

/* Return 0, or -EIO, not logged, when the device is unusable or the port has been down for longer than patience_ns;
 * *event names the event. */
int prs_domain_check(const struct prs_domain *domain, int port, uint64_t patience_ns, const char **event);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* An open device. A process has one verbs context and one protection domain for each device, reference-counted. */
#ifndef TRANSPORT_DOMAIN_H
#define TRANSPORT_DOMAIN_H

#include <stddef.h>
#include <sys/types.h>

#include "transport/nic/mr_cache.h"
#include "transport/nic/own_memory.h"
#include "transport/nic/verbs/verbs.h"

enum { PRS_DOMAIN_PORTS = 8 };

struct prs_nic_ops;

struct prs_domain {
    struct prs_domain *next; /* list of the process, under the list's lock */
    uint32_t refs;           /* likewise */
    pid_t owner;             /* a forked child must not touch the parent's device */
    char name[64];
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_device_attr attr;
    const struct prs_nic_ops *nic;        /* the back end for its queues; NULL: none */
    char why_not[192];                    /* the reason, if nic is NULL */
    bool adds;                            /* the back end and the device have atomics */
    uint32_t max_send_wr, max_receive_wr; /* requests that a queue may hold; 0: unknown */
    uint64_t max_message_bytes;           /* 0: the limit of each port */
    bool rnr_retry;                       /* SRD: the number of retries at a slow receiver can be set */
    struct prs_mr_cache mrs;
    /* Bytes that nobody reads: the target of flushes and of old values from atomics. Never exposed to peers. */
    struct prs_own_memory scratch;
    /* Written by the event thread, read by prs_domain_check(). */
    uint64_t down_since_ns[PRS_DOMAIN_PORTS]; /* [p]: when port p went down; 0: it is up */
    int fatal_event;                          /* 0 or enum ibv_event_type + 1 */
    pthread_t event_thread;
    int stop_fd; /* eventfd that ends the thread */
};

/* Open the device, or add a reference. device belongs to the caller's device list. Return 0 or -errno. */
int prs_domain_open(struct ibv_device *device, struct prs_domain **out);
void prs_domain_close(struct prs_domain *domain);

/* Return 0, or -EIO, not logged, when the device is unusable or the port has been down for longer than patience_ns;
 * *event names the event. */
int prs_domain_check(const struct prs_domain *domain, int port, uint64_t patience_ns, const char **event);

#endif

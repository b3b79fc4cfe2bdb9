/* SPDX-License-Identifier: Apache-2.0 */
/* A verbs device: prs_nic_ops from devices to release_memory, for all tables of this folder. */
#ifndef TRANSPORT_VERBS_DEVICE_H
#define TRANSPORT_VERBS_DEVICE_H

#include "transport/nic/nic.h"
#include "transport/nic/verbs/address.h"
#include "transport/nic/verbs/memory.h"
#include "transport/nic/verbs/port.h"
#include "transport/nic/verbs/verbs.h"

struct prs_verbs_device {
    struct prs_domain base; /* first */
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_device_attr attr;
    uint64_t max_message_bytes; /* 0: the limit of each port */
    bool rnr_retry;             /* SRD: the number of retries at a slow receiver can be set */
    pthread_t event_thread;
    int stop_fd; /* eventfd that ends the thread */
};

static inline struct prs_verbs_device *prs_verbs_device(struct prs_domain *domain)
{
    return (struct prs_verbs_device *)domain;
}

/* Each device that libibverbs knows. Return 0 or -errno, logged. */
int prs_verbs_devices(const struct prs_config *config, prs_nic_device_fn *fn, void *arg);
int prs_verbs_open_device(const struct prs_nic_device *device, struct prs_domain **out);
void prs_verbs_close_device(struct prs_domain *domain);

/* Reads and atomics that may be in flight on a queue, given the device's limit. */
uint8_t prs_verbs_limit_reads(int most);
/* How many reads and atomics of the other side a queue serves at a time. */
uint8_t prs_verbs_reads(const struct prs_verbs_device *device);

/* The half of a table that is the same for all kinds of queues. */
#define PRS_VERBS_DEVICE_OPS                                                                                           \
    .devices = prs_verbs_devices, .open_device = prs_verbs_open_device, .close_device = prs_verbs_close_device,        \
    .probe = prs_verbs_probe, .locate = prs_verbs_locate, .is_port = prs_verbs_is_port,                                \
    .address_text = prs_verbs_address_text, .register_memory = prs_verbs_register_memory,                              \
    .release_memory = prs_verbs_release_memory

#endif

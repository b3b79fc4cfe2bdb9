/* SPDX-License-Identifier: Apache-2.0 */
/* A network interface as a provider of libfabric drives it: one fabric and one domain of libfabric. */
#ifndef TRANSPORT_OFI_DEVICE_H
#define TRANSPORT_OFI_DEVICE_H

#include <pthread.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_rma.h>

#include "transport/nic/nic.h"
#include "transport/nic/ofi/ofi.h"
#include "transport/nic/ofi/rows.h"

enum { PRS_OFI_CHUNKS = 4096, PRS_OFI_CHUNK = 4096, PRS_OFI_INDEX_BITS = 24 };

/* What a local key stands for. */
struct prs_ofi_descriptor {
    void *descriptor; /* of the provider; while this is free: the index of the next that is free, or 0 */
    uint32_t key;     /* atomic. 0: of no registration */
    uint32_t uses;
};

struct prs_ofi_device {
    struct prs_domain base; /* first */
    struct fi_info *info;   /* what endpoints are made of */
    struct fid_fabric *fabric;
    struct fid_domain *domain;
    bool gpu_memory; /* the NIC reads and writes it */
    bool offsets;    /* remote addresses are offsets; then there are no rows */
    struct prs_ofi_rows rows;
    /* Where registrations belong to an endpoint: the endpoint that all links use. NULL: each link has its own. */
    struct prs_ofi_endpoint *endpoint;
    uint32_t next_key; /* atomic. Where the provider lets us choose keys */
    /* Requests of no bytes name this memory of the other side, since providers check the key of those too. */
    struct prs_own_memory landing;
    /* The lower bits of a local key are an index of these; the upper ones count its uses, so that a request that is
     * posted after its registration has ended is recognised. Chunks never move, so posting reads them without the
     * lock. */
    pthread_mutex_t lock;
    struct prs_ofi_descriptor *descriptors[PRS_OFI_CHUNKS];
    uint32_t descriptor_count; /* under the lock, like the next */
    uint32_t free_descriptor;  /* first of those that are free, each of which names the next; 0: none */
    /* The endpoints that the thread of attend.c looks after. */
    pthread_mutex_t attend_lock; /* protects these */
    pthread_cond_t changed;
    struct prs_ofi_endpoint *attended;
    pthread_t attendant;
    bool stop;
};

static inline struct prs_ofi_device *prs_ofi_device(const struct prs_domain *domain)
{
    return (struct prs_ofi_device *)domain;
}

static inline uint32_t prs_ofi_index(uint32_t key)
{
    return key & ((1u << PRS_OFI_INDEX_BITS) - 1);
}

static inline struct prs_ofi_descriptor *prs_ofi_descriptor_at(const struct prs_ofi_device *device, uint32_t key)
{
    return &device->descriptors[prs_ofi_index(key) / PRS_OFI_CHUNK][key % PRS_OFI_CHUNK];
}

/* Of a registration that exists. */
static inline void *prs_ofi_descriptor(const struct prs_ofi_device *device, uint32_t key)
{
    return prs_ofi_descriptor_at(device, key)->descriptor;
}

/* Under the lock of an endpoint that is attended: while that is held no registration ends. */
static inline bool prs_ofi_is_registered(const struct prs_ofi_device *device, uint32_t key)
{
    return __atomic_load_n(&prs_ofi_descriptor_at(device, key)->key, __ATOMIC_ACQUIRE) == key;
}

static inline bool prs_ofi_key_is_ours(const struct fi_info *info)
{
    return !(info->domain_attr->mr_mode & (PRS_OFI_MR_BASIC | FI_MR_PROV_KEY));
}

/* Does the provider count remote addresses from the start of a registration? Everybody else names virtual addresses, so
 * the key that the other side is told has the page at which the registration starts, and in the lower bits the key that
 * the provider knows, if we choose that. If not: rows.h. */
static inline bool prs_ofi_uses_offsets(const struct fi_info *info)
{
    return !(info->domain_attr->mr_mode & (PRS_OFI_MR_BASIC | FI_MR_VIRT_ADDR));
}

enum { PRS_OFI_KEY_BITS = 28, PRS_OFI_PAGE_BITS = 12 };

static inline uint64_t prs_ofi_tell_key(uint64_t start, uint64_t key)
{
    return start >> PRS_OFI_PAGE_BITS << PRS_OFI_KEY_BITS | key;
}

static inline struct fi_rma_iov prs_ofi_aim(bool offsets, uint64_t addr, uint64_t key, uint32_t bytes)
{
    struct fi_rma_iov aim = {addr, bytes, key};

    if (offsets) {
        aim.addr -= key >> PRS_OFI_KEY_BITS << PRS_OFI_PAGE_BITS;
        aim.key &= (1u << PRS_OFI_KEY_BITS) - 1;
    }
    return aim;
}

/* Addresses of IP sockets: an ordinary network, whose provider moves bytes by the CPU. */
static inline bool prs_ofi_uses_ip(const struct fi_info *info)
{
    return info->addr_format == FI_SOCKADDR || info->addr_format == FI_SOCKADDR_IN ||
           info->addr_format == FI_SOCKADDR_IN6;
}

/* Tables by the promises of the provider, which are the bits of the index. prs_nic_ofi finds the devices; one of these
 * tables drives each. */
enum { PRS_OFI_IN_ORDER = 1, PRS_OFI_FENCE = 2, PRS_OFI_FAILS_OVER = 4 };
extern const struct prs_nic_ops prs_ofi_tables[8];

int prs_ofi_devices(const struct prs_config *config, prs_nic_device_fn *fn, void *arg);
int prs_ofi_open_device(const struct prs_nic_device *which, struct prs_domain **out);
void prs_ofi_close_device(struct prs_domain *domain);
int prs_ofi_probe(const struct prs_config *config, struct prs_rail *rail, char *why, size_t why_bytes);
int prs_ofi_locate(const struct prs_rail *rail, const struct prs_config *config, struct prs_rail_address *out,
                   char *why, size_t why_bytes);
int prs_ofi_register_memory(struct prs_domain *domain, const struct prs_memory_range *range,
                            struct prs_registration *out);
int prs_ofi_release_memory(struct prs_domain *domain, struct prs_registration *registered);

#endif

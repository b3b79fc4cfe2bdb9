/* SPDX-License-Identifier: Apache-2.0 */
/* A program that is linked to this file has NICs whose remote keys have 64 bits, as those of libfabric do, instead of
 * those in transport/nic/backends.c. They are the verbs back ends; only the keys change. The upper half of each key
 * follows from the lower one, so that a key of which a bit was lost anywhere is found wrong, and refused. */
#include "transport/nic/backends.h"
#include "transport/nic/domain.h"
#include "transport/nic/verbs/verbs_nic.h"

enum { MAX_TABLES = 4 };

struct wide {
    struct prs_nic_ops ops; /* first */
    const struct prs_nic_ops *inner;
};

struct caller {
    prs_nic_device_fn *fn;
    void *arg;
};

static uint64_t widen(uint32_t key)
{
    return key | (uint64_t)(key * 0x85ebca6bu | 1u << 31) << 32;
}

/* The NIC refuses a wrong key: no registration has this one. */
static uint32_t narrow(uint64_t key)
{
    return widen((uint32_t)key) == key ? (uint32_t)key : ~(uint32_t)key;
}

static const struct prs_nic_ops *inner_of(const struct prs_domain *domain)
{
    return ((const struct wide *)domain->nic)->inner;
}

static int register_memory(struct prs_domain *domain, const struct prs_memory_range *range,
                           struct prs_registration *out)
{
    int r = inner_of(domain)->register_memory(domain, range, out);

    if (!r)
        out->remote_key = widen((uint32_t)out->remote_key);
    return r;
}

/* The ring is the order engine's, which sets the key again before it posts a request once more. */
static int post(struct prs_queue *queue, const struct prs_wr *ring, uint32_t mask, uint32_t first, uint32_t count)
{
    struct prs_wr *requests = (struct prs_wr *)(uintptr_t)ring;

    for (uint32_t i = 0; i < count; i++)
        if (requests[(first + i) & mask].len_bytes)
            requests[(first + i) & mask].remote_key = narrow(requests[(first + i) & mask].remote_key);
        else
            requests[(first + i) & mask].remote_key = 0;
    return inner_of(queue->link->rail->domain)->post(queue, ring, mask, first, count);
}

/* The table like this one, with wide keys. Devices are opened one at a time. */
static const struct prs_nic_ops *wide_table(const struct prs_nic_ops *inner)
{
    static struct wide table[MAX_TABLES];
    int i = 0;

    while (table[i].inner && table[i].inner != inner)
        i++; /* ends: verbs has fewer tables */
    if (!table[i].inner) {
        table[i].ops = *inner;
        table[i].ops.register_memory = register_memory;
        table[i].ops.post = post;
        table[i].inner = inner;
    }
    return &table[i].ops;
}

static int open_device(const struct prs_nic_device *device, struct prs_domain **out)
{
    int r = prs_nic_rc.open_device(device, out);

    if (!r)
        (*out)->nic = wide_table((*out)->nic);
    return r;
}

static const struct prs_nic_ops wide_verbs;

static void list_as_ours(void *arg, const struct prs_nic_device *device)
{
    struct caller *caller = arg;
    struct prs_nic_device ours = *device;

    ours.nic = &wide_verbs;
    caller->fn(caller->arg, &ours);
}

static int devices(const struct prs_config *config, prs_nic_device_fn *fn, void *arg)
{
    struct caller caller = {fn, arg};

    return prs_nic_rc.devices(config, list_as_ours, &caller);
}

static const struct prs_nic_ops wide_verbs = {.devices = devices, .open_device = open_device};

const struct prs_nic_ops *const prs_backends[] = {&wide_verbs, NULL};

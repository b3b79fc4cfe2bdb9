/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/nic/verbs/memory.h"

#include <errno.h>
#include <stdio.h>

#include "transport/nic/verbs/device.h"
#include "transport/util/error.h"

static int access_of(const struct prs_domain *domain, enum prs_access access)
{
    switch (access) {
    case PRS_ACCESS_LOCAL:
        return IBV_ACCESS_LOCAL_WRITE;
    case PRS_ACCESS_WRITTEN:
        return IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
    default: /* drivers refuse access flags that the device does not support */
        return IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
               (domain->adds ? IBV_ACCESS_REMOTE_ATOMIC : 0);
    }
}

int prs_verbs_register_memory(struct prs_domain *domain, const struct prs_memory_range *range,
                              struct prs_registration *out)
{
    int access = access_of(domain, range->access), relaxed = range->relaxed ? IBV_ACCESS_RELAXED_ORDERING : 0;
    struct ibv_pd *pd = prs_verbs_device(domain)->pd;
    void *addr = (void *)(uintptr_t)range->addr;
    struct ibv_mr *mr;

    errno = 0;
    if (range->kind == PRS_MEM_DMABUF)
        mr = prs_verbs.reg_dmabuf_mr(pd, range->dmabuf_offset, range->bytes, range->addr, range->dmabuf_fd,
                                     access | relaxed);
    else if (relaxed)
        mr = prs_verbs.reg_mr_iova2(pd, addr, range->bytes, range->addr, (unsigned)(access | relaxed));
    else
        mr = prs_verbs.reg_mr(pd, addr, range->bytes, access);
    if (!mr)
        return errno ? -errno : -EIO;
    *out = (struct prs_registration){.local_key = mr->lkey, .remote_key = mr->rkey, .object = mr};
    return 0;
}

int prs_verbs_refuse_key(const struct prs_queue *queue, const struct prs_wr *ring, uint32_t mask, uint32_t first)
{
    const struct prs_rail *rail = queue->link->rail;
    const struct prs_wr *wr;
    char text[320];

    do { /* the caller has found such a key, so the loop ends */
        wr = &ring[first++ & mask];
    } while (wr->remote_key <= UINT32_MAX);
    snprintf(
        text, sizeof(text),
        "%s:%d: a request for %#llx has the remote key %#llx, but keys of this kind of NIC have 32 bits: is it the "
        "key of another kind of NIC, or was it damaged on its way here?",
        rail->info.name, rail->port, (unsigned long long)wr->remote_addr, (unsigned long long)wr->remote_key);
    return prs_error_repeat(-EKEYREJECTED, text);
}

int prs_verbs_release_memory(struct prs_domain *domain, struct prs_registration *registered)
{
    (void)domain;
    return -prs_verbs.dereg_mr(registered->object);
}

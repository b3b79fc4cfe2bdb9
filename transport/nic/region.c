/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/nic/region.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "transport/host/cuda.h"
#include "transport/nic/nic.h"
#include "transport/util/error.h"

struct registration {
    const struct prs_rail *rail;
    const struct prs_mem *mem;
};

static const char *kind_name(int kind)
{
    return kind == PRS_MEM_CUDA ? "CUDA" : kind == PRS_MEM_DMABUF ? "DMA-BUF" : "host";
}

static int explain(const struct registration *what, const struct prs_mr_key *key, int error)
{
    const char *device = what->rail->info.name;
    unsigned long long mib = (key->end - key->start) >> 20;
    struct rlimit limit = {0};
    char locked[64] = "unlimited";

    getrlimit(RLIMIT_MEMLOCK, &limit);
    if (limit.rlim_cur != RLIM_INFINITY)
        snprintf(locked, sizeof(locked), "%llu KiB", (unsigned long long)limit.rlim_cur >> 10);
    if (error == ENOMEM || error == EAGAIN)
        return prs_fail(
            -ENOMEM,
            "%s: cannot register %s memory at %#llx (%llu MiB): no memory; RLIMIT_MEMLOCK is %s, the device "
            "allows %d registrations",
            device, kind_name(key->kind), (unsigned long long)key->start, mib, locked,
            what->rail->domain->max_registrations);
    return prs_fail(-error, "%s: cannot register %s memory at %#llx (%llu MiB): %s; %s", device, kind_name(key->kind),
                    (unsigned long long)key->start, mib, strerror(error),
                    key->kind == PRS_MEM_DMABUF ? "does its file hold all of it?" : "is it mapped and writable?");
}

static int register_one(void *arg, const struct prs_mr_key *key, struct prs_registration *out)
{
    const struct registration *what = arg;
    struct prs_domain *domain = what->rail->domain;
    struct prs_memory_range range = {
        .addr = key->start,
        .bytes = key->end - key->start,
        .kind = key->kind,
        .dmabuf_fd = what->mem->dmabuf_fd,
        .dmabuf_offset = what->mem->dmabuf_offset - ((uintptr_t)what->mem->addr - key->start),
        .access = PRS_ACCESS_ALL,
        .relaxed = what->rail->info.relaxed_ordering && !key->strict,
    };
    int r = domain->nic->register_memory(domain, &range, out);

    return r ? explain(what, key, -r) : 0;
}

static int release_one(void *arg, struct prs_registration *registered)
{
    struct prs_domain *domain = arg;

    return domain->nic->release_memory(domain, registered);
}

static int check_memory(const struct prs_fabric *fabric, const struct prs_rail_set *rails, const struct prs_mem *mem)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), addr = (uintptr_t)mem->addr;

    if (prs_check_reserved(mem, "struct prs_mem"))
        return -EINVAL;
    if (mem->kind != PRS_MEM_HOST && mem->kind != PRS_MEM_CUDA && mem->kind != PRS_MEM_DMABUF)
        return prs_fail(-EINVAL, "memory kind %d is unknown", mem->kind);
    if (mem->len_bytes > UINT64_MAX - addr - page)
        return prs_fail(-EINVAL, "memory at %#llx: a length of %zu bytes wraps around", (unsigned long long)addr,
                        mem->len_bytes);
    if (mem->kind == PRS_MEM_DMABUF && mem->dmabuf_offset < (addr & (page - 1)))
        return prs_fail(-EINVAL, "DMA-BUF memory at %#llx: offset %llu is before the start of its page",
                        (unsigned long long)addr, (unsigned long long)mem->dmabuf_offset);
    for (int i = 0; i < rails->count; i++) {
        const struct prs_rail_info *info = &fabric->rail[rails->rail[i]].info;

        if (!(info->mem_kinds & mem->kind))
            return prs_fail(-EOPNOTSUPP, "%s:%d cannot register %s memory: %s", info->name, info->port,
                            kind_name(mem->kind), info->mem_note);
    }
    return 0;
}

int prs_region_register(struct prs_fabric *fabric, const struct prs_rail_set *asked, const struct prs_mem *mem,
                        struct prs_region **out)
{
    struct prs_region *region;
    struct prs_rail_set all;
    const struct prs_rail_set *rails = &all;
    struct prs_mr_key key;
    int r;

    r = prs_fabric_check_set(fabric, asked, "prs_region_register");
    if (r)
        return r;
    (void)prs_fabric_add_standby(fabric, asked, PRS_POLICY_AUTO, &all);
    r = check_memory(fabric, rails, mem);
    if (r)
        return r;
    region = calloc(1, sizeof(*region));
    if (!region)
        return prs_fail(-ENOMEM, "no memory for a region");
    region->owner = getpid();
    key = prs_mr_key_make((uintptr_t)mem->addr, mem->len_bytes, (int)mem->kind, mem->flags & PRS_MEM_STRICT);
    for (int i = 0; i < rails->count; i++) {
        const struct prs_rail *rail = &fabric->rail[rails->rail[i]];
        struct registration what = {rail, mem};

        region->rail_mask |= 1ull << rails->rail[i];
        if (mem->len_bytes == 0)
            continue;
        r = prs_mr_cache_get(&rail->domain->mrs, &key, register_one, &what, &region->mr[i]);
        if (r) {
            prs_region_release(region);
            return r;
        }
        region->domain[i] = rail->domain;
        region->count = i + 1;
        region->local_key[rails->rail[i]] = region->mr[i]->registered.local_key;
        region->keys.rkey[i] = region->mr[i]->registered.remote_key;
    }
    *out = region;
    return 0;
}

int prs_region_register_cuda(struct prs_fabric *fabric, const struct prs_rail_set *rails, void *addr, size_t len_bytes,
                             uint32_t flags, struct prs_region **out)
{
    struct prs_mem mem = {.addr = addr, .len_bytes = len_bytes, .kind = PRS_MEM_CUDA, .dmabuf_fd = -1, .flags = flags};
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), offset = (uintptr_t)addr & (page - 1);
    uint64_t pages = (offset + len_bytes + page - 1) & ~(page - 1); /* the driver exports whole pages */
    struct prs_rail_info rail;
    bool peermem;
    int r = prs_rail_query(fabric, rails->rail[0], &rail);

    if (r < 0)
        return r;
    peermem = rail.mem_kinds & PRS_MEM_CUDA;
    if (rail.mem_kinds & PRS_MEM_DMABUF) {
        r = prs_cuda_dmabuf((uintptr_t)addr - offset, pages, !peermem, &mem.dmabuf_fd);
        if (!r) {
            mem.dmabuf_offset = offset;
            mem.kind = PRS_MEM_DMABUF;
            r = prs_region_register(fabric, rails, &mem, out);
            close(mem.dmabuf_fd);
        }
        if (!r || !peermem)
            return r;
        mem.dmabuf_fd = -1;
        mem.kind = PRS_MEM_CUDA;
    }
    return prs_region_register(fabric, rails, &mem, out);
}

void prs_region_release(struct prs_region *region)
{
    if (!region || region->owner != getpid())
        return;
    for (int i = 0; i < region->count; i++)
        prs_mr_cache_put(&region->domain[i]->mrs, region->mr[i], release_one, region->domain[i]);
    free(region);
}

void prs_region_keys(const struct prs_region *region, struct prs_keys *out)
{
    *out = region->keys;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Registered memory. */
#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tools/softnic/memory/agent.h"
#include "tools/softnic/memory/agent_slot.h"
#include "tools/softnic/memory/copier_client.h"
#include "tools/softnic/memory/device_mem.h"
#include "tools/softnic/verbs/devices.h"
#include "tools/softnic/verbs/qp.h"
#include "tools/softnic/world/object.h"

#undef ibv_reg_mr
#undef ibv_reg_mr_iova

enum {
    MR_ACCESS_KNOWN = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
                      IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND | IBV_ACCESS_ZERO_BASED | IBV_ACCESS_HUGETLB |
                      IBV_ACCESS_ON_DEMAND,
    MR_ACCESS_NEEDS_WRITE = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC,
    POPULATE_READ = 22, /* advice for madvise(), since Linux 5.14; older headers lack it */
    POPULATE_WRITE = 23,
    INITIATOR_NAP_US = 20,
    INITIATOR_PATIENCE_NS = 2000000000,
};

static bool is_mapped(uint64_t addr, uint64_t length)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), from = addr & ~(page - 1),
             to = (addr + length + page - 1) & ~(page - 1);

    /* MADV_NORMAL changes nothing, and fails with ENOMEM where a page of the range is not mapped. For a range that ends
     * in the very last page it returns EINVAL. */
    return to > from && (madvise((void *)(uintptr_t)from, to - from, MADV_NORMAL) == 0 || errno != ENOMEM);
}

static bool page_is_read_only(uint64_t addr)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    void *start = (void *)(uintptr_t)(addr & ~(page - 1));

    /* Both fail on old kernels and special mappings. Then assume that the pages are writable. */
    return madvise(start, page, POPULATE_WRITE) && madvise(start, page, POPULATE_READ) == 0;
}

/* Hardware pins every page for writing and so finds pages that cannot be written. Here the ends are tested instead,
 * since populating gigabytes that may never be used would cost too much. */
static bool writable(uint64_t addr, uint64_t length)
{
    return !page_is_read_only(addr) && !page_is_read_only(addr + length - 1);
}

/* A NIC translates whole pages, so a kernel checks this. */
static bool same_offset_in_page(uint64_t addr, uint64_t iova)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);

    if (!((addr ^ iova) & (page - 1)))
        return true;
    sn_log("registration of 0x%llx with iova 0x%llx: they are at different places in their pages",
           (unsigned long long)addr, (unsigned long long)iova);
    return false;
}

/* On-demand paging needs nothing here, since no page is ever pinned: the memory may even be mapped later. The whole
 * address space can be registered at once. */
static bool is_implicit(uint64_t addr, size_t length, unsigned int access)
{
    return (access & IBV_ACCESS_ON_DEMAND) && addr == 0 && length == SIZE_MAX;
}

/* Check what a kernel would check, and find out whether it is device memory. Return 0 or -errno. */
static int check_range(uint64_t addr, size_t length, uint64_t iova, unsigned int access, int fd, bool *device)
{
    *device = false;
    if ((access & ~(unsigned int)MR_ACCESS_KNOWN) ||
        ((access & MR_ACCESS_NEEDS_WRITE) && !(access & IBV_ACCESS_LOCAL_WRITE)))
        return -EINVAL;
    if (is_implicit(addr, length, access))
        return 0;
    if (addr + length < addr || length > SN_MAX_MR_BYTES ||
        !(fd >= 0 || (access & IBV_ACCESS_ZERO_BASED) || same_offset_in_page(addr, iova)))
        return -EINVAL;
    *device = fd >= 0 || (sn_device_mem && sn_device_mem->is_device(addr, length));
    if (*device || !length || (access & IBV_ACCESS_ON_DEMAND))
        return 0;
    return is_mapped(addr, length) && (!(access & IBV_ACCESS_LOCAL_WRITE) || writable(addr, length)) ? 0 : -EFAULT;
}

/* Every kind of registration comes through here. fd >= 0: a DMA-BUF, and addr is the offset in it. */
static struct ibv_mr *mr_register(struct ibv_pd *pd, uint64_t addr, size_t length, uint64_t iova, unsigned int access,
                                  int fd)
{
    struct sn_world *world = sn_self->world;
    struct sn_mr_shm *shm;
    struct ibv_mr *mr;
    uint32_t index;
    bool device;
    int r;

    access &= ~(unsigned int)IBV_ACCESS_OPTIONAL_RANGE;
    r = check_range(addr, length, iova, access, fd, &device);
    if (!r && (access & IBV_ACCESS_ON_DEMAND) && sn_ctx_dev(sn_ctx_of(pd->context))->efa)
        r = -EOPNOTSUPP;
    if (r < 0)
        goto fail;
    r = -ENOMEM;
    mr = calloc(1, sizeof(*mr));
    if (!mr)
        goto fail;
    r = sn_mr_shm_take(world, sn_self->proc, &index);
    if (r < 0)
        goto free_mr;
    shm = &world->mrs[index];
    shm->pd = pd->handle;
    shm->addr = addr;
    shm->iova = access & IBV_ACCESS_ZERO_BASED ? 0 : iova;
    shm->length = length;
    shm->access = access;
    shm->kind = device ? SN_MEM_CUDA : SN_MEM_HOST;
    shm->ctx = sn_ctx_of(pd->context)->index;
    r = device ? sn_device_mem->export_mr(shm, fd, addr) : 0;
    if (r < 0)
        goto give_shm;
    r = device ? sn_agent_start(shm->ctx, &sn_ctx_of(pd->context)->agent) : 0;
    if (r < 0)
        goto unexport;
    *mr = (struct ibv_mr){pd->context,
                          pd,
                          (void *)(uintptr_t)(fd >= 0 ? iova : addr),
                          length,
                          index,
                          index << 16 | shm->generation,
                          index << 16 | shm->generation};
    sn_pd_hold(pd);
    __atomic_store_n(&shm->key, mr->rkey, __ATOMIC_RELEASE); /* valid from here on */
    r = device ? sn_device_mem->prepare(index) : 0;
    if (r >= 0)
        return mr;
    ibv_dereg_mr(mr);
    goto fail;
unexport:
    sn_device_mem->unexport_mr(shm);
give_shm:
    sn_mr_shm_give(world, index);
free_mr:
    free(mr);
fail:
    errno = -r;
    return NULL;
}

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, unsigned int access)
{
    return mr_register(pd, (uintptr_t)addr, length, iova, access, -1);
}

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access)
{
    return mr_register(pd, (uintptr_t)addr, length, (uintptr_t)addr, (unsigned int)access, -1);
}

struct ibv_mr *ibv_reg_mr_iova(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, int access)
{
    return mr_register(pd, (uintptr_t)addr, length, iova, (unsigned int)access, -1);
}

/* Check the size of the exported buffer, as a kernel does. */
static bool inside_dmabuf(int fd, uint64_t offset, uint64_t length)
{
    off_t size = lseek(fd, 0, SEEK_END);
    uint64_t end = offset + length;

    if (size <= 0 || (end >= offset && end <= (uint64_t)size))
        return true;
    sn_log("DMA-BUF %d has %lld bytes: a registration of %llu at offset %llu does not fit", fd, (long long)size,
           (unsigned long long)length, (unsigned long long)offset);
    return false;
}

/* NCCL probes with fd -1: EOPNOTSUPP means that there are no DMA-BUFs, EBADF that there are. */
struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access)
{
    if (!sn_device_mem || !sn_device_mem->dmabuf_supported()) {
        errno = EOPNOTSUPP;
        return NULL;
    }
    if (fd < 0) {
        errno = EBADF;
        return NULL;
    }
    if (!inside_dmabuf(fd, offset, length)) {
        errno = EINVAL;
        return NULL;
    }
    return mr_register(pd, offset, length, iova, (unsigned int)access, fd);
}

/* As in the kernel's interface, an imported registration does not know its address. */
struct ibv_mr *ibv_import_mr(struct ibv_pd *pd, uint32_t handle)
{
    const struct sn_mr_shm *shm = handle < SN_MAX_MRS ? &sn_self->world->mrs[handle] : NULL;
    struct ibv_mr *mr = NULL;

    errno = EINVAL;
    if (shm && shm->owner == sn_self->proc + 1 && shm->key && shm->pd == pd->handle)
        mr = calloc(1, sizeof(*mr));
    if (mr) {
        *mr = (struct ibv_mr){pd->context, pd, NULL, shm->length, handle, shm->key, shm->key};
        sn_pd_hold(pd);
    }
    return mr;
}

void ibv_unimport_mr(struct ibv_mr *mr)
{
    sn_pd_release(mr->pd);
    free(mr);
}

/* Each queue pair of this process has at most its initiators and one runner. */
void sn_mr_users_wait(struct sn_ctx *ctx, uint32_t key)
{
    uint64_t give_up = sn_now_ns() + INITIATOR_PATIENCE_NS;

    pthread_mutex_lock(&ctx->qp_mutex);
    for (struct sn_qp *qp = ctx->qp_list; qp; qp = qp->next)
        if (sn_qp_initiators_wait(qp, give_up) < 0)
            sn_log("dereg_mr of key 0x%x: a request on queue pair %u did not end in 2 s", key, qp->qpn);
    pthread_mutex_unlock(&ctx->qp_mutex);
}

/* Wait until no agent copies to or from the region: an agent may still do so for a process that has died. */
static int agents_wait(const struct ibv_mr *mr)
{
    uint64_t give_up = sn_now_ns() + INITIATOR_PATIENCE_NS;
    const struct sn_world *world = sn_self->world;
    const struct sn_ctx *ctx = sn_ctx_of(mr->context);
    int r = 0;

    if (world->mrs[mr->handle].kind != SN_MEM_HOST && ctx->agent)
        r = sn_agent_wait(&world->agents[ctx->index], give_up);
    return !r && world->config.copier ? sn_copier_wait(world, give_up) : r;
}

/* When this returns, nobody uses the region, and nobody can until it has a key again. */
static void withdraw(struct ibv_mr *mr, struct sn_mr_shm *shm)
{
    /* [in-use] invalidate first, look for initiators second; pairs with sn_responder_enter and exec_counted. */
    __atomic_store_n(&shm->key, 0, __ATOMIC_SEQ_CST);
    sn_mr_users_wait(sn_ctx_of(mr->context), mr->rkey);
    if (agents_wait(mr) < 0)
        sn_log("key 0x%x: a copy made for another process did not end in 2 s", mr->rkey);
}

int ibv_dereg_mr(struct ibv_mr *mr)
{
    struct sn_mr_shm *shm = &sn_self->world->mrs[mr->handle];

    withdraw(mr, shm);
    if (sn_mr_has_windows(mr)) { /* a bind that saw the key has ended by now */
        __atomic_store_n(&shm->key, mr->rkey, __ATOMIC_RELEASE);
        sn_log("dereg_mr of key 0x%x: a memory window is bound to it", mr->rkey);
        return EBUSY;
    }
    if (shm->kind != SN_MEM_HOST)
        sn_device_mem->unexport_mr(shm);
    sn_mr_shm_give(sn_self->world, mr->handle);
    sn_pd_release(mr->pd);
    free(mr);
    return 0;
}

/* Check what a re-registration would change. Return 0 or -errno. */
static int rereg_check(const struct ibv_mr *mr, int flags, const struct ibv_pd *pd, struct sn_mr_shm *next)
{
    bool device;

    if (!flags || (flags & ~IBV_REREG_MR_FLAGS_SUPPORTED) ||
        ((flags & IBV_REREG_MR_CHANGE_PD) && (!pd || pd->context != mr->context)))
        return -EINVAL;
    if (next->kind != SN_MEM_HOST)
        return -EOPNOTSUPP;
    if (flags & IBV_REREG_MR_CHANGE_PD)
        next->pd = pd->handle;
    return check_range(next->addr, next->length, next->addr, next->access, -1, &device) ?: device ? -EOPNOTSUPP : 0;
}

/* The keys stay. While this runs, they are not valid. */
int ibv_rereg_mr(struct ibv_mr *mr, int flags, struct ibv_pd *pd, void *addr, size_t length, int access)
{
    struct sn_mr_shm *shm = &sn_self->world->mrs[mr->handle], next = *shm;
    int r;

    if (flags & IBV_REREG_MR_CHANGE_TRANSLATION) {
        next.addr = (uintptr_t)addr;
        next.length = length;
    }
    if (flags & IBV_REREG_MR_CHANGE_ACCESS)
        next.access = (unsigned int)access & ~(unsigned int)IBV_ACCESS_OPTIONAL_RANGE;
    r = rereg_check(mr, flags, pd, &next);
    if (r < 0) {
        errno = -r;
        return IBV_REREG_MR_ERR_INPUT; /* and nothing has changed */
    }
    withdraw(mr, shm);
    if (sn_mr_has_windows(mr)) {
        __atomic_store_n(&shm->key, mr->rkey, __ATOMIC_RELEASE);
        errno = EBUSY;
        return IBV_REREG_MR_ERR_INPUT;
    }
    shm->access = next.access;
    shm->pd = next.pd;
    if (flags & IBV_REREG_MR_CHANGE_TRANSLATION) {
        shm->addr = next.addr;
        shm->length = mr->length = length;
        shm->iova = next.access & IBV_ACCESS_ZERO_BASED ? 0 : next.addr;
        mr->addr = addr;
    }
    if (flags & IBV_REREG_MR_CHANGE_PD) {
        sn_pd_hold(pd);
        sn_pd_release(mr->pd);
        mr->pd = pd;
    }
    __atomic_store_n(&shm->key, mr->rkey, __ATOMIC_RELEASE);
    return 0;
}

static int advise(const struct ibv_pd *pd, enum ibv_advise_mr_advice advice, const struct ibv_sge *sge)
{
    const struct sn_mr_shm *mr = sn_mr_find(sn_self->world, sge->lkey);
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), from = sge->addr & ~(page - 1);
    bool write = advice == IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE;

    if (!mr || mr->owner != sn_self->proc + 1 || mr->pd != pd->handle || !(mr->access & IBV_ACCESS_ON_DEMAND) ||
        sge->addr < mr->iova || sge->length > mr->length || sge->addr - mr->iova > mr->length - sge->length ||
        (write && !(mr->access & IBV_ACCESS_LOCAL_WRITE)))
        return EINVAL;
    if (advice == IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT || !sge->length)
        return 0;
    from += mr->addr - mr->iova;
    /* EINVAL: the kernel cannot populate, which does no harm */
    return madvise((void *)(uintptr_t)from, (sge->addr & (page - 1)) + sge->length,
                   write ? POPULATE_WRITE : POPULATE_READ) &&
                   errno != EINVAL
               ? EFAULT
               : 0;
}

int sn_mr_advise(struct ibv_pd *pd, enum ibv_advise_mr_advice advice, uint32_t flags, struct ibv_sge *sge,
                 uint32_t count)
{
    int r =
        advice > IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT || (flags & ~(uint32_t)IBV_ADVISE_MR_FLAG_FLUSH) ? EINVAL : 0;

    for (uint32_t i = 0; i < count && !r; i++)
        r = advise(pd, advice, &sge[i]);
    return r;
}

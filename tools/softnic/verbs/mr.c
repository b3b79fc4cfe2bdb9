/* SPDX-License-Identifier: Apache-2.0 */
/* Protection domains and registered memory. */
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
                      IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND | IBV_ACCESS_ZERO_BASED | IBV_ACCESS_HUGETLB,
    MR_ACCESS_NEEDS_WRITE = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC,
    POPULATE_READ = 22, /* of madvise, since Linux 5.14; older headers lack them */
    POPULATE_WRITE = 23,
    INITIATOR_NAP_US = 20,
    INITIATOR_PATIENCE_NS = 2000000000,
};

static uint32_t newest_pd; /* handles are unique in the process: a key of one device is not valid on another */

static struct ibv_pd *pd_make(struct ibv_context *context, uint32_t handle)
{
    struct sn_pd *pd = calloc(1, sizeof(*pd));

    if (!pd)
        return NULL;
    pd->ibv.context = context;
    pd->ibv.handle = handle;
    return &pd->ibv;
}

struct ibv_pd *ibv_alloc_pd(struct ibv_context *context)
{
    return pd_make(context, __atomic_add_fetch(&newest_pd, 1, __ATOMIC_RELAXED));
}

struct ibv_pd *ibv_import_pd(struct ibv_context *context, uint32_t handle)
{
    if (handle - 1 < __atomic_load_n(&newest_pd, __ATOMIC_RELAXED))
        return pd_make(context, handle);
    errno = EINVAL;
    return NULL;
}

void ibv_unimport_pd(struct ibv_pd *pd)
{
    free(pd);
}

static bool pd_in_use(struct ibv_pd *pd)
{
    const struct sn_world *world = sn_self->world;

    if (__atomic_load_n(&sn_pd_of(pd)->handles, __ATOMIC_RELAXED))
        return true;
    for (uint32_t i = 0; i < world->mr_slots.fresh; i++)
        if (world->mrs[i].owner == sn_self->proc + 1 && world->mrs[i].pd == pd->handle && world->mrs[i].key)
            return true;
    for (uint32_t i = 0; i < world->qp_slots.fresh; i++)
        if (world->qps[i].owner == sn_self->proc + 1 && world->qps[i].pd == pd->handle && world->qps[i].qpn)
            return true;
    for (uint32_t i = 0; i < world->srq_slots.fresh; i++)
        if (world->srqs[i].owner == sn_self->proc + 1 && world->srqs[i].pd == pd->handle)
            return true;
    return false;
}

int ibv_dealloc_pd(struct ibv_pd *pd)
{
    if (pd_in_use(pd))
        return EBUSY;
    free(pd);
    return 0;
}

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

/* Check what a kernel would check, and find out whether it is device memory. Return 0 or -errno. */
static int check_range(uint64_t addr, size_t length, uint64_t iova, unsigned int access, int fd, bool *device)
{
    if ((access & ~(unsigned int)MR_ACCESS_KNOWN) ||
        ((access & MR_ACCESS_NEEDS_WRITE) && !(access & IBV_ACCESS_LOCAL_WRITE)) || addr + length < addr ||
        length > SN_MAX_MR_BYTES || !(fd >= 0 || (access & IBV_ACCESS_ZERO_BASED) || same_offset_in_page(addr, iova)))
        return -EINVAL;
    *device = fd >= 0 || (sn_device_mem && sn_device_mem->is_device(addr, length));
    if (*device || !length)
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

int ibv_rereg_mr(struct ibv_mr *mr, int flags, struct ibv_pd *pd, void *addr, size_t length, int access)
{
    errno = EOPNOTSUPP;
    return IBV_REREG_MR_ERR_INPUT;
}

/* As in the kernel's interface, an imported registration does not know its address. */
struct ibv_mr *ibv_import_mr(struct ibv_pd *pd, uint32_t handle)
{
    const struct sn_mr_shm *shm = handle < SN_MAX_MRS ? &sn_self->world->mrs[handle] : NULL;
    struct ibv_mr *mr = NULL;

    errno = EINVAL;
    if (shm && shm->owner == sn_self->proc + 1 && shm->key && shm->pd == pd->handle)
        mr = calloc(1, sizeof(*mr));
    if (mr)
        *mr = (struct ibv_mr){pd->context, pd, NULL, shm->length, handle, shm->key, shm->key};
    return mr;
}

void ibv_unimport_mr(struct ibv_mr *mr)
{
    free(mr);
}

/* Wait until no initiator that saw the key as valid is still at work. Each queue pair of this process has at most its
 * initiators and one runner. */
static void users_wait(const struct ibv_mr *mr)
{
    struct sn_ctx *ctx = sn_ctx_of(mr->context);
    uint64_t give_up = sn_now_ns() + INITIATOR_PATIENCE_NS;

    pthread_mutex_lock(&ctx->qp_mutex);
    for (struct sn_qp *qp = ctx->qp_list; qp; qp = qp->next)
        if (sn_qp_initiators_wait(qp, give_up) < 0)
            sn_log("dereg_mr of key 0x%x: a request on queue pair %u did not end in 2 s", mr->rkey, qp->qpn);
    pthread_mutex_unlock(&ctx->qp_mutex);
}

/* Wait for agents that may still copy it for a process that has died. */
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

int ibv_dereg_mr(struct ibv_mr *mr)
{
    struct sn_mr_shm *shm = &sn_self->world->mrs[mr->handle];

    /* [in-use] invalidate first, look for initiators second; pairs with sn_responder_enter and execute_counted. */
    __atomic_store_n(&shm->key, 0, __ATOMIC_SEQ_CST);
    users_wait(mr);
    if (agents_wait(mr) < 0)
        sn_log("dereg_mr of key 0x%x: a copy made for another process did not end in 2 s", mr->rkey);
    if (shm->kind != SN_MEM_HOST)
        sn_device_mem->unexport_mr(shm);
    sn_mr_shm_give(sn_self->world, mr->handle);
    free(mr);
    return 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Symmetric windows: each rank registers its own, and an allgather tells every rank the others. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "plugin/gin.h"
#include "plugin/result.h"
#include "transport/util/error.h"

/* What a rank tells the others about its window. From the wire: it may hold anything. */
struct window_info {
    int32_t result;
    uint32_t pad;
    uint64_t base, bytes;
    struct prs_keys keys, signal_keys;
};
static_assert(sizeof(struct window_info) == 24 + 2 * 8 * PRS_MAX_RAILS, "goes over the wire: no hidden padding");
static_assert(sizeof(struct window_info) <= GATHER_BYTES, "fits into an allgather");

/* Register for data and, if data may be written in relaxed order, a second time for signals. */
static int register_both(struct gin_comm *comm, const struct prs_mem *mem, uint64_t flags, struct gin_memory *memory,
                         struct window_info *info)
{
    struct prs_mem one = *mem;
    int r;

    if (!mem->kind)
        return prs_fail(-EINVAL, "GIN: registration of %p: its type is neither host (1) nor CUDA (2)", mem->addr);
    if (flags & GIN_MEMORY_STRICT)
        one.flags |= PRS_MEM_STRICT;
    r = prs_region_register(comm->fabric, &comm->rails, &one, &memory->region);
    if (r < 0)
        return r;
    prs_region_keys(memory->region, &info->keys);
    info->signal_keys = info->keys;
    if (!comm->relaxed || (flags & GIN_MEMORY_STRICT))
        return 0;
    /* A kernel may signal into any window. A strict write never overtakes relaxed ones that were issued before it. */
    one.flags |= PRS_MEM_STRICT;
    r = prs_region_register(comm->fabric, &comm->rails, &one, &memory->strict);
    if (!r)
        prs_region_keys(memory->strict, &info->signal_keys);
    return r;
}

static void free_window(struct gin_memory *memory)
{
    if (!memory)
        return;
    prs_region_release(memory->strict);
    prs_region_release(memory->region);
    free(memory);
}

/* A rank whose registration failed takes part, too, so that all ranks fail and none waits: memory and all may be NULL
 * then. all: room for an allgather. Return 0 or -errno. */
static int gather_windows(struct gin_comm *comm, struct gin_memory *memory, const struct window_info *mine,
                          uint8_t *all)
{
    int r = gather_run(&comm->gather, mine, sizeof(*mine), all);

    if (mine->result < 0)
        return mine->result;
    for (uint32_t rank = 0; rank < comm->ranks && !r; rank++) {
        struct window_info info;

        memcpy(&info, all + (size_t)rank * GATHER_BYTES, sizeof(info));
        if (info.result < 0)
            r = prs_fail(info.result, "GIN: rank %u could not register its window", rank);
        memory->remote[rank] = (struct gin_remote){info.base, info.bytes, info.keys, info.signal_keys};
    }
    return r;
}

/* kind 0 in mem: the caller has named an impossible type. */
net_result gin_memory_register(void *coll_comm, const struct prs_mem *mem, bool is_device, uint64_t flags,
                               void **mhandle)
{
    struct gin_comm *comm = gin_comm_of(coll_comm);
    struct window_info info = {.base = (uintptr_t)mem->addr, .bytes = mem->len_bytes};
    struct gin_memory *memory;
    uint8_t *all;
    int r;

    *mhandle = NULL;
    if (!comm)
        return result_from_errno(prs_fail(-EINVAL, "GIN: registration with a handle that is not a comm"));
    all = malloc((size_t)comm->ranks * GATHER_BYTES);
    memory = calloc(1, sizeof(*memory) + comm->ranks * sizeof(memory->remote[0]));
    if (!memory || !all) {
        info.result = prs_fail(-ENOMEM, "GIN: window of %u ranks: no memory", comm->ranks);
    } else {
        memory->base = info.base;
        memory->bytes = info.bytes;
        memory->is_device = is_device;
        memory->ranks = comm->ranks;
        info.result = register_both(comm, mem, flags, memory, &info);
    }
    r = gather_windows(comm, memory, &info, all);
    free(all);
    if (r < 0) {
        free_window(memory);
        return result_from_errno(r);
    }
    *mhandle = memory;
    return NET_SUCCESS;
}

net_result rma_memory_reg(void *coll_comm, void *data, size_t size, int type, uint64_t flags, void **mhandle)
{
    struct prs_mem mem = {.addr = data, .len_bytes = size, .dmabuf_fd = -1};

    mem.kind = type == NET_PTR_CUDA ? PRS_MEM_CUDA : type == NET_PTR_HOST ? PRS_MEM_HOST : 0;
    return gin_memory_register(coll_comm, &mem, type == NET_PTR_CUDA, flags, mhandle);
}

net_result rma_memory_reg_dmabuf(void *coll_comm, void *data, size_t size, int type, uint64_t offset, int fd,
                                 uint64_t flags, void **mhandle)
{
    struct prs_mem mem = {
        .addr = data, .len_bytes = size, .kind = PRS_MEM_DMABUF, .dmabuf_fd = fd, .dmabuf_offset = offset};

    return gin_memory_register(coll_comm, &mem, type == NET_PTR_CUDA, flags, mhandle);
}

/* NCCL's kernels put the second handle into their commands, and its proxy then passes that one for windows and signals.
 * So both handles must mean the same. */
static net_result same_for_kernels(net_result result, void *const *mhandle, void **for_kernels)
{
    if (for_kernels)
        *for_kernels = *mhandle;
    return result;
}

net_result gin_memory_reg(void *coll_comm, void *data, size_t size, int type, uint64_t flags, void **mhandle,
                          void **for_kernels)
{
    return same_for_kernels(rma_memory_reg(coll_comm, data, size, type, flags, mhandle), mhandle, for_kernels);
}

net_result gin_memory_reg_dmabuf(void *coll_comm, void *data, size_t size, int type, uint64_t offset, int fd,
                                 uint64_t flags, void **mhandle, void **for_kernels)
{
    return same_for_kernels(rma_memory_reg_dmabuf(coll_comm, data, size, type, offset, fd, flags, mhandle), mhandle,
                            for_kernels);
}

net_result gin_memory_release(void *coll_comm, void *mhandle)
{
    struct gin_comm *comm = gin_comm_of(coll_comm);

    if (mhandle && comm)
        gin_raise_arrived(comm, gin_request_progress);
    if (mhandle)
        free_window(mhandle);
    return NET_SUCCESS;
}

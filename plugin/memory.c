/* SPDX-License-Identifier: Apache-2.0 */
#include "plugin/memory.h"

#include <errno.h>
#include <stdlib.h>

#include "plugin/comm.h"
#include "plugin/result.h"
#include "transport/util/error.h"

static net_result register_region(struct comm *comm, const struct prs_mem *mem, bool is_device, void **mhandle)
{
    struct memory *memory = calloc(1, sizeof(*memory));
    struct prs_keys keys;
    uint64_t wide;
    int r;

    if (!memory)
        return result_from_errno(prs_fail(-ENOMEM, "registration of %zu bytes: out of memory", mem->len_bytes));
    r = prs_region_register(comm->fabric, &comm->rails, mem, &memory->region);
    if (r < 0) {
        free(memory);
        return result_from_errno(r);
    }
    prs_region_keys(memory->region, &keys);
    wide = cts_keys_make(&memory->keys, &keys, comm->rails.count);
    if (wide) {
        prs_region_release(memory->region);
        free(memory);
        return result_from_errno(prs_fail(
            -EOPNOTSUPP,
            "registration of %p: NCCL has merged %d NICs, of which one gives memory the key %#llx; with keys of more "
            "than 32 bits at most %d can be merged: see NCCL_NET_MERGE_LEVEL and NCCL_NET_FORCE_MERGE",
            mem->addr, comm->rails.count, (unsigned long long)wide, CTS_KEY_WORDS));
    }
    memory->is_device = is_device;
    *mhandle = memory;
    return NET_SUCCESS;
}

net_result memory_register(void *comm, void *data, size_t size, int type, void **mhandle)
{
    struct prs_mem mem = {.addr = data, .len_bytes = size, .dmabuf_fd = -1};

    *mhandle = NULL;
    switch (type) {
    case NET_PTR_HOST:
        mem.kind = PRS_MEM_HOST;
        break;
    case NET_PTR_CUDA:
        mem.kind = PRS_MEM_CUDA;
        break;
    default:
        return result_from_errno(
            prs_fail(-EINVAL, "registration of %p: type %d is neither host (1) nor CUDA (2)", data, type));
    }
    return register_region(comm, &mem, type == NET_PTR_CUDA, mhandle);
}

net_result memory_register_dmabuf(void *comm, void *data, size_t size, int type, uint64_t offset, int fd,
                                  void **mhandle)
{
    struct prs_mem mem = {
        .addr = data, .len_bytes = size, .kind = PRS_MEM_DMABUF, .dmabuf_fd = fd, .dmabuf_offset = offset};

    *mhandle = NULL;
    return register_region(comm, &mem, type == NET_PTR_CUDA, mhandle);
}

net_result memory_release(void *comm, void *mhandle)
{
    struct memory *memory = mhandle;

    (void)comm; /* the fabric owns regions: a region may outlive the comm, and the comm a region */
    if (memory)
        prs_region_release(memory->region);
    free(memory);
    return NET_SUCCESS;
}

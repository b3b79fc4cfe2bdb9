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
    int r;

    if (!memory)
        return result_from_errno(prs_fail(-ENOMEM, "registration of %zu bytes: out of memory", mem->len_bytes));
    r = prs_region_register(comm->fabric, &comm->rails, mem, &memory->region);
    if (r < 0) {
        free(memory);
        return result_from_errno(r);
    }
    prs_region_keys(memory->region, &memory->keys);
    memory->keys_check = cts_check_keys(&memory->keys);
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

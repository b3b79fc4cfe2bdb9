/* SPDX-License-Identifier: Apache-2.0 */
/* CUDA's virtual memory management: memory, addresses and mappings, each freed separately. Memory is a file, so that
 * another process can map it; there the last page says which device it is of. */
#include <cstring>
#include <cuda.h>
#include <fcntl.h>
#include <map>
#include <mutex>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tools/hopper/device_memory.h"
#include "tools/hopper/hopper.h"
#include "tools/hopper/virtual.h"

namespace hopper
{

enum : size_t { STEP = 2 << 20, TRAILER = 4096 };

struct object { /* gone when it has neither a handle nor a mapping */
    int file, device, handles, maps;
    size_t bytes;
    bool imported;
};

static std::mutex lock; /* protects everything below; nothing below is ever destroyed */
static std::map<uint64_t, object> &objects = *new std::map<uint64_t, object>();
static std::map<uintptr_t, size_t> &reserved = *new std::map<uintptr_t, size_t>();
static std::map<uintptr_t, uint64_t> &mapped = *new std::map<uintptr_t, uint64_t>(); /* object by address */
static uint64_t newest;
static std::map<int, uint64_t> &limits = *new std::map<int, uint64_t>();

static uint64_t bytes_locked(int device)
{
    uint64_t bytes = 0;
    for (const auto &o : objects)
        bytes += o.second.device == device && !o.second.imported ? o.second.bytes : 0;
    return bytes;
}

static void drop_locked(uint64_t handle)
{
    auto found = objects.find(handle);
    if (found->second.handles > 0 || found->second.maps > 0)
        return;
    (void)close(found->second.file);
    objects.erase(found);
}

static CUresult granularity(size_t *bytes, const CUmemAllocationProp *, CUmemAllocationGranularity_flags)
{
    *bytes = STEP;
    return CUDA_SUCCESS;
}

static CUresult create(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *prop,
                       unsigned long long)
{
    std::lock_guard<std::mutex> held(lock);
    int device = prop->location.id, file;
    if (bytes == 0 || bytes % STEP != 0 || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
        prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE || device < 0 || device >= (int)hopper_devices())
        return CUDA_ERROR_INVALID_VALUE;
    if (limits.count(device) != 0 && bytes_locked(device) + bytes > limits[device])
        return CUDA_ERROR_OUT_OF_MEMORY;
    file = memfd_create("hopper", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, (off_t)(bytes + TRAILER)) != 0 ||
        pwrite(file, &device, sizeof(device), (off_t)bytes) != sizeof(device)) {
        if (file >= 0)
            (void)close(file);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    /* As all new memory, it holds not-a-numbers. */
    void *all = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (all == MAP_FAILED) {
        (void)close(file);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    memset(all, 0xff, bytes);
    (void)munmap(all, bytes);
    objects[ *handle = ++newest] = {file, device, 1, 0, bytes, false};
    return CUDA_SUCCESS;
}

static CUresult release(CUmemGenericAllocationHandle handle)
{
    std::lock_guard<std::mutex> held(lock);
    auto found = objects.find(handle);
    if (found == objects.end() || found->second.handles == 0)
        return CUDA_ERROR_INVALID_VALUE;
    found->second.handles--;
    drop_locked(handle);
    return CUDA_SUCCESS;
}

static CUresult reserve(CUdeviceptr *at, size_t bytes, size_t, CUdeviceptr, unsigned long long)
{
    std::lock_guard<std::mutex> held(lock);
    if (bytes == 0 || bytes % STEP != 0)
        return CUDA_ERROR_INVALID_VALUE;
    void *p = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    reserved[(uintptr_t)p] = bytes;
    *at = (CUdeviceptr)(uintptr_t)p;
    return CUDA_SUCCESS;
}

static CUresult unreserve(CUdeviceptr at, size_t bytes)
{
    std::lock_guard<std::mutex> held(lock);
    auto found = reserved.find((uintptr_t)at);
    if (found == reserved.end() || found->second != bytes || mapped.count((uintptr_t)at) != 0)
        return CUDA_ERROR_INVALID_VALUE;
    (void)munmap((void *)(uintptr_t)at, bytes);
    reserved.erase(found);
    return CUDA_SUCCESS;
}

/* Maps only a whole object at a whole reservation, which is all that Perseus needs. */
static CUresult map(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                    unsigned long long)
{
    std::lock_guard<std::mutex> held(lock);
    auto found = objects.find(handle);
    auto room = reserved.find((uintptr_t)at);
    if (found == objects.end() || found->second.handles == 0 || room == reserved.end() || room->second != bytes ||
        found->second.bytes != bytes || offset != 0 || mapped.count((uintptr_t)at) != 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (mmap((void *)(uintptr_t)at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, found->second.file, 0) ==
        MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    found->second.maps++;
    mapped[(uintptr_t)at] = handle;
    memory_map((void *)(uintptr_t)at, bytes, found->second.device);
    return CUDA_SUCCESS;
}

static CUresult unmap(CUdeviceptr at, size_t bytes)
{
    std::lock_guard<std::mutex> held(lock);
    auto found = mapped.find((uintptr_t)at);
    if (found == mapped.end() || objects[found->second].bytes != bytes)
        return CUDA_ERROR_INVALID_VALUE;
    uint64_t handle = found->second;
    memory_unmap((void *)(uintptr_t)at);
    (void)mmap((void *)(uintptr_t)at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    mapped.erase(found);
    objects[handle].maps--;
    drop_locked(handle);
    return CUDA_SUCCESS;
}

static CUresult set_access(CUdeviceptr at, size_t, const CUmemAccessDesc *access, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (!memory_allow((void *)(uintptr_t)at, access[i].location.id))
            return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

static CUresult export_file(void *file, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                            unsigned long long)
{
    std::lock_guard<std::mutex> held(lock);
    auto found = objects.find(handle);
    if (found == objects.end() || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_INVALID_VALUE;
    *(int *)file = fcntl(found->second.file, F_DUPFD_CLOEXEC, 3);
    return *(int *)file < 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

static CUresult import_file(CUmemGenericAllocationHandle *handle, void *os_handle, CUmemAllocationHandleType type)
{
    std::lock_guard<std::mutex> held(lock);
    struct stat status;
    int device, file = fcntl((int)(intptr_t)os_handle, F_DUPFD_CLOEXEC, 3);
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || file < 0 || fstat(file, &status) != 0 ||
        pread(file, &device, sizeof(device), status.st_size - (off_t)TRAILER) != sizeof(device)) {
        if (file >= 0)
            (void)close(file);
        return CUDA_ERROR_INVALID_VALUE;
    }
    objects[ *handle = ++newest] = {file, device, 1, 0, (size_t)status.st_size - TRAILER, true};
    return CUDA_SUCCESS;
}

void *virtual_call(const char *name)
{
    static const struct {
        const char *name;
        void *fn;
    } calls[] = {
        {"cuMemGetAllocationGranularity", (void *)granularity},
        {"cuMemCreate", (void *)create},
        {"cuMemRelease", (void *)release},
        {"cuMemAddressReserve", (void *)reserve},
        {"cuMemAddressFree", (void *)unreserve},
        {"cuMemMap", (void *)map},
        {"cuMemUnmap", (void *)unmap},
        {"cuMemSetAccess", (void *)set_access},
        {"cuMemExportToShareableHandle", (void *)export_file},
        {"cuMemImportFromShareableHandle", (void *)import_file},
    };
    for (const auto &c : calls)
        if (strcmp(c.name, name) == 0)
            return c.fn;
    return NULL;
}

} // namespace hopper

uint64_t hopper_virtual_bytes(int device)
{
    std::lock_guard<std::mutex> held(hopper::lock);
    return hopper::bytes_locked(device);
}

void hopper_limit_virtual_bytes(int device, uint64_t bytes)
{
    std::lock_guard<std::mutex> held(hopper::lock);
    hopper::limits[device] = bytes;
}

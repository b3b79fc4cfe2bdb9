/* SPDX-License-Identifier: Apache-2.0 */
#include "fused/core/span.h"

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>
#include <errno.h>

#include "fused/core/cuda.h"
#include "transport/util/error.h"

/* ---- the driver's calls, found through the runtime, so that the library loads without libcuda.so ---- */
enum call { GRANULARITY, CREATE, RELEASE, RESERVE, UNRESERVE, MAP, UNMAP, ACCESS, EXPORT, IMPORT, CALLS };

static const char *const names[CALLS] = {"cuMemGetAllocationGranularity",
                                         "cuMemCreate",
                                         "cuMemRelease",
                                         "cuMemAddressReserve",
                                         "cuMemAddressFree",
                                         "cuMemMap",
                                         "cuMemUnmap",
                                         "cuMemSetAccess",
                                         "cuMemExportToShareableHandle",
                                         "cuMemImportFromShareableHandle"};

/* NULL (logged): the driver has no such call. */
static void *find(enum call call)
{
    void *fn = NULL;
    enum cudaDriverEntryPointQueryResult found;
    if (cudaGetDriverEntryPointByVersion(names[call], &fn, 12000, cudaEnableDefault, &found) == cudaSuccess &&
        found == cudaDriverEntryPointSuccess)
        return fn;
    (void)prs_fail(-ENOTSUP, "fused: the driver has no %s: older than CUDA 12.0", names[call]);
    return NULL;
}

static int check(enum call call, const void *at, size_t bytes, CUresult e)
{
    if (e == CUDA_SUCCESS)
        return 0;
    if (e == CUDA_ERROR_OUT_OF_MEMORY)
        return prs_fail(-ENOMEM, "%s failed: out of memory (%zu bytes)", names[call], bytes);
    return prs_fail(call == IMPORT || call == ACCESS ? -EXDEV : -EIO, "%s of %zu bytes at %p failed: CUDA error %d",
                    names[call], bytes, at, (int)e);
}

#define CALL(call, type, at, bytes, ...)                                                                               \
    ({                                                                                                                 \
        type fn_ = (type)find(call);                                                                                   \
        fn_ ? check(call, at, bytes, fn_(__VA_ARGS__)) : -ENOTSUP;                                                     \
    })

static CUmemAllocationProp memory_of(int device)
{
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR};
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    prop.location.id = device;
    return prop;
}

/* ---- spans ---- */
static int reserve(struct prs_span *s, size_t bytes, int device)
{
    CUmemAllocationProp prop = memory_of(device);
    CUdeviceptr at = 0;
    size_t step = 0;
    int r = CALL(GRANULARITY, PFN_cuMemGetAllocationGranularity_v10020, NULL, bytes, &step, &prop,
                 CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
    if (r)
        return r;
    s->bytes = bytes;
    s->sleeps = true;
    s->reserved = (bytes + step - 1) / step * step;
    r = CALL(RESERVE, PFN_cuMemAddressReserve_v10020, NULL, s->reserved, &at, s->reserved, 0, 0, 0);
    if (!r)
        s->at = (uint8_t *)(uintptr_t)at;
    return r;
}

static void release(uint64_t handle)
{
    (void)CALL(RELEASE, PFN_cuMemRelease_v10020, NULL, 0, handle);
}

/* Maps the memory of the handle at the addresses of the span. Takes ownership of the handle, also when it fails. */
static int map(struct prs_span *s, uint64_t handle, int device)
{
    CUdeviceptr at = (CUdeviceptr)(uintptr_t)s->at;
    int r = CALL(MAP, PFN_cuMemMap_v10020, s->at, s->reserved, at, s->reserved, 0, handle, 0);
    if (r) {
        release(handle);
        return r;
    }
    s->handle = handle;
    r = prs_span_allow(s->at, s->reserved, device);
    if (r)
        (void)prs_span_sleep(s);
    return r;
}

int prs_span_take(struct prs_span *s, size_t bytes, bool sleeps)
{
    int device, r;
    *s = (struct prs_span){.bytes = bytes};
    if (!sleeps) {
        r = prs_cuda_check(cudaMalloc((void **)&s->at, bytes), "cudaMalloc");
        s->at = r ? NULL : s->at;
        return r;
    }
    r = prs_cuda_check(cudaGetDevice(&device), "cudaGetDevice");
    if (!r)
        r = reserve(s, bytes, device);
    if (!r)
        r = prs_span_wake(s, device);
    if (r)
        prs_span_drop(s);
    return r;
}

void prs_span_drop(struct prs_span *s)
{
    if (s->at && !s->sleeps)
        (void)cudaFree(s->at);
    if (s->at && s->sleeps) {
        if (s->handle != 0)
            (void)cudaDeviceSynchronize(); /* cudaFree() does it too */
        (void)prs_span_sleep(s);
        (void)CALL(UNRESERVE, PFN_cuMemAddressFree_v10020, s->at, s->reserved, (CUdeviceptr)(uintptr_t)s->at,
                   s->reserved);
    }
    *s = (struct prs_span){.at = NULL};
}

int prs_span_sleep(struct prs_span *s)
{
    int r;
    if (s->handle == 0)
        return 0;
    r = CALL(UNMAP, PFN_cuMemUnmap_v10020, s->at, s->reserved, (CUdeviceptr)(uintptr_t)s->at, s->reserved);
    release(s->handle);
    s->handle = 0;
    return r;
}

int prs_span_wake(struct prs_span *s, int device)
{
    CUmemAllocationProp prop = memory_of(device);
    CUmemGenericAllocationHandle handle = 0;
    int r = CALL(CREATE, PFN_cuMemCreate_v10020, NULL, s->reserved, &handle, s->reserved, &prop, 0);
    return r ? r : map(s, handle, device);
}

int prs_span_export(const struct prs_span *s, int *file)
{
    return CALL(EXPORT, PFN_cuMemExportToShareableHandle_v10020, s->at, s->reserved, file, s->handle,
                CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
}

int prs_span_import(struct prs_span *s, int file, size_t bytes, int device)
{
    CUmemGenericAllocationHandle handle = 0;
    int r = s->at ? 0 : reserve(s, bytes, device);
    if (!r)
        r = CALL(IMPORT, PFN_cuMemImportFromShareableHandle_v10020, NULL, bytes, &handle, (void *)(intptr_t)file,
                 CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    return r ? r : map(s, handle, device);
}

int prs_span_allow(uint8_t *at, size_t reserved, int device)
{
    CUmemAccessDesc access = {.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    access.location = memory_of(device).location;
    return CALL(ACCESS, PFN_cuMemSetAccess_v10020, at, reserved, (CUdeviceptr)(uintptr_t)at, reserved, &access, 1);
}

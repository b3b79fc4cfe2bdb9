/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/host/cuda.h"

#include <assert.h>
#include <dlfcn.h>
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <string.h>

#include "transport/util/error.h"

/* The part of the driver API that is used, declared here. Names are as exported; a suffix is the version of the ABI. */
enum {
    CUDA_HOST_PORTABLE = 1, /* usable in every CUDA context of the process */
    CUDA_HOST_DEVICEMAP = 2,
    CUDA_TYPE_PINNED = 1,
    CUDA_HANDLE_POSIX = 1,
    CUDA_LOCATION_DEVICE = 1,
    CUDA_ACCESS_READ_WRITE = 3,
    CUDA_RANGE_DMABUF = 1,
    CUDA_POINTER_DEVICE = 9, /* attribute of a pointer: the ordinal of its device */
};

struct cuda_location {
    int type, id;
};
struct cuda_alloc_prop {
    int type, handle_types;
    struct cuda_location location;
    void *reserved_pointer;
    uint8_t compression;
    uint8_t rdma_capable;
    uint16_t usage;
    uint8_t reserved[4];
};
static_assert(sizeof(struct cuda_alloc_prop) == 32, "layout of the driver API");
struct cuda_access {
    struct cuda_location location;
    int flags;
};
static_assert(sizeof(struct cuda_access) == 12, "layout of the driver API");

static struct {
    int (*init)(unsigned);
    int (*device_count)(int *);
    int (*error_string)(int, const char **);
    int (*context_device)(int *);
    int (*alloc)(uint64_t *, size_t);
    int (*free)(uint64_t);
    int (*copy)(uint64_t, uint64_t, size_t);
    int (*fill)(uint64_t, unsigned char, size_t);
    int (*host_register)(void *, size_t, unsigned);
    int (*host_unregister)(void *);
    int (*host_pointer)(uint64_t *, void *, unsigned);
    int (*granularity)(size_t *, const struct cuda_alloc_prop *, int);
    int (*create)(uint64_t *, size_t, const struct cuda_alloc_prop *, unsigned long long);
    int (*export)(void *, uint64_t, int, unsigned long long);
    int (*import)(uint64_t *, void *, int);
    int (*reserve)(uint64_t *, size_t, size_t, uint64_t, unsigned long long);
    int (*map)(uint64_t, size_t, size_t, uint64_t, unsigned long long);
    int (*set_access)(uint64_t, size_t, const struct cuda_access *, size_t);
    int (*unmap)(uint64_t, size_t);
    int (*release)(uint64_t);
    int (*unreserve)(uint64_t, size_t);
    int (*range_handle)(void *, uint64_t, size_t, int, unsigned long long);
    int (*pointer_attribute)(void *, int, uint64_t);
} cuda;

static int load_result; /* set once */
static char load_text[160];

static void load(void)
{
    static const struct {
        const char *name;
        void *where;
        int optional;
    } symbols[] = {
        {"cuInit", &cuda.init, 0},
        {"cuDeviceGetCount", &cuda.device_count, 0},
        {"cuGetErrorString", &cuda.error_string, 0},
        {"cuCtxGetDevice", &cuda.context_device, 0},
        {"cuMemAlloc_v2", &cuda.alloc, 0},
        {"cuMemFree_v2", &cuda.free, 0},
        {"cuMemcpy", &cuda.copy, 0},
        {"cuMemsetD8_v2", &cuda.fill, 0},
        {"cuMemHostRegister_v2", &cuda.host_register, 0},
        {"cuMemHostUnregister", &cuda.host_unregister, 0},
        {"cuMemHostGetDevicePointer_v2", &cuda.host_pointer, 0},
        {"cuMemGetAllocationGranularity", &cuda.granularity, 0},
        {"cuMemCreate", &cuda.create, 0},
        {"cuMemExportToShareableHandle", &cuda.export, 0},
        {"cuMemImportFromShareableHandle", &cuda.import, 0},
        {"cuMemAddressReserve", &cuda.reserve, 0},
        {"cuMemMap", &cuda.map, 0},
        {"cuMemSetAccess", &cuda.set_access, 0},
        {"cuMemUnmap", &cuda.unmap, 0},
        {"cuMemRelease", &cuda.release, 0},
        {"cuMemAddressFree", &cuda.unreserve, 0},
        {"cuPointerGetAttribute", &cuda.pointer_attribute, 0},
        {"cuMemGetHandleForAddressRange", &cuda.range_handle, 1}, /* since CUDA 11.7 */
    };
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    int count = 0;

    load_result = -ENODEV;
    if (!library) {
        strcpy(load_text, "libcuda.so.1 was not found: no NVIDIA driver on this machine");
        return;
    }
    for (size_t i = 0; i < sizeof(symbols) / sizeof(symbols[0]); i++) {
        void *symbol = dlsym(library, symbols[i].name);

        if (!symbol && !symbols[i].optional) {
            strcpy(load_text, "libcuda.so.1 is too old: it lacks ");
            strcat(load_text, symbols[i].name);
            return;
        }
        memcpy(symbols[i].where, &symbol, sizeof(symbol)); /* data pointer to function pointer, as POSIX allows */
    }
    if (cuda.init(0) != 0 || cuda.device_count(&count) != 0 || count == 0) {
        strcpy(load_text, "the NVIDIA driver finds no device");
        return;
    }
    load_result = 0;
}

static int need_driver(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    pthread_once(&once, load);
    return load_result;
}

static int fail(const char *call, uint64_t address, size_t bytes, int result)
{
    const char *why = NULL;

    if (cuda.error_string(result, &why) != 0 || !why)
        why = "unknown error";
    return prs_fail(result == 2 ? -ENOMEM : -EIO, "%s of %zu bytes at 0x%" PRIx64 ": CUDA error %d, %s", call, bytes,
                    address, result, why);
}

int prs_cuda_alloc(void **out, size_t bytes)
{
    uint64_t address = 0;
    int r;

    if (need_driver() < 0)
        return prs_fail(-ENODEV, "cannot allocate device memory: %s", load_text);
    r = cuda.alloc(&address, bytes ? bytes : 1);
    if (r)
        return fail("cuMemAlloc", 0, bytes, r);
    *out = (void *)(uintptr_t)address;
    return prs_cuda_zero(*out, bytes);
}

void prs_cuda_free(void *pointer)
{
    if (pointer && need_driver() == 0)
        cuda.free((uint64_t)(uintptr_t)pointer);
}

int prs_cuda_copy(void *dst, const void *src, size_t bytes)
{
    int r = cuda.copy((uint64_t)(uintptr_t)dst, (uint64_t)(uintptr_t)src, bytes);

    return r ? fail("cuMemcpy", (uint64_t)(uintptr_t)dst, bytes, r) : 0;
}

int prs_cuda_zero(void *pointer, size_t bytes)
{
    int r = cuda.fill((uint64_t)(uintptr_t)pointer, 0, bytes);

    return r ? fail("cuMemsetD8", (uint64_t)(uintptr_t)pointer, bytes, r) : 0;
}

int prs_cuda_map_host(void *pointer, size_t bytes)
{
    uint64_t seen = 0;
    int r;

    if (need_driver() < 0)
        return prs_fail(-ENODEV, "cannot map host memory for the device: %s", load_text);
    r = cuda.host_register(pointer, bytes, CUDA_HOST_PORTABLE | CUDA_HOST_DEVICEMAP);
    if (r)
        return fail("cuMemHostRegister", (uint64_t)(uintptr_t)pointer, bytes, r);
    r = cuda.host_pointer(&seen, pointer, 0);
    if (r == 0 && seen == (uint64_t)(uintptr_t)pointer)
        return 0;
    cuda.host_unregister(pointer);
    return prs_fail(-EOPNOTSUPP, "host memory at %p is at 0x%" PRIx64 " for the device: no unified addressing here",
                    pointer, seen);
}

void prs_cuda_unmap_host(void *pointer)
{
    if (need_driver() == 0)
        cuda.host_unregister(pointer);
}

static int span_prop(struct cuda_alloc_prop *prop)
{
    int device = 0;
    int r;

    if (need_driver() < 0)
        return prs_fail(-ENODEV, "cannot allocate shared device memory: %s", load_text);
    r = cuda.context_device(&device);
    if (r)
        return fail("cuCtxGetDevice", 0, 0, r);
    memset(prop, 0, sizeof(*prop));
    prop->type = CUDA_TYPE_PINNED;
    prop->handle_types = CUDA_HANDLE_POSIX;
    prop->location.type = CUDA_LOCATION_DEVICE;
    prop->location.id = device;
    prop->rdma_capable = 1;
    return 0;
}

/* Give the span's allocation an address that the current device may read and write. On failure the allocation is
 * released and the span empty. */
static int span_map(struct prs_cuda_span *span, const struct cuda_alloc_prop *prop)
{
    struct cuda_access access = {.location = prop->location, .flags = CUDA_ACCESS_READ_WRITE};
    int r = cuda.reserve(&span->address, span->bytes, 0, 0, 0);

    if (r) {
        r = fail("cuMemAddressReserve", 0, span->bytes, r);
        goto release;
    }
    r = cuda.map(span->address, span->bytes, 0, span->handle, 0);
    if (r) {
        r = fail("cuMemMap", span->address, span->bytes, r);
        goto unreserve;
    }
    r = cuda.set_access(span->address, span->bytes, &access, 1);
    if (r) {
        r = fail("cuMemSetAccess", span->address, span->bytes, r);
        goto unmap;
    }
    return 0;

unmap:
    cuda.unmap(span->address, span->bytes);
unreserve:
    cuda.unreserve(span->address, span->bytes);
release:
    cuda.release(span->handle);
    memset(span, 0, sizeof(*span)); /* so that prs_cuda_span_drop() frees nothing twice */
    return r;
}

int prs_cuda_span_make(size_t bytes, struct prs_cuda_span *out)
{
    struct cuda_alloc_prop prop;
    size_t grain = 0;
    int r = span_prop(&prop);

    if (r < 0)
        return r;
    r = cuda.granularity(&grain, &prop, 1);
    if (r)
        return fail("cuMemGetAllocationGranularity", 0, bytes, r);
    out->bytes = (bytes + grain - 1) / grain * grain;
    r = cuda.create(&out->handle, out->bytes, &prop, 0);
    if (r)
        return fail("cuMemCreate", 0, out->bytes, r);
    r = span_map(out, &prop);
    return r < 0 ? r : prs_cuda_zero((void *)(uintptr_t)out->address, out->bytes);
}

int prs_cuda_span_export(const struct prs_cuda_span *span, int *fd)
{
    int r = cuda.export(fd, span->handle, CUDA_HANDLE_POSIX, 0);

    return r ? fail("cuMemExportToShareableHandle", span->address, span->bytes, r) : 0;
}

int prs_cuda_span_import(int fd, size_t bytes, struct prs_cuda_span *out)
{
    struct cuda_alloc_prop prop;
    int r = span_prop(&prop);

    if (r < 0)
        return r;
    r = cuda.import(&out->handle, (void *)(intptr_t)fd, CUDA_HANDLE_POSIX);
    if (r)
        return fail("cuMemImportFromShareableHandle", 0, bytes, r);
    out->bytes = bytes;
    return span_map(out, &prop);
}

void prs_cuda_span_drop(struct prs_cuda_span *span)
{
    if (!span->handle || need_driver() < 0)
        return;
    cuda.unmap(span->address, span->bytes);
    cuda.unreserve(span->address, span->bytes);
    cuda.release(span->handle);
    memset(span, 0, sizeof(*span));
}

int prs_cuda_device_of(uint64_t address, int *device)
{
    int r = need_driver();

    if (r < 0)
        return prs_fail(r, "cannot ask which GPU has memory: %s", load_text);
    r = cuda.pointer_attribute(device, CUDA_POINTER_DEVICE, address);
    return r ? fail("cuPointerGetAttribute", address, 0, r) : 0;
}

int prs_cuda_dmabuf(uint64_t address, size_t bytes, bool required, int *fd)
{
    int r;

    *fd = -1;
    r = need_driver();
    if (r < 0)
        return required ? prs_fail(r, "cannot export device memory as DMA-BUF: %s", load_text) : r;
    if (!cuda.range_handle)
        return required
                   ? prs_fail(-EOPNOTSUPP, "cannot export device memory as DMA-BUF: libcuda.so.1 is older than 11.7")
                   : -EOPNOTSUPP;
    r = cuda.range_handle(fd, address, bytes, CUDA_RANGE_DMABUF, 0);
    if (!r)
        return 0;
    return required ? fail("cuMemGetHandleForAddressRange", address, bytes, r) : -EIO;
}

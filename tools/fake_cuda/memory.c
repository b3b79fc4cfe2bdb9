/* SPDX-License-Identifier: Apache-2.0 */
/* Contiguous memory: of the device, of the host for the device, and of another process by a legacy handle. */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tools/fake_cuda/busy.h"
#include "tools/fake_cuda/state.h"

enum { IPC_MAGIC = 0x49504331, HOST_DEVICEMAP = 2 };

struct ipc_handle {
    uint64_t magic;
    int pid, fd, dev;
    uint64_t bytes;
};

static size_t page_bytes(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

static void drop_locked(struct range *range)
{
    munmap(range->shadow, range->bytes);
    munmap((void *)(uintptr_t)range->va, range->bytes);
    if (range->fd >= 0)
        close(range->fd);
    range->kind = FREE;
}

int cuMemAlloc_v2(uint64_t *va, size_t bytes)
{
    fake_wait_idle(__func__);
    int r = fake_failure(__func__);
    if (r)
        return r;
    if (fake_current() < 0)
        return INVALID_CONTEXT;
    bytes = (bytes + page_bytes() - 1) & ~(page_bytes() - 1);
    int fd = memfd_create("fake_cuda", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)bytes))
        return OUT_OF_MEMORY;
    pthread_mutex_lock(&fake_mutex);
    *va = fake_reserve(bytes);
    struct range *range = *va ? fake_fresh(LEGACY, *va, bytes) : NULL;
    if (range) {
        range->fd = fd;
        range->shadow = fake_map_shared(fd, bytes);
    }
    pthread_mutex_unlock(&fake_mutex);
    return range ? OK : OUT_OF_MEMORY;
}

int cuMemFree_v2(uint64_t va)
{
    fake_wait_idle_locked(__func__);
    int r = OK;
    pthread_mutex_lock(&fake_mutex);
    struct range *range = fake_find(va);
    if (range && range->kind == LEGACY && range->va == va)
        drop_locked(range);
    else
        r = fake_refuse_locked(INVALID_VALUE);
    pthread_mutex_unlock(&fake_mutex);
    return r;
}

static int exportable_locked(uint64_t va, uint64_t end)
{
    while (va < end) {
        const struct range *range = fake_find(va);
        if (!range || (range->kind != LEGACY && range->kind != MAPPED))
            return INVALID_VALUE;
        if (range->kind == MAPPED && (!range->accessible || !fake_object_rdma(range->object)))
            return NOT_SUPPORTED;
        va = range->va + range->bytes;
    }
    return OK;
}

/* Whole pages of the host, as in the real driver. The file has only the size of the range: the program that registers
 * it finds the memory by its address. */
int cuMemGetHandleForAddressRange(void *handle, uint64_t va, size_t bytes, int type, unsigned long long flags)
{
    int r = fake_failure(__func__);
    if (r)
        return r;
    if (type != 1 || flags || !bytes || va % page_bytes() || bytes % page_bytes())
        return INVALID_VALUE;
    pthread_mutex_lock(&fake_mutex);
    r = exportable_locked(va, va + bytes);
    pthread_mutex_unlock(&fake_mutex);
    int fd = r ? -1 : memfd_create("fake_cuda_dmabuf", MFD_CLOEXEC);
    if (!r && (fd < 0 || ftruncate(fd, (off_t)bytes)))
        r = OUT_OF_MEMORY;
    *(int *)handle = fd;
    return r;
}

int cuMemHostAlloc(void **host, size_t bytes, unsigned flags)
{
    fake_wait_idle(__func__);
    if (fake_current() < 0)
        return INVALID_CONTEXT;
    *host = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*host == MAP_FAILED)
        return OUT_OF_MEMORY;
    pthread_mutex_lock(&fake_mutex);
    struct range *range = fake_fresh(PINNED, (uintptr_t)*host, bytes);
    if (range)
        range->shadow = *host;
    pthread_mutex_unlock(&fake_mutex);
    return range ? OK : OUT_OF_MEMORY;
}

int cuMemHostRegister_v2(void *host, size_t bytes, unsigned flags)
{
    fake_wait_idle(__func__);
    uint64_t va = (uintptr_t)host;
    int r = fake_failure(__func__);
    if (r)
        return r;
    if (fake_current() < 0)
        return INVALID_CONTEXT;
    if (!host || !bytes)
        return INVALID_VALUE;
    pthread_mutex_lock(&fake_mutex);
    struct range *range = NULL;
    if (fake_find(va) || fake_find(va + bytes - 1))
        r = ALREADY_REGISTERED;
    else if (!(range = fake_fresh(REGISTERED, va, bytes)))
        r = OUT_OF_MEMORY;
    if (range) {
        range->shadow = host;
        range->accessible = flags & HOST_DEVICEMAP;
    }
    pthread_mutex_unlock(&fake_mutex);
    return r;
}

int cuMemHostUnregister(void *host)
{
    fake_wait_idle_locked(__func__);
    int r = OK;
    pthread_mutex_lock(&fake_mutex);
    struct range *range = fake_find((uintptr_t)host);
    if (range && range->kind == REGISTERED && range->va == (uintptr_t)host)
        range->kind = FREE;
    else
        r = fake_refuse_locked(NOT_REGISTERED);
    pthread_mutex_unlock(&fake_mutex);
    return r;
}

int cuMemHostGetDevicePointer_v2(uint64_t *va, void *host, unsigned flags)
{
    pthread_mutex_lock(&fake_mutex);
    const struct range *range = fake_find((uintptr_t)host);
    bool good = range && !flags && (range->kind == PINNED || (range->kind == REGISTERED && range->accessible));
    *va = good ? (uintptr_t)host : 0;
    pthread_mutex_unlock(&fake_mutex);
    return good ? OK : INVALID_VALUE;
}

/* ---- legacy IPC ---- */

int cuIpcGetMemHandle(struct fake_ipc *out, uint64_t va)
{
    struct ipc_handle handle = {.magic = IPC_MAGIC, .pid = getpid()};
    if (fake_current() < 0)
        return INVALID_CONTEXT;
    pthread_mutex_lock(&fake_mutex);
    struct range *range = fake_find(va);
    bool good = range && range->kind == LEGACY;
    if (good) {
        handle.fd = range->fd;
        handle.dev = range->dev;
        handle.bytes = range->bytes;
    }
    pthread_mutex_unlock(&fake_mutex);
    memcpy(out, &handle, sizeof(handle));
    return good ? OK : INVALID_VALUE;
}

int cuIpcOpenMemHandle_v2(uint64_t *va, struct fake_ipc in, unsigned flags)
{
    struct ipc_handle handle;
    char path[64];
    int r = fake_failure(__func__);
    if (r)
        return r;
    if (fake_current() < 0)
        return INVALID_CONTEXT;
    memcpy(&handle, &in, sizeof(handle));
    if (handle.magic != IPC_MAGIC || handle.pid == getpid()) /* the real driver refuses its own process, too */
        return INVALID_VALUE;
    snprintf(path, sizeof(path), "/proc/%d/fd/%d", handle.pid, handle.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return INVALID_VALUE;
    pthread_mutex_lock(&fake_mutex);
    *va = fake_reserve(handle.bytes);
    struct range *range = *va ? fake_fresh(IPC, *va, handle.bytes) : NULL;
    if (range) {
        range->shadow = fake_map_shared(fd, handle.bytes);
        range->dev = handle.dev;
        range->access = 1u << fake_current();
    }
    pthread_mutex_unlock(&fake_mutex);
    close(fd);
    return range ? OK : OUT_OF_MEMORY;
}

int cuIpcCloseMemHandle(uint64_t va)
{
    fake_wait_idle(__func__);
    int r = fake_failure(__func__);
    if (r)
        return r;
    pthread_mutex_lock(&fake_mutex);
    struct range *range = fake_find(va);
    if (range && range->kind == IPC && range->va == va)
        drop_locked(range);
    else
        r = fake_refuse_locked(INVALID_VALUE);
    pthread_mutex_unlock(&fake_mutex);
    return r;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* A CUDA driver without a GPU, for testing what is written against the driver API: libcuda.so.1 with the functions that
 * the software NIC and its tests call. "Device memory" is a memfd: at its device address nothing is accessible, so a
 * stray CPU access is a fault; the driver has its own view of it. Copies run later, on a thread of their stream. What
 * the real one forbids or would make slow is an error here: calls without a current context, copies from pageable
 * memory, handles used on the wrong kind of memory. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "test/softnic/fake_cuda/busy.h"
#include "test/softnic/fake_cuda/driver.h"

enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    INVALID_CONTEXT = 201,
    NOT_READY = 600,
    NOT_SUPPORTED = 801,
    DEVICES = 2,
    RANGES = 4096,
    STACK = 16,
    QUEUE = 1024,
    GRANULARITY = 2 << 20,
};

enum kind { FREE, LEGACY, RESERVED, MAPPED, PINNED, IPC };

/* A range of addresses. */
struct range {
    enum kind kind;
    uint64_t va, bytes;
    uint8_t *shadow; /* how the driver reaches it */
    int fd;          /* LEGACY: the memfd */
    int dev;
    bool accessible; /* MAPPED: cuMemSetAccess was called */
    uint64_t id;
    struct object *object; /* MAPPED */
};

struct object { /* memory of cuMemCreate */
    int fd, refs, dev;
    uint64_t bytes;
    bool exportable;
};

struct ipc_handle {
    uint64_t magic;
    int pid, fd, dev;
    uint64_t bytes;
};
enum { IPC_MAGIC = 0x49504331 };

struct copy {
    uint8_t *dst, *src;
    size_t bytes;
};

struct stream {
    pthread_mutex_t mutex;
    pthread_cond_t more;
    uint64_t given, done;
    struct copy queue[QUEUE];
};

struct event {
    struct stream *stream;
    uint64_t at;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* protects the ranges */
static bool initialized;
static struct range ranges[RANGES];
static uint64_t next_id = 1;
static int contexts[DEVICES];
static __thread void *stack[STACK];
static __thread int depth;

/* Failure on demand: the next call of that name returns that. */
static char fail_call[32];
static int fail_result;

void fakeCudaFail(const char *call, int result)
{
    pthread_mutex_lock(&mutex);
    snprintf(fail_call, sizeof(fail_call), "%s", call);
    fail_result = result;
    pthread_mutex_unlock(&mutex);
}

static int failure(const char *call)
{
    int result = OK;
    pthread_mutex_lock(&mutex);
    if (!strcmp(call, fail_call)) {
        result = fail_result;
        fail_call[0] = '\0';
    }
    pthread_mutex_unlock(&mutex);
    return result;
}

static int current_dev(void)
{
    return depth ? (int)((int *)stack[depth - 1] - contexts) : -1;
}

static struct range *find(uint64_t va)
{
    for (int i = 0; i < RANGES; i++)
        if (ranges[i].kind != FREE && ranges[i].kind != RESERVED && va >= ranges[i].va &&
            va < ranges[i].va + ranges[i].bytes)
            return &ranges[i];
    return NULL;
}

static struct range *fresh(enum kind kind, uint64_t va, uint64_t bytes)
{
    for (int i = 0; i < RANGES; i++)
        if (ranges[i].kind == FREE) {
            ranges[i] =
                (struct range){.kind = kind, .va = va, .bytes = bytes, .fd = -1, .dev = current_dev(), .id = next_id++};
            return &ranges[i];
        }
    return NULL;
}

static uint8_t *map_shared(int fd, uint64_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return p == MAP_FAILED ? NULL : p;
}

static uint64_t reserve_va(uint64_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? 0 : (uintptr_t)p;
}

/* The driver's view of n bytes at an address that a copy engine can reach, or NULL. Ranges that follow each other may
 * lie apart. */
static uint8_t *view(uint64_t va, size_t *n)
{
    pthread_mutex_lock(&mutex);
    struct range *r = find(va);
    uint8_t *p = r && (r->kind != MAPPED || r->accessible) ? r->shadow + (va - r->va) : NULL;
    if (p && va + *n > r->va + r->bytes)
        *n = r->va + r->bytes - va;
    pthread_mutex_unlock(&mutex);
    return p;
}

int cuInit(unsigned flags)
{
    initialized = true;
    return OK;
}

int cuGetErrorName(int result, const char **name)
{
    static __thread char text[32];
    snprintf(text, sizeof(text), "FAKE_CUDA_%d", result);
    *name = text;
    return OK;
}

int cuDeviceGetCount(int *count)
{
    *count = DEVICES;
    return initialized ? OK : NOT_INITIALIZED;
}

int cuDeviceGet(int *dev, int ordinal)
{
    *dev = ordinal;
    return ordinal < DEVICES ? OK : INVALID_VALUE;
}

int cuDeviceGetAttribute(int *value, int attribute, int dev)
{
    *value = attribute == 124; /* DMA_BUF_SUPPORTED */
    return OK;
}

int cuDeviceGetUuid(void *uuid, int dev)
{
    memset(uuid, 0x40 + dev, 16);
    return OK;
}

int cuDevicePrimaryCtxRetain(void **ctx, int dev)
{
    *ctx = &contexts[dev];
    contexts[dev]++;
    return initialized ? OK : NOT_INITIALIZED;
}

int cuDevicePrimaryCtxGetState(int dev, unsigned *flags, int *active)
{
    *flags = 0;
    *active = contexts[dev] > 0;
    return OK;
}

int cuCtxPushCurrent_v2(void *ctx)
{
    if (depth == STACK)
        return INVALID_VALUE;
    stack[depth++] = ctx;
    return OK;
}

int cuCtxPopCurrent_v2(void **ctx)
{
    if (!depth)
        return INVALID_CONTEXT;
    *ctx = stack[--depth];
    return OK;
}

int cuThreadExchangeStreamCaptureMode(int *mode)
{
    static __thread int current;
    int old = current;
    current = *mode;
    *mode = old;
    return OK;
}

int cuPointerGetAttribute(void *data, int attribute, uint64_t va)
{
    int r = OK;
    pthread_mutex_lock(&mutex);
    struct range *range = initialized ? find(va) : NULL;
    if (!range)
        r = initialized ? INVALID_VALUE : NOT_INITIALIZED;
    else if (attribute == 2) /* MEMORY_TYPE */
        *(int *)data = range->kind == PINNED ? 1 : 2;
    else if (attribute == 7) /* BUFFER_ID */
        *(uint64_t *)data = range->id;
    else if (attribute == 8) /* IS_MANAGED */
        *(int *)data = 0;
    else if (attribute == 9) /* DEVICE_ORDINAL */
        *(int *)data = range->dev;
    else if (attribute == 10) /* IS_LEGACY_CUDA_IPC_CAPABLE */
        *(int *)data = range->kind == LEGACY;
    else
        r = NOT_SUPPORTED;
    pthread_mutex_unlock(&mutex);
    return r;
}

int cuMemGetAddressRange_v2(uint64_t *base, size_t *bytes, uint64_t va)
{
    pthread_mutex_lock(&mutex);
    struct range *range = find(va);
    if (range) {
        *base = range->va;
        *bytes = range->bytes;
    }
    pthread_mutex_unlock(&mutex);
    return range ? OK : INVALID_VALUE;
}

int cuMemAlloc_v2(uint64_t *va, size_t bytes)
{
    fake_wait_idle(__func__);
    if (!depth)
        return INVALID_CONTEXT;
    bytes = (bytes + 4095) & ~(size_t)4095;
    int fd = memfd_create("fake_cuda", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)bytes))
        return OUT_OF_MEMORY;
    pthread_mutex_lock(&mutex);
    *va = reserve_va(bytes);
    struct range *range = fresh(LEGACY, *va, bytes);
    if (range) {
        range->fd = fd;
        range->shadow = map_shared(fd, bytes);
    }
    pthread_mutex_unlock(&mutex);
    return range ? OK : OUT_OF_MEMORY;
}

int cuMemFree_v2(uint64_t va)
{
    fake_wait_idle(__func__);
    pthread_mutex_lock(&mutex);
    struct range *range = find(va);
    bool good = range && range->kind == LEGACY && range->va == va;
    if (good) {
        munmap(range->shadow, range->bytes);
        munmap((void *)(uintptr_t)va, range->bytes);
        close(range->fd);
        range->kind = FREE;
    }
    pthread_mutex_unlock(&mutex);
    return good ? OK : INVALID_VALUE;
}

int cuMemHostAlloc(void **host, size_t bytes, unsigned flags)
{
    fake_wait_idle(__func__);
    if (!depth)
        return INVALID_CONTEXT;
    *host = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*host == MAP_FAILED)
        return OUT_OF_MEMORY;
    pthread_mutex_lock(&mutex);
    struct range *range = fresh(PINNED, (uintptr_t)*host, bytes);
    range->shadow = *host;
    pthread_mutex_unlock(&mutex);
    return OK;
}

/* Legacy IPC
 * -------------------------------------------------------------------------------------------------------------- */

int cuIpcGetMemHandle(struct fake_ipc *out, uint64_t va)
{
    struct ipc_handle handle = {.magic = IPC_MAGIC, .pid = getpid()};
    if (!depth)
        return INVALID_CONTEXT;
    pthread_mutex_lock(&mutex);
    struct range *range = find(va);
    bool good = range && range->kind == LEGACY;
    if (good) {
        handle.fd = range->fd;
        handle.dev = range->dev;
        handle.bytes = range->bytes;
    }
    pthread_mutex_unlock(&mutex);
    memcpy(out, &handle, sizeof(handle));
    return good ? OK : INVALID_VALUE;
}

int cuIpcOpenMemHandle_v2(uint64_t *va, struct fake_ipc in, unsigned flags)
{
    struct ipc_handle handle;
    char path[64];
    int r = failure(__func__);
    if (r)
        return r;
    memcpy(&handle, &in, sizeof(handle));
    if (!depth || handle.magic != IPC_MAGIC || handle.pid == getpid()) /* the real one refuses its own process, too */
        return depth ? INVALID_VALUE : INVALID_CONTEXT;
    snprintf(path, sizeof(path), "/proc/%d/fd/%d", handle.pid, handle.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return INVALID_VALUE;
    pthread_mutex_lock(&mutex);
    *va = reserve_va(handle.bytes);
    struct range *range = fresh(IPC, *va, handle.bytes);
    range->shadow = map_shared(fd, handle.bytes);
    range->dev = handle.dev;
    pthread_mutex_unlock(&mutex);
    close(fd);
    return OK;
}

int cuIpcCloseMemHandle(uint64_t va)
{
    fake_wait_idle(__func__);
    pthread_mutex_lock(&mutex);
    struct range *range = find(va);
    bool good = range && range->kind == IPC && range->va == va;
    if (good) {
        munmap(range->shadow, range->bytes);
        munmap((void *)(uintptr_t)va, range->bytes);
        range->kind = FREE;
    }
    pthread_mutex_unlock(&mutex);
    return good ? OK : INVALID_VALUE;
}

/* Virtual memory
 * ---------------------------------------------------------------------------------------------------------- */

int cuMemCreate(unsigned long long *handle, size_t bytes, const struct fake_vmm_prop *prop, unsigned long long flags)
{
    struct object *object = calloc(1, sizeof(*object));
    if (!object || bytes % GRANULARITY)
        return INVALID_VALUE;
    *object = (struct object){
        .fd = memfd_create("fake_cuda", MFD_CLOEXEC), .refs = 1, .dev = prop->location_id, .bytes = bytes};
    object->exportable = prop->handle_types & 1;
    if (object->fd < 0 || ftruncate(object->fd, (off_t)bytes))
        return OUT_OF_MEMORY;
    *handle = (uintptr_t)object;
    return OK;
}

int cuMemRelease(unsigned long long handle)
{
    struct object *object = (struct object *)(uintptr_t)handle;
    pthread_mutex_lock(&mutex);
    if (!--object->refs) {
        close(object->fd);
        free(object);
    }
    pthread_mutex_unlock(&mutex);
    return OK;
}

int cuMemRetainAllocationHandle(unsigned long long *handle, void *addr)
{
    pthread_mutex_lock(&mutex);
    struct range *range = find((uintptr_t)addr);
    bool good = range && range->kind == MAPPED;
    if (good) {
        range->object->refs++;
        *handle = (uintptr_t)range->object;
    }
    pthread_mutex_unlock(&mutex);
    return good ? OK : INVALID_VALUE;
}

int cuMemExportToShareableHandle(void *out, unsigned long long handle, int type, unsigned long long flags)
{
    struct object *object = (struct object *)(uintptr_t)handle;
    if (type != 1 || !object->exportable)
        return INVALID_VALUE;
    *(int *)out = fcntl(object->fd, F_DUPFD_CLOEXEC, 3);
    return *(int *)out < 0 ? OUT_OF_MEMORY : OK;
}

int cuMemImportFromShareableHandle(unsigned long long *handle, void *os_handle, int type)
{
    struct stat st;
    int r = failure(__func__);
    if (r)
        return r;
    int fd = fcntl((int)(uintptr_t)os_handle, F_DUPFD_CLOEXEC, 3);
    struct object *object = calloc(1, sizeof(*object));
    if (type != 1 || fd < 0 || fstat(fd, &st) || !object)
        return INVALID_VALUE;
    *object = (struct object){.fd = fd, .refs = 1, .bytes = (uint64_t)st.st_size};
    *handle = (uintptr_t)object;
    return OK;
}

int cuMemAddressReserve(uint64_t *va, size_t bytes, size_t alignment, uint64_t wanted, unsigned long long flags)
{
    *va = bytes % GRANULARITY ? 0 : reserve_va(bytes);
    return *va ? OK : INVALID_VALUE;
}

int cuMemAddressFree(uint64_t va, size_t bytes)
{
    return munmap((void *)(uintptr_t)va, bytes) ? INVALID_VALUE : OK;
}

int cuMemMap(uint64_t va, size_t bytes, size_t offset, unsigned long long handle, unsigned long long flags)
{
    struct object *object = (struct object *)(uintptr_t)handle;
    if (offset || bytes != object->bytes)
        return INVALID_VALUE;
    pthread_mutex_lock(&mutex);
    struct range *range = fresh(MAPPED, va, bytes);
    range->shadow = map_shared(object->fd, bytes);
    range->object = object;
    range->dev = object->dev;
    object->refs++;
    pthread_mutex_unlock(&mutex);
    return OK;
}

int cuMemUnmap(uint64_t va, size_t bytes)
{
    fake_wait_idle(__func__);
    uint64_t end = va + bytes;
    bool any = false;
    pthread_mutex_lock(&mutex);
    for (int i = 0; i < RANGES; i++) {
        struct range *range = &ranges[i];
        if (range->kind != MAPPED || range->va < va || range->va + range->bytes > end)
            continue;
        munmap(range->shadow, range->bytes);
        range->kind = FREE;
        any = true;
        if (!--range->object->refs) {
            close(range->object->fd);
            free(range->object);
        }
    }
    pthread_mutex_unlock(&mutex);
    return any ? OK : INVALID_VALUE;
}

int cuMemSetAccess(uint64_t va, size_t bytes, const void *desc, size_t count)
{
    pthread_mutex_lock(&mutex);
    for (int i = 0; i < RANGES; i++)
        if (ranges[i].kind == MAPPED && ranges[i].va >= va && ranges[i].va < va + bytes)
            ranges[i].accessible = true;
    pthread_mutex_unlock(&mutex);
    return OK;
}

/* Streams and copies
 * ------------------------------------------------------------------------------------------------------ */

/* A copy engine's access, which ThreadSanitizer must not take for a thread's: programs order their own against it by
 * what it cannot see (another process, an event). */
static void engine_copy(void *to, const void *from, size_t bytes)
{
#if defined(__x86_64__)
    __asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(bytes) : : "memory");
#else
    memcpy(to, from, bytes);
#endif
}

static void *run_stream(void *arg)
{
    struct stream *s = arg;
    pthread_mutex_lock(&s->mutex);
    for (;;) {
        while (s->done == s->given)
            pthread_cond_wait(&s->more, &s->mutex);
        struct copy copy = s->queue[s->done % QUEUE];
        pthread_mutex_unlock(&s->mutex);
        usleep(20); /* long enough for who does not wait to be found out */
        engine_copy(copy.dst, copy.src, copy.bytes);
        pthread_mutex_lock(&s->mutex);
        __atomic_store_n(&s->done, s->done + 1, __ATOMIC_RELEASE);
    }
    return NULL;
}

int cuStreamCreate(void **stream, unsigned flags)
{
    fake_wait_idle(__func__);
    struct stream *s = calloc(1, sizeof(*s));
    pthread_t thread;
    if (!depth || flags != 1) /* a blocking stream would wait for the application's */
        return depth ? INVALID_VALUE : INVALID_CONTEXT;
    pthread_mutex_init(&s->mutex, NULL);
    pthread_cond_init(&s->more, NULL);
    if (pthread_create(&thread, NULL, run_stream, s))
        return OUT_OF_MEMORY;
    pthread_detach(thread);
    *stream = s;
    return OK;
}

int cuMemcpyAsync(uint64_t dst, uint64_t src, size_t bytes, void *stream)
{
    struct stream *s = stream;
    int r = failure(__func__);
    if (r)
        return r;
    if (!depth || !s)
        return depth ? INVALID_VALUE : INVALID_CONTEXT;
    while (bytes) {
        size_t n = bytes;
        uint8_t *to = view(dst, &n), *from = view(src, &n);
        if (!to || !from)
            return INVALID_VALUE;
        pthread_mutex_lock(&s->mutex);
        bool full = s->given - s->done == QUEUE;
        if (!full)
            s->queue[s->given++ % QUEUE] = (struct copy){to, from, n};
        pthread_cond_signal(&s->more);
        pthread_mutex_unlock(&s->mutex);
        if (full) {
            usleep(100);
            continue;
        }
        dst += n;
        src += n;
        bytes -= n;
    }
    return OK;
}

int cuEventCreate(void **event, unsigned flags)
{
    *event = calloc(1, sizeof(struct event));
    return depth ? OK : INVALID_CONTEXT;
}

int cuEventRecord(void *event, void *stream)
{
    struct event *e = event;
    e->stream = stream;
    pthread_mutex_lock(&e->stream->mutex);
    e->at = e->stream->given;
    pthread_mutex_unlock(&e->stream->mutex);
    return OK;
}

int cuEventQuery(void *event)
{
    struct event *e = event;
    int r = failure(__func__);
    if (r)
        return r;
    return !e->stream || __atomic_load_n(&e->stream->done, __ATOMIC_ACQUIRE) >= e->at ? OK : NOT_READY;
}

/* For tests: synchronous, host memory of any kind. */
static int copy_now(uint64_t va, void *host, size_t bytes, bool to_device)
{
    for (size_t done = 0, n; done < bytes; done += n) {
        n = bytes - done;
        uint8_t *p = view(va + done, &n);
        if (!p)
            return INVALID_VALUE;
        engine_copy(to_device ? p : (uint8_t *)host + done, to_device ? (uint8_t *)host + done : p, n);
    }
    return OK;
}

int cuMemcpyHtoD_v2(uint64_t dst, const void *src, size_t bytes)
{
    return copy_now(dst, (void *)(uintptr_t)src, bytes, true);
}

int cuMemcpyDtoH_v2(void *dst, uint64_t src, size_t bytes)
{
    return copy_now(src, dst, bytes, false);
}

int cuModuleLoadData(void **module, const void *image)
{
    return NOT_SUPPORTED; /* no kernels */
}

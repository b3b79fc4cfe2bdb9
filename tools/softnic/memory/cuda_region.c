/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/memory/cuda_region.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tools/softnic/memory/cuda_staging.h"
#include "tools/softnic/memory/host_copy.h"
#include "tools/softnic/world/self.h"

enum { KIND_LEGACY = 1, KIND_VMM = 2, KIND_OWNER = 3, CHUNKS_MOST = 65536, BUCKETS = 1024 };

/* The contents of the registration's ipc field. base and bytes: the allocation or allocations that hold the region, at
 * the owner's addresses. */
struct blob {
    uint32_t kind;
    uint32_t chunks;
    struct sn_cu_uuid uuid;
    uint64_t base, bytes;
    uint64_t buffer_id; /* tells an allocation from a later one at the same address */
    uint64_t table;     /* memory of the virtual memory API: address of struct chunk[chunks] in the owner */
    struct sn_cu_ipc handle;
};
static_assert(sizeof(struct blob) == 120 && sizeof(struct blob) <= SN_IPC_BLOB, "shared layout");

enum { UNSHAREABLE = 1 }; /* a condition of the exporting functions */

struct chunk {
    uint64_t base, bytes;
    int32_t fd; /* descriptor in the owner; -1: no other process can open it */
    uint32_t pad;
};
static_assert(sizeof(struct chunk) == 24, "read by other processes");

static struct blob *blob_of(struct sn_mr_shm *mr)
{
    return (struct blob *)mr->ipc;
}

bool sn_cuda_region_owner_only(const struct sn_mr_shm *mr)
{
    return ((const struct blob *)mr->ipc)->kind == KIND_OWNER;
}

struct sn_cu_uuid sn_cuda_region_uuid(const struct sn_mr_shm *mr)
{
    return ((const struct blob *)mr->ipc)->uuid;
}

/* ---- owner's side ---- */

static int export_legacy(const struct sn_cuda *cuda, struct sn_mr_shm *mr, struct blob *blob)
{
    sn_cu_ptr base;
    size_t bytes;
    int r = cuda->address_range(&base, &bytes, mr->addr);

    if (r != SN_CU_OK)
        return sn_cuda_failed(cuda, "cuMemGetAddressRange", r);
    if (mr->addr + mr->length > base + bytes) {
        sn_log("registration of device memory 0x%llx, %llu bytes: the allocation ends %llu bytes earlier",
               (unsigned long long)mr->addr, (unsigned long long)mr->length,
               (unsigned long long)(mr->addr + mr->length - base - bytes));
        return -EFAULT;
    }
    if (cuda->ipc_get(&blob->handle, base) != SN_CU_OK)
        return UNSHAREABLE;
    blob->kind = KIND_LEGACY;
    blob->base = base;
    blob->bytes = bytes;
    return 0;
}

/* One allocation of the virtual memory API, as a descriptor if possible. Return 0, UNSHAREABLE, or -errno. */
static int export_chunk(const struct sn_cuda *cuda, sn_cu_ptr at, struct chunk *chunk)
{
    unsigned long long handle;
    sn_cu_ptr base;
    size_t bytes;
    int r = cuda->address_range(&base, &bytes, at);

    if (r != SN_CU_OK)
        return sn_cuda_failed(cuda, "cuMemGetAddressRange", r);
    *chunk = (struct chunk){.base = base, .bytes = bytes, .fd = -1};
    r = cuda->vmm_retain(&handle, (void *)(uintptr_t)at);
    if (r != SN_CU_OK) /* neither cuMemAlloc nor cuMemCreate made it: a stream-ordered pool */
        return UNSHAREABLE;
    r = cuda->vmm_export(&chunk->fd, handle, SN_CU_HANDLE_POSIX_FD, 0);
    cuda->vmm_release(handle);
    if (r == SN_CU_OK)
        return 0;
    chunk->fd = -1; /* not created with that handle type: NCCL's own memory */
    return UNSHAREABLE;
}

static void free_table(struct chunk *table, uint32_t chunks)
{
    for (uint32_t i = 0; i < chunks; i++)
        if (table[i].fd >= 0)
            close(table[i].fd);
    free(table);
}

/* Return 0, UNSHAREABLE if only this process can open all of it, or -errno. */
static int export_vmm(const struct sn_cuda *cuda, struct sn_mr_shm *mr, struct blob *blob)
{
    struct chunk *table = NULL;
    uint32_t count = 0, room = 0;
    int r = 0, shareable = 0;

    for (uint64_t at = mr->addr; at < mr->addr + mr->length && count < CHUNKS_MOST;) {
        if (count == room) {
            void *bigger = realloc(table, (room = room ? 2 * room : 4) * sizeof(*table));
            r = bigger ? 0 : -ENOMEM;
            table = bigger ? bigger : table;
        }
        if (!r)
            r = export_chunk(cuda, at, &table[count]);
        if (r == UNSHAREABLE)
            shareable = r;
        else if (r) {
            free_table(table, count);
            return r;
        }
        r = 0;
        at = table[count].base + table[count].bytes;
        count++;
    }
    blob->kind = KIND_VMM;
    blob->chunks = count;
    blob->base = table[0].base;
    blob->bytes = table[count - 1].base + table[count - 1].bytes - table[0].base;
    blob->table = (uintptr_t)table;
    return shareable;
}

/* Mark memory that only its owner can reach; the owner copies for the others (owner_copy.c). */
static int export_nothing(const struct sn_cuda *cuda, struct sn_mr_shm *mr, struct blob *blob)
{
    static bool told;
    int type = 0;
    uint64_t last = mr->addr + mr->length - 1;

    if (cuda->pointer_attribute(&type, SN_CU_ATTR_MEMORY_TYPE, last) != SN_CU_OK || type != SN_CU_MEMORY_DEVICE) {
        sn_log("registration of device memory 0x%llx, %llu bytes: its last byte is no device memory",
               (unsigned long long)mr->addr, (unsigned long long)mr->length);
        return -EFAULT;
    }
    if (!__atomic_exchange_n(&told, true, __ATOMIC_RELAXED))
        sn_log("device memory 0x%llx has no handle that another process could open (cuMemCreate without a POSIX file "
               "descriptor type, or a stream-ordered pool): this process copies for the others",
               (unsigned long long)mr->addr);
    blob->kind = KIND_OWNER;
    if (!blob->table) {
        blob->base = mr->addr;
        blob->bytes = mr->length;
    }
    return 0;
}

int sn_cuda_region_export(const struct sn_cuda *cuda, struct sn_mr_shm *mr)
{
    struct blob blob = {0};
    int ordinal = 0, legacy = 0, mode;
    unsigned long long buffer_id = 0;
    int r = cuda->pointer_attribute(&ordinal, SN_CU_ATTR_DEVICE_ORDINAL, mr->addr);

    sn_cuda_region_reap(cuda);
    if (r != SN_CU_OK)
        return sn_cuda_failed(cuda, "cuPointerGetAttribute(DEVICE_ORDINAL)", r);
    struct sn_cuda_dev *dev = sn_cuda_dev_get(cuda, ordinal);
    if (!dev || sn_cuda_enter(cuda, dev, &mode))
        return -EIO;
    cuda->pointer_attribute(&legacy, SN_CU_ATTR_LEGACY_IPC, mr->addr);
    cuda->pointer_attribute(&buffer_id, SN_CU_ATTR_BUFFER_ID, mr->addr);
    blob.uuid = dev->uuid;
    blob.buffer_id = buffer_id;
    /* Pin memory for the first transfer here, where time does not matter. */
    r = sn_staging_init(cuda);
    if (!r)
        r = legacy ? export_legacy(cuda, mr, &blob) : export_vmm(cuda, mr, &blob);
    if (r == UNSHAREABLE)
        r = export_nothing(cuda, mr, &blob);
    sn_cuda_leave(cuda, mode);
    if (!r)
        memcpy(mr->ipc, &blob, sizeof(blob));
    else
        free_table((struct chunk *)(uintptr_t)blob.table, blob.chunks);
    return r;
}

void sn_cuda_region_unexport(struct sn_mr_shm *mr)
{
    struct blob *blob = blob_of(mr);
    free_table((struct chunk *)(uintptr_t)blob->table, blob->chunks);
    memset(blob, 0, sizeof(*blob));
    sn_cuda_region_reap(sn_cuda_get(false));
}

/* ---- initiator's side ---- */

/* One allocation (or run of allocations) of another process, mapped for one GPU. The registrations that lie in it share
 * it. */
struct sn_cuda_map {
    struct sn_cuda_map *next;
    uint32_t refs; /* entries, and copies under way */
    uint32_t proc, proc_generation, pid;
    struct sn_cuda_dev *dev;
    struct blob blob;
    sn_cu_ptr at;
    uint64_t reserved, mapped; /* KIND_VMM: bytes from at on */
    bool broken;               /* not open, or only in part, so it must be closed */
};

/* A registration that was used before. */
struct entry {
    struct entry *next;
    uint32_t mr, key;
    struct sn_cuda_dev *dev;
    struct sn_cuda_map *map; /* NULL: it could not be opened, and that is not tried again */
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* protects maps and entries */
static struct sn_cuda_map *maps;
static struct entry *buckets[BUCKETS];

/* Import one chunk of another process. */
static int import_chunk(const struct sn_cuda *cuda, int pidfd, const struct chunk *chunk, unsigned long long *handle)
{
    int fd = (int)syscall(__NR_pidfd_getfd, pidfd, chunk->fd, 0);
    if (fd < 0) {
        int error = errno;
        sn_log("pidfd_getfd for device memory 0x%llx: %s%s", (unsigned long long)chunk->base, strerror(error),
               error == EPERM ? " (another user's process, or a sandbox that forbids ptrace?)" : "");
        return -error;
    }
    int r = cuda->vmm_import(handle, (void *)(uintptr_t)fd, SN_CU_HANDLE_POSIX_FD);
    close(fd);
    return r == SN_CU_OK ? 0 : sn_cuda_failed(cuda, "cuMemImportFromShareableHandle", r);
}

/* Map one chunk at its offset in the reservation. pidfd: of its owner; -1: this process. */
static int map_chunk(const struct sn_cuda *cuda, int pidfd, const struct chunk *chunk, sn_cu_ptr at)
{
    unsigned long long handle;
    int r;

    if (pidfd >= 0) {
        r = import_chunk(cuda, pidfd, chunk, &handle);
        if (r)
            return r;
    } else {
        r = cuda->vmm_retain(&handle, (void *)(uintptr_t)chunk->base);
        if (r != SN_CU_OK)
            return sn_cuda_failed(cuda, "cuMemRetainAllocationHandle", r);
    }
    r = cuda->vmm_map(at, chunk->bytes, 0, handle, 0);
    cuda->vmm_release(handle); /* the mapping keeps it alive */
    return r == SN_CU_OK ? 0 : sn_cuda_failed(cuda, "cuMemMap", r);
}

static int open_chunks(const struct sn_cuda *cuda, struct sn_cuda_map *map, const struct chunk *table, int pidfd)
{
    const struct blob *blob = &map->blob;
    struct sn_cu_access access = {SN_CU_LOCATION_DEVICE, map->dev->dev, SN_CU_ACCESS_READWRITE};
    int r = cuda->vmm_reserve(&map->at, blob->bytes, 0, 0, 0);

    if (r != SN_CU_OK)
        return sn_cuda_failed(cuda, "cuMemAddressReserve", r);
    map->reserved = blob->bytes;
    for (uint32_t i = 0; i < blob->chunks; i++) {
        r = map_chunk(cuda, pidfd, &table[i], map->at + (table[i].base - blob->base));
        if (r)
            return r;
        map->mapped = table[i].base + table[i].bytes - blob->base;
    }
    r = cuda->vmm_access(map->at, blob->bytes, &access, 1);
    return r == SN_CU_OK ? 0 : sn_cuda_failed(cuda, "cuMemSetAccess", r);
}

/* The table is read as if the owner were another process, so that a thread that deregisters meanwhile does no harm.
 * CUDA tells the range of an allocation only where it is mapped, so this GPU could not ask for it. */
static int open_vmm(const struct sn_cuda *cuda, struct sn_cuda_map *map)
{
    bool own = map->proc == sn_self->proc;
    uint32_t count = map->blob.chunks;
    struct chunk *table = count && count <= CHUNKS_MOST ? calloc(count, sizeof(*table)) : NULL;
    if (!table)
        return count ? -ENOMEM : -EIO;
    int r = sn_host_read(map->pid, map->blob.table, table, count * sizeof(*table));
    int pidfd = r || own ? -1 : (int)syscall(SYS_pidfd_open, map->pid, 0);
    if (!r && !own && pidfd < 0)
        r = -errno;
    if (!r)
        r = open_chunks(cuda, map, table, pidfd);
    if (pidfd >= 0)
        close(pidfd);
    free(table);
    return r;
}

static int open_map(const struct sn_cuda *cuda, struct sn_cuda_map *map)
{
    if (map->blob.kind != KIND_LEGACY)
        return open_vmm(cuda, map);
    int r = cuda->ipc_open(&map->at, map->blob.handle, SN_CU_IPC_LAZY_PEER);
    return r == SN_CU_OK ? 0 : sn_cuda_failed(cuda, "cuIpcOpenMemHandle", r);
}

static void close_map(const struct sn_cuda *cuda, struct sn_cuda_map *map)
{
    int mode;
    if (sn_cuda_enter(cuda, map->dev, &mode))
        return;
    if (map->mapped)
        cuda->vmm_unmap(map->at, map->mapped);
    if (map->reserved)
        cuda->vmm_free(map->at, map->reserved);
    if (map->blob.kind == KIND_LEGACY && !map->broken)
        cuda->ipc_close(map->at);
    sn_cuda_leave(cuda, mode);
}

/* Drop the references of registrations that are gone. What could not be opened may be tried again once other mappings
 * have been closed. */
static void forget_locked(bool unopened)
{
    for (int b = 0; b < BUCKETS; b++)
        for (struct entry **p = &buckets[b], *e; (e = *p);) {
            bool stands = __atomic_load_n(&sn_self->world->mrs[e->mr].key, __ATOMIC_ACQUIRE) == e->key;
            if (stands && (e->map || !unopened)) {
                p = &e->next;
                continue;
            }
            *p = e->next;
            sn_cuda_map_give(e->map);
            free(e);
        }
}

/* cuIpcCloseMemHandle and cuMemUnmap wait until the GPU is idle, which it is not while a kernel waits for a transfer.
 * So nothing is closed during a transfer, or under the mutex, which transfers take. */
void sn_cuda_region_reap(const struct sn_cuda *cuda)
{
    struct sn_cuda_map *stale = NULL, *next;

    pthread_mutex_lock(&mutex);
    forget_locked(true);
    for (struct sn_cuda_map **p = &maps, *m; (m = *p);) {
        /* A mapping without references gets one only under the mutex, which is held. */
        if (__atomic_load_n(&m->refs, __ATOMIC_ACQUIRE)) {
            p = &m->next;
            continue;
        }
        *p = m->next;
        m->next = stale;
        stale = m;
    }
    pthread_mutex_unlock(&mutex);
    for (; stale; stale = next) {
        next = stale->next;
        close_map(cuda, stale);
        free(stale);
    }
}

static struct sn_cuda_map *find_map_locked(const struct sn_cuda_map *want)
{
    for (struct sn_cuda_map *m = maps; m; m = m->next)
        if (!m->broken && m->dev == want->dev && m->proc == want->proc && m->proc_generation == want->proc_generation &&
            m->blob.kind == want->blob.kind && m->blob.base == want->blob.base && m->blob.bytes == want->blob.bytes &&
            m->blob.buffer_id == want->blob.buffer_id)
            return m;
    return NULL;
}

/* *map stays NULL when the driver, or a sandbox, does not let this process open it: the owner can still copy. */
static int add_map_locked(const struct sn_cuda *cuda, const struct sn_cuda_map *want, struct sn_cuda_map **map)
{
    struct sn_cuda_map *m = malloc(sizeof(*m));

    if (!m)
        return -ENOMEM;
    *m = *want;
    int r = open_map(cuda, m);
    m->broken = r != 0; /* nothing refers to it, so the next reap closes the part that is mapped */
    m->next = maps;
    maps = m;
    if (!r) {
        *map = m;
        return 0;
    }
    if (r != -EIO && r != -EPERM)
        return r;
    if (want->proc == sn_self->proc)
        sn_log("device memory 0x%llx cannot be mapped for GPU %d, another one of this process",
               (unsigned long long)want->blob.base, want->dev->ordinal);
    else
        sn_log("device memory 0x%llx of pid %u cannot be opened here: its owner copies instead",
               (unsigned long long)want->blob.base, want->pid);
    return 0;
}

/* First use of a registration: find or open the mapping of its allocation. */
static int add_entry_locked(const struct sn_cuda *cuda, struct sn_cuda_dev *dev, struct sn_world *world, uint32_t index,
                            struct entry **out)
{
    struct sn_mr_shm *mr = &world->mrs[index];
    uint32_t key = __atomic_load_n(&mr->key, __ATOMIC_ACQUIRE), owner = mr->owner;
    struct sn_cuda_map want = {.dev = dev, .proc = owner - 1};

    if (!key || !owner)
        return -EFAULT;
    want.proc_generation = world->procs[want.proc].generation;
    want.pid = world->procs[want.proc].pid;
    want.blob = *blob_of(mr);
    forget_locked(false);
    struct sn_cuda_map *map = find_map_locked(&want);
    if (!map) {
        int r = add_map_locked(cuda, &want, &map);
        if (r)
            return r;
    }
    /* The registration has been deregistered meanwhile, so the values read above may belong to another one. An unused
     * mapping is closed with the others. */
    struct entry *entry = __atomic_load_n(&mr->key, __ATOMIC_ACQUIRE) == key ? malloc(sizeof(*entry)) : NULL;
    if (!entry)
        return -EFAULT;
    *entry = (struct entry){.next = buckets[index % BUCKETS], .mr = index, .key = key, .dev = dev, .map = map};
    buckets[index % BUCKETS] = entry;
    if (map)
        __atomic_add_fetch(&map->refs, 1, __ATOMIC_RELAXED);
    *out = entry;
    return 0;
}

int sn_cuda_map_take(const struct sn_cuda *cuda, struct sn_cuda_dev *dev, struct sn_world *world, uint32_t mr,
                     uint64_t addr, struct sn_cuda_map **map, sn_cu_ptr *ptr)
{
    uint32_t key = __atomic_load_n(&world->mrs[mr].key, __ATOMIC_ACQUIRE);
    struct entry *e;
    int r = 0;

    pthread_mutex_lock(&mutex);
    for (e = buckets[mr % BUCKETS]; e; e = e->next)
        if (e->mr == mr && e->key == key && e->dev == dev)
            break;
    if (!e)
        r = add_entry_locked(cuda, dev, world, mr, &e);
    if (!r && !e->map)
        r = SN_COPY_OWNER;
    if (!r) {
        __atomic_add_fetch(&e->map->refs, 1, __ATOMIC_RELAXED);
        *map = e->map;
        *ptr = e->map->at + (addr - e->map->blob.base);
    }
    pthread_mutex_unlock(&mutex);
    return r;
}

int sn_cuda_map_take_own(const struct sn_cuda *cuda, struct sn_cuda_dev *dev, struct sn_world *world, uint32_t mr,
                         uint64_t addr, struct sn_cuda_map **map, sn_cu_ptr *ptr)
{
    const struct blob *blob = blob_of(&world->mrs[mr]);
    int r;

    *ptr = addr;
    if (blob->kind == KIND_LEGACY || !memcmp(&blob->uuid, &dev->uuid, sizeof(blob->uuid)))
        return 0;
    r = sn_cuda_map_take(cuda, dev, world, mr, addr, map, ptr);
    if (r == SN_COPY_OWNER) /* the driver may still be able to copy */
        *ptr = addr;
    return r == SN_COPY_OWNER ? 0 : r;
}

void sn_cuda_map_give(struct sn_cuda_map *map)
{
    if (map)
        __atomic_sub_fetch(&map->refs, 1, __ATOMIC_ACQ_REL);
}

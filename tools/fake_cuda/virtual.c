/* SPDX-License-Identifier: Apache-2.0 */
/* Virtual memory management: memory, addresses and mappings, each freed separately. */
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tools/fake_cuda/busy.h"
#include "tools/fake_cuda/state.h"

enum { OBJECTS = 1024, POSIX_FD = 1, RDMA_CAPABLE = 1 /* the byte of fake_vmm_prop.flags */ };

struct object { /* memory of cuMemCreate; in use while it has handles or mappings */
    int handles, maps;
    int fd, dev;
    uint64_t bytes;
    bool exportable, rdma;
    uint32_t generation;
};

static struct object objects[OBJECTS];

bool fake_object_rdma(const struct object *object)
{
    return object->rdma;
}

static unsigned long long handle_of(const struct object *object)
{
    return (unsigned long long)object->generation << 32 | (unsigned long long)(object - objects + 1);
}

/* The object of a handle; NULL: no such handle, or already released. */
static struct object *object_of_locked(unsigned long long handle)
{
    uint64_t index = (handle & 0xffffffff) - 1;
    struct object *object = index < OBJECTS ? &objects[index] : NULL;
    return object && object->handles && object->generation == handle >> 32 ? object : NULL;
}

static int object_make(unsigned long long *handle, const struct object *what)
{
    int r = OUT_OF_MEMORY;
    pthread_mutex_lock(&fake_mutex);
    for (int i = 0; r && i < OBJECTS; i++) {
        uint32_t generation = objects[i].generation + 1;
        if (objects[i].handles || objects[i].maps)
            continue;
        objects[i] = *what;
        objects[i].handles = 1;
        objects[i].generation = generation;
        *handle = handle_of(&objects[i]);
        r = OK;
    }
    pthread_mutex_unlock(&fake_mutex);
    return r;
}

static void object_drop_locked(struct object *object)
{
    if (!object->handles && !object->maps)
        close(object->fd);
}

int cuMemGetAllocationGranularity(size_t *bytes, const struct fake_vmm_prop *prop, int option)
{
    *bytes = GRANULARITY;
    return prop->type == 1 && prop->location_type == 1 && option <= 1 ? OK : INVALID_VALUE;
}

int cuMemCreate(unsigned long long *handle, size_t bytes, const struct fake_vmm_prop *prop, unsigned long long flags)
{
    struct object object = {.dev = prop->location_id, .bytes = bytes};
    int r = fake_failure(__func__);
    if (r)
        return r;
    if (prop->type != 1 || prop->location_type != 1 || !bytes || bytes % GRANULARITY)
        return INVALID_VALUE;
    object.exportable = prop->handle_types & POSIX_FD;
    object.rdma = prop->flags[RDMA_CAPABLE];
    object.fd = memfd_create("fake_cuda", MFD_CLOEXEC);
    if (object.fd < 0 || ftruncate(object.fd, (off_t)bytes))
        return OUT_OF_MEMORY;
    return object_make(handle, &object);
}

int cuMemRelease(unsigned long long handle)
{
    int r = OK;
    pthread_mutex_lock(&fake_mutex);
    struct object *object = object_of_locked(handle);
    if (object) {
        object->handles--;
        object_drop_locked(object);
    } else {
        r = fake_refuse_locked(INVALID_VALUE);
    }
    pthread_mutex_unlock(&fake_mutex);
    return r;
}

int cuMemRetainAllocationHandle(unsigned long long *handle, void *addr)
{
    pthread_mutex_lock(&fake_mutex);
    struct range *range = fake_find((uintptr_t)addr);
    bool good = range && range->kind == MAPPED;
    if (good) {
        range->object->handles++;
        *handle = handle_of(range->object);
    }
    pthread_mutex_unlock(&fake_mutex);
    return good ? OK : INVALID_VALUE;
}

int cuMemExportToShareableHandle(void *out, unsigned long long handle, int type, unsigned long long flags)
{
    int r = INVALID_VALUE;
    pthread_mutex_lock(&fake_mutex);
    const struct object *object = object_of_locked(handle);
    if (object && object->exportable && type == POSIX_FD) {
        *(int *)out = fcntl(object->fd, F_DUPFD_CLOEXEC, 3);
        r = *(int *)out < 0 ? OUT_OF_MEMORY : OK;
    }
    pthread_mutex_unlock(&fake_mutex);
    return r;
}

int cuMemImportFromShareableHandle(unsigned long long *handle, void *os_handle, int type)
{
    struct object object = {.exportable = true, .rdma = true};
    struct stat st;
    int r = fake_failure(__func__);
    if (r)
        return r;
    object.fd = fcntl((int)(uintptr_t)os_handle, F_DUPFD_CLOEXEC, 3);
    if (type != POSIX_FD || object.fd < 0 || fstat(object.fd, &st))
        return INVALID_VALUE;
    object.bytes = (uint64_t)st.st_size;
    return object_make(handle, &object);
}

int cuMemAddressReserve(uint64_t *va, size_t bytes, size_t alignment, uint64_t wanted, unsigned long long flags)
{
    int r = fake_failure(__func__);
    if (r)
        return r;
    if (!bytes || bytes % GRANULARITY)
        return INVALID_VALUE;
    pthread_mutex_lock(&fake_mutex);
    *va = fake_reserve(bytes);
    if (!*va || !fake_fresh(RESERVED, *va, bytes))
        r = OUT_OF_MEMORY;
    pthread_mutex_unlock(&fake_mutex);
    return r;
}

int cuMemAddressFree(uint64_t va, size_t bytes)
{
    int r = OK;
    pthread_mutex_lock(&fake_mutex);
    struct range *range = fake_find_reserved(va);
    if (range && range->va == va && range->bytes == bytes && !fake_any_mapped(va, bytes)) {
        munmap((void *)(uintptr_t)va, bytes);
        range->kind = FREE;
    } else {
        r = fake_refuse_locked(INVALID_VALUE);
    }
    pthread_mutex_unlock(&fake_mutex);
    return r;
}

int cuMemMap(uint64_t va, size_t bytes, size_t offset, unsigned long long handle, unsigned long long flags)
{
    int r = fake_failure(__func__);
    if (r)
        return r;
    pthread_mutex_lock(&fake_mutex);
    struct object *object = object_of_locked(handle);
    const struct range *reserved = fake_find_reserved(va);
    struct range *range = NULL;
    if (object && !offset && bytes == object->bytes && reserved && va + bytes <= reserved->va + reserved->bytes &&
        !fake_any_mapped(va, bytes))
        range = fake_fresh(MAPPED, va, bytes);
    if (range) {
        range->shadow = fake_map_shared(object->fd, bytes);
        range->object = object;
        range->dev = object->dev;
        object->maps++;
    }
    pthread_mutex_unlock(&fake_mutex);
    return range ? OK : INVALID_VALUE;
}

int cuMemUnmap(uint64_t va, size_t bytes)
{
    fake_wait_idle(__func__);
    uint64_t end = va + bytes;
    int r, at = 0, found = 0;
    pthread_mutex_lock(&fake_mutex);
    for (struct range *range; (range = fake_next(MAPPED, &at));) {
        if (range->va < va || range->va + range->bytes > end)
            continue;
        munmap(range->shadow, range->bytes);
        range->kind = FREE;
        range->object->maps--;
        object_drop_locked(range->object);
        found++;
    }
    r = found ? OK : fake_refuse_locked(INVALID_VALUE);
    pthread_mutex_unlock(&fake_mutex);
    return r;
}

int cuMemSetAccess(uint64_t va, size_t bytes, const void *desc, size_t count)
{
    const int *location = desc; /* type, device, rights */
    int at = 0, found = 0, r = fake_failure(__func__);
    if (r)
        return r;
    if (count != 1 || location[0] != 1 || location[1] < 0 || location[1] >= DEVICES)
        return INVALID_VALUE;
    pthread_mutex_lock(&fake_mutex);
    for (struct range *range; (range = fake_next(MAPPED, &at));)
        if (range->va >= va && range->va < va + bytes) {
            range->accessible = true;
            range->access |= 1u << location[1];
            found++;
        }
    pthread_mutex_unlock(&fake_mutex);
    return found ? OK : INVALID_VALUE;
}

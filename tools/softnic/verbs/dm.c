/* SPDX-License-Identifier: Apache-2.0 */
/* Device memory: the memory on the chips of NICs. Here it is memory of the process, under the same rules. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "tools/softnic/verbs/devices.h"

enum { DM_WORD = 4 /* offsets and lengths of copies are multiples */, DM_MAX_LOG_ALIGN = 12, DM_MIN_ALIGN = 64 };

struct sn_dm {
    struct ibv_dm ibv; /* first: programs hold a pointer to it */
    struct sn_dm *next;
    uint8_t *at;
    uint64_t length;
};

/* All allocated device memory, of all devices; handles are unique. */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct sn_dm *list;
static uint32_t newest;

static struct sn_dm *of(struct ibv_dm *dm)
{
    return (struct sn_dm *)dm;
}

static bool inside(const struct sn_dm *dm, uint64_t offset, uint64_t length)
{
    return offset <= dm->length && length <= dm->length - offset;
}

static int copy_check(const struct sn_dm *dm, uint64_t offset, size_t length)
{
    if (offset % DM_WORD || length % DM_WORD)
        return EINVAL;
    return inside(dm, offset, length) ? 0 : EFAULT;
}

static int copy_in(struct ibv_dm *dm, uint64_t offset, const void *from, size_t length)
{
    int r = copy_check(of(dm), offset, length);

    if (!r)
        memcpy(of(dm)->at + offset, from, length);
    return r;
}

static int copy_out(void *to, struct ibv_dm *dm, uint64_t offset, size_t length)
{
    int r = copy_check(of(dm), offset, length);

    if (!r)
        memcpy(to, of(dm)->at + offset, length);
    return r;
}

static struct sn_dm *dm_make(struct ibv_context *context, uint8_t *at, uint64_t length)
{
    struct sn_dm *dm = calloc(1, sizeof(*dm));

    if (!dm)
        return NULL;
    dm->ibv = (struct ibv_dm){.context = context, .memcpy_to_dm = copy_in, .memcpy_from_dm = copy_out};
    dm->at = at;
    dm->length = length;
    return dm;
}

static uint64_t allocated_locked(const struct ibv_context *context)
{
    uint64_t sum = 0;

    for (const struct sn_dm *dm = list; dm; dm = dm->next)
        sum += dm->ibv.context == context ? dm->length : 0;
    return sum;
}

struct ibv_dm *sn_dm_alloc(struct ibv_context *context, struct ibv_alloc_dm_attr *attr)
{
    size_t align = attr->log_align_req > 6 ? 1ul << (attr->log_align_req % 64) : DM_MIN_ALIGN;
    struct sn_dm *dm = NULL;
    uint8_t *at;

    errno = EINVAL;
    if (attr->comp_mask || !attr->length || attr->log_align_req > DM_MAX_LOG_ALIGN)
        return NULL;
    errno = ENOMEM;
    at = attr->length <= SN_MAX_DM_BYTES ? aligned_alloc(align, (attr->length + align - 1) & ~(align - 1)) : NULL;
    if (!at)
        return NULL;
    memset(at, 0, attr->length);
    pthread_mutex_lock(&mutex);
    if (attr->length <= SN_MAX_DM_BYTES - allocated_locked(context))
        dm = dm_make(context, at, attr->length);
    if (dm) {
        dm->ibv.handle = ++newest;
        dm->next = list;
        list = dm;
    }
    pthread_mutex_unlock(&mutex);
    if (dm)
        return &dm->ibv;
    free(at);
    errno = ENOMEM;
    return NULL;
}

static bool registered(const struct sn_dm *dm)
{
    const struct sn_world *world = sn_self ? sn_self->world : NULL; /* a forked child has registered nothing */

    for (uint32_t i = 0; world && i < world->mr_slots.fresh; i++)
        if (world->mrs[i].owner == sn_self->proc + 1 && world->mrs[i].key &&
            world->mrs[i].addr - (uintptr_t)dm->at < dm->length)
            return true;
    return false;
}

int sn_dm_free(struct ibv_dm *ibv)
{
    struct sn_dm **link = &list;

    if (registered(of(ibv)))
        return EBUSY;
    pthread_mutex_lock(&mutex);
    while (*link && *link != of(ibv))
        link = &(*link)->next;
    if (*link)
        *link = of(ibv)->next;
    pthread_mutex_unlock(&mutex);
    free(of(ibv)->at);
    free(ibv);
    return 0;
}

/* A second handle for the same memory, which belongs to the first. */
struct ibv_dm *ibv_import_dm(struct ibv_context *context, uint32_t handle)
{
    struct sn_dm *dm, *copy = NULL;

    errno = EINVAL;
    pthread_mutex_lock(&mutex);
    for (dm = list; dm && (dm->ibv.context != context || dm->ibv.handle != handle); dm = dm->next)
        ;
    if (dm)
        copy = dm_make(context, dm->at, dm->length);
    if (copy)
        copy->ibv.handle = handle;
    pthread_mutex_unlock(&mutex);
    return copy ? &copy->ibv : NULL;
}

void ibv_unimport_dm(struct ibv_dm *dm)
{
    free(dm);
}

/* As in the kernel, its addresses begin at 0. */
struct ibv_mr *sn_dm_reg(struct ibv_pd *pd, struct ibv_dm *ibv, uint64_t offset, size_t length, unsigned int access)
{
    struct sn_dm *dm = of(ibv);
    struct ibv_mr *mr;

    if (!(access & IBV_ACCESS_ZERO_BASED) || !inside(dm, offset, length) || offset % DM_WORD) {
        errno = EINVAL;
        return NULL;
    }
    mr = ibv_reg_mr_iova2(pd, dm->at + offset, length, 0, access);
    if (mr)
        mr->addr = NULL;
    return mr;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/memory/cuda_mem.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "tools/softnic/memory/copy_threads.h"
#include "tools/softnic/memory/cuda_api.h"
#include "tools/softnic/memory/cuda_queue.h"
#include "tools/softnic/memory/cuda_region.h"
#include "tools/softnic/memory/cuda_staging.h"
#include "tools/softnic/memory/cuda_stream.h"
#include "tools/softnic/world/lock.h"
#include "tools/softnic/world/self.h"

enum {
    STAGES = 8,              /* pieces of one transfer in flight: load, copy, and store overlap */
    DIRECT_LEAST = 32 << 10, /* from this size on it pays to ask whether host memory is pinned */
    DROP_NS = 1000000000,
};

const struct sn_device_mem *sn_device_mem = &sn_cuda_mem;

/* Where a span of the copy really is. */
struct side {
    uint64_t addr, length;
    bool gpu;      /* a copy engine can reach addr: device memory, or pinned memory of this process */
    uint32_t proc; /* otherwise: the process whose host memory it is */
    struct sn_cuda_map *map;
};

enum stage_state { STAGE_FREE, STAGE_LOADING, STAGE_COPYING, STAGE_STORING };

/* A piece on its way between pageable host memory and a GPU (or, in mixed lists, between two pieces of host memory). A
 * thread or the copy engine copies it into the slot; the other copies it out. */
struct stage {
    enum stage_state state;
    struct sn_staging_slot *slot;
    uint64_t mark;
    struct sn_host_copy host_copy; /* the half on the host's side */
    uint64_t to, bytes;
    uint32_t to_proc;
    bool to_gpu;
};

struct transfer {
    struct transfer *next;
    struct sn_cuda_dev *dev;
    struct sn_cuda_stream *stream;
    uint64_t last; /* mark after the copies that need no slot */
    uint32_t dst_count, src_count, d, s;
    uint64_t d_off, s_off, left;
    struct stage stages[STAGES];
    unsigned staged; /* stages that are not free */
    struct side dst[SN_MAX_SPANS], src[SN_MAX_SPANS];
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* protects idle */
static struct transfer *idle;

static struct transfer *transfer_new(void)
{
    pthread_mutex_lock(&mutex);
    struct transfer *t = idle;
    if (t)
        idle = t->next;
    pthread_mutex_unlock(&mutex);
    if (!t)
        t = malloc(sizeof(*t));
    if (t)
        memset(t, 0, offsetof(struct transfer, dst));
    return t;
}

static void stage_free(struct transfer *t, struct stage *stage)
{
    sn_staging_give(stage->slot);
    stage->state = STAGE_FREE;
    t->staged--;
}

/* After a failure some pieces may still be under way. Threads finish soon. A copy engine may never finish, so it is not
 * waited for: its slot is lost rather than reused. */
static void drop_stages(const struct sn_cuda *cuda, struct transfer *t)
{
    uint64_t give_up = sn_now_ns() + DROP_NS;
    for (int i = 0; i < STAGES; i++) {
        struct stage *stage = &t->stages[i];
        while ((stage->state == STAGE_LOADING || stage->state == STAGE_STORING) &&
               sn_host_copy_result(&stage->host_copy) == SN_HOST_COPY_BUSY)
            sched_yield();
        while (stage->state == STAGE_COPYING && sn_now_ns() < give_up &&
               sn_cuda_stream_done(cuda, t->stream, stage->mark, true) == SN_CUDA_STREAM_BUSY)
            sched_yield();
        if (stage->state == STAGE_COPYING &&
            sn_cuda_stream_done(cuda, t->stream, stage->mark, true) == SN_CUDA_STREAM_BUSY)
            sn_log("device copy of %llu bytes did not end within 1 s of a failure: its staging slot is lost",
                   (unsigned long long)stage->bytes);
        else if (stage->state != STAGE_FREE)
            stage_free(t, stage);
    }
}

static void transfer_free(const struct sn_cuda *cuda, struct transfer *t)
{
    if (t->staged)
        drop_stages(cuda, t);
    for (uint32_t i = 0; i < t->dst_count; i++)
        sn_cuda_map_give(t->dst[i].map);
    for (uint32_t i = 0; i < t->src_count; i++)
        sn_cuda_map_give(t->src[i].map);
    pthread_mutex_lock(&mutex);
    t->next = idle;
    idle = t;
    pthread_mutex_unlock(&mutex);
}

static bool is_pinned(const struct sn_cuda *cuda, uint64_t addr, uint64_t length)
{
    int first = 0, last = 0;
    return cuda->pointer_attribute(&first, SN_CU_ATTR_MEMORY_TYPE, addr) == SN_CU_OK && first == SN_CU_MEMORY_HOST &&
           cuda->pointer_attribute(&last, SN_CU_ATTR_MEMORY_TYPE, addr + length - 1) == SN_CU_OK &&
           last == SN_CU_MEMORY_HOST;
}

/* The GPU to work from: that of the caller's own device memory; else the one that holds the other side's, if it is in
 * use here. */
static int choose_ordinal(const struct sn_cuda *cuda, const struct sn_copy *c)
{
    for (int own = 1; own >= 0; own--)
        for (int pass = 0; pass < 2; pass++) {
            const struct sn_span *span = pass ? c->dst : c->src;
            if (((pass ? c->dst_proc : c->src_proc) == c->self) != own)
                continue;
            for (uint32_t i = 0; i < (pass ? c->dst_count : c->src_count); i++)
                if (span[i].kind == SN_MEM_CUDA) {
                    struct sn_cu_uuid uuid = sn_cuda_region_uuid(&c->world->mrs[span[i].mr]);
                    int ordinal = sn_cuda_dev_find(cuda, &uuid);
                    return own && ordinal >= 0 ? ordinal : sn_cuda_dev_prefer(cuda, ordinal);
                }
        }
    return 0;
}

static int resolve(const struct sn_cuda *cuda, struct transfer *t, struct sn_copy *c, bool is_dst)
{
    const struct sn_span *span = is_dst ? c->dst : c->src;
    uint32_t count = is_dst ? c->dst_count : c->src_count, proc = is_dst ? c->dst_proc : c->src_proc;
    struct side *side = is_dst ? t->dst : t->src;

    for (uint32_t i = 0; i < count; i++) {
        side[i] = (struct side){.addr = span[i].addr, .length = span[i].length, .proc = proc};
        *(is_dst ? &t->dst_count : &t->src_count) = i + 1;
        if (span[i].kind == SN_MEM_HOST) {
            side[i].gpu =
                proc == c->self && span[i].length >= DIRECT_LEAST && is_pinned(cuda, span[i].addr, span[i].length);
            continue;
        }
        side[i].gpu = true;
        if (span[i].length == 0)
            continue;
        sn_cu_ptr here;
        int r = (proc == c->self ? sn_cuda_map_take_own : sn_cuda_map_take)(cuda, t->dev, c->world, span[i].mr,
                                                                            span[i].addr, &side[i].map, &here);
        if (r)
            return r;
        side[i].addr = here;
    }
    return 0;
}

/* Copy short pieces at once, since waking a thread takes longer. Give long ones to threads, so that pieces and queue
 * pairs overlap. */
static void host_copy_start(struct sn_host_copy *host_copy)
{
    if (host_copy->bytes <= SN_STAGING_SMALL)
        host_copy->result = sn_host_copy_now(host_copy);
    else
        sn_host_copy_start(host_copy);
}

static void store_start(struct sn_copy *c, struct stage *stage)
{
    stage->host_copy = (struct sn_host_copy){.world = c->world,
                                             .self = c->self,
                                             .dst_proc = stage->to_proc,
                                             .dst = stage->to,
                                             .src_proc = c->self,
                                             .src = (uintptr_t)stage->slot->host,
                                             .bytes = stage->bytes};
    stage->state = STAGE_STORING;
    host_copy_start(&stage->host_copy);
}

static int copy_start(const struct sn_cuda *cuda, struct transfer *t, struct stage *stage, uint64_t dst, uint64_t src)
{
    int r = sn_cuda_stream_copy(cuda, t->stream, dst, src, stage->bytes, &stage->mark);
    if (!r)
        stage->state = STAGE_COPYING;
    return r;
}

static int start_stage(const struct sn_cuda *cuda, struct sn_copy *c, struct transfer *t, uint64_t bytes)
{
    const struct side *dst = &t->dst[t->d], *src = &t->src[t->s];
    struct stage *stage = t->stages;
    struct sn_staging_slot *slot = sn_staging_take(bytes);

    if (!slot)
        return SN_COPY_BUSY;
    while (stage->state != STAGE_FREE) /* the caller has checked that one stage is free */
        stage++;
    stage->slot = slot;
    stage->to = dst->addr + t->d_off;
    stage->to_proc = dst->proc;
    stage->to_gpu = dst->gpu;
    stage->bytes = bytes;
    t->staged++;
    if (src->gpu) {
        int r = copy_start(cuda, t, stage, (uintptr_t)slot->host, src->addr + t->s_off);
        if (r)
            stage_free(t, stage);
        return r;
    }
    stage->host_copy = (struct sn_host_copy){.world = c->world,
                                             .self = c->self,
                                             .dst_proc = c->self,
                                             .dst = (uintptr_t)slot->host,
                                             .src_proc = src->proc,
                                             .src = src->addr + t->s_off,
                                             .bytes = bytes};
    stage->state = STAGE_LOADING;
    host_copy_start(&stage->host_copy);
    return 0;
}

/* Start the next piece, as long as both sides allow. Return 0, SN_COPY_BUSY (no slot), or -errno. */
static int start_piece(const struct sn_cuda *cuda, struct sn_copy *c, struct transfer *t)
{
    int r;
    while (t->dst[t->d].length == t->d_off)
        t->d++, t->d_off = 0;
    while (t->src[t->s].length == t->s_off)
        t->s++, t->s_off = 0;
    const struct side *dst = &t->dst[t->d], *src = &t->src[t->s];
    uint64_t bytes = dst->length - t->d_off;
    if (bytes > src->length - t->s_off)
        bytes = src->length - t->s_off;

    if (dst->gpu && src->gpu) {
        r = sn_cuda_stream_copy(cuda, t->stream, dst->addr + t->d_off, src->addr + t->s_off, bytes, &t->last);
    } else {
        if (bytes > SN_STAGING_LARGE)
            bytes = SN_STAGING_LARGE;
        r = t->staged < STAGES ? start_stage(cuda, c, t, bytes) : SN_COPY_BUSY;
    }
    if (r)
        return r;
    t->d_off += bytes;
    t->s_off += bytes;
    t->left -= bytes;
    return 0;
}

/* Bring a piece one step further. Return 0 (it advanced), SN_COPY_BUSY, or -errno. */
static int step_stage(const struct sn_cuda *cuda, struct sn_copy *c, struct transfer *t, struct stage *stage)
{
    int r;

    if (stage->state == STAGE_COPYING) {
        r = sn_cuda_stream_done(cuda, t->stream, stage->mark, true);
        if (r)
            return r;
        if (stage->to_gpu)
            stage_free(t, stage);
        else
            store_start(c, stage);
        return 0;
    }
    r = sn_host_copy_result(&stage->host_copy);
    if (r == SN_HOST_COPY_BUSY)
        return SN_COPY_BUSY;
    if (r)
        return r;
    if (stage->state == STAGE_STORING)
        stage_free(t, stage);
    else if (stage->to_gpu)
        return copy_start(cuda, t, stage, stage->to, (uintptr_t)stage->slot->host);
    else
        store_start(c, stage);
    return 0;
}

/* The GPU must be current unless all pieces were given to it. Return 0 (all bytes have arrived), SN_COPY_BUSY, or
 * -errno. */
static int advance(const struct sn_cuda *cuda, struct sn_copy *c, struct transfer *t)
{
    int r = 0;
    while (t->left || t->staged) {
        bool moved = false;
        if (t->left) {
            r = start_piece(cuda, c, t);
            if (r < 0)
                return r;
            moved = r == 0;
        }
        for (int i = 0; t->staged && i < STAGES; i++) {
            if (t->stages[i].state == STAGE_FREE)
                continue;
            r = step_stage(cuda, c, t, &t->stages[i]);
            if (r < 0)
                return r;
            moved |= r == 0;
        }
        if (!moved)
            return SN_COPY_BUSY;
    }
    return sn_cuda_stream_done(cuda, t->stream, t->last, true);
}

/* Does this process's side (own), or the other side, name device memory (owner_only: that only its owner can reach)? */
static bool any_span(const struct sn_copy *c, bool own, bool owner_only)
{
    for (int pass = 0; pass < 2; pass++) {
        const struct sn_span *span = pass ? c->dst : c->src;
        if (((pass ? c->dst_proc : c->src_proc) == c->self) != own)
            continue;
        for (uint32_t i = 0; i < (pass ? c->dst_count : c->src_count); i++)
            if (span[i].kind == SN_MEM_CUDA && (!owner_only || sn_cuda_region_owner_only(&c->world->mrs[span[i].mr])))
                return true;
    }
    return false;
}

static int cuda_copy_start(struct sn_copy *c)
{
    const struct sn_cuda *cuda = sn_cuda_get(true);
    int mode, r;

    if (any_span(c, false, true))
        return SN_COPY_OWNER;
    if (!sn_cuda_count(cuda)) {
        if (!any_span(c, true, false))
            return SN_COPY_OWNER;
        sn_log("a transfer names device memory, but this process has no CUDA driver or sees no GPU");
        return -EIO;
    }
    struct transfer *t = transfer_new();
    if (!t)
        return -ENOMEM;
    t->left = c->length;
    t->dev = sn_cuda_dev_get(cuda, choose_ordinal(cuda, c));
    r = t->dev ? sn_cuda_enter(cuda, t->dev, &mode) : -EIO;
    if (r) {
        transfer_free(cuda, t);
        return r;
    }
    t->stream = sn_cuda_stream_next(t->dev);
    r = sn_staging_init(cuda);
    if (!r)
        r = resolve(cuda, t, c, true);
    if (!r)
        r = resolve(cuda, t, c, false);
    if (!r)
        r = advance(cuda, c, t);
    if (r != SN_COPY_BUSY)
        transfer_free(cuda, t);
    else
        c->async = t;
    sn_cuda_leave(cuda, mode);
    return r;
}

static int cuda_copy_poll(struct sn_copy *c)
{
    const struct sn_cuda *cuda = sn_cuda_get(true);
    struct transfer *t = c->async;
    bool given = !t->left && !t->staged;
    int mode, r = given ? 0 : sn_cuda_enter(cuda, t->dev, &mode);
    if (!r) {
        r = advance(cuda, c, t);
        if (!given)
            sn_cuda_leave(cuda, mode);
    }
    if (r != SN_COPY_BUSY) {
        transfer_free(cuda, t);
        c->async = NULL;
    }
    return r;
}

static bool cuda_is_device(uint64_t addr, uint64_t length)
{
    const struct sn_cuda *cuda = sn_cuda_get(false); /* without a driver in this process nothing can be device memory */
    int type = 0, managed = 0;
    if (!cuda || !length || cuda->pointer_attribute(&type, SN_CU_ATTR_MEMORY_TYPE, addr) != SN_CU_OK ||
        type != SN_CU_MEMORY_DEVICE)
        return false;
    /* Managed memory has a CPU mapping, which process_vm can use. */
    return cuda->pointer_attribute(&managed, SN_CU_ATTR_IS_MANAGED, addr) != SN_CU_OK || !managed;
}

/* A DMA-BUF does not tell its address in this process. Programs that export device memory give its address as the iova
 * (NCCL, NVSHMEM), so it is looked for there. */
static int cuda_export_mr(struct sn_mr_shm *mr, int dmabuf_fd, uint64_t offset)
{
    const struct sn_cuda *cuda = sn_cuda_get(true);
    if (dmabuf_fd >= 0) {
        if (!cuda_is_device(mr->iova, mr->length)) {
            sn_log("DMA-BUF %d, offset %llu: its iova 0x%llx is not an address of device memory in this process, so "
                   "its memory cannot be "
                   "found",
                   dmabuf_fd, (unsigned long long)offset, (unsigned long long)mr->iova);
            return -EOPNOTSUPP;
        }
        mr->addr = mr->iova;
    }
    if (!sn_cuda_count(cuda))
        return -ENODEV;
    mr->kind = SN_MEM_CUDA;
    return sn_cuda_region_export(cuda, mr);
}

static bool cuda_dmabuf_supported(void)
{
    const struct sn_cuda *cuda = sn_cuda_get(false);
    int count = 0, supported = 0;
    /* On a real machine the Linux kernel answers, so the answer is the same before and after the application calls
     * cuInit(). Many applications ask before. */
    if (!cuda || cuda->device_count(&count) == SN_CU_NOT_INITIALIZED)
        return sn_cuda_installed();
    for (int i = 0, dev; i < count && !supported; i++)
        if (cuda->device_get(&dev, i) == SN_CU_OK)
            cuda->device_attribute(&supported, SN_CU_DEVICE_ATTR_DMA_BUF, dev);
    return supported;
}

static void cuda_settle(void)
{
    const struct sn_cuda *cuda = sn_cuda_get(false);
    if (cuda)
        sn_cuda_region_reap(cuda);
}

/* Memory of this process needs no mapping. */
static int cuda_prepare(uint32_t index)
{
    const struct sn_mr_shm *mr = &sn_self->world->mrs[index];
    struct sn_cu_uuid uuid = sn_cuda_region_uuid(mr);
    const struct sn_cuda *cuda = mr->owner == sn_self->proc + 1 ? NULL : sn_cuda_get(true);
    struct sn_cuda_map *map = NULL;
    struct sn_cuda_dev *dev;
    sn_cu_ptr here;
    int mode, r;

    if (mr->owner == sn_self->proc + 1 || sn_cuda_region_owner_only(mr))
        return 0;
    dev = sn_cuda_count(cuda) ? sn_cuda_dev_get(cuda, sn_cuda_dev_find(cuda, &uuid)) : NULL;
    if (!dev) {
        sn_log("device memory of pid %u: pid %u, which is to copy it, does not see its GPU (no driver, or hidden by "
               "CUDA_VISIBLE_DEVICES?)",
               sn_self->world->procs[(mr->owner - 1) % SN_MAX_PROCS].pid, sn_pid);
        return SN_COPY_OWNER;
    }
    sn_cuda_region_reap(cuda);
    r = sn_cuda_enter(cuda, dev, &mode);
    if (r)
        return r;
    r = sn_staging_init(cuda);
    if (!r)
        r = sn_cuda_map_take(cuda, dev, sn_self->world, index, mr->addr, &map, &here);
    sn_cuda_map_give(map);
    sn_cuda_leave(cuda, mode);
    return r;
}

const struct sn_device_mem sn_cuda_mem = {
    .is_device = cuda_is_device,
    .export_mr = cuda_export_mr,
    .unexport_mr = sn_cuda_region_unexport,
    .dmabuf_supported = cuda_dmabuf_supported,
    .owner_only = sn_cuda_region_owner_only,
    .settle = cuda_settle,
    .prepare = cuda_prepare,
    .copy_start = cuda_copy_start,
    .copy_poll = cuda_copy_poll,
    .enqueue = sn_cuda_enqueue,
    .queued_done = sn_cuda_queued_done,
    .bounce_take = sn_staging_bounce_take,
    .bounce_give = sn_staging_bounce_give,
    .watch = sn_cuda_streams_watch,
};

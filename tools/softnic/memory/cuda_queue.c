/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/memory/cuda_queue.h"

#include <assert.h>
#include <string.h>

#include "tools/softnic/memory/copy_threads.h"
#include "tools/softnic/memory/cuda_region.h"
#include "tools/softnic/memory/cuda_staging.h"
#include "tools/softnic/memory/cuda_stream.h"

static_assert((int)SN_CUDA_STREAM_BUSY == (int)SN_COPY_BUSY, "passed on as it is");

enum way { FROM_HOST, FROM_DEVICE, TO_HOST };

static bool foreign_refused; /* the driver refuses it, see choose_dev */
static bool words_refused;   /* the driver refuses it, see enqueue_words */

/* Does the copy go from one piece of device memory that this process can reach to a few bytes of this process's
 * memory? */
static bool can_read(const struct sn_copy *c)
{
    return c->dst_count == 1 && c->dst[0].mr == SN_NONE && c->dst_proc == c->self && c->length <= SN_STAGING_SMALL &&
           c->src_count == 1 && c->src[0].kind == SN_MEM_CUDA &&
           (c->src_proc == c->self || !sn_cuda_region_owner_only(&c->world->mrs[c->src[0].mr]));
}

/* Is the copy into words, which the stream itself writes? */
static bool is_words(const struct sn_copy *c)
{
    for (uint32_t i = 0; i < c->dst_count; i++)
        if (c->dst[i].length != sizeof(uint64_t) || c->dst[i].addr % sizeof(uint64_t))
            return false;
    return c->dst_count <= SN_CUDA_STREAM_WORDS;
}

/* Can the copy be queued? Its target must be device memory of one registration that this process can reach. Its source
 * is device memory alone (in one piece, if it is another process's), or a few bytes of host memory. */
static bool can_write(const struct sn_copy *c)
{
    bool from_device = c->src[0].kind == SN_MEM_CUDA;

    if (c->dst_count == 0 || c->src_count == 0 || c->dst[0].kind != SN_MEM_CUDA ||
        (c->dst_count > 1 && !from_device && !is_words(c)) ||
        (c->dst_proc != c->self && sn_cuda_region_owner_only(&c->world->mrs[c->dst[0].mr])))
        return false;
    if (from_device && c->src_proc != c->self &&
        (c->src_count != 1 || sn_cuda_region_owner_only(&c->world->mrs[c->src[0].mr])))
        return false;
    for (uint32_t i = 1; i < c->src_count; i++)
        if ((c->src[i].kind == SN_MEM_CUDA) != from_device)
            return false;
    for (uint32_t i = 1; i < c->dst_count; i++)
        if (c->dst[i].mr != c->dst[0].mr)
            return false;
    return from_device || c->length <= SN_STAGING_SMALL;
}

static enum way way_of(const struct sn_copy *c)
{
    if (c->dst[0].kind != SN_MEM_CUDA)
        return TO_HOST;
    return c->src[0].kind == SN_MEM_CUDA ? FROM_DEVICE : FROM_HOST;
}

/* Choose the GPU that copies. Device memory is copied by its own GPU. Between host and device memory the queue's GPU
 * copies: the memory of other processes is mapped for it, and the driver finds this process's own memory on another GPU
 * (*foreign) by its address. That saves waiting until the queue is empty. An empty queue moves to the memory's own
 * GPU. */
static struct sn_cuda_dev *choose_dev(const struct sn_cuda *cuda, const struct sn_copy *c,
                                      const struct sn_copy_queue *queue, enum way way, bool *foreign)
{
    const struct sn_span *span = way == FROM_HOST ? c->dst : c->src;
    bool own = way == FROM_DEVICE || (way == FROM_HOST ? c->dst_proc : c->src_proc) == c->self;
    struct sn_cu_uuid uuid;
    struct sn_cuda_dev *dev, *queue_dev = queue->stream ? sn_cuda_stream_dev(queue->stream) : NULL;
    int ordinal;

    *foreign = false;
    if (!own && queue_dev)
        return queue_dev;
    uuid = sn_cuda_region_uuid(&c->world->mrs[span->mr]);
    ordinal = sn_cuda_dev_find(cuda, &uuid);
    if (!own)
        ordinal = sn_cuda_dev_prefer(cuda, ordinal);
    dev = sn_cuda_dev_get(cuda, ordinal);
    if (way == FROM_DEVICE || !queue->pending || queue_dev == dev ||
        __atomic_load_n(&foreign_refused, __ATOMIC_RELAXED))
        return dev;
    *foreign = true;
    return queue_dev;
}

/* Copy the bytes of the source, one span after the other, to memory of this process. */
static int gather(const struct sn_copy *c, void *to)
{
    uint8_t *at = to;
    int r = 0;

    for (uint32_t i = 0; i < c->src_count && !r; i++) {
        struct sn_host_copy move = {.world = c->world,
                                    .self = c->self,
                                    .dst_proc = c->self,
                                    .dst = (uintptr_t)at,
                                    .src_proc = c->src_proc,
                                    .src = c->src[i].addr,
                                    .bytes = c->src[i].length};
        if (c->src[i].mr == SN_NONE && c->src_proc == c->self) /* the request's own memory */
            memcpy(at, (const void *)(uintptr_t)c->src[i].addr, c->src[i].length);
        else
            r = sn_host_copy_now(&move);
        at += c->src[i].length;
    }
    return r;
}

/* Return SN_COPY_BUSY when the driver refuses this, now, or has refused it before. */
static int enqueue_words(const struct sn_cuda *cuda, const struct sn_copy *c, struct sn_cuda_stream *s, sn_cu_ptr dst,
                         struct sn_queued_copy *f)
{
    uint64_t values[SN_CUDA_STREAM_WORDS];
    sn_cu_ptr to[SN_CUDA_STREAM_WORDS];
    int r;

    if (__atomic_load_n(&words_refused, __ATOMIC_RELAXED))
        return SN_COPY_BUSY;
    r = gather(c, values);
    if (r)
        return r;
    for (uint32_t i = 0; i < c->dst_count; i++)
        to[i] = dst + (c->dst[i].addr - c->dst[0].addr);
    if (!sn_cuda_stream_write(cuda, s, to, values, c->dst_count, &f->mark))
        return 0;
    if (!__atomic_exchange_n(&words_refused, true, __ATOMIC_RELAXED))
        sn_log("words of device memory are copied from here on");
    return SN_COPY_BUSY;
}

/* foreign: this process's memory, which the stream's GPU need not have mapped. */
static int enqueue_from_host(const struct sn_cuda *cuda, const struct sn_copy *c, struct sn_cuda_stream *s,
                             bool foreign, sn_cu_ptr dst, struct sn_queued_copy *f)
{
    int r = is_words(c) && !foreign ? enqueue_words(cuda, c, s, dst, f) : SN_COPY_BUSY;
    struct sn_staging_slot *slot;

    if (r != SN_COPY_BUSY || c->dst_count > 1)
        return r;
    slot = sn_staging_take(c->length);
    if (!slot)
        return SN_COPY_BUSY;
    r = gather(c, slot->host);
    if (!r)
        r = sn_cuda_stream_copy(cuda, s, dst, (uintptr_t)slot->host, c->length, &f->mark);
    if (r)
        sn_staging_give(slot);
    else
        f->slot = slot;
    return r;
}

static int enqueue_to_host(const struct sn_cuda *cuda, const struct sn_copy *c, struct sn_cuda_stream *s, sn_cu_ptr src,
                           struct sn_queued_copy *f)
{
    struct sn_staging_slot *slot = sn_staging_take(c->length);
    int r;

    if (!slot)
        return SN_COPY_BUSY;
    r = sn_cuda_stream_copy(cuda, s, (uintptr_t)slot->host, src, c->length, &f->mark);
    if (r) {
        sn_staging_give(slot);
        return r;
    }
    f->slot = slot;
    f->to = (void *)(uintptr_t)c->dst[0].addr;
    f->bytes = c->length;
    return 0;
}

/* dst and src: the addresses here of the first piece of each side. Pieces of another registration are this process's,
 * and have their own addresses. */
static int enqueue_pieces(const struct sn_cuda *cuda, const struct sn_copy *c, struct sn_cuda_stream *s, sn_cu_ptr dst,
                          sn_cu_ptr src, struct sn_queued_copy *f)
{
    sn_cu_ptr to[2 * SN_MAX_SPANS], from[2 * SN_MAX_SPANS];
    size_t bytes[2 * SN_MAX_SPANS], n = 0;
    uint32_t d = 0, e = 0;
    uint64_t d_off = 0, e_off = 0;

    while (d < c->dst_count && e < c->src_count) {
        const struct sn_span *t = &c->dst[d], *o = &c->src[e];
        uint64_t d_left = t->length - d_off, e_left = o->length - e_off;

        to[n] = dst + (t->addr - c->dst[0].addr) + d_off;
        from[n] = (o->mr == c->src[0].mr ? src + (o->addr - c->src[0].addr) : o->addr) + e_off;
        bytes[n] = d_left < e_left ? d_left : e_left;
        d_off = d_left == bytes[n] ? 0 : d_off + bytes[n];
        e_off = e_left == bytes[n] ? 0 : e_off + bytes[n];
        d += d_off == 0;
        e += e_off == 0;
        n++;
    }
    return sn_cuda_stream_copies(cuda, s, to, from, bytes, n, &f->mark);
}

/* Find the address of a piece of device memory here. Return false if it cannot be mapped: the direct way logs why, or
 * lets its owner copy. */
static bool reach(const struct sn_cuda *cuda, const struct sn_copy *c, struct sn_cuda_stream *s, bool is_dst,
                  struct sn_cuda_map **map, sn_cu_ptr *here)
{
    const struct sn_span *span = is_dst ? c->dst : c->src;
    struct sn_cuda_dev *dev = sn_cuda_stream_dev(s);

    *here = span->addr;
    if ((is_dst ? c->dst_proc : c->src_proc) != c->self)
        return !sn_cuda_map_take(cuda, dev, c->world, span->mr, span->addr, map, here);
    /* Between host memory and another GPU's memory, the driver copies regardless of that GPU's access (choose_dev). */
    return way_of(c) != FROM_DEVICE || !sn_cuda_map_take_own(cuda, dev, c->world, span->mr, span->addr, map, here);
}

/* The GPU is current. */
static int enqueue_entered(const struct sn_cuda *cuda, const struct sn_copy *c, struct sn_cuda_stream *s, enum way way,
                           bool foreign, struct sn_queued_copy *f)
{
    struct sn_cuda_map *map = NULL, *from_map = NULL;
    sn_cu_ptr dst = 0, src = 0;
    int r = 0;

    if ((way != TO_HOST && !reach(cuda, c, s, true, &map, &dst)) ||
        (way != FROM_HOST && !reach(cuda, c, s, false, &from_map, &src)))
        r = SN_COPY_BUSY;
    if (!r && way == FROM_HOST)
        r = enqueue_from_host(cuda, c, s, foreign, dst, f);
    if (!r && way == TO_HOST)
        r = enqueue_to_host(cuda, c, s, src, f);
    if (!r && way == FROM_DEVICE)
        r = enqueue_pieces(cuda, c, s, dst, src, f);
    if (r) {
        sn_cuda_map_give(map);
        sn_cuda_map_give(from_map);
    } else {
        f->map = map;
        f->from_map = from_map;
    }
    return r;
}

/* Refuse this copy, and from now on every copy of its kind in this process. */
static int refuse_foreign(const struct sn_cuda_dev *dev)
{
    if (!__atomic_exchange_n(&foreign_refused, true, __ATOMIC_RELAXED))
        sn_log("a stream of GPU %d cannot copy between the host and another GPU of this process: such copies wait for "
               "those before them from now on",
               dev->ordinal);
    return SN_COPY_BUSY;
}

int sn_cuda_enqueue(struct sn_copy *c, struct sn_copy_queue *queue, struct sn_queued_copy *queued)
{
    enum way way = way_of(c);
    const struct sn_cuda *cuda;
    struct sn_cuda_dev *dev;
    bool foreign = false;
    int mode, r;

    if (way == TO_HOST ? !can_read(c) : !can_write(c))
        return SN_COPY_BUSY;
    cuda = sn_cuda_get(true);
    dev = sn_cuda_count(cuda) ? choose_dev(cuda, c, queue, way, &foreign) : NULL;
    if (!dev)
        return SN_COPY_BUSY;
    if (!queue->stream || sn_cuda_stream_dev(queue->stream) != dev) {
        if (queue->pending)
            return SN_COPY_BUSY;
        queue->stream = sn_cuda_stream_next(dev);
    }
    r = sn_cuda_enter(cuda, dev, &mode);
    if (r)
        return r;
    *queued = (struct sn_queued_copy){0};
    r = sn_staging_init(cuda);
    if (!r)
        r = enqueue_entered(cuda, c, queue->stream, way, foreign, queued);
    sn_cuda_leave(cuda, mode);
    if (!r)
        queue->pending++;
    return r < 0 && foreign ? refuse_foreign(dev) : r;
}

int sn_cuda_queued_done(struct sn_copy_queue *queue, struct sn_queued_copy *queued, bool ask)
{
    int r = sn_cuda_stream_done(sn_cuda_get(false), queue->stream, queued->mark, ask);

    if (r == SN_COPY_BUSY)
        return r;
    if (queued->to && !r)
        memcpy(queued->to, ((struct sn_staging_slot *)queued->slot)->host, queued->bytes);
    if (queued->slot)
        sn_staging_give(queued->slot);
    sn_cuda_map_give(queued->map);
    sn_cuda_map_give(queued->from_map);
    queue->pending--;
    return r;
}

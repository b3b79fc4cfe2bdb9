/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/memory/cuda_stream.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>

#include "tools/softnic/world/self.h"
#include "tools/softnic/world/world.h"

enum {
    OPS_MOST = 32,
    EVENTS_MOST = 64,
    LINE_BYTES = 64, /* each count in a line of its own: GPUs write them, threads poll them */
    CHECK_NS = 1000000,
};

struct sn_cuda_stream {
    pthread_mutex_t mutex; /* protects all below; passed and lost are read without it */
    struct sn_cuda_dev *dev;
    void *stream;
    uint64_t *passed; /* pinned: the last mark that the stream has come by */
    uint64_t given;   /* the last mark that it was given */
    uint64_t lost;    /* what this mark stands for was refused */
    uint64_t check_at;
    unsigned count; /* stores that wait */
    struct sn_cu_memop ops[OPS_MOST + 1];
    bool by_event; /* marks are events from now on; no stores either */
    unsigned first_event, events;
    struct {
        uint64_t mark;
        void *event;
    } ring[EVENTS_MOST]; /* marks that are no stores */
};

static struct sn_cu_memop store_op(sn_cu_ptr dst, uint64_t value, unsigned bytes)
{
    return (struct sn_cu_memop){
        .operation = bytes == 8 ? SN_CU_WRITE_VALUE_64 : SN_CU_WRITE_VALUE_32, .address = dst, .value = value};
}

/* Can the driver write marks? Tried here, where a refusal costs nothing. */
static bool marks_work(const struct sn_cuda *cuda, struct sn_cuda_stream *s)
{
    struct sn_cu_memop op = store_op((uintptr_t)s->passed, ++s->given, 8);
    return cuda->batch_memop(s->stream, 1, &op, 0) == SN_CU_OK;
}

int sn_cuda_streams_open(const struct sn_cuda *cuda, struct sn_cuda_dev *dev)
{
    struct sn_cuda_stream *all = calloc(SN_CUDA_STREAMS, sizeof(*all));
    void *words;
    int r = all ? cuda->host_alloc(&words, SN_CUDA_STREAMS * LINE_BYTES, SN_CU_HOST_PORTABLE) : SN_CU_OK;

    /* A store waits its turn in one of the hardware's queues, which streams of the program may share: behind a stream
     * there that waits for an event, which waits for a kernel, which waits for this very transfer, it waits for ever.
     * Copies and events have queues of their own. So only who asked for stores gets them. */
    dev->no_memops |= !sn_self->world->config.stream_stores;
    if (!all || r != SN_CU_OK) {
        free(all);
        return all ? sn_cuda_failed(cuda, "cuMemHostAlloc of the marks of streams", r) : -ENOMEM;
    }
    for (int i = 0; i < SN_CUDA_STREAMS; i++) {
        struct sn_cuda_stream *s = &all[i];

        pthread_mutex_init(&s->mutex, NULL);
        s->dev = dev;
        s->lost = UINT64_MAX;
        s->passed = (uint64_t *)((char *)words + i * LINE_BYTES);
        *s->passed = 0;
        r = cuda->stream_create(&s->stream, SN_CU_STREAM_NON_BLOCKING);
        if (r != SN_CU_OK) /* what is made stays, unused: giving it back could wait */
            return sn_cuda_failed(cuda, "cuStreamCreate", r);
        if (!dev->no_memops && !marks_work(cuda, s)) {
            sn_log("this CUDA driver refuses stores in streams (cuStreamBatchMemOp): short writes to device memory are "
                   "slower");
            dev->no_memops = true;
        }
        s->given = dev->no_memops ? 0 : s->given;
        dev->streams[i] = s;
    }
    return 0;
}

struct sn_cuda_stream *sn_cuda_stream_next(struct sn_cuda_dev *dev)
{
    return dev->streams[__atomic_fetch_add(&dev->next_stream, 1, __ATOMIC_RELAXED) % SN_CUDA_STREAMS];
}

struct sn_cuda_dev *sn_cuda_stream_dev(const struct sn_cuda_stream *s)
{
    return s->dev;
}

static bool no_memops(const struct sn_cuda_stream *s)
{
    return __atomic_load_n(&s->dev->no_memops, __ATOMIC_RELAXED);
}

/* M1: acquire; pairs with M2 below, and with the GPU's store of a mark, which it makes behind all before: what was
 * copied to host memory is visible. */
static uint64_t passed(const struct sn_cuda_stream *s)
{
    return __atomic_load_n(s->passed, __ATOMIC_ACQUIRE);
}

/* Look at the marks that are events, oldest first. The GPU is current. */
static int events_look_locked(const struct sn_cuda *cuda, struct sn_cuda_stream *s)
{
    while (s->events) {
        unsigned at = s->first_event % EVENTS_MOST;
        int r = cuda->event_query(s->ring[at].event);

        if (r == SN_CU_NOT_READY)
            return SN_CUDA_STREAM_BUSY;
        if (r != SN_CU_OK)
            return sn_cuda_failed(cuda, "cuEventQuery", r);
        /* M2: release; pairs with M1. The GPU's own marks are older. */
        __atomic_store_n(s->passed, s->ring[at].mark, __ATOMIC_RELEASE);
        sn_cuda_event_give(s->dev, s->ring[at].event);
        s->first_event++;
        s->events--;
    }
    return 0;
}

static int event_mark_locked(const struct sn_cuda *cuda, struct sn_cuda_stream *s)
{
    void *event;

    if (s->events == EVENTS_MOST && events_look_locked(cuda, s) < 0)
        return -EIO;
    if (s->events == EVENTS_MOST)
        return SN_CUDA_STREAM_BUSY;
    event = sn_cuda_event_take(cuda, s->dev);
    if (!event)
        return -EIO;
    int r = cuda->event_record(event, s->stream);
    if (r != SN_CU_OK) {
        sn_cuda_event_give(s->dev, event);
        return sn_cuda_failed(cuda, "cuEventRecord", r);
    }
    s->ring[(s->first_event + s->events) % EVENTS_MOST].mark = s->given + 1;
    s->ring[(s->first_event + s->events++) % EVENTS_MOST].event = event;
    return 0;
}

/* The stores that wait, with a mark behind them and all else, in one call. */
static int store_mark_locked(const struct sn_cuda *cuda, struct sn_cuda_stream *s)
{
    unsigned stores = s->count;

    s->ops[s->count] = store_op((uintptr_t)s->passed, s->given + 1, 8);
    s->count = 0;
    int r = cuda->batch_memop(s->stream, stores + 1, s->ops, 0);
    if (r == SN_CU_OK)
        return 0;
    if (stores) /* nobody makes them now, and there will be no others on this stream */
        __atomic_store_n(&s->lost, s->given + 1, __ATOMIC_RELEASE);
    __atomic_store_n(&s->dev->no_memops, true, __ATOMIC_RELAXED);
    sn_log("from now on the streams of GPU %d are watched by events", s->dev->ordinal);
    return sn_cuda_failed(cuda, "cuStreamBatchMemOp", r);
}

/* The GPU is current. Return 0, SN_CUDA_STREAM_BUSY (later), or -EIO. */
static int mark_locked(const struct sn_cuda *cuda, struct sn_cuda_stream *s)
{
    int r = 0;

    if (!s->by_event)
        s->by_event = (no_memops(s) && !s->count) || store_mark_locked(cuda, s);
    if (s->by_event)
        r = event_mark_locked(cuda, s);
    if (r)
        return r;
    s->given++;
    s->check_at = sn_now_ns() + CHECK_NS;
    return 0;
}

int sn_cuda_stream_copy(const struct sn_cuda *cuda, struct sn_cuda_stream *s, sn_cu_ptr dst, sn_cu_ptr src,
                        uint64_t bytes, uint64_t *mark)
{
    int r = 0;

    pthread_mutex_lock(&s->mutex);
    if (s->count)
        r = mark_locked(cuda, s) ? -EIO : 0;
    if (!r) {
        r = cuda->copy(dst, src, bytes, s->stream);
        r = r == SN_CU_OK ? 0 : sn_cuda_failed(cuda, "cuMemcpyAsync", r);
    }
    if (!r)
        *mark = s->given + 1;
    pthread_mutex_unlock(&s->mutex);
    return r;
}

/* Mark with the GPU made current. */
static int mark_entered_locked(const struct sn_cuda *cuda, struct sn_cuda_stream *s)
{
    int mode, r = sn_cuda_enter(cuda, s->dev, &mode);

    if (r)
        return r;
    r = mark_locked(cuda, s);
    sn_cuda_leave(cuda, mode);
    return r;
}

int sn_cuda_stream_store(const struct sn_cuda *cuda, struct sn_cuda_stream *s, sn_cu_ptr dst, uint64_t value,
                         unsigned bytes, uint64_t *mark)
{
    int r = 0;

    pthread_mutex_lock(&s->mutex);
    if (s->count == OPS_MOST)
        r = mark_entered_locked(cuda, s);
    if (!r && no_memops(s))
        r = SN_CUDA_STREAM_BUSY;
    if (!r) {
        s->ops[s->count++] = store_op(dst, value, bytes);
        *mark = s->given + 1;
    }
    pthread_mutex_unlock(&s->mutex);
    return r;
}

void sn_cuda_stream_flush(const struct sn_cuda *cuda, struct sn_cuda_stream *s)
{
    pthread_mutex_lock(&s->mutex);
    if (s->count)
        mark_entered_locked(cuda, s);
    pthread_mutex_unlock(&s->mutex);
}

/* A GPU that has failed writes no more marks. */
static int check_locked(const struct sn_cuda *cuda, struct sn_cuda_stream *s)
{
    int r = cuda->stream_query(s->stream);

    s->check_at = sn_now_ns() + CHECK_NS;
    if (r == SN_CU_NOT_READY)
        return SN_CUDA_STREAM_BUSY;
    if (r != SN_CU_OK)
        return sn_cuda_failed(cuda, "cuStreamQuery", r);
    if (passed(s) >= s->given)
        return 0;
    sn_log("a stream of GPU %d has come to its end, but its mark is %llu instead of %llu", s->dev->ordinal,
           (unsigned long long)passed(s), (unsigned long long)s->given);
    return -EIO;
}

/* Do what has to be done before it can be known. */
static int ask_locked(const struct sn_cuda *cuda, struct sn_cuda_stream *s, uint64_t mark)
{
    bool late = s->given >= mark && !s->events && sn_now_ns() > s->check_at;
    int mode, r;

    if (s->given >= mark && !s->events && !late)
        return 0;
    r = sn_cuda_enter(cuda, s->dev, &mode);
    if (r)
        return r;
    if (s->given < mark)
        r = mark_locked(cuda, s);
    if (r >= 0 && s->events)
        r = events_look_locked(cuda, s);
    if (late)
        r = check_locked(cuda, s);
    sn_cuda_leave(cuda, mode);
    return r;
}

int sn_cuda_stream_landed(const struct sn_cuda *cuda, struct sn_cuda_stream *s, uint64_t mark, bool ask)
{
    int r = 0;

    /* Whoever holds the mutex is giving the stream more, or asks as well. */
    if (passed(s) < mark && ask && pthread_mutex_trylock(&s->mutex) == 0) {
        r = ask_locked(cuda, s, mark);
        pthread_mutex_unlock(&s->mutex);
    }
    if (r < 0)
        return r;
    if (passed(s) < mark)
        return SN_CUDA_STREAM_BUSY;
    return __atomic_load_n(&s->lost, __ATOMIC_ACQUIRE) == mark ? -EIO : 0;
}

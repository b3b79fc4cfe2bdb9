/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/memory/cuda_stream.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>

#include "tools/softnic/world/lock.h"
#include "tools/softnic/world/world.h"

enum {
    EVENTS_MOST = 64,
    STALL_S = 4, /* no copy takes longer by itself */
};
#define LOOK_NS 1000000000ull

struct sn_cuda_stream {
    pthread_mutex_t mutex; /* protects all below; passed, given and calls are read without it */
    struct sn_cuda_dev *dev;
    void *stream;
    uint64_t passed; /* the last mark that the stream has reached */
    uint64_t given;  /* the last mark that was recorded in it */
    unsigned first_event, events;
    struct {
        uint64_t mark;
        void *event;
    } ring[EVENTS_MOST]; /* marks recorded but not known to be reached */
    uint64_t calls;      /* calls of the driver, begun and ended: odd during a call */
    /* under watch_mutex: */
    struct sn_cuda_stream *older;
    uint64_t seen_calls, seen_given, seen_passed; /* at the last look */
    unsigned looks;                               /* how many looks in a row found that nothing moved */
};

static pthread_mutex_t watch_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct sn_cuda_stream *newest; /* the newest of all streams, which are never freed */
static uint64_t next_look;
static bool told;

int sn_cuda_streams_open(const struct sn_cuda *cuda, struct sn_cuda_dev *dev)
{
    struct sn_cuda_stream *all = calloc(SN_CUDA_STREAMS, sizeof(*all));

    if (!all)
        return -ENOMEM;
    for (int i = 0; i < SN_CUDA_STREAMS; i++) {
        struct sn_cuda_stream *s = &all[i];
        int r;

        pthread_mutex_init(&s->mutex, NULL);
        s->dev = dev;
        r = cuda->stream_create(&s->stream, SN_CU_STREAM_NON_BLOCKING);
        if (r != SN_CU_OK) /* the streams made so far stay, unused: destroying them could wait for kernels */
            return sn_cuda_failed(cuda, "cuStreamCreate", r);
        dev->streams[i] = s;
        pthread_mutex_lock(&watch_mutex);
        s->older = newest;
        newest = s;
        pthread_mutex_unlock(&watch_mutex);
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

/* [stream-mark] acquire; pairs with the release in look_at_events_locked: what was copied to host memory is visible. */
static uint64_t passed(const struct sn_cuda_stream *s)
{
    return __atomic_load_n(&s->passed, __ATOMIC_ACQUIRE);
}

/* Called before and after the driver is called with the mutex held. */
static void count_call_locked(struct sn_cuda_stream *s)
{
    __atomic_store_n(&s->calls, s->calls + 1, __ATOMIC_RELAXED);
}

/* Look at the recorded marks, oldest first. The GPU is current. */
static int look_at_events_locked(const struct sn_cuda *cuda, struct sn_cuda_stream *s)
{
    while (s->events) {
        unsigned at = s->first_event % EVENTS_MOST;
        int r = cuda->event_query(s->ring[at].event);

        if (r == SN_CU_NOT_READY)
            return SN_CUDA_STREAM_BUSY;
        if (r != SN_CU_OK)
            return sn_cuda_failed(cuda, "cuEventQuery", r);
        /* [stream-mark] release; pairs with passed(). */
        __atomic_store_n(&s->passed, s->ring[at].mark, __ATOMIC_RELEASE);
        sn_cuda_event_give(s->dev, s->ring[at].event);
        s->first_event++;
        s->events--;
    }
    return 0;
}

/* The GPU is current. Return 0, SN_CUDA_STREAM_BUSY (later), or -EIO. */
static int record_mark_locked(const struct sn_cuda *cuda, struct sn_cuda_stream *s)
{
    void *event;
    int r;

    if (s->events == EVENTS_MOST && look_at_events_locked(cuda, s) < 0)
        return -EIO;
    if (s->events == EVENTS_MOST)
        return SN_CUDA_STREAM_BUSY;
    event = sn_cuda_event_take(cuda, s->dev);
    if (!event)
        return -EIO;
    r = cuda->event_record(event, s->stream);
    if (r != SN_CU_OK) {
        sn_cuda_event_give(s->dev, event);
        return sn_cuda_failed(cuda, "cuEventRecord", r);
    }
    __atomic_store_n(&s->given, s->given + 1, __ATOMIC_RELAXED);
    s->ring[(s->first_event + s->events) % EVENTS_MOST].mark = s->given;
    s->ring[(s->first_event + s->events++) % EVENTS_MOST].event = event;
    return 0;
}

static void begin_call(struct sn_cuda_stream *s)
{
    pthread_mutex_lock(&s->mutex);
    count_call_locked(s);
}

/* Return 0 or -EIO (logged). */
static int end_call(const struct sn_cuda *cuda, struct sn_cuda_stream *s, const char *call, int r, uint64_t *mark)
{
    count_call_locked(s);
    if (r == SN_CU_OK)
        *mark = s->given + 1;
    pthread_mutex_unlock(&s->mutex);
    return r == SN_CU_OK ? 0 : sn_cuda_failed(cuda, call, r);
}

int sn_cuda_stream_copy(const struct sn_cuda *cuda, struct sn_cuda_stream *s, sn_cu_ptr dst, sn_cu_ptr src,
                        uint64_t bytes, uint64_t *mark)
{
    begin_call(s);
    return end_call(cuda, s, "cuMemcpyAsync", cuda->copy(dst, src, bytes, s->stream), mark);
}

/* Return a result of the driver; SN_CU_NOT_SUPPORTED: nothing was done. */
static int copy_batch_locked(const struct sn_cuda *cuda, struct sn_cuda_stream *s, sn_cu_ptr *dst, sn_cu_ptr *src,
                             size_t *bytes, size_t count)
{
    static bool refused; /* the driver refuses it */
    struct sn_cu_copy_attributes attributes = {.order = SN_CU_COPY_STREAM_ORDER};
    size_t first = 0;
    int r;

    if (count < 2 || !cuda->copy_batch || __atomic_load_n(&refused, __ATOMIC_RELAXED))
        return SN_CU_NOT_SUPPORTED;
    r = cuda->copy_batch(dst, src, bytes, count, &attributes, &first, 1, s->stream);
    if (r == SN_CU_OK)
        return r;
    sn_cuda_failed(cuda, "cuMemcpyBatchAsync", r);
    if (!__atomic_exchange_n(&refused, true, __ATOMIC_RELAXED))
        sn_log("each copy of device memory is a call of the driver from here on");
    return SN_CU_NOT_SUPPORTED;
}

int sn_cuda_stream_copies(const struct sn_cuda *cuda, struct sn_cuda_stream *s, sn_cu_ptr *dst, sn_cu_ptr *src,
                          size_t *bytes, size_t count, uint64_t *mark)
{
    int r;

    begin_call(s);
    r = copy_batch_locked(cuda, s, dst, src, bytes, count);
    if (r == SN_CU_NOT_SUPPORTED) {
        r = SN_CU_OK;
        for (size_t i = 0; i < count && r == SN_CU_OK; i++)
            r = cuda->copy(dst[i], src[i], bytes[i], s->stream);
    }
    return end_call(cuda, s, "cuMemcpyAsync", r, mark);
}

int sn_cuda_stream_write(const struct sn_cuda *cuda, struct sn_cuda_stream *s, const sn_cu_ptr *to,
                         const uint64_t *values, unsigned count, uint64_t *mark)
{
    struct sn_cu_mem_op ops[SN_CUDA_STREAM_WORDS] = {0};

    for (unsigned i = 0; i < count; i++)
        ops[i] = (struct sn_cu_mem_op){.operation = SN_CU_WRITE_WORD, .addr = to[i], .value = values[i]};
    begin_call(s);
    return end_call(cuda, s, "cuStreamBatchMemOp", cuda->mem_ops(s->stream, count, ops, 0), mark);
}

/* Record the mark if that was not done yet, and look. */
static int ask_locked(const struct sn_cuda *cuda, struct sn_cuda_stream *s, uint64_t mark)
{
    int mode, r;

    if (passed(s) >= mark)
        return 0;
    r = sn_cuda_enter(cuda, s->dev, &mode);
    if (r)
        return r;
    if (s->given < mark)
        r = record_mark_locked(cuda, s);
    if (r >= 0)
        r = look_at_events_locked(cuda, s);
    sn_cuda_leave(cuda, mode);
    return r;
}

int sn_cuda_stream_done(const struct sn_cuda *cuda, struct sn_cuda_stream *s, uint64_t mark, bool ask)
{
    int r = 0;

    /* If another thread holds the mutex, it is adding a copy, or asking as well. */
    if (passed(s) < mark && ask && pthread_mutex_trylock(&s->mutex) == 0) {
        count_call_locked(s);
        r = ask_locked(cuda, s, mark);
        count_call_locked(s);
        pthread_mutex_unlock(&s->mutex);
    }
    if (r < 0)
        return r;
    return passed(s) < mark ? SN_CUDA_STREAM_BUSY : 0;
}

/* Has one call not returned, or one mark not been reached though calls asked for it, at STALL_S looks in a row? */
static bool look_locked(struct sn_cuda_stream *s)
{
    uint64_t calls = __atomic_load_n(&s->calls, __ATOMIC_RELAXED), reached = passed(s);
    bool behind = s->seen_given != reached && s->seen_passed == reached;

    s->looks = (calls == s->seen_calls ? calls % 2 : behind) ? s->looks + 1 : 0;
    s->seen_calls = calls;
    s->seen_given = __atomic_load_n(&s->given, __ATOMIC_RELAXED);
    s->seen_passed = reached;
    return s->looks >= STALL_S;
}

void sn_cuda_streams_watch(uint64_t now)
{
    bool stalls = false;

    if (now < __atomic_load_n(&next_look, __ATOMIC_RELAXED) || pthread_mutex_trylock(&watch_mutex) != 0)
        return;
    /* Looks are counted, not seconds: a process that was stopped for longer has not waited. */
    if (now >= next_look) {
        __atomic_store_n(&next_look, now + LOOK_NS, __ATOMIC_RELAXED);
        for (struct sn_cuda_stream *s = newest; s && !told; s = s->older)
            stalls |= look_locked(s);
    }
    told |= stalls;
    pthread_mutex_unlock(&watch_mutex);
    if (stalls)
        sn_log(
            "pid %u: a copy of GPU memory has waited in the CUDA driver for %d s, perhaps for a lock (was the program "
            "started with --plain-cuda, or without softnic-run?) or behind a kernel. If that waits for this NIC, "
            "neither ends. softnic-run --copier copies GPU memory in a process of its own",
            sn_pid, STALL_S);
}

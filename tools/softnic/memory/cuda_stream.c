/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/memory/cuda_stream.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>

#include "tools/softnic/world/world.h"

enum { EVENTS_MOST = 64 };

struct sn_cuda_stream {
    pthread_mutex_t mutex; /* protects all below; passed is read without it */
    struct sn_cuda_dev *dev;
    void *stream;
    uint64_t passed; /* the last mark that the stream has reached */
    uint64_t given;  /* the last mark that was recorded in it */
    unsigned first_event, events;
    struct {
        uint64_t mark;
        void *event;
    } ring[EVENTS_MOST]; /* marks recorded but not known to be reached */
};

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
    s->ring[(s->first_event + s->events) % EVENTS_MOST].mark = ++s->given;
    s->ring[(s->first_event + s->events++) % EVENTS_MOST].event = event;
    return 0;
}

int sn_cuda_stream_copy(const struct sn_cuda *cuda, struct sn_cuda_stream *s, sn_cu_ptr dst, sn_cu_ptr src,
                        uint64_t bytes, uint64_t *mark)
{
    int r;

    pthread_mutex_lock(&s->mutex);
    r = cuda->copy(dst, src, bytes, s->stream);
    if (r == SN_CU_OK)
        *mark = s->given + 1;
    pthread_mutex_unlock(&s->mutex);
    return r == SN_CU_OK ? 0 : sn_cuda_failed(cuda, "cuMemcpyAsync", r);
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
        r = ask_locked(cuda, s, mark);
        pthread_mutex_unlock(&s->mutex);
    }
    if (r < 0)
        return r;
    return passed(s) < mark ? SN_CUDA_STREAM_BUSY : 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Copies: asynchronous ones on a thread of their stream, and synchronous ones. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tools/fake_cuda/busy.h"
#include "tools/fake_cuda/state.h"

enum { QUEUE = 1024, MEM_OPS_MOST = 256 };

struct copy {
    uint8_t *dst, *src; /* src NULL: the bytes are those of value */
    size_t bytes;
    uint64_t value;
};

struct stream {
    pthread_mutex_t mutex;
    pthread_cond_t more;
    int dev;
    uint64_t given, done;
    struct copy queue[QUEUE];
};

struct event {
    struct stream *stream;
    uint64_t at;
};

/* A copy engine's access. ThreadSanitizer must not take it for a thread's: programs order their accesses against it by
 * means that ThreadSanitizer cannot see (another process, an event). */
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
        usleep(20); /* long enough to catch a reader that does not wait */
        fake_wait_paused();
        engine_copy(copy.dst, copy.src ? copy.src : (const uint8_t *)&copy.value, copy.bytes);
        pthread_mutex_lock(&s->mutex);
        __atomic_store_n(&s->done, s->done + 1, __ATOMIC_RELEASE); /* pairs with the acquire in cuEventQuery() */
    }
    return NULL;
}

int cuStreamCreate(void **stream, unsigned flags)
{
    fake_wait_idle(__func__);
    pthread_t thread;
    if (fake_current() < 0)
        return INVALID_CONTEXT;
    if (flags != 1) /* a blocking stream would wait for the application's default stream */
        return INVALID_VALUE;
    struct stream *s = calloc(1, sizeof(*s));
    if (!s)
        return OUT_OF_MEMORY;
    pthread_mutex_init(&s->mutex, NULL);
    pthread_cond_init(&s->more, NULL);
    s->dev = fake_current();
    if (pthread_create(&thread, NULL, run_stream, s))
        return OUT_OF_MEMORY;
    pthread_detach(thread);
    *stream = s;
    return OK;
}

static void give(struct stream *s, struct copy copy)
{
    pthread_mutex_lock(&s->mutex);
    while (s->given - s->done == QUEUE) {
        pthread_mutex_unlock(&s->mutex);
        usleep(100);
        pthread_mutex_lock(&s->mutex);
    }
    s->queue[s->given++ % QUEUE] = copy;
    pthread_cond_signal(&s->more);
    pthread_mutex_unlock(&s->mutex);
}

int cuStreamQuery(void *stream)
{
    struct stream *s = stream;
    int r = fake_failure(__func__);
    if (r)
        return r;
    pthread_mutex_lock(&s->mutex);
    bool idle = s->given == s->done;
    pthread_mutex_unlock(&s->mutex);
    return idle ? OK : NOT_READY;
}

static int give_copy(struct stream *s, uint64_t dst, uint64_t src, size_t bytes)
{
    if (fake_current() < 0)
        return INVALID_CONTEXT;
    if (!s || (bytes && !fake_reaches(fake_current(), dst, src)))
        return INVALID_VALUE;
    while (bytes) {
        size_t n = bytes;
        uint8_t *to = fake_view(dst, &n), *from = fake_view(src, &n);
        if (!to || !from)
            return INVALID_VALUE;
        give(s, (struct copy){.dst = to, .src = from, .bytes = n});
        dst += n;
        src += n;
        bytes -= n;
    }
    return OK;
}

int cuMemcpyAsync(uint64_t dst, uint64_t src, size_t bytes, void *stream)
{
    int r = fake_failure(__func__);
    fake_wait_lock(__func__);
    return r ? r : give_copy(stream, dst, src, bytes);
}

/* The copies may be made in any order: the last one is the first. */
int cuMemcpyBatchAsync_v2(uint64_t *dst, uint64_t *src, size_t *bytes, size_t count,
                          const struct fake_copy_attributes *attributes, const size_t *first_copies,
                          size_t attribute_count, void *stream)
{
    int r = fake_failure(__func__);
    fake_wait_lock(__func__);
    if (!r && (count == 0 || attribute_count != 1 || first_copies[0] || attributes->order != 1 || attributes->flags))
        r = INVALID_VALUE;
    for (size_t i = count; i-- > 0 && !r;)
        r = give_copy(stream, dst[i], src[i], bytes[i]);
    return r;
}

/* The only operation supported is a write of 64 bits, without flags, into memory that is mapped for the stream's
 * device. */
int cuStreamBatchMemOp_v2(void *stream, unsigned count, const struct fake_mem_op *ops, unsigned flags)
{
    struct stream *s = stream;
    int r = fake_failure(__func__);
    fake_wait_lock(__func__);
    if (r)
        return r;
    if (fake_current() < 0)
        return INVALID_CONTEXT;
    if (!s || count == 0 || count > MEM_OPS_MOST || flags)
        return INVALID_VALUE;
    for (unsigned i = 0; i < count; i++)
        if (ops[i].operation != 5 || ops[i].flags || ops[i].addr % 8 || !fake_maps(s->dev, ops[i].addr)) {
            fprintf(stderr, "fake CUDA: device %d cannot write a word at 0x%llx\n", s->dev,
                    (unsigned long long)ops[i].addr);
            return INVALID_VALUE;
        }
    for (unsigned i = 0; i < count; i++) {
        size_t bytes = 8;
        give(s, (struct copy){.dst = fake_view(ops[i].addr, &bytes), .bytes = bytes, .value = ops[i].value});
    }
    return OK;
}

int cuEventCreate(void **event, unsigned flags)
{
    *event = calloc(1, sizeof(struct event));
    return fake_current() < 0 ? INVALID_CONTEXT : OK;
}

int cuEventRecord(void *event, void *stream)
{
    struct event *e = event;
    int r = fake_failure(__func__);
    if (r)
        return r;
    e->stream = stream;
    pthread_mutex_lock(&e->stream->mutex);
    e->at = e->stream->given;
    pthread_mutex_unlock(&e->stream->mutex);
    return OK;
}

int cuEventQuery(void *event)
{
    struct event *e = event;
    int r = fake_failure(__func__);
    if (r)
        return r;
    return !e->stream || __atomic_load_n(&e->stream->done, __ATOMIC_ACQUIRE) >= e->at ? OK : NOT_READY;
}

/* Synchronous copies take host memory of any kind: memory unknown to the driver is the program's own. */
static uint8_t *reach(uint64_t va, size_t *n)
{
    uint8_t *p = fake_view(va, n);
    if (p)
        return p;
    pthread_mutex_lock(&fake_mutex);
    bool known = fake_find(va) || fake_find_reserved(va);
    pthread_mutex_unlock(&fake_mutex);
    return known ? NULL : (uint8_t *)(uintptr_t)va;
}

int cuMemcpy(uint64_t dst, uint64_t src, size_t bytes)
{
    int r = fake_failure(__func__);
    if (r)
        return r;
    if (fake_current() < 0)
        return INVALID_CONTEXT;
    size_t all = bytes;
    if (!fake_view(dst, &all) || !fake_view(src, &all))
        fake_wait_idle_locked(__func__); /* pageable memory, on the default stream, which waits for the kernel */
    for (size_t done = 0, n; done < bytes; done += n) {
        n = bytes - done;
        uint8_t *to = reach(dst + done, &n), *from = reach(src + done, &n);
        if (!to || !from)
            return INVALID_VALUE;
        engine_copy(to, from, n);
    }
    return OK;
}

int cuMemcpyHtoD_v2(uint64_t dst, const void *src, size_t bytes)
{
    size_t n = bytes;
    return bytes && !fake_view(dst, &n) ? INVALID_VALUE : cuMemcpy(dst, (uintptr_t)src, bytes);
}

int cuMemcpyDtoH_v2(void *dst, uint64_t src, size_t bytes)
{
    size_t n = bytes;
    return bytes && !fake_view(src, &n) ? INVALID_VALUE : cuMemcpy((uintptr_t)dst, src, bytes);
}

int cuMemsetD8_v2(uint64_t va, unsigned char value, size_t bytes)
{
    uint8_t line[4096];
    if (fake_current() < 0)
        return INVALID_CONTEXT;
    memset(line, value, sizeof(line));
    for (size_t done = 0, n; done < bytes; done += n) {
        n = bytes - done < sizeof(line) ? bytes - done : sizeof(line);
        uint8_t *to = fake_view(va + done, &n);
        if (!to)
            return INVALID_VALUE;
        engine_copy(to, line, n);
    }
    return OK;
}

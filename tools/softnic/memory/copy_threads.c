/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/memory/copy_threads.h"

#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#include "tools/softnic/memory/host_copy.h"
#include "tools/softnic/world/cores.h"
#include "tools/softnic/world/lock.h"
#include "transport/util/thread.h"

enum {
    /* Four cores copy about as fast as PCIe takes; a quarter of the cores leaves the application the rest. */
    THREADS_MOST = 4,
    CORES_PER_THREAD = 4,
    /* bytes of a slice of a split copy; less than SN_SPLIT_LEAST, so that a slice is not split again */
    SLICE = 64 << 10,
    TAIL = 4096,        /* bytes at the end of a split copy, which are copied last */
    LINGER_NS = 100000, /* the next piece of a long transfer comes sooner than a sleeper wakes up */
};

/* A copy that threads take slices of. It lies on the stack of the calling thread, which returns when no helper is
 * left. */
struct split {
    struct split *next;
    const struct sn_host_copy *copy;
    uint64_t bytes;   /* without the tail */
    uint64_t taken;   /* bytes handed out */
    uint32_t helpers; /* threads at work on it, besides the caller */
    int32_t error;    /* error of one slice */
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* protects all below, and share.next */
static pthread_cond_t more = PTHREAD_COND_INITIALIZER;
static struct sn_host_copy *first, **last = &first;
static struct split *splits;
static int threads, sleepers;
static bool started;
static uint32_t calls; /* counts calls for help; lingering threads read it without the lock */

int sn_host_copy_now(struct sn_host_copy *copy)
{
    struct sn_copy spans; /* large, so only members that a host copy of one span reads are filled in */

    spans.world = copy->world;
    spans.self = copy->self;
    spans.dst_proc = copy->dst_proc;
    spans.src_proc = copy->src_proc;
    spans.dst_count = spans.src_count = 1;
    spans.length = copy->bytes;
    spans.dst[0] = (struct sn_span){.addr = copy->dst, .length = copy->bytes, .mr = SN_NONE, .kind = SN_MEM_HOST};
    spans.src[0] = (struct sn_span){.addr = copy->src, .length = copy->bytes, .mr = SN_NONE, .kind = SN_MEM_HOST};
    return sn_host_copy_spans(&spans);
}

static void copy_first_locked(void)
{
    struct sn_host_copy *copy = first;

    first = copy->next;
    if (!first)
        last = &first;
    pthread_mutex_unlock(&mutex);
    int result = sn_host_copy_now(copy);
    /* [copy-result] release; pairs with sn_host_copy_result. The caller may reuse *copy from here on. */
    __atomic_store_n(&copy->result, result, __ATOMIC_RELEASE);
    pthread_mutex_lock(&mutex);
}

static int copy_part(const struct sn_host_copy *whole, uint64_t at, uint64_t bytes)
{
    struct sn_host_copy part = *whole;

    part.dst += at;
    part.src += at;
    part.bytes = bytes;
    return sn_host_copy_now(&part);
}

/* Take slices until none is left. */
static void split_take(struct split *s)
{
    for (;;) {
        uint64_t at = __atomic_fetch_add(&s->taken, SLICE, __ATOMIC_RELAXED);
        int r;

        if (at >= s->bytes)
            return;
        r = copy_part(s->copy, at, s->bytes - at < SLICE ? s->bytes - at : SLICE);
        if (r < 0)
            __atomic_store_n(&s->error, r, __ATOMIC_RELAXED);
    }
}

static struct split *split_find_locked(void)
{
    struct split *s = splits;

    while (s && __atomic_load_n(&s->taken, __ATOMIC_RELAXED) >= s->bytes)
        s = s->next;
    return s;
}

static void split_help_locked(struct split *s)
{
    __atomic_fetch_add(&s->helpers, 1, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&mutex);
    split_take(s);
    /* [split-helpers] release; pairs with sn_host_copy_split. From here on only the caller touches the split copy. */
    __atomic_fetch_sub(&s->helpers, 1, __ATOMIC_RELEASE);
    pthread_mutex_lock(&mutex);
}

/* Wait for work: linger awake for a while where cores are many, then sleep. */
static void rest_locked(void)
{
    uint32_t seen = calls;

    if (!sn_cores_are_few()) {
        pthread_mutex_unlock(&mutex);
        for (uint64_t until = sn_now_ns() + LINGER_NS;
             __atomic_load_n(&calls, __ATOMIC_RELAXED) == seen && sn_now_ns() < until;)
            sn_cpu_relax();
        pthread_mutex_lock(&mutex);
    }
    if (calls != seen)
        return;
    sleepers++;
    pthread_cond_wait(&more, &mutex); /* without a limit: there is nothing to do until work arrives */
    sleepers--;
}

static void *work(void *unused)
{
    pthread_mutex_lock(&mutex);
    for (;;) {
        struct split *split = first ? NULL : split_find_locked();

        if (first)
            copy_first_locked();
        else if (split)
            split_help_locked(split);
        else
            rest_locked();
    }
    return unused;
}

/* Wake up to `hands` threads. */
static void call_locked(int hands)
{
    __atomic_store_n(&calls, calls + 1, __ATOMIC_RELAXED);
    for (int i = 0; i < hands && i < sleepers; i++)
        pthread_cond_signal(&more);
}

/* The threads never end, so the library must stay loaded even if the program closes it. */
static bool stay_loaded(void)
{
    Dl_info self;
    return dladdr((void *)(uintptr_t)&work, &self) && dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE);
}

static void start_threads_locked(void)
{
    int want = (int)sn_cores() / CORES_PER_THREAD;

    want = want < 1 ? 1 : want > THREADS_MOST ? THREADS_MOST : want;
    started = true;
    if (!stay_loaded())
        return;
    for (pthread_t thread; threads < want; threads++) {
        if (prs_thread_start(&thread, "softnic-move", work, NULL))
            break;
        pthread_detach(thread);
    }
}

/* A forked child has none of the threads; queued copies were its parent's. */
static void child_forget(void)
{
    pthread_mutex_init(&mutex, NULL);
    pthread_cond_init(&more, NULL);
    first = NULL;
    last = &first;
    splits = NULL;
    threads = sleepers = 0;
    started = false;
}

static __attribute__((constructor)) void copy_threads_init(void)
{
    pthread_atfork(NULL, NULL, child_forget);
}

void sn_host_copy_start(struct sn_host_copy *copy)
{
    pthread_mutex_lock(&mutex);
    if (!started)
        start_threads_locked();
    if (!threads) {
        pthread_mutex_unlock(&mutex);
        copy->result = sn_host_copy_now(copy);
        return;
    }
    copy->result = SN_HOST_COPY_BUSY;
    copy->next = NULL;
    *last = copy;
    last = &copy->next;
    call_locked(1);
    pthread_mutex_unlock(&mutex);
}

bool sn_host_copy_can_split(void)
{
    return !sn_cores_are_few();
}

static void split_remove_locked(struct split *split)
{
    struct split **at = &splits;

    while (*at != split)
        at = &(*at)->next;
    *at = split->next;
}

int sn_host_copy_split(const struct sn_host_copy *copy)
{
    struct split split = {.copy = copy, .bytes = copy->bytes - TAIL};

    pthread_mutex_lock(&mutex);
    if (!started)
        start_threads_locked();
    split.next = splits;
    splits = &split;
    call_locked((int)(split.bytes / SLICE));
    pthread_mutex_unlock(&mutex);
    split_take(&split);
    pthread_mutex_lock(&mutex);
    split_remove_locked(&split);
    pthread_mutex_unlock(&mutex);
    /* [split-helpers] acquire; pairs with split_help_locked. Each helper has at most one slice left, which nothing
     * holds up. */
    while (__atomic_load_n(&split.helpers, __ATOMIC_ACQUIRE))
        sn_cpu_relax();
    return split.error ? split.error : copy_part(copy, split.bytes, TAIL);
}

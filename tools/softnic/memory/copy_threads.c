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
    SLICE = 64 << 10,   /* of a shared copy: less than SN_SHARE_LEAST, so that a slice is not shared again */
    TAIL = 4096,        /* of a shared copy: what goes last */
    LINGER_NS = 100000, /* the next piece of a stream of them comes sooner than a sleeper wakes up */
};

/* A copy that threads take slices of. On the stack of who asked for it, who leaves when no helper is left. */
struct share {
    struct share *next;
    const struct sn_move *move;
    uint64_t bytes;   /* without the tail */
    uint64_t taken;   /* bytes given away */
    uint32_t helpers; /* threads that are at it, beside who asked */
    int32_t error;    /* of one slice */
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* protects all below, and share.next */
static pthread_cond_t more = PTHREAD_COND_INITIALIZER;
static struct sn_move *first, **last = &first;
static struct share *shares;
static int threads, sleepers;
static bool started;
static uint32_t asked; /* how often work was given; read without the lock by who lingers */

int sn_move_now(struct sn_move *move)
{
    struct sn_copy copy; /* large: only what a host copy of one span reads is filled in */

    copy.world = move->world;
    copy.self = move->self;
    copy.dst_proc = move->dst_proc;
    copy.src_proc = move->src_proc;
    copy.dst_count = copy.src_count = 1;
    copy.length = move->bytes;
    copy.dst[0] = (struct sn_span){.addr = move->dst, .length = move->bytes, .mr = SN_NONE, .kind = SN_MEM_HOST};
    copy.src[0] = (struct sn_span){.addr = move->src, .length = move->bytes, .mr = SN_NONE, .kind = SN_MEM_HOST};
    return sn_host_copy_spans(&copy);
}

static void move_first_locked(void)
{
    struct sn_move *move = first;

    first = move->next;
    if (!first)
        last = &first;
    pthread_mutex_unlock(&mutex);
    int result = sn_move_now(move);
    /* M2: release; pairs with M1. The owner may reuse *move from here on. */
    __atomic_store_n(&move->result, result, __ATOMIC_RELEASE);
    pthread_mutex_lock(&mutex);
}

static int move_part(const struct sn_move *whole, uint64_t at, uint64_t bytes)
{
    struct sn_move part = *whole;

    part.dst += at;
    part.src += at;
    part.bytes = bytes;
    return sn_move_now(&part);
}

/* Take slices until none is left. */
static void share_take(struct share *s)
{
    for (;;) {
        uint64_t at = __atomic_fetch_add(&s->taken, SLICE, __ATOMIC_RELAXED);
        int r;

        if (at >= s->bytes)
            return;
        r = move_part(s->move, at, s->bytes - at < SLICE ? s->bytes - at : SLICE);
        if (r < 0)
            __atomic_store_n(&s->error, r, __ATOMIC_RELAXED);
    }
}

static struct share *share_find_locked(void)
{
    struct share *s = shares;

    while (s && __atomic_load_n(&s->taken, __ATOMIC_RELAXED) >= s->bytes)
        s = s->next;
    return s;
}

static void share_help_locked(struct share *s)
{
    __atomic_fetch_add(&s->helpers, 1, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&mutex);
    share_take(s);
    /* M3: release; pairs with M4. The share is its owner's from here on. */
    __atomic_fetch_sub(&s->helpers, 1, __ATOMIC_RELEASE);
    pthread_mutex_lock(&mutex);
}

/* Wait for work: awake for a while where cores are many, then asleep. */
static void rest_locked(void)
{
    uint32_t seen = asked;

    if (!sn_cores_are_few()) {
        pthread_mutex_unlock(&mutex);
        for (uint64_t until = sn_now_ns() + LINGER_NS;
             __atomic_load_n(&asked, __ATOMIC_RELAXED) == seen && sn_now_ns() < until;)
            sn_cpu_relax();
        pthread_mutex_lock(&mutex);
    }
    if (asked != seen)
        return;
    sleepers++;
    pthread_cond_wait(&more, &mutex); /* unbounded on purpose: there is nothing to do until somebody asks */
    sleepers--;
}

static void *work(void *unused)
{
    pthread_mutex_lock(&mutex);
    for (;;) {
        struct share *share = first ? NULL : share_find_locked();

        if (first)
            move_first_locked();
        else if (share)
            share_help_locked(share);
        else
            rest_locked();
    }
    return unused;
}

/* Tell the threads that there is work for so many. */
static void call_locked(int hands)
{
    __atomic_store_n(&asked, asked + 1, __ATOMIC_RELAXED);
    for (int i = 0; i < hands && i < sleepers; i++)
        pthread_cond_signal(&more);
}

/* The threads never end, so the library must stay even if the program closes it. */
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

/* A forked child has none of the threads; what was queued was its parent's. */
static void child_forget(void)
{
    pthread_mutex_init(&mutex, NULL);
    pthread_cond_init(&more, NULL);
    first = NULL;
    last = &first;
    shares = NULL;
    threads = sleepers = 0;
    started = false;
}

static __attribute__((constructor)) void mover_init(void)
{
    pthread_atfork(NULL, NULL, child_forget);
}

void sn_move_start(struct sn_move *move)
{
    pthread_mutex_lock(&mutex);
    if (!started)
        start_threads_locked();
    if (!threads) {
        pthread_mutex_unlock(&mutex);
        move->result = sn_move_now(move);
        return;
    }
    move->result = SN_MOVE_UNDER_WAY;
    move->next = NULL;
    *last = move;
    last = &move->next;
    call_locked(1);
    pthread_mutex_unlock(&mutex);
}

bool sn_move_shares(void)
{
    return !sn_cores_are_few();
}

static void share_remove_locked(struct share *share)
{
    struct share **at = &shares;

    while (*at != share)
        at = &(*at)->next;
    *at = share->next;
}

int sn_move_shared(const struct sn_move *move)
{
    struct share share = {.move = move, .bytes = move->bytes - TAIL};

    pthread_mutex_lock(&mutex);
    if (!started)
        start_threads_locked();
    share.next = shares;
    shares = &share;
    call_locked((int)(share.bytes / SLICE));
    pthread_mutex_unlock(&mutex);
    share_take(&share);
    pthread_mutex_lock(&mutex);
    share_remove_locked(&share);
    pthread_mutex_unlock(&mutex);
    /* M4: acquire; pairs with M3. What is left is a slice each, which no thread is kept from making. */
    while (__atomic_load_n(&share.helpers, __ATOMIC_ACQUIRE))
        sn_cpu_relax();
    return share.error ? share.error : move_part(move, share.bytes, TAIL);
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/mover.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <string.h>

/* Four cores copy about as fast as PCIe takes; a quarter of the cores leaves the application the rest. */
enum { THREADS_MOST = 4, CORES_PER_THREAD = 4 };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* protects all below */
static pthread_cond_t more = PTHREAD_COND_INITIALIZER;
static struct sn_move *first, **last = &first;
static int threads;
static bool started;

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
    return sn_place_start(&copy);
}

static void *work(void *unused)
{
    pthread_mutex_lock(&mutex);
    for (;;) {
        struct sn_move *move = first;
        if (!move) {
            pthread_cond_wait(&more, &mutex); /* unbounded on purpose: there is nothing to do until somebody asks */
            continue;
        }
        first = move->next;
        if (!first)
            last = &first;
        pthread_mutex_unlock(&mutex);
        int result = sn_move_now(move);
        /* M2: release; pairs with M1. The owner may reuse *move from here on. */
        __atomic_store_n(&move->result, result, __ATOMIC_RELEASE);
        pthread_mutex_lock(&mutex);
    }
    return unused;
}

/* The threads never end, so the library must stay even if the program closes it. */
static bool stay_loaded(void)
{
    Dl_info self;
    return dladdr((void *)(uintptr_t)&work, &self) && dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE);
}

static void start_threads_locked(void)
{
    cpu_set_t cores;
    sigset_t all, old;
    int want = 1;

    if (!sched_getaffinity(0, sizeof(cores), &cores))
        want = CPU_COUNT(&cores) / CORES_PER_THREAD;
    want = want < 1 ? 1 : want > THREADS_MOST ? THREADS_MOST : want;
    started = true;
    if (!stay_loaded())
        return;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old); /* the application's signals are for its own threads */
    for (pthread_t thread; threads < want; threads++) {
        if (pthread_create(&thread, NULL, work, NULL))
            break;
        pthread_setname_np(thread, "softnic-move");
        pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
}

/* A forked child has none of the threads; what was queued was its parent's. */
static void child_forget(void)
{
    pthread_mutex_init(&mutex, NULL);
    pthread_cond_init(&more, NULL);
    first = NULL;
    last = &first;
    threads = 0;
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
    pthread_cond_signal(&more);
    pthread_mutex_unlock(&mutex);
}

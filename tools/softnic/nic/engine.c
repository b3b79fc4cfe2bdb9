/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/nic/engine.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <time.h>

#include "tools/softnic/nic/queue_pair.h"
#include "tools/softnic/world/cores.h"
#include "tools/softnic/world/cores.h"
#include "tools/softnic/world/lock.h"
#include "transport/util/thread.h"

enum {
    /* The last stretch before a due time is spun, not slept. Its length follows how late this machine's timers were
     * lately, within these limits: 5 us on bare metal, 25 us and more in a virtual machine. */
    SPIN_LEAST_NS = 5000,
    SPIN_MOST_NS = 60000,
    SPIN_UP_NS = 1800, /* nine times SPIN_DOWN_NS: nine of ten timers end within the spin */
    SPIN_DOWN_NS = 200,
    NICE_BUSY = -10,
    /* See "Which thread does short due work" below. */
    PATIENCE_NS = 400000,
    IN_TIME_NS = 25000,
    WATCH_NS = 2000000,
    TRUST_MOST = 64,
    TRUST_PROVED = 16,
    PROBE_LEAST = 64,
    PROBE_MOST = 4096,
    LINGER_NS = 50000,   /* after a look at a device copy: the next look comes sooner than a sleeper would wake up */
    REAL_NAP_NS = 20000, /* a sleep of a microsecond would end before the thread is off its core */
    /* looks at the pipeline come every microsecond: this many of them count as one piece of work */
    LOOKS_A_PIECE = 64,
};

int sn_engine_init(struct sn_engine *engine, bool realtime)
{
    *engine = (struct sn_engine){.realtime = realtime,
                                 .next_at = UINT64_MAX,
                                 .spin_ns = SPIN_LEAST_NS,
                                 .trust = TRUST_MOST,
                                 .probe_every = PROBE_LEAST,
                                 .poster_cpu = -1};
    pthread_mutex_init(&engine->mutex, NULL);
    pthread_cond_init(&engine->cond, NULL);
    return 0;
}

static void heap_put(struct sn_engine *e, uint32_t at, struct sn_qp *qp)
{
    e->heap[at] = qp;
    qp->heap_at = at;
}

static void heap_up(struct sn_engine *e, uint32_t at, struct sn_qp *qp)
{
    while (at > 0 && e->heap[(at - 1) / 2]->wake_at > qp->wake_at) {
        heap_put(e, at, e->heap[(at - 1) / 2]);
        at = (at - 1) / 2;
    }
    heap_put(e, at, qp);
}

static void heap_down(struct sn_engine *e, uint32_t at, struct sn_qp *qp)
{
    for (;;) {
        uint32_t child = 2 * at + 1;

        if (child + 1 < e->count && e->heap[child + 1]->wake_at < e->heap[child]->wake_at)
            child++;
        if (child >= e->count || e->heap[child]->wake_at >= qp->wake_at)
            break;
        heap_put(e, at, e->heap[child]);
        at = child;
    }
    heap_put(e, at, qp);
}

static void publish_next_locked(struct sn_engine *e)
{
    __atomic_store_n(&e->next_at, e->count ? e->heap[0]->wake_at : UINT64_MAX, __ATOMIC_RELAXED);
}

static void heap_remove_locked(struct sn_engine *e, uint32_t at)
{
    struct sn_qp *last = e->heap[--e->count];

    e->heavy -= !e->heap[at]->light;
    if (at < e->count) {
        if (at > 0 && e->heap[(at - 1) / 2]->wake_at > last->wake_at)
            heap_up(e, at, last);
        else
            heap_down(e, at, last);
    }
    publish_next_locked(e);
}

/* Which thread does short due work. A thread that polls a completion queue does it in passing (sn_engine_help). While
 * pollers are in time, an engine that spins for the same work only takes a CPU, perhaps the poster's: on two cores 96
 * transfers of a modelled 0.43 ms then took 9 ms. So while pollers are trusted, the engine waits PATIENCE_NS after a
 * due time before it steps in. One such miss ends the trust: the program polls memory or sleeps, and the engine does
 * the work on time by itself. It still leaves one piece in probe_every to pollers, because a poster that a spinning
 * engine keeps off its CPU could not show that it polls again. */
static uint64_t patience(const struct sn_engine *e, const struct sn_qp *qp)
{
    return qp->light && (e->trust > 0 || e->taken >= e->probe_at) ? PATIENCE_NS : 0;
}

static void update_trust_locked(struct sn_engine *e, bool helper, bool watched, uint64_t late_ns)
{
    bool in_time = helper && late_ns <= IN_TIME_NS;

    e->taken++;
    if (e->trust > 0)
        e->trust = !helper ? 0 : in_time ? e->trust + (e->trust < TRUST_MOST) : e->trust - 1;
    else if (watched && in_time)
        e->trust = TRUST_PROVED;
    if (in_time)
        e->probe_every = PROBE_LEAST;
    else if (watched && !helper && e->probe_every < PROBE_MOST)
        e->probe_every *= 2;
    if (watched)
        e->probe_at = e->taken + e->probe_every;
}

/* What the engine does next, if anything. The earliest queue pair may be left to pollers. A later one that may not be
 * left to them must not wait for that. */
static struct sn_qp *next_locked(const struct sn_engine *e)
{
    struct sn_qp *next = e->count ? e->heap[0] : NULL;
    uint64_t until = next ? next->wake_at + patience(e, next) : 0;

    if (!next || until == next->wake_at || !e->heavy)
        return next;
    for (uint32_t i = 1; i < e->count; i++)
        if (!e->heap[i]->light && e->heap[i]->wake_at < until) {
            next = e->heap[i];
            until = next->wake_at;
        }
    return next;
}

/* Take the next queue pair off the heap if it is due for this caller; NULL if none is. */
static struct sn_qp *take_due_locked(struct sn_engine *e, uint64_t now, bool helper)
{
    struct sn_qp *qp = !helper ? next_locked(e) : e->count ? e->heap[0] : NULL;
    uint64_t wait;

    if (!qp)
        return NULL;
    wait = patience(e, qp);
    if (qp->wake_at + (helper ? 0 : wait) > now)
        return NULL;
    if (qp->light)
        update_trust_locked(e, helper, wait != 0, now - qp->wake_at);
    heap_remove_locked(e, qp->heap_at);
    qp->heap_at = UINT32_MAX;
    return qp;
}

/* How late did the timer wake this thread? */
static void spin_learn(struct sn_engine *e, uint64_t asked)
{
    if (sn_now_ns() > asked + e->spin_ns)
        e->spin_ns += e->spin_ns < SPIN_MOST_NS ? SPIN_UP_NS : 0;
    else
        e->spin_ns -= e->spin_ns > SPIN_LEAST_NS ? SPIN_DOWN_NS : 0;
}

/* Another thread or process is at work on a device copy: the memory's owner, a copy thread, or the driver. */
static bool copy_is_near(const struct sn_engine *e, uint64_t now)
{
    uint64_t at = __atomic_load_n(&e->copy_at, __ATOMIC_RELAXED);

    return at && now < at + LINGER_NS;
}

/* Spin until then, or until another queue pair is the earliest. The lock is released: posters would otherwise wait for
 * this thread to release it, 16 us for each request. give_way: the thread that makes a copy may need this core. */
static void spin_locked(struct sn_engine *e, uint64_t until, bool give_way)
{
    uint64_t at = e->next_at;

    pthread_mutex_unlock(&e->mutex);
    while (__atomic_load_n(&e->next_at, __ATOMIC_RELAXED) == at && sn_now_ns() < until)
        if (give_way)
            sn_give_way();
        else
            sn_cpu_relax();
    pthread_mutex_lock(&e->mutex);
}

/* How long the engine may sleep if this is the earliest queue pair. */
static uint64_t rest_end(const struct sn_engine *e, const struct sn_qp *qp)
{
    uint64_t wait = patience(e, qp);

    if (wait)
        return qp->wake_at + wait;
    /* In a burst each piece is due right after the previous one. Do not spin through it on the poster's CPU. */
    if (e->spun && sched_getcpu() == e->poster_cpu)
        return qp->wake_at;
    return qp->wake_at > e->spin_ns ? qp->wake_at - e->spin_ns : 0;
}

static void rest_locked(struct sn_engine *e, uint64_t now)
{
    const struct sn_qp *next = next_locked(e);
    bool idle = !next, watching = idle ? e->trust > 0 : patience(e, next) != 0;
    bool give_way = !e->realtime && copy_is_near(e, now);
    struct timespec until;

    if (!idle)
        e->rest_until = rest_end(e, next);
    else if (give_way)
        e->rest_until = now; /* linger, so that the next request of a ping-pong need not wake it */
    else                     /* look in now and then, so that the next post need not wake it, which costs 5 to 20 us */
        e->rest_until = watching && now < e->last_due + WATCH_NS ? now + PATIENCE_NS : UINT64_MAX;
    if (e->rest_until > now) {
        until = (struct timespec){(time_t)(e->rest_until / 1000000000ull), (long)(e->rest_until % 1000000000ull)};
        e->asleep = true;
        if (e->rest_until == UINT64_MAX)
            pthread_cond_wait(&e->cond, &e->mutex); /* until there is work or the device is closed */
        else if (pthread_cond_clockwait(&e->cond, &e->mutex, CLOCK_MONOTONIC, &until) == ETIMEDOUT && !watching &&
                 !e->spun)
            spin_learn(e, e->rest_until);
        e->asleep = e->spun = false;
        return;
    }
    e->spun = true;
    spin_locked(e, idle ? now + LINGER_NS : next->wake_at, give_way);
}

static void thread_prepare(struct sn_engine *e)
{
    struct sched_param param = {.sched_priority = 1};

    prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
    if (e->realtime && pthread_setschedparam(pthread_self(), SCHED_FIFO, &param) != 0)
        setpriority(PRIO_PROCESS, 0, NICE_BUSY); /* may fail as well: then the model is late on a busy machine */
}

/* A real-time thread that kept looking at a copy would keep the thread that makes it off the core, until the kernel
 * stops the real-time thread after 0.95 of every second. */
static void give_way_in_real_time(const struct sn_engine *e)
{
    struct timespec nap = {0, REAL_NAP_NS};

    if (e->realtime && sn_cores_are_few() && copy_is_near(e, sn_now_ns()))
        nanosleep(&nap, NULL);
}

static void *engine_main(void *arg)
{
    struct sn_engine *e = arg;

    thread_prepare(e);
    pthread_mutex_lock(&e->mutex);
    while (!e->stop) {
        uint64_t now = sn_now_ns();
        struct sn_qp *qp = take_due_locked(e, now, false);

        if (!qp) {
            rest_locked(e, now);
            continue;
        }
        pthread_mutex_unlock(&e->mutex);
        sn_qp_run_taken(qp);
        give_way_in_real_time(e);
        pthread_mutex_lock(&e->mutex);
    }
    pthread_mutex_unlock(&e->mutex);
    return NULL;
}

/* The thread is made when first needed: many programs open devices only to look at them. */
static int start_locked(struct sn_engine *e)
{
    int r = prs_thread_start(&e->thread, "softnic-engine", engine_main, e);

    e->started = r == 0;
    return -r;
}

int sn_engine_push(struct sn_engine *e, struct sn_qp *qp, uint64_t wake_at)
{
    bool wake;
    int r = 0;

    pthread_mutex_lock(&e->mutex);
    if (e->count == e->room) {
        uint32_t room = e->room ? 2 * e->room : 64;
        struct sn_qp **heap = realloc(e->heap, room * sizeof(*heap));

        if (!heap) {
            r = -ENOMEM;
            goto unlock;
        }
        e->heap = heap;
        e->room = room;
    }
    if (!e->started)
        r = start_locked(e);
    if (r < 0)
        goto unlock;
    if (qp->in_pipeline && e->trust <= 0 && ++e->looks % LOOKS_A_PIECE)
        qp->light = false;
    qp->wake_at = wake_at;
    e->last_due = wake_at;
    if (!qp->light && sn_qp_copying(qp))
        __atomic_store_n(&e->copy_at, wake_at, __ATOMIC_RELAXED);
    if (!pthread_equal(pthread_self(), e->thread))
        e->poster_cpu = sched_getcpu();
    e->heavy += !qp->light;
    heap_up(e, e->count++, qp);
    publish_next_locked(e);
    wake = e->asleep && rest_end(e, qp) < e->rest_until;
    if (wake)
        e->rest_until = rest_end(e, qp); /* a thread that pushes before the engine runs need not wake it again */
    if (wake)
        pthread_cond_signal(&e->cond);
unlock:
    pthread_mutex_unlock(&e->mutex);
    return r;
}

bool sn_engine_remove(struct sn_engine *e, struct sn_qp *qp)
{
    bool found;

    pthread_mutex_lock(&e->mutex);
    found = qp->heap_at < e->count && e->heap[qp->heap_at] == qp;
    if (found) {
        heap_remove_locked(e, qp->heap_at);
        qp->heap_at = UINT32_MAX;
    }
    pthread_mutex_unlock(&e->mutex);
    return found;
}

static struct sn_qp *take_to_help(struct sn_engine *e)
{
    uint64_t next = __atomic_load_n(&e->next_at, __ATOMIC_RELAXED);
    struct sn_qp *qp;

    if (next == UINT64_MAX || (next != 0 && next > sn_now_ns()) || pthread_mutex_trylock(&e->mutex) != 0)
        return NULL;
    qp = take_due_locked(e, sn_now_ns(), true);
    pthread_mutex_unlock(&e->mutex);
    return qp;
}

void sn_engine_help(struct sn_engine *e)
{
    struct sn_qp *qp = take_to_help(e);

    if (qp)
        sn_qp_run_taken(qp);
    else if (__atomic_load_n(&e->copy_at, __ATOMIC_RELAXED) && copy_is_near(e, sn_now_ns()))
        /* with fewer cores than threads, the thread that makes the copy would wait for the end of this time slice, 4
         * ms */
        sn_give_way();
}

void sn_engine_fini(struct sn_engine *e)
{
    pthread_mutex_lock(&e->mutex);
    e->stop = true;
    pthread_cond_signal(&e->cond);
    pthread_mutex_unlock(&e->mutex);
    if (e->started)
        pthread_join(e->thread, NULL);
    free(e->heap);
    pthread_cond_destroy(&e->cond);
    pthread_mutex_destroy(&e->mutex);
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/agent.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "tools/softnic/lock.h"
#include "tools/softnic/object.h"
#include "tools/softnic/place.h"

enum {
    POLL_NS = 50000, /* after work: the next request of a ping-pong comes sooner than a sleeper would wake up */
    DRAIN_NS = 1000000000,
    WAIT_NAP_US = 20,
};

struct job {
    uint64_t request; /* the slot's word without the state; 0: none runs */
    struct sn_copy copy;
    bool is_atomic;
    struct sn_atomic atomic; /* on copy's target */
};

struct sn_agent {
    struct sn_agent_shm *shm;
    pthread_t thread;
    bool stop;
    unsigned running, next; /* next: slot to look at first, so that all get their turn */
    struct job jobs[SN_AGENT_SLOTS];
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* protects starting */

void sn_futex_wait(uint32_t *word, uint32_t value)
{
    struct timespec limit = {1, 0};
    syscall(SYS_futex, word, FUTEX_WAIT, value, &limit, NULL, 0);
}

void sn_futex_wake(uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* One side as the initiator described it. Memory of this process is looked up again: the key may be gone, and whatever
 * else the request says, nothing outside registered memory is touched. */
static bool spans_take(struct sn_span *to, const struct sn_agent_span *from, uint32_t count, bool own)
{
    for (uint32_t i = 0; i < count; i++) {
        const struct sn_mr_shm *mr = sn_mr_find(sn_self->world, from[i].key);

        to[i] = (struct sn_span){from[i].addr, from[i].length, mr ? from[i].key >> 16 : SN_NONE, from[i].kind};
        if (own && (!mr || __atomic_load_n(&mr->owner, __ATOMIC_RELAXED) != sn_self->proc + 1 ||
                    mr->kind != from[i].kind || from[i].addr < mr->addr || from[i].length > mr->length ||
                    from[i].addr - mr->addr > mr->length - from[i].length))
            return false;
        if (!own && from[i].kind != SN_MEM_HOST && !mr)
            return false;
    }
    return true;
}

static uint64_t spans_length(const struct sn_span *span, uint32_t count)
{
    uint64_t length = 0;

    for (uint32_t i = 0; i < count; i++)
        length += span[i].length;
    return length;
}

static bool request_take(struct sn_copy *c, const struct sn_agent_slot *slot)
{
    bool read = slot->op == SN_AGENT_READ;

    if (slot->dst_count > SN_MAX_SGE || slot->src_count > SN_MAX_SGE || slot->proc >= SN_MAX_PROCS ||
        sn_self->world->procs[slot->proc].generation != slot->proc_generation)
        return false;
    c->world = sn_self->world;
    c->self = sn_self->proc;
    c->dst_proc = read ? slot->proc : sn_self->proc;
    c->src_proc = read ? sn_self->proc : slot->proc;
    c->dst_count = slot->dst_count;
    c->src_count = slot->src_count;
    c->length = slot->length;
    return spans_take(c->dst, slot->dst, slot->dst_count, !read) &&
           spans_take(c->src, slot->src, slot->src_count, read) && spans_length(c->dst, c->dst_count) == c->length &&
           (slot->op > SN_AGENT_READ ? c->length == 8 && c->dst_count == 1
                                     : spans_length(c->src, c->src_count) == c->length);
}

static int job_start(struct job *job, struct sn_agent_slot *slot)
{
    struct sn_copy *c = &job->copy;

    job->is_atomic = slot->op == SN_AGENT_ADD || slot->op == SN_AGENT_SWAP;
    if (!request_take(c, slot)) {
        sn_log("a request of process %u for memory of this process was refused: its registration is gone", slot->proc);
        return -ENOENT;
    }
    if (!job->is_atomic)
        return sn_device_mem->copy_start(c); /* not sn_place_start: the other side's agent is the initiator's to ask */
    job->atomic.cas = slot->op == SN_AGENT_SWAP;
    job->atomic.compare_add = slot->compare_add;
    job->atomic.swap = slot->swap;
    job->atomic.found = &slot->found;
    sn_atomic_begin(&job->atomic, c);
    return sn_atomic_step(&job->atomic);
}

/* Atomics take steps as copies do, so that those of several queue pairs overlap: each is two copies, one after the
 * other. */
static int job_poll(struct job *job)
{
    return job->is_atomic ? sn_atomic_step(&job->atomic) : sn_device_mem->copy_poll(&job->copy);
}

static void job_end(struct sn_agent *a, unsigned i, int result)
{
    uint64_t request = a->jobs[i].request, *word = &a->shm->words[i];

    a->shm->slots[i].result = result;
    a->jobs[i].request = 0;
    a->running--;
    if (!sn_agent_turn(word, request, SN_AGENT_RUNNING, SN_AGENT_DONE))
        sn_agent_turn(word, request, SN_AGENT_LEFT, SN_AGENT_FREE);
}

/* Look at every slot once. Return true when something moved. */
static bool agent_round(struct sn_agent *a, bool take_new)
{
    bool moved = false;

    for (unsigned n = 0; n < SN_AGENT_SLOTS; n++) {
        unsigned i = (a->next + n) % SN_AGENT_SLOTS;
        struct job *job = &a->jobs[i];
        uint64_t word = __atomic_load_n(&a->shm->words[i], __ATOMIC_ACQUIRE);
        int r;

        if (job->request) {
            r = job_poll(job);
        } else if (take_new && sn_agent_state(word) == SN_AGENT_POSTED) {
            word &= ~(uint64_t)SN_AGENT_STATE_MASK;
            /* G1: running first, then the key is looked up; pairs with G2 in ibv_dereg_mr. */
            if (!sn_agent_turn(&a->shm->words[i], word, SN_AGENT_POSTED, SN_AGENT_RUNNING))
                continue;
            job->request = word;
            a->running++;
            moved = true;
            r = job_start(job, &a->shm->slots[i]);
        } else {
            continue;
        }
        if (r == SN_PLACE_BUSY)
            continue;
        job_end(a, i, r);
        moved = true;
    }
    a->next++;
    return moved;
}

static void agent_rest(struct sn_agent_shm *shm, uint32_t bell)
{
    /* B1: say so first, look at the bell second (the kernel does); pairs with B2 in sn_agent_stop and handoff.c, where
     * the bell comes first. */
    __atomic_store_n(&shm->asleep, 1, __ATOMIC_SEQ_CST);
    sn_futex_wait(&shm->bell, bell);
    __atomic_store_n(&shm->asleep, 0, __ATOMIC_RELAXED);
}

static void *agent_main(void *arg)
{
    struct sn_agent *a = arg;
    struct sn_agent_shm *shm = a->shm;
    uint64_t last = 0, drain_until = UINT64_MAX;

    prctl(PR_SET_NAME, "softnic-agent", 0, 0, 0);
    prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
    for (;;) {
        uint32_t bell = __atomic_load_n(&shm->bell, __ATOMIC_ACQUIRE);
        bool stop = __atomic_load_n(&a->stop, __ATOMIC_ACQUIRE);
        uint64_t now = sn_now_ns();

        if (stop && drain_until == UINT64_MAX)
            drain_until = now + DRAIN_NS;
        if (stop && (!a->running || now > drain_until))
            return NULL;
        __atomic_fetch_add(&shm->beat, 1, __ATOMIC_RELAXED);
        if (agent_round(a, !stop))
            last = sn_now_ns(); /* not now: a round may take longer than the patience after it */
        else if (a->running || now < last + POLL_NS)
            sn_give_way(); /* movers, the application or the initiator may need this core */
        else
            agent_rest(shm, bell);
    }
}

static int thread_start(struct sn_agent *a)
{
    sigset_t all, old;
    int r;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old); /* the program's handlers run on the program's threads */
    r = pthread_create(&a->thread, NULL, agent_main, a);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return -r;
}

int sn_agent_start(struct sn_ctx *ctx)
{
    struct sn_agent *a = NULL;
    int r = 0;

    pthread_mutex_lock(&mutex);
    if (ctx->agent)
        goto unlock;
    r = -ENOMEM;
    a = calloc(1, sizeof(*a));
    if (!a)
        goto unlock;
    a->shm = &sn_self->world->agents[ctx->index];
    /* As for rings: a full /dev/shm is an error here, not SIGBUS later. The table is page aligned, its entries are not.
     */
    uintptr_t page = (uintptr_t)a->shm & ~(uintptr_t)4095;
    if (madvise((void *)page, (uintptr_t)(a->shm + 1) - page, MADV_POPULATE_WRITE) < 0 &&
        (errno == EFAULT || errno == ENOMEM))
        goto free_agent;
    /* Words are left as they are: an initiator may still be about to give one back, by its number. */
    __atomic_store_n(&a->shm->epoch, (a->shm->epoch + 2) | 1, __ATOMIC_SEQ_CST);
    r = thread_start(a);
    if (!r) {
        ctx->agent = a;
        goto unlock;
    }
    __atomic_store_n(&a->shm->epoch, a->shm->epoch + 1, __ATOMIC_SEQ_CST);
free_agent:
    free(a);
unlock:
    pthread_mutex_unlock(&mutex);
    if (r)
        sn_log("registration of device memory: no agent for other processes' requests: %s (/dev/shm full, or too many "
               "threads?)",
               strerror(-r));
    return r;
}

void sn_agent_stop(struct sn_ctx *ctx)
{
    struct sn_agent *a = ctx->agent;

    if (!a)
        return;
    __atomic_store_n(&a->stop, true, __ATOMIC_RELEASE);
    /* B2: the bell first, the sleeper second; pairs with B1. */
    __atomic_fetch_add(&a->shm->bell, 1, __ATOMIC_SEQ_CST);
    sn_futex_wake(&a->shm->bell);
    pthread_join(a->thread, NULL);
    __atomic_store_n(&a->shm->epoch, a->shm->epoch + 1, __ATOMIC_SEQ_CST);
    if (a->running) {
        sn_log("close_device: %u copies made for other processes did not end in 1 s: their memory is lost", a->running);
        return; /* what they refer to must stay */
    }
    free(a);
    ctx->agent = NULL;
}

int sn_agent_wait(struct sn_ctx *ctx, uint64_t give_up)
{
    for (unsigned i = 0; ctx->agent && i < SN_AGENT_SLOTS; i++) {
        const uint64_t *at = &ctx->agent->shm->words[i];
        uint64_t first = __atomic_load_n(at, __ATOMIC_SEQ_CST), word = first;

        while ((sn_agent_state(word) == SN_AGENT_RUNNING || sn_agent_state(word) == SN_AGENT_LEFT) &&
               (word | SN_AGENT_STATE_MASK) == (first | SN_AGENT_STATE_MASK)) {
            if (sn_now_ns() > give_up)
                return -ETIMEDOUT;
            usleep(WAIT_NAP_US);
            word = __atomic_load_n(at, __ATOMIC_SEQ_CST);
        }
    }
    return 0;
}

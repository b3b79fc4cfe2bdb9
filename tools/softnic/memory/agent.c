/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/memory/agent.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "tools/softnic/memory/agent_slot.h"
#include "tools/softnic/memory/atomic.h"
#include "tools/softnic/memory/device_mem.h"
#include "tools/softnic/world/cores.h"
#include "tools/softnic/world/lock.h"
#include "tools/softnic/world/object.h"
#include "tools/softnic/world/self.h"
#include "transport/util/thread.h"

enum {
    POLL_NS = 50000,         /* after work: in a ping-pong the next job comes sooner than a sleeper would wake up */
    COPIER_POLL_NS = 200000, /* longer for the copier, which does most of its process's work */
    DRAIN_NS = 1000000000,
    WAIT_NAP_US = 20,
};

enum { HELD = SN_COPY_OWNER + 1 }; /* a job cannot begin yet */

/* The queued copies of one queue pair, in order. */
struct queue {
    struct sn_copy_queue at;
    struct job *first, *last; /* queued, and not done */
    struct job *slow;         /* could not be queued and is copied directly: no later copy may pass it */
    bool refused;             /* a copy was refused; so is everything after it */
};

struct job {
    uint64_t id; /* the slot's word without the state; 0: none runs */
    struct sn_copy copy;
    struct queue *queue; /* NULL: not a queued copy */
    struct job *next;
    struct sn_queued_copy queued;
    bool is_atomic;
    struct sn_atomic atomic; /* on copy's target */
};

struct sn_agent {
    struct sn_agent_shm *shm;
    pthread_t thread;
    bool stop;
    unsigned running, next; /* next: the slot to look at first, so that all get their turn */
    struct job jobs[SN_AGENT_SLOTS];
    /* the copier's: */
    struct queue *queues; /* [queue pair] */
    uint32_t head;        /* head of shm->order */
    struct job *held;     /* taken from shm->order, but cannot begin yet */
    bool spins;           /* there are enough cores */
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* protects starting and stopping agents */

/* Take one side of the copy from the initiator's description. The peer's memory, which is the owner's own, is looked up
 * again: its key may be gone, and a wrong description must not make the agent touch memory that is not registered. */
static bool spans_take(struct sn_span *to, const struct sn_agent_span *from, uint32_t count, uint32_t proc, bool peers)
{
    for (uint32_t i = 0; i < count; i++) {
        const struct sn_mr_shm *mr = sn_mr_find(sn_self->world, from[i].key);

        to[i] = (struct sn_span){from[i].addr, from[i].length, mr ? from[i].key >> 16 : SN_NONE, from[i].kind};
        if (peers && (!mr || __atomic_load_n(&mr->owner, __ATOMIC_RELAXED) != proc + 1 || mr->kind != from[i].kind ||
                      from[i].addr < mr->addr || from[i].length > mr->length ||
                      from[i].addr - mr->addr > mr->length - from[i].length))
            return false;
        if (!peers && from[i].kind != SN_MEM_HOST && !mr)
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

static bool job_take(const struct sn_agent *a, struct sn_copy *c, const struct sn_agent_slot *slot)
{
    bool read = slot->op == SN_AGENT_READ, atomic = slot->op == SN_AGENT_ADD || slot->op == SN_AGENT_SWAP;

    if (slot->dst_count > SN_MAX_SPANS || slot->src_count > SN_MAX_SPANS || slot->proc >= SN_MAX_PROCS ||
        sn_self->world->procs[slot->proc].generation != slot->proc_generation ||
        (a->queues ? slot->peer >= SN_MAX_PROCS || slot->queue >= SN_MAX_QPS || atomic : slot->peer != sn_self->proc))
        return false;
    c->world = sn_self->world;
    c->self = sn_self->proc;
    c->dst_proc = read ? slot->proc : slot->peer;
    c->src_proc = read ? slot->peer : slot->proc;
    c->dst_count = slot->dst_count;
    c->src_count = slot->src_count;
    c->length = slot->length;
    return spans_take(c->dst, slot->dst, slot->dst_count, slot->peer, !read) &&
           spans_take(c->src, slot->src, slot->src_count, slot->peer, read) &&
           spans_length(c->dst, c->dst_count) == c->length &&
           (atomic                         ? c->length == 8 && c->dst_count == 1
            : slot->op == SN_AGENT_PREPARE ? c->dst_count == 1
                                           : spans_length(c->src, c->src_count) == c->length);
}

/* Return SN_COPY_BUSY (queued, or being copied), HELD, or the result. */
static int queued_begin(struct job *job)
{
    struct queue *queue = job->queue;
    int r;

    if (queue->refused)
        return SN_COPY_OWNER;
    if (queue->slow)
        return HELD;
    r = sn_device_mem->enqueue(&job->copy, &queue->at, &job->queued);
    if (!r) {
        *(queue->first ? &queue->last->next : &queue->first) = job;
        queue->last = job;
        return SN_COPY_BUSY;
    }
    if (r == SN_COPY_BUSY && queue->first)
        return HELD;
    if (r == SN_COPY_BUSY) {
        r = sn_device_mem->copy_start(&job->copy);
        queue->slow = r == SN_COPY_BUSY ? job : NULL;
        queue->refused = r == SN_COPY_OWNER;
    }
    return r;
}

/* Advance a queued copy. Return as above, except HELD. */
static int queued_poll(struct job *job)
{
    struct queue *queue = job->queue;
    int r;

    if (queue->slow == job) {
        r = sn_device_mem->copy_poll(&job->copy);
        queue->slow = r == SN_COPY_BUSY ? job : NULL;
        return r;
    }
    if (queue->first != job)
        return SN_COPY_BUSY;
    r = sn_device_mem->queued_done(&queue->at, &job->queued, true);
    if (r != SN_COPY_BUSY)
        queue->first = job->next;
    return r;
}

static int job_start(struct sn_agent *a, struct job *job, struct sn_agent_slot *slot)
{
    struct sn_copy *c = &job->copy;

    if (!job_take(a, c, slot)) {
        sn_log("a request of process %u for memory of process %u was refused: its registration is gone", slot->proc,
               slot->peer);
        return -ENOENT;
    }
    job->queue = NULL;
    job->next = NULL;
    job->is_atomic = slot->op == SN_AGENT_ADD || slot->op == SN_AGENT_SWAP;
    switch (slot->op) {
    case SN_AGENT_ADD:
    case SN_AGENT_SWAP:
        job->atomic.cas = slot->op == SN_AGENT_SWAP;
        job->atomic.compare_add = slot->compare_add;
        job->atomic.swap = slot->swap;
        job->atomic.found = &slot->found;
        sn_atomic_begin(&job->atomic, c);
        return sn_atomic_step(&job->atomic);
    case SN_AGENT_PREPARE:
        return sn_device_mem->prepare(c->dst[0].mr);
    case SN_AGENT_ENQUEUE:
        job->queue = &a->queues[slot->queue];
        job->queue->refused = job->queue->refused && !slot->queue_is_empty;
        return queued_begin(job);
    default: /* not sn_copy_start: only the initiator may ask the other side's agent */
        return sn_device_mem->copy_start(c);
    }
}

/* Atomics take steps, as copies do, so that those of several queue pairs overlap: each is two copies, one after the
 * other. */
static int job_poll(struct job *job)
{
    if (job->queue)
        return queued_poll(job);
    return job->is_atomic ? sn_atomic_step(&job->atomic) : sn_device_mem->copy_poll(&job->copy);
}

static void job_end(struct sn_agent *a, struct job *job, int result)
{
    uint64_t id = job->id, *word = &a->shm->words[job - a->jobs];

    a->shm->slots[job - a->jobs].result = result;
    job->id = 0;
    a->running--;
    if (!sn_agent_turn(word, id, SN_AGENT_RUNNING, SN_AGENT_DONE))
        sn_agent_turn(word, id, SN_AGENT_LEFT, SN_AGENT_FREE);
}

/* Begin the job posted in a slot, unless its initiator has withdrawn it. Return whether it has begun, or ended. */
static bool slot_begin(struct sn_agent *a, unsigned i, uint64_t id)
{
    struct job *job = &a->jobs[i];
    int r;

    /* [in-use] first set the slot running, then look the key up; pairs with ibv_dereg_mr. */
    if (!sn_agent_turn(&a->shm->words[i], id, SN_AGENT_POSTED, SN_AGENT_RUNNING))
        return false;
    job->id = id;
    a->running++;
    r = job_start(a, job, &a->shm->slots[i]);
    if (r == HELD)
        a->held = job;
    else if (r != SN_COPY_BUSY)
        job_end(a, job, r);
    return true;
}

/* The copier's agent: begin jobs in the order in which they were posted, as far as they can begin. */
static bool order_take(struct sn_agent *a)
{
    /* [job-order] acquire; pairs with order_put in agent_job.c. */
    uint32_t tail = __atomic_load_n(&a->shm->tail, __ATOMIC_ACQUIRE);
    bool moved = false;

    if (a->held) {
        struct job *job = a->held;
        int r = queued_begin(job);

        if (r == HELD)
            return false;
        a->held = NULL;
        moved = true;
        if (r != SN_COPY_BUSY)
            job_end(a, job, r);
    }
    while (!a->held && a->head != tail) {
        uint64_t entry = a->shm->order[a->head++ % SN_AGENT_ORDER];
        unsigned i = (entry & SN_AGENT_STATE_MASK) % SN_AGENT_SLOTS;

        if (a->jobs[i].id == 0)
            moved |= slot_begin(a, i, entry & ~(uint64_t)SN_AGENT_STATE_MASK);
    }
    return moved;
}

/* Look at every slot once. Return true when something moved. */
static bool agent_round(struct sn_agent *a, bool take_new)
{
    bool moved = a->queues && take_new && order_take(a);

    for (unsigned n = 0; n < SN_AGENT_SLOTS; n++) {
        unsigned i = (a->next + n) % SN_AGENT_SLOTS;
        struct job *job = &a->jobs[i];
        uint64_t word;
        int r;

        if (job->id && job != a->held) {
            r = job_poll(job);
            if (r == SN_COPY_BUSY)
                continue;
            job_end(a, job, r);
            moved = true;
        } else if (!job->id && !a->queues && take_new) {
            word = __atomic_load_n(&a->shm->words[i], __ATOMIC_ACQUIRE);
            if (sn_agent_state(word) == SN_AGENT_POSTED)
                moved |= slot_begin(a, i, word & ~(uint64_t)SN_AGENT_STATE_MASK);
        }
    }
    a->next++;
    return moved;
}

static void agent_rest(struct sn_agent_shm *shm, uint32_t bell)
{
    /* [agent-bell] first set asleep, then look at the bell (the kernel does); pairs with sn_agent_ring, which does it
     * the other way round. */
    __atomic_store_n(&shm->asleep, 1, __ATOMIC_SEQ_CST);
    sn_futex_wait(&shm->bell, bell);
    __atomic_store_n(&shm->asleep, 0, __ATOMIC_RELAXED);
}

static void pause_shortly(const struct sn_agent *a)
{
    if (a->spins)
        sn_cpu_relax(); /* since Linux 6.18 every yield costs a time slice, however little the thread has run */
    else
        sn_give_way(); /* copy threads, the application or the initiator may need this core */
}

static void *agent_main(void *arg)
{
    struct sn_agent *a = arg;
    struct sn_agent_shm *shm = a->shm;
    uint64_t last = 0, drain_until = UINT64_MAX;

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
        if (!a->queues && sn_device_mem->watch)
            sn_device_mem->watch(now); /* this thread exists anyway, and wakes every second */
        if (agent_round(a, !stop))
            last = sn_now_ns(); /* read the clock again: the round may have taken longer than the polling time */
        else if (now < last + (a->queues ? COPIER_POLL_NS : POLL_NS))
            pause_shortly(a);
        else if (a->running && a->spins)
            usleep(WAIT_NAP_US); /* the copy is a long one, so sleep between looks */
        else if (a->running)
            pause_shortly(a);
        else
            agent_rest(shm, bell);
    }
}

/* Return 0 or -errno. Slot words keep their values: an initiator may still be about to give its slot back, by its
 * number. */
static int agent_run(struct sn_agent *a, struct sn_agent_shm *shm)
{
    int r;

    a->shm = shm;
    __atomic_store_n(&shm->epoch, (shm->epoch + 2) | 1, __ATOMIC_SEQ_CST);
    r = -prs_thread_start(&a->thread, "softnic-agent", agent_main, a);
    if (r)
        __atomic_store_n(&shm->epoch, shm->epoch + 1, __ATOMIC_SEQ_CST);
    return r;
}

int sn_agent_start(uint32_t ctx, struct sn_agent **agent)
{
    struct sn_agent_shm *shm = &sn_self->world->agents[ctx];
    struct sn_agent *a = NULL;
    int r = 0;

    pthread_mutex_lock(&mutex);
    if (*agent)
        goto unlock;
    r = sn_world_populate(shm, sizeof(*shm), "agent");
    if (r)
        goto unlock;
    r = -ENOMEM;
    a = calloc(1, sizeof(*a));
    if (!a)
        goto unlock;
    r = agent_run(a, shm);
    if (!r)
        *agent = a;
    else
        free(a);
unlock:
    pthread_mutex_unlock(&mutex);
    if (r)
        sn_log("registration of device memory: no agent for other processes' requests: %s (/dev/shm full, or too many "
               "threads?)",
               strerror(-r));
    return r;
}

int sn_agent_open(struct sn_agent_shm *shm, struct sn_agent **out)
{
    struct sn_agent *a;
    int r = sn_world_populate(shm, sizeof(*shm), "agent");

    if (r)
        goto fail;
    r = -ENOMEM;
    a = calloc(1, sizeof(*a));
    if (!a)
        goto fail;
    a->queues = calloc(SN_MAX_QPS, sizeof(*a->queues));
    if (!a->queues)
        goto free_agent;
    a->spins = !sn_cores_are_few();
    /* The previous process with these slots is dead. */
    memset(shm->words, 0, sizeof(shm->words));
    a->head = shm->tail;
    r = agent_run(a, shm);
    if (r)
        goto free_queues;
    *out = a;
    return 0;
free_queues:
    free(a->queues);
free_agent:
    free(a);
fail:
    sn_log("the copier has no agent for one more process: %s (/dev/shm full, or too many threads?)", strerror(-r));
    return r;
}

/* Return false when copies still run: they continue to use *a. */
static bool agent_end(struct sn_agent *a)
{
    __atomic_store_n(&a->stop, true, __ATOMIC_RELEASE);
    sn_agent_ring(a->shm);
    pthread_join(a->thread, NULL);
    __atomic_store_n(&a->shm->epoch, a->shm->epoch + 1, __ATOMIC_SEQ_CST);
    return !a->running;
}

void sn_agent_stop(struct sn_agent **agent)
{
    struct sn_agent *a = *agent;

    if (!a)
        return;
    if (!agent_end(a)) {
        sn_log("close_device: %u copies made for other processes did not end in 1 s: their memory is lost", a->running);
        return; /* running copies still use it */
    }
    free(a);
    *agent = NULL;
}

void sn_agent_close(struct sn_agent *a)
{
    if (!agent_end(a)) {
        sn_log("%u copies for a process that has ended did not end in 1 s: their memory is lost", a->running);
        return;
    }
    free(a->queues);
    free(a);
}

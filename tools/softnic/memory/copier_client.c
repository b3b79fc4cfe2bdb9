/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/memory/copier_client.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tools/softnic/memory/agent_job.h"
#include "tools/softnic/memory/agent_slot.h"
#include "tools/softnic/memory/cuda_mem.h"
#include "tools/softnic/memory/cuda_staging.h"
#include "tools/softnic/memory/owner_copy.h"
#include "tools/softnic/world/cores.h"
#include "tools/softnic/world/lock.h"
#include "tools/softnic/world/proc.h"
#include "tools/softnic/world/self.h"

enum {
    NAP_US = 50,
};
#define START_NS   10000000000ull /* limit for the copier to start an agent */
#define PREPARE_NS 60000000000ull /* the first job starts CUDA and makes a context: seconds on a host of many GPUs */

/* One copy, as a job of the copier. */
struct client_job {
    struct client_job *next;
    struct sn_agent_ref to;
    struct sn_job job;
    bool posted, copied_here;
    uint64_t give_up; /* until the job is posted: when to give up */
    struct sn_copy copy;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* protects idle */
static struct client_job *idle;

static struct client_job *job_new(const struct sn_copy *c)
{
    pthread_mutex_lock(&mutex);
    struct client_job *a = idle;
    if (a)
        idle = a->next;
    pthread_mutex_unlock(&mutex);
    if (!a)
        a = malloc(sizeof(*a));
    if (!a)
        return NULL;
    memset(a, 0, offsetof(struct client_job, copy));
    /* Large: only the members that a copy needs are copied. */
    a->copy.world = c->world;
    a->copy.self = c->self;
    a->copy.dst_proc = c->dst_proc;
    a->copy.src_proc = c->src_proc;
    a->copy.dst_count = c->dst_count;
    a->copy.src_count = c->src_count;
    a->copy.length = c->length;
    a->copy.async = NULL;
    a->copy.by = SN_BY_DEVICE;
    memcpy(a->copy.dst, c->dst, c->dst_count * sizeof(c->dst[0]));
    memcpy(a->copy.src, c->src, c->src_count * sizeof(c->src[0]));
    return a;
}

static void job_free(struct client_job *a)
{
    pthread_mutex_lock(&mutex);
    a->next = idle;
    idle = a;
    pthread_mutex_unlock(&mutex);
}

/* A forked child has no jobs in flight. */
static void child_forget(void)
{
    pthread_mutex_init(&mutex, NULL);
    idle = NULL;
}

static __attribute__((constructor)) void client_init(void)
{
    pthread_atfork(NULL, NULL, child_forget);
}

static bool any_owner_only(const struct sn_copy *c, const struct sn_span *span, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        if (span[i].kind != SN_MEM_HOST && sn_cuda_mem.owner_only(&c->world->mrs[span[i].mr]))
            return true;
    return false;
}

static int copier_gone(const struct sn_world *world)
{
    static bool told;
    uint32_t proc = __atomic_load_n(&world->copier.proc, __ATOMIC_ACQUIRE);

    if (!__atomic_exchange_n(&told, true, __ATOMIC_RELAXED))
        sn_log("the copier, pid %u, which copies all device memory of this world (softnic-run --copier), is gone or "
               "stopped: transfers of device memory fail from here on (was it killed, or out of memory?)",
               proc ? world->procs[proc - 1].pid : 0);
    return -EIO;
}

static void copier_ring(struct sn_world *world)
{
    __atomic_fetch_add(&world->copier.bell, 1, __ATOMIC_SEQ_CST);
    sn_futex_wake(&world->copier.bell);
}

/* The copier's agent for this process. Return 0, SN_COPY_BUSY (it is being started), or -EIO (logged). */
static int agent_find(struct sn_world *world, struct sn_agent_ref *to)
{
    uint32_t self = sn_self->proc, generation = world->procs[self].generation;
    struct sn_agent_shm *shm = &world->copiers[self];
    uint32_t proc = __atomic_load_n(&world->copier.proc, __ATOMIC_ACQUIRE);

    if (!proc)
        return copier_gone(world);
    *to = (struct sn_agent_ref){shm, __atomic_load_n(&shm->epoch, __ATOMIC_SEQ_CST), proc - 1,
                                world->procs[proc - 1].generation, true};
    /* [copier-serves] acquire; pairs with serve_process in copier.c: the slots are this process's. */
    if ((to->epoch & 1) && __atomic_load_n(&world->copier.serves[self], __ATOMIC_ACQUIRE) == generation)
        return 0;
    if (!sn_proc_alive(&world->procs[proc - 1]))
        return copier_gone(world);
    if (__atomic_exchange_n(&world->copier.wanted[self], generation, __ATOMIC_SEQ_CST) != generation)
        copier_ring(world);
    return SN_COPY_BUSY;
}

/* Post the job if that was not done yet. Return 0, SN_COPY_BUSY, or -EIO (logged). */
static int job_post(struct client_job *a)
{
    int r = agent_find(a->copy.world, &a->to);

    if (r == SN_COPY_BUSY) {
        a->give_up = a->give_up ? a->give_up : sn_now_ns() + START_NS;
        return sn_now_ns() < a->give_up ? r : copier_gone(a->copy.world);
    }
    if (r)
        return r;
    a->posted = sn_job_post(&a->to, &a->job, &a->copy) == 0;
    return a->posted ? 0 : SN_COPY_BUSY;
}

/* The copier cannot open some of the memory: copy it as in a world without a copier. */
static int copied_here_start(struct client_job *a)
{
    int r = sn_cuda_mem.copy_start(&a->copy);

    a->copied_here = true;
    return r == SN_COPY_OWNER ? sn_owner_copy_start(&a->copy) : r;
}

/* Translate an error of the copier: it reports registered memory as its own, but here that memory is the target's. */
static int result_of_copier(int r)
{
    return r == -ENOENT || r == -EINVAL ? -EFAULT : r;
}

/* Return 0, SN_COPY_BUSY, or -errno. */
static int job_poll(struct client_job *a)
{
    int r, result;

    if (a->copied_here)
        return a->copy.by == SN_BY_OWNER ? sn_owner_copy_poll(&a->copy) : sn_cuda_mem.copy_poll(&a->copy);
    r = a->posted ? 0 : job_post(a);
    if (r)
        return r;
    r = sn_job_poll(&a->to, &a->job, a->copy.world, &result);
    if (r < 0)
        return copier_gone(a->copy.world);
    if (r == SN_COPY_BUSY)
        return r;
    return result == SN_COPY_OWNER ? copied_here_start(a) : result_of_copier(result);
}

/* Does this process's side (own), or the other side, name memory that only its owner can reach? */
static bool owner_only(const struct sn_copy *c, bool own)
{
    return ((c->dst_proc == c->self) == own && any_owner_only(c, c->dst, c->dst_count)) ||
           ((c->src_proc == c->self) == own && any_owner_only(c, c->src, c->src_count));
}

static int client_start(struct sn_copy *c)
{
    /* Within one process the unregistered side (the word of an atomic, for instance) is the initiator's. */
    bool read = c->dst_proc == c->self && (c->src_proc != c->self || c->dst[0].mr == SN_NONE);
    struct client_job *a;
    int r;

    if (owner_only(c, false))
        return SN_COPY_OWNER;
    a = job_new(c);
    if (!a)
        return -ENOMEM;
    a->copied_here = owner_only(c, true);
    a->job.op = read ? SN_AGENT_READ : SN_AGENT_WRITE;
    a->job.peer = read ? c->src_proc : c->dst_proc;
    r = a->copied_here ? sn_cuda_mem.copy_start(&a->copy) : job_poll(a);
    if (r == SN_COPY_BUSY)
        c->async = a;
    else
        job_free(a);
    return r;
}

static int client_poll(struct sn_copy *c)
{
    struct client_job *a = c->async;
    int r = job_poll(a);

    if (r != SN_COPY_BUSY) {
        job_free(a);
        c->async = NULL;
    }
    sn_give_way(); /* the copier may need this core */
    return r;
}

/* The same conditions as in cuda_queue.c: everything else is copied without a queue. */
static bool can_enqueue(const struct sn_copy *c)
{
    if (c->dst_count != 1 || c->src_count == 0 || c->src_proc != c->self || c->dst[0].kind == SN_MEM_HOST ||
        owner_only(c, true) || owner_only(c, false))
        return false;
    if (c->src[0].kind != SN_MEM_HOST)
        return c->src_count == 1;
    for (uint32_t i = 1; i < c->src_count; i++)
        if (c->src[i].kind != SN_MEM_HOST)
            return false;
    return c->length <= SN_STAGING_SMALL;
}

static int client_enqueue(struct sn_copy *c, struct sn_copy_queue *queue, struct sn_queued_copy *queued)
{
    struct client_job *a = can_enqueue(c) ? job_new(c) : NULL;

    if (!a)
        return SN_COPY_BUSY;
    a->job.op = SN_AGENT_ENQUEUE;
    a->job.peer = c->dst_proc;
    a->job.queue = (uint16_t)queue->id;
    a->job.queue_is_empty = queue->pending == 0;
    if (job_post(a)) { /* a direct copy waits for a slot, and logs the error */
        job_free(a);
        return SN_COPY_BUSY;
    }
    *queued = (struct sn_queued_copy){.map = a};
    queue->pending++;
    return 0;
}

static int client_queued_done(struct sn_copy_queue *queue, struct sn_queued_copy *queued, bool ask)
{
    struct client_job *a = queued->map;
    int r = job_poll(a);

    if (r == SN_COPY_BUSY && ask)
        sn_give_way(); /* the copier may need this core; a thread that has just posted does not yield */
    if (r == SN_COPY_BUSY)
        return r;
    job_free(a);
    queue->pending--;
    return r;
}

/* Return 0, SN_COPY_OWNER or -errno. */
static int prepare_once(uint32_t mr)
{
    const struct sn_mr_shm *shm = &sn_self->world->mrs[mr];
    struct sn_copy c = {.world = sn_self->world,
                        .self = sn_self->proc,
                        .dst_proc = sn_self->proc,
                        .src_proc = sn_self->proc,
                        .dst_count = 1,
                        .length = shm->length};
    struct client_job *a;
    int r, result = 0;

    c.dst[0] = (struct sn_span){.addr = shm->addr, .length = shm->length, .mr = mr, .kind = shm->kind};
    a = job_new(&c);
    if (!a)
        return -ENOMEM;
    a->job.op = SN_AGENT_PREPARE;
    a->job.peer = sn_self->proc;
    a->job.patience_ns = PREPARE_NS;
    while ((r = job_post(a)) == SN_COPY_BUSY)
        usleep(NAP_US);
    while (!r && (r = sn_job_poll(&a->to, &a->job, a->copy.world, &result)) == SN_COPY_BUSY) {
        r = 0;
        usleep(NAP_US);
    }
    job_free(a);
    return r ? r : result;
}

/* Ask the copier to make contexts, streams and pinned memory, and to map this memory, before kernels run. -ESRCH: the
 * agent that ended just now had served an earlier process with the same slot in the table. */
static int client_prepare(uint32_t mr)
{
    int r = -ESRCH;

    if (sn_cuda_mem.owner_only(&sn_self->world->mrs[mr]))
        return 0;
    for (int tries = 0; tries < 3 && r == -ESRCH; tries++)
        r = prepare_once(mr);
    if (r == -ESRCH)
        r = copier_gone(sn_self->world);
    if (r == SN_COPY_OWNER)
        sn_log("device memory of this process cannot be opened by the copier: this process copies it");
    return r;
}

/* Let the copier close its mapping, which may take time. */
static void client_unexport(struct sn_mr_shm *mr)
{
    sn_cuda_mem.unexport_mr(mr);
    copier_ring(sn_self->world);
}

int sn_copier_wait(const struct sn_world *world, uint64_t give_up)
{
    for (uint32_t i = 0; i < SN_MAX_PROCS; i++)
        if (__atomic_load_n(&world->copier.serves[i], __ATOMIC_SEQ_CST) &&
            sn_agent_wait(&world->copiers[i], give_up) < 0)
            return -ETIMEDOUT;
    return 0;
}

void sn_device_mem_choose(const struct sn_world *world)
{
    static struct sn_device_mem client_mem;

    client_mem = sn_cuda_mem;
    client_mem.unexport_mr = client_unexport;
    client_mem.prepare = client_prepare;
    client_mem.copy_start = client_start;
    client_mem.copy_poll = client_poll;
    client_mem.enqueue = client_enqueue;
    client_mem.queued_done = client_queued_done;
    sn_device_mem = world->config.copier ? &client_mem : &sn_cuda_mem;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/memory/agent_job.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>

#include "tools/softnic/memory/agent_slot.h"
#include "tools/softnic/memory/host_copy.h"
#include "tools/softnic/world/lock.h"
#include "tools/softnic/world/proc.h"

enum {
    LOOK_NS = 1000000, /* how often to check that the agent exists: a system call, so not at every poll */
};
#define PATIENCE_NS 4000000000ull  /* for an agent that stands still in a stopped process */
#define CROWDED_NS  16000000000ull /* added for a process that runs: it may only lack a core */
/* the copier is one process among many: on a crowded machine it once stood still for 4 s */
#define COPIER_PATIENCE_NS 20000000000ull

static pthread_mutex_t order_mutex = PTHREAD_MUTEX_INITIALIZER; /* protects the tail of this process's job order */

/* A forked child has a slot of its own in the process table, and an order of its own. */
static void child_forget(void)
{
    pthread_mutex_init(&order_mutex, NULL);
}

static __attribute__((constructor)) void job_init(void)
{
    pthread_atfork(NULL, NULL, child_forget);
}

bool sn_job_unanswerable(const struct sn_agent_ref *to, struct sn_world *world)
{
    const struct sn_proc *proc = &world->procs[to->proc];

    if (__atomic_load_n(&to->shm->epoch, __ATOMIC_SEQ_CST) != to->epoch || !(to->epoch & 1) ||
        proc->generation != to->proc_generation)
        return true;
    /* The copier may live in the launcher's user namespace, where this process cannot read anybody's memory; and it has
     * many clients. softnic-run reaps it, so it is never a zombie for long. */
    return to->copier ? kill((pid_t)proc->pid, 0) < 0 && errno == ESRCH : !sn_process_reachable(world, to->proc);
}

/* Free slots of initiators that died before they gave them back. Running jobs are left to the agent. */
static void sweep_slots(struct sn_agent_shm *shm)
{
    for (uint32_t i = 0; i < SN_AGENT_SLOTS; i++) {
        uint64_t word = __atomic_load_n(&shm->words[i], __ATOMIC_ACQUIRE);
        uint32_t state = sn_agent_state(word);

        if ((state == SN_AGENT_TAKEN || state == SN_AGENT_DONE) && !sn_pid_runs((uint32_t)(word >> 32)))
            sn_agent_turn(&shm->words[i], word & ~(uint64_t)SN_AGENT_STATE_MASK, state, SN_AGENT_FREE);
    }
}

/* Return 0 or SN_COPY_BUSY: all slots are in use. */
static int slot_take(struct sn_agent_shm *shm, struct sn_job *q)
{
    static uint32_t serials;
    uint32_t serial = __atomic_add_fetch(&serials, 1, __ATOMIC_RELAXED);
    uint64_t id = (uint64_t)sn_pid << 32 | (uint64_t)(serial & 0xffffff) << 8;

    for (uint32_t n = 0; n < SN_AGENT_SLOTS; n++) {
        uint64_t idle = SN_AGENT_FREE;
        uint32_t i = (serial + n) % SN_AGENT_SLOTS;

        if (__atomic_compare_exchange_n(&shm->words[i], &idle, id | SN_AGENT_TAKEN, false, __ATOMIC_ACQ_REL,
                                        __ATOMIC_RELAXED)) {
            q->word = id;
            q->slot = i;
            return 0;
        }
    }
    return SN_COPY_BUSY;
}

static void spans_put(const struct sn_world *world, struct sn_agent_span *to, const struct sn_span *from,
                      uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        to[i] = (struct sn_agent_span){
            from[i].addr, from[i].length,
            from[i].mr == SN_NONE ? 0 : __atomic_load_n(&world->mrs[from[i].mr].key, __ATOMIC_ACQUIRE), from[i].kind};
}

/* A job takes any free slot, so the order of posting is kept separately. The list always has room: each entry has a
 * slot, except those of withdrawn jobs, which the agent soon removes. */
static void order_put(struct sn_agent_shm *shm, const struct sn_job *q)
{
    pthread_mutex_lock(&order_mutex);
    shm->order[shm->tail % SN_AGENT_ORDER] = q->word | q->slot;
    /* [job-order] release; pairs with order_take in agent.c: the entry and the word POSTED come before it. */
    __atomic_store_n(&shm->tail, shm->tail + 1, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&order_mutex);
}

int sn_job_post(const struct sn_agent_ref *to, struct sn_job *q, const struct sn_copy *c)
{
    struct sn_agent_shm *shm = to->shm;

    if (slot_take(shm, q))
        return SN_COPY_BUSY;
    struct sn_agent_slot *slot = &shm->slots[q->slot];
    slot->op = q->op;
    slot->proc = c->self;
    slot->proc_generation = c->world->procs[c->self].generation;
    slot->length = c->length;
    slot->compare_add = q->compare_add;
    slot->swap = q->swap;
    slot->dst_count = c->dst_count;
    slot->src_count = c->src_count;
    slot->peer = q->peer;
    slot->queue = q->queue;
    slot->queue_is_empty = q->queue_is_empty;
    spans_put(c->world, slot->dst, c->dst, c->dst_count);
    spans_put(c->world, slot->src, c->src, c->src_count);
    sn_agent_turn(&shm->words[q->slot], q->word, SN_AGENT_TAKEN, SN_AGENT_POSTED);
    if (to->copier)
        order_put(shm, q);
    sn_agent_ring(shm);
    return 0;
}

static void report_standstill(const struct sn_agent_ref *to, const struct sn_world *world)
{
    uint32_t pid = world->procs[to->proc].pid;
    bool stopped = sn_pid_stopped(pid);

    if (to->copier)
        sn_log("the copier, pid %u, which copies all device memory of this world (softnic-run --copier), has not moved "
               "for 20 s: "
               "is the process stopped?",
               pid);
    else
        sn_log("device memory that only pid %u can reach: its agent has not moved for %d s (%s)", pid, stopped ? 4 : 20,
               stopped ? "the process is stopped"
                       : "does it lack a core, or wait in the CUDA driver, perhaps for the lock of a cudaMemcpy of "
                         "pageable memory on the default stream?");
}

/* Is the agent worth waiting for? Check from time to time that it exists and that it moves. */
static int agent_watch(const struct sn_agent_ref *to, struct sn_job *q, struct sn_world *world)
{
    uint64_t now = sn_now_ns(), patience = to->copier ? COPIER_PATIENCE_NS : PATIENCE_NS;
    uint32_t beat;

    if (q->patience_ns)
        patience = q->patience_ns;
    if (now < q->look_at)
        return 0;
    q->look_at = now + LOOK_NS;
    if (!q->give_up && to->copier) /* checking costs more than most jobs */
        q->give_up = now + patience;
    else if (sn_job_unanswerable(to, world))
        return -ESRCH;
    beat = __atomic_load_n(&to->shm->beat, __ATOMIC_RELAXED);
    if (beat != q->beat || !q->give_up) {
        q->beat = beat;
        q->give_up = now + patience;
    }
    if (!q->word)
        sweep_slots(to->shm);
    if (now < q->give_up)
        return 0;
    if (!to->copier && !q->patience_ns && now < q->give_up + CROWDED_NS && !sn_pid_stopped(world->procs[to->proc].pid))
        return 0;
    report_standstill(to, world);
    return -ETIMEDOUT;
}

/* Withdraw from a slot. Return true when the agent may still read or write the memory that the job names. */
static bool job_leave(const struct sn_agent_ref *to, struct sn_job *q, bool gone)
{
    uint64_t *word = &to->shm->words[q->slot];

    if (!q->word || sn_agent_turn(word, q->word, SN_AGENT_POSTED, SN_AGENT_FREE))
        return false;
    if (sn_agent_turn(word, q->word, SN_AGENT_RUNNING, gone ? SN_AGENT_FREE : SN_AGENT_LEFT))
        return !gone;
    sn_agent_turn(word, q->word, SN_AGENT_DONE, SN_AGENT_FREE);
    return false;
}

int sn_job_poll(const struct sn_agent_ref *to, struct sn_job *q, struct sn_world *world, int *result)
{
    /* Watch first, read the word second: an agent that ends has finished what it had begun. */
    int r = agent_watch(to, q, world);

    if (q->word && __atomic_load_n(&to->shm->words[q->slot], __ATOMIC_ACQUIRE) == (q->word | SN_AGENT_DONE)) {
        *result = to->shm->slots[q->slot].result;
        if (q->found)
            *q->found = to->shm->slots[q->slot].found;
        sn_agent_turn(&to->shm->words[q->slot], q->word, SN_AGENT_DONE, SN_AGENT_FREE);
        return 0;
    }
    if (!r)
        return SN_COPY_BUSY;
    q->lost = job_leave(to, q, r == -ESRCH);
    return -ESRCH;
}

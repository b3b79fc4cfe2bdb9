/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/memory/copier.h"

#include <errno.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "tools/softnic/memory/agent.h"
#include "tools/softnic/memory/agent_slot.h"
#include "tools/softnic/memory/cuda_mem.h"
#include "tools/softnic/world/proc.h"
#include "tools/softnic/world/self.h"

/* By process. */
static struct sn_agent *agents[SN_MAX_PROCS];

static bool is_live(const struct sn_proc *proc, uint32_t generation)
{
    return __atomic_load_n(&proc->state, __ATOMIC_ACQUIRE) == SN_PROC_LIVE && proc->generation == generation &&
           sn_proc_alive(proc);
}

/* Start an agent for a process that asked for one; stop that of a process that exited. Return whether one exited. */
static bool serve_process(struct sn_world *world, uint32_t i)
{
    uint32_t *serves = &world->copier.serves[i], wanted = __atomic_load_n(&world->copier.wanted[i], __ATOMIC_ACQUIRE);
    bool gone = agents[i] && !is_live(&world->procs[i], *serves);

    if (gone) {
        sn_agent_close(agents[i]);
        agents[i] = NULL;
        __atomic_store_n(serves, 0, __ATOMIC_SEQ_CST);
    }
    if (agents[i] || !wanted || !is_live(&world->procs[i], wanted))
        return gone;
    if (sn_agent_open(&world->copiers[i], &agents[i]) == 0)
        /* [copier-serves] release; pairs with agent_find in copier_client.c */
        __atomic_store_n(serves, wanted, __ATOMIC_SEQ_CST);
    else
        /* the client must ask again, so that a failure is not retried in a loop */
        __atomic_store_n(&world->copier.wanted[i], 0, __ATOMIC_RELEASE);
    return gone;
}

static _Noreturn void serve(struct sn_world *world)
{
    uint32_t closed = 0;

    for (;;) {
        uint32_t bell = __atomic_load_n(&world->copier.bell, __ATOMIC_SEQ_CST);
        bool gone = false;

        for (uint32_t i = 0; i < SN_MAX_PROCS; i++)
            gone |= serve_process(world, i);
        if (gone)
            sn_proc_sweep(world); /* killed processes have deregistered nothing */
        /* No kernels run in this process, so stale mappings can be closed at any time. */
        if (gone || bell != closed)
            sn_device_mem->settle();
        closed = bell;
        sn_futex_wait(&world->copier.bell, bell); /* at most a second, then check for dead processes again */
    }
}

/* The copier itself copies with CUDA. */
static void use_cuda(const struct sn_world *world)
{
    (void)world;
    sn_device_mem = &sn_cuda_mem;
}

int softnic_copier(int ready_fd)
{
    struct sn_self *self = sn_self_get(use_cuda);
    char ready = 1;

    if (!self)
        return -errno;
    prctl(PR_SET_NAME, "softnic-copier", 0, 0, 0);
    /* Release: a process that finds this finds the entry in the process table complete. */
    __atomic_store_n(&self->world->copier.proc, self->proc + 1, __ATOMIC_RELEASE);
    if (write(ready_fd, &ready, 1) != 1) {
        sn_log("copier: softnic-run does not listen: %s", strerror(errno));
        return -EPIPE;
    }
    close(ready_fd);
    serve(self->world);
}

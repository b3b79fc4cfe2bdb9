/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/world/proc.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tools/softnic/world/lock.h"
#include "tools/softnic/world/object.h"

struct stat_line {
    char state;
    long threads;
    uint64_t start; /* in clock ticks */
};

/* Read /proc/pid/stat. Return false when there is no such process. */
static bool stat_read(uint32_t pid, struct stat_line *out)
{
    char path[40], text[512], *p;
    unsigned long long ticks;
    ssize_t n;
    int fd;

    /* qemu-user answers /proc/PID/stat itself for its own process, with a start time that differs from what other
     * processes see. */
    snprintf(path, sizeof(path), "/proc/./%u/stat", pid);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    n = read(fd, text, sizeof(text) - 1);
    close(fd);
    if (n <= 0)
        return false;
    text[n] = 0;
    p = strrchr(text, ')'); /* the command name may contain anything, even parentheses */
    if (!p || sscanf(p + 1, " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %ld %*d %llu",
                     &out->state, &out->threads, &ticks) != 3)
        return false;
    out->start = ticks;
    return true;
}

/* A process whose first thread has ended (pthread_exit() in main) also looks like a zombie while other threads run. */
static bool runs(const struct stat_line *stat)
{
    return stat->state != 'X' && (stat->state != 'Z' || stat->threads > 1);
}

bool sn_pid_runs(uint32_t pid)
{
    struct stat_line stat;

    return stat_read(pid, &stat) && runs(&stat);
}

bool sn_pid_stopped(uint32_t pid)
{
    struct stat_line stat;

    return !stat_read(pid, &stat) || stat.state == 'T' || stat.state == 't';
}

uint64_t sn_pid_start(uint32_t pid)
{
    struct stat_line stat;

    return stat_read(pid, &stat) ? stat.start : 0;
}

bool sn_proc_alive(const struct sn_proc *proc)
{
    struct stat_line stat;

    return stat_read(proc->pid, &stat) && runs(&stat) && stat.start == proc->start_ticks;
}

/* Is a thread that found its queue pairs before they were hidden still using their objects, rings included? That may
 * be one of its own threads, which run on while the program exits, or an initiator: a copy under way outlives its
 * target process, and is reported to its completion queue. The caller holds proc_lock. */
static bool in_use_locked(const struct sn_world *world, uint32_t index)
{
    bool alive = sn_proc_alive(&world->procs[index]);

    for (uint32_t i = 0; i < world->qp_slots.fresh; i++) {
        const struct sn_qp_shm *qp = &world->qps[i];

        if (__atomic_load_n(&qp->owner, __ATOMIC_ACQUIRE) != index + 1)
            continue;
        if (alive)
            return true;
        for (uint32_t g = 0; g < SN_MAX_INITIATORS; g++) {
            /* [in-use] after the numbers were taken back; pairs with sn_responder_enter. */
            uint32_t initiator = (uint32_t)__atomic_load_n(&qp->initiators[g], __ATOMIC_SEQ_CST);

            if (initiator && sn_pid_runs(initiator))
                return true;
        }
    }
    return false;
}

/* The caller holds proc_lock. Objects in use are left to the next sweep. */
static unsigned sweep_locked(struct sn_world *world)
{
    unsigned swept = 0;

    for (uint32_t i = 0; i < SN_MAX_PROCS; i++) {
        struct sn_proc *proc = &world->procs[i];

        if (proc->state == SN_PROC_FREE || (proc->state == SN_PROC_LIVE && sn_proc_alive(proc)))
            continue;
        proc->state = SN_PROC_SWEEP; /* so that another sweep finishes the work of a sweeper that was killed */
        sn_objects_hide(world, i);
        if (in_use_locked(world, i))
            continue;
        sn_objects_free(world, i);
        __atomic_store_n(&proc->state, SN_PROC_FREE, __ATOMIC_RELEASE);
        swept++;
    }
    return swept;
}

unsigned sn_proc_sweep(struct sn_world *world)
{
    unsigned swept;

    sn_lock_take(&world->proc_lock);
    swept = sweep_locked(world);
    sn_lock_drop(&world->proc_lock);
    return swept;
}

int sn_proc_enter(struct sn_world *world, uint64_t nonce, const uint64_t *nonce_addr, uint32_t node, uint32_t *index)
{
    int r = -ENOMEM;

    sn_lock_take(&world->proc_lock);
    if (world->dead) {
        r = -ESTALE;
        goto unlock;
    }
    sweep_locked(world);
    for (uint32_t i = 0; i < SN_MAX_PROCS; i++) {
        struct sn_proc *proc = &world->procs[i];

        if (proc->state != SN_PROC_FREE)
            continue;
        *proc = (struct sn_proc){.pid = sn_pid,
                                 .start_ticks = sn_pid_start(sn_pid),
                                 .nonce = nonce,
                                 .nonce_addr = (uintptr_t)nonce_addr,
                                 .generation = proc->generation + 1,
                                 .node = node};
        __atomic_store_n(&proc->state, SN_PROC_LIVE, __ATOMIC_RELEASE);
        *index = i;
        r = 0;
        break;
    }
unlock:
    sn_lock_drop(&world->proc_lock);
    if (r == -ENOMEM)
        sn_log("process table full: %d processes use this world", SN_MAX_PROCS);
    return r;
}

static bool any_live_locked(const struct sn_world *world)
{
    for (uint32_t i = 0; i < SN_MAX_PROCS; i++)
        if (world->procs[i].state == SN_PROC_LIVE)
            return true;
    return false;
}

void sn_proc_leave(struct sn_world *world, uint32_t index, const char *path)
{
    sn_lock_take(&world->proc_lock);
    world->procs[index].state = SN_PROC_SWEEP;
    sweep_locked(world);
    if (world->ephemeral && !any_live_locked(world))
        sn_world_remove_locked(world, path);
    sn_lock_drop(&world->proc_lock);
}

bool sn_creator_lives(const struct sn_world *world)
{
    return sn_pid_runs(world->creator_pid) && sn_pid_start(world->creator_pid) == world->creator_start;
}

/* Processes are counted under the lock under which they enter: nobody joins a world that is being removed. */
bool sn_world_remove(struct sn_world *world, const char *path, bool force)
{
    bool removed;

    if (!force && sn_creator_lives(world))
        return false;
    sn_lock_take(&world->proc_lock);
    sweep_locked(world);
    removed = (force || !any_live_locked(world)) && sn_world_remove_locked(world, path);
    sn_lock_drop(&world->proc_lock);
    return removed;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/world/self.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <unistd.h>

#include "tools/softnic/world/emulated_node.h"
#include "tools/softnic/world/lock.h"
#include "tools/softnic/world/object.h"
#include "tools/softnic/world/proc.h"
#include "tools/softnic/world/wake.h"

enum { JOIN_TRIES = 100 /* a world that is removed between opening and joining is opened again */ };

struct sn_self *sn_self;
static pthread_mutex_t self_mutex = PTHREAD_MUTEX_INITIALIZER;

/* SOFTNIC_NICS and SOFTNIC_NODES set the size of the default world when this process makes it. */
static uint32_t env_count(const char *name, uint32_t fallback)
{
    const char *text = getenv(name);
    char *end;
    unsigned long n;

    if (!text || !*text)
        return fallback;
    n = strtoul(text, &end, 10);
    if (*end || n == 0 || n > SN_MAX_DEVS) {
        sn_log("%s=%s: want a number from 1 to %d; using %u", name, text, SN_MAX_DEVS, fallback);
        return fallback;
    }
    return (uint32_t)n;
}

static int world_find(struct sn_self *self)
{
    struct sn_config config;
    int r;

    sn_world_path(self->path, sizeof(self->path));
    r = sn_world_open(self->path, &self->world);
    if (r != -ENOENT || getenv(SN_WORLD_ENV))
        return r;
    sn_config_default(&config);
    config.nics = env_count("SOFTNIC_NICS", 1);
    config.nodes = env_count("SOFTNIC_NODES", 1);
    r = sn_world_create(self->path, &config, true, &self->world);
    return r == -EEXIST ? -EAGAIN : r;
}

static int self_join(struct sn_self *self)
{
    int r = -EAGAIN;
    uint32_t node;

    for (int i = 0; i < JOIN_TRIES; i++) {
        r = world_find(self);
        if (r == -EAGAIN)
            continue;
        if (r < 0)
            break;
        r = sn_node_of_process(self->world->config.nodes, &node);
        if (!r)
            r = sn_proc_enter(self->world, self->nonce, &self->nonce, node, &self->proc);
        if (!r)
            return 0;
        sn_world_close(self->world);
        if (r != -ESTALE)
            return r;
        usleep(1000);
    }
    return r;
}

struct sn_self *sn_self_get(void (*joined)(const struct sn_world *world))
{
    struct sn_self *self = NULL;
    int r;

    pthread_mutex_lock(&self_mutex);
    if (sn_self)
        goto unlock;
    self = calloc(1, sizeof(*self));
    if (!self) {
        errno = ENOMEM;
        goto unlock;
    }
    if (getrandom(&self->nonce, sizeof(self->nonce), 0) != sizeof(self->nonce))
        self->nonce = sn_now_ns();
    r = self_join(self);
    if (r < 0) {
        sn_log("cannot join the world %s: %s", self->path, sn_world_error(r));
        free(self);
        errno = -r;
        goto unlock;
    }
    /* Peers move data with process_vm_writev. Where Yama restricts ptrace they need this permission. EINVAL: no
     * Yama. */
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
    joined(self->world);
    sn_self = self;
unlock:
    self = sn_self;
    pthread_mutex_unlock(&self_mutex);
    return self;
}

/* A forked child has the mapping but none of the threads, and is not the process in the table: it starts with nothing,
 * and must not undo what belongs to its parent. The inherited mapping stays: other inherited objects still point into
 * it. */
static struct sn_self *volatile inherited; /* so that leak checkers in the child still find it reachable */

static void child_forget(void)
{
    inherited = sn_self;
    sn_self = NULL;
    sn_wake_forget();
    pthread_mutex_init(&self_mutex, NULL);
}

static __attribute__((constructor)) void self_init(void)
{
    pthread_atfork(NULL, NULL, child_forget);
}

static __attribute__((destructor)) void self_fini(void)
{
    struct sn_self *self = sn_self;

    if (!self || (uint32_t)getpid() != self->world->procs[self->proc].pid)
        return;
    sn_proc_leave(self->world, self->proc, self->path);
}

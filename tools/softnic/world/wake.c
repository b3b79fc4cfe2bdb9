/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/world/wake.h"

#include <errno.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "tools/softnic/world/lock.h"

static int wake_sender = -1; /* one unbound socket per process */

static socklen_t wake_address(const struct sn_world *world, uint32_t wake_id, struct sockaddr_un *addr)
{
    int n;

    *addr = (struct sockaddr_un){.sun_family = AF_UNIX};
    n = snprintf(addr->sun_path + 1, sizeof(addr->sun_path) - 1, "softnic.%016llx.%u", (unsigned long long)world->id,
                 wake_id);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

int sn_wake_open(struct sn_world *world, uint32_t *wake_id)
{
    struct sockaddr_un addr;
    socklen_t len;
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);

    if (fd < 0)
        return -errno;
    *wake_id = __atomic_fetch_add(&world->wake_next, 1, __ATOMIC_RELAXED);
    len = wake_address(world, *wake_id, &addr);
    if (bind(fd, (struct sockaddr *)&addr, len) < 0) {
        int r = -errno;

        close(fd);
        return r;
    }
    return fd;
}

static int sender_get(void)
{
    int fd = __atomic_load_n(&wake_sender, __ATOMIC_ACQUIRE), none = -1;

    if (fd >= 0)
        return fd;
    fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd >= 0 && !__atomic_compare_exchange_n(&wake_sender, &none, fd, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
        close(fd); /* another thread was faster */
        fd = none;
    }
    return fd;
}

void sn_wake_send(struct sn_world *world, uint32_t wake_id)
{
    struct sockaddr_un addr;
    socklen_t len = wake_address(world, wake_id, &addr);
    char token = 1;

    /* EAGAIN: the socket is full, so already readable. ECONNREFUSED: the owner closed it or is dead. Neither loses
     * anything. */
    if (sendto(sender_get(), &token, 1, MSG_DONTWAIT | MSG_NOSIGNAL, (struct sockaddr *)&addr, len) < 0 &&
        errno != EAGAIN && errno != ECONNREFUSED)
        sn_log("wake %u: sendto: errno %d (other network namespace?)", wake_id, errno);
}

int sn_wake_take(int fd)
{
    char token;

    return recv(fd, &token, 1, 0) < 0 ? -errno : 0;
}

/* A program that polls the descriptor and then reads must not block, as it would on a token without an event. A token
 * sent between taking the others and looking again stays, since its event is found. */
void sn_wake_settle(struct sn_world *world, int fd, uint32_t wake_id, bool (*is_left)(const void *of), const void *of)
{
    struct pollfd readable = {fd, POLLIN, 0};
    char token;

    if (!is_left(of))
        while (recv(fd, &token, 1, MSG_DONTWAIT) >= 0) /* also empty ones, which only a stranger sends */
            ;
    if (is_left(of) && poll(&readable, 1, 0) == 0)
        sn_wake_send(world, wake_id);
}

void sn_wake_forget(void)
{
    int fd = __atomic_exchange_n(&wake_sender, -1, __ATOMIC_ACQ_REL);

    if (fd >= 0)
        close(fd);
}

void sn_async_raise(struct sn_world *world, uint32_t ctx, uint32_t type, uint32_t element)
{
    struct sn_ctx_shm *c;
    bool first_lost = false;
    uint32_t wake_id;

    if (ctx >= SN_MAX_CTXS) /* of a damaged object */
        return;
    c = &world->ctxs[ctx];
    sn_lock_take(&c->lock);
    wake_id = c->owner ? c->wake_id : 0;
    if (wake_id && c->tail - c->head < SN_ASYNC_EVENTS) {
        c->events[c->tail % SN_ASYNC_EVENTS] = (struct sn_async){type, element};
        c->tail++;
    } else if (wake_id) {
        first_lost = c->lost++ == 0;
    }
    sn_lock_drop(&c->lock);
    if (first_lost)
        sn_log("opened device %u: %d asynchronous events are unread; event %u and those that follow are lost", ctx,
               (int)SN_ASYNC_EVENTS, type);
    if (wake_id)
        sn_wake_send(world, wake_id);
}

int sn_cable_set(struct sn_world *world, uint32_t dev, bool up)
{
    uint32_t was;

    if (dev >= world->dev_count || sn_device_is_dead(world, dev))
        return -EINVAL;
    was = __atomic_exchange_n(&world->devs[dev].port_up, up, __ATOMIC_ACQ_REL);
    for (uint32_t i = 0; was != up && i < world->ctx_slots.fresh; i++)
        if (__atomic_load_n(&world->ctxs[i].owner, __ATOMIC_ACQUIRE) && world->ctxs[i].dev == dev)
            sn_async_raise(world, i, up ? IBV_EVENT_PORT_ACTIVE : IBV_EVENT_PORT_ERR, 1);
    return 0;
}

int sn_device_kill(struct sn_world *world, uint32_t dev)
{
    if (dev >= world->dev_count)
        return -EINVAL;
    __atomic_store_n(&world->devs[dev].dead, 1, __ATOMIC_RELEASE); /* set first, so that later failures are silent */
    __atomic_store_n(&world->devs[dev].port_up, 0, __ATOMIC_RELEASE);
    for (uint32_t i = 0; i < world->ctx_slots.fresh; i++)
        if (__atomic_load_n(&world->ctxs[i].owner, __ATOMIC_ACQUIRE) && world->ctxs[i].dev == dev)
            sn_async_raise(world, i, IBV_EVENT_DEVICE_FATAL, 0);
    return 0;
}

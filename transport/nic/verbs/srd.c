/* SPDX-License-Identifier: Apache-2.0 */
/* AWS EFA's scalable reliable datagrams (SRD). Every byte arrives once, but nothing keeps order: neither the requests
 * of one queue nor their completions. The layers above learn what EFA lacks from the properties of prs_nic_srd: no
 * order, no fence, no atomics, and no inline payload.
 *
 * Connections share queue pairs (srd_pool.h), and with them completion queues, send slots and receives. A connection
 * that polls takes the completions of all connections: it returns its own, and keeps those of each other connection at
 * that connection's end. The queue pair cannot be stopped for one connection. So before a connection may end, it waits
 * until the NIC has completed its requests. */
#include "transport/nic/verbs/srd.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>

#include "transport/nic/verbs/device.h"
#include "transport/nic/verbs/verbs_nic.h"
#include "transport/util/error.h"
#include "transport/util/log.h"
#include "transport/util/patience.h"

enum {
    /* Limit for the requests of a connection that ends. A peer that answers completes them sooner, and EFA gives up on
     * a peer that does not answer. Only requests that wait for receives of a peer that does not poll take longer. */
    STOP_MS = 5000,
    STOP_LOOK_NS = 100000000, /* see prs_patience_begin() */
};

/* ---- open, close ---- */

/* Give the end its mail: from now on each thread that polls the queue pair notes there that something waits for this
 * end. A failure of the queue pair may wait already. */
static void add_use(struct srd_link *link, struct prs_srd_end *end)
{
    uint32_t i = 0;

    while (i < link->use_count && link->use[i].qp != end->qp)
        i++;
    if (i == link->use_count)
        link->use[link->use_count++].qp = end->qp;
    prs_srd_lock(end->qp);
    end->mail = &link->use[i].mail;
    if (end->kept)
        prs_srd_leave_mail(end);
    prs_srd_unlock(end->qp);
}

static struct prs_srd_end *new_end(struct prs_link *link, uint32_t id, uint32_t bit)
{
    struct prs_srd_end *end = calloc(1, sizeof(*end));

    if (!end) {
        prs_nic_fail(link->rail, ENOMEM, "queue");
        return NULL;
    }
    end->base = (struct prs_queue){.link = link, .id = id};
    end->bit = 1ull << bit;
    return end;
}

static void close_end(struct prs_queue *queue, int stream_fd)
{
    if (!queue)
        return;
    prs_srd_leave(prs_srd_end_of(queue), stream_fd);
    free(prs_srd_end_of(queue));
}

static void srd_kill(struct prs_link *base);

static void srd_close(struct prs_link *base)
{
    struct srd_link *link = to_srd_link(base);

    srd_kill(base);
    for (uint32_t i = 0; i < base->queue_count; i++)
        close_end(base->queue[i], base->stream_fd);
    close_end(base->loopback, -1);
    prs_srd_pool_close(link->pool);
    free(base->queue);
    free(link);
}

static int open_ends(struct srd_link *link, const struct prs_link_options *options)
{
    struct prs_link *base = &link->base;
    struct prs_verbs_port remote_port;
    int r = prs_verbs_read_port(options->remote_port, &remote_port);

    if (r)
        return r;
    base->queue = calloc(options->queues, sizeof(*base->queue));
    if (!base->queue)
        return prs_nic_fail(base->rail, ENOMEM, "link");
    while (base->queue_count < options->queues) {
        uint32_t id = options->ids[base->queue_count];
        struct prs_srd_end *end = new_end(base, id, base->queue_count);
        struct prs_verbs_queue remote;

        if (!end)
            return -ENOMEM;
        r = options->remote ? prs_verbs_read_queue(&options->remote[id], &remote) : 0;
        if (!r)
            r = prs_srd_join(link->pool, end, remote_port.gid, options->remote ? &remote : NULL, options->depth);
        if (r) {
            free(end);
            return r;
        }
        add_use(link, end);
        base->queue[base->queue_count++] = &end->base;
    }
    return 0;
}

static int srd_open(const struct prs_link_options *options, struct prs_link **out)
{
    const struct prs_rail *rail = options->rail;
    struct srd_link *link = calloc(1, sizeof(*link));
    int r;

    if (!link)
        return prs_nic_fail(rail, ENOMEM, "link");
    link->base = (struct prs_link){.ops = &prs_nic_srd, .rail = rail, .own = *options->own, .stream_fd = -1};
    link->base.overrun = &link->overrun;
    link->loopback_depth = options->loopback_depth;
    r = prs_srd_pool_open(rail, prs_verbs_own_port(options->own).gid_index, (uint16_t)options->config->pkey_index,
                          &link->pool);
    if (!r)
        r = open_ends(link, options);
    if (r) {
        srd_close(&link->base);
        return r;
    }
    *out = &link->base;
    return 0;
}

static struct prs_verbs_queue address_of(const struct prs_queue *base)
{
    return (struct prs_verbs_queue){.number = base->number, .start = ((const struct prs_srd_end *)base)->qp->key};
}

static void srd_address(const struct prs_queue *base, struct prs_nic_address *out)
{
    struct prs_verbs_queue address = address_of(base);

    prs_verbs_tell_queue(&address, out);
}

/* ---- connect ---- */

/* EFA rejects writes from peers that it has no address handle for, so both sides make theirs before the handshake
 * ends. */
static int srd_connect(struct prs_queue *base, const struct prs_nic_address *told, const struct prs_nic_address *port,
                       int *error)
{
    struct prs_verbs_queue address;
    int r = prs_verbs_read_queue(told, &address);

    (void)port; /* open() was told it */
    if (!r)
        r = prs_srd_connect(prs_srd_end_of(base), &address);
    if (r == -ETIMEDOUT || r == -EHOSTUNREACH || r == -ENETUNREACH || r == -EAGAIN) {
        *error = -r;
        return PRS_AGAIN;
    }
    if (r && r != -EPROTO)
        return prs_nic_fail(base->link->rail, -r,
                            "no address handle for the peer's GID; is it in the same subnet and security group?");
    return r;
}

static int srd_loopback(struct prs_link *base, uint32_t id, struct prs_queue **out)
{
    struct srd_link *link = to_srd_link(base);
    struct prs_verbs_queue own;
    struct prs_srd_end *end;
    int r;

    if (!base->loopback) {
        end = new_end(base, id, PRS_SRD_LOOPBACK);
        if (!end)
            return -ENOMEM;
        r = prs_srd_join_self(link->use[0].qp, end, prs_verbs_own_port(&base->own).port.gid, link->loopback_depth);
        if (r) {
            free(end);
            return r;
        }
        add_use(link, end);
        base->loopback = &end->base;
    }
    own = address_of(base->loopback);
    r = prs_srd_connect(prs_srd_end_of(base->loopback), &own);
    if (r)
        return prs_nic_fail(base->rail, -r, "no address handle for our own GID");
    *out = base->loopback;
    return 0;
}

/* ---- the end of a connection ---- */

static struct prs_srd_end *end_at(const struct srd_link *link, uint32_t i)
{
    return prs_srd_end_of(i < link->base.queue_count ? link->base.queue[i] : link->base.loopback);
}

/* Return how many requests of the link are in flight on the queue pair. *alone: no other link uses the queue pair. */
static uint32_t count_in_flight(const struct srd_link *link, const struct prs_srd_qp *qp, bool *alone)
{
    uint32_t count = 0;

    *alone = true;
    for (uint32_t i = 0; i < qp->slots; i++) {
        const struct prs_srd_end *end = qp->end[i];

        if (end && end->base.link == &link->base)
            count += end->in_flight;
        else if (end)
            *alone = false;
    }
    return count;
}

/* Late requests of this link could do harm, since their source and target may be reused after this. A queue pair that
 * no other link uses enters the error state. So does one whose requests do not end: its other connections then fail
 * too, which is better than wrong bytes. */
static void stop_use(struct srd_link *link, struct prs_srd_qp *qp)
{
    struct prs_patience patience = prs_patience_begin(STOP_LOOK_NS);
    bool alone;

    prs_srd_lock(qp);
    for (uint32_t i = 0; i <= link->base.queue_count; i++)
        if (end_at(link, i) && end_at(link, i)->qp == qp)
            prs_srd_stop_locked(end_at(link, i));
    while (count_in_flight(link, qp, &alone) && !alone && !qp->killed) {
        int taken = ibv_poll_cq(qp->cq, PRS_POLL_MOST, qp->wc);

        if (prs_srd_take_completions(qp, taken, NULL, NULL, 0) < 0 || prs_patience_is_over(&patience, STOP_MS)) {
            PRS_WARN("%s: requests of a connection that ends are still in flight after %d ms: closing queue %u, which "
                     "others share",
                     link->base.rail->info.name, STOP_MS, qp->queue.number);
            prs_srd_kill_locked(qp);
            break;
        }
        prs_srd_unlock(qp);
        sched_yield(); /* others post and poll */
        prs_srd_lock(qp);
    }
    if (alone)
        prs_srd_kill_locked(qp);
    prs_srd_unlock(qp);
}

static void srd_kill(struct prs_link *base)
{
    struct srd_link *link = to_srd_link(base);

    base->stopped = true;
    for (uint32_t i = 0; i < link->use_count; i++)
        stop_use(link, link->use[i].qp);
}

const struct prs_nic_ops prs_nic_srd = {
    .name = "srd",
    .network = "EFA",
    .in_order = false,
    .fails_early = true,
    .fence = false,
    .adds = false,
    PRS_VERBS_DEVICE_OPS,
    .open = srd_open,
    .close = srd_close,
    .kill = srd_kill,
    .address = srd_address,
    .connect = srd_connect,
    .loopback = srd_loopback,
    .post = prs_srd_post,
    .poll = prs_srd_poll,
};

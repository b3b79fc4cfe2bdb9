/* SPDX-License-Identifier: Apache-2.0 */
/* One virtual clock per link direction and one per NIC, in shared memory. A request starts at max(now, clock) and moves
 * the clock on by what it occupies, so that queueing comes out by itself. Nothing is placed or completed early: run.c
 * waits for the stamps. */
#include "tools/softnic/model.h"

#include "tools/softnic/lock.h"
#include "tools/softnic/object.h"

#define NS_PER_S 1000000000ull

static uint64_t later(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* A uniform number below n, reproducible from the seed, the queue pair and the position of the request (splitmix64's
 * finaliser). */
static uint64_t jitter_draw(const struct sn_config *config, uint32_t qpn, uint32_t position, uint64_t n)
{
    uint64_t x = config->seed * 0x9e3779b97f4a7c15ull + ((uint64_t)sn_qpn_index(qpn) << 32 | position);

    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return n ? (x ^ x >> 31) % n : 0;
}

/* Serialise ns on the sender's link from at on, and on the receiver's: cut-through, so the last bit arrives latency
 * after it left unless the receiver's link is busy with others. Return when it has arrived. A start that lies in the
 * future (behind a fence) takes its ns from the clocks but does not move them there: until then the link serves other
 * queue pairs. */
static uint64_t link_cross(struct sn_dev *from, struct sn_dev *to, uint64_t now, uint64_t at, uint64_t ns,
                           uint64_t latency)
{
    uint64_t left, arrived;

    sn_lock_take(&from->clock_lock);
    left = later(at, from->tx_free_at);
    from->tx_free_at = later(now, from->tx_free_at) + ns;
    sn_lock_drop(&from->clock_lock);
    sn_lock_take(&to->clock_lock);
    arrived = later(left + latency, to->rx_free_at) + ns;
    to->rx_free_at = later(left - at + now + latency, to->rx_free_at) + ns;
    sn_lock_drop(&to->clock_lock);
    return arrived;
}

/* The NIC is busy with one request after the other; as above, a queue pair that waits at a fence does not hold it. */
static uint64_t nic_start(struct sn_dev *dev, uint64_t now, uint64_t at, uint64_t cost)
{
    uint64_t start;

    sn_lock_take(&dev->clock_lock);
    start = later(at, dev->nic_free_at) + cost;
    dev->nic_free_at = later(now, dev->nic_free_at) + cost;
    sn_lock_drop(&dev->clock_lock);
    return start;
}

void sn_model_stamp(struct sn_qp *qp, struct sn_wqe *w, bool first)
{
    struct sn_world *world = sn_self->world;
    const struct sn_config *cfg = &world->config;
    struct sn_dev *mine = &world->devs[qp->ctx->dev], *theirs = &world->devs[qp->shm->dest_dev];
    uint64_t now = sn_now_ns(), at = now,
             ns = cfg->rate_bps ? (uint64_t)((__uint128_t)w->length * 8 * NS_PER_S / cfg->rate_bps) : 0;
    bool read = w->opcode == IBV_WR_RDMA_READ;
    bool round_trip = read || w->opcode == IBV_WR_ATOMIC_CMP_AND_SWP || w->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;

    w->due_exec = w->due_done = 0;
    if (!sn_model_on(cfg))
        return;
    at = nic_start(mine, now, at, cfg->wr_cost_ns + (first ? cfg->doorbell_cost_ns : 0));
    if (w->flags & IBV_SEND_FENCE) {
        at = later(at, cfg->fence_meaning == SN_FENCE_STRICT ? qp->last_done_due : qp->last_read_due);
        at = nic_start(mine, now, at, cfg->fence_cost_ns);
    }
    w->due_exec = read ? at + cfg->latency_ns : link_cross(mine, theirs, now, at, ns, cfg->latency_ns);
    w->due_exec += jitter_draw(cfg, qp->qpn, qp->tail, cfg->jitter_ns);
    w->due_exec = later(w->due_exec, qp->last_exec_due); /* one queue pair's requests do not overtake */
    w->due_done =
        read ? link_cross(theirs, mine, w->due_exec, w->due_exec, ns, cfg->latency_ns) : w->due_exec + cfg->latency_ns;
    w->due_done = later(w->due_done, qp->last_done_due);
    qp->last_exec_due = w->due_exec;
    qp->last_done_due = w->due_done;
    if (round_trip)
        qp->last_read_due = w->due_done;
}

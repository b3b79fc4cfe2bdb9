/* SPDX-License-Identifier: Apache-2.0 */
/* One virtual clock for each direction of each cable and one for each NIC, in shared memory. A request starts at
 * max(now, clock) and advances the clock by the time it takes, so queueing needs no code of its own. Nothing is written
 * or completed early: run.c waits for the stamps. */
#include "tools/softnic/nic/model.h"

#include "tools/softnic/nic/srd.h"
#include "tools/softnic/nic/window.h"
#include "tools/softnic/world/lock.h"
#include "tools/softnic/world/object.h"
#include "tools/softnic/world/queues.h"

enum { PURPOSE_ORDER = 1 << 10 /* draws for losses use the numbers below */ };
#define NS_PER_S 1000000000ull
#define BILLION  1000000000ull

static uint64_t later(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* A uniform number below n, reproducible from the seed, the queue pair, the position of the request and the purpose
 * (splitmix64's finalizer). */
static uint64_t draw(const struct sn_config *config, uint32_t qpn, uint32_t position, uint32_t purpose, uint64_t n)
{
    uint64_t x = (config->seed + ((uint64_t)purpose << 40)) * 0x9e3779b97f4a7c15ull +
                 ((uint64_t)sn_qpn_index(qpn) << 32 | position);

    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return n ? (x ^ x >> 31) % n : 0;
}

static uint64_t transfer_ns(const struct sn_dev *dev, uint64_t bytes)
{
    uint64_t rate_bps = __atomic_load_n(&dev->rate_bps, __ATOMIC_RELAXED);

    return rate_bps ? (uint64_t)((__uint128_t)bytes * 8 * NS_PER_S / rate_bps) : 0;
}

/* Send bytes over the sender's and the receiver's cable, each at its rate, from time `at` on. Forwarding is
 * cut-through: the last bit arrives one latency after it left, unless the receiver's cable is slower or busy. Return
 * the arrival time. A start in the future (after a fence) adds its duration to the clocks but does not move them to
 * that time: until then the cable serves other queue pairs. */
static uint64_t cable_cross(struct sn_dev *from, struct sn_dev *to, uint64_t now, uint64_t at, uint64_t bytes,
                            uint64_t latency)
{
    uint64_t tx_ns = transfer_ns(from, bytes), rx_ns = transfer_ns(to, bytes), left, arrived;

    sn_lock_take(&from->clock_lock);
    left = later(at, from->tx_free_at);
    from->tx_free_at = later(now, from->tx_free_at) + tx_ns;
    sn_lock_drop(&from->clock_lock);
    sn_lock_take(&to->clock_lock);
    arrived = later(later(left + latency, to->rx_free_at) + rx_ns, left + latency + tx_ns);
    to->rx_free_at = later(left - at + now + latency, to->rx_free_at) + rx_ns;
    sn_lock_drop(&to->clock_lock);
    return arrived;
}

/* The NIC handles one request at a time. A queue pair that waits at a fence does not occupy it (see cable_cross()). */
static uint64_t nic_start(struct sn_dev *dev, uint64_t now, uint64_t at, uint64_t cost)
{
    uint64_t start;

    sn_lock_take(&dev->clock_lock);
    start = later(at, dev->nic_free_at) + cost;
    dev->nic_free_at = later(now, dev->nic_free_at) + cost;
    sn_lock_drop(&dev->clock_lock);
    return start;
}

/* How long the initiator waits for an acknowledgement: what the queue pair asks for, at most the world's limit. A queue
 * pair without a timeout gets the limit. */
static uint64_t ack_timeout_ns(const struct sn_qp *qp)
{
    uint64_t cap = sn_self->world->config.retry_cap_ns / (qp->attr.retry_cnt + 1u);
    uint64_t asked = 4096ull << (qp->attr.timeout & 31);

    return qp->attr.timeout == 0 || asked > cap ? cap : asked;
}

struct losses {
    uint64_t request_ns, ack_ns; /* how much later the request, and then its acknowledgement, arrives */
    bool exceeded;               /* more losses in a row than retries: the request never arrives */
};

/* Each try crosses both cables there and back. Each loss costs the acknowledgement timeout. An unreliable message has
 * one try, and no acknowledgement. */
static struct losses draw_losses(const struct sn_qp *qp, uint32_t position, const struct sn_dev *mine,
                                 const struct sn_dev *theirs)
{
    const struct sn_config *config = &sn_self->world->config;
    uint64_t kept = BILLION - __atomic_load_n(&mine->loss_ppb, __ATOMIC_RELAXED);
    uint64_t timeout = ack_timeout_ns(qp);
    struct losses out = {0};
    bool there = false, unreliable = sn_qp_is_unreliable(qp);

    kept = kept * (BILLION - __atomic_load_n(&theirs->loss_ppb, __ATOMIC_RELAXED)) / BILLION;
    if (unreliable)
        out.exceeded = draw(config, qp->qpn, position, 1, BILLION) >= kept;
    if (unreliable || kept == BILLION)
        return out;
    for (uint32_t attempt = 0; attempt <= qp->attr.retry_cnt; attempt++) {
        if (draw(config, qp->qpn, position, 2 * attempt + 1, BILLION) < kept) {
            there = true;
            if (draw(config, qp->qpn, position, 2 * attempt + 2, BILLION) < kept)
                return out;
        }
        *(there ? &out.ack_ns : &out.request_ns) += timeout;
        sn_count(&sn_ctx_dev(qp->ctx)->counters.retries, attempt < qp->attr.retry_cnt);
    }
    out.request_ns += out.ack_ns;
    out.exceeded = true;
    return out;
}

void sn_model_stamp(struct sn_qp *qp, struct sn_wqe *w, uint32_t position, bool first, uint64_t now)
{
    struct sn_world *world = sn_self->world;
    const struct sn_config *cfg = &world->config;
    struct sn_dev *mine = &world->devs[qp->ctx->dev], *theirs;
    struct losses lost;
    uint64_t at = now, latency;
    bool read = w->opcode == IBV_WR_RDMA_READ, srd = sn_qp_is_srd(qp);
    bool round_trip = read || w->opcode == IBV_WR_ATOMIC_CMP_AND_SWP || w->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;

    w->due_exec = w->due_done = 0;
    w->lost = false;
    if (srd)
        w->due_exec = now + draw(cfg, qp->qpn, position, PURPOSE_ORDER, SN_SRD_SCATTER_NS);
    /* Requests to itself never use a cable, nor do those to an unknown address. */
    if (!sn_model_on(cfg) || w->dest_qpn == qp->qpn || w->dest_dev >= world->dev_count || sn_is_local(w->opcode))
        return;
    theirs = &world->devs[w->dest_dev];
    latency = later(__atomic_load_n(&mine->latency_ns, __ATOMIC_RELAXED),
                    __atomic_load_n(&theirs->latency_ns, __ATOMIC_RELAXED));
    at = nic_start(mine, now, at, cfg->wr_cost_ns + (first ? cfg->doorbell_cost_ns : 0));
    if (w->flags & IBV_SEND_FENCE) {
        at = later(at, cfg->fence_meaning == SN_FENCE_STRICT ? qp->last_done_due : qp->last_read_due);
        at = nic_start(mine, now, at, cfg->fence_cost_ns);
    }
    w->due_exec =
        (srd ? w->due_exec - now : 0) + (read ? at + latency : cable_cross(mine, theirs, now, at, w->length, latency));
    w->due_exec += draw(cfg, qp->qpn, position, 0, cfg->jitter_ns);
    lost = draw_losses(qp, position, mine, theirs);
    w->due_exec += lost.request_ns;
    w->lost = lost.exceeded;
    if (!srd) /* requests of one queue pair do not overtake each other */
        w->due_exec = later(w->due_exec, qp->last_exec_due);
    w->due_done =
        read ? cable_cross(theirs, mine, w->due_exec, w->due_exec, w->length, latency) : w->due_exec + latency;
    w->due_done += lost.ack_ns;
    if (sn_qp_is_unreliable(qp)) /* the bytes are taken from the sender's buffers only now */
        w->due_done = w->due_exec;
    if (!srd)
        w->due_done = later(w->due_done, qp->last_done_due);
    qp->last_exec_due = w->due_exec;
    qp->last_done_due = w->due_done;
    if (round_trip)
        qp->last_read_due = w->due_done;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/nic/verbs/srd_pool.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "transport/nic/verbs/device.h"
#include "transport/nic/verbs/efa.h"
#include "transport/nic/verbs/srd_linger.h"
#include "transport/util/error.h"
#include "transport/util/fork.h"
#include "transport/util/log.h"

enum {
    RNR_FOREVER = 7,   /* a slow receiver is not an error */
    SEND_DEPTH = 1024, /* of a queue pair: more in flight gains nothing */
    /* Arrivals of all connections of a queue pair that may wait to be taken. Half of the notifications of one (512) may
     * come at once; any thread that polls makes room for the others. */
    RECEIVE_DEPTH = 4096,
    FIRST_SLOTS = 16,
};

struct prs_srd_pool {
    struct prs_srd_pool *next;
    uint32_t refs;
    struct prs_rail rail; /* a copy: it may outlive the fabric of its first user, but not the domain */
    int gid_index;
    uint16_t pkey_index;
    struct prs_srd_qp *qps;
    struct prs_srd_handle *handles;
};

static pthread_mutex_t pools_lock = PTHREAD_MUTEX_INITIALIZER; /* protects pools, and the user counts in each */
static struct prs_srd_pool *pools;
PRS_RENEW_IN_CHILD(pools, pools_lock)

/* ---- pools ---- */

int prs_srd_pool_open(const struct prs_rail *rail, int gid_index, uint16_t pkey_index, struct prs_srd_pool **out)
{
    struct prs_srd_pool *pool;

    pthread_mutex_lock(&pools_lock);
    for (pool = pools; pool; pool = pool->next)
        if (pool->rail.domain == rail->domain && pool->rail.port == rail->port && pool->pkey_index == pkey_index)
            break;
    if (!pool) {
        pool = calloc(1, sizeof(*pool));
        if (pool) {
            pool->rail = *rail;
            pool->gid_index = gid_index;
            pool->pkey_index = pkey_index;
            pool->next = pools;
            pools = pool;
        }
    }
    if (pool)
        pool->refs++;
    pthread_mutex_unlock(&pools_lock);
    *out = pool;
    return pool ? 0 : prs_nic_fail(rail, ENOMEM, "queues");
}

void prs_srd_pool_close(struct prs_srd_pool *pool)
{
    struct prs_srd_pool **at = &pools;

    if (!pool)
        return;
    pthread_mutex_lock(&pools_lock);
    if (--pool->refs == 0) { /* the last end took the last queue pair and handle with it */
        while (*at != pool)
            at = &(*at)->next;
        *at = pool->next;
        free(pool);
    }
    pthread_mutex_unlock(&pools_lock);
}

/* ---- address handles ---- */

static struct prs_srd_handle *take_handle_locked(struct prs_srd_pool *pool, const uint8_t gid[16])
{
    struct prs_srd_handle *handle;

    for (handle = pool->handles; handle; handle = handle->next)
        if (!memcmp(handle->gid, gid, sizeof(handle->gid)))
            break;
    if (!handle) {
        handle = calloc(1, sizeof(*handle));
        if (!handle)
            return NULL;
        memcpy(handle->gid, gid, sizeof(handle->gid));
        handle->next = pool->handles;
        pool->handles = handle;
    }
    handle->refs++;
    return handle;
}

static void drop_handle_locked(struct prs_srd_pool *pool, struct prs_srd_handle *handle)
{
    struct prs_srd_handle **at = &pool->handles;

    if (!handle || --handle->refs)
        return;
    while (*at != handle)
        at = &(*at)->next;
    *at = handle->next;
    if (handle->ah && prs_verbs.destroy_ah(handle->ah))
        PRS_WARN("%s: cannot destroy an address handle", pool->rail.info.name);
    free(handle);
}

/* Return 0 or -errno, not logged. */
static int make_ah_locked(struct prs_srd_pool *pool, struct prs_srd_handle *handle)
{
    struct ibv_ah_attr attr = {
        .port_num = pool->rail.port, .is_global = 1, .grh = {.sgid_index = (uint8_t)pool->gid_index, .hop_limit = 255}};
    int r;

    if (handle->ah)
        return 0;
    memcpy(attr.grh.dgid.raw, handle->gid, sizeof(attr.grh.dgid.raw));
    errno = 0;
    handle->ah = prs_verbs.create_ah(prs_verbs_device(pool->rail.domain)->pd, &attr);
    if (!handle->ah)
        return errno ? -errno : -EIO;
    r = prs_efa_handle_number(handle->ah, &handle->number);
    if (r) {
        prs_verbs.destroy_ah(handle->ah);
        handle->ah = NULL;
    }
    return r;
}

/* ---- queue pairs ---- */

static int create_qp(struct prs_srd_qp *qp, uint32_t receives)
{
    const struct prs_rail *rail = &qp->pool->rail;
    struct ibv_qp_init_attr_ex attr = {
        .cap = {.max_send_wr = qp->depth, .max_recv_wr = receives, .max_send_sge = 1, .max_recv_sge = 1},
        .sq_sig_all = 1, /* EFA completes every request anyway */
        .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
        .pd = prs_verbs_device(rail->domain)->pd,
        .send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ,
    };

    errno = 0;
    qp->cq = prs_verbs.create_cq(prs_verbs_device(rail->domain)->context, (int)(qp->depth + receives), &qp->overrun,
                                 NULL, 0);
    if (!qp->cq)
        return prs_nic_fail(rail, errno, "cannot create a completion queue");
    attr.send_cq = attr.recv_cq = qp->cq;
    errno = 0;
    qp->qp = prs_efa_create_srd(prs_verbs_device(rail->domain)->context, &attr);
    if (!qp->qp)
        return prs_nic_fail(rail, errno,
                            "cannot create an SRD queue; out of locked memory, or of queues? An EFA has 256 for all "
                            "processes. Connections share them: k from one process to another need about the square "
                            "root of k at each side");
    qp->queue.number = qp->qp->qp_num;
    qp->ex = prs_verbs.qp_to_qp_ex(qp->qp);
    return qp->ex ? 0 : prs_nic_fail(rail, ENOSYS, "an SRD queue does not support posting by ibv_wr");
}

/* Bring the queue to RTS at once: a datagram queue needs no remote address for that. */
static int start_qp(struct prs_srd_qp *qp)
{
    const struct prs_rail *rail = &qp->pool->rail;
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT,
                               .pkey_index = qp->pool->pkey_index,
                               .port_num = rail->port,
                               .qkey = qp->key,
                               .rnr_retry = RNR_FOREVER};
    int rnr = prs_verbs_device(rail->domain)->rnr_retry ? IBV_QP_RNR_RETRY : 0, r;

    r = prs_verbs.modify_qp(qp->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY);
    if (r)
        return prs_nic_fail(rail, r, "SRD queue to INIT; is NCCL_IB_PKEY right?");
    attr.qp_state = IBV_QPS_RTR;
    r = prs_verbs.modify_qp(qp->qp, &attr, IBV_QP_STATE);
    if (r)
        return prs_nic_fail(rail, r, "SRD queue to RTR");
    attr.qp_state = IBV_QPS_RTS;
    r = prs_verbs.modify_qp(qp->qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN | rnr);
    return r ? prs_nic_fail(rail, r, "SRD queue to RTS") : 0;
}

static void free_qp(struct prs_srd_qp *qp)
{
    /* Destroying a queue pair returns only when the NIC no longer uses the memory of its requests. */
    if (qp->qp && prs_verbs.destroy_qp(qp->qp))
        PRS_WARN("%s: cannot destroy SRD queue %u", qp->pool->rail.info.name, qp->queue.number);
    if (qp->cq && prs_verbs.destroy_cq(qp->cq))
        PRS_WARN("%s: cannot destroy a completion queue", qp->pool->rail.info.name);
    prs_srd_linger_drop_all(qp);
    free(qp->arrival);
    free(qp->name);
    free(qp->end);
    free(qp);
}

static uint32_t at_most(uint32_t wanted, uint32_t limit)
{
    return limit && limit < wanted ? limit : wanted;
}

static int init_qp(struct prs_srd_qp *qp)
{
    const struct prs_domain *domain = qp->pool->rail.domain;
    struct prs_receive_sizes sizes = prs_receives_sizes(at_most(RECEIVE_DEPTH, domain->max_receive_wr));
    int r;

    qp->depth = at_most(SEND_DEPTH, domain->max_send_wr);
    qp->link.rail = &qp->pool->rail;
    qp->queue.link = &qp->link;
    qp->slots = FIRST_SLOTS;
    qp->name_mask = 2 * FIRST_SLOTS - 1;
    qp->end = calloc(qp->slots, sizeof(*qp->end));
    qp->name = calloc(qp->name_mask + 1, sizeof(*qp->name));
    qp->arrival = malloc(sizes.depth * sizeof(*qp->arrival));
    if (!qp->end || !qp->name || !qp->arrival)
        return prs_nic_fail(&qp->pool->rail, ENOMEM, "queue");
    for (uint32_t i = 0; i < sizes.depth; i++)
        qp->arrival[i].next = i + 1 < sizes.depth ? i + 1 : PRS_SRD_NONE;
    /* Random, so that requests meant for an earlier queue with this number are refused. */
    if (getrandom(&qp->key, sizeof(qp->key), 0) != sizeof(qp->key))
        return prs_nic_fail(&qp->pool->rail, errno, "getrandom");
    qp->key &= 0x7fffffff; /* the upper half belongs to privileged users */
    qp->dummy_sge = (struct ibv_sge){(uintptr_t)domain->scratch.addr, (uint32_t)domain->scratch.bytes,
                                     prs_own_memory_local_key(&domain->scratch, 0)};
    r = create_qp(qp, sizes.depth);
    if (!r)
        r = start_qp(qp);
    return r ? r : prs_receives_open(&qp->receives, &qp->queue, qp->qp, 0, &sizes, &qp->dummy_sge);
}

static int open_qp_locked(struct prs_srd_pool *pool, bool accepts, struct prs_srd_qp **out)
{
    struct prs_srd_qp *qp = calloc(1, sizeof(*qp));
    int r;

    if (!qp)
        return prs_nic_fail(&pool->rail, ENOMEM, "queue");
    qp->pool = pool;
    qp->accepts = accepts;
    r = init_qp(qp);
    if (r) {
        free_qp(qp);
        return r;
    }
    qp->next = pool->qps;
    pool->qps = qp;
    *out = qp;
    return 0;
}

void prs_srd_kill_locked(struct prs_srd_qp *qp)
{
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_ERR};

    if (qp->killed)
        return;
    qp->killed = qp->link.stopped = true;
    qp->line = NULL;
    for (uint32_t i = 0; i < qp->slots; i++)
        if (qp->end[i]) {
            qp->end[i]->closed = true;
            qp->end[i]->in_line = false;
        }
    prs_verbs.modify_qp(qp->qp, &attr, IBV_QP_STATE); /* fails only if it is in that state already */
}

/* ---- the choice of a queue pair ---- */

/* Has the queue pair a connection to that queue, or had it one of which something may still arrive? */
static bool is_taken_locked(struct prs_srd_qp *qp, const struct prs_srd_handle *to, uint32_t number)
{
    if (prs_srd_linger_has_locked(qp, to->gid, number))
        return true;
    for (uint32_t i = 0; i < qp->slots; i++)
        if (qp->end[i] && qp->end[i]->to == to && qp->end[i]->remote_number == number)
            return true;
    return false;
}

static uint32_t ends_to_locked(const struct prs_srd_qp *qp, const struct prs_srd_handle *to)
{
    uint32_t count = 0;

    for (uint32_t i = 0; i < qp->slots; i++)
        count += qp->end[i] && qp->end[i]->to == to && !qp->end[i]->to_itself;
    return count;
}

static bool is_usable_locked(struct prs_srd_qp *qp)
{
    bool usable;

    prs_srd_lock(qp);
    usable = !qp->killed && !qp->failed;
    prs_srd_unlock(qp);
    return usable;
}

/* For the listener: take the queue pair with the fewest connections to that rail. A further queue pair is made only
 * when each of n holds n connections, so that the connector, too, needs no more than n. */
static struct prs_srd_qp *choose_to_accept_locked(const struct prs_srd_pool *pool, const struct prs_srd_handle *to)
{
    struct prs_srd_qp *best = NULL;
    uint32_t best_ends = 0, count = 0;

    for (struct prs_srd_qp *qp = pool->qps; qp; qp = qp->next) {
        uint32_t ends = ends_to_locked(qp, to);

        if (!qp->accepts || !is_usable_locked(qp))
            continue;
        count++;
        if (!best || ends < best_ends || (ends == best_ends && qp->end_count < best->end_count)) {
            best = qp;
            best_ends = ends;
        }
    }
    return best_ends < count ? best : NULL;
}

/* For the connector: take a queue pair without a connection to that queue, and of those the one with the fewest
 * connections. */
static struct prs_srd_qp *choose_to_connect_locked(const struct prs_srd_pool *pool, const struct prs_srd_handle *to,
                                                   uint32_t number)
{
    struct prs_srd_qp *best = NULL;

    for (struct prs_srd_qp *qp = pool->qps; qp; qp = qp->next)
        if (!qp->accepts && is_usable_locked(qp) && !is_taken_locked(qp, to, number) &&
            (!best || qp->end_count < best->end_count))
            best = qp;
    return best;
}

/* ---- ends ---- */

/* The entry of the table of names that has this name, or the free one where it belongs. */
static struct prs_srd_name *entry_of(struct prs_srd_qp *qp, const struct prs_srd_end *end)
{
    uint64_t name = prs_srd_full_name(end->to->number, end->remote_number);
    uint32_t at = prs_srd_first_entry(qp, end->to->number, end->remote_number);

    while (qp->name[at].end && qp->name[at].name != name)
        at = (at + 1) & qp->name_mask;
    qp->name[at].name = name;
    return &qp->name[at];
}

/* Rebuild the table of names after it has grown. It has twice as many entries as there are slots. */
static void rename_ends(struct prs_srd_qp *qp)
{
    qp->name_mask = 2 * qp->slots - 1;
    memset(qp->name, 0, (qp->name_mask + 1) * sizeof(*qp->name));
    for (uint32_t i = 0; i < qp->slots; i++)
        if (qp->end[i] && qp->end[i]->named)
            entry_of(qp, qp->end[i])->end = qp->end[i];
}

/* Every message takes the lock that is held here, so the table is not rebuilt. Instead, each following entry moves up
 * if a search for it still finds it there. */
static void unname_locked(struct prs_srd_qp *qp, struct prs_srd_end *end)
{
    uint32_t mask = qp->name_mask, hole = (uint32_t)(entry_of(qp, end) - qp->name);

    for (uint32_t at = (hole + 1) & mask; qp->name[at].end; at = (at + 1) & mask) {
        uint64_t name = qp->name[at].name;
        uint32_t first = prs_srd_first_entry(qp, (uint32_t)(name >> 32), (uint32_t)name);

        if (((at - first) & mask) >= ((at - hole) & mask)) {
            qp->name[hole] = qp->name[at];
            hole = at;
        }
    }
    qp->name[hole].end = NULL;
    end->named = false;
}

/* Return a free slot, or PRS_SRD_NONE: no memory. */
static uint32_t find_slot(struct prs_srd_qp *qp)
{
    struct prs_srd_end **more;
    struct prs_srd_name *names;
    uint32_t slot = 0;

    while (slot < qp->slots && qp->end[slot])
        slot++;
    if (slot < qp->slots)
        return slot;
    more = realloc(qp->end, 2 * qp->slots * sizeof(*qp->end));
    if (!more)
        return PRS_SRD_NONE;
    qp->end = more;
    names = realloc(qp->name, 4 * qp->slots * sizeof(*qp->name));
    if (!names)
        return PRS_SRD_NONE;
    qp->name = names;
    memset(qp->end + qp->slots, 0, qp->slots * sizeof(*qp->end));
    qp->slots *= 2;
    rename_ends(qp);
    return slot;
}

/* Return 0, PRS_AGAIN (the queue pair has failed meanwhile) or -ENOMEM. */
static int place_locked(struct prs_srd_qp *qp, struct prs_srd_end *end)
{
    uint32_t slot = PRS_SRD_NONE;
    bool killed;

    prs_srd_lock(qp);
    killed = qp->killed || qp->failed;
    if (!killed)
        slot = find_slot(qp);
    if (slot != PRS_SRD_NONE) {
        qp->end[slot] = end;
        qp->end_count++;
    }
    prs_srd_unlock(qp);
    if (slot == PRS_SRD_NONE)
        return killed ? PRS_AGAIN : prs_nic_fail(end->base.link->rail, ENOMEM, "queue");
    end->qp = qp;
    end->base.number = qp->queue.number;
    end->wr_id_high = (uint64_t)slot << 32;
    return 0;
}

static void close_qp_locked(struct prs_srd_qp *qp)
{
    struct prs_srd_qp **at = &qp->pool->qps;

    while (*at != qp)
        at = &(*at)->next;
    *at = qp->next;
    free_qp(qp);
}

/* Return 0, PRS_AGAIN or -errno. */
static int choose_and_place_locked(struct prs_srd_pool *pool, struct prs_srd_end *end,
                                   const struct prs_verbs_queue *remote)
{
    struct prs_srd_qp *qp =
        remote ? choose_to_connect_locked(pool, end->to, remote->number) : choose_to_accept_locked(pool, end->to);
    int r = qp ? 0 : open_qp_locked(pool, !remote, &qp);

    if (r)
        return r;
    r = place_locked(qp, end);
    if (r && !qp->end_count)
        close_qp_locked(qp);
    return r;
}

static int join_locked(struct prs_srd_pool *pool, struct prs_srd_end *end, const uint8_t gid[16],
                       const struct prs_verbs_queue *remote, struct prs_srd_qp *own)
{
    int r = 0;

    end->first = PRS_SRD_NONE;
    end->to_itself = own;
    end->remote_number = remote ? remote->number : 0;
    end->linger = remote ? malloc(sizeof(*end->linger)) : NULL;
    end->to = take_handle_locked(pool, gid);
    if (!end->to || (remote && !end->linger))
        r = prs_nic_fail(&pool->rail, ENOMEM, "address handle");
    else if (own)
        r = place_locked(own, end) ? prs_nic_fail(&pool->rail, ECONNRESET, "the queue was closed") : 0;
    else
        do
            r = choose_and_place_locked(pool, end, remote);
        while (r == PRS_AGAIN);
    if (r) {
        drop_handle_locked(pool, end->to);
        free(end->linger);
    }
    return r;
}

static int join(struct prs_srd_pool *pool, struct prs_srd_end *end, const uint8_t gid[16],
                const struct prs_verbs_queue *remote, struct prs_srd_qp *qp, uint32_t depth)
{
    int r = prs_reorder_init(&end->reorder, depth) ? prs_nic_fail(&pool->rail, ENOMEM, "queue") : 0;

    if (r)
        return r;
    pthread_mutex_lock(&pools_lock);
    r = join_locked(pool, end, gid, remote, qp);
    pthread_mutex_unlock(&pools_lock);
    if (r)
        prs_reorder_fini(&end->reorder);
    return r;
}

int prs_srd_join(struct prs_srd_pool *pool, struct prs_srd_end *end, const uint8_t gid[16],
                 const struct prs_verbs_queue *remote, uint32_t depth)
{
    return join(pool, end, gid, remote, NULL, depth);
}

int prs_srd_join_self(struct prs_srd_qp *qp, struct prs_srd_end *end, const uint8_t own_gid[16], uint32_t depth)
{
    return join(qp->pool, end, own_gid, NULL, qp, depth);
}

/* Another end with this name belongs to a connection that is over: the queue of its remote process had the same number
 * as the one that connects now, but another key. */
static int give_name_locked(struct prs_srd_end *end)
{
    struct prs_srd_name *entry = entry_of(end->qp, end);

    if (entry->end && entry->end != end && entry->end->remote_key == end->remote_key)
        return prs_fail(-EPROTO, "the other side wants to use its queue %u for two connections to our queue %u",
                        end->remote_number, end->qp->queue.number);
    if (entry->end)
        entry->end->named = false;
    end->named = true;
    entry->end = end;
    return 0;
}

int prs_srd_connect(struct prs_srd_end *end, const struct prs_verbs_queue *remote)
{
    struct prs_srd_qp *qp = end->qp;
    int r;

    pthread_mutex_lock(&pools_lock);
    r = make_ah_locked(qp->pool, end->to);
    if (!r) {
        prs_srd_lock(qp);
        end->ah = end->to->ah;
        end->remote_number = remote->number;
        end->remote_key = remote->start;
        /* Requests of the queue to itself carry no immediate. */
        r = remote->number == qp->queue.number && remote->start == qp->key ? 0 : give_name_locked(end);
        prs_srd_unlock(qp);
    }
    pthread_mutex_unlock(&pools_lock);
    return r;
}

void prs_srd_leave(struct prs_srd_end *end, int stream_fd)
{
    struct prs_srd_qp *qp = end->qp;
    struct prs_srd_pool *pool;

    prs_reorder_fini(&end->reorder);
    if (!qp)
        return;
    pool = qp->pool;
    pthread_mutex_lock(&pools_lock);
    if (end->linger && end->named)
        prs_srd_linger_keep_locked(qp, end, stream_fd);
    else
        free(end->linger);
    prs_srd_lock(qp);
    qp->end[end->wr_id_high >> 32] = NULL;
    if (end->named)
        unname_locked(qp, end);
    prs_srd_unlock(qp);
    if (--qp->end_count == 0)
        close_qp_locked(qp);
    drop_handle_locked(pool, end->to);
    pthread_mutex_unlock(&pools_lock);
    end->qp = NULL;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "test/transport/dead_nic.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>

#include "test/transport/pair.h"
#include "transport/nic/verbs/device.h"
#include "transport/nic/verbs/rc.h"
#include "transport/nic/verbs/verbs_nic.h"
#include "transport/util/clock.h"

static struct ibv_context *dead;
static int (*modify_living)(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask);
static int (*poll_living)(struct ibv_cq *cq, int room, struct ibv_wc *wc);

static int modify_none(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
    return qp->context == dead ? EIO : modify_living(qp, attr, mask);
}

/* Completions that the NIC had written when it died. */
static struct {
    struct ibv_cq *cq;
    struct ibv_wc *wc;
    int count, at;
} completed;

/* It flushes nothing. */
static int poll_completed(struct ibv_cq *cq, int room, struct ibv_wc *wc)
{
    int count = 0;

    while (cq == completed.cq && count < room && completed.at < completed.count)
        wc[count++] = completed.wc[completed.at++];
    return count;
}

/* softnic's queues complete all receives after they were moved to the error state, and those that another process has
 * begun a little later. A dead NIC begins none. */
static void keep_completed(const struct prs_link *link)
{
    uint64_t give_up = prs_clock_ms() + PAIR_TIMEOUT_MS / 2;
    uint32_t receives = 0;
    struct ibv_wc wc;

    completed.cq = prs_rc_queue_pair(link->queue[0])->recv_cq;
    for (uint32_t i = 0; i < link->queue_count; i++) {
        const struct prs_receives *r = &((const struct rc_queue *)link->queue[i])->receives;

        must(r->qp->recv_cq == completed.cq, "a completion queue for each queue");
        receives += r->depth - r->consumed;
    }
    while (receives > 0) {
        int count = poll_living(completed.cq, 1, &wc);

        must(count >= 0 && prs_clock_ms() < give_up, "%u receives do not complete", receives);
        if (count == 0) {
            sched_yield();
            continue;
        }
        receives -= (wc.wr_id & PRS_ARRIVAL_BIT) != 0;
        if (wc.status != IBV_WC_SUCCESS)
            continue;
        completed.wc = realloc(completed.wc, (size_t)(completed.count + 1) * sizeof(wc));
        must(completed.wc != NULL, "no memory");
        completed.wc[completed.count++] = wc;
    }
}

void dead_nic_kill(const struct prs_link *link)
{
    struct ibv_qp_attr silent = {.qp_state = IBV_QPS_ERR};
    struct prs_domain *domain = link->rail->domain;

    dead = prs_verbs_device(domain)->context;
    modify_living = prs_verbs.modify_qp;
    poll_living = dead->ops.poll_cq;
    for (uint32_t i = 0; i < link->queue_count; i++)
        modify_living(prs_rc_queue_pair(link->queue[i]), &silent, IBV_QP_STATE);
    if (link->loopback)
        modify_living(prs_rc_queue_pair(link->loopback), &silent, IBV_QP_STATE);
    keep_completed(link);
    prs_verbs.modify_qp = modify_none;
    dead->ops.poll_cq = poll_completed;
    prs_domain_lose(domain, "local catastrophic error");
}

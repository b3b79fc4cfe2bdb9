/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TEST_HOPPER_LOSE_QUEUES_H
#define TEST_HOPPER_LOSE_QUEUES_H

#include <criterion/criterion.h>

#include "fused/core/context.h"
#include "fused/core/network.h"
#include "transport/nic/verbs/srd_pool.h"
#include "transport/peer/peer.h"

/* This rank's queues to a rank of another node go into the error state. */
static void lose_queues(struct prs_fused *ctx, uint32_t rank)
{
    struct ibv_qp_attr failed = {.qp_state = IBV_QPS_ERR};
    struct prs_peer *peer;

    cr_assert_eq(prs_team_peer(ctx->network->team, 0, rank, &peer), 0);
    if (peer->nic->in_order)
        peer->nic->stop(peer->link[0]);
    else /* connections share the queue pairs of SRD, which has no stop() */
        for (uint32_t i = 0; i < peer->link[0]->queue_count; i++)
            prs_verbs.modify_qp(((struct prs_srd_end *)peer->link[0]->queue[i])->qp->qp, &failed, IBV_QP_STATE);
}

#endif

/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>

#include "test/support/fake_verbs.h"
#include "transport/verbs.h"

struct fake_verbs fake_verbs;

static int count_receives(struct ibv_qp *to, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    for (; wr; wr = wr->next, fake_verbs.posted_receives++)
        fake_verbs.receive_pieces += (uint32_t)wr->num_sge;
    return 0;
}

static int bring(struct ibv_cq *from, int most, struct ibv_wc *wc)
{
    int count = 0;

    while (count < most && fake_verbs.queued_taken < fake_verbs.queued_count)
        wc[count++] = fake_verbs.queued[fake_verbs.queued_taken++];
    return count;
}

static struct ibv_cq *make_cq(struct ibv_context *on, int cqe, void *user, struct ibv_comp_channel *channel, int vector)
{
    fake_verbs.cq.context = on;
    return &fake_verbs.cq;
}

static int drop_cq(struct ibv_cq *which)
{
    return 0;
}

static struct ibv_qp *make_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
    fake_verbs.asked_receives = attr->cap.max_recv_wr;
    fake_verbs.qp.qp_base.context = &fake_verbs.context;
    return &fake_verbs.qp.qp_base;
}

static int change_qp(struct ibv_qp *which, struct ibv_qp_attr *attr, int mask)
{
    return 0;
}

static int drop_qp(struct ibv_qp *which)
{
    return 0;
}

static struct ibv_qp_ex *to_ex(struct ibv_qp *which)
{
    return &fake_verbs.qp;
}

static struct ibv_ah *make_ah(struct ibv_pd *pd, struct ibv_ah_attr *attr)
{
    return &fake_verbs.ah;
}

static int drop_ah(struct ibv_ah *which)
{
    return 0;
}

static const char *name_status(enum ibv_wc_status status)
{
    return "a status";
}

void fake_verbs_install(void)
{
    fake_verbs.context.ops.post_recv = count_receives;
    fake_verbs.context.ops.poll_cq = bring;
    prs_verbs.create_cq = make_cq;
    prs_verbs.destroy_cq = drop_cq;
    prs_verbs.create_qp = make_qp;
    prs_verbs.modify_qp = change_qp;
    prs_verbs.destroy_qp = drop_qp;
    prs_verbs.qp_to_qp_ex = to_ex;
    prs_verbs.create_ah = make_ah;
    prs_verbs.destroy_ah = drop_ah;
    prs_verbs.wc_status_str = name_status;
}

void fake_verbs_complete(struct ibv_wc wc)
{
    cr_assert_lt(fake_verbs.queued_count, sizeof(fake_verbs.queued) / sizeof(*fake_verbs.queued));
    fake_verbs.queued[fake_verbs.queued_count++] = wc;
}

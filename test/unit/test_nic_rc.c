/* SPDX-License-Identifier: Apache-2.0 */
/* The RC back end on devices smaller than any we have: verbs that only count. */
#include "transport/nic.h"
#include "transport/verbs.h"

#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <string.h>

static struct ibv_context context;
static struct ibv_cq cq;
static struct ibv_qp qp;
static uint32_t asked_receives, posted_receives, arrivals;

static int count_receives(struct ibv_qp *to, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    for (; wr; wr = wr->next)
        posted_receives++;
    return 0;
}

static int bring_arrivals(struct ibv_cq *from, int most, struct ibv_wc *wc)
{
    int count = 0;

    for (; arrivals > 0 && count < most; arrivals--, count++)
        wc[count] = (struct ibv_wc){.wr_id = 1ull << 63, .opcode = IBV_WC_RECV_RDMA_WITH_IMM, .status = IBV_WC_SUCCESS};
    return count;
}

static struct ibv_cq *make_cq(struct ibv_context *on, int cqe, void *user, struct ibv_comp_channel *channel, int vector)
{
    cq.context = on;
    return &cq;
}

static int drop_cq(struct ibv_cq *which)
{
    return 0;
}

static struct ibv_qp *make_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
    asked_receives = attr->cap.max_recv_wr;
    qp.context = &context;
    return &qp;
}

static int change_qp(struct ibv_qp *which, struct ibv_qp_attr *attr, int mask)
{
    return 0;
}

static int drop_qp(struct ibv_qp *which)
{
    return 0;
}

struct row {
    uint32_t depth;    /* what the device takes */
    uint32_t receives; /* are posted at first */
    uint32_t batch;    /* after so many arrivals there are more */
};

ParameterizedTestParameters(nic_rc, small_devices_get_receives_too)
{
    static struct row rows[] = {{1, 1, 1},    {2, 2, 1},      {16, 16, 8},     {63, 62, 31},
                                {64, 64, 32}, {100, 100, 50}, {1024, 1024, 64}};

    return cr_make_param_array(struct row, rows, sizeof rows / sizeof *rows);
}

ParameterizedTest(struct row *row, nic_rc, small_devices_get_receives_too)
{
    static const struct prs_config config;
    struct prs_domain domain = {.context = &context};
    struct prs_rail rail = {.domain = &domain, .port = 1};
    uint32_t id = 0;
    struct prs_link_options options = {
        .rail = &rail, .config = &config, .queues = 1, .ids = &id, .depth = 64, .receive_depth = row->depth};
    struct prs_event events[PRS_POLL_MOST];
    struct prs_link *link;

    context.ops.post_recv = count_receives;
    context.ops.poll_cq = bring_arrivals;
    prs_verbs.create_cq = make_cq;
    prs_verbs.destroy_cq = drop_cq;
    prs_verbs.create_qp = make_qp;
    prs_verbs.modify_qp = change_qp;
    prs_verbs.destroy_qp = drop_qp;
    cr_assert_eq(prs_nic_rc.open(&options, &link), 0);
    cr_assert_leq(asked_receives, row->depth);
    cr_assert_eq(posted_receives, row->receives, "of %u: %u are posted, want %u", row->depth, posted_receives,
                 row->receives);
    for (uint32_t i = 1; i <= row->batch; i++) {
        cr_assert_eq(posted_receives, row->receives, "after %u arrivals", i - 1);
        arrivals = 1;
        cr_assert_eq(prs_nic_rc.poll(link, events), 1);
    }
    cr_assert_eq(posted_receives, row->receives + row->batch, "after %u arrivals", row->batch);
    prs_nic_rc.close(link);
}

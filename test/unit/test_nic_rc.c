/* SPDX-License-Identifier: Apache-2.0 */
/* The RC back end on devices with smaller queues than any real device that we have. */
#include <criterion/criterion.h>
#include <criterion/parameterized.h>

#include "test/support/fake_verbs.h"
#include "transport/nic.h"

struct row {
    uint32_t depth;    /* entries of the receive queue */
    uint32_t receives; /* posted when the queue is created */
    uint32_t batch;    /* number of arrivals after which more are posted */
};

ParameterizedTestParameters(nic_rc, small_devices_get_receives_too)
{
    static struct row rows[] = {{1, 1, 1},    {2, 2, 1},      {16, 16, 8},     {63, 62, 31},
                                {64, 64, 32}, {100, 100, 50}, {1024, 1024, 64}};

    return cr_make_param_array(struct row, rows, sizeof(rows) / sizeof(*rows));
}

ParameterizedTest(struct row *row, nic_rc, small_devices_get_receives_too)
{
    static const struct prs_config config;
    struct prs_domain domain = {.context = &fake_verbs.context};
    struct prs_rail rail = {.domain = &domain, .port = 1};
    uint32_t id = 0;
    struct prs_link_options options = {
        .rail = &rail, .config = &config, .queues = 1, .ids = &id, .depth = 64, .receive_depth = row->depth};
    struct prs_event events[PRS_POLL_MOST];
    struct prs_link *link;

    fake_verbs_install();
    cr_assert_eq(prs_nic_rc.open(&options, &link), 0);
    cr_assert_leq(fake_verbs.asked_receives, row->depth);
    cr_assert_eq(fake_verbs.posted_receives, row->receives, "of %u: %u are posted, want %u", row->depth,
                 fake_verbs.posted_receives, row->receives);
    for (uint32_t i = 1; i <= row->batch; i++) {
        cr_assert_eq(fake_verbs.posted_receives, row->receives, "after %u arrivals", i - 1);
        fake_verbs_complete((struct ibv_wc){.wr_id = 1ull << 63, .opcode = IBV_WC_RECV_RDMA_WITH_IMM});
        cr_assert_eq(prs_nic_rc.poll(link, events), 1);
    }
    cr_assert_eq(fake_verbs.posted_receives, row->receives + row->batch, "after %u arrivals", row->batch);
    prs_nic_rc.close(link);
}

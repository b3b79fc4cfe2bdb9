/* SPDX-License-Identifier: Apache-2.0 */
/* The SRD back end alone. Its device is fake: each test chooses the order of the completions. */
#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <errno.h>
#include <string.h>

#include "test/support/fake_verbs.h"
#include "transport/efa.h"
#include "transport/nic.h"

enum { DEPTH = 64, RECEIVES = 8 };

static struct ibv_mr scratch_mr = {.lkey = 77};
static char scratch[64];
static struct {
    uint64_t wr_id;
    struct ibv_sge sge;
    uint32_t number, key;
} sent[DEPTH], now;
static uint32_t sent_count, session_count;
static bool aborted;

/* ---- the device ---- */

struct ibv_qp *prs_efa_create_srd(struct ibv_context *on, struct ibv_qp_init_attr_ex *attr)
{
    fake_verbs.qp.qp_base.context = on;
    fake_verbs.qp.qp_base.qp_num = 5;
    return &fake_verbs.qp.qp_base;
}

void prs_efa_claim(struct prs_domain *domain)
{
    (void)domain;
}

static void start(struct ibv_qp_ex *ex)
{
    session_count = 0;
    aborted = false;
}

static int complete(struct ibv_qp_ex *ex)
{
    sent_count += session_count;
    return 0;
}

static void drop(struct ibv_qp_ex *ex)
{
    aborted = true;
}

static void operate(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t remote_addr)
{
    now.wr_id = ex->wr_id;
    cr_assert_eq(ex->wr_flags, IBV_SEND_SIGNALED, "EFA takes no other requests");
}

static void operate_imm(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t remote_addr, __be32 imm)
{
    operate(ex, rkey, remote_addr);
}

static void set_sge(struct ibv_qp_ex *ex, uint32_t lkey, uint64_t addr, uint32_t length)
{
    now.sge = (struct ibv_sge){addr, length, lkey};
}

static void set_addr(struct ibv_qp_ex *ex, struct ibv_ah *to, uint32_t number, uint32_t key)
{
    cr_assert_eq(to, &fake_verbs.ah);
    now.number = number;
    now.key = key;
    sent[(sent_count + session_count++) % DEPTH] = now;
}

/* ---- the queue ---- */

static struct prs_link *open_link(void)
{
    static const struct prs_config config;
    static struct prs_domain domain = {
        .context = &fake_verbs.extended.context, .scratch = scratch, .scratch_mr = &scratch_mr};
    static struct prs_rail rail = {.domain = &domain, .port = 1};
    static const struct prs_rail_address own;
    static uint32_t id = 3;
    struct prs_link_options options = {.rail = &rail,
                                       .own = &own,
                                       .config = &config,
                                       .queues = 1,
                                       .ids = &id,
                                       .depth = DEPTH,
                                       .receive_depth = RECEIVES};
    struct prs_queue_address address = {9, 1234};
    struct prs_link_remote remote = {{0}};
    struct prs_link *link;
    int error;

    fake_verbs_install();
    fake_verbs.qp = (struct ibv_qp_ex){.wr_start = start,
                                       .wr_complete = complete,
                                       .wr_abort = drop,
                                       .wr_rdma_write = operate,
                                       .wr_rdma_write_imm = operate_imm,
                                       .wr_rdma_read = operate,
                                       .wr_set_sge = set_sge,
                                       .wr_set_ud_addr = set_addr};
    cr_assert_eq(prs_nic_srd.open(&options, &link), 0);
    cr_assert_eq(prs_nic_srd.connect(link->queue[0], &address, &remote, &error), 0);
    return link;
}

static void post(struct prs_link *link, uint32_t count)
{
    static struct prs_wr ring[DEPTH];

    for (uint32_t i = 0; i < count; i++)
        ring[i] = (struct prs_wr){.len_bytes = 8, .opcode = PRS_WR_WRITE, .flags = PRS_WR_SIGNALED};
    cr_assert_eq(prs_nic_srd.post(link->queue[0], ring, DEPTH - 1, 0, count), 0);
    cr_assert(sent[0].number == 9 && sent[0].key == 1234, "to the peer's queue, with its key");
}

Test(nic_srd, completions_in_any_order_come_out_in_that_of_posting)
{
    struct prs_link *link = open_link();
    struct prs_event events[PRS_POLL_MOST];
    uint32_t next = 0;
    int count;

    post(link, 40);
    for (int i = 39; i > 0; i--)
        fake_verbs_complete((struct ibv_wc){.wr_id = sent[i].wr_id, .opcode = IBV_WC_RDMA_WRITE});
    for (int i = 0; i < 4; i++)
        cr_assert_eq(prs_nic_srd.poll(link, events), 0, "the first is missing");
    fake_verbs_complete((struct ibv_wc){.wr_id = sent[0].wr_id, .opcode = IBV_WC_RDMA_WRITE});
    while ((count = prs_nic_srd.poll(link, events)) > 0)
        for (int i = 0; i < count; i++)
            cr_assert(events[i].kind == PRS_EVENT_DONE && events[i].queue == 3 && events[i].value == next++,
                      "%u, not %u", events[i].value, next - 1);
    cr_assert_eq(next, 40u);
    prs_nic_srd.close(link);
}

Test(nic_srd, a_completion_of_what_is_not_in_flight_is_an_error)
{
    struct prs_link *link = open_link();
    struct prs_event events[PRS_POLL_MOST];

    post(link, 2);
    fake_verbs_complete((struct ibv_wc){.wr_id = sent[1].wr_id + 1});
    cr_assert_eq(prs_nic_srd.poll(link, events), -EPROTO);
    prs_nic_srd.close(link);
}

Test(nic_srd, arrivals_are_replaced_by_receives_with_a_piece_of_memory)
{
    struct prs_link *link = open_link();
    struct prs_event events[PRS_POLL_MOST];

    cr_assert_eq(fake_verbs.posted_receives, RECEIVES);
    for (int i = 0; i < RECEIVES / 2; i++)
        fake_verbs_complete((struct ibv_wc){
            .wr_id = 1ull << 63 | 3, .opcode = IBV_WC_RECV_RDMA_WITH_IMM, .imm_data = htonl(42), .byte_len = 100});
    cr_assert_eq(prs_nic_srd.poll(link, events), RECEIVES / 2);
    cr_assert(events[0].kind == PRS_EVENT_ARRIVAL && events[0].value == 42 && events[0].bytes == 100 &&
              events[0].queue == 3);
    cr_assert_eq(fake_verbs.posted_receives, RECEIVES + RECEIVES / 2);
    cr_assert_eq(fake_verbs.receive_pieces, fake_verbs.posted_receives, "EFA posts nothing for a receive without any");
    prs_nic_srd.close(link);
}

Test(nic_srd, zero_bytes_come_from_registered_memory)
{
    struct prs_link *link = open_link();
    struct prs_wr wr = {.opcode = PRS_WR_WRITE_IMM};

    cr_assert_eq(prs_nic_srd.post(link->queue[0], &wr, 0, 0, 1), 0);
    cr_assert(sent[0].sge.lkey == 77 && sent[0].sge.length == 0);
    prs_nic_srd.close(link);
}

Test(nic_srd, what_the_properties_deny_is_refused)
{
    struct prs_link *link = open_link();
    struct prs_wr add = {.opcode = PRS_WR_ADD, .len_bytes = 8};
    struct prs_wr fenced = {.opcode = PRS_WR_WRITE, .len_bytes = 8, .flags = PRS_WR_FENCE};

    cr_assert_eq(prs_nic_srd.post(link->queue[0], &add, 0, 0, 1), -EOPNOTSUPP);
    cr_assert(aborted);
    cr_assert_eq(prs_nic_srd.post(link->queue[0], &fenced, 0, 0, 1), -EOPNOTSUPP);
    cr_assert(aborted && sent_count == 0);
    cr_assert_not(prs_nic_srd.in_order || prs_nic_srd.fence || prs_nic_srd.adds);
    prs_nic_srd.close(link);
}

struct row {
    enum ibv_wc_status status;
    int error;
    char cause[24]; /* a word of the error text */
};

ParameterizedTestParameters(nic_srd, failures_are_named)
{
    static struct row rows[] = {
        {IBV_WC_RESP_TIMEOUT_ERR, -ETIMEDOUT, "unresponsive"},
        {IBV_WC_REM_INV_RD_REQ_ERR, -ECONNRESET, "died"},
        {IBV_WC_REM_OP_ERR, -ECONNRESET, "address handle"},
        {IBV_WC_REM_ACCESS_ERR, -EREMOTEIO, "key"},
        {IBV_WC_LOC_QP_OP_ERR, -EIO, "address handle"},
        {IBV_WC_LOC_PROT_ERR, -EIO, "registered"},
        {IBV_WC_RNR_RETRY_EXC_ERR, -ETIMEDOUT, "poll"},
        {IBV_WC_WR_FLUSH_ERR, -ECONNRESET, "closed"},
        {IBV_WC_LOC_LEN_ERR, -EIO, "longer"},
        {IBV_WC_GENERAL_ERR, -EIO, "log"},
    };

    return cr_make_param_array(struct row, rows, sizeof(rows) / sizeof(*rows));
}

ParameterizedTest(struct row *row, nic_srd, failures_are_named)
{
    struct prs_link *link = open_link();
    struct prs_event events[PRS_POLL_MOST];

    post(link, 1);
    fake_verbs_complete((struct ibv_wc){.wr_id = sent[0].wr_id, .status = row->status, .vendor_err = 6});
    cr_assert_eq(prs_nic_srd.poll(link, events), 1);
    cr_assert(events[0].kind == PRS_EVENT_ERROR && events[0].queue == 3 && events[0].error == row->error &&
                  events[0].vendor == 6 && events[0].status == (int)row->status && strstr(events[0].cause, row->cause),
              "%d: %d, %s", (int)row->status, events[0].error, events[0].cause);
    prs_nic_srd.close(link);
}

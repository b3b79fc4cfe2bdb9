/* SPDX-License-Identifier: Apache-2.0 */
/* The SRD back end alone. Its device is fake: each test chooses the order of the completions. */
#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <errno.h>
#include <string.h>

#include "test/support/fake_srd.h"
#include "transport/util/clock.h"
#include "transport/util/error.h"

/* Two ranks, and one side of the pair. */
static struct fake_srd_pair pair;

static struct prs_link *open_link(void)
{
    fake_srd_install();
    pair = fake_srd_connect(1, 0);
    return pair.connecting;
}

static void close_pair(struct fake_srd_pair which)
{
    fake_srd_close(which.accepting, -1);
    fake_srd_close(which.connecting, -1);
}

static void post(struct prs_link *link, uint32_t count)
{
    struct prs_verbs_queue peer = fake_srd_address(pair.accepting);

    cr_assert_eq(fake_srd_post(link, 0, count), 0);
    cr_assert(fake_srd.sent[0].number == peer.number && fake_srd.sent[0].key == peer.start,
              "to the peer's queue, with its key");
}

Test(nic_srd, completions_in_any_order_come_out_in_that_of_posting)
{
    struct prs_link *link = open_link();
    struct prs_event events[PRS_POLL_MOST];
    uint32_t next = 0;
    int count;

    post(link, 40);
    for (int i = 39; i > 0; i--)
        fake_srd_finish(&fake_srd.sent[i], IBV_WC_SUCCESS);
    for (int i = 0; i < 4; i++)
        cr_assert_eq(prs_nic_srd.poll(link, events), 0, "the first is missing");
    fake_srd_finish(&fake_srd.sent[0], IBV_WC_SUCCESS);
    while ((count = prs_nic_srd.poll(link, events)) > 0)
        for (int i = 0; i < count; i++)
            cr_assert(events[i].kind == PRS_EVENT_DONE && events[i].queue == 3 && events[i].value == next++,
                      "%u, not %u", events[i].value, next - 1);
    cr_assert_eq(next, 40u);
    close_pair(pair);
    cr_assert(fake_srd.alive == 0 && fake_srd.handles == 0, "%u queue pairs, %u handles remain", fake_srd.alive,
              fake_srd.handles);
}

/* As the order engine leaves slots out when nothing is in flight. */
Test(nic_srd, positions_may_leave_some_out_when_nothing_is_in_flight)
{
    static const uint32_t first[] = {0, 64, 128, -64u, 0};
    struct prs_link *link = open_link();
    struct prs_event events[PRS_POLL_MOST];

    for (size_t i = 0; i < sizeof(first) / sizeof(*first); i++) {
        uint32_t sent = fake_srd.sent_count;

        cr_assert_eq(fake_srd_post(link, first[i], 2), 0);
        fake_srd_finish(&fake_srd.sent[sent + 1], IBV_WC_SUCCESS);
        cr_assert_eq(prs_nic_srd.poll(link, events), 0, "row %zu: the first is missing", i);
        fake_srd_finish(&fake_srd.sent[sent], IBV_WC_SUCCESS);
        cr_assert_eq(prs_nic_srd.poll(link, events), 2, "row %zu", i);
        cr_assert(events[0].value == first[i] && events[1].value == first[i] + 1, "row %zu", i);
    }
    close_pair(pair);
}

Test(nic_srd, a_completion_of_what_is_not_in_flight_is_an_error)
{
    struct prs_link *link = open_link();
    struct prs_event events[PRS_POLL_MOST];
    struct fake_srd_sent unknown;

    post(link, 2);
    unknown = fake_srd.sent[1];
    unknown.wr_id++;
    fake_srd_finish(&unknown, IBV_WC_SUCCESS);
    cr_assert_eq(prs_nic_srd.poll(link, events), -EPROTO);
    close_pair(pair);
}

Test(nic_srd, arrivals_are_replaced_by_receives_with_a_piece_of_memory)
{
    struct prs_link *link = open_link();
    struct fake_srd_qp *qp = fake_srd_qp_of(link);
    struct prs_event events[PRS_POLL_MOST];
    uint32_t receives = qp->posted_receives;

    cr_assert_eq(receives, fake_srd.max_receive_wr);
    for (uint32_t i = 0; i < 64; i++) /* a batch */
        fake_srd_arrive(link, pair.accepting, 42, 100);
    for (int i = 0; i < 4; i++)
        cr_assert_eq(prs_nic_srd.poll(link, events), PRS_POLL_MOST);
    cr_assert(events[0].kind == PRS_EVENT_ARRIVAL && events[0].value == 42 && events[0].bytes == 100 &&
              events[0].queue == 3);
    cr_assert_eq(qp->posted_receives, receives + 64);
    cr_assert_eq(qp->pieces, qp->posted_receives, "EFA posts nothing for a receive without any");
    close_pair(pair);
}

Test(nic_srd, zero_bytes_come_from_registered_memory)
{
    struct prs_link *link = open_link();
    struct prs_wr wr = {.opcode = PRS_WR_WRITE_IMM};

    cr_assert_eq(prs_nic_srd.post(link->queue[0], &wr, 0, 0, 1), 0);
    cr_assert(fake_srd.sent[0].sge.lkey == 77 && fake_srd.sent[0].sge.length == 0);
    close_pair(pair);
}

Test(nic_srd, what_the_properties_deny_is_refused)
{
    struct prs_link *link = open_link();
    struct prs_wr add = {.opcode = PRS_WR_ADD, .len_bytes = 8};
    struct prs_wr fenced = {.opcode = PRS_WR_WRITE, .len_bytes = 8, .flags = PRS_WR_FENCE};

    cr_assert_eq(prs_nic_srd.post(link->queue[0], &add, 0, 0, 1), -EOPNOTSUPP);
    cr_assert(fake_srd.aborted);
    cr_assert_eq(prs_nic_srd.post(link->queue[0], &fenced, 0, 0, 1), -EOPNOTSUPP);
    cr_assert(fake_srd.aborted && fake_srd.sent_count == 0);
    cr_assert_not(prs_nic_srd.in_order || prs_nic_srd.fence || prs_nic_srd.adds);
    close_pair(pair);
}

Test(nic_srd, a_key_of_more_than_32_bits_is_refused_by_name)
{
    struct prs_link *link = open_link();
    struct prs_wr ring[2] = {{.opcode = PRS_WR_WRITE, .len_bytes = 8, .remote_key = 7},
                             {.opcode = PRS_WR_WRITE, .len_bytes = 8, .remote_key = 0x100000007}};

    cr_assert_eq(prs_nic_srd.post(link->queue[0], ring, 1, 0, 2), -EKEYREJECTED);
    cr_assert(strstr(prs_error_last(), "key 0x100000007"), "%s", prs_error_last());
    cr_assert_eq(fake_srd.sent_count, 0);
    cr_assert_eq(prs_nic_srd.post(link->queue[0], ring, 1, 0, 1), 0, "the queue still works");
    close_pair(pair);
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
    fake_srd_finish(&fake_srd.sent[0], row->status);
    cr_assert_eq(prs_nic_srd.poll(link, events), 1);
    cr_assert(events[0].kind == PRS_EVENT_ERROR && events[0].queue == 3 && events[0].error == row->error &&
                  events[0].vendor == 6 && events[0].status == (int)row->status && strstr(events[0].cause, row->cause),
              "%d: %d, %s", (int)row->status, events[0].error, events[0].cause);
    close_pair(pair);
}

/* ---- connections that share a queue pair ---- */

/* Connections from rank 0 to ranks 1 and 2. At rank 0 they share a queue pair. */
static struct fake_srd_pair first, second;

static void open_two(void)
{
    fake_srd_install();
    first = fake_srd_connect(1, 0);
    second = fake_srd_connect(2, 0);
    cr_assert_eq(first.connecting->queue[0]->number, second.connecting->queue[0]->number);
}

static void close_two(void)
{
    close_pair(first);
    close_pair(second);
    cr_assert(fake_srd.alive == 0 && fake_srd.handles == 0, "%u queue pairs, %u handles remain", fake_srd.alive,
              fake_srd.handles);
}

Test(nic_srd, each_takes_its_own_whoever_polls)
{
    struct prs_event events[PRS_POLL_MOST];
    struct fake_srd_qp *qp;
    uint32_t receives;

    open_two();
    qp = fake_srd_qp_of(first.connecting);
    receives = qp->posted_receives;
    cr_assert_eq(fake_srd_post(first.connecting, 0, 1), 0);
    cr_assert_eq(fake_srd_post(second.connecting, 0, 1), 0);
    for (uint32_t i = 0; i < 2; i++)
        fake_srd_finish(&fake_srd.sent[i], IBV_WC_SUCCESS);
    for (uint32_t i = 0; i < 128; i++) {
        fake_srd_arrive(first.connecting, second.accepting, i, 8);
        cr_assert(prs_nic_srd.poll(first.connecting, events) == (i == 0), "its completion, and no arrival");
        cr_assert(i > 0 || (events[0].kind == PRS_EVENT_DONE && events[0].value == 0));
    }
    cr_assert_eq(qp->posted_receives, receives, "nobody has taken the arrivals, so their receives are not replaced");
    for (uint32_t taken = 0, done = 0; taken + done < 129;) {
        int count = prs_nic_srd.poll(second.connecting, events);

        cr_assert(count > 0, "%u arrivals and %u completions of 129", taken, done);
        for (int i = 0; i < count; i++) {
            if (events[i].kind == PRS_EVENT_DONE)
                done++;
            else
                cr_assert(events[i].kind == PRS_EVENT_ARRIVAL && events[i].value == taken++ && events[i].bytes == 8);
        }
    }
    cr_assert_eq(qp->posted_receives, receives + 128);
    cr_assert(first.connecting->receives == 0 && second.connecting->receives == 128);
    close_two();
}

Test(nic_srd, a_failure_ends_only_the_connection_of_its_request)
{
    struct prs_event events[PRS_POLL_MOST];
    uint32_t receives;

    open_two();
    cr_assert_eq(fake_srd_post(first.connecting, 0, 1), 0);
    cr_assert_eq(fake_srd_post(second.connecting, 0, 1), 0);
    fake_srd_finish(&fake_srd.sent[1], IBV_WC_RESP_TIMEOUT_ERR);
    cr_assert_eq(prs_nic_srd.poll(first.connecting, events), 0);
    cr_assert_eq(prs_nic_srd.poll(second.connecting, events), 1);
    cr_assert(events[0].kind == PRS_EVENT_ERROR && events[0].error == -ETIMEDOUT && events[0].queue == 3);
    prs_nic_srd.kill(second.connecting);
    cr_assert_not(fake_srd_qp_of(first.connecting)->error);
    receives = fake_srd_qp_of(first.connecting)->posted_receives;
    for (int i = 0; i < 64; i++) { /* it takes none any more */
        fake_srd_arrive(first.connecting, second.accepting, 1, 8);
        cr_assert_eq(prs_nic_srd.poll(first.connecting, events), 0);
    }
    cr_assert_eq(fake_srd_qp_of(first.connecting)->posted_receives, receives + 64);
    fake_srd_finish(&fake_srd.sent[0], IBV_WC_SUCCESS);
    cr_assert_eq(prs_nic_srd.poll(first.connecting, events), 1);
    cr_assert_eq(events[0].kind, PRS_EVENT_DONE);
    close_two();
}

Test(nic_srd, requests_beyond_the_send_slots_wait_in_line)
{
    struct prs_event events[PRS_POLL_MOST];
    uint32_t finished = 0, done[2] = {0, 0}, turns = 0;

    fake_srd_install();
    fake_srd.max_send_wr = 32;
    first = fake_srd_connect(1, 0);
    second = fake_srd_connect(2, 0);
    cr_assert_eq(fake_srd_post(first.connecting, 0, 40), 0);
    cr_assert_eq(fake_srd_post(second.connecting, 0, 40), 0);
    cr_assert_eq(fake_srd_post(first.connecting, 40, 20), 0);
    while (done[0] + done[1] < 100) {
        struct prs_link *link = turns++ % 2 ? second.connecting : first.connecting;
        int count;

        cr_assert_leq(fake_srd_qp_of(link)->in_flight, 32u, "the queue pair overflows");
        for (int i = 0; i < 5 && finished < fake_srd.sent_count; i++)
            fake_srd_finish(&fake_srd.sent[finished++], IBV_WC_SUCCESS);
        count = prs_nic_srd.poll(link, events);
        for (int i = 0; i < count; i++)
            cr_assert(events[i].kind == PRS_EVENT_DONE && events[i].value == done[link == second.connecting]++);
        cr_assert_lt(turns, 1000u, "%u and %u of 60 and 40 are done", done[0], done[1]);
    }
    cr_assert(done[0] == 60 && done[1] == 40 && fake_srd.sent_count == 100);
    close_two();
}

Test(nic_srd, what_arrives_for_a_closed_connection_is_dropped)
{
    struct prs_event events[PRS_POLL_MOST];
    struct prs_link *late;
    struct fake_srd_qp *qp;
    uint32_t receives;

    open_two();
    qp = fake_srd_qp_of(first.connecting);
    late = second.accepting;
    for (uint32_t i = 0; i < 3; i++)
        fake_srd_arrive(first.connecting, late, i, 8);
    cr_assert_eq(prs_nic_srd.poll(first.connecting, events), 0, "they wait for the second");
    receives = qp->posted_receives;
    fake_srd_close(second.connecting, -1);
    for (uint32_t i = 0; i < 61; i++)
        fake_srd_arrive(first.connecting, late, i, 8);
    fake_srd_arrive(first.connecting, first.accepting, 7, 8);
    while (qp->queued_taken < qp->queued_count) {
        int count = prs_nic_srd.poll(first.connecting, events);

        cr_assert(count == 0 || (count == 1 && events[0].value == 7), "%d events", count);
    }
    cr_assert_eq(qp->posted_receives, receives + 64, "the receives of dropped arrivals are replaced");
    fake_srd_close(late, -1);
    close_pair(first);
}

Test(nic_srd, a_connection_ends_when_its_requests_have_ended)
{
    struct prs_event events[PRS_POLL_MOST];

    open_two();
    cr_assert_eq(fake_srd_post(first.connecting, 0, 1), 0);
    cr_assert_eq(fake_srd_post(second.connecting, 0, 2), 0);
    fake_srd_finish(&fake_srd.sent[1], IBV_WC_SUCCESS);
    fake_srd_finish(&fake_srd.sent[2], IBV_WC_RESP_TIMEOUT_ERR);
    fake_srd_close(second.connecting, -1); /* takes both */
    cr_assert_not(fake_srd_qp_of(first.connecting)->error);
    cr_assert_eq(prs_nic_srd.poll(first.connecting, events), 0);
    fake_srd_finish(&fake_srd.sent[0], IBV_WC_SUCCESS);
    cr_assert_eq(prs_nic_srd.poll(first.connecting, events), 1, "it goes on");
    fake_srd_close(second.accepting, -1);
    close_pair(first);
}

Test(nic_srd, requests_that_do_not_end_take_the_queue_pair_with_them)
{
    uint64_t began_ms = prs_clock_ms();
    struct prs_event events[PRS_POLL_MOST];
    struct fake_srd_pair third;

    open_two();
    cr_assert_eq(fake_srd_post(second.connecting, 0, 1), 0);
    prs_nic_srd.kill(second.connecting);
    cr_assert_geq(prs_clock_ms() - began_ms, 4900u);
    cr_assert(fake_srd_qp_of(first.connecting)->error, "the request could read memory that is used for something else");
    third = fake_srd_connect(3, 0);
    cr_assert_neq(third.connecting->queue[0]->number, first.connecting->queue[0]->number, "nobody may join it");
    fake_srd_complete(fake_srd_qp_of(first.connecting),
                      (struct ibv_wc){.wr_id = 1ull << 63, .status = IBV_WC_WR_FLUSH_ERR});
    cr_assert_eq(prs_nic_srd.poll(first.connecting, events), 1);
    cr_assert(events[0].kind == PRS_EVENT_ERROR && strstr(events[0].cause, "another one did not end"), "%s",
              events[0].cause);
    cr_assert_eq(fake_srd_post(first.connecting, 0, 1), -ECONNRESET);
    close_pair(third);
    close_two();
}

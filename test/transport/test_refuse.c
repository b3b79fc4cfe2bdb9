/* SPDX-License-Identifier: Apache-2.0 */
/* Connections that fail on one side: both sides report the error in time. Both are in one process. */
#include <criterion/criterion.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "test/transport/ends.h"
#include "transport/nic/fabric.h"
#include "transport/nic/verbs/verbs.h"
#include "transport/nic/verbs/verbs_nic.h"
#include "transport/util/clock.h"

/* Drive both ends, with these options at the listener, until each has connected or failed. */
static void drive(struct prs_listener *listener, const struct prs_peer_options *options,
                  struct prs_connector *connector, int *connected, int *accepted)
{
    uint64_t deadline_ms = prs_clock_ms() + 20000;
    struct prs_peer *a = NULL, *b = NULL;

    *connected = *accepted = PRS_AGAIN;
    while (*connected == PRS_AGAIN || *accepted == PRS_AGAIN) {
        if (*connected == PRS_AGAIN)
            *connected = prs_connector_step(connector, &a);
        if (*accepted == PRS_AGAIN)
            *accepted = prs_accept(listener, options, &b);
        cr_assert_lt(prs_clock_ms(), deadline_ms, "connect said %d, accept %d", *connected, *accepted);
    }
    prs_peer_close(a);
    prs_peer_close(b);
}

/* The listener cannot make a peer: its policy does not exist. */
Test(refuse, both_sides_learn_what_the_listener_cannot_do, .init = open_default, .fini = close_default)
{
    const struct prs_peer_options wrong = {.policy = "by_luck", .traffic_class = -1};
    struct prs_connector *connector;
    struct prs_listener *listener;
    struct prs_handle handle;
    int connected, accepted;

    listener = open_listener(&handle);
    connector = open_connector(&handle);
    drive(listener, &wrong, connector, &connected, &accepted);
    cr_assert_eq(connected, -EINVAL);
    cr_assert_eq(accepted, -EINVAL);
    cr_assert(strstr(prs_error_text(), "by_luck"), "%s", prs_error_text());
    connect_once(listener, &handle);
    prs_listener_close(listener);
}

static bool uses_verbs(void)
{
    return fabric->rail[0].domain->lister == &prs_nic_rc;
}

static struct ibv_cq *(*create_cq)(struct ibv_context *context, int entries, void *user,
                                   struct ibv_comp_channel *channel, int vector);
static int cqs_left;

static struct ibv_cq *create_few_cqs(struct ibv_context *context, int entries, void *user,
                                     struct ibv_comp_channel *channel, int vector)
{
    if (cqs_left-- > 0)
        return create_cq(context, entries, user, channel, vector);
    errno = ENOMEM;
    return NULL;
}

/* The connector fails after the listener has created its queues. The listener then waits for the connector's. */
Test(refuse, both_sides_learn_what_the_connector_cannot_do, .init = open_default, .fini = close_default)
{
    struct prs_connector *connector;
    struct prs_listener *listener;
    struct prs_handle handle;
    int connected, accepted;

    if (!uses_verbs())
        cr_skip_test("it makes calls of libibverbs fail");
    create_cq = prs_verbs.create_cq;
    prs_verbs.create_cq = create_few_cqs;
    cqs_left = 1;
    listener = open_listener(&handle);
    connector = open_connector(&handle);
    drive(listener, NULL, connector, &connected, &accepted);
    cr_assert_eq(connected, -ENOMEM);
    cr_assert_eq(accepted, -ENOMEM);
    cr_assert(strstr(prs_error_text(), "completion queue"), "%s", prs_error_text());
    prs_verbs.create_cq = create_cq;
    connect_once(listener, &handle);
    prs_listener_close(listener);
}

/* ---- a network that is not ready ---- */

static int (*modify_qp)(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask);
static struct {
    enum ibv_qp_state state; /* the change that fails */
    int error, left;         /* and how often it still does */
} failing;

static int fail_modify(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
    if (attr->qp_state == failing.state && failing.left > 0) {
        failing.left--;
        return failing.error;
    }
    return modify_qp(qp, attr, mask);
}

/* Without an answer to ARP, RTR fails with one of three errors, and is tried again. Any other is final. */
Test(refuse, a_connect_is_tried_again_while_the_network_is_not_ready, .init = open_default, .fini = close_default)
{
    enum { TRIES = 3 };
    static const struct {
        enum ibv_qp_state state;
        int error, failures;
        const char *text; /* NULL: it connects */
    } rows[] = {
        {IBV_QPS_RTR, ETIMEDOUT, 1, NULL},
        {IBV_QPS_RTR, EHOSTUNREACH, TRIES, NULL},
        {IBV_QPS_RTR, ENETUNREACH, TRIES, NULL},
        {IBV_QPS_RTR, EHOSTUNREACH, TRIES + 1, "after 4 tries"},
        {IBV_QPS_RTR, EINVAL, 1, "queue pair to RTR"},
        {IBV_QPS_RTS, ENOMEM, 1, "queue pair to RTS"},
        {IBV_QPS_RTS, ETIMEDOUT, 1, "queue pair to RTS"}, /* it asks the network nothing */
    };
    struct prs_listener *listener;
    struct prs_handle handle;

    if (fabric->rail[0].domain->nic != &prs_nic_rc)
        cr_skip_test("only queues of RC are connected by libibverbs");
    fabric->config.mqp_retry_count = TRIES;
    fabric->config.mqp_retry_ms = 1;
    modify_qp = prs_verbs.modify_qp;
    prs_verbs.modify_qp = fail_modify;
    listener = open_listener(&handle);
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        struct prs_connector *connector = open_connector(&handle);
        int connected, accepted;

        failing.state = rows[i].state;
        failing.error = rows[i].error;
        failing.left = rows[i].failures;
        drive(listener, NULL, connector, &connected, &accepted);
        cr_assert_eq(failing.left, 0, "row %zu: %d failures are left", i, failing.left);
        cr_assert_eq(connected, rows[i].text ? -rows[i].error : 0, "row %zu: %d", i, connected);
        cr_assert_eq(accepted, rows[i].text ? -rows[i].error : 0, "row %zu: %d", i, accepted);
        if (rows[i].text)
            cr_assert(strstr(prs_error_text(), rows[i].text), "row %zu: %s", i, prs_error_text());
        connect_once(listener, &handle);
    }
    prs_verbs.modify_qp = modify_qp;
    prs_listener_close(listener);
}

Test(refuse, the_limit_of_the_options_counts, .init = open_default, .fini = close_default)
{
    const struct prs_peer_options options = {.traffic_class = -1, .timeout_ms = 300};
    struct prs_connector *connector;
    struct prs_listener *listener;
    struct prs_handle handle;
    struct prs_peer *peer;
    uint64_t start = prs_clock_ms();
    int r = PRS_AGAIN;

    listener = open_listener(&handle);
    cr_assert_eq(prs_connect(fabric, &one_rail, &handle, &options, &connector), 0);
    while (r == PRS_AGAIN)
        r = prs_connector_step(connector, &peer); /* the listener does not accept */
    cr_assert_eq(r, -ETIMEDOUT);
    cr_assert(strstr(prs_error_text(), "300 ms"), "%s", prs_error_text());
    cr_assert_lt(prs_clock_ms() - start, 20000);
    prs_listener_close(listener);
}

Test(refuse, an_impossible_number_of_ops, .init = open_default, .fini = close_default, .timeout = 120)
{
    static const uint32_t numbers[] = {(1u << 20) + 1, 1u << 31, UINT32_MAX};
    struct prs_connector *connector;
    struct prs_listener *listener;
    struct prs_handle handle;

    listener = open_listener(&handle);
    for (size_t i = 0; i < sizeof(numbers) / sizeof(*numbers); i++) {
        const struct prs_peer_options options = {.traffic_class = -1, .max_ops = numbers[i]};

        cr_assert_eq(prs_connect(fabric, &one_rail, &handle, &options, &connector), -EINVAL, "max_ops %u", numbers[i]);
        cr_assert(strstr(prs_error_text(), "max_ops"), "%s", prs_error_text());
    }
    prs_listener_close(listener);
}

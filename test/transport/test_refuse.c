/* SPDX-License-Identifier: Apache-2.0 */
/* Connections that cannot be: whoever lacks something, both ends learn of it, in time. Both in one process. */
#include "test/transport/pair.h"
#include "transport/verbs.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static struct prs_fabric *fabric;
static const struct prs_rail_set one_rail = {1, {0}};

static void open_default(void)
{
    struct prs_fabric_options options = {.timeout_ms = 30000};

    cr_assert_eq(prs_fabric_open(&options, &fabric), 0, "%s", prs_error_text());
    cr_assert_gt(prs_fabric_rails(fabric), 0);
}

static void close_default(void)
{
    prs_fabric_close(fabric);
}

static double seconds(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* Drive both ends, with these options at the listener, until each has connected or failed. */
static void drive(struct prs_listener *listener, const struct prs_peer_options *options,
                  struct prs_connector *connector, int *connected, int *accepted)
{
    double give_up = seconds() + 20;
    struct prs_peer *a = NULL, *b = NULL;

    *connected = *accepted = PRS_AGAIN;
    while (*connected == PRS_AGAIN || *accepted == PRS_AGAIN) {
        if (*connected == PRS_AGAIN)
            *connected = prs_connector_step(connector, &a);
        if (*accepted == PRS_AGAIN)
            *accepted = prs_accept(listener, options, &b);
        cr_assert_lt(seconds(), give_up, "connect said %d, accept %d", *connected, *accepted);
    }
    prs_peer_close(a);
    prs_peer_close(b);
}

/* The listener is as good as new. */
static void connect_once(struct prs_listener *listener, const struct prs_handle *handle)
{
    struct prs_connector *connector;
    int connected, accepted;

    cr_assert_eq(prs_connect(fabric, &one_rail, handle, NULL, &connector), 0, "%s", prs_error_text());
    drive(listener, NULL, connector, &connected, &accepted);
    cr_assert(connected == 0 && accepted == 0, "%d %d %s", connected, accepted, prs_error_text());
}

/* A peer that holds the handle, and a listener that lacks what a peer takes: here, a policy that exists. */
Test(refuse, both_sides_learn_what_the_listener_cannot_do, .init = open_default, .fini = close_default)
{
    const struct prs_peer_options wrong = {.policy = "by_luck", .traffic_class = -1};
    struct prs_connector *connector;
    struct prs_listener *listener;
    struct prs_handle handle;
    int connected, accepted;

    cr_assert_eq(prs_listen(fabric, &one_rail, &handle, &listener), 0);
    cr_assert_eq(prs_connect(fabric, &one_rail, &handle, NULL, &connector), 0);
    drive(listener, &wrong, connector, &connected, &accepted);
    cr_assert_eq(connected, -EINVAL);
    cr_assert_eq(accepted, -EINVAL);
    cr_assert(strstr(prs_error_text(), "by_luck"), "%s", prs_error_text());
    connect_once(listener, &handle);
    prs_listener_close(listener);
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

/* The listener has made its queues, and waits for those of the connector. */
Test(refuse, both_sides_learn_what_the_connector_cannot_do, .init = open_default, .fini = close_default)
{
    struct prs_connector *connector;
    struct prs_listener *listener;
    struct prs_handle handle;
    int connected, accepted;

    create_cq = prs_verbs.create_cq;
    prs_verbs.create_cq = create_few_cqs;
    cqs_left = 1;
    cr_assert_eq(prs_listen(fabric, &one_rail, &handle, &listener), 0);
    cr_assert_eq(prs_connect(fabric, &one_rail, &handle, NULL, &connector), 0);
    drive(listener, NULL, connector, &connected, &accepted);
    cr_assert_eq(connected, -ENOMEM);
    cr_assert_eq(accepted, -ENOMEM);
    cr_assert(strstr(prs_error_text(), "completion queue"), "%s", prs_error_text());
    prs_verbs.create_cq = create_cq;
    connect_once(listener, &handle);
    prs_listener_close(listener);
}

Test(refuse, a_limit_of_its_own_counts, .init = open_default, .fini = close_default)
{
    const struct prs_peer_options options = {.traffic_class = -1, .timeout_ms = 300};
    struct prs_connector *connector;
    struct prs_listener *listener;
    struct prs_handle handle;
    struct prs_peer *peer;
    double start = seconds();
    int r = PRS_AGAIN;

    cr_assert_eq(prs_listen(fabric, &one_rail, &handle, &listener), 0);
    cr_assert_eq(prs_connect(fabric, &one_rail, &handle, &options, &connector), 0);
    while (r == PRS_AGAIN)
        r = prs_connector_step(connector, &peer); /* nobody accepts */
    cr_assert_eq(r, -ETIMEDOUT);
    cr_assert(strstr(prs_error_text(), "300 ms"), "%s", prs_error_text());
    cr_assert_lt(seconds() - start, 20);
    prs_listener_close(listener);
}

Test(refuse, an_impossible_window, .init = open_default, .fini = close_default, .timeout = 20)
{
    static const uint32_t windows[] = {(1u << 20) + 1, 1u << 31, UINT32_MAX};
    struct prs_connector *connector;
    struct prs_listener *listener;
    struct prs_handle handle;

    cr_assert_eq(prs_listen(fabric, &one_rail, &handle, &listener), 0);
    for (size_t i = 0; i < sizeof windows / sizeof *windows; i++) {
        const struct prs_peer_options options = {.traffic_class = -1, .window_ops = windows[i]};

        cr_assert_eq(prs_connect(fabric, &one_rail, &handle, &options, &connector), -EINVAL, "window %u", windows[i]);
        cr_assert(strstr(prs_error_text(), "window"), "%s", prs_error_text());
    }
    prs_listener_close(listener);
}

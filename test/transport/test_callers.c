/* SPDX-License-Identifier: Apache-2.0 */
/* Callers that a listener keeps waiting, hangs up on, or answers with nonsense. Both ends are in one process and
 * thread. */
#include <criterion/criterion.h>
#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "test/support/open_files.h"
#include "test/transport/ends.h"
#include "transport/nic/fabric.h"
#include "transport/peer/handshake.h"
#include "transport/peer/peer.h"
#include "transport/util/clock.h"

/* Far more callers than handshakes at a time. Between TCP and HELLO each is busy, as a rank that makes queues is. */
Test(callers, busy_callers_are_all_served, .init = open_default, .fini = close_default)
{
    enum { CALLERS = 150, BUSY_MS = 500 };
    struct prs_connector *connector[CALLERS];
    struct prs_peer *near[CALLERS], *far[CALLERS];
    int made = 0, accepted = 0;
    struct prs_listener *listener;
    struct prs_handle handle;
    uint64_t until;

    listener = open_listener(&handle);
    for (int i = 0; i < CALLERS; i++)
        connector[i] = open_connector(&handle);
    for (until = prs_clock_ms() + BUSY_MS; prs_clock_ms() < until; usleep(1000))
        cr_assert_eq(prs_accept(listener, NULL, &far[0]), PRS_AGAIN);
    for (until = prs_clock_ms() + HEALTHY_MS; made < CALLERS || accepted < CALLERS;) {
        for (int i = 0; i < CALLERS; i++) {
            int r = connector[i] ? prs_connector_step(connector[i], &near[i]) : PRS_AGAIN;

            cr_assert_geq(r, 0, "caller %d: %s", i, prs_error_text());
            if (!r) {
                connector[i] = NULL;
                made++;
            }
        }
        if (accepted < CALLERS && prs_accept(listener, NULL, &far[accepted]) == 0)
            accepted++;
        cr_assert_lt(prs_clock_ms(), until, "%d callers and %d accepted after %d ms", made, accepted, HEALTHY_MS);
    }
    for (int i = 0; i < CALLERS; i++) {
        prs_peer_close(near[i]);
        prs_peer_close(far[i]);
    }
    prs_listener_close(listener);
}

/* The descriptor of the only listener. */
static int listening_fd(void)
{
    for (int fd = 3; fd < 1024; fd++) {
        int listens = 0;
        socklen_t bytes = sizeof(listens);

        if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &bytes) == 0 && listens)
            return fd;
    }
    cr_assert(false, "nobody listens");
    return -1;
}

/* This happens when a listener drops silent callers, or when a host that was cut off has forgotten its connections. */
Test(callers, a_caller_that_is_hung_up_on_before_the_answer_calls_again, .init = open_default, .fini = close_default)
{
    struct prs_connector *connector;
    struct prs_listener *listener;
    struct prs_handle handle;
    struct prs_peer *a, *b;

    listener = open_listener(&handle);
    connector = open_connector(&handle);
    for (int times = 0; times < 3;) {
        int fd = accept4(listening_fd(), NULL, NULL, SOCK_NONBLOCK);

        cr_assert_eq(prs_connector_step(connector, &a), PRS_AGAIN, "%s", prs_error_text());
        if (fd >= 0) {
            close(fd);
            times++;
        }
    }
    cr_assert_eq(meet(listener, connector, &a, &b), 0, "%s", prs_error_text());
    prs_peer_close(a);
    prs_peer_close(b);
    prs_listener_close(listener);
}

/* NCCL polls connect for as long as another rank is late; the limit holds again once the other side has answered. */
Test(callers, a_patient_caller_waits_for_a_late_listener, .fini = close_default)
{
    struct prs_peer_options options = {.traffic_class = -1, .patient = true};
    struct prs_connector *connector;
    struct prs_listener *listener;
    struct prs_handle handle;
    struct prs_peer *a, *b;
    uint64_t until;
    int r;

    open_with(200);
    listener = open_listener(&handle);
    cr_assert_eq(prs_connect(fabric, &one_rail, &handle, &options, &connector), 0, "%s", prs_error_text());
    for (until = prs_clock_ms() + 1000; prs_clock_ms() < until; usleep(1000))
        cr_assert_eq(prs_connector_step(connector, &a), PRS_AGAIN, "%s", prs_error_text());
    fabric->config.timeout_ms = HEALTHY_MS; /* for the listener, on a busy machine */
    cr_assert_eq(meet(listener, connector, &a, &b), 0, "%s", prs_error_text());
    prs_peer_close(a);
    prs_peer_close(b);

    fabric->config.timeout_ms = 200;
    cr_assert_eq(prs_connect(fabric, &one_rail, &handle, &options, &connector), 0, "%s", prs_error_text());
    for (int calls = 0; calls < 50; calls++, usleep(1000)) /* until it has said HELLO */
        cr_assert_eq(prs_connector_step(connector, &a), PRS_AGAIN, "%s", prs_error_text());
    cr_assert_eq(prs_accept(listener, NULL, &b), PRS_AGAIN, "it answers, then it is silent");
    until = prs_clock_ms() + HEALTHY_MS;
    while ((r = prs_connector_step(connector, &a)) == PRS_AGAIN)
        cr_assert_lt(prs_clock_ms(), until, "it waits for ever");
    cr_assert_eq(r, -ETIMEDOUT, "%d %s", r, prs_error_text());
    prs_listener_close(listener);
}

/* Otherwise ranks whose handle is wrong would keep a listener from the others. */
Test(callers, a_caller_that_is_hung_up_on_pauses_between_its_calls, .init = open_default, .fini = close_default)
{
    enum { DURING_MS = 300, MOST = 4 /* at once, then after 50, 100 and 200 ms */ };
    struct prs_connector *connector;
    struct prs_listener *listener;
    struct prs_handle handle;
    struct prs_peer *peer;
    int calls = 0;

    listener = open_listener(&handle);
    connector = open_connector(&handle);
    for (uint64_t end = prs_clock_ms() + DURING_MS; prs_clock_ms() < end;) {
        int fd = accept4(listening_fd(), NULL, NULL, SOCK_NONBLOCK);

        if (fd >= 0) {
            close(fd);
            calls++;
        }
        cr_assert_eq(prs_connector_step(connector, &peer), PRS_AGAIN, "%s", prs_error_text());
    }
    cr_assert(calls > 0 && calls <= MOST, "%d calls in %d ms", calls, DURING_MS);
    prs_connector_close(connector);
    prs_listener_close(listener);
}

/* A patient caller waits for ever for one that is late, but not for one that always hangs up. */
Test(callers, a_patient_caller_gives_up_on_one_that_always_hangs_up, .fini = close_default)
{
    struct prs_peer_options options = {.traffic_class = -1, .patient = true};
    struct prs_connector *connector;
    struct prs_listener *listener;
    struct prs_handle handle;
    struct prs_peer *peer;
    uint64_t give_up;
    int r;

    open_with(200);
    listener = open_listener(&handle);
    cr_assert_eq(prs_connect(fabric, &one_rail, &handle, &options, &connector), 0, "%s", prs_error_text());
    give_up = prs_clock_ms() + HEALTHY_MS;
    while ((r = prs_connector_step(connector, &peer)) == PRS_AGAIN) {
        int fd = accept4(listening_fd(), NULL, NULL, SOCK_NONBLOCK);

        if (fd >= 0)
            close(fd);
        cr_assert_lt(prs_clock_ms(), give_up, "it calls for ever");
    }
    cr_assert_eq(r, -ECONNRESET, "%d %s", r, prs_error_text());
    prs_listener_close(listener);
}

/* Whoever waits for the answer learns it at once, rather than after the time limit. */
Test(callers, a_listener_that_closes_hangs_up_on_its_callers, .init = open_default, .fini = close_default)
{
    enum { CALLERS = 3 };
    struct prs_connector *connector[CALLERS];
    struct prs_listener *listener;
    struct prs_handle handle;
    struct prs_peer *peer;
    int files = open_files();

    listener = open_listener(&handle);
    for (int i = 0; i < CALLERS; i++)
        connector[i] = open_connector(&handle);
    for (int round = 0; round < 10; round++, usleep(1000))
        cr_assert_eq(prs_accept(listener, NULL, &peer), PRS_AGAIN); /* they have not said HELLO */
    prs_listener_close(listener);
    for (int i = 0; i < CALLERS; i++) {
        uint64_t give_up = prs_clock_ms() + HEALTHY_MS / 4;
        int r;

        while ((r = prs_connector_step(connector[i], &peer)) == PRS_AGAIN)
            cr_assert_lt(prs_clock_ms(), give_up, "caller %d waits for a listener that has closed", i);
        cr_assert_lt(r, 0);
    }
    cr_assert_eq(open_files(), files);
}

/* The smaller number of the two sides' wishes, and no more than a peer can have. */
Test(callers, both_sides_have_as_many_queues_as_the_one_that_wants_fewer, .init = open_default, .fini = close_default)
{
    static const int rows[][3] = {{4, 2, 2}, {2, 4, 2}, {3, 3, 3}, {1, 16, 1}}; /* connector, listener, both */
    struct prs_listener *listener;
    struct prs_handle handle;

    listener = open_listener(&handle);
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        struct prs_peer_options calling = {.traffic_class = -1, .queues_per_rail = rows[i][0]};
        struct prs_peer_options accepting = {.traffic_class = -1, .queues_per_rail = rows[i][1]};
        uint64_t give_up = prs_clock_ms() + HEALTHY_MS;
        struct prs_peer *made = NULL, *accepted = NULL;
        struct prs_connector *connector;
        int ends[2] = {PRS_AGAIN, PRS_AGAIN};

        cr_assert_eq(prs_connect(fabric, &one_rail, &handle, &calling, &connector), 0, "%s", prs_error_text());
        while (ends[0] || ends[1]) {
            ends[0] = ends[0] ? prs_connector_step(connector, &made) : 0;
            ends[1] = ends[1] ? prs_accept(listener, &accepting, &accepted) : 0;
            cr_assert(ends[0] >= 0 && ends[1] >= 0, "row %zu: %s", i, prs_error_text());
            cr_assert_lt(prs_clock_ms(), give_up);
        }
        cr_assert_eq(made->queues_per_path, (uint32_t)rows[i][2], "row %zu: %u", i, made->queues_per_path);
        cr_assert_eq(accepted->queues_per_path, (uint32_t)rows[i][2], "row %zu: %u", i, accepted->queues_per_path);
        prs_peer_close(made);
        prs_peer_close(accepted);
    }
    prs_listener_close(listener);
}

/* The other side has the cookie, but sends impossible values, as a broken build or overwritten memory would. */
Test(callers, an_answer_with_impossible_numbers_is_refused, .init = open_default, .fini = close_default)
{
    static const struct prs_wire_reply nonsense[] = {
        {.rail_count = 1, .pair_count = PRS_MAX_RAILS + 1, .queues_per_pair = 1},
        {.rail_count = PRS_MAX_RAILS + 1, .pair_count = 1, .queues_per_pair = 1},
        {.rail_count = 1, .pair_count = 1, .queues_per_pair = UINT32_MAX},
        {.rail_count = 1, .pair_count = 1, .queues_per_pair = 1, .queues.count = 1, .pair = {{.connector_rail = 9}}},
        {.rail_count = 1, .pair_count = 1, .queues_per_pair = 1, .queues.count = 1, .pair = {{.listener_rail = 9}}},
        {0}};
    struct prs_listener *listener;
    struct prs_handle handle;

    listener = open_listener(&handle);
    for (size_t i = 0; i < sizeof(nonsense) / sizeof(*nonsense); i++) {
        uint64_t give_up = prs_clock_ms() + HEALTHY_MS;
        struct prs_connector *connector = open_connector(&handle);
        struct prs_stream stream = {.fd = -1};
        union prs_address address;
        struct prs_peer *peer;
        uint8_t cookie[16];
        int r = PRS_AGAIN;

        cr_assert_eq(prs_handle_parse(&handle, cookie, &address), 0);
        for (bool heard = false; r == PRS_AGAIN; r = prs_connector_step(connector, &peer)) {
            int fd = stream.fd < 0 ? accept4(listening_fd(), NULL, NULL, SOCK_NONBLOCK) : -1;

            if (fd >= 0)
                prs_stream_init(&stream, fd, &address, cookie);
            if (stream.fd >= 0 && !heard && prs_stream_get(&stream, PRS_FRAME_HELLO) == 0) {
                struct prs_wire_reply reply = nonsense[i];

                heard = true;
                memcpy(reply.rail, stream.in.body.hello.rail, sizeof(reply.rail));
                prs_stream_put(&stream, PRS_FRAME_REPLY, &reply, sizeof(reply));
                cr_assert_eq(prs_stream_flush(&stream), 0);
            }
            cr_assert_lt(prs_clock_ms(), give_up, "row %zu", i);
        }
        cr_assert_eq(r, -EPROTO, "row %zu: %d %s", i, r, prs_error_text());
        close(stream.fd);
    }
    connect_once(listener, &handle);
    prs_listener_close(listener);
}

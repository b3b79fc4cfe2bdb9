/* SPDX-License-Identifier: Apache-2.0 */
/* NCCL's contract for isend, irecv, test and iflush. */
#include <criterion/criterion.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "test/plugin/pair.h"

#define POISON ((void *)0xdeadbeef)

TestSuite(request, .timeout = 300);

Test(request, a_send_before_its_receive_gets_no_request)
{
    struct plugin plugin = plugin_open();
    struct pair pair = pair_open(&plugin, 0);
    void *request = POISON;

    cr_assert_eq(plugin.net->isend(pair.send, pair.source, 8, 0, pair.source_mhandle, NULL, &request), NET_SUCCESS);
    cr_assert_null(request);
    pair_close(&plugin, &pair);
    plugin_close(&plugin);
}

Test(request, the_request_is_always_written)
{
    struct plugin plugin = plugin_open();
    struct pair pair = pair_open(&plugin, 0);
    void *data[9] = {NULL}, *mhandles[9] = {NULL}, *request;
    size_t sizes[9] = {8};
    int tags[9] = {0}, flushed = 8;

    request = POISON;
    cr_assert_neq(plugin.net->irecv(pair.recv, 9, data, sizes, tags, mhandles, NULL, &request), NET_SUCCESS);
    cr_assert_null(request, "nine buffers are refused");
    request = POISON;
    cr_assert_neq(plugin.net->irecv(pair.recv, -1, data, sizes, tags, mhandles, NULL, &request), NET_SUCCESS);
    cr_assert_null(request, "minus one buffers are refused");
    request = POISON;
    cr_assert_eq(plugin.net->irecv(pair.recv, 1, data, sizes, tags, mhandles, NULL, &request), NET_INVALID_ARGUMENT);
    cr_assert_null(request, "8 bytes without a registration are refused");
    request = NET_REQUEST_OPTIONAL;
    data[0] = pair.target;
    mhandles[0] = pair.target_mhandle;
    cr_assert_eq(plugin.net->irecv(pair.recv, 1, data, sizes, tags, mhandles, NULL, &request), NET_SUCCESS);
    cr_assert(request && request != NET_REQUEST_OPTIONAL, "the hint 0x1 is not a request");
    request = POISON;
    mhandles[0] = NULL;
    cr_assert_eq(plugin.net->iflush(pair.recv, 1, data, &flushed, mhandles, &request), NET_SUCCESS);
    cr_assert_null(request, "no registration, no flush");
    request = POISON;
    cr_assert_eq(plugin.net->iflush(pair.recv, 0, data, &flushed, mhandles, &request), NET_SUCCESS);
    cr_assert_null(request, "nothing to flush");
    pair_close(&plugin, &pair);
    plugin_close(&plugin);
}

Test(request, an_empty_receive_is_done_at_once)
{
    struct plugin plugin = plugin_open();
    struct pair pair = pair_open(&plugin, 0);
    void *request = NULL;

    cr_assert_eq(plugin.net->irecv(pair.recv, 0, NULL, NULL, NULL, NULL, NULL, &request), NET_SUCCESS);
    cr_assert_not_null(request);
    cr_assert_eq(finish(&plugin, request, NULL), NET_SUCCESS);
    pair_close(&plugin, &pair);
    plugin_close(&plugin);
}

Test(request, zero_bytes_need_no_registration)
{
    struct plugin plugin = plugin_open();
    struct pair pair = pair_open(&plugin, 0);
    void *data = NULL, *mhandle = NULL, *recv = NULL, *send = NULL;
    int tag = 5, got = -1;
    size_t size = 0;

    cr_assert_eq(plugin.net->irecv(pair.recv, 1, &data, &size, &tag, &mhandle, NULL, &recv), NET_SUCCESS);
    while (!send)
        cr_assert_eq(plugin.net->isend(pair.send, NULL, 0, tag, NULL, NULL, &send), NET_SUCCESS);
    cr_assert_eq(finish(&plugin, send, NULL), NET_SUCCESS);
    cr_assert_eq(finish(&plugin, recv, &got), NET_SUCCESS);
    cr_assert_eq(got, 0);
    pair_close(&plugin, &pair);
    plugin_close(&plugin);
}

Test(request, a_shorter_message_reports_its_size)
{
    struct plugin plugin = plugin_open();
    struct pair pair = pair_open(&plugin, 0);
    void *recv = recv_bytes(&plugin, &pair, 100, 5000, 1);
    void *send = send_bytes(&plugin, &pair, 3, 4321, 1);
    int sent = -1, got = -1;

    cr_assert_eq(finish(&plugin, send, &sent), NET_SUCCESS);
    cr_assert_eq(finish(&plugin, recv, &got), NET_SUCCESS);
    cr_assert_eq(sent, 4321);
    cr_assert_eq(got, 4321);
    cr_assert_eq(memcmp(pair.target + 100, pair.source + 3, 4321), 0);
    pair_close(&plugin, &pair);
    plugin_close(&plugin);
}

Test(request, a_message_larger_than_its_buffer_is_refused_by_name)
{
    struct plugin plugin = plugin_open();
    struct pair pair = pair_open(&plugin, 0);
    void *request = NULL;
    net_result result = NET_SUCCESS;

    recv_bytes(&plugin, &pair, 0, 64, 1);
    for (uint64_t give_up = prs_clock_ms() + PAIR_LIMIT_MS; result == NET_SUCCESS && prs_clock_ms() < give_up;)
        result = plugin.net->isend(pair.send, pair.source, 65, 1, pair.source_mhandle, NULL, &request);
    cr_assert_eq(result, NET_INVALID_ARGUMENT);
    cr_assert_null(request);
    cr_assert(strstr(last_warning, "65") && strstr(last_warning, "64"), "%s", last_warning);
    pair_close(&plugin, &pair);
    plugin_close(&plugin);
}

Test(request, sends_to_a_multi_receive_go_when_matched_and_find_their_tags)
{
    enum { BUFFERS = 4, EACH = 1000 };
    struct plugin plugin = plugin_open();
    struct pair pair = pair_open(&plugin, 0);
    void *data[BUFFERS], *mhandles[BUFFERS], *recv = NULL;
    size_t sizes[BUFFERS];
    int tags[BUFFERS], got[BUFFERS], done = 1;

    for (int i = 0; i < BUFFERS; i++) {
        data[i] = pair.target + i * EACH;
        mhandles[i] = pair.target_mhandle;
        sizes[i] = EACH;
        tags[i] = 10 + i;
    }
    cr_assert_eq(plugin.net->irecv(pair.recv, BUFFERS, data, sizes, tags, mhandles, NULL, &recv), NET_SUCCESS);
    for (int i = BUFFERS; i-- > 0;) {
        void *send = send_bytes(&plugin, &pair, (size_t)i * EACH, (size_t)(EACH - i), 10 + i);

        cr_assert_eq(finish(&plugin, send, NULL), NET_SUCCESS, "a send waits for the other sends of its receive");
        if (i > 0) {
            cr_assert_eq(plugin.net->test(recv, &done, got), NET_SUCCESS);
            cr_assert_not(done, "a receive is done, but %d of its buffers are empty", i);
        }
    }
    cr_assert_eq(finish(&plugin, recv, got), NET_SUCCESS);
    for (int i = 0; i < BUFFERS; i++) {
        cr_assert_eq(got[i], EACH - i);
        cr_assert_eq(memcmp(data[i], pair.source + i * EACH, (size_t)got[i]), 0, "buffer %d", i);
    }
    pair_close(&plugin, &pair);
    plugin_close(&plugin);
}

Test(request, a_tag_of_a_later_receive_has_to_wait)
{
    struct plugin plugin = plugin_open();
    struct pair pair = pair_open(&plugin, 0);
    void *first = recv_bytes(&plugin, &pair, 0, 8, 1), *second = recv_bytes(&plugin, &pair, 8, 8, 2);
    void *early = POISON, *send;

    for (int i = 0; i < 10000; i++) {
        cr_assert_eq(plugin.net->isend(pair.send, pair.source, 8, 2, pair.source_mhandle, NULL, &early), NET_SUCCESS);
        cr_assert_null(early);
    }
    send = send_bytes(&plugin, &pair, 0, 8, 1);
    cr_assert_eq(finish(&plugin, send, NULL), NET_SUCCESS);
    cr_assert_eq(finish(&plugin, first, NULL), NET_SUCCESS);
    send = NULL;
    for (uint64_t give_up = prs_clock_ms() + PAIR_LIMIT_MS; !send && prs_clock_ms() < give_up;) {
        int done = 0;

        cr_assert_eq(plugin.net->isend(pair.send, pair.source, 8, 2, pair.source_mhandle, NULL, &send), NET_SUCCESS);
        if (!send)
            cr_assert_eq(plugin.net->test(second, &done, NULL), NET_SUCCESS);
        cr_assert_not(done);
    }
    cr_assert_not_null(send);
    cr_assert_eq(finish(&plugin, send, NULL), NET_SUCCESS);
    cr_assert_eq(finish(&plugin, second, NULL), NET_SUCCESS);
    pair_close(&plugin, &pair);
    plugin_close(&plugin);
}

Test(request, two_hundred_fifty_six_receives_may_be_out_and_all_are_filled)
{
    enum { MOST = NET_MAX_REQUESTS * 8, EACH = 512 };
    struct plugin plugin = plugin_open();
    struct pair pair = pair_open(&plugin, 0);
    void *recv[MOST], *more, *send[MOST] = {NULL};
    int sent = 0, acknowledged = 0, finished = 0;

    for (int i = 0; i < MOST; i++) {
        recv[i] = recv_bytes(&plugin, &pair, (size_t)i * EACH, EACH, 3);
        cr_assert_not_null(recv[i], "receive %d", i);
    }
    more = recv_bytes(&plugin, &pair, 0, EACH, 3);
    cr_assert_null(more, "receive %d has no request", MOST);
    for (uint64_t give_up = prs_clock_ms() + PAIR_LIMIT_MS; finished < MOST && prs_clock_ms() < give_up;) {
        int done = 0;

        if (sent < MOST) {
            cr_assert_eq(plugin.net->isend(pair.send, pair.source + sent * EACH, EACH, 3, pair.source_mhandle, NULL,
                                           &send[sent]),
                         NET_SUCCESS);
            sent += send[sent] != NULL;
        }
        cr_assert_eq(plugin.net->test(recv[finished], &done, NULL), NET_SUCCESS);
        finished += done;
        done = 0;
        if (acknowledged < sent)
            cr_assert_eq(plugin.net->test(send[acknowledged], &done, NULL), NET_SUCCESS);
        acknowledged += done;
    }
    cr_assert_eq(finished, MOST);
    for (; acknowledged < MOST; acknowledged++)
        cr_assert_eq(finish(&plugin, send[acknowledged], NULL), NET_SUCCESS);
    cr_assert_eq(memcmp(pair.target, pair.source, MOST * EACH), 0);
    pair_close(&plugin, &pair);
    plugin_close(&plugin);
}

/* Send many more messages than there are requests, in order, with `ahead` receives posted ahead. */
static void run_laps(const struct plugin *plugin, int device, int ahead)
{
    enum { MESSAGES = 3000, EACH = 512 };
    struct pair pair = pair_open(plugin, device);
    void *recv[NET_MAX_REQUESTS * 8], *send[NET_MAX_REQUESTS * 8];
    int posted = 0, sent = 0, acknowledged = 0, finished = 0;

    for (uint64_t give_up = prs_clock_ms() + PAIR_LIMIT_MS; acknowledged < MESSAGES || finished < MESSAGES;) {
        void *request;
        int done;

        while (posted < MESSAGES && posted - finished < ahead &&
               (request = recv_bytes(plugin, &pair, (size_t)(posted % ahead) * EACH, EACH, 3)))
            recv[posted++ % ahead] = request;
        request = NULL;
        if (sent < MESSAGES && sent - acknowledged < ahead)
            cr_assert_eq(plugin->net->isend(pair.send, pair.source, EACH, 3, pair.source_mhandle, NULL, &request),
                         NET_SUCCESS);
        if (request)
            send[sent++ % ahead] = request;
        for (done = 1; done && finished < posted; finished += done)
            cr_assert_eq(plugin->net->test(recv[finished % ahead], &done, NULL), NET_SUCCESS, "%s", last_warning);
        for (done = 1; done && acknowledged < sent; acknowledged += done)
            cr_assert_eq(plugin->net->test(send[acknowledged % ahead], &done, NULL), NET_SUCCESS, "%s", last_warning);
        cr_assert_lt(prs_clock_ms(), give_up, "%d receives ahead: %d posted, %d sent, %d here", ahead, posted, sent,
                     finished);
    }
    pair_close(plugin, &pair);
}

Test(request, however_many_receives_are_out_there_is_room_for_more_when_they_are_done)
{
    struct plugin plugin = plugin_open();

    for (int ahead = 64; ahead <= NET_MAX_REQUESTS * 8; ahead += 64)
        run_laps(&plugin, 0, ahead);
    plugin_close(&plugin);
}

Test(request, receives_posted_far_ahead_never_stall_two_rails)
{
    struct plugin plugin = plugin_open();
    struct net_vdevice_v12 both = {.count = 2, .device = {0, 1}};
    int device;

    cr_assert_eq(plugin.net->make_vdevice(&device, &both), NET_SUCCESS, "%s", last_warning);
    run_laps(&plugin, device, 64);
    plugin_close(&plugin);
}

/* The job of one side is aborted: it closes its comm, without an error of its own. */
Test(request, a_send_that_waits_for_a_receiver_that_closed_ends)
{
    struct plugin plugin = plugin_open();
    struct pair pair = pair_open(&plugin, 0);
    net_result result = NET_SUCCESS;
    void *request = NULL;

    cr_assert_eq(plugin.net->close_recv(pair.recv), NET_SUCCESS);
    for (uint64_t give_up = prs_clock_ms() + PAIR_LIMIT_MS; result == NET_SUCCESS && prs_clock_ms() < give_up;)
        result = plugin.net->isend(pair.send, pair.source, 8, 1, pair.source_mhandle, NULL, &request);
    cr_assert_eq(result, NET_REMOTE_ERROR, "%d", result);
    cr_assert(strstr(last_warning, "closed"), "%s", last_warning);
}

Test(request, a_receive_of_a_sender_that_closed_ends)
{
    struct plugin plugin = plugin_open();
    struct pair pair = pair_open(&plugin, 0);
    void *recv[40];

    /* Some writes of records have completed, and some are lazy and have not. */
    for (int i = 0; i < 40; i++)
        recv[i] = recv_bytes(&plugin, &pair, 0, 8, 1);
    for (int i = 0; i < 39; i++)
        cr_assert_eq(finish(&plugin, send_bytes(&plugin, &pair, 0, 8, 1), NULL), NET_SUCCESS);
    for (int i = 0; i < 39; i++)
        cr_assert_eq(finish(&plugin, recv[i], NULL), NET_SUCCESS);
    cr_assert_eq(plugin.net->close_send(pair.send), NET_SUCCESS);
    cr_assert_eq(finish(&plugin, recv[39], NULL), NET_REMOTE_ERROR);
    cr_assert(strstr(last_warning, "closed"), "%s", last_warning);
}

Test(request, registrations_and_memory_may_vanish_before_the_queues_with_sends_in_flight)
{
    struct plugin plugin = plugin_open();
    struct pair pair = pair_open(&plugin, 0);
    void *recv[8], *send = NULL;
    int done = 0;

    for (int i = 0; i < 8; i++)
        recv[i] = recv_bytes(&plugin, &pair, 0, PAIR_BYTES, 1);
    for (int i = 0; i < 20; i++, usleep(1000)) /* mostly enough for all records, so that no send waits for its own */
        cr_assert_eq(plugin.net->test(recv[7], &done, NULL), NET_SUCCESS);
    for (int sent = 0; sent < 4; sent += send != NULL) { /* drive the receiver only until its records are written */
        cr_assert_eq(plugin.net->isend(pair.send, pair.source, PAIR_BYTES, 1, pair.source_mhandle, NULL, &send),
                     NET_SUCCESS);
        if (!send)
            cr_assert_eq(plugin.net->test(recv[7], &done, NULL), NET_SUCCESS);
    }
    /* As in an abort, without waiting for requests. The sender's memory goes first. Then there is time for what waits
     * until the provider takes it, if a thread of the plugin gives it that. */
    cr_assert_eq(plugin.net->dereg(pair.send, pair.source_mhandle), NET_SUCCESS);
    free(pair.source);
    usleep(100000);
    cr_assert_eq(plugin.net->dereg(pair.recv, pair.target_mhandle), NET_SUCCESS);
    free(pair.target);
    cr_assert_eq(plugin.net->close_send(pair.send), NET_SUCCESS);
    cr_assert_eq(plugin.net->close_recv(pair.recv), NET_SUCCESS);
    plugin_close(&plugin);
}

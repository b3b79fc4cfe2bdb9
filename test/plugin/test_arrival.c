/* SPDX-License-Identifier: Apache-2.0 */
/* A sender that notifies without a receive. The plugin's objects and the transport are linked in, since NCCL's calls
 * cannot make it do that. */
#include <criterion/criterion.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "plugin/comm.h"
#include "transport/util/clock.h"

enum { LIMIT_MS = 60000 };

extern const struct net_v12 ncclNetPlugin_v12;
static const struct net_v12 *const net = &ncclNetPlugin_v12;
static char said[1024];

static void keep(int level, unsigned long flags, const char *file, int line, const char *format, ...)
{
    va_list args;

    (void)flags, (void)file, (void)line;
    if (level > NET_LOG_WARN)
        return;
    va_start(args, format);
    vsnprintf(said, sizeof(said), format, args);
    va_end(args);
}

static void connect_comms(void *context, struct send_comm **send, struct recv_comm **recv)
{
    uint64_t give_up = prs_clock_ms() + LIMIT_MS;
    uint8_t handle[NET_HANDLE_BYTES];
    void *listen, *made = NULL, *accepted = NULL;

    cr_assert_eq(net->listen(context, 0, handle, &listen), NET_SUCCESS);
    while (!made || !accepted) {
        if (!made)
            cr_assert_eq(net->connect(context, 0, handle, &made, NULL), NET_SUCCESS, "%s", said);
        if (!accepted)
            cr_assert_eq(net->accept(listen, &accepted, NULL), NET_SUCCESS, "%s", said);
        cr_assert_lt(prs_clock_ms(), give_up);
    }
    net->close_listen(listen);
    *send = made;
    *recv = accepted;
}

Test(arrival, that_no_receive_expects_is_an_error_of_the_receiver, .timeout = 300)
{
    struct prs_put put = {.notify_id = 5, .group = PRS_GROUP_NONE, .flags = PRS_PUT_NOTIFY};
    uint64_t give_up = prs_clock_ms() + LIMIT_MS;
    struct send_comm *send;
    struct recv_comm *recv;
    struct prs_op op;
    void *context, *request, *data = NULL, *mhandle = NULL;
    int tag = 1, done = 0;
    size_t size = 0;
    net_result r = NET_SUCCESS;

    cr_assert_eq(net->init(&context, 1, NULL, keep, NULL), NET_SUCCESS);
    connect_comms(context, &send, &recv);
    cr_assert_eq(net->irecv(recv, 1, &data, &size, &tag, &mhandle, NULL, &request), NET_SUCCESS);
    cr_assert_eq(prs_peer_put(send->base.peer, &op, &put), 0);
    while (r == NET_SUCCESS) { /* the receive that there is expects another number */
        cr_assert_geq(prs_peer_progress(send->base.peer), 0);
        r = net->test(request, &done, NULL);
        cr_assert_lt(prs_clock_ms(), give_up);
    }
    cr_assert(strstr(said, "notification 5 of 0 bytes, which no receive expects"), "%s", said);
    net->close_send(send);
    net->close_recv(recv);
    net->finalize(context);
}

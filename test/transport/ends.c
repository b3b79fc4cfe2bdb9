/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "test/transport/ends.h"
#include "transport/util/clock.h"

struct prs_fabric *fabric;
const struct prs_rail_set one_rail = {1, {0}};

void open_with(uint32_t timeout_ms)
{
    struct prs_fabric_options options = {.timeout_ms = timeout_ms};

    cr_assert_eq(prs_fabric_open(&options, &fabric), 0, "%s", prs_error_text());
    cr_assert_gt(prs_fabric_rails(fabric), 0);
}

void open_default(void)
{
    open_with(HEALTHY_MS);
}

void close_default(void)
{
    prs_fabric_close(fabric);
}

struct prs_listener *open_listener(struct prs_handle *handle)
{
    struct prs_listener *listener;

    cr_assert_eq(prs_listen(fabric, &one_rail, handle, &listener), 0, "%s", prs_error_text());
    return listener;
}

struct prs_connector *open_connector(const struct prs_handle *handle)
{
    struct prs_connector *connector;

    cr_assert_eq(prs_connect(fabric, &one_rail, handle, NULL, &connector), 0, "%s", prs_error_text());
    return connector;
}

int meet(struct prs_listener *listener, struct prs_connector *connector, struct prs_peer **a, struct prs_peer **b)
{
    uint64_t deadline_ms = prs_clock_ms() + 2 * HEALTHY_MS;
    int ra = PRS_AGAIN, rb = PRS_AGAIN;

    while (ra == PRS_AGAIN || rb == PRS_AGAIN) {
        if (ra == PRS_AGAIN)
            ra = prs_connector_step(connector, a);
        if (rb == PRS_AGAIN)
            rb = prs_accept(listener, NULL, b);
        if (ra < 0 || rb < 0)
            return ra < 0 ? ra : rb;
        cr_assert_lt(prs_clock_ms(), deadline_ms, "neither connected nor failed");
    }
    return 0;
}

void connect_once(struct prs_listener *listener, const struct prs_handle *handle)
{
    struct prs_connector *connector = open_connector(handle);
    struct prs_peer *a, *b;

    cr_assert_eq(meet(listener, connector, &a, &b), 0, "%s", prs_error_text());
    cr_assert(strstr(prs_peer_describe(a), " over ") && strstr(prs_peer_describe(b), "queue"));
    prs_peer_close(a);
    prs_peer_close(b);
}

bool ends_have_ipv6(void)
{
    struct sockaddr_in6 loopback = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    int fd = socket(AF_INET6, SOCK_STREAM, 0);
    bool have = fd >= 0 && bind(fd, (struct sockaddr *)&loopback, sizeof(loopback)) == 0;

    if (fd >= 0)
        close(fd);
    return have;
}

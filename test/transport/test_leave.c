/* SPDX-License-Identifier: Apache-2.0 */
/* What a link over libfabric leaves behind in its device when it closes: nothing. Both ends are in one process. */
#include <criterion/criterion.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "test/transport/ends.h"
#include "transport/nic/fabric.h"
#include "transport/nic/ofi/device.h"
#include "transport/nic/ofi/link.h"
#include "transport/nic/ofi/ofi.h"
#include "transport/peer/peer.h"
#include "transport/util/clock.h"

enum { MANY = 40 };

static bool mock_has(const char *word)
{
    return getenv("MOCK_CXI") && strstr(getenv("MOCK_CXI"), word);
}

static void leave(struct prs_link *link)
{
    (void)link;
}

/* ---- reads of the other side's keys ---- */

static struct prs_ofi_rows *rows(void)
{
    return &prs_ofi_device(fabric->rail[0].domain)->rows;
}

static bool is_left(const struct prs_ofi_rows *rows)
{
    bool left = rows->busy;

    for (size_t i = 0; i < PRS_OFI_ROW_READS; i++)
        left |= rows->request[i].link != NULL;
    return left;
}

/* Close a peer while it reads the key of its first put. */
static void close_while_reading(struct prs_listener *listener, const struct prs_handle *handle, bool kill)
{
    static uint64_t words[2];
    struct prs_mem memory = {.addr = words, .len_bytes = sizeof(words), .kind = PRS_MEM_HOST};
    struct prs_put put = {.src_addr = &words[0], .dst_addr = (uintptr_t)&words[1], .len_bytes = sizeof(words[0])};
    struct prs_connector *connector = open_connector(handle);
    struct prs_nic_ops lazy;
    struct prs_region *region;
    struct prs_peer *a, *b;
    struct prs_keys keys;
    struct prs_op op;

    cr_assert_eq(prs_region_register(fabric, &one_rail, &memory, &region), 0, "%s", prs_error_text());
    prs_region_keys(region, &keys);
    cr_assert_eq(meet(listener, connector, &a, &b), 0, "%s", prs_error_text());
    put.src = region;
    put.dst = &keys;
    cr_assert_eq(prs_peer_put(a, &op, &put), 0, "%s", prs_error_text());
    cr_assert(prs_peer_progress(a) >= 0, "%s", prs_error_text());
    cr_assert(rows()->busy, "the key is not being read");
    if (!kill) {
        lazy = *a->nic;
        lazy.kill = leave;
        a->nic = &lazy;
    }
    prs_peer_close(a);
    cr_assert(!is_left(rows()), "%#llx reads of keys are left", (unsigned long long)rows()->busy);
    prs_peer_close(b);
    prs_region_release(region);
}

static void read_and_close(bool kill)
{
    struct prs_listener *listener;
    struct prs_handle handle;

    if (!mock_has("late=") || mock_has("own-keys"))
        cr_skip_test("needs test/mock_cxi with keys of the provider, and MOCK_CXI=late=MICROSECONDS");
    open_default();
    listener = open_listener(&handle);
    for (int i = 0; i < 4; i++)
        close_while_reading(listener, &handle, kill);
    prs_listener_close(listener);
    close_default();
}

Test(leave, a_link_that_was_killed_has_given_its_reads_back)
{
    read_and_close(true);
}

Test(leave, a_link_that_closes_at_once_gives_its_reads_back)
{
    read_and_close(false);
}

/* ---- addresses ---- */

Test(leave, a_link_is_forgotten_with_its_address_and_its_own)
{
    struct prs_listener *listener;
    struct prs_handle handle;

    if (!mock_has("addresses="))
        cr_skip_test("needs test/mock_cxi, and MOCK_CXI=addresses=MOST");
    open_default();
    listener = open_listener(&handle);
    for (int i = 0; i < MANY; i++)
        connect_once(listener, &handle);
    prs_listener_close(listener);
    close_default();
}

/* ---- connections that the other side has begun ---- */

/* Connect to the endpoint of a peer as the provider of the other side does, which is then stopped. */
static int call_endpoint(struct prs_peer *peer)
{
    struct prs_ofi_endpoint *endpoint = prs_ofi_link_of(peer->link[0])->endpoint;
    struct sockaddr_storage name;
    size_t bytes = prs_ofi_endpoint_name(endpoint, (uint8_t *)&name, sizeof(name));
    int fd = socket(name.ss_family, SOCK_STREAM, 0);

    cr_assert(fd >= 0 && connect(fd, (struct sockaddr *)&name, (socklen_t)bytes) == 0, "%s", strerror(errno));
    return fd;
}

/* Has this process another end of this connection? */
static bool is_held(int fd)
{
    struct sockaddr_storage own = {0}, other;
    socklen_t bytes = sizeof(own);
    bool held = false;

    cr_assert_eq(getsockname(fd, (struct sockaddr *)&own, &bytes), 0);
    for (int i = 0; i < 1024; i++) {
        memset(&other, 0, sizeof(other));
        bytes = sizeof(other);
        held |= !getpeername(i, (struct sockaddr *)&other, &bytes) && !memcmp(&other, &own, sizeof(own));
    }
    return held;
}

static void progress_for(struct prs_peer *a, struct prs_peer *b, uint64_t ms)
{
    for (uint64_t end = prs_clock_ms() + ms; prs_clock_ms() < end;) {
        cr_assert(!a || prs_peer_progress(a) >= 0, "%s", prs_error_text());
        cr_assert(prs_peer_progress(b) >= 0, "%s", prs_error_text());
    }
}

Test(leave, a_connection_that_was_only_begun_ends_before_its_endpoint)
{
    struct prs_listener *listener;
    struct prs_handle handle;
    struct prs_peer *a, *b;
    int fd;

    open_default();
    if (prs_ofi_device(fabric->rail[0].domain)->info->ep_attr->protocol != PRS_OFI_PROTO_XNET)
        cr_skip_test("needs PERSEUS_PROVIDER=net");
    listener = open_listener(&handle);
    cr_assert_eq(meet(listener, open_connector(&handle), &a, &b), 0, "%s", prs_error_text());
    fd = call_endpoint(a);
    progress_for(a, b, 100);
    cr_assert(is_held(fd), "the provider has not accepted the connection");
    prs_peer_close(a);
    cr_assert(!is_held(fd), "the endpoint is gone, and a connection to it is left");
    close(fd);
    progress_for(NULL, b, 100);
    prs_peer_close(b);
    prs_listener_close(listener);
    close_default();
}

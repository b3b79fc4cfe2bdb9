/* SPDX-License-Identifier: Apache-2.0 */
/* Connecting. Both ends, and strangers, are in one process and thread. */
#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <errno.h>
#include <limits.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "test/support/open_files.h"
#include "test/transport/ends.h"
#include "transport/nic/domain.h"
#include "transport/nic/fabric.h"
#include "transport/peer/handshake.h"
#include "transport/util/clock.h"
#include "transport/util/log.h"

static long resident_pages(void)
{
    FILE *file = fopen("/proc/self/statm", "r");
    long size, resident;

    cr_assert_eq(fscanf(file, "%ld %ld", &size, &resident), 2);
    fclose(file);
    return resident;
}

Test(connect, a_thousand_cycles_leave_nothing_behind, .init = open_default, .fini = close_default, .timeout = 800)
{
    const char *wanted = getenv("PERSEUS_TEST_CYCLES"); /* fewer on slow machines, such as soft-RoCE in QEMU */
    int cycles = wanted ? atoi(wanted) : 1000, files = 0;
    long pages = 0, least_more = LONG_MAX; /* pages that a fifth of the cycles has added */

    for (int i = 0; i < cycles; i++) {
        struct prs_listener *listener;
        struct prs_handle handle;

        listener = open_listener(&handle);
        connect_once(listener, &handle);
        prs_listener_close(listener);
        if (i == 20) { /* everything that is made only once exists by now */
            files = open_files();
            pages = resident_pages();
        } else if (i > 20 && (i + 1) % (cycles / 5) == 0) {
            long now = resident_pages();

            least_more = now - pages < least_more ? now - pages : least_more;
            pages = now;
        }
    }
    cr_assert_leq(open_files(), files + 4, "%d, and %d after 20 cycles: libfabric may still have a socket or two",
                  open_files(), files);
    /* A leak in each cycle shows in each fifth. A pool of libfabric may grow once, when a host is busy. */
    /* The sanitizers' memory grows: one keeps freed memory for a while, the other its state of unmapped words. */
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    cr_assert_lt(least_more, 1024 / 5, "%ld pages more in each fifth", least_more);
#else
    (void)least_more;
#endif
}

/* On both ends; otherwise a receiver would never notice that the other host has lost power. */
Test(connect, a_peer_probes_whether_the_other_host_is_alive, .init = open_default, .fini = close_default)
{
    struct prs_listener *listener;
    struct prs_connector *connector;
    struct prs_handle handle;
    struct prs_peer *a, *b;
    int ends = 0;

    listener = open_listener(&handle);
    connector = open_connector(&handle);
    cr_assert_eq(meet(listener, connector, &a, &b), 0, "%s", prs_error_text());
    for (int fd = 0; fd < 1024; fd++) {
        int alive = 0, idle_s = 0, every_s = 0, probes = 0;
        socklen_t bytes = sizeof(int);

        if (getsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, &bytes) == 0 &&
            getsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &every_s, &bytes) == 0 &&
            getsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, &bytes) == 0 &&
            getsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &alive, &bytes) == 0 && alive)
            ends += idle_s + every_s * probes <= 30; /* not longer than the default time limit of a wait */
    }
    cr_assert_eq(ends, 2);
    prs_peer_close(a);
    prs_peer_close(b);
    prs_listener_close(listener);
}

Test(connect, one_listener_serves_many, .init = open_default, .fini = close_default)
{
    struct prs_connector *connector[8];
    struct prs_listener *listener;
    struct prs_peer *near[8], *far[8];
    int left = 16, got = 0, state[8];
    struct prs_handle handle;

    listener = open_listener(&handle);
    for (int i = 0; i < 8; i++) {
        connector[i] = open_connector(&handle);
        state[i] = PRS_AGAIN;
    }
    for (uint64_t give_up = prs_clock_ms() + HEALTHY_MS; left;) {
        cr_assert_lt(prs_clock_ms(), give_up);
        for (int i = 0; i < 8; i++) {
            if (state[i] == PRS_AGAIN) {
                state[i] = prs_connector_step(connector[i], &near[i]);
                cr_assert_geq(state[i], 0, "%s", prs_error_text());
                left -= state[i] == 0;
            }
        }
        if (got < 8 && prs_accept(listener, NULL, &far[got]) == 0) {
            got++;
            left--;
        }
    }
    for (int i = 0; i < 8; i++) {
        prs_peer_close(near[i]);
        prs_peer_close(far[i]);
    }
    prs_listener_close(listener);
}

/* ---- the end of a program ---- */

static _Noreturn void exit_with_open_connections(void)
{
    enum { CONNECTIONS = 4 };
    struct prs_listener *listener;
    struct prs_handle handle;
    struct prs_peer *a, *b;

    open_default();
    listener = open_listener(&handle);
    for (int i = 0; i < CONNECTIONS; i++)
        cr_assert_eq(meet(listener, open_connector(&handle), &a, &b), 0, "%s", prs_error_text());
    exit(7);
}

/* A NCCL job may exit with open connections: the transport's threads run while exit() unloads libraries that they
 * call. */
Test(connect, a_program_may_exit_with_open_connections)
{
#if defined(__SANITIZE_THREAD__)
    cr_skip_test("ThreadSanitizer starts no thread in a forked child");
#endif
    for (int i = 0; i < 5; i++) {
        pid_t pid = fork();
        int status;

        cr_assert_geq(pid, 0);
        if (pid == 0)
            exit_with_open_connections();
        cr_assert_eq(waitpid(pid, &status, 0), pid);
        cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == 7, "status %#x", (unsigned)status);
    }
}

/* Over loopback, since no network of the test has IPv6. */
Test(connect, a_listener_on_ipv6_is_reached, .fini = close_default)
{
    struct prs_listener *listener;
    struct prs_handle handle;
    union prs_address address;
    uint8_t cookie[16];

    if (!ends_have_ipv6())
        cr_skip_test("no IPv6 here");
    setenv("NCCL_SOCKET_FAMILY", "AF_INET6", 1);
    setenv("NCCL_SOCKET_IFNAME", "=lo", 1);
    open_default();
    listener = open_listener(&handle);
    cr_assert_eq(prs_handle_parse(&handle, cookie, &address), 0, "%s", prs_error_text());
    cr_assert(address.any.sa_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&address.v6.sin6_addr));
    cr_assert_neq(address.v6.sin6_port, 0, "the handle has no port");
    connect_once(listener, &handle);
    prs_listener_close(listener);
}

/* ---- bad handles ---- */

Test(connect, a_foreign_or_damaged_handle_is_refused, .init = open_default, .fini = close_default)
{
    struct prs_connector *connector;
    struct prs_listener *listener;
    struct prs_handle good, bad;
    struct prs_handle_wire *wire = (struct prs_handle_wire *)bad.bytes;

    listener = open_listener(&good);
    memset(&bad, 0, sizeof(bad));
    cr_assert_eq(prs_connect(fabric, &one_rail, &bad, NULL, &connector), -EPROTO, "all zero");
    cr_assert(strstr(prs_error_text(), "foreign"), "%s", prs_error_text());
    for (size_t i = 0; i < sizeof(bad.bytes); i++)
        bad.bytes[i] = (uint8_t)(i * 37);
    cr_assert_eq(prs_connect(fabric, &one_rail, &bad, NULL, &connector), -EPROTO, "a handle of another transport");
    bad = good;
    wire->version++;
    cr_assert_eq(prs_connect(fabric, &one_rail, &bad, NULL, &connector), -EPROTO);
    cr_assert(strstr(prs_error_text(), "version"), "%s", prs_error_text());
    for (size_t kept = 8; kept < sizeof(*wire); kept += 8) {
        bad = good;
        memset(bad.bytes + kept, 0, sizeof(bad.bytes) - kept);
        if (memcmp(&bad, &good, sizeof(*wire)) == 0)
            continue; /* these bytes are always zero */
        cr_assert_eq(prs_connect(fabric, &one_rail, &bad, NULL, &connector), -EPROTO, "cut after %zu bytes", kept);
    }
    bad = good;
    memset(bad.bytes + PRS_HANDLE_BYTES - PRS_HANDLE_CALLER_BYTES, 0xaa, PRS_HANDLE_CALLER_BYTES);
    connect_once(listener, &bad); /* the bad handle does not harm the listener */
    prs_listener_close(listener);
}

/* A handle with the address of one listener and the cookie of another: two jobs mixed up. */
Test(connect, a_wrong_cookie_is_refused_and_the_next_one_served, .init = open_default, .fini = close_default)
{
    struct prs_listener *listener, *other;
    struct prs_connector *connector;
    struct prs_handle good, foreign, mixed;
    union prs_address address;
    struct prs_peer *a, *b;
    uint8_t cookie[16];

    listener = open_listener(&good);
    other = open_listener(&foreign);
    cr_assert_eq(prs_handle_parse(&foreign, cookie, &address), 0);
    cr_assert_eq(prs_handle_parse(&good, (uint8_t[16]){0}, &address), 0);
    prs_handle_fill(cookie, &address, &mixed);
    fabric->config.timeout_ms = 300; /* it repeats the call for this long */
    connector = open_connector(&mixed);
    fabric->config.timeout_ms = HEALTHY_MS;
    cr_assert_eq(meet(listener, connector, &a, &b), -ECONNRESET, "%s", prs_error_text());
    connect_once(listener, &good);
    prs_listener_close(listener);
    prs_listener_close(other);
}

static void connect_to_nobody(void)
{
    struct prs_connector *connector;
    struct prs_listener *listener;
    struct prs_handle handle;
    struct prs_peer *peer;
    int r = PRS_AGAIN;

    listener = open_listener(&handle);
    prs_listener_close(listener);
    r = prs_connect(fabric, &one_rail, &handle, NULL, &connector);
    while (r == 0 || r == PRS_AGAIN)
        r = prs_connector_step(connector, &peer);
    cr_assert_eq(r, -ECONNREFUSED, "%d %s", r, prs_error_text());
    cr_assert(strstr(prs_error_text(), "ended"), "%s", prs_error_text());
}

Test(connect, to_nobody_is_refused_by_name, .init = open_default, .fini = close_default)
{
    connect_to_nobody();
}

/* A listener of another host may have told it, which is no process that has ended. */
Test(connect, a_loopback_address_that_refuses_is_called_one, .fini = close_default)
{
    setenv("NCCL_SOCKET_IFNAME", "lo", 1);
    open_default();
    connect_to_nobody();
    cr_assert(strstr(prs_error_text(), "loopback") && strstr(prs_error_text(), "NCCL_SOCKET_IFNAME"), "%s",
              prs_error_text());
}

/* A listener that accepts TCP but never answers. */
Test(connect, ends_at_the_time_limit, .fini = close_default)
{
    struct prs_connector *connector;
    struct prs_listener *listener;
    struct prs_handle handle;
    struct prs_peer *peer;
    uint64_t start;
    int r;

    open_with(300);
    listener = open_listener(&handle);
    connector = open_connector(&handle);
    start = prs_clock_ms();
    while ((r = prs_connector_step(connector, &peer)) == PRS_AGAIN)
        cr_assert_lt(prs_clock_ms(), start + HEALTHY_MS);
    cr_assert_eq(r, -ETIMEDOUT);
    cr_assert(strstr(prs_error_text(), "300 ms") && strstr(prs_error_text(), "accept"), "%s", prs_error_text());
    prs_listener_close(listener);
}

/* ---- strangers ---- */

static int call(const struct prs_handle *handle)
{
    union prs_address address;
    uint8_t cookie[16];
    int fd;

    cr_assert_eq(prs_handle_parse(handle, cookie, &address), 0);
    fd = socket(address.any.sa_family, SOCK_STREAM, 0);
    cr_assert_eq(connect(fd, &address.any, address.any.sa_family == AF_INET6 ? sizeof(address.v6) : sizeof(address.v4)),
                 0);
    return fd;
}

static void say(int fd, const void *bytes, size_t count)
{
    cr_assert_eq(send(fd, bytes, count, MSG_NOSIGNAL), (ssize_t)count);
}

enum { STRANGER_MS = 1500 };

Test(connect, strangers_do_not_disturb_it, .init = open_default, .fini = close_default)
{
    struct prs_frame_head head = {.magic = PRS_FRAME_MAGIC, .version = PRS_WIRE_VERSION, .type = PRS_FRAME_HELLO};
    struct prs_wire_hello hello = {.rail_count = 77, .queues_per_rail = 1};
    struct prs_listener *listener;
    struct prs_peer *peer;
    struct prs_handle handle;
    union prs_address address;
    uint64_t began = prs_clock_ms();
    char garbage[4096];
    ssize_t got;
    int fd[8];

    listener = open_listener(&handle);
    for (int i = 0; i < 8; i++)
        fd[i] = call(&handle);
    memset(garbage, 'G', sizeof(garbage));
    say(fd[0], garbage, sizeof(garbage));
    say(fd[1], "GET / HTTP/1.1\r\n\r\n", 18); /* shorter than the head of a frame, so it counts as silent */
    head.version = 99;
    say(fd[2], &head, sizeof(head));
    head.version = PRS_WIRE_VERSION;
    say(fd[3], &head, sizeof(head)); /* no cookie */
    cr_assert_eq(prs_handle_parse(&handle, head.cookie, &address), 0);
    head.length = 1u << 31;
    say(fd[4], &head, sizeof(head));
    head.length = sizeof(hello);
    say(fd[5], &head, sizeof(head)); /* the right cookie, but impossible numbers */
    say(fd[5], &hello, sizeof(hello));
    close(fd[6]);
    /* fd[7] sends nothing */
    fabric->config.timeout_ms = STRANGER_MS; /* for connections from now on */
    for (int i = 0; i < 50; i++)
        cr_assert_eq(prs_accept(listener, NULL, &peer), PRS_AGAIN);
    fabric->config.timeout_ms = HEALTHY_MS;
    connect_once(listener, &handle);
    for (int i = 0; i < 6; i++) {
        char byte;

        if (i == 1)
            continue;
        cr_assert_leq(recv(fd[i], &byte, 1, MSG_DONTWAIT), 0, "stranger %d got an answer", i);
    }
    for (int i = 1; i < 8; i += 6) { /* the silent ones are dropped */
        uint64_t give_up = prs_clock_ms() + HEALTHY_MS;

        while ((got = recv(fd[i], garbage, 1, MSG_DONTWAIT)) < 0 && errno == EAGAIN) {
            cr_assert_lt(prs_clock_ms(), give_up, "stranger %d is not dropped yet", i);
            cr_assert_eq(prs_accept(listener, NULL, &peer), PRS_AGAIN);
            usleep(1000);
        }
        cr_assert_leq(got, 0, "stranger %d got an answer", i); /* 0, or a reset, since its bytes were not read */
    }
    cr_assert_geq(prs_clock_ms() - began, (uint64_t)STRANGER_MS, "they were dropped too early");
    connect_once(listener, &handle);
    prs_listener_close(listener);
}

/* More strangers than handshakes at a time: a peer with the cookie must not wait for their limit. */
Test(connect, silent_strangers_give_way_to_a_peer, .fini = close_default)
{
    enum { STRANGERS = 150, LIMIT_MS = 2 * HEALTHY_MS };
    struct prs_listener *listener;
    struct prs_peer *peer;
    struct prs_handle handle;
    uint64_t began = prs_clock_ms();
    int fd[STRANGERS];

    open_with(LIMIT_MS);
    listener = open_listener(&handle);
    for (int i = 0; i < STRANGERS; i++) {
        fd[i] = call(&handle);
        cr_assert_eq(prs_accept(listener, NULL, &peer), PRS_AGAIN);
    }
    connect_once(listener, &handle);
    cr_assert_lt(prs_clock_ms() - began, LIMIT_MS / 2, "the strangers' limit is %d ms", LIMIT_MS);
    for (int i = 0; i < STRANGERS; i++)
        close(fd[i]);
    prs_listener_close(listener);
}

/* It is dropped regardless of a connection's limit, even if no others wait. */
Test(connect, a_silent_stranger_is_dropped_after_seconds, .init = open_default, .fini = close_default)
{
    uint64_t began = prs_clock_ms();
    struct prs_listener *listener;
    struct prs_handle handle;
    struct prs_peer *peer;
    char byte;
    int fd;

    listener = open_listener(&handle);
    fd = call(&handle);
    while (recv(fd, &byte, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN) {
        cr_assert_lt(prs_clock_ms() - began, HEALTHY_MS / 2, "it is still there");
        cr_assert_eq(prs_accept(listener, NULL, &peer), PRS_AGAIN);
        usleep(1000);
    }
    cr_assert_geq(prs_clock_ms() - began, 5000u, "a busy peer needs some time");
    connect_once(listener, &handle);
    close(fd);
    prs_listener_close(listener);
}

static int lines;
static char last_line[1024];

static void count_lines(void *user, int level, const char *file, int line, const char *text)
{
    (void)user;
    (void)file;
    (void)line;
    if (level > PRS_LEVEL_WARN)
        return;
    lines++;
    snprintf(last_line, sizeof(last_line), "%s", text);
}

Test(connect, many_strangers_are_few_lines_in_the_log, .init = open_default, .fini = close_default)
{
    enum { STRANGERS = 200 };
    uint64_t began = prs_clock_ms(), took;
    struct prs_listener *listener;
    struct prs_handle handle;
    struct prs_peer *peer;

    listener = open_listener(&handle);
    prs_log_sink(count_lines, NULL);
    for (int i = 0; i < STRANGERS; i++) {
        char garbage[64];
        int fd = call(&handle);

        memset(garbage, 'G', sizeof(garbage));
        say(fd, garbage, sizeof(garbage));
        cr_assert_eq(prs_accept(listener, NULL, &peer), PRS_AGAIN);
        close(fd);
    }
    took = prs_clock_ms() - began;
    prs_listener_close(listener);
    prs_log_sink(NULL, NULL);
    cr_assert(lines >= 2 && (uint64_t)lines <= 3 + took / 1000, "%d lines in %d ms", lines, (int)took);
    cr_assert(strstr(last_line, "connections were refused, the last: ") && strstr(last_line, "not Perseus"), "%s",
              last_line);
}

Test(connect, a_connector_that_gives_up_leaves_the_listener_sound, .init = open_default, .fini = close_default)
{
    struct prs_listener *listener;
    struct prs_handle handle;

    listener = open_listener(&handle);
    for (int steps = 0; steps < 6; steps++) {
        struct prs_connector *connector;
        struct prs_peer *a = NULL, *b = NULL;
        int ra = PRS_AGAIN;

        connector = open_connector(&handle);
        for (int i = 0; i < steps && ra == PRS_AGAIN; i++) {
            ra = prs_connector_step(connector, &a);
            if (!b && prs_accept(listener, NULL, &b) != 0)
                b = NULL;
        }
        if (ra == PRS_AGAIN)
            prs_connector_close(connector);
        prs_peer_close(a);
        prs_peer_close(b);
    }
    connect_once(listener, &handle);
    prs_listener_close(listener);
}

/* Each call reports it once; the caller decides whether to continue. */
Test(connect, a_listener_out_of_descriptors_says_so, .init = open_default, .fini = close_default)
{
    struct rlimit limit, before;
    struct prs_listener *listener;
    struct prs_peer *peer;
    struct prs_handle handle;
    int caller, next;

    listener = open_listener(&handle);
    caller = call(&handle);
    next = dup(caller); /* the lowest free descriptor */
    close(next);
    getrlimit(RLIMIT_NOFILE, &before);
    limit = before;
    limit.rlim_cur = (rlim_t)next;
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
    cr_assert_eq(prs_accept(listener, NULL, &peer), -EMFILE, "%s", prs_error_text());
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &before), 0);
    cr_assert_eq(prs_accept(listener, NULL, &peer), PRS_AGAIN, "it goes on when there are descriptors again");
    close(caller);
    connect_once(listener, &handle);
    prs_listener_close(listener);
}

/* ---- the environment ---- */

Test(connect, impossible_settings_are_refused_by_name)
{
    static const char *const rows[][2] = {{"NCCL_IB_HCA", "mlx5_0:x"},
                                          {"PERSEUS_ORDER", "whatever"},
                                          {"PERSEUS_TIMEOUT_MS", "0"},
                                          {"PERSEUS_LOG", "loud"}};

    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        setenv(rows[i][0], rows[i][1], 1);
        cr_assert_eq(prs_fabric_open(NULL, &fabric), -EINVAL, "%s=%s", rows[i][0], rows[i][1]);
        cr_assert(strstr(prs_error_text(), rows[i][0]), "%s", prs_error_text());
        unsetenv(rows[i][0]);
    }
}

Test(connect, a_device_that_is_lost_is_named_by_the_check_of_its_fabric, .init = open_default, .fini = close_default)
{
    struct prs_rail_set rails = {.count = prs_fabric_rails(fabric)};

    for (int i = 0; i < rails.count; i++)
        rails.rail[i] = i;
    cr_assert_eq(prs_fabric_check(fabric, &rails), 0, "%s", prs_error_text());
    prs_domain_lose(fabric->rail[rails.count - 1].domain, "device fatal");
    cr_assert_eq(prs_fabric_check(fabric, &rails), -EIO);
    cr_assert(strstr(prs_error_text(), "device fatal") &&
                  strstr(prs_error_text(), fabric->rail[rails.count - 1].info.name),
              "%s", prs_error_text());
    if (rails.count > 1)
        cr_assert_eq(prs_fabric_check(fabric, &one_rail), 0, "the first rail works");
    fabric->config.return_async_events = false;
    cr_assert_eq(prs_fabric_check(fabric, &rails), 0, "NCCL_IB_RETURN_ASYNC_EVENTS=0");
}

Test(connect, no_admitted_device_is_no_error)
{
    struct prs_fabric_options options = {.hca = "nobody_has_this"};

    cr_assert_eq(prs_fabric_open(&options, &fabric), 0);
    cr_assert_eq(prs_fabric_rails(fabric), 0);
    prs_fabric_close(fabric);
}

Test(connect, an_interface_that_does_not_exist_is_named, .init = open_default, .fini = close_default)
{
    struct prs_listener *listener;
    struct prs_handle handle;
    struct prs_fabric *other;

    setenv("NCCL_SOCKET_IFNAME", "=nosuch0", 1);
    cr_assert_eq(prs_fabric_open(NULL, &other), 0);
    cr_assert_eq(prs_listen(other, &one_rail, &handle, &listener), -ENODEV);
    cr_assert(strstr(prs_error_text(), "NCCL_SOCKET_IFNAME"), "%s", prs_error_text());
    prs_fabric_close(other);
}

Test(connect, memory_that_is_not_mapped_is_not_registered, .init = open_default, .fini = close_default)
{
    struct prs_mem mem = {.addr = (void *)0x10000, .len_bytes = 4096, .kind = PRS_MEM_HOST};
    struct prs_region *region;

    cr_assert_lt(prs_region_register(fabric, &one_rail, &mem, &region), 0);
    cr_assert(strstr(prs_error_text(), "0x10000"), "%s", prs_error_text());
    mem.kind = PRS_MEM_CUDA;
    mem.addr = &mem;
    if (prs_region_register(fabric, &one_rail, &mem, &region) == 0)
        prs_region_release(region);
    else
        cr_assert(strstr(prs_error_text(), "CUDA"), "%s", prs_error_text());
    mem.kind = PRS_MEM_HOST;
    mem.len_bytes = 0;
    cr_assert_eq(prs_region_register(fabric, &one_rail, &mem, &region), 0, "zero bytes are legal");
    prs_region_release(region);
    prs_region_release(NULL);
}

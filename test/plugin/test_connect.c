/* SPDX-License-Identifier: Apache-2.0 */
/* Connecting and closing; foreign handles and connections, dead peers, leaks. */
#include <criterion/criterion.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "test/plugin/pair.h"

TestSuite(connect, .timeout = 400);

/* Call connect until it fails or the limit passes. */
static net_result connect_until_refused(const struct plugin *plugin, uint8_t *handle)
{
    uint64_t give_up = prs_clock_ms() + PAIR_LIMIT_MS;
    net_result result = NET_SUCCESS;
    void *comm = NULL;

    while (result == NET_SUCCESS && !comm && prs_clock_ms() < give_up)
        result = plugin->net->connect(plugin->context, 0, handle, &comm, NULL);
    cr_assert_null(comm);
    return result;
}

Test(connect, a_foreign_handle_is_refused)
{
    struct plugin plugin = plugin_open();
    uint8_t handle[NET_HANDLE_BYTES];
    unsigned seed = (unsigned)getpid();

    memset(handle, 0, sizeof(handle));
    cr_assert_eq(connect_until_refused(&plugin, handle), NET_REMOTE_ERROR, "zeroes");
    for (int i = 0; i < 50; i++) {
        srand(seed + (unsigned)i);
        for (int j = 0; j < NET_HANDLE_BYTES; j++)
            handle[j] = (uint8_t)rand();
        cr_assert_eq(connect_until_refused(&plugin, handle), NET_REMOTE_ERROR, "seed %u", seed + (unsigned)i);
    }
    cr_assert_gt(warnings, 0);
    plugin_close(&plugin);
}

Test(connect, a_truncated_handle_is_refused)
{
    struct plugin plugin = plugin_open();
    uint8_t handle[NET_HANDLE_BYTES];
    void *listen = NULL;

    cr_assert_eq(plugin.net->listen(plugin.context, 0, handle, &listen), NET_SUCCESS);
    memset(handle + 24, 0, sizeof(handle) - 24);
    cr_assert_eq(connect_until_refused(&plugin, handle), NET_REMOTE_ERROR, "%s", last_warning);
    plugin.net->close_listen(listen);
    plugin_close(&plugin);
}

Test(connect, a_listener_that_has_closed_is_reported_in_time)
{
    uint8_t handle[NET_HANDLE_BYTES];
    struct plugin plugin;
    void *listen = NULL;
    net_result result;

    setenv("PERSEUS_TIMEOUT_MS", "2000", 1); /* another program may listen on the port by then */
    plugin = plugin_open();
    cr_assert_eq(plugin.net->listen(plugin.context, 0, handle, &listen), NET_SUCCESS);
    cr_assert_eq(plugin.net->close_listen(listen), NET_SUCCESS);
    result = connect_until_refused(&plugin, handle);
    cr_assert_eq(result, NET_REMOTE_ERROR, "%d", result);
    plugin_close(&plugin);
}

/* The port of this process's listening socket. */
static int listening_port(void)
{
    for (int fd = 3; fd < 1024; fd++) {
        struct sockaddr_in6 address;
        socklen_t size = sizeof(address), int_size = sizeof(int);
        int is_listening = 0;

        if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &is_listening, &int_size) == 0 && is_listening &&
            getsockname(fd, (struct sockaddr *)&address, &size) == 0 &&
            (address.sin6_family == AF_INET || address.sin6_family == AF_INET6))
            return ntohs(address.sin6_port); /* at the same offset in both families */
    }
    return -1;
}

static struct sockaddr_in own_address(int port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};

    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
}

Test(connect, garbage_on_the_listening_port_does_not_disturb_others)
{
    struct plugin plugin = plugin_open();
    struct pair pair = {.listen = NULL};
    uint8_t handle[NET_HANDLE_BYTES];
    char garbage[300];
    int strangers[3];

    setenv("NCCL_SOCKET_IFNAME", "=lo", 1);
    plugin_close(&plugin);
    plugin = plugin_open(); /* now it listens on the loopback interface, to which the strangers connect */
    cr_assert_eq(plugin.net->listen(plugin.context, 0, handle, &pair.listen), NET_SUCCESS, "%s", last_warning);
    memset(garbage, 'G', sizeof(garbage));
    for (int i = 0; i < 3; i++) { /* one sends much, one sends little, one sends nothing */
        struct sockaddr_in address = own_address(listening_port());
        const size_t bytes[] = {sizeof(garbage), 5, 0};

        strangers[i] = socket(AF_INET, SOCK_STREAM, 0);
        cr_assert_eq(connect(strangers[i], (struct sockaddr *)&address, sizeof(address)), 0, "port %d",
                     listening_port());
        cr_assert_eq(write(strangers[i], garbage, bytes[i]), (ssize_t)bytes[i]);
    }
    pair_connect(&plugin, 0, handle, &pair);
    for (int i = 0; i < 3; i++)
        close(strangers[i]);
    plugin.net->close_send(pair.send);
    plugin.net->close_recv(pair.recv);
    plugin_close(&plugin);
}

/* Both handshakes begin at one listener before either ends. Each receive comm must get the messages of its sender. */
Test(connect, two_senders_at_once_do_not_mix_their_messages)
{
    struct plugin plugin = plugin_open();
    uint8_t handle[2][NET_HANDLE_BYTES];
    struct pair pair[2] = {{NULL}, {NULL}};
    void *listen = NULL, *recv[2], *send[2];
    uint64_t give_up = prs_clock_ms() + PAIR_LIMIT_MS;

    cr_assert_eq(plugin.net->listen(plugin.context, 0, handle[0], &listen), NET_SUCCESS, "%s", last_warning);
    memcpy(handle[1], handle[0], sizeof(handle[1]));
    while (!pair[0].recv || !pair[1].recv || !pair[0].send || !pair[1].send) {
        for (int i = 0; i < 2; i++)
            if (!pair[i].send)
                cr_assert_eq(plugin.net->connect(plugin.context, 0, handle[i], &pair[i].send, NULL), NET_SUCCESS);
        if (!pair[1].recv)
            cr_assert_eq(plugin.net->accept(listen, pair[0].recv ? &pair[1].recv : &pair[0].recv, NULL), NET_SUCCESS);
        cr_assert_lt(prs_clock_ms(), give_up);
    }
    for (int i = 0; i < 2; i++) {
        pair[i].source = aligned_alloc(4096, 4096);
        pair[i].target = aligned_alloc(4096, 4096);
        memset(pair[i].source, 'a' + i, 4096);
        plugin.net->reg(pair[i].send, pair[i].source, 4096, NET_PTR_HOST, &pair[i].source_mhandle);
        plugin.net->reg(pair[i].recv, pair[i].target, 4096, NET_PTR_HOST, &pair[i].target_mhandle);
        recv[i] = recv_bytes(&plugin, &pair[i], 0, 4096, 1);
    }
    for (int i = 0; i < 2; i++) /* to the receive comm to which it is connected */
        send[i] = send_bytes(&plugin, &pair[i], 0, 100 * (size_t)(i + 1), 1);
    for (int i = 0; i < 2; i++) {
        int size = 0;

        cr_assert_eq(finish(&plugin, send[i], NULL), NET_SUCCESS, "%s", last_warning);
        cr_assert_eq(finish(&plugin, recv[i], &size), NET_SUCCESS, "%s", last_warning);
        cr_assert_eq(size, pair[i].target[0] == 'a' ? 100 : 200);
    }
    cr_assert_neq(pair[0].target[0], pair[1].target[0]);
    plugin.net->close_listen(listen);
    for (int i = 0; i < 2; i++)
        pair_close(&plugin, &pair[i]);
    plugin_close(&plugin);
}

/* Between the handle and accept, a rank waits for its other neighbour, which may be minutes late. */
Test(connect, a_late_rank_is_waited_for)
{
    enum { LIMIT_MS = 1000, LATE_MS = 4500 };
    struct plugin plugin;
    struct pair pair = {.listen = NULL};
    uint8_t handle[NET_HANDLE_BYTES];
    uint64_t accepts;
    char limit[16];
    int before;

    snprintf(limit, sizeof(limit), "%d", LIMIT_MS);
    setenv("PERSEUS_TIMEOUT_MS", limit, 1);
    plugin = plugin_open();
    cr_assert_eq(plugin.net->listen(plugin.context, 0, handle, &pair.listen), NET_SUCCESS, "%s", last_warning);
    before = warnings;
    for (accepts = prs_clock_ms() + LATE_MS; prs_clock_ms() < accepts; usleep(1000)) {
        cr_assert_eq(plugin.net->connect(plugin.context, 0, handle, &pair.send, NULL), NET_SUCCESS, "%s", last_warning);
        cr_assert_null(pair.send);
    }
    cr_assert_geq(warnings - before, 3, "one in each %d ms", LIMIT_MS);
    cr_assert_leq(warnings - before, LATE_MS / LIMIT_MS, "one in each %d ms", LIMIT_MS);
    cr_assert(strstr(last_warning, "accept"), "%s", last_warning);
    pair_connect(&plugin, 0, handle, &pair);
    cr_assert_eq(plugin.net->close_send(pair.send), NET_SUCCESS);
    cr_assert_eq(plugin.net->close_recv(pair.recv), NET_SUCCESS);
    plugin_close(&plugin);
}

Test(connect, a_connection_given_up_is_cleaned_up_by_finalize)
{
    struct plugin plugin = plugin_open(), other = plugin_open();
    uint8_t handle[NET_HANDLE_BYTES];
    void *listen = NULL, *send = NULL;
    int files;

    cr_assert_eq(plugin.net->listen(plugin.context, 0, handle, &listen), NET_SUCCESS);
    files = open_files();
    cr_assert_eq(plugin.net->connect(other.context, 0, handle, &send, NULL), NET_SUCCESS);
    cr_assert_null(send, "nobody accepts");
    plugin_close(&other);
    assert_files_closed(files);
    plugin.net->close_listen(listen);
    plugin_close(&plugin);
}

/* ---- a peer process that dies ---- */

#ifdef __SANITIZE_THREAD__
#    define SKIP_WHERE_A_CHILD_CANNOT_START_THREADS()                                                                  \
        cr_skip("Criterion has threads, and this sanitizer lets no child of such a process start its own")
#else
#    define SKIP_WHERE_A_CHILD_CANNOT_START_THREADS() (void)0
#endif

struct child {
    pid_t pid;
    int handle[2]; /* the parent writes the handle to connect to */
    int ready[2];  /* the child writes a byte when it may be killed */
};

/* Call it before the parent opens the plugin, so that the child does not inherit an open fabric. */
static struct child fork_sender(bool is_connecting)
{
    struct child child;

    cr_assert_eq(pipe(child.handle), 0);
    cr_assert_eq(pipe(child.ready), 0);
    child.pid = fork();
    if (child.pid == 0) {
        uint8_t handle[NET_HANDLE_BYTES];
        struct plugin plugin = plugin_open();
        void *send = NULL, *mhandle = NULL, *request;
        char *data = aligned_alloc(4096, 4096);
        int done;

        if (read(child.handle[0], handle, sizeof(handle)) != sizeof(handle))
            _exit(1);
        plugin.net->connect(plugin.context, 0, handle, &send, NULL);
        if (is_connecting && write(child.ready[1], "c", 1) == 1)
            pause();
        while (!send)
            plugin.net->connect(plugin.context, 0, handle, &send, NULL);
        plugin.net->reg(send, data, 4096, NET_PTR_HOST, &mhandle);
        for (int i = 0;; i++) {
            do
                plugin.net->isend(send, data, 4096, 0, mhandle, NULL, &request);
            while (!request);
            do
                plugin.net->test(request, &done, NULL);
            while (!done);
            if (i == 10 && write(child.ready[1], "s", 1) != 1)
                _exit(1);
        }
    }
    return child;
}

static void kill_child(struct child *child)
{
    char byte;

    cr_assert_eq(read(child->ready[0], &byte, 1), 1);
    kill(child->pid, SIGKILL);
    waitpid(child->pid, NULL, 0);
}

Test(connect, a_peer_killed_while_sending_is_reported_by_test)
{
    struct plugin plugin;
    uint8_t handle[NET_HANDLE_BYTES];
    void *listen = NULL, *recv = NULL, *mhandle = NULL, *request = NULL;
    char *data = aligned_alloc(4096, 4096);
    net_result result = NET_SUCCESS;
    struct child child;
    size_t size = 4096;
    int tag = 0, received = 0;
    uint64_t killed = 0;

    SKIP_WHERE_A_CHILD_CANNOT_START_THREADS();
    child = fork_sender(false);
    plugin = plugin_open();
    cr_assert_eq(plugin.net->listen(plugin.context, 0, handle, &listen), NET_SUCCESS);
    cr_assert_eq(write(child.handle[1], handle, sizeof(handle)), sizeof(handle));
    while (!recv)
        cr_assert_eq(plugin.net->accept(listen, &recv, NULL), NET_SUCCESS, "%s", last_warning);
    cr_assert_eq(plugin.net->reg(recv, data, 4096, NET_PTR_HOST, &mhandle), NET_SUCCESS);
    while (result == NET_SUCCESS) {
        int done = 0;

        if (!request)
            result = plugin.net->irecv(recv, 1, (void **)&data, &size, &tag, &mhandle, NULL, &request);
        if (request && result == NET_SUCCESS)
            result = plugin.net->test(request, &done, NULL);
        received += done;
        request = done ? NULL : request;
        if (received > 20 && killed == 0) {
            kill_child(&child);
            killed = prs_clock_ms();
        }
        if (killed > 0)
            cr_assert_lt(prs_clock_ms(), killed + PAIR_LIMIT_MS, "no call has failed since the peer died");
    }
    cr_assert_eq(result, NET_REMOTE_ERROR, "%d", result);
    cr_assert(strstr(last_warning, "softnic") || strstr(last_warning, "GID"), "names the rail: %s", last_warning);
    cr_assert_eq(plugin.net->dereg(recv, mhandle), NET_SUCCESS);
    cr_assert_eq(plugin.net->close_recv(recv), NET_SUCCESS);
    cr_assert_eq(plugin.net->close_listen(listen), NET_SUCCESS);
    free(data);
    plugin_close(&plugin);
}

Test(connect, a_peer_killed_while_connecting_does_not_block_the_next)
{
    struct plugin plugin;
    uint8_t handle[NET_HANDLE_BYTES];
    void *listen = NULL, *recv = NULL, *send = NULL;
    struct child child;
    uint64_t give_up;

    SKIP_WHERE_A_CHILD_CANNOT_START_THREADS();
    child = fork_sender(true);
    plugin = plugin_open();
    cr_assert_eq(plugin.net->listen(plugin.context, 0, handle, &listen), NET_SUCCESS);
    cr_assert_eq(write(child.handle[1], handle, sizeof(handle)), sizeof(handle));
    kill_child(&child);
    give_up = prs_clock_ms() + PAIR_LIMIT_MS;
    while (!send || !recv) {
        if (!send)
            cr_assert_eq(plugin.net->connect(plugin.context, 0, handle, &send, NULL), NET_SUCCESS, "%s", last_warning);
        if (!recv)
            plugin.net->accept(listen, &recv, NULL);
        cr_assert_lt(prs_clock_ms(), give_up);
    }
    plugin.net->close_listen(listen);
    plugin.net->close_send(send);
    plugin.net->close_recv(recv);
    plugin_close(&plugin);
}

/* ---- leaks ---- */

/* A field of /proc/self/status: "VmRSS:" is all resident memory, "RssShmem:" the part of it that is shared. */
static long status_kib(const char *field)
{
    FILE *file = fopen("/proc/self/status", "re");
    long kib = -1;
    char line[256];

    while (fgets(line, sizeof(line), file))
        if (strncmp(line, field, strlen(field)) == 0)
            kib = strtol(line + strlen(field), NULL, 10);
    fclose(file);
    cr_assert_geq(kib, 0, "%s", field);
    return kib;
}

Test(connect, a_thousand_connections_leave_nothing_behind)
{
    enum { CYCLES = 1000, SETTLE = 100, GROWTH_KIB = 2048 };
    struct plugin plugin = plugin_open();
    long kib = 0, shared_kib = 0;
    int files = 0;

    for (int i = 0; i < CYCLES; i++) {
        struct pair pair = pair_open(&plugin, 0);
        void *recv = recv_bytes(&plugin, &pair, 0, 64, 1), *send = send_bytes(&plugin, &pair, 0, 64, 1);

        cr_assert_eq(finish(&plugin, send, NULL), NET_SUCCESS);
        cr_assert_eq(finish(&plugin, recv, NULL), NET_SUCCESS);
        pair_close(&plugin, &pair);
        if (i == SETTLE) {
            files = open_files();
            kib = status_kib("VmRSS:");
            shared_kib = status_kib("RssShmem:");
        }
    }
    kib = status_kib("VmRSS:") - kib;
    shared_kib = status_kib("RssShmem:") - shared_kib;
    assert_files_closed(files);
    cr_assert_lt(shared_kib, GROWTH_KIB, "%ld KiB of shared memory more", shared_kib);
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
    kib = 0; /* the sanitizer's own memory grows, and keeps what is freed; LeakSanitizer finds leaks */
#endif
    cr_assert_lt(kib, GROWTH_KIB, "%ld KiB more", kib);
    plugin_close(&plugin);
}

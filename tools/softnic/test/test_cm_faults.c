/* SPDX-License-Identifier: Apache-2.0 */
/* rdma_cm: refusals, silence, peers that vanish or send anything; addresses and ports. */
#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tools/softnic/test/cm_support.h"
#include "tools/softnic/cm/message.h"

TestSuite(cm_faults, .init = cm_setup, .timeout = 300);

/* ---- refusals and silence ---- */

Test(cm_faults, a_listener_that_comes_after_the_request_gets_it)
{
    static struct sn_rdma_conn_param param = {.qp_num = 5};

    resolve(&client, NULL, DEVICE_1, PORT, SN_RDMA_PS_TCP);
    cr_assert_eq(rdma_connect(client.id, &param), 0);
    listen_on(DEVICE_1, PORT, SN_RDMA_PS_TCP, 0);
    cr_assert(silent(client.channel, 1000), "it calls again, and is not refused");
    take_request();
    all_close();
}

struct refusal {
    enum sn_rdma_port_space ps;
    enum sn_rdma_event_type event;
    int nobody, refused;
};

ParameterizedTestParameters(cm_faults, refusals_have_the_specifications_numbers)
{
    static struct refusal cases[] = {{SN_RDMA_PS_TCP, SN_RDMA_REJECTED, 8, 28},
                                     {SN_RDMA_PS_UDP, SN_RDMA_UNREACHABLE, 1, 2}};

    return cr_make_param_array(struct refusal, cases, 2);
}

ParameterizedTest(struct refusal *c, cm_faults, refusals_have_the_specifications_numbers, .init = cm_setup,
                  .timeout = 300)
{
    static struct sn_rdma_conn_param param = {.qp_num = 5};

    resolve(&client, NULL, DEVICE_1, PORT, c->ps);
    cr_assert_eq(rdma_connect(client.id, &param), 0);
    ack(client.channel, c->event, c->nobody);
    side_close(&client);

    listen_on("0.0.0.0", PORT, c->ps, 0);
    resolve(&client, NULL, DEVICE_1, PORT, c->ps);
    cr_assert_eq(rdma_connect(client.id, &param), 0);
    take_request();
    cr_assert_eq(rdma_reject(server.id, NULL, 0), 0);
    ack(client.channel, c->event, c->refused);
    cr_assert(rdma_accept(server.id, &param) == -1, "refused already");
    side_close(&client);
    side_close(&server);
    server.id = NULL;

    /* Two rounds: the server destroys the request; then it destroys the listener, which has not handled the request
     * yet. */
    for (int i = 0; i < 2; i++) {
        resolve(&client, NULL, DEVICE_1, PORT, c->ps);
        cr_assert_eq(rdma_connect(client.id, &param), 0);
        if (i == 0) {
            take_request();
            rdma_destroy_id(server.id);
            server.id = NULL;
        } else {
            rdma_destroy_id(listener);
            listener = NULL;
        }
        ack(client.channel, c->event, c->refused);
        side_close(&client);
    }
    client.id = NULL;
    all_close();
}

Test(cm_faults, who_gets_no_answer_learns_it_in_time)
{
    static struct sn_rdma_conn_param param = {.qp_num = 5};
    uint64_t before = now_ns();

    setenv("SOFTNIC_CM_TIMEOUT_MS", "300", 1);
    listen_on("0.0.0.0", PORT, SN_RDMA_PS_TCP, 0);
    resolve(&client, NULL, DEVICE_1, PORT, SN_RDMA_PS_TCP);
    cr_assert_eq(rdma_connect(client.id, &param), 0);
    ack(client.channel, SN_RDMA_UNREACHABLE, -ETIMEDOUT);
    cr_assert_geq(now_ns() - before, 300 * 1000000ull);
    take_request();
    ack(server.channel, SN_RDMA_REJECTED, 28);
    cr_assert(rdma_accept(server.id, &param) == -1 && errno == ECONNRESET);
    side_close(&client);
    side_close(&server);
    server.id = NULL;

    /* the other way round: accepted, and never told that the client is ready */
    resolve(&client, NULL, DEVICE_1, PORT, SN_RDMA_PS_TCP);
    cr_assert_eq(rdma_connect(client.id, &param), 0);
    take_request();
    cr_assert_eq(rdma_accept(server.id, &param), 0);
    ack(server.channel, SN_RDMA_UNREACHABLE, -ETIMEDOUT);
    all_close();
}

/* The cable of either side. A request waits for it as long as for an answer. */
Test(cm_faults, a_request_waits_while_a_cable_is_pulled)
{
    static struct sn_rdma_conn_param param = {.qp_num = 5};

    listen_on("0.0.0.0", PORT, SN_RDMA_PS_TCP, 0);
    for (int side = 0; side < 2; side++) {
        __atomic_store_n(&world->devs[side].port_up, 0, __ATOMIC_RELEASE);
        resolve(&client, DEVICE_0, DEVICE_1, PORT, SN_RDMA_PS_TCP);
        cr_assert_eq(rdma_connect(client.id, &param), 0);
        cr_assert(silent(client.channel, 100), "it calls again, when its program waits for events");
        cr_assert(silent(server.channel, 0), "side %d", side);
        __atomic_store_n(&world->devs[side].port_up, 1, __ATOMIC_RELEASE);
        cr_assert(silent(client.channel, 1000));
        take_request();
        side_close(&client);
        side_close(&server);
        server.id = NULL;
    }
    setenv("SOFTNIC_CM_TIMEOUT_MS", "300", 1);
    __atomic_store_n(&world->devs[1].port_up, 0, __ATOMIC_RELEASE);
    resolve(&client, DEVICE_0, DEVICE_1, PORT, SN_RDMA_PS_TCP);
    cr_assert_eq(rdma_connect(client.id, &param), 0);
    ack(client.channel, SN_RDMA_UNREACHABLE, -ETIMEDOUT);
    cr_assert(silent(server.channel, 0));
    all_close();
}

/* The listener does not look while more clients call than its queue holds. All are served, or time out. */
Test(cm_faults, calls_wait_for_room_in_the_listeners_queue)
{
    static struct sn_rdma_conn_param param = {.qp_num = 5};
    enum { CALLS = 6 };
    struct side calls[CALLS] = {0};
    bool refused[CALLS] = {0};

    listen_on(DEVICE_1, PORT, SN_RDMA_PS_TCP, 1);
    for (int i = 0; i < CALLS; i++) {
        resolve(&calls[i], NULL, DEVICE_1, PORT, SN_RDMA_PS_TCP);
        cr_assert_eq(rdma_connect(calls[i].id, &param), 0);
        cr_assert(silent(calls[i].channel, 0));
    }
    for (int i = 0; i < CALLS; i++) {
        take_request();
        rdma_reject(server.id, NULL, 0);
        rdma_destroy_id(server.id);
        server.id = NULL;
        for (int j = 0; j < CALLS; j++) { /* a client that was refused is told; one that found no room tries again */
            struct sn_rdma_event *event = refused[j] ? NULL : event_within(calls[j].channel, 50);

            refused[j] |= event != NULL;
            cr_assert(!event || (event->event == SN_RDMA_REJECTED && event->status == 28));
            rdma_ack_cm_event(event);
        }
    }
    for (int i = 0; i < CALLS; i++) {
        if (!refused[i])
            ack(calls[i].channel, SN_RDMA_REJECTED, 28);
        side_close(&calls[i]);
        rdma_destroy_event_channel(calls[i].channel);
    }
    all_close();
}

static void connect_and_wait(int fd, void *unused)
{
    char byte;

    resolve(&client, NULL, DEVICE_1, PORT, SN_RDMA_PS_TCP);
    queue_make(&client);
    require(!rdma_connect(client.id, NULL), "connect: %s", strerror(errno));
    ack(client.channel, SN_RDMA_ESTABLISHED, 0);
    tell(fd, "", 1);
    hear(fd, &byte, 1);
}

Test(cm_faults, a_killed_peer_disconnects)
{
    char byte;
    pid_t pid;
    int fd;

    listen_on("0.0.0.0", PORT, SN_RDMA_PS_TCP, 0);
    pid = spawn(connect_and_wait, NULL, &fd);
    take_request();
    queue_make(&server);
    cr_assert_eq(rdma_accept(server.id, NULL), 0);
    ack(server.channel, SN_RDMA_ESTABLISHED, 0);
    hear(fd, &byte, 1);
    kill(pid, SIGKILL);
    cr_assert_eq(waitpid(pid, NULL, 0), pid);
    ack(server.channel, SN_RDMA_DISCONNECTED, 0);
    all_close();
}

/* ---- hostile bytes ---- */

static int raw_socket(bool listens, uint32_t dev, uint16_t port)
{
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    struct sockaddr_un name;
    socklen_t bytes = cm_socket_name(&name, world->id, SN_RDMA_PS_TCP, dev, port);

    cr_assert_eq(listens ? bind(fd, (struct sockaddr *)&name, bytes) || listen(fd, 5)
                         : connect(fd, (struct sockaddr *)&name, bytes),
                 0, "%s", strerror(errno));
    return fd;
}

static struct cm_message good_message(enum cm_type type)
{
    struct cm_message m = {.magic = CM_MAGIC, .version = CM_VERSION, .type = (uint8_t)type, .qpn = 77};

    memcpy(m.gid, world->devs[0].gid[1], sizeof(m.gid));
    m.from.family = m.to.family = AF_INET;
    return m;
}

struct damage {
    const char *name;
    size_t off, bytes; /* where ff is written */
    size_t len;        /* length of the message; 0: the right length */
};

#define FIELD(field) #field, offsetof(struct cm_message, field), sizeof(((struct cm_message *)0)->field), 0

static const struct damage damages[] = {
    {FIELD(magic)},
    {FIELD(version)},
    {FIELD(type)},
    {FIELD(datagram)},
    {FIELD(private_len)},
    {FIELD(qpn)},
    {FIELD(psn)},
    {FIELD(gid)},
    {FIELD(retry_count)},
    {FIELD(rnr_retry_count)},
    {"too short", 0, 0, sizeof(struct cm_message) - 1},
    {"too long", 0, 0, sizeof(struct cm_message) + 1},
    {"one byte", 0, 0, 1},
};

static void send_damaged(int fd, enum cm_type type, const struct damage *damage)
{
    uint8_t bytes[sizeof(struct cm_message) + 1] = {0};
    struct cm_message m = good_message(type);

    memcpy(bytes, &m, sizeof(m));
    memset(bytes + damage->off, 0xff, damage->bytes);
    cr_assert_gt(send(fd, bytes, damage->len ? damage->len : sizeof(m), MSG_NOSIGNAL), 0);
}

Test(cm_faults, a_listener_tells_of_well_formed_requests_only)
{
    struct cm_message m = good_message(CM_REQUEST);
    struct pollfd fd = {.events = POLLIN};

    listen_on(DEVICE_1, PORT, SN_RDMA_PS_TCP, 0);
    for (size_t i = 0; i < sizeof(damages) / sizeof(damages[0]); i++) {
        fd.fd = raw_socket(false, 1, PORT);
        send_damaged(fd.fd, CM_REQUEST, &damages[i]);
        cr_assert(silent(server.channel, 20) && silent(server.channel, 20), "%s", damages[i].name);
        cr_assert(poll(&fd, 1, 1000) == 1 && recv(fd.fd, &m, 1, 0) <= 0, "%s: not closed", damages[i].name);
        close(fd.fd);
    }
    for (enum cm_type type = CM_REPLY; type <= CM_REJECT; type++) {
        fd.fd = raw_socket(false, 1, PORT);
        m = good_message(type);
        cr_assert_eq(send(fd.fd, &m, sizeof(m), MSG_NOSIGNAL), (ssize_t)sizeof(m));
        cr_assert(silent(server.channel, 20) && silent(server.channel, 20), "type %d", (int)type);
        cr_assert(poll(&fd, 1, 1000) == 1 && recv(fd.fd, &m, 1, 0) <= 0, "type %d: not closed", (int)type);
        close(fd.fd);
    }
    fd.fd = raw_socket(false, 1, PORT); /* comes, says nothing, goes */
    close(fd.fd);
    cr_assert(silent(server.channel, 20) && silent(server.channel, 20));

    fd.fd = raw_socket(false, 1, PORT);
    m = good_message(CM_REQUEST);
    cr_assert_eq(send(fd.fd, &m, sizeof(m), 0), (ssize_t)sizeof(m));
    take_request();
    close(fd.fd);
    ack(server.channel, SN_RDMA_REJECTED, 28);

    fd.fd = raw_socket(false, 1, PORT); /* its listener ends before the request is sent */
    cr_assert(silent(server.channel, 20));
    rdma_destroy_id(listener);
    listener = NULL;
    cr_assert(poll(&fd, 1, 1000) == 1 && recv(fd.fd, &m, 1, 0) <= 0);
    close(fd.fd);
    all_close();
}

Test(cm_faults, a_caller_takes_a_malformed_reply_for_a_refusal)
{
    static struct sn_rdma_conn_param param = {.qp_num = 5};
    int raw = raw_socket(true, 1, PORT);

    for (size_t i = 0; i < sizeof(damages) / sizeof(damages[0]); i++) {
        int fd;

        resolve(&client, NULL, DEVICE_1, PORT, SN_RDMA_PS_TCP);
        cr_assert_eq(rdma_connect(client.id, &param), 0);
        fd = accept(raw, NULL, NULL);
        send_damaged(fd, CM_REPLY, &damages[i]);
        ack(client.channel, SN_RDMA_REJECTED, 28);
        close(fd);
        side_close(&client);
    }
    client.id = NULL;
    all_close();
    close(raw);
}

Test(cm_faults, a_listener_without_descriptors_goes_on_when_it_has_some)
{
    static struct sn_rdma_conn_param param = {.qp_num = 5};
    uint64_t before = now_ns();
    struct rlimit few, old;
    int highest, wakes = 0;

    listen_on(DEVICE_1, PORT, SN_RDMA_PS_TCP, 0);
    resolve(&client, NULL, DEVICE_1, PORT, SN_RDMA_PS_TCP);
    cr_assert_eq(rdma_connect(client.id, &param), 0);
    highest = dup(0);
    close(highest);
    cr_assert_eq(getrlimit(RLIMIT_NOFILE, &old), 0);
    few = (struct rlimit){(rlim_t)highest, old.rlim_max};
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &few), 0);
    while (now_ns() < before + 300 * 1000000ull) {
        wakes += poll(&(struct pollfd){.fd = server.channel->fd, .events = POLLIN}, 1, 50);
        cr_assert(silent(server.channel, 0));
    }
    cr_assert_lt(wakes, 20, "it must not spin");
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &old), 0);
    take_request();
    all_close();
}

/* ---- addresses and ports ---- */

struct address_case {
    char ip[40];
    int bind_error, resolve_status; /* 0: well */
};

ParameterizedTestParameters(cm_faults, addresses_lead_to_devices_or_nowhere)
{
    static struct address_case cases[] = {
        {"0.0.0.0", 0, -EHOSTUNREACH},
        {"::", 0, -EHOSTUNREACH},
        {DEVICE_0, 0, 0},
        {DEVICE_1, 0, 0},
        {"::ffff:10.1.1.1", 0, 0},
        {"fe80::250:52ff:fe53:2", 0, 0},
        {"10.2.0.1", EADDRNOTAVAIL, 0}, /* of the other node */
        {"10.3.0.1", EADDRNOTAVAIL, -EHOSTUNREACH},
        {"127.0.0.1", 0, 0},
        {"127.9.9.9", 0, 0},
        {"::1", 0, 0},
        {"203.0.113.9", EADDRNOTAVAIL, -EHOSTUNREACH},
        {"2001:db8::1", EADDRNOTAVAIL, -EHOSTUNREACH},
    };

    return cr_make_param_array(struct address_case, cases, sizeof(cases) / sizeof(cases[0]));
}

static void two_nodes(void)
{
    struct sn_config config;

    cm_setup();
    sn_config_default(&config);
    config.nics = config.nodes = 2;
    world = test_world(&config);
    setenv("SOFTNIC_NODE", "0", 1);
}

ParameterizedTest(struct address_case *c, cm_faults, addresses_lead_to_devices_or_nowhere, .init = two_nodes,
                  .timeout = 300)
{
    struct sn_rdma_channel *channel = channel_new();
    struct sn_rdma_id *id = id_new(channel, SN_RDMA_PS_TCP);
    int r = rdma_bind_addr(id, at(c->ip, 0));

    cr_assert_eq(r ? errno : 0, c->bind_error, "bind %s: %s", c->ip, strerror(errno));
    cr_assert(c->bind_error || rdma_get_src_port(id));
    rdma_destroy_id(id);
    id = id_new(channel, SN_RDMA_PS_TCP);
    cr_assert_eq(rdma_resolve_addr(id, NULL, at(c->ip, PORT), 1000), 0, "%s", strerror(errno));
    ack(channel, c->resolve_status ? SN_RDMA_ADDR_ERROR : SN_RDMA_ADDR_RESOLVED, c->resolve_status);
    cr_assert_eq(!!id->verbs, !c->resolve_status);
    cr_assert_eq(rdma_resolve_route(id, 1000), c->resolve_status ? -1 : 0);
    rdma_destroy_id(id);
    rdma_destroy_event_channel(channel);
}

Test(cm_faults, a_port_belongs_to_one_id_of_an_address_and_a_space)
{
    struct sn_rdma_channel *channel = channel_new();
    struct sn_rdma_id *one = id_new(channel, SN_RDMA_PS_TCP), *two = id_new(channel, SN_RDMA_PS_TCP);
    struct sn_rdma_id *datagram = id_new(channel, SN_RDMA_PS_UDP);

    cr_assert_eq(rdma_bind_addr(one, at(DEVICE_1, PORT)), 0);
    cr_assert(rdma_bind_addr(two, at(DEVICE_1, PORT)) == -1 && errno == EADDRINUSE);
    cr_assert(rdma_bind_addr(two, at("0.0.0.0", PORT)) == -1 && errno == EADDRINUSE, "that is among all addresses");
    cr_assert_eq(rdma_bind_addr(two, at(DEVICE_0, PORT)), 0);
    cr_assert_eq(rdma_bind_addr(datagram, at(DEVICE_1, PORT)), 0);
    rdma_destroy_id(one);
    one = id_new(channel, SN_RDMA_PS_TCP);
    cr_assert_eq(rdma_bind_addr(one, at(DEVICE_1, PORT)), 0, "free again");
    cr_assert(rdma_bind_addr(one, at(DEVICE_1, PORT)) == -1 && errno == EINVAL, "bound already");
    rdma_destroy_id(one);
    rdma_destroy_id(two);
    rdma_destroy_id(datagram);
    rdma_destroy_event_channel(channel);
}

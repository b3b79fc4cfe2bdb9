/* SPDX-License-Identifier: Apache-2.0 */
/* Which interface a listener chooses, with interfaces made up here. */
#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "transport/host/socket.h"

struct card {
    const char *name, *address;
    unsigned flags;
    const char *mask; /* of IPv4; NULL: 255.255.255.0 */
};

enum { RUNNING = IFF_UP | IFF_RUNNING, UNPLUGGED = IFF_UP };

static const struct card *cards;

/* Replaces libc's for prs_socket_interface(). */
int getifaddrs(struct ifaddrs **out)
{
    static struct ifaddrs list[8];
    static union prs_address address[8], mask[8];
    int count = 0;

    memset(list, 0, sizeof(list));
    memset(address, 0, sizeof(address));
    for (const struct card *card = cards; card->name; card++, count++) {
        bool v6 = strchr(card->address, ':');

        address[count].any.sa_family = v6 ? AF_INET6 : AF_INET;
        cr_assert_eq(inet_pton(v6 ? AF_INET6 : AF_INET, card->address,
                               v6 ? (void *)&address[count].v6.sin6_addr : (void *)&address[count].v4.sin_addr),
                     1);
        if (!v6)
            inet_pton(AF_INET, card->mask ? card->mask : "255.255.255.0", &mask[count].v4.sin_addr);
        list[count] = (struct ifaddrs){.ifa_name = (char *)(uintptr_t)card->name,
                                       .ifa_flags = card->flags,
                                       .ifa_addr = &address[count].any,
                                       .ifa_netmask = v6 ? NULL : &mask[count].any,
                                       .ifa_next = card[1].name ? &list[count + 1] : NULL};
    }
    *out = list;
    return 0;
}

void freeifaddrs(struct ifaddrs *list)
{
    (void)list;
}

struct row {
    const char *asked;
    struct card card[6];
    const char *chosen; /* NULL: none */
};

Test(socket, the_interface_is_one_that_others_reach)
{
    static const struct row rows[] = {
        {"", {{"lo", "127.0.0.1", RUNNING | IFF_LOOPBACK}, {"eth0", "10.0.0.1", RUNNING}}, "eth0"},
        {"", {{"lo", "127.0.0.1", RUNNING | IFF_LOOPBACK}}, "lo"},
        {"", {{"docker0", "172.17.0.1", RUNNING}, {"eth0", "10.0.0.1", RUNNING}}, "eth0"},
        {"", {{"eth0", "fe80::1", RUNNING}, {"eth1", "fd00::1", RUNNING}}, "eth1"},
        {"", {{"eth0", "10.0.0.1", 0}, {"eth1", "10.0.1.1", RUNNING}}, "eth1"},
        /* A port with an address but no cable, or a bridge without members. */
        {"", {{"eno1", "192.168.1.1", UNPLUGGED}, {"eno2", "10.0.0.1", RUNNING}}, "eno2"},
        {"", {{"eno1", "192.168.1.1", UNPLUGGED}, {"eno2", "fd00::1", RUNNING}}, "eno2"},
        {"", {{"lo", "127.0.0.1", RUNNING | IFF_LOOPBACK}, {"eno1", "192.168.1.1", UNPLUGGED}}, "lo"},
        {"eno", {{"eno1", "192.168.1.1", UNPLUGGED}, {"eno2", "10.0.0.1", RUNNING}}, "eno2"},
        {"eno1", {{"eno1", "192.168.1.1", UNPLUGGED}, {"eno2", "10.0.0.1", RUNNING}}, "eno1"},
        {"eth7", {{"eth0", "10.0.0.1", RUNNING}}, NULL},
        /* As NCCL: IP over InfiniBand before an Ethernet that may serve provisioning only. */
        {"", {{"eth0", "10.0.0.1", RUNNING}, {"ib0", "10.1.0.1", RUNNING}}, "ib0"},
        {"", {{"eth0", "10.0.0.1", RUNNING}, {"ib0", "10.1.0.1", UNPLUGGED}}, "eth0"},
        {"", {{"eth0", "10.0.0.1", RUNNING}, {"ib0", "fe80::1", RUNNING}}, "eth0"},
        /* A management controller. */
        {"", {{"enx0", "169.254.0.2", RUNNING}, {"eno1", "10.0.0.1", RUNNING}}, "eno1"},
        {"", {{"enx0", "169.254.0.2", RUNNING}, {"docker0", "172.17.0.1", RUNNING}}, "docker0"},
        {"", {{"enx0", "169.254.0.2", RUNNING}, {"lo", "127.0.0.1", RUNNING | IFF_LOOPBACK}}, "enx0"},
        /* Networks of containers. */
        {"",
         {{"br-1f0", "172.18.0.1", RUNNING}, {"cni0", "10.244.0.1", RUNNING}, {"eno1", "fd00::1", RUNNING}},
         "eno1"},
    };

    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        struct prs_config config = {.socket_family = AF_UNSPEC};
        union prs_address address;
        char name[64] = "";

        cr_assert_eq(prs_hca_filter_parse("NCCL_SOCKET_IFNAME", rows[i].asked, &config.ifname), 0);
        cards = rows[i].card;
        cr_assert_eq(prs_socket_interface(&config, &address, name, sizeof(name)) == 0, rows[i].chosen != NULL,
                     "row %zu", i);
        if (rows[i].chosen)
            cr_assert_str_eq(name, rows[i].chosen, "row %zu", i);
    }
}

/* Rank 0's address tells which network the ranks share. */
Test(socket, the_subnet_of_nccls_comm_id_comes_before_others)
{
    static const struct card two[] = {{"eth0", "10.0.0.1", RUNNING}, {"eth1", "10.1.7.1", RUNNING, "255.255.0.0"}, {0}};
    static const struct card with_ib[] = {{"eth1", "10.1.7.1", RUNNING}, {"ib0", "10.2.0.1", RUNNING}, {0}};
    static const struct {
        const char *id;
        const struct card *cards;
        const char *chosen;
    } rows[] = {{"10.1.200.3:4711", two, "eth1"}, {"10.0.0.9:4711", two, "eth0"},  {"10.9.0.9:4711", two, "eth0"},
                {"node7:4711", two, "eth0"},      {"[fd00::1]:4711", two, "eth0"}, {"10.1.7.9:1", with_ib, "ib0"}};

    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        struct prs_config config;
        union prs_address address;
        char name[64];

        setenv("NCCL_COMM_ID", rows[i].id, 1);
        cr_assert_eq(prs_config_read(NULL, &config), 0);
        cards = rows[i].cards;
        cr_assert_eq(prs_socket_interface(&config, &address, name, sizeof(name)), 0);
        cr_assert_str_eq(name, rows[i].chosen, "%s", rows[i].id);
    }
}

/* The listening host's number of its interface has no meaning on this host. */
Test(socket, a_link_local_address_is_reached_by_an_interface_of_our_own)
{
    static const struct card only_loopback[] = {{"lo", "fe80::1", RUNNING}, {NULL, NULL, 0}};
    struct prs_config config = {.socket_family = AF_UNSPEC};
    union prs_address far = {.v6 = {.sin6_family = AF_INET6, .sin6_scope_id = 77}};

    cards = only_loopback;
    cr_assert_eq(inet_pton(AF_INET6, "fd00::2", &far.v6.sin6_addr), 1);
    cr_assert_eq(prs_socket_scope(&config, &far), 0);
    cr_assert_eq(far.v6.sin6_scope_id, 77, "a global one needs none");
    cr_assert_eq(inet_pton(AF_INET6, "fe80::2", &far.v6.sin6_addr), 1);
    cr_assert_eq(prs_socket_scope(&config, &far), 0);
    cr_assert_eq(far.v6.sin6_scope_id, if_nametoindex("lo"));
}

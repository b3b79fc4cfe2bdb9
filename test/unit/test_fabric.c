/* SPDX-License-Identifier: Apache-2.0 */
/* Which sets of rails are accepted. No NIC. */
#include <criterion/criterion.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "transport/nic/fabric.h"
#include "transport/nic/nic.h"
#include "transport/util/error.h"

static const struct prs_nic_ops one = {.name = "rc"}, other = {.name = "srd"};
static struct prs_domain domains[2] = {{.nic = &one}, {.nic = &other}};
static struct prs_fabric fabric = {
    .rail_count = 3,
    .rail = {{.domain = &domains[0], .info = {.name = "mlx5_0", .queue_kind = "rc"}},
             {.domain = &domains[1], .info = {.name = "efa_0", .queue_kind = "srd"}},
             {.domain = &domains[1], .info = {.name = "efa_1", .queue_kind = "srd"}}},
};

static int check(int count, int first, int second)
{
    struct prs_rail_set set = {.count = count, .rail = {first, second}};

    return prs_fabric_check_set(&fabric, &set, "the test");
}

Test(fabric, a_set_of_two_kinds_of_queues_is_refused_by_name)
{
    cr_assert_eq(check(2, 0, 1), -EINVAL);
    cr_assert(strstr(prs_error_text(), "mlx5_0 has rc") && strstr(prs_error_text(), "efa_0 has srd"), "%s",
              prs_error_text());
    cr_assert_eq(check(2, 1, 2), 0);
    cr_assert_eq(check(1, 0, 0), 0);
}

/* NCCL takes rails of equal guid and port for one link. */
Test(fabric, the_ports_of_a_card_are_links_of_their_own)
{
    struct prs_fabric cards = {
        .rail_count = 6,
        .rail = {{.info = {.name = "mlx5_0", .guid = 1, .port = 1}}, /* one card, two functions */
                 {.info = {.name = "mlx5_1", .guid = 1, .port = 1}},
                 {.info = {.name = "mlx4_0", .guid = 2, .port = 1}}, /* one card, one function, two ports */
                 {.info = {.name = "mlx4_0", .guid = 2, .port = 2}},
                 {.info = {.name = "mlx4_1", .guid = 2, .port = 1}}, /* and a virtual function */
                 {.info = {.name = "mlx5_2", .guid = 3, .port = 1}}},
    };
    static const int wanted[] = {1, 2, 1, 2, 3, 1};

    prs_fabric_number_ports(&cards);
    for (int i = 0; i < cards.rail_count; i++)
        cr_assert_eq(cards.rail[i].info.chip_port, wanted[i], "rail %d: %d", i, cards.rail[i].info.chip_port);
}

Test(fabric, a_set_names_each_rail_once)
{
    cr_assert_eq(check(2, 1, 1), -EINVAL);
    cr_assert_eq(check(2, 1, 3), -EINVAL);
    cr_assert_eq(check(0, 0, 0), -EINVAL);
}

/* ---- back ends without a NIC ---- */

static int opened;

static int open_device(const struct prs_nic_device *device, struct prs_domain **out)
{
    struct prs_domain *domain = calloc(1, sizeof(*domain));

    cr_assert(domain);
    opened++;
    domain->nic = device->nic;
    domain->ports = device->handle ? *(const int *)device->handle : 1;
    *out = domain;
    return 0;
}

static void close_device(struct prs_domain *domain)
{
    opened--;
    free(domain);
}

static int probe(const struct prs_config *config, struct prs_rail *rail, char *why, size_t why_bytes)
{
    rail->max_message_bytes = 1 << 20;
    rail->info.mem_kinds = PRS_MEM_HOST;
    snprintf(rail->info.link, sizeof(rail->info.link), "a network");
    return 0;
}

static int register_memory(struct prs_domain *domain, const struct prs_memory_range *range,
                           struct prs_registration *out)
{
    return 0;
}

static int release_memory(struct prs_domain *domain, struct prs_registration *registered)
{
    return 0;
}

static int list_first(const struct prs_config *config, prs_nic_device_fn *fn, void *arg);
static int list_second(const struct prs_config *config, prs_nic_device_fn *fn, void *arg);

static int list_none(const struct prs_config *config, prs_nic_device_fn *fn, void *arg)
{
    return prs_fail(-ENOSYS, "its library is not installed");
}

#define FAKE_OPS                                                                                                       \
    .open_device = open_device, .close_device = close_device, .probe = probe, .register_memory = register_memory,      \
    .release_memory = release_memory

static const struct prs_nic_ops first = {.name = "first", .devices = list_first, FAKE_OPS},
                                second = {.name = "second",
                                          .network = "another network",
                                          .in_order = true,
                                          .devices = list_second,
                                          FAKE_OPS},
                                absent = {.name = "absent", .devices = list_none, FAKE_OPS};

static int list_first(const struct prs_config *config, prs_nic_device_fn *fn, void *arg)
{
    static const struct prs_nic_device devices[] = {{.nic = &first, .name = "b"}, {.nic = &first, .name = "same"}};

    for (int i = 0; i < 2; i++)
        fn(arg, &devices[i]);
    return 0;
}

static int list_second(const struct prs_config *config, prs_nic_device_fn *fn, void *arg)
{
    static int ports = 2;
    static const struct prs_nic_device devices[] = {{.nic = &second, .name = "a", .handle = &ports},
                                                    {.nic = &second, .name = "same"}};

    for (int i = 0; i < 2; i++)
        fn(arg, &devices[i]);
    return 0;
}

Test(fabric, the_devices_of_all_back_ends_are_rails)
{
    static const struct prs_nic_ops *const backends[] = {&first, &absent, &second, NULL};
    static const struct {
        const char *name, *kind, *link;
        int port;
    } wanted[] = {{"a", "second", "another network", 1},
                  {"a", "second", "another network", 2},
                  {"b", "first", "a network", 1},
                  {"same", "first", "a network", 1},
                  {"same", "second", "another network", 1}};
    static struct prs_fabric found;
    struct prs_rail_set unlike = {.count = 2, .rail = {0, 2}};
    bool seen[5] = {false};

    cr_assert_eq(prs_fabric_find_rails(&found, backends), 0, "one of them is absent: %s", prs_error_text());
    cr_assert_eq(found.rail_count, 5);
    for (int i = 0; i < 5; i++) {
        const struct prs_rail *rail = &found.rail[i];

        for (int k = 0; k < 5; k++)
            if (!strcmp(rail->info.name, wanted[k].name) && !strcmp(rail->info.queue_kind, wanted[k].kind) &&
                rail->info.port == wanted[k].port) {
                cr_assert_not(seen[k]);
                seen[k] = true;
                cr_assert_str_eq(rail->info.link, wanted[k].link);
                cr_assert_eq(rail->info.in_order, rail->domain->nic == &second);
            }
    }
    for (int k = 0; k < 5; k++)
        cr_assert(seen[k], "%s of %s", wanted[k].name, wanted[k].kind);
    cr_assert_eq(found.rail[0].domain, found.rail[1].domain, "two ports of a device");
    cr_assert_eq(prs_fabric_check_set(&found, &unlike, "the test"), -EINVAL);
    cr_assert_eq(opened, 4);
    for (int i = 0; i < 5; i++)
        prs_domain_close(found.rail[i].domain);
    cr_assert_eq(opened, 0);
}

Test(fabric, without_any_library_the_error_says_so)
{
    static const struct prs_nic_ops *const backends[] = {&absent, NULL};
    static struct prs_fabric found;

    cr_assert_eq(prs_fabric_find_rails(&found, backends), -ENOSYS);
    cr_assert(strstr(prs_error_text(), "not installed"), "%s", prs_error_text());
}

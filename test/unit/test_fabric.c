/* SPDX-License-Identifier: Apache-2.0 */
/* Which sets of rails are accepted. No NIC. */
#include <criterion/criterion.h>
#include <errno.h>
#include <string.h>

#include "transport/nic/fabric.h"
#include "transport/nic/nic.h"

static const struct prs_nic_ops other = {.name = "srd"};
static struct prs_domain domains[2] = {{.nic = &prs_nic_rc}, {.nic = &other}};
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

/* SPDX-License-Identifier: Apache-2.0 */
/* Which sets of rails are accepted. No NIC. */
#include <criterion/criterion.h>
#include <errno.h>
#include <string.h>

#include "transport/fabric.h"
#include "transport/nic.h"

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

Test(fabric, a_set_names_each_rail_once)
{
    cr_assert_eq(check(2, 1, 1), -EINVAL);
    cr_assert_eq(check(2, 1, 3), -EINVAL);
    cr_assert_eq(check(0, 0, 0), -EINVAL);
}

/* SPDX-License-Identifier: Apache-2.0 */
#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <errno.h>
#include <string.h>

#include "transport/nic/verbs/gid.h"

static struct prs_gid gid(int index, enum prs_gid_type type, const char *text)
{
    struct prs_gid out = {.index = index, .type = type};

    cr_assert(inet_pton(AF_INET6, text, out.raw) == 1);
    return out;
}

static const struct prs_config defaults = {.gid_index = -1, .gid_family = AF_INET, .roce_version = 2};

Test(gid, roce_v2_of_the_right_family_wins)
{
    struct prs_gid table[] = {gid(0, PRS_GID_ROCE_V1, "fe80::1"), gid(1, PRS_GID_ROCE_V2, "fe80::1"),
                              gid(2, PRS_GID_ROCE_V1, "::ffff:10.0.0.1"), gid(3, PRS_GID_ROCE_V2, "::ffff:10.0.0.1"),
                              gid(4, PRS_GID_ROCE_V2, "2001:db8::1")};
    struct prs_config config = defaults;

    cr_assert_eq(prs_gid_choose(table, 5, true, &config), 3);
    config.gid_family = AF_INET6;
    cr_assert_eq(prs_gid_choose(table, 5, true, &config), 4, "routable before link-local");
    config.roce_version = 1;
    config.gid_family = AF_INET;
    cr_assert_eq(prs_gid_choose(table, 5, true, &config), 2);
}

Test(gid, an_ipv6_only_port_gets_its_global_address)
{
    struct prs_gid table[] = {gid(0, PRS_GID_ROCE_V2, "fe80::1"), gid(1, PRS_GID_ROCE_V2, "2001:db8::1")};

    cr_assert_eq(prs_gid_choose(table, 2, true, &defaults), 1);
    cr_assert_eq(prs_gid_choose(table, 1, true, &defaults), 0, "link-local is better than nothing");
}

Test(gid, holes_in_the_table_are_passed_over)
{
    struct prs_gid table[] = {gid(0, PRS_GID_EMPTY, "::"), gid(1, PRS_GID_EMPTY, "::"),
                              gid(2, PRS_GID_ROCE_V2, "::ffff:10.0.0.1"), gid(3, PRS_GID_EMPTY, "::")};

    cr_assert_eq(prs_gid_choose(table, 4, true, &defaults), 2);
    cr_assert_eq(prs_gid_choose(table, 2, true, &defaults), -ENOENT);
}

Test(gid, a_forced_index_is_taken_or_nothing)
{
    struct prs_gid table[] = {gid(0, PRS_GID_ROCE_V1, "fe80::1"), gid(1, PRS_GID_EMPTY, "::"),
                              gid(2, PRS_GID_ROCE_V2, "::ffff:10.0.0.1")};
    struct prs_config config = defaults;

    config.gid_index = 0;
    cr_assert_eq(prs_gid_choose(table, 3, true, &config), 0);
    config.gid_index = 1;
    cr_assert_eq(prs_gid_choose(table, 3, true, &config), -ENOENT);
}

Test(gid, an_address_range_excludes_the_rest)
{
    struct prs_gid table[] = {gid(0, PRS_GID_ROCE_V2, "::ffff:192.168.1.1"),
                              gid(1, PRS_GID_ROCE_V2, "::ffff:10.9.0.1")};
    struct prs_config config = defaults;

    config.gid_range_set = true;
    config.gid_range_bits = 96 + 9;
    memcpy(config.gid_range, gid(0, PRS_GID_IB, "::ffff:10.0.0.0").raw, 16);
    cr_assert_eq(prs_gid_choose(table, 2, true, &config), 1);
    memcpy(config.gid_range, gid(0, PRS_GID_IB, "::ffff:10.128.0.0").raw, 16);
    cr_assert_eq(prs_gid_choose(table, 2, true, &config), -ENOENT);
}

/* ---- InfiniBand ---- */

/* Launch scripts set NCCL_IB_GID_INDEX=3 for RoCE everywhere. An InfiniBand port often has one GID. */
Test(gid, settings_for_roce_do_not_touch_infiniband)
{
    struct prs_gid table[] = {gid(0, PRS_GID_IB, "fe80::a288:c203:12:3456"), gid(1, PRS_GID_EMPTY, "::"),
                              gid(2, PRS_GID_EMPTY, "::"), gid(3, PRS_GID_EMPTY, "::")};
    struct prs_config config = defaults;

    cr_assert_eq(prs_gid_choose(table, 4, false, &config), 0);
    config.gid_index = 3;
    cr_assert_eq(prs_gid_choose(table, 4, false, &config), 0);
    cr_assert_eq(prs_gid_choose(table, 4, true, &config), -ENOENT, "of a RoCE port it is obeyed");
    config.gid_index = -1;
    config.gid_range_set = true;
    config.gid_range_bits = 96 + 8;
    memcpy(config.gid_range, gid(0, PRS_GID_IB, "::ffff:10.0.0.0").raw, 16);
    cr_assert_eq(prs_gid_choose(table, 4, false, &config), 0);
}

Test(gid, a_port_that_routers_know_uses_that_gid)
{
    struct prs_gid table[] = {gid(0, PRS_GID_IB, "fe80::1"), gid(1, PRS_GID_IB, "fec0:0:30:2::1"),
                              gid(2, PRS_GID_IB, "fe80::2")};
    struct prs_config config = defaults;

    config.flid_gid_index = 1;
    cr_assert_eq(prs_gid_choose(table, 3, false, &config), 1);
    cr_assert_eq(prs_gid_flid(table[1].raw), 0x30);
    config.flid_gid_index = 2;
    cr_assert_eq(prs_gid_choose(table, 3, false, &config), 0, "GID 2 has no FLID");
    cr_assert_eq(prs_gid_flid(gid(0, PRS_GID_IB, "2001:db8:30:1::1").raw), 0, "any other prefix has no place for one");
}

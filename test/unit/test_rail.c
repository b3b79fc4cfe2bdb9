/* SPDX-License-Identifier: Apache-2.0 */
/* What a rail reads of its port, on a fake device: InfiniBand or not, speed, and an address that changes. */
#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

#include "test/support/fake_verbs.h"
#include "transport/nic/fabric.h"
#include "transport/peer/handshake.h"
#include "transport/nic/verbs/device.h"
#include "transport/nic/verbs/verbs_nic.h"

static const struct prs_config defaults = {.gid_index = -1, .gid_family = AF_INET, .roce_version = 2};
static struct prs_verbs_device device;

static struct prs_rail probe(const struct prs_config *config)
{
    struct prs_rail rail;
    char why[160] = "";

    device = (struct prs_verbs_device){.base = {.nic = &prs_nic_rc, .name = "fake0"},
                                       .context = &fake_verbs.extended.context,
                                       .attr = fake_verbs.attr};
    cr_assert_eq(prs_rail_probe(&device.base, 1, config, &rail, why, sizeof(why)), 0, "%s", why);
    return rail;
}

Test(rail, an_infiniband_port_with_one_gid_is_used_whatever_roce_needs)
{
    struct prs_config config = defaults;
    struct prs_rail rail;

    fake_verbs_install();
    config.gid_index = 3;
    rail = probe(&config);
    cr_assert_eq(prs_verbs_own_port(&rail.address).gid_index, 0);
    cr_assert_not(rail.info.is_roce);
    cr_assert_not(prs_verbs_own_port(&rail.address).grh_required);
    fake_verbs.port.flags = IBV_QPF_GRH_REQUIRED;
    rail = probe(&config);
    cr_assert(prs_verbs_own_port(&rail.address).grh_required);
}

Test(rail, speeds_beyond_the_old_codes_are_known)
{
    fake_verbs_install();
    cr_assert_eq(probe(&defaults).info.speed_mbps, 400000, "NDR, 4 lanes");
    fake_verbs.speed_ex = 256;
    cr_assert_eq(probe(&defaults).info.speed_mbps, 800000, "XDR, whose code takes nine bits");
    fake_verbs.port_speed = 16000;
    cr_assert_eq(probe(&defaults).info.speed_mbps, 1600000, "a bond of two");
}

/* A subnet manager gives another LID, or DHCP moves the address to another index: later connections need it. */
Test(rail, each_connection_reads_where_the_rail_is)
{
    static const struct prs_rail_set one = {1, {0}};
    struct prs_fabric fabric = {.config = defaults, .rail_count = 1};
    struct prs_rail_address own[PRS_MAX_RAILS];
    struct prs_wire_rail wire[PRS_MAX_RAILS];
    struct prs_verbs_port port;

    fake_verbs_install();
    fake_verbs.port.link_layer = IBV_LINK_LAYER_ETHERNET;
    fake_verbs.gid[1] = (struct ibv_gid_entry){.gid.raw = {0xfe, 0x80, [15] = 2}, .gid_type = IBV_GID_TYPE_ROCE_V2};
    fabric.rail[0] = probe(&defaults);
    cr_assert_eq(prs_verbs_own_port(&fabric.rail[0].address).gid_index, 1);
    fake_verbs.gid[5] = fake_verbs.gid[1];
    fake_verbs.gid[5].gid.raw[15] = 9;
    memset(&fake_verbs.gid[1], 0, sizeof(fake_verbs.gid[1]));
    fake_verbs.port.lid = 70;
    prs_wire_rails(&fabric, &one, false, own, wire);
    cr_assert_eq(prs_verbs_own_port(&own[0]).gid_index, 5);
    cr_assert_eq(prs_verbs_read_port(&wire[0].address, &port), 0);
    cr_assert_eq(port.gid[15], 9);
    cr_assert_eq(port.lid, 70);
    fake_verbs.port.state = IBV_PORT_DOWN;
    prs_wire_rails(&fabric, &one, false, own, wire);
    cr_assert_eq(prs_verbs_own_port(&own[0]).gid_index, 1, "a port that is down: the address before");
}

static uint64_t guid_of(const char *name, const struct prs_nic_ops *nic)
{
    struct prs_verbs_device named = {.base.nic = nic, .context = &fake_verbs.extended.context, .attr = fake_verbs.attr};
    struct prs_rail rail;
    char why[160] = "";

    snprintf(named.base.name, sizeof(named.base.name), "%s", name);
    cr_assert_eq(prs_rail_probe(&named.base, 1, &defaults, &rail, why, sizeof(why)), 0, "%s", why);
    return rail.info.guid;
}

/* NCCL takes devices of equal guid for one chip. EFAs report what the cloud's firmware put there. */
Test(rail, devices_without_a_guid_of_their_own_are_told_apart)
{
    static const struct prs_nic_ops srd = {.name = "srd", .network = "EFA", PRS_VERBS_DEVICE_OPS};

    fake_verbs_install();
    cr_assert_eq(guid_of("fake0", &prs_nic_rc), guid_of("fake1", &prs_nic_rc), "two ports of one chip");
    cr_assert_neq(guid_of("fake0", &srd), guid_of("fake1", &srd));
    cr_assert_eq(guid_of("fake0", &srd), guid_of("fake0", &srd));
    fake_verbs.attr.sys_image_guid = 0;
    cr_assert_neq(guid_of("fake0", &prs_nic_rc), guid_of("fake1", &prs_nic_rc));
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Which devices are used, and for what, on a fake device. */
#include <criterion/criterion.h>
#include <string.h>
#include <unistd.h>

#include "test/support/fake_verbs.h"
#include "transport/nic/domain.h"
#include "transport/nic/nic.h"
#include "transport/nic/rail.h"

Test(domain, a_device_without_atomics_has_no_adds)
{
    static const enum ibv_atomic_cap caps[] = {IBV_ATOMIC_NONE, IBV_ATOMIC_HCA, IBV_ATOMIC_GLOB};

    for (int i = 0; i < 3; i++) {
        struct prs_domain *domain;

        fake_verbs_install();
        fake_verbs.attr.atomic_cap = caps[i];
        cr_assert_eq(prs_domain_open(&fake_verbs.device, &domain), 0, "%s", prs_error_text());
        cr_assert_eq(domain->adds, caps[i] != IBV_ATOMIC_NONE);
        prs_domain_close(domain);
    }
}

Test(domain, iwarp_is_refused_by_name)
{
    static const struct prs_config config = {.gid_index = -1};
    struct prs_domain *domain;
    struct prs_rail rail;
    char why[256] = "";

    fake_verbs_install();
    fake_verbs.device.transport_type = IBV_TRANSPORT_IWARP;
    cr_assert_eq(prs_domain_open(&fake_verbs.device, &domain), 0, "%s", prs_error_text());
    cr_assert_eq(prs_rail_probe(domain, 1, &config, &rail, why, sizeof(why)), 1);
    cr_assert(strstr(why, "iWARP"), "%s", why);
    prs_domain_close(domain);
}

Test(domain, an_overrun_completion_queue_is_an_error_of_its_peer_only, .timeout = 60)
{
    static const struct prs_config config;
    static const struct prs_rail_address own;
    static const uint32_t id = 0;
    struct prs_rail rail = {.port = 1};
    struct prs_link_options options = {.rail = &rail,
                                       .own = &own,
                                       .config = &config,
                                       .queues = 1,
                                       .ids = &id,
                                       .depth = 64,
                                       .loopback_depth = 64,
                                       .receive_depth = 64};
    struct prs_link *link;
    const char *event;

    fake_verbs_install();
    cr_assert_eq(prs_domain_open(&fake_verbs.device, &rail.domain), 0, "%s", prs_error_text());
    cr_assert_eq(prs_nic_rc.open(&options, &link), 0);
    fake_verbs_report((struct ibv_async_event){.event_type = IBV_EVENT_CQ_ERR, .element.cq = &fake_verbs.cq});
    while (!__atomic_load_n(link->overrun, __ATOMIC_ACQUIRE))
        usleep(1000);
    cr_assert_eq(prs_domain_check(rail.domain, 1, 0, &event), 0, "the device serves others: %s", event);
    prs_nic_rc.close(link);
    prs_domain_close(rail.domain);
}

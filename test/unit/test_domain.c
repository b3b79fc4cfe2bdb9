/* SPDX-License-Identifier: Apache-2.0 */
/* Which devices are used, and for what, on a fake device. */
#include <criterion/criterion.h>
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "test/support/fake_verbs.h"
#include "test/support/open_files.h"
#include "transport/nic/domain.h"
#include "transport/nic/verbs/verbs.h"
#include "transport/nic/verbs/verbs_nic.h"
#include "transport/util/clock.h"

static const struct prs_nic_device fake = {&prs_nic_rc, "fake0", &fake_verbs.device};

Test(domain, a_device_without_atomics_has_no_adds_and_each_claim_is_told)
{
    static const enum ibv_atomic_cap caps[] = {IBV_ATOMIC_NONE, IBV_ATOMIC_HCA, IBV_ATOMIC_GLOB};
    static const enum prs_atomic_scope claims[] = {PRS_ATOMIC_NONE, PRS_ATOMIC_NIC, PRS_ATOMIC_CPU};
    static const struct prs_config config = {.gid_index = -1};

    for (int i = 0; i < 3; i++) {
        struct prs_domain *domain;
        struct prs_rail rail;
        char why[256] = "";

        fake_verbs_install();
        fake_verbs.attr.atomic_cap = caps[i];
        cr_assert_eq(prs_domain_open(&fake, &domain), 0, "%s", prs_error_text());
        cr_assert_eq(domain->adds, caps[i] != IBV_ATOMIC_NONE);
        cr_assert_eq(prs_rail_probe(domain, 1, &config, &rail, why, sizeof(why)), 0, "%s", why);
        cr_assert_eq(rail.info.atomic_scope, claims[i], "%u", rail.info.atomic_scope);
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
    cr_assert_eq(prs_domain_open(&fake, &domain), 0, "%s", prs_error_text());
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
    cr_assert_eq(prs_domain_open(&fake, &rail.domain), 0, "%s", prs_error_text());
    cr_assert_eq(prs_nic_rc.open(&options, &link), 0);
    fake_verbs_report((struct ibv_async_event){.event_type = IBV_EVENT_CQ_ERR, .element.cq = &fake_verbs.cq});
    while (!__atomic_load_n(link->overrun, __ATOMIC_ACQUIRE))
        usleep(1000);
    cr_assert_eq(prs_domain_check(rail.domain, 1, 0, &event), 0, "the device serves others: %s", event);
    prs_nic_rc.close(link);
    prs_domain_close(rail.domain);
}

/* ---- events ---- */

/* The device's own thread takes the event. */
static int report_and_check(struct prs_domain *domain, enum ibv_event_type type, uint64_t patience_ns, int expected)
{
    uint64_t give_up = prs_clock_ms() + 30000;
    const char *event = NULL;
    int r;

    fake_verbs_report((struct ibv_async_event){.event_type = type, .element.port_num = 1});
    while ((r = prs_domain_check(domain, 1, patience_ns, &event)) != expected && prs_clock_ms() < give_up)
        usleep(100);
    cr_assert(r == 0 || event, "no name for the event");
    return r;
}

Test(domain, a_fatal_event_is_an_error_of_all_ports_and_stays_one, .timeout = 60)
{
    struct prs_domain *domain;
    const char *event;

    fake_verbs_install();
    cr_assert_eq(prs_domain_open(&fake, &domain), 0, "%s", prs_error_text());
    cr_assert_eq(prs_domain_check(domain, 1, 0, &event), 0);
    cr_assert_eq(report_and_check(domain, IBV_EVENT_DEVICE_FATAL, UINT64_MAX, -EIO), -EIO);
    cr_assert_eq(prs_domain_check(domain, 2, UINT64_MAX, &event), -EIO);
    cr_assert_eq(report_and_check(domain, IBV_EVENT_PORT_ACTIVE, 0, -EIO), -EIO, "the driver resets it, not a port");
    prs_domain_close(domain);
    cr_assert_eq(prs_domain_open(&fake, &domain), 0, "%s", prs_error_text());
    cr_assert_eq(prs_domain_check(domain, 1, 0, &event), 0, "it was opened again");
    prs_domain_close(domain);
}

Test(domain, a_port_is_down_after_the_patience_and_until_it_is_active, .timeout = 60)
{
    struct prs_domain *domain;
    const char *event;

    fake_verbs_install();
    cr_assert_eq(prs_domain_open(&fake, &domain), 0, "%s", prs_error_text());
    cr_assert_eq(report_and_check(domain, IBV_EVENT_PORT_ERR, 0, -EIO), -EIO);
    cr_assert_eq(prs_domain_check(domain, 1, UINT64_MAX / 2, &event), 0, "retries go on");
    cr_assert_eq(prs_domain_check(domain, 2, 0, &event), 0, "another port");
    cr_assert_eq(report_and_check(domain, IBV_EVENT_QP_FATAL, 0, -EIO), -EIO);
    cr_assert_eq(report_and_check(domain, IBV_EVENT_PORT_ACTIVE, 0, 0), 0);
    prs_domain_close(domain);
}

/* ---- opening that fails ---- */

static int open_devices, protection_domains, registrations;
static const char *failing;

static bool fails(const char *call)
{
    bool it_does = failing && !strcmp(failing, call);

    errno = it_does ? EMFILE : 0;
    return it_does;
}

#define COUNTED(call, type, parameters, arguments, count)                                                              \
    static type(*real_##call) parameters;                                                                              \
    static type counted_##call parameters                                                                              \
    {                                                                                                                  \
        if (fails(#call))                                                                                              \
            return NULL;                                                                                               \
        (count)++;                                                                                                     \
        return real_##call arguments;                                                                                  \
    }
#define DROPPED(call, parameters, arguments, count)                                                                    \
    static int(*real_##call) parameters;                                                                               \
    static int dropped_##call parameters                                                                               \
    {                                                                                                                  \
        (count)--;                                                                                                     \
        return real_##call arguments;                                                                                  \
    }
COUNTED(open_device, struct ibv_context *, (struct ibv_device * device), (device), open_devices)
DROPPED(close_device, (struct ibv_context * context), (context), open_devices)
COUNTED(alloc_pd, struct ibv_pd *, (struct ibv_context * context), (context), protection_domains)
DROPPED(dealloc_pd, (struct ibv_pd * pd), (pd), protection_domains)
COUNTED(reg_mr, struct ibv_mr *, (struct ibv_pd * pd, void *addr, size_t bytes, int access), (pd, addr, bytes, access),
        registrations)
DROPPED(dereg_mr, (struct ibv_mr * mr), (mr), registrations)

static int (*real_query_device)(struct ibv_context *context, struct ibv_device_attr *attr);

static int failing_query_device(struct ibv_context *context, struct ibv_device_attr *attr)
{
    return fails("query_device") ? EMFILE : real_query_device(context, attr);
}

#define INSTALL(kind, call) (real_##call = prs_verbs.call, prs_verbs.call = kind##_##call)

Test(domain, what_was_made_before_a_failure_is_undone_and_the_next_try_works, .timeout = 60)
{
    static const char *const calls[] = {"open_device", "query_device", "alloc_pd", "reg_mr", NULL};
    int files;

    fake_verbs_install();
    INSTALL(counted, open_device);
    INSTALL(dropped, close_device);
    INSTALL(failing, query_device);
    INSTALL(counted, alloc_pd);
    INSTALL(dropped, dealloc_pd);
    INSTALL(counted, reg_mr);
    INSTALL(dropped, dereg_mr);
    files = open_files();
    for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++) {
        struct prs_domain *domain = NULL;
        int r;

        failing = calls[i];
        r = prs_domain_open(&fake, &domain);
        cr_assert_eq(r, failing ? -EMFILE : 0, "%s: %d", failing, r);
        if (failing)
            cr_assert(strstr(prs_error_text(), "fake0") && strstr(prs_error_text(), strerror(EMFILE)), "%s",
                      prs_error_text());
        else
            prs_domain_close(domain);
        cr_assert(!open_devices && !protection_domains && !registrations, "%s: %d devices, %d domains, %d regions",
                  failing, open_devices, protection_domains, registrations);
        cr_assert_eq(open_files(), files, "%s", failing);
    }
}

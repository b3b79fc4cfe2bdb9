/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of the transport's own, on a fake device. */
#include <criterion/criterion.h>
#include <errno.h>
#include <stdint.h>
#include <string.h>

#include "test/support/fake_verbs.h"
#include "transport/nic/domain.h"
#include "transport/nic/own_memory.h"
#include "transport/nic/verbs/verbs_nic.h"

static struct prs_domain *open_domain(void)
{
    static const struct prs_nic_device fake = {&prs_nic_rc, "fake0", &fake_verbs.device};
    struct prs_domain *domain;

    fake_verbs_install();
    cr_assert_eq(prs_domain_open(&fake, &domain), 0, "%s", prs_error_text());
    return domain;
}

Test(own_memory, it_is_registered_once_for_each_path_and_released_at_the_end)
{
    struct prs_domain *domain = open_domain();
    uint32_t before = fake_verbs.registrations;
    struct prs_own_memory memory;

    cr_assert_eq(prs_own_memory_init(&memory, 10000, "a test"), 0);
    for (size_t i = 0; i < 10000; i++)
        cr_assert_eq(((uint8_t *)memory.addr)[i], 0);
    for (int twice = 0; twice < 2; twice++)
        for (uint32_t path = 0; path < 3; path++)
            cr_assert_eq(prs_own_memory_register(&memory, path, domain, PRS_ACCESS_WRITTEN), 0);
    cr_assert_eq(fake_verbs.registrations, before + 3);
    cr_assert_eq(fake_verbs.access, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE, "strict, and nobody reads it");
    cr_assert_eq(prs_own_memory_local_key(&memory, 2), fake_verbs.mr.lkey);
    cr_assert_eq(prs_own_memory_remote_key(&memory, 2), fake_verbs.mr.rkey);
    prs_own_memory_fini(&memory);
    cr_assert_eq(fake_verbs.registrations, before);
    prs_own_memory_fini(&memory); /* nothing is left to end */
    cr_assert_eq(fake_verbs.registrations, before);
    prs_domain_close(domain);
}

Test(own_memory, only_this_side_may_use_local_memory)
{
    struct prs_domain *domain = open_domain();
    struct prs_own_memory memory;

    cr_assert_eq(prs_own_memory_init(&memory, 1, "a test"), 0);
    cr_assert_eq(prs_own_memory_register(&memory, 0, domain, PRS_ACCESS_LOCAL), 0);
    cr_assert_eq(fake_verbs.access, IBV_ACCESS_LOCAL_WRITE);
    prs_own_memory_fini(&memory);
    prs_domain_close(domain);
}

Test(own_memory, a_refused_registration_says_what_it_was_for)
{
    struct prs_domain *domain = open_domain();
    uint32_t before = fake_verbs.registrations;
    struct prs_own_memory memory;

    cr_assert_eq(prs_own_memory_init(&memory, 4097, "records of a test"), 0);
    cr_assert_eq(prs_own_memory_register(&memory, 0, domain, PRS_ACCESS_WRITTEN), 0);
    fake_verbs.registration_error = ENOMEM;
    cr_assert_eq(prs_own_memory_register(&memory, 1, domain, PRS_ACCESS_WRITTEN), -ENOMEM);
    cr_assert(strstr(prs_error_text(), "fake0") && strstr(prs_error_text(), "4097 bytes for records of a test") &&
                  strstr(prs_error_text(), "memlock"),
              "%s", prs_error_text());
    prs_own_memory_fini(&memory);
    cr_assert_eq(fake_verbs.registrations, before, "the first is released");
    prs_domain_close(domain);
}

Test(own_memory, memory_that_cannot_be_mapped_has_nothing_to_end)
{
    struct prs_own_memory memory;

    memset(&memory, 0xff, sizeof(memory));
    cr_assert_eq(prs_own_memory_init(&memory, SIZE_MAX / 2, "a test"), -ENOMEM);
    cr_assert(strstr(prs_error_text(), "for a test"), "%s", prs_error_text());
    prs_own_memory_fini(&memory);
}

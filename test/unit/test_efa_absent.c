/* SPDX-License-Identifier: Apache-2.0 */
/* Which devices a build without EFA uses. */
#include <criterion/criterion.h>
#include <string.h>

#include "transport/nic/verbs/efa.h"
#include "transport/nic/nic.h"

Test(efa_absent, an_efa_is_passed_over_with_the_reason)
{
    struct prs_domain domain = {.nic = &prs_nic_rc, .attr.vendor_id = PRS_EFA_VENDOR};

    prs_efa_claim(&domain);
    cr_assert_null(domain.nic);
    cr_assert(strstr(domain.why_not, "-Defa=enabled"), "%s", domain.why_not);
}

Test(efa_absent, other_devices_are_left_alone)
{
    struct prs_domain domain = {.nic = &prs_nic_rc, .attr.vendor_id = 0x15b3};

    prs_efa_claim(&domain);
    cr_assert_eq(domain.nic, &prs_nic_rc);
}

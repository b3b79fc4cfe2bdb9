/* SPDX-License-Identifier: Apache-2.0 */
/* Which devices a build without EFA uses. */
#include <criterion/criterion.h>
#include <string.h>

#include "transport/nic/verbs/efa.h"
#include "transport/nic/verbs/verbs_nic.h"

Test(efa_absent, an_efa_is_passed_over_with_the_reason)
{
    struct prs_verbs_device device = {.base.nic = &prs_nic_rc, .attr.vendor_id = PRS_EFA_VENDOR};

    prs_efa_claim(&device);
    cr_assert(strstr(device.base.why_not, "-Defa=enabled"), "%s", device.base.why_not);
}

Test(efa_absent, other_devices_are_left_alone)
{
    struct prs_verbs_device device = {.base.nic = &prs_nic_rc, .attr.vendor_id = 0x15b3};

    prs_efa_claim(&device);
    cr_assert_str_eq(device.base.why_not, "");
}

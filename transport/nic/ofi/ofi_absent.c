/* SPDX-License-Identifier: Apache-2.0 */
/* In place of the back end, where it was not built. */
#include <errno.h>

#include "transport/nic/ofi/ofi_nic.h"
#include "transport/util/error.h"

static int absent_devices(const struct prs_config *config, prs_nic_device_fn *fn, void *arg)
{
    (void)fn, (void)arg;
    if (!config->provider[0])
        return 0;
    return prs_fail(-ENOSYS,
                    "PERSEUS_PROVIDER=%s: this build of Perseus has no libfabric back end: the headers of libfabric "
                    "were missing, or it was configured with -Dofi=disabled",
                    config->provider);
}

const struct prs_nic_ops prs_nic_ofi = {.name = "ofi", .has_providers = true, .devices = absent_devices};

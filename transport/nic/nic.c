/* SPDX-License-Identifier: Apache-2.0 */
/* Code common to all back ends. */
#include "transport/nic/nic.h"

#include <errno.h>
#include <string.h>

#include "transport/util/error.h"

int prs_nic_fail(const struct prs_rail *rail, int error, const char *what)
{
    return prs_fail(error ? -error : -EIO, "%s:%d: %s: %s", rail->info.name, rail->port, what,
                    error ? strerror(error) : "no reason given");
}

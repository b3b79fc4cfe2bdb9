/* SPDX-License-Identifier: Apache-2.0 */
/* What all back ends share. */
#include "transport/nic.h"

#include "transport/domain.h"
#include "transport/verbs.h"
#include "util/error.h"

#include <errno.h>
#include <string.h>

int prs_nic_fail(const struct prs_rail *rail, int error, const char *what)
{
    return prs_fail(error ? -error : -EIO, "%s:%d: %s: %s", rail->info.name, rail->port, what,
                    error ? strerror(error) : "no reason given");
}

int prs_nic_create_cq(const struct prs_link_options *options, uint32_t receive_depth, struct ibv_cq **out)
{
    int entries = (int)(options->queues * (options->depth + receive_depth) + options->depth);

    errno = 0;
    *out = prs_verbs.create_cq(options->rail->domain->context, entries, NULL, NULL, 0);
    return *out ? 0 : prs_nic_fail(options->rail, errno, "cannot create a completion queue");
}

void prs_nic_error_event(const struct ibv_wc *wc, uint32_t queue, struct prs_event *out)
{
    out->kind = PRS_EVENT_ERROR;
    out->queue = queue;
    out->status = (int)wc->status;
    out->vendor = wc->vendor_err;
    out->text = prs_verbs.wc_status_str(wc->status);
}

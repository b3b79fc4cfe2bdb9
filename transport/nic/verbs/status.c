/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/nic/verbs/status.h"

#include <errno.h>

static int status_error(enum ibv_wc_status status, const char **cause)
{
    switch (status) {
    case IBV_WC_RNR_RETRY_EXC_ERR:
        *cause = "the peer does not poll for arrivals";
        return -ETIMEDOUT;
    case IBV_WC_REM_ACCESS_ERR:
        *cause = "the remote key is wrong or was deregistered, or the address is outside its region";
        return -EREMOTEIO;
    case IBV_WC_REM_OP_ERR:
    case IBV_WC_REM_INV_REQ_ERR:
    case IBV_WC_REM_ABORT_ERR:
        *cause = "the remote NIC could not perform the request";
        return -EREMOTEIO;
    case IBV_WC_FATAL_ERR:
        *cause = "the device or its driver has failed";
        return -ENODEV;
    case IBV_WC_LOC_PROT_ERR:
        *cause = "the local memory is not registered, or was deregistered while in use";
        return -EIO;
    case IBV_WC_WR_FLUSH_ERR:
        *cause = "the queue was closed by an earlier error";
        return -ECONNRESET;
    default:
        *cause = "see the kernel's log";
        return -EIO;
    }
}

void prs_verbs_error_event(const struct ibv_wc *wc, uint32_t queue, struct prs_event *out)
{
    out->kind = PRS_EVENT_ERROR;
    out->queue = queue;
    out->status = (int)wc->status;
    out->vendor = wc->vendor_err;
    out->text = prs_verbs.wc_status_str(wc->status);
    out->error = status_error(wc->status, &out->cause);
}

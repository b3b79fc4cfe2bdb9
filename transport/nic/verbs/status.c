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

/* Of a failed completion only wr_id, status, vendor_err and qp_num are valid. */
static void describe(const struct ibv_wc *wc, uint32_t queue, struct prs_event *out)
{
    out->kind = PRS_EVENT_ERROR;
    out->queue = queue;
    out->status = (int)wc->status;
    out->vendor = wc->vendor_err;
    out->text = prs_verbs.wc_status_str(wc->status);
    out->error = status_error(wc->status, &out->cause);
}

void prs_verbs_rc_error(const struct ibv_wc *wc, uint32_t queue, struct prs_event *out)
{
    describe(wc, queue, out);
    if (wc->status == IBV_WC_RETRY_EXC_ERR) {
        out->error = -ETIMEDOUT;
        out->cause = "no answer: the peer has died or closed, a link is down, or NCCL_IB_TIMEOUT is too short";
    } else if (wc->status == IBV_WC_WR_FLUSH_ERR) {
        out->cause = "the queue was closed by an earlier error, here or at the peer";
    }
}

/* Causes that EFA's driver reports by codes of its own choice. */
void prs_verbs_srd_error(const struct ibv_wc *wc, uint32_t queue, struct prs_event *out)
{
    describe(wc, queue, out);
    switch (wc->status) {
    case IBV_WC_RESP_TIMEOUT_ERR:
        out->error = -ETIMEDOUT;
        out->cause = "the remote NIC is unresponsive or unreachable: the peer has died or closed, its link is down, or "
                     "its security group lets nothing through";
        break;
    case IBV_WC_REM_INV_RD_REQ_ERR:
        out->error = -ECONNRESET;
        out->cause = "the remote queue does not exist: the peer has died or closed";
        break;
    case IBV_WC_REM_OP_ERR:
        out->error = -ECONNRESET;
        out->cause = "the remote NIC does not know us: the peer holds no address handle of ours, or has closed";
        break;
    case IBV_WC_BAD_RESP_ERR:
        out->error = -EREMOTEIO;
        out->cause = "the remote NIC could not perform the request";
        break;
    case IBV_WC_LOC_QP_OP_ERR:
        out->cause = "the NIC refuses the operation or the address handle";
        break;
    case IBV_WC_LOC_LEN_ERR:
        out->cause = "longer than the NIC's largest transfer";
        break;
    default:
        break;
    }
}

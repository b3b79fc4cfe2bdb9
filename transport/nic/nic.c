/* SPDX-License-Identifier: Apache-2.0 */
/* Code common to all back ends. */
#include "transport/nic/nic.h"

#include <errno.h>
#include <string.h>

#include "transport/nic/verbs/verbs.h"
#include "transport/util/error.h"
#include "transport/util/log.h"

int prs_nic_fail(const struct prs_rail *rail, int error, const char *what)
{
    return prs_fail(error ? -error : -EIO, "%s:%d: %s: %s", rail->info.name, rail->port, what,
                    error ? strerror(error) : "no reason given");
}

/* A dead device or a failed command of its firmware may refuse it. EINVAL: it is in that state already. */
static void kill_queue(struct prs_queue *queue)
{
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_ERR};
    int r = queue->qp ? prs_verbs.modify_qp(queue->qp, &attr, IBV_QP_STATE) : 0; /* none: the link has ended */

    if (!r || r == EINVAL)
        return;
    PRS_WARN("%s:%d: queue %u cannot be moved to the error state: %s", queue->link->rail->info.name,
             queue->link->rail->port, queue->qp->qp_num, strerror(r));
    queue->link->unflushed = true;
}

void prs_nic_stop_queues(struct prs_link *link)
{
    link->stopped = true; /* first: only what was posted before the change of state is sure to complete */
    for (uint32_t i = 0; i < link->queue_count; i++)
        kill_queue(link->queue[i]);
}

void prs_nic_kill_link(struct prs_link *link)
{
    if (link->ops->kill) {
        link->ops->kill(link);
        return;
    }
    prs_nic_stop_queues(link);
    if (link->loopback)
        kill_queue(link->loopback);
    if (link->unflushed) /* the memory of its requests may be used again after this */
        link->ops->end(link);
}

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

void prs_nic_error_event(const struct ibv_wc *wc, uint32_t queue, struct prs_event *out)
{
    out->kind = PRS_EVENT_ERROR;
    out->queue = queue;
    out->status = (int)wc->status;
    out->vendor = wc->vendor_err;
    out->text = prs_verbs.wc_status_str(wc->status);
    out->error = status_error(wc->status, &out->cause);
}

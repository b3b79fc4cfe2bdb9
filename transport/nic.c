/* SPDX-License-Identifier: Apache-2.0 */
/* What all back ends share. */
#include "transport/nic.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "transport/domain.h"
#include "transport/receives.h"
#include "transport/util/error.h"
#include "transport/util/log.h"

int prs_nic_fail(const struct prs_rail *rail, int error, const char *what)
{
    return prs_fail(error ? -error : -EIO, "%s:%d: %s: %s", rail->info.name, rail->port, what,
                    error ? strerror(error) : "no reason given");
}

static int create_cq(const struct prs_link_options *options, uint32_t receive_depth, struct ibv_cq **out)
{
    int entries = (int)(options->queues * (options->depth + receive_depth) + options->depth);

    errno = 0;
    *out = prs_verbs.create_cq(options->rail->domain->context, entries, NULL, NULL, 0);
    return *out ? 0 : prs_nic_fail(options->rail, errno, "cannot create a completion queue");
}

int prs_nic_open_link(struct prs_link *link, const struct prs_link_options *options,
                      const struct prs_receive_sizes *receives, prs_queue_open_fn *open)
{
    int r = create_cq(options, receives->depth, &link->cq);

    if (r)
        return r;
    link->queue = calloc(options->queues, sizeof(*link->queue));
    if (!link->queue)
        return prs_nic_fail(link->rail, ENOMEM, "link");
    for (; link->queue_count < options->queues; link->queue_count++) {
        uint32_t id = options->ids[link->queue_count];

        r = open(link, id, receives, &link->by_id[id]);
        if (r)
            return r;
        link->queue[link->queue_count] = link->by_id[id];
    }
    return 0;
}

void prs_nic_close_link(struct prs_link *link, prs_queue_close_fn *close)
{
    /* Destroying a queue pair returns only when the NIC has let go of the memory of its requests. */
    for (uint32_t i = 0; i < link->queue_count; i++)
        close(link->queue[i]);
    close(link->loopback);
    if (link->cq && prs_verbs.destroy_cq(link->cq))
        PRS_WARN("%s: cannot destroy a completion queue", link->rail->info.name);
    free(link->queue);
}

static void kill_queue(struct prs_queue *queue)
{
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_ERR};

    prs_verbs.modify_qp(queue->qp, &attr, IBV_QP_STATE); /* a failure means it is in that state already */
}

void prs_nic_kill_link(struct prs_link *link)
{
    for (uint32_t i = 0; i < link->queue_count; i++)
        kill_queue(link->queue[i]);
    if (link->loopback)
        kill_queue(link->loopback);
}

void prs_nic_error_event(const struct ibv_wc *wc, uint32_t queue, struct prs_event *out)
{
    out->kind = PRS_EVENT_ERROR;
    out->queue = queue;
    out->status = (int)wc->status;
    out->vendor = wc->vendor_err;
    out->text = prs_verbs.wc_status_str(wc->status);
}

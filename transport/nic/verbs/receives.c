/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/nic/verbs/receives.h"

struct prs_receive_sizes prs_receives_sizes(uint32_t most)
{
    uint32_t batch = most / 2 < PRS_RECEIVES_BATCH ? most / 2 : PRS_RECEIVES_BATCH;

    if (!batch)
        batch = 1;
    return (struct prs_receive_sizes){batch, most / batch * batch};
}

static int post(struct prs_receives *receives)
{
    struct ibv_recv_wr *bad;
    int r = ibv_post_recv(receives->qp, receives->wr, &bad);

    receives->queue->link->receives += receives->batch;
    receives->total += receives->batch;
    return r > 0 ? -r : r;
}

/* A receive that is posted to a stopped queue may never complete: the driver of soft-RoCE only writes a ring. */
int prs_receives_replace(struct prs_receives *receives)
{
    if (receives->queue->link->stopped)
        return 0;
    receives->consumed = 0;
    return post(receives);
}

int prs_receives_open(struct prs_receives *receives, struct prs_queue *queue, struct ibv_qp *qp, uint32_t name,
                      const struct prs_receive_sizes *sizes, struct ibv_sge *sge)
{
    receives->queue = queue;
    receives->qp = qp;
    receives->consumed = receives->total = receives->flushed = 0;
    receives->depth = sizes->depth;
    receives->batch = sizes->batch;
    for (uint32_t i = 0; i < sizes->batch; i++)
        receives->wr[i] = (struct ibv_recv_wr){.wr_id = PRS_ARRIVAL_BIT | (uint64_t)name << 32,
                                               .next = i + 1 < sizes->batch ? &receives->wr[i + 1] : NULL,
                                               .sg_list = sge,
                                               .num_sge = sge ? 1 : 0};
    for (uint32_t posted = 0; posted < sizes->depth; posted += sizes->batch) {
        int r = post(receives);

        if (r)
            return prs_nic_fail(queue->link->rail, -r, "cannot post receives");
    }
    return 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* A fake EFA for tests of the SRD back end: any number of devices, queue pairs and address handles. It notes what is
 * posted and delivers nothing by itself: each test says what completes, and in which order. */
#ifndef TEST_SUPPORT_FAKE_SRD_H
#define TEST_SUPPORT_FAKE_SRD_H

#include <stdbool.h>
#include <stdint.h>

#include "transport/nic/verbs/address.h"
#include "transport/nic/verbs/verbs.h"
#include "transport/nic/verbs/verbs_nic.h"

enum { FAKE_SRD_DEPTH = 64, FAKE_SRD_SENT = 8192, FAKE_SRD_QUEUED = 256 };

struct fake_srd_qp {
    struct ibv_qp_ex ex; /* first: its qp_base is the queue pair */
    struct ibv_cq cq;
    bool alive, error;                /* error: in the error state */
    uint32_t in_flight;               /* requests that were posted and not completed */
    uint32_t posted_receives, pieces; /* receives posted so far, and the number of their pieces of memory */
    struct ibv_wc queued[FAKE_SRD_QUEUED];
    uint32_t queued_count, queued_taken;
};

struct fake_srd_sent {
    struct fake_srd_qp *qp;
    uint64_t wr_id;
    struct ibv_sge sge;
    uint32_t number, key; /* of the target */
};

struct fake_srd {
    uint32_t alive;       /* queue pairs that exist */
    uint32_t handles;     /* address handles that exist */
    uint32_t max_send_wr; /* max_send_wr of each device that is opened from now on */
    uint32_t max_receive_wr;
    bool aborted; /* the last posting */
    struct fake_srd_sent sent[FAKE_SRD_SENT];
    uint32_t sent_count;
};
extern struct fake_srd fake_srd;

void fake_srd_install(void);

/* One side's rail: device `rank`, with a GID that ends with rank + 1. Opening it twice gives the same. */
const struct prs_rail *fake_srd_rail(uint32_t rank);

/* One side of a connection from `rank` to `other`, with these queues. remote: by id, or NULL for the side that
 * accepts. */
struct prs_link *fake_srd_open(uint32_t rank, uint32_t other, uint32_t queues, const struct prs_nic_address *remote);
/* Both sides of a connection of one queue, connected. */
struct fake_srd_pair {
    struct prs_link *accepting, *connecting;
};
struct fake_srd_pair fake_srd_connect(uint32_t acceptor, uint32_t connector);
/* Close without a stream, as if the handshake had failed; or with one. */
void fake_srd_close(struct prs_link *link, int stream_fd);

/* Where the first queue of a link is. */
struct prs_verbs_queue fake_srd_address(const struct prs_link *link);

struct fake_srd_qp *fake_srd_qp_of(const struct prs_link *link);
/* Post this many writes on the first queue, from this position on. Return what post() returns. */
int fake_srd_post(struct prs_link *link, uint32_t first, uint32_t count);
/* Let polling of this queue pair return a completion. */
void fake_srd_complete(struct fake_srd_qp *qp, struct ibv_wc wc);
/* Of a posted request. */
void fake_srd_finish(const struct fake_srd_sent *sent, enum ibv_wc_status status);
/* Let the completion of a write with this immediate by `from` arrive. */
void fake_srd_arrive(const struct prs_link *to, const struct prs_link *from, uint32_t imm, uint32_t bytes);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* A device that takes everything and does nothing by itself, for the back ends: prs_verbs leads here. */
#ifndef TEST_SUPPORT_FAKE_VERBS_H
#define TEST_SUPPORT_FAKE_VERBS_H

#include <infiniband/verbs.h>
#include <stdint.h>

struct fake_verbs {
    struct ibv_context context;
    struct ibv_cq cq;
    struct ibv_qp_ex qp;      /* its qp_base is the only queue pair */
    struct ibv_ah ah;         /* the only address handle */
    uint32_t asked_receives;  /* of the queue pair when it was created */
    uint32_t posted_receives; /* so far, and of how many pieces of memory */
    uint32_t receive_pieces;
    struct ibv_wc queued[128]; /* what polling brings, in this order */
    uint32_t queued_count, queued_taken;
};
extern struct fake_verbs fake_verbs;

/* From now on. */
void fake_verbs_install(void);
/* Polling will bring this one. */
void fake_verbs_complete(struct ibv_wc wc);

#endif

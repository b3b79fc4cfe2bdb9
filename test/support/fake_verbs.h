/* SPDX-License-Identifier: Apache-2.0 */
/* A fake device for tests of the back ends: it accepts every call and does nothing by itself. prs_verbs calls it. */
#ifndef TEST_SUPPORT_FAKE_VERBS_H
#define TEST_SUPPORT_FAKE_VERBS_H

#include <infiniband/verbs.h>
#include <stdint.h>

struct fake_verbs {
    struct ibv_context context;
    struct ibv_cq cq;
    struct ibv_qp_ex qp;      /* its qp_base is the only queue pair */
    struct ibv_ah ah;         /* the only address handle */
    uint32_t asked_receives;  /* depth asked for when the queue pair was created */
    uint32_t posted_receives; /* so far, and their pieces of memory */
    uint32_t receive_pieces;
    struct ibv_wc queued[128]; /* completions that polling returns, in this order */
    uint32_t queued_count, queued_taken;
};
extern struct fake_verbs fake_verbs;

/* Make prs_verbs call the fake device from now on. */
void fake_verbs_install(void);
/* Let polling return this completion. */
void fake_verbs_complete(struct ibv_wc wc);

#endif

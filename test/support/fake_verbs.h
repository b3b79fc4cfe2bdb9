/* SPDX-License-Identifier: Apache-2.0 */
/* A fake device for tests of the back ends, domains and rails: it accepts every call and does nothing by itself.
 * prs_verbs calls it. */
#ifndef TEST_SUPPORT_FAKE_VERBS_H
#define TEST_SUPPORT_FAKE_VERBS_H

#include <infiniband/verbs.h>
#include <stdint.h>

enum { FAKE_GIDS = 8 };

struct fake_verbs {
    struct ibv_device device;
    struct ibv_device_attr attr;
    struct verbs_context extended; /* its last member is the context of the device */
    struct ibv_port_attr port;     /* of every port */
    uint32_t speed_ex;             /* speed of the port, which newer libraries report after the other fields */
    uint64_t port_speed;           /* hundreds of Mb/s; 0: the library cannot tell */
    struct ibv_gid_entry gid[FAKE_GIDS];
    uint32_t max_inline;          /* a queue pair that wants more is refused */
    struct ibv_async_event event; /* returned once fake_verbs_report() was called */
    struct ibv_pd pd;
    struct ibv_mr mr;
    uint32_t registrations; /* that are not released */
    int access;             /* of the last */
    int registration_error; /* error of the next registrations; 0: none */
    struct ibv_cq cq;
    struct ibv_qp_ex qp;      /* its qp_base is the only queue pair */
    struct ibv_ah ah;         /* the only address handle */
    uint32_t asked_receives;  /* depth asked for when the queue pair was created */
    uint32_t posted_receives; /* receives posted so far, and their pieces of memory */
    uint32_t receive_pieces;
    uint32_t sends, send_calls;        /* requests posted, and calls that posted them */
    uint64_t send_ids[256];            /* wr_id of each request */
    struct ibv_ece ece, asked_ece;     /* ece: of the queue pair; asked_ece: last requested */
    struct ibv_qp_attr init, rtr, rts; /* the last that the queue pair was given on its way to each state */
    struct ibv_wc queued[128];         /* completions that polling returns, in this order */
    uint32_t queued_count, queued_taken;
};
extern struct fake_verbs fake_verbs;

/* Make prs_verbs call the fake device from now on. It is an active InfiniBand port with GID fe80::1 at index 0. */
void fake_verbs_install(void);
/* Let the open device report this asynchronous event. */
void fake_verbs_report(struct ibv_async_event event);
/* Let polling return this completion. */
void fake_verbs_complete(struct ibv_wc wc);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* A queue pair in its own process: the send queue, and the thread that executes it.
 * Requests are written into the send queue under the mutex. The *runner* is the thread that has set running (under the
 * mutex): only this thread executes them, in the order of their positions. On SRD, entries change positions (srd.h). */
#ifndef SOFTNIC_QUEUE_PAIR_H
#define SOFTNIC_QUEUE_PAIR_H

#include <infiniband/verbs.h>
#include <pthread.h>

#include "tools/softnic/memory/copy.h"
#include "tools/softnic/memory/device_mem.h"
#include "tools/softnic/nic/context.h"

enum {
    SN_MAX_INLINE = 1024,
    SN_MAX_QP_WR = 16384,
    SN_MAX_RD_ATOMIC = 128,
    SN_GRH_BYTES = 40, /* bytes of the header that precedes the data of a received datagram */
};

/* The route of a datagram: the content of an address handle (datagram.h). */
struct sn_route {
    uint8_t sgid, dgid; /* indices in the GID tables of the sender's and the receiver's device */
    uint8_t hop_limit;
    uint32_t class_label; /* traffic class << 20 | flow label */
};

/* A request in the send queue; followed by max_sge sn_sge and max_inline bytes. The fields that every request uses are
 * on two cache lines, because with many queue pairs none of them is in a cache. */
struct sn_wqe {
    /* while it is in the pipeline (pipeline.h) */
    struct sn_queued_copy queued_copy;
    int queue_error; /* the copy could not be queued; reported when the request reaches the head of the queue */
    uint32_t stores; /* an atomic: number of writes of its batch that must be done first (atomic_batch.h) */

    uint64_t retry_until; /* when to give up an unreachable target; valid while `retrying` */
    /* the posted request */
    uint64_t wr_id;
    uint64_t length;
    uint64_t raddr;
    union {
        struct { /* atomics */
            uint64_t compare_add, swap;
        };
        struct { /* binding a memory window */
            uint64_t window_bytes;
            uint32_t window_mr, window_access;
        };
        struct { /* UD, SRD */
            uint32_t qkey;
            struct sn_route route;
        };
    };
    uint32_t rkey;
    uint32_t imm;
    uint32_t opcode;             /* enum ibv_wr_opcode */
    uint32_t flags;              /* enum ibv_send_flags */
    uint32_t dest_qpn, dest_dev; /* connected: the queue pair's; UD, SRD: the request's own */

    /* the model (model.h) */
    uint64_t due_exec, due_done; /* it is not executed, or completed, before these times; 0: at once */
    uint32_t num_sge;
    uint32_t status; /* the outcome: enum ibv_wc_status */
    /* while it is executed */
    uint32_t rnr_left; /* tries left of rnr_retry; UINT32_MAX: not yet counted */
    bool lost;         /* the model loses it more often than it may be retried */
    bool copying;      /* an asynchronous copy is under way */
    bool copied; /* in the pipeline: only a receive is missing; or the copy of an earlier request includes its bytes */
    bool retrying;
    uint8_t *bounce; /* the bytes of a read that is not due yet */
    union {
        uint64_t result;     /* the value that an atomic found */
        uint64_t recv_wr_id; /* wr_id of the receive that it took */
    };
    struct sn_sge sge[];
};
static_assert(offsetof(struct sn_wqe, wr_id) == SN_LINE && offsetof(struct sn_wqe, due_exec) == 2 * SN_LINE &&
                  offsetof(struct sn_wqe, sge) + sizeof(struct sn_sge) == 3 * SN_LINE,
              "a request with one buffer uses two cache lines");

/* The fields that every request uses come first, on three cache lines; ibv_post_send() reads ex.qp_base.context. */
struct sn_qp {
    struct sn_ctx *ctx;
    struct sn_qp_shm *shm;
    uint32_t index, qpn;
    uint32_t pd;
    enum sn_transport transport;
    struct ibv_qp_cap cap;
    /* posting, under the mutex */
    uint32_t recv_posted, recv_polled;
    /* the send queue: free entries, [done, exec) executed, [exec, tail) posted */
    uint32_t sq_size, sq_stride; /* entries (a power of two, at least cap.max_send_wr); bytes of each */
    uint32_t sq_start;           /* position of the first entry: where the queue was last empty */
    uint8_t *sq;
    uint16_t *turn;      /* SRD: [position] index of its entry; NULL: the position itself is the index */
    uint32_t exec, done; /* positions of the runner: next to execute, next to complete */
    uint32_t tail;       /* position: next to post */
    uint32_t freed;      /* positions below are free again: their completions were polled */
    uint32_t seen;       /* SRD: the order of execution is planned for positions below this */
    uint32_t reads_open; /* reads and atomics that have begun and are not completed */
    uint32_t runs; /* odd while a request is being executed; ibv_dereg_mr waits until it is even or has advanced */
    uint32_t in_pipeline;   /* of the runner: how many requests from exec on are in the pipeline */
    struct sn_batch *batch; /* atomics in the pipeline; NULL: there were none yet */
    uint64_t entry;         /* result of sn_responder_enter, while a copy runs */
    bool extended;          /* made for ibv_wr_* */
    bool sig_all;
    /* execution; protected by the mutex */
    bool running; /* a runner is at work: only it touches exec, done, copy and the requests [done, tail) */
    bool queued;  /* it is in the engine's heap */
    bool closing;
    bool drain_due; /* report when the send queue has drained */
    bool flush_due; /* a request has failed; when it is completed, the receives are flushed */
    bool light;     /* the next piece of work is short: a thread that polls may do it */
    pthread_mutex_t mutex;
    struct ibv_qp_ex ex; /* programs hold a pointer to its qp_base */

    struct sn_qp *next, **prev; /* ctx->qp_list */
    struct ibv_qp_attr attr;    /* the attributes that modify_qp set */
    uint32_t async_events;      /* delivered; destroy waits until they are acknowledged */
    uint32_t wr_at;             /* ibv_wr_*, under the mutex: the next position, between wr_start and wr_complete */
    int wr_error;               /* ibv_wr_*: the first error */
    uint32_t heap_at;           /* protected like `running`, as is what follows */
    uint64_t wake_at;
    uint64_t last_exec_due, last_done_due, last_read_due; /* used by the model, under the mutex */

    /* used by the runner: copies that take time, for the request at exec and for the one at done */
    struct sn_copy copy;
    struct sn_atomic atomic;      /* the same for an atomic */
    uint8_t header[SN_GRH_BYTES]; /* UD: part of copy */
    struct sn_copy result;        /* copy of a result, for the request at done; `copy` may run at the same time */

    /* used by the runner: the pipeline (pipeline.h) */
    uint32_t pipeline_begun; /* requests that have entered it since it was empty */
    uint32_t receives_due;   /* receives that the requests in it will take */
    uint64_t pipeline_bytes; /* bytes of the writes in it */
    struct sn_copy_queue queue;
    /* the initiators that were executing when a window was invalidated (window.c) */
    uint64_t window_users[SN_MAX_INITIATORS];
    bool window_waits;
};
/* With the mutex of x86-64; that of 64-bit Arm is 8 bytes longer. */
static_assert(sizeof(pthread_mutex_t) > 40 ||
                  offsetof(struct sn_qp, ex.qp_base.context) + sizeof(void *) <= 3 * SN_LINE,
              "three cache lines");

static inline struct sn_qp *sn_qp_of(struct ibv_qp *qp)
{
    return (struct sn_qp *)((uint8_t *)qp - offsetof(struct sn_qp, ex.qp_base));
}

/* Status of a request that no peer answers. */
static inline uint32_t sn_qp_unanswered(const struct sn_qp *qp)
{
    return qp->transport == SN_TRANSPORT_SRD ? IBV_WC_RESP_TIMEOUT_ERR : IBV_WC_RETRY_EXC_ERR;
}

static inline bool sn_qp_is_srd(const struct sn_qp *qp)
{
    return qp->transport == SN_TRANSPORT_SRD;
}

static inline bool sn_qp_is_ud(const struct sn_qp *qp)
{
    return qp->transport == SN_TRANSPORT_UD;
}

/* Does each request name its own target? */
static inline bool sn_qp_is_datagram(const struct sn_qp *qp)
{
    return sn_qp_is_ud(qp) || sn_qp_is_srd(qp);
}

/* Is nothing acknowledged? Messages that do not arrive are then dropped, and the sender does not learn of that. */
static inline bool sn_qp_is_unreliable(const struct sn_qp *qp)
{
    return qp->transport == SN_TRANSPORT_UD || qp->transport == SN_TRANSPORT_UC;
}

static inline struct sn_wqe *sn_wqe_at(struct sn_qp *qp, uint32_t position)
{
    uint32_t at = (position - qp->sq_start) & (qp->sq_size - 1);

    return (struct sn_wqe *)(qp->sq + (size_t)(qp->turn ? qp->turn[at] : at) * qp->sq_stride);
}

/* Do both requests go to the same remote queue pair? */
static inline bool sn_wqe_same_target(const struct sn_qp *qp, const struct sn_wqe *a, const struct sn_wqe *b)
{
    return a->dest_qpn == b->dest_qpn && a->dest_dev == b->dest_dev && (!sn_qp_is_datagram(qp) || a->qkey == b->qkey);
}

static inline uint32_t sn_qp_state(const struct sn_qp *qp)
{
    return __atomic_load_n(&qp->shm->state, __ATOMIC_SEQ_CST); /* [flush-due] after the receives that were posted */
}

/* run.c */
/* Move a queue pair to the error state after a failed request; its receives are flushed when that request is
 * completed. event: as in sn_qp_shm_stop. The caller is the runner. */
void sn_qp_fail(struct sn_qp *qp, int event);

/* Execute and complete requests as far as possible. Return when to call again (UINT64_MAX: nothing is left). The caller
 * is the runner. */
uint64_t sn_qp_run(struct sn_qp *qp);

/* Is an asynchronous copy under way? The caller is the runner, or holds the mutex while there is none. */
bool sn_qp_copying(struct sn_qp *qp);

/* Has every request that was begun ended? The same callers. */
bool sn_qp_drained(struct sn_qp *qp);

/* Stop running; `at` is what sn_qp_run returned. Queue for the engine if anything is left. The caller holds the
 * mutex. */
void sn_qp_hand_over_locked(struct sn_qp *qp, uint64_t at);

/* Run a queue pair that was just taken from an engine's heap. */
void sn_qp_run_taken(struct sn_qp *qp);

/* Become the runner (unless there is one), run, and hand the rest to the engine. */
void sn_qp_kick(struct sn_qp *qp);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* The one place where order is decided. Pure: no verbs, no clock, no thread, no allocation after prs_order_init().
 *
 *   admit     prs_order_put / get / signal / probe   an op becomes work requests, each with a queue and a position
 *   post      prs_order_take                         what waits on one queue becomes a chain, its last one signaled
 *   complete  prs_order_complete                     everything on that queue up to the position is retired
 *   arrive    prs_arrivals_add (arrival.h)           the receiving half
 *
 * Positions count the requests of a queue, modulo 2^32. A request takes its slot of the send queue when it is admitted
 * and gives it back when a *signaled* request at or behind it completes, which is also what hardware does.
 *
 * What "behind its group" costs:
 *   - Each group remembers, per queue, the position of its last put. A signal whose group has unfinished requests on
 * one queue at most goes to that queue at once: the queue keeps the order (in_order), with a fence flag under
 * nic_fence.
 *   - Otherwise it is held here until all but one of those queues have finished the group. Puts are not held meanwhile
 *     (except under drain, the baseline: there a signal waits for all puts and gets, once for signals in a row).
 * Signals leave in the order in which they came.
 *   - counted holds nothing: every put names its group's tag, and the signal becomes a record (tally.h). Where the NIC
 * has no adds, drain's signals are records as well, which wait for no arrivals.
 *   - in_order therefore keeps puts without notification on the home queue of their group, so that nothing is ever
 * held; notified puts may stripe, since their parts are counted by the receiver anyway. */
#ifndef TRANSPORT_ORDER_H
#define TRANSPORT_ORDER_H

#include <stdbool.h>
#include <stdint.h>

#include "transport/policy.h"
#include "transport/tally.h"
#include <perseus/perseus.h>

enum {
    PRS_ORDER_MAX_QUEUES = 64, /* bits of a mask; data queues and one probe queue a rail */
    PRS_ORDER_MAX_DATA_QUEUES = PRS_ORDER_MAX_QUEUES - PRS_MAX_RAILS,
    PRS_ORDER_MAX_QUEUES_PER_RAIL = 16,
    PRS_ORDER_GROUPS = PRS_TALLY_SLOTS, /* groups share a slot modulo this: which only makes signals wait for more */
    PRS_ORDER_HELD = 32,                /* signals waiting for other queues; a further one is PRS_BUSY */
    PRS_ORDER_LAZY = 16,                /* lazy requests on one queue behind which one is signaled all the same */
    PRS_ORDER_PROMPT_BYTES = 8192, /* a request this long gains nothing from company: it is posted at once, signaled,
                                      and has its own notification, so that neither side waits for another's bytes */
    PRS_ORDER_SURE_PARTS = 8,      /* requests that a notified put may always have, over however many queues */
    PRS_ORDER_BATCH = 16,          /* requests on one queue that make the caller post without waiting for more */
};

enum prs_wr_opcode { PRS_WR_WRITE, PRS_WR_WRITE_IMM, PRS_WR_READ, PRS_WR_ADD };
enum prs_wr_flags { PRS_WR_SIGNALED = 1, PRS_WR_FENCE = 2, PRS_WR_INLINE = 4 };

/* One work request, ready for any NIC. For PRS_WR_ADD the NIC's back end supplies where the old value goes. */
struct prs_wr { /* in the order in which back ends copy it: what is local, what is remote */
    uint64_t local_addr;
    uint32_t len_bytes;
    uint32_t local_key;
    uint64_t remote_addr;
    uint32_t remote_key;
    uint32_t imm;
    uint64_t value; /* PRS_WR_ADD */
    uint8_t opcode;
    uint8_t flags;
};

struct prs_order_path {   /* one rail to the peer */
    uint32_t local_rail;  /* index into a region's local keys */
    uint32_t remote_rail; /* index into the peer's struct prs_keys */
    float rate;           /* bytes per microsecond: link speed first, then as measured */
    uint64_t since_ns;    /* start of the interval that the next measurement covers; 0: idle */
    uint64_t done_bytes;  /* in that interval */
    uint64_t inflight_bytes;
    uint32_t turn; /* which of its queues the last long put took */
};

struct prs_order_queue {
    /* Rings of size mask + 1, indexed by position. */
    struct prs_wr *wr;
    struct prs_op **owner;
    uint8_t *inline_bytes; /* PRS_INLINE_BYTES each: a copy must live until the request completes */
    uint32_t inline_key;   /* where the NIC cannot take the bytes from the request itself */
    uint32_t mask;
    uint32_t head;     /* next to admit */
    uint32_t posted;   /* next to post */
    uint32_t tail;     /* next to retire */
    uint32_t signaled; /* behind the last signaled one */
    bool eager;        /* somebody waits for what is not posted yet */
    uint32_t path;
    uint32_t local_rail; /* the path's */
    uint32_t remote_rail;
    uint32_t run;       /* length of the run that the request before head ends */
    uint64_t run_next;  /* run_key() of the message that would make it longer; 0: none may */
    uint32_t last_read; /* position + 1 of the last read; 0: none */
    uint32_t last_work; /* the same of the last put or get that signals stay behind: not of PRS_GROUP_NONE */
    uint32_t last_kept; /* the same, with signals */
    uint64_t backlog_bytes;
};

struct prs_order_group {
    uint64_t used; /* queues on which last is meant */
    bool unfenced; /* puts since the last fenced signal */
    uint32_t last[PRS_ORDER_MAX_QUEUES];
};

struct prs_order_held {
    struct prs_op *op;
    struct prs_signal signal;
    struct prs_keys keys;
    uint64_t need; /* queues that have not reached need_position yet */
    uint32_t need_position[PRS_ORDER_MAX_QUEUES];
};

struct prs_order_stats {
    uint64_t puts, gets, signals, fences, drains, merged, bytes;
    uint64_t path_bytes[PRS_MAX_RAILS]; /* with several queues only */
};

struct prs_order {
    enum prs_policy policy;
    uint32_t window_ops;
    uint32_t ops;      /* in flight */
    uint32_t signaled; /* requests that will bring a completion somebody waits for, or nobody does */
    uint32_t data_queues;
    uint32_t probe_queues; /* behind the data queues */
    uint32_t path_count;
    uint32_t max_run;
    bool in_order;           /* the queues keep order */
    bool fence;              /* a request can be held until earlier ones of its queue are complete */
    bool tracked;            /* signals depend on where the puts of their group went */
    bool plain;              /* in_order on a single queue: a put has no choice, and nobody asks where it went */
    bool holds;              /* a signal may wait for completions */
    uint32_t small_queue;    /* where small notified puts go while it is not much slower than another */
    uint64_t split_bytes;    /* a longer put is cut */
    bool split_queues;       /* over all queues; else over one queue of each path, by turns */
    uint64_t max_part_bytes; /* of one request */
    uint64_t dirty;          /* queues on which something waits to be posted */
    bool stalled;            /* drain: nothing starts until the held signal has left */
    uint32_t held_first, held_count;
    uint64_t signal_used; /* queues on which signal_last is meant */
    uint32_t signal_last[PRS_ORDER_MAX_QUEUES];
    struct prs_tally *tally;            /* signals travel as records: counted, and where the NIC has no adds */
    uint64_t record_addr;               /* then: the peer's ring of records */
    uint32_t record_key[PRS_MAX_RAILS]; /* by path */
    uint32_t last_word;                 /* position + 1 on queue 0 of the last prs_order_word(); 0: none */
    struct prs_op closers;              /* owner of records that only close an interval: never done */
    struct prs_order_stats stats;
    struct prs_order_path path[PRS_MAX_RAILS];
    struct prs_order_queue queue[PRS_ORDER_MAX_QUEUES];
    struct prs_order_group group[PRS_ORDER_GROUPS];
    struct prs_order_held held[PRS_ORDER_HELD];
};

struct prs_order_options {
    enum prs_policy policy; /* not auto */
    bool in_order;          /* as nic.h promises it; without it, messages share no immediate */
    bool fence;             /* the same */
    uint32_t window_ops;
    uint32_t path_count;
    uint32_t queues_per_path;
    uint32_t depth; /* slots of each send queue; a power of two */
    uint64_t max_part_bytes;
    bool split_queues;                         /* NCCL_IB_SPLIT_DATA_ON_QPS */
    struct prs_order_path path[PRS_MAX_RAILS]; /* rails and rate */
};

/* Queue q runs on path q % path_count; probe queues follow, one a path. Return 0, -EINVAL or -ENOMEM. */
int prs_order_init(struct prs_order *order, const struct prs_order_options *options);
void prs_order_fini(struct prs_order *order);
/* Signals travel as records: where the peer's are, and the word in which it returns credits. Before the first op. */
int prs_order_set_records(struct prs_order *order, uint64_t record_addr, const uint32_t *record_key,
                          const uint64_t *credit_word);

/* local_keys is indexed by prs_order_path.local_rail. Return 0, PRS_BUSY (nothing changed) or -EINVAL. */
int prs_order_put(struct prs_order *order, struct prs_op *op, const struct prs_put *put, const uint32_t *local_keys);
int prs_order_get(struct prs_order *order, struct prs_op *op, const struct prs_get *get, const uint32_t *local_keys);
int prs_order_signal(struct prs_order *order, struct prs_op *op, const struct prs_signal *signal);
/* A request for the probe queue of path 0; op may be NULL. Beyond the window: what is in flight may wait for it. Return
 * 0 or PRS_BUSY. */
int prs_order_self(struct prs_order *order, struct prs_op *op, const struct prs_wr *request);
/* An aligned word for the peer, on the first queue, that no op stands behind. Where nothing keeps order, one at a time:
 * an older one could land on a newer one, and stay. Return 0 or PRS_BUSY. */
int prs_order_word(struct prs_order *order, uint64_t remote_addr, uint32_t remote_key, uint64_t value);
/* Has everything that was admitted taken effect at the peer, its signals too? Return 0 or PRS_AGAIN: complete what is
 * in flight and ask again. May make a record leave: look at dirty. */
int prs_order_settle(struct prs_order *order);
/* One read on the probe queue of each path; requests[i] is complete but for the opcode. */
int prs_order_probe(struct prs_order *order, struct prs_op *op, const struct prs_wr *requests);

struct prs_chain {
    uint32_t queue;
    uint32_t first; /* position */
    uint32_t count;
};
/* Close what waits on one queue into a chain that is to be posted now. Return false when nothing waits. */
bool prs_order_take(struct prs_order *order, uint64_t now_ns, struct prs_chain *out);

/* The NIC has done all that prs_order_self() asked of it. */
static inline bool prs_order_self_idle(const struct prs_order *order)
{
    const struct prs_order_queue *queue = &order->queue[order->data_queues];

    return queue->head == queue->tail;
}

/* Nothing is in flight that somebody waits for, and nothing waits to be posted. */
static inline bool prs_order_idle(const struct prs_order *order)
{
    return order->signaled == 0 && !order->dirty;
}

/* The signaled request at that position is complete. Return how many ops are done, or -EPROTO (not a position that is
 * in flight). May make held signals leave: look at dirty. */
int prs_order_complete(struct prs_order *order, uint32_t queue, uint32_t position, uint64_t now_ns);

/* Nothing will complete any more: every op in flight or held gets this status. */
void prs_order_fail(struct prs_order *order, int status);

#endif

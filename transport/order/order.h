/* SPDX-License-Identifier: Apache-2.0 */
/* The order engine of one peer. Order is decided here, and for the policy drain over several peers in order_drain.h;
 * nowhere else. Pure: no verbs, no clock, no thread, no allocation after prs_order_init().
 *
 *   admit     prs_order_put / get / signal / probe   an op becomes work requests, each with a queue and a position
 *   post      prs_order_take                         the requests that wait on one queue become a chain
 *   complete  prs_order_complete                     all requests of that queue up to a position are retired
 *   fail over prs_order_path_stop / down / up        what a lost path has not delivered is replayed over another
 *   arrive    prs_arrivals_add (arrival.h)           the receiving half
 *
 * Positions count the requests of a queue, modulo 2^32. A request takes its slot of the send queue when it is admitted
 * and gives it back when a *signaled* request at its position or a later one completes, as in the hardware.
 *
 * How each policy keeps a signal after the puts of its group:
 *   - in_order and nic_fence remember, for each group and queue, the position of the last put. When at most one queue
 *     has unfinished puts of the group, the signal goes to that queue at once, where the order of the queue (in_order)
 *     or the fence flag (nic_fence) keeps it. Otherwise it is held until only one such queue is left; puts continue. To
 *     hold as few as possible, in_order sends all puts of a group over one queue. Only notified puts may be striped,
 *     because the receiver counts their parts anyway. Adds go to one NIC of the peer, whatever their group, since
 *     atomics are atomic only with respect to others of the same NIC. So an add waits for puts of its group that went
 *     to another NIC. Under adaptive routing a set, which is a plain write, waits for all puts of its group; an atomic
 *     stays after them by itself.
 *   - drain, the baseline, holds the signal until all puts and gets are complete, and starts nothing meanwhile. Signals
 *     in a row wait once. Where the NIC has no adds, the signal then leaves as a record that waits for no arrivals.
 *   - counted holds nothing: every put names its group's tag, and the signal becomes a record (tally.h).
 *
 * Held signals leave in the order in which they were admitted. */
#ifndef TRANSPORT_ORDER_H
#define TRANSPORT_ORDER_H

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "transport/order/policy.h"
#include "transport/order/tally.h"
#include "transport/util/lines.h"
#include <perseus/perseus.h>

enum {
    PRS_ORDER_MAX_QUEUES = 64, /* bits of a mask: the data queues, and a probe queue for each rail */
    PRS_ORDER_MAX_DATA_QUEUES = PRS_ORDER_MAX_QUEUES - PRS_MAX_RAILS,
    PRS_ORDER_MAX_QUEUES_PER_RAIL = 16,
    /* group numbers are taken modulo this, so a signal may also wait for puts of another group */
    PRS_ORDER_GROUPS = PRS_TALLY_SLOTS,
    PRS_ORDER_HELD = 32, /* signals that may be held; a further one gets PRS_BUSY */
    PRS_ORDER_LAZY = 16, /* at most this many lazy requests on a queue come before one is signaled */
    /* A request this long gains nothing from being batched with others. It is posted at once, signaled, and has a
     * notification of its own, so that neither side waits for the bytes of other requests. */
    PRS_ORDER_PROMPT_BYTES = 8192,
    PRS_ORDER_SURE_PARTS = 8, /* a notified put may always be cut into so many requests, for any number of queues */
    PRS_ORDER_BATCH = 16,     /* requests on one queue after which the caller posts without waiting for more */
};

enum prs_wr_opcode { PRS_WR_WRITE, PRS_WR_WRITE_IMM, PRS_WR_READ, PRS_WR_ADD };
enum prs_wr_flags { PRS_WR_SIGNALED = 1, PRS_WR_FENCE = 2, PRS_WR_INLINE = 4 };

/* One work request, for any NIC. For PRS_WR_ADD the NIC's back end says where the old value goes. */
struct prs_wr { /* members in the order in which back ends copy them: first the local ones, then the remote ones */
    uint64_t local_addr;
    uint32_t len_bytes;
    uint32_t local_key;
    uint64_t remote_addr;
    uint64_t remote_key;
    uint64_t value; /* PRS_WR_ADD */
    uint32_t imm;
    uint8_t opcode;
    uint8_t flags;
    struct prs_op *owner; /* used by the order engine: the op that completes with the request */
} __attribute__((aligned(PRS_LINE)));
static_assert(sizeof(struct prs_wr) == PRS_LINE, "a slot of a ring is one cache line");

/* How the engine uses a path. enum prs_path_stage in failover.h says how far the two sides agree on that. */
enum prs_path_use {
    PRS_PATH_USED,
    PRS_PATH_RESTING, /* on standby, while another path is used */
    PRS_PATH_STOPPED, /* it carries nothing more: prs_order_path_stop() */
    PRS_PATH_LOST,    /* lost, and its requests are replayed: from prs_order_path_down() to prs_order_path_up() */
};

/* The state of a path's probe queue. */
enum prs_probe_use {
    PRS_PROBE_WORKS,
    PRS_PROBE_FAILED, /* it has failed, and the owner of the peer knows it */
    PRS_PROBE_LOST,   /* it completes nothing any more: prs_order_probe_lost() */
};

struct prs_order_path {   /* one rail to the peer */
    uint32_t local_rail;  /* index into a region's local keys */
    uint32_t remote_rail; /* index into the peer's struct prs_keys */
    float rate;           /* bytes per microsecond: at first the speed of the link, then as measured */
    uint64_t since_ns;    /* start of the interval that the next measurement covers; 0: idle */
    uint64_t done_bytes;  /* in that interval */
    uint64_t inflight_bytes;
    uint32_t turn; /* which of its queues the last long put used */
    enum prs_path_use use;
    enum prs_probe_use probe;
    bool standby; /* it is used only while all others are stopped */
};

/* What a request needs to be sent over another path than its own. */
struct prs_order_aim {
    const uint32_t *local_keys; /* by local rail; NULL: the payload is in inline_bytes, or there is none */
    const uint64_t *path_keys;  /* remote keys by path; NULL: those in key */
    uint64_t key[];             /* [prs_order_queue.aim_keys] remote keys by remote rail */
};

struct prs_order_queue {
    /* What every request uses, on one cache line: with many peers the line must be loaded from memory. */
    struct prs_wr *wr; /* a ring of mask + 1 slots, indexed by position */
    uint32_t mask;
    uint32_t head;     /* next position to admit */
    uint32_t posted;   /* next to post */
    uint32_t tail;     /* next to retire */
    uint32_t signaled; /* position after the last signaled request */
    bool eager;        /* a caller waits for a request that is not posted yet */
    uint32_t path;
    uint32_t local_rail; /* of the path */
    uint32_t remote_rail;
    uint32_t run;      /* length of the run that ends with the request before head */
    uint64_t run_next; /* run_key() of the message that would continue this run; 0: none may */
    char *aim;         /* memory of order_aim(); NULL: no path replaces a lost one */
    /* The rest. */
    uint8_t *inline_bytes; /* PRS_INLINE_BYTES each: a copied payload must live until its request completes */
    uint32_t inline_key;   /* key of inline_bytes, used where the NIC cannot take the bytes from the request itself */
    /* Positions after the last request of a kind. They are valid only while that request is in flight. A request that
     * is 2^32 requests old may seem to be in flight, which costs a needless fence or wait. */
    uint32_t last_read;
    uint32_t last_transfer; /* position after the last put or get that signals must follow (not of PRS_GROUP_NONE) */
    uint32_t last_ordered;  /* position after the last such put, get or signal: a strong signal must follow all */
    uint64_t backlog_bytes;
    uint32_t aim_keys;   /* number of keys for which an aim has room */
    uint32_t immediates; /* admitted since the queue was connected */
    uint32_t carrier;    /* if the path is lost: the queue that replays its requests */
} __attribute__((aligned(PRS_LINE)));
static_assert(offsetof(struct prs_order_queue, inline_bytes) == PRS_LINE, "one cache line");

struct prs_order_group {
    uint64_t used;  /* mask of the queues for which last[] holds a position */
    uint32_t *last; /* [data_queues] */
    bool unfenced;  /* puts since the last fenced signal */
};

struct prs_order_held {
    struct prs_op *op;
    struct prs_signal signal;
    struct prs_keys keys;
    uint64_t need;           /* mask of the queues that have not completed need_position yet */
    uint32_t *need_position; /* [data_queues] */
};

struct prs_order_stats {
    uint64_t puts, bytes, signals, gets, fences, drains, merged;
    uint64_t path_bytes[PRS_MAX_RAILS]; /* with several queues only */
};

struct prs_order {
    /* What every message uses, on two cache lines: with many peers they must be loaded from memory. */
    enum prs_policy policy;
    uint32_t max_ops;
    uint32_t ops;         /* in flight */
    uint32_t signaled;    /* signaled requests in flight, whether or not anyone waits for them */
    uint32_t data_queues; /* the first queues */
    uint32_t max_run;     /* messages that may share an immediate */
    /* What the NIC promises (nic.h). */
    bool in_order;       /* the requests of a queue take effect in the order of posting */
    bool ordered_writes; /* also writes without immediate: not under adaptive routing */
    bool fence;          /* a request with PRS_WR_FENCE waits for the earlier ones of its queue */
    /* What follows from policy and number of queues. */
    bool tracks_groups; /* groups remember where their puts went: nic_fence, and in_order over several queues */
    bool may_hold;      /* signals may be held until completions come */
    /* in_order over a single queue: puts and signals are neither tracked, counted nor given a choice of queue */
    bool one_in_order;
    /* cut long puts over all queues (NCCL_IB_SPLIT_DATA_ON_QPS); else over one queue of each path, in turn */
    bool split_queues;
    bool stalled;                  /* drain: nothing starts until the held signal has left */
    uint64_t dirty;                /* mask of the queues with requests to post */
    struct prs_order_queue *queue; /* [data_queues + probe_queues] */
    uint64_t whole_bytes;          /* a longer put may be more than one request: split_bytes or plain_bytes */
    uint32_t held_first, held_count;

    struct prs_tally *tally; /* not NULL: signals travel as records (counted, or a NIC without adds) */
    uint64_t replaying;      /* mask of the queues of lost paths with requests that wait for room at their carrier */
    struct prs_op no_op;     /* owner of requests that belong to no caller's op; never done */
    struct prs_order_stats stats; /* its first three members */
    /* The rest. */
    uint32_t probe_queues; /* the queues after data_queues */
    uint32_t path_count;
    uint32_t small_queue; /* queue for small notified puts, as long as it is not much slower than another */
    /* path to the peer's first NIC, which performs all adds: those of two NICs are not atomic with respect to each
     * other */
    uint32_t add_path;
    uint64_t split_bytes; /* a longer put is cut over queues */
    /* A put longer than this is a plain write, followed on its queue by a short write with the immediate. ~0: no put
     * is. */
    uint64_t plain_bytes;
    uint64_t max_part_bytes; /* of one request */
    uint64_t size_addr;      /* the peer's array of sizes, by id, for messages whose size its NIC does not report */
    /* keys of size_addr, by path. If size_addr is 0, no notified put has its immediate in a write of its own */
    uint64_t size_key[PRS_MAX_RAILS];
    uint64_t signal_used;  /* mask of the queues for which signal_last[] holds the position of the last signal */
    uint32_t *signal_last; /* [data_queues] */
    uint64_t record_addr;  /* address of the peer's ring of records */
    uint64_t record_key[PRS_MAX_RAILS]; /* its keys, by path */
    /* position on word_queue after the last prs_order_word(); valid as last_read is */
    uint32_t last_word;
    uint32_t last_touch; /* likewise, of prs_order_touch() */
    void *slots;         /* the slots of all queues, in pages of their own */
    size_t slot_bytes;
    /* one piece of memory for everything below and for queue, as large as the options need */
    void *state;
    struct prs_order_path *path;   /* [path_count] */
    struct prs_order_group *group; /* [PRS_ORDER_GROUPS]; NULL under counted, where tags stand for them */
    struct prs_order_held *held;   /* [PRS_ORDER_HELD]; NULL unless may_hold */
    uint32_t word_queue;           /* of prs_order_word() and prs_order_touch() */
    uint32_t self_path;            /* of prs_order_self() */
} __attribute__((aligned(2 * PRS_LINE)));
static_assert(offsetof(struct prs_order, tally) == PRS_LINE && offsetof(struct prs_order, stats.gets) == 2 * PRS_LINE,
              "two cache lines");

struct prs_order_options {
    enum prs_policy policy; /* not auto */
    bool in_order;          /* nic.h; without it, messages share no immediate */
    bool fence;             /* nic.h */
    uint32_t max_ops;
    uint32_t path_count;
    uint32_t queues_per_path;
    uint32_t depth;       /* slots of each send queue; a power of two */
    uint32_t probe_depth; /* likewise, of each probe queue; 0: depth */
    uint64_t max_part_bytes;
    bool adaptive_routing;                     /* plain writes of a queue may arrive out of order */
    uint64_t plain_bytes;                      /* a longer write carries no immediate; 0: any may */
    bool split_queues;                         /* NCCL_IB_SPLIT_DATA_ON_QPS */
    bool failover;                             /* keep what a replay needs; see prs_order_can_fail_over() */
    struct prs_order_path path[PRS_MAX_RAILS]; /* rails, rate, standby */
};

/* Queue q runs on path q % path_count; a probe queue for each path follows. Return 0, -EINVAL or -ENOMEM. */
int prs_order_init(struct prs_order *order, const struct prs_order_options *options);
void prs_order_fini(struct prs_order *order);
/* From now on signals always get PRS_BUSY, and under `counted` so do puts of a group. For a peer whose caller said that
 * it sends no signals. */
void prs_order_refuse_signals(struct prs_order *order);
/* Make signals travel as records: give the address of the peer's ring, and the word in which the peer returns credits.
 * Call it before the first op. Return 0 or -ENOMEM. */
int prs_order_set_records(struct prs_order *order, uint64_t record_addr, const uint64_t *record_key,
                          const uint64_t *credit_word);

/* Allow notified puts to be plain writes followed by a short notification: give the address of the peer's array of
 * sizes. */
void prs_order_set_sizes(struct prs_order *order, uint64_t size_addr, const uint64_t *size_key);

/* Admit an op. local_keys is indexed by prs_order_path.local_rail. Return 0, PRS_BUSY (nothing changed) or -EINVAL. */
int prs_order_put(struct prs_order *order, struct prs_op *op, const struct prs_put *put, const uint32_t *local_keys);
int prs_order_get(struct prs_order *order, struct prs_op *op, const struct prs_get *get, const uint32_t *local_keys);
int prs_order_signal(struct prs_order *order, struct prs_op *op, const struct prs_signal *signal);
/* Admit a request to this process itself, on the probe queue of one path, at first that of path 0. op may be NULL. The
 * limit of ops in flight does not apply, because these ops may wait for this request. Return 0 or PRS_BUSY. */
int prs_order_self(struct prs_order *order, struct prs_op *op, const struct prs_wr *request);
/* Admit the write of an aligned word to the peer, always on the same queue and without an op. Where queues keep no
 * order only one may be in flight, since an older word could land after a newer one and stay. remote_key is by path,
 * and must live as long as the engine. Return 0 or PRS_BUSY. */
int prs_order_word(struct prs_order *order, uint64_t remote_addr, const uint64_t *remote_key, uint64_t value);
/* Admit a write of no bytes, on the queue of words and without an op: its completion shows that the peer is alive. One
 * at a time. Return 0 or PRS_BUSY. */
int prs_order_touch(struct prs_order *order);
/* Has everything that was admitted taken effect at the peer, signals included? Return 0, or PRS_AGAIN: complete the
 * requests in flight and ask again. This may admit a record: check `dirty` afterwards. */
int prs_order_settle(struct prs_order *order);
/* Admit one read on the probe queue of each path that is not lost. requests[i] is complete except for the opcode.
 * Return 0 or PRS_BUSY. */
int prs_order_probe(struct prs_order *order, struct prs_op *op, const struct prs_wr *requests);

struct prs_chain {
    uint32_t queue;
    uint32_t first; /* position */
    uint32_t count;
};
/* Make a chain of the requests that wait on one queue; the caller must post it now. Return false when none waits. */
bool prs_order_take(struct prs_order *order, uint64_t now_ns, struct prs_chain *out);

/* Return true when all requests of the path's probe queue are complete. */
static inline bool prs_order_probe_idle(const struct prs_order *order, uint32_t path)
{
    const struct prs_order_queue *queue = &order->queue[order->data_queues + path];

    return queue->head == queue->tail;
}

/* Return true when all requests of prs_order_self() are complete. */
static inline bool prs_order_self_idle(const struct prs_order *order)
{
    return prs_order_probe_idle(order, order->self_path);
}

/* Return true when no signaled request is in flight and nothing waits to be posted. */
static inline bool prs_order_idle(const struct prs_order *order)
{
    return order->signaled == 0 && !order->dirty;
}

/* Retire the signaled request at that position of queue index, which is complete, and all before it. Return how many
 * ops are done, or -EPROTO (no such position is in flight). This may admit held signals: check `dirty` afterwards. */
int prs_order_complete(struct prs_order *order, uint32_t index, uint32_t position, uint64_t now_ns);

/* ---- a path is lost, order_path.c ----
 * The caller makes sure that nothing of the lost path can take effect any more, at either side, before it asks the
 * receiver what it has taken. */

/* May paths be lost? Only under the policy counted: there signals are records, which the receiver takes once, and only
 * notified or counted requests make the peer act. */
static inline bool prs_order_can_fail_over(const struct prs_order *order)
{
    return order->queue[0].aim;
}

static inline bool prs_order_path_is_lost(const struct prs_order *order, uint32_t path)
{
    return order->path[path].use == PRS_PATH_LOST;
}

struct prs_order_replay {
    uint32_t taken;    /* requests that the receiver had taken, although no completion had been polled */
    uint32_t replayed; /* requests that leave again */
    uint64_t bytes;    /* of those */
};

/* Do not choose the path any more, and post nothing on it. Its completions may still arrive. Return 0, or -ENETDOWN: it
 * is the last path, or lost paths are not replaced. */
int prs_order_path_stop(struct prs_order *order, uint32_t path);
/* Admit a write of no bytes that tells the receiver to look at its TCP stream. Return 0 or PRS_BUSY. */
int prs_order_knock(struct prs_order *order);
/* The path has been stopped, and no completion of it comes any more. taken[k]: how many immediates the receiver has
 * taken from the path's queue k since it was connected. Retire what must have arrived with them, and replay the rest
 * over another path, as there is room. Return how many ops are then done, or -EPROTO (nothing changed): the receiver
 * cannot have taken so many. Check `dirty` afterwards. */
int prs_order_path_down(struct prs_order *order, uint32_t path, const uint32_t *taken, struct prs_order_replay *out);
/* The probe queue of a lost path completes nothing any more. End its reads: they make writes of the path visible, and
 * all of these have arrived before. Its writes, and adds that were not posted, wait for prs_order_self_over(). Return
 * how many ops have ended, or -ENETDOWN (nothing changed): an add to *word was posted. It may have taken effect, so it
 * cannot be repeated. */
int prs_order_probe_lost(struct prs_order *order, uint32_t path, uint64_t *word);
/* The path has a new probe queue. Nothing of the old one is left. */
void prs_order_probe_up(struct prs_order *order, uint32_t path);
/* Return the next request of a lost probe queue that waits for prs_order_self_over(), oldest first. Begin with *at = 0.
 * Return NULL after the last. The caller sets the remote key of each to that of the path over which it will leave. */
struct prs_wr *prs_order_self_left(struct prs_order *order, uint32_t *at);
/* From now on requests of prs_order_self() go to the probe queue of this path; those that wait go there first. Return
 * 0, or PRS_BUSY (nothing changed): there is no room, or a request of the previous path is in flight, which later ones
 * must not overtake. */
int prs_order_self_over(struct prs_order *order, uint32_t path);
/* Have all requests of a lost path been replayed? */
bool prs_order_path_is_empty(const struct prs_order *order, uint32_t path);
/* The path has new queues, which are connected. Return 0 or PRS_BUSY: not all of its old requests were replayed yet. */
int prs_order_path_up(struct prs_order *order, uint32_t path);

/* Give every op in flight or held this status: nothing will complete any more. */
void prs_order_fail(struct prs_order *order, int status);

#endif

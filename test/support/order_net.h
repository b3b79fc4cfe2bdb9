/* SPDX-License-Identifier: Apache-2.0 */
/* The order engine against a network that reorders as much as it may. The test chooses each event. Checked here: no
 * signal is seen before its puts, or twice, and no put is done that has not arrived. */
#ifndef TEST_SUPPORT_ORDER_NET_H
#define TEST_SUPPORT_ORDER_NET_H

#include "transport/order/arrival.h"
#include "transport/order/order.h"

enum { NET_PUTS = 400, NET_SIGNALS = 120, NET_DEPTH = 32, NET_WINDOW = 48 };

/* How a queue may reorder its requests. */
enum network {
    NET_IN_ORDER, /* RC: not at all */
    NET_PLAIN,    /* ofi_rxm: it does not reorder. Long writes carry no immediate; without adds: signals are records */
    NET_ADAPTIVE, /* RC under adaptive routing: plain writes freely, anything else after all before it */
    NET_FENCED,   /* freely, but nothing passes a fence: what nic_fence relies on */
    NET_CXI,      /* the same, and without adds: signals are records under any policy */
    NET_FREE,     /* freely */
    NET_SRD,      /* freely, and without adds: signals are records under any policy */
};

struct net_put {
    struct prs_op op;
    struct prs_put put;
    uint64_t missing; /* bytes not yet delivered */
    uint32_t parts_missing;
    uint32_t notified; /* times */
    bool released;     /* a signal of its group, or a strong one, was seen: the receiver may reuse the memory */
    uint64_t offset[PRS_IMM_MAX_PARTS]; /* offsets of the delivered parts */
    uint32_t offsets;
};

struct net_signal {
    struct prs_op op;
    struct prs_signal signal;
    int puts_before, signals_before; /* of any group */
    bool raised;
};

struct net {
    struct prs_order order;
    enum network network;
    unsigned seed;     /* seed of random steps; error texts name it */
    bool raises_later; /* only net_raise() raises records, as if the receiver were busy */
    _Alignas(8) uint8_t copies[PRS_ORDER_MAX_QUEUES][NET_DEPTH * PRS_INLINE_BYTES];
    bool delivered[PRS_ORDER_MAX_QUEUES][NET_DEPTH];
    struct prs_wr posted[PRS_ORDER_MAX_QUEUES][NET_DEPTH]; /* copies of the requests as they were posted */
    uint32_t to_deliver[PRS_ORDER_MAX_QUEUES];             /* all positions below it are delivered */
    uint32_t posted_to[PRS_ORDER_MAX_QUEUES];
    struct net_put put[NET_PUTS];
    struct net_signal signal[NET_SIGNALS];
    int puts, signals;
    struct prs_arrivals arrivals;
    struct prs_counts counts;
    struct prs_record ring[PRS_RECORDS];
    uint64_t sizes[PRS_NOTIFY_IDS];
    uint64_t credit;
    uint32_t taken[PRS_ORDER_MAX_QUEUES]; /* immediates of each queue, since it was connected */
    bool has_lost;                        /* a path was lost at some time, so requests may be delivered twice */
    uint32_t completions, replayed, taken_late;
};

void net_init(struct net *net, enum prs_policy policy, enum network network, uint32_t paths, uint32_t queues,
              bool split_queues);

/* Begin as if both sides had run for long: their counters have this value. Near 2^32 they wrap. */
void net_start(struct net *net, uint32_t position);

/* Admit the next put or signal. dst, dst_addr, and the id or value are filled in. Return false: busy, nothing
 * changed. */
bool net_put(struct net *net, struct prs_put wanted);
bool net_signal(struct net *net, struct prs_signal wanted);

/* Post one chain. Return false when nothing waits. */
bool net_post(struct net *net);

/* May the network deliver this posted request now? */
bool net_may_deliver(const struct net *net, uint32_t q, uint32_t position);
/* Let it take effect at the other side. */
void net_deliver(struct net *net, uint32_t q, uint32_t position);

/* Let the receiver raise all signals that it may. */
void net_raise(struct net *net);

/* Both sides give the path up: what is posted on it and not delivered is lost. net_lose() then tells the sender what
 * the receiver has taken. */
void net_lose(struct net *net, uint32_t path);
/* Connect the lost path again. Return false: busy. */
bool net_regain(struct net *net, uint32_t path);

/* Poll the oldest completion of a queue. Return false when there is none. */
bool net_complete(struct net *net, uint32_t q);

/* Ask whether all has settled, and if so check it. */
bool net_settle(struct net *net);

/* PRS_TEST_STRIDE: a test takes one in so many of its seeds or programs. By default 1: all. */
int net_stride(void);

/* Check that every op is done and every signal was seen. */
void net_finish(struct net *net);

#endif

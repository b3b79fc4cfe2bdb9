/* SPDX-License-Identifier: Apache-2.0 */
/* The checker of memory order: it reports two accesses without an order between them, if one of them writes
 * (README.md). It is on in programs whose kernels are compiled with -fsanitize=thread; order_access.cpp takes the place
 * of the library of that option. Everything is called on the scheduler's thread, unless it says otherwise, and does
 * nothing while the checker is off. */
#ifndef TOOLS_HOPPER_ORDER_H
#define TOOLS_HOPPER_ORDER_H

#include <deque>
#include <stddef.h>

#include "tools/hopper/order_clock.h"
#include "tools/hopper/scheduler.h"

namespace hopper
{

extern bool order_on;

/* The origin of an access, by which scopes are compared. */
struct origin {
    int device; /* -1: a copy engine, the host or a NIC */
    uint64_t cluster, cta;
};

/* An agent of a thread, or an agent that the thread itself has waited for, and the time up to which it is known. first:
 * when this use of the agent's number began; other threads had the number before. */
struct point {
    uint32_t agent, first, seen, global, shared;
};
enum { OWN, ATOMICS, STORES, STORE_SOURCES, PRODUCTS, POINTS };

/* The accesses that a thread knows at some time. */
struct stamp {
    struct view base;
    struct point points[POINTS];
    struct origin from;
};

void order_add(struct order_sum *sum, const struct stamp &s);

/* A release to a word: what it publishes, and for which scope. */
struct order_release {
    enum scope scope;
    struct origin from;
    struct order_sum what;
};

enum { JOINS_REMEMBERED = 64 };

struct order_thread {
    struct stamp now;
    std::shared_ptr<struct stamp> fenced[SCOPES]; /* what it knew at its last fence of each scope, or of a wider one */
    std::vector<order_release> unfenced;          /* read by relaxed loads, and acquired by the next fence */
    struct view narrow;                           /* released or acquired with too narrow a scope; for reports */
    uint32_t stores;                              /* bulk stores issued */
    std::deque<uint32_t> groups;                  /* the value of `stores` at each commit, for the newest groups */
    uint64_t joined[3][JOINS_REMEMBERED];         /* vectors that `now.base` contains, by the fields of a view */
};

/* ---- life of launches, CTAs and threads ---- */
void order_cta_begins(struct cta *c);
void order_cta_ends(struct cta *c);
void order_thread_begins(struct fiber *f);
void order_thread_ends(struct fiber *f);

/* A launch has ended. Returns what its stream knows now. */
clocks_ref order_launch_ends(struct launch *l);

/* ---- barriers ---- */
void order_arrive(struct order_barrier *b, struct fiber *f);
void order_complete(struct order_barrier *b);
void order_pass(const struct order_barrier *b, struct fiber *f);
/* All threads wait for each other, as __syncwarp() does. */
void order_meet(struct fiber *const *threads, uint32_t count);

/* ---- mbarriers: at an offset of shared memory ---- */
void order_mbarrier_init(struct cta *c, uint32_t offset, void *from);
void order_mbarrier_used(struct cta *c, uint32_t offset, const char *what, void *from);
/* scope: the scope of the arrival. It orders a waiting thread of another CTA only if it is wide enough. */
void order_mbarrier_arrive(struct mbarrier *b, struct cta *c, enum scope scope);
void order_mbarrier_complete(struct mbarrier *b, struct cta *c, uint32_t offset);
void order_mbarrier_pass(const struct mbarrier *b, struct fiber *f);

/* ---- accesses ---- */
enum access : uint32_t { ACCESS_READ = 0, ACCESS_WRITE = 1 };
/* Notes an ordinary access of a thread. Does nothing for memory that the checker does not know. */
void order_ordinary(const void *p, size_t bytes, enum access how, void *from);
void order_shared(struct fiber *f, struct cta *c, uint32_t offset, size_t bytes, enum access how, void *from);
/* For an atomic access: first order_atomic(), then order_acquire() with the value that was read, and
 * order_release_word() with the value that is written. A release by a fence covers everything before the fence, and the
 * atomic accesses up to the one that makes it visible. So these atomic accesses are a separate agent. */
void order_atomic(const void *p, uint32_t bytes, enum access how, enum scope scope, void *from);
void order_acquire(const void *p, uint32_t bytes, uint64_t seen, enum order how, enum scope scope);
/* Notes a store whose value is not known yet. */
void order_release_unknown(const void *p);
/* chain: it is an atomic operation, which keeps what others have released to the word. */
void order_release_word(const void *p, uint32_t bytes, uint64_t now, enum order how, enum scope scope, bool chain);
void order_fence(enum scope scope);
void order_fence_async(bool global);

/* ---- copies and products ---- */
/* One part of what an asynchronous operation reads or writes. */
struct async_agent {
    uint32_t agent, time;
    const char *name;
};
struct async_agent order_load_agent(struct cta *to, uint32_t bar_offset, const char *name);
struct async_agent order_store_agent(const char *name, bool source);
struct async_agent order_product_agent(void);
void order_async_global(const struct fiber *f, const struct async_agent &a, const void *p, size_t bytes,
                        enum access how, bool sum, void *from);
void order_async_shared(const struct fiber *f, const struct async_agent &a, struct cta *c, uint32_t offset,
                        size_t bytes, enum access how, void *from);
/* The running thread commits its bulk stores, or has waited for all groups except the newest `left`. */
void order_group_committed(void);
void order_groups_waited(uint32_t left, bool read_only);
void order_products_waited(uint64_t number);

/* ---- streams: any thread may call those with a clocks_ref alone ---- */
/* What the host threads have seen; they count as one thread. */
clocks_ref order_host(void);
void order_host_saw(const clocks_ref &seen);
/* A copy engine has read and written for a stream that knows *seen. If it wrote a word, that counts as a release. */
void order_engine(const void *stream, clocks_ref *seen, const void *to, const void *from, size_t bytes);
void order_engine_word(const void *stream, clocks_ref *seen, const void *to, uint32_t bytes);

/* Memory was freed; any thread. */
void order_forget(const void *p, size_t bytes);

} // namespace hopper

#endif

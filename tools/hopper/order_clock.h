/* SPDX-License-Identifier: Apache-2.0 */
/* Vector clocks of the checker of memory order (order.h). Many threads share one vector: after a barrier they all know
 * the same. A vector that is shared is never changed. */
#ifndef TOOLS_HOPPER_ORDER_CLOCK_H
#define TOOLS_HOPPER_ORDER_CLOCK_H

#include <memory>
#include <stdint.h>
#include <vector>

namespace hopper
{

/* at[agent]: all accesses of the agent up to this time are known. Missing ones count as 0. */
struct clocks {
    uint64_t id; /* number of this content */
    std::vector<uint32_t> at;
};
typedef std::shared_ptr<clocks> clocks_ref;

static inline uint32_t clocks_at(const clocks_ref &c, uint32_t agent)
{
    return c && agent < c->at.size() ? c->at[agent] : 0;
}

/* The later of both for each agent. Remembers results: only on the scheduler's thread. */
clocks_ref clocks_join(const clocks_ref &a, const clocks_ref &b);
/* The same on any thread. */
clocks_ref clocks_join_anywhere(const clocks_ref &a, const clocks_ref &b);
/* Changes *to, after a copy if others share it. */
void clocks_merge(clocks_ref *to, const clocks_ref &from);
void clocks_raise(clocks_ref *to, uint32_t agent, uint32_t time);

/* The accesses that a thread knows. A copy or a product (async proxy) that it issues knows only those before a proxy
 * fence. */
struct view {
    /* seen: all of them; global, shared: those before a fence.proxy.async of that memory */
    clocks_ref seen, global, shared;
};

static inline void view_join(struct view *v, const struct view &other)
{
    v->seen = clocks_join(v->seen, other.seen);
    v->global = clocks_join(v->global, other.global);
    v->shared = clocks_join(v->shared, other.shared);
}

static inline void view_merge(struct view *v, const struct view &other)
{
    clocks_merge(&v->seen, other.seen);
    clocks_merge(&v->global, other.global);
    clocks_merge(&v->shared, other.shared);
}

static inline void view_raise(struct view *v, uint32_t agent, uint32_t seen, uint32_t global, uint32_t shared)
{
    clocks_raise(&v->seen, agent, seen);
    clocks_raise(&v->global, agent, global);
    clocks_raise(&v->shared, agent, shared);
}

/* The accesses that several threads know together. */
struct order_sum {
    struct view known;
    uint64_t merged[3]; /* the vectors that were merged last, so that lanes that share them merge them once */
};

struct order_barrier {
    struct order_sum arriving;
    struct view done; /* view of the last completed phase */
};

} // namespace hopper

#endif

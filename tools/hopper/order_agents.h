/* SPDX-License-Identifier: Apache-2.0 */
/* What order.cpp (which agent knows which accesses) and order_access.cpp (which agent made which access) share. */
#ifndef TOOLS_HOPPER_ORDER_AGENTS_H
#define TOOLS_HOPPER_ORDER_AGENTS_H

#include "tools/hopper/order.h"

namespace hopper
{

enum agent_kind {
    AGENT_THREAD,
    AGENT_ATOMICS,
    AGENT_LOADS,
    AGENT_STORES,
    AGENT_STORE_SOURCES,
    AGENT_PRODUCTS,
    AGENT_ENGINE
};

/* An agent's number serves one CTA after another. */
struct agent_life {
    uint32_t first;
    enum agent_kind kind;
    const void *kernel;
    uint64_t launch;
    uint32_t cta, index; /* index: the thread, the barrier's offset, or the warpgroup */
    struct origin at;
};

struct agent {
    uint32_t now = 0;
    std::vector<agent_life> lives;
};
extern std::vector<agent> &agents;

/* ---- accesses ---- */
enum : uint32_t { CELL_BYTES = 16 };
enum : uint8_t { ENTRY_WRITE = 1, ENTRY_STRONG = 2, ENTRY_ASYNC = 4 };

/* One access to some bytes of a cell, which no later access of a kind that covers it has replaced. */
struct order_entry {
    uint32_t agent, time;
    int32_t from; /* the code address, relative to FROM_BASE */
    uint16_t bytes;
    uint8_t kind, scope;
};

struct order_cell {
    uint16_t count, room;
    struct order_entry *entries;
    ~order_cell();
};

/* An access that is compared with all earlier ones. */
struct touch {
    const struct stamp &knows; /* what the issuer knows */
    uint32_t agent, time;
    uint8_t kind;
    enum scope scope;
    bool shared; /* it is shared memory */
    const char *name;
    const struct fiber *who; /* NULL: a copy engine */
    void *from;
};
void touch_cells(struct order_cell *cells, size_t offset, size_t bytes, const struct touch &x, bool keep);
void touch_global(const void *p, size_t bytes, const struct touch &x);
bool order_is_host_memory(const void *p);
struct order_cell *order_cells(struct cta *c);
/* The next atomic access of the running thread. */
struct async_agent order_next_atomic(void);
bool scope_within(enum scope scope, const struct origin &a, const struct origin &b);
void order_forget_words(uintptr_t from, uintptr_t to);

} // namespace hopper

#endif

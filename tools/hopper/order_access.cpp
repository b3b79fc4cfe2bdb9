/* SPDX-License-Identifier: Apache-2.0 */
/* Who touched what: the accesses to each 16 bytes of memory, and the functions that the compiler calls for each
 * ordinary access of a kernel (-fsanitize=thread). */
#include "tools/hopper/order_agents.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>

#include "tools/hopper/device_memory.h"
#include "tools/hopper/fiber.h"

namespace hopper
{

#define FROM_BASE ((char *)(uintptr_t)&order_on)

order_cell::~order_cell()
{
    free(entries);
}

/* ---- reports ---- */
static const struct agent_life *life_of(const struct order_entry &e)
{
    const auto &lives = agents[e.agent].lives;
    for (size_t i = lives.size(); i-- > 0;)
        if (lives[i].first <= e.time)
            return &lives[i];
    return NULL;
}

static std::string describe_agent(const struct agent_life *l)
{
    if (!l)
        return "an agent of the past";
    std::string cta = " of kernel " + kernel_name(l->kernel) + ", device " + std::to_string(l->at.device) + ", CTA " +
                      std::to_string(l->cta) + ", launch " + std::to_string(l->launch),
                index = std::to_string(l->index);
    std::string thread = "thread " + index + " (warp " + std::to_string(l->index / WARP) + " lane " +
                         std::to_string(l->index % WARP) + ")" + cta;
    switch (l->kind) {
    case AGENT_THREAD:
    case AGENT_ATOMICS:
        return thread;
    case AGENT_LOADS:
        return "a copy that completes on the barrier at shared offset " + index + cta;
    case AGENT_STORES:
    case AGENT_STORE_SOURCES:
        return "a bulk store of " + thread;
    case AGENT_PRODUCTS:
        return "a wgmma of warpgroup " + index + cta;
    default:
        return "a copy engine";
    }
}

static std::string describe_memory(const void *p, bool shared, size_t offset)
{
    struct allocation a;
    if (shared)
        return "shared offset " + std::to_string(offset);
    if (!memory_find(p, 1, &a))
        return "memory";
    return (a.kind == MEMORY_HOST ? "host memory" : "memory of device " + std::to_string(a.device)) + ", byte " +
           std::to_string((const uint8_t *)p - a.base) + " of an allocation of " + std::to_string(a.bytes);
}

static const char *kind_name(uint8_t kind)
{
    if (kind & ENTRY_STRONG)
        return kind & ENTRY_WRITE ? "atomic write" : "atomic read";
    return kind & ENTRY_WRITE ? "write" : "read";
}

/* ---- comparing ---- */
static bool knows(const clocks_ref &base, const struct stamp &s, uint32_t point::*time, const struct order_entry &e)
{
    for (const struct point &p : s.points)
        if (p.agent == e.agent && p.first <= e.time && e.time <= p.*time)
            return true;
    return e.time <= clocks_at(base, e.agent);
}

static const char *why(const struct touch &x, const struct order_entry &e, bool seen)
{
    if (seen)
        return "the second comes after the first, but no fence.proxy.async between them lets the copy engine see it";
    if (x.who && e.time <= clocks_at(x.who->order->narrow.seen, e.agent))
        return "they are ordered only by a word or barrier whose scope is too narrow for both";
    if (x.who)
        for (const auto &r : x.who->order->unfenced)
            if (e.time <= clocks_at(r.what.known.seen, e.agent))
                return "the second has read the word that was released after the first, but has not acquired it";
    return "nothing orders them: a release, an acquire or a wait is missing";
}

[[noreturn]] static void race(const struct touch &x, const struct order_entry &e, size_t offset, bool seen)
{
    const struct agent_life *life = life_of(e);
    std::string text = "race at ";
    text += describe_memory((const void *)offset, x.shared, offset) + ": " + why(x, e, seen) +
            "\n  first: " + kind_name(e.kind) + " by " + describe_agent(life) + ", at " +
            (e.from == 0 ? std::string("?") : code_location(FROM_BASE + e.from)) + "\n  second: " + kind_name(x.kind) +
            " by " + x.name +
            (x.who ? " of " + fiber_name(x.who) + ", launch " + std::to_string(x.who->block->of->number) : "") +
            ", at " + code_location(x.from);
    violation("%s", text.c_str());
}

/* Whether the access is ordered after e. */
static bool ordered(const struct touch &x, const struct order_entry &e, bool *seen)
{
    bool proxy =
        (e.kind & ENTRY_WRITE) && (x.kind & ENTRY_ASYNC) && !((e.kind & ENTRY_ASYNC) && (x.kind & ENTRY_WRITE));
    *seen = knows(x.knows.base.seen, x.knows, &point::seen, e);
    if (!*seen || !proxy)
        return *seen;
    return x.shared ? knows(x.knows.base.shared, x.knows, &point::shared, e)
                    : knows(x.knows.base.global, x.knows, &point::global, e);
}

static bool both_atomic(const struct touch &x, const struct order_entry &e)
{
    const struct agent_life *l;
    if (!(x.kind & e.kind & ENTRY_STRONG))
        return false;
    l = life_of(e);
    return l && scope_within(x.scope < e.scope ? x.scope : (enum scope)e.scope, x.knows.from, l->at);
}

static void append(struct order_cell *c, const struct order_entry &e)
{
    if (c->count == c->room) {
        c->room = c->room == 0 ? 2 : (uint16_t)(c->room * 2);
        c->entries = (struct order_entry *)realloc(c->entries, c->room * sizeof(*c->entries));
    }
    c->entries[c->count++] = e;
}

/* The entry with which the last cell was compared, since most cells of a copy have the same entries. */
struct last_compared {
    uint32_t agent, time;
    uint8_t kind;
};

static void touch_cell(struct order_cell *c, uint16_t bytes, const struct touch &x, bool keep, size_t offset,
                       struct last_compared *last)
{
    uint16_t left = 0;
    for (uint16_t i = 0; i < c->count; i++) {
        struct order_entry *e = &c->entries[i];
        bool covered = false, write = (e->kind | x.kind) & ENTRY_WRITE, seen;
        if (e->bytes & bytes) {
            if (e->agent == last->agent && e->time == last->time && e->kind == last->kind) {
                covered = true;
            } else if (ordered(x, *e, &seen)) {
                covered = true;
                *last = {e->agent, e->time, e->kind};
            } else if (write && !both_atomic(x, *e) && !late_writes_forgiven) {
                race(x, *e, offset, seen);
            }
        }
        /* Accesses that are ordered after this one are also ordered after those that it covers. */
        if (keep && covered && ((x.kind & ENTRY_WRITE) || !(e->kind & ENTRY_WRITE)))
            e->bytes &= (uint16_t)~bytes;
        if (e->bytes != 0)
            c->entries[left++] = *e;
    }
    c->count = left;
    if (keep)
        append(c, {x.agent, x.time, (int32_t)(x.from ? (char *)x.from - FROM_BASE : 0), bytes, x.kind, x.scope});
}

/* offset: relative to the start of the memory that `cells` describe, or an address. */
static void touch_range(struct order_cell *cells, size_t offset, size_t bytes, const struct touch &x, bool keep,
                        size_t name)
{
    struct last_compared last = {};
    size_t end = offset + bytes;
    for (size_t cell = offset / CELL_BYTES; cell * CELL_BYTES < end; cell++) {
        size_t low = cell * CELL_BYTES, from = offset > low ? offset - low : 0;
        size_t to = end - low < CELL_BYTES ? end - low : (size_t)CELL_BYTES;
        touch_cell(&cells[cell], (uint16_t)((1u << to) - (1u << from)), x, keep, name + low + from, &last);
    }
}

void touch_cells(struct order_cell *cells, size_t offset, size_t bytes, const struct touch &x, bool keep)
{
    touch_range(cells, offset, bytes, x, keep, 0);
}

/* ---- global memory ---- */
enum : uintptr_t { PAGE = 4096 };

/* The cells of a page; NULL: the page holds no emulated memory. */
struct known_page {
    uintptr_t number;
    struct order_cell *cells;
};
enum { KNOWN_PAGES = 4096 };
static struct known_page known_pages[KNOWN_PAGES];
static std::unordered_map<uintptr_t, std::unique_ptr<order_cell[]>> &pages =
    *new std::unordered_map<uintptr_t, std::unique_ptr<order_cell[]>>();

static std::mutex freed_lock;
static std::vector<std::pair<uintptr_t, uintptr_t>> &freed = *new std::vector<std::pair<uintptr_t, uintptr_t>>();
static std::atomic<uint32_t> changes; /* of the allocations */
static uint32_t changes_seen;

/* Also called when memory is allocated, because a page without emulated memory may hold some now. */
void order_forget(const void *p, size_t bytes)
{
    if (!order_on)
        return;
    std::lock_guard<std::mutex> held(freed_lock);
    freed.push_back({(uintptr_t)p, (uintptr_t)p + bytes});
    changes++;
}

static void forget_freed(void)
{
    std::lock_guard<std::mutex> held(freed_lock);
    changes_seen = changes;
    for (const auto &range : freed) {
        for (uintptr_t page = range.first / PAGE; page * PAGE < range.second; page++)
            pages.erase(page);
        order_forget_words(range.first, range.second);
    }
    freed.clear();
    memset(known_pages, 0, sizeof(known_pages));
}

static struct order_cell *cells_of(uintptr_t page)
{
    if (changes_seen != changes.load(std::memory_order_relaxed))
        forget_freed();
    struct known_page *known = &known_pages[page % KNOWN_PAGES];
    if (known->number == page)
        return known->cells;
    *known = {page, NULL};
    if (memory_in_page((void *)(page * PAGE), PAGE)) {
        auto &cells = pages[page];
        if (!cells)
            cells.reset(new order_cell[PAGE / CELL_BYTES]());
        known->cells = cells.get();
    }
    return known->cells;
}

void touch_global(const void *p, size_t bytes, const struct touch &x)
{
    uintptr_t at = (uintptr_t)p, end = at + bytes;
    while (at < end) {
        uintptr_t page = at / PAGE, next = (page + 1) * PAGE < end ? (page + 1) * PAGE : end;
        struct order_cell *cells = cells_of(page);
        if (cells)
            touch_range(cells, at - page * PAGE, next - at, x, true, page * PAGE);
        at = next;
    }
}

bool order_is_host_memory(const void *p)
{
    struct allocation a;
    return memory_find(p, 1, &a) && a.kind == MEMORY_HOST;
}

/* ---- accesses of threads ---- */
static bool on_own_stack(const void *p)
{
    return (const uint8_t *)p >= self->stack && (const uint8_t *)p < self->stack + STACK_BYTES;
}

static void thread_touch(const void *p, size_t bytes, uint8_t kind, enum scope scope, const char *name, void *from)
{
    const struct order_thread *t = self->order.get();
    struct cta *c = self->block;
    size_t offset = (size_t)((const uint8_t *)p - c->shared);
    struct touch x = {
        t->now, t->now.points[OWN].agent, t->now.points[OWN].seen, kind, scope, offset < c->shared_bytes, name, self,
        from};
    if (kind & ENTRY_STRONG) {
        struct async_agent a = order_next_atomic();
        x.agent = a.agent, x.time = a.time;
    }
    if (x.shared)
        touch_cells(order_cells(c), offset, bytes, x, true);
    else
        touch_global(p, bytes, x);
}

void order_ordinary(const void *p, size_t bytes, enum access how, void *from)
{
    if (scheduler_is_here() && self && !on_own_stack(p))
        thread_touch(p, bytes, how == ACCESS_WRITE ? ENTRY_WRITE : 0, SCOPE_CTA, "an ordinary access", from);
}

void order_shared(struct fiber *f, struct cta *c, uint32_t offset, size_t bytes, enum access how, void *from)
{
    if (!order_on)
        return;
    const struct order_thread *t = f->order.get();
    struct touch x = {t->now,
                      t->now.points[OWN].agent,
                      t->now.points[OWN].seen,
                      (uint8_t)(how == ACCESS_WRITE ? ENTRY_WRITE : 0),
                      SCOPE_CTA,
                      true,
                      "an ordinary access",
                      f,
                      from};
    touch_cells(order_cells(c), offset, bytes, x, true);
}

void order_atomic(const void *p, uint32_t bytes, enum access how, enum scope scope, void *from)
{
    if (order_on && scheduler_is_here() && self)
        thread_touch(p, bytes, (uint8_t)(ENTRY_STRONG | (how == ACCESS_WRITE ? ENTRY_WRITE : 0)), scope,
                     "an atomic access", from);
}

/* ---- accesses of copies and products ---- */
static struct touch async_touch(const struct fiber *f, const struct async_agent &a, enum access how, bool shared,
                                void *from)
{
    return {f->order->now, a.agent, a.time, (uint8_t)(ENTRY_ASYNC | (how == ACCESS_WRITE ? ENTRY_WRITE : 0)),
            SCOPE_GPU,     shared,  a.name, f,
            from};
}

void order_async_global(const struct fiber *f, const struct async_agent &a, const void *p, size_t bytes,
                        enum access how, bool sum, void *from)
{
    if (!order_on)
        return;
    struct touch x = async_touch(f, a, how, false, from);
    if (sum)
        x.kind |= ENTRY_STRONG;
    touch_global(p, bytes, x);
}

void order_async_shared(const struct fiber *f, const struct async_agent &a, struct cta *c, uint32_t offset,
                        size_t bytes, enum access how, void *from)
{
    if (order_on)
        touch_cells(order_cells(c), offset, bytes, async_touch(f, a, how, true, from), true);
}

} // namespace hopper

/* ---- called by instrumented code before each access ---- */
using namespace hopper;

#define ORDINARY(name, bytes, how)                                                                                     \
    extern "C" void __tsan_##name(void *p)                                                                             \
    {                                                                                                                  \
        order_ordinary(p, bytes, how, CALLER);                                                                         \
    }
#define ORDINARY_PAIR(bytes)                                                                                           \
    ORDINARY(read##bytes, bytes, ACCESS_READ)                                                                          \
    ORDINARY(write##bytes, bytes, ACCESS_WRITE)                                                                        \
    ORDINARY(unaligned_read##bytes, bytes, ACCESS_READ)                                                                \
    ORDINARY(unaligned_write##bytes, bytes, ACCESS_WRITE)
ORDINARY_PAIR(1)
ORDINARY_PAIR(2)
ORDINARY_PAIR(4)
ORDINARY_PAIR(8)
ORDINARY_PAIR(16)

extern "C" void __tsan_read_range(void *p, size_t bytes)
{
    order_ordinary(p, bytes, ACCESS_READ, CALLER);
}

extern "C" void __tsan_write_range(void *p, size_t bytes)
{
    order_ordinary(p, bytes, ACCESS_WRITE, CALLER);
}

/* PTX: a volatile access is relaxed, with the scope of the system. */
static void volatile_access(void *p, uint32_t bytes, enum access how, void *from)
{
    if (!scheduler_is_here() || !self || on_own_stack(p))
        return;
    order_atomic(p, bytes, how, SCOPE_SYS, from);
    if ((size_t)((const uint8_t *)p - self->block->shared) < self->block->shared_bytes)
        return; /* barriers order shared memory: its words release nothing */
    if (how == ACCESS_READ) {
        uint64_t seen = 0;
        memcpy(&seen, p, bytes < 8 ? bytes : 8);
        order_acquire(p, bytes, seen, ORDER_RELAXED, SCOPE_SYS);
    } else {
        order_release_unknown(p);
    }
}

#define VOLATILE(name, bytes, how)                                                                                     \
    extern "C" void __tsan_##name(void *p)                                                                             \
    {                                                                                                                  \
        volatile_access(p, bytes, how, CALLER);                                                                        \
    }
#define VOLATILE_PAIR(bytes)                                                                                           \
    VOLATILE(volatile_read##bytes, bytes, ACCESS_READ)                                                                 \
    VOLATILE(volatile_write##bytes, bytes, ACCESS_WRITE)
VOLATILE_PAIR(1)
VOLATILE_PAIR(2)
VOLATILE_PAIR(4)
VOLATILE_PAIR(8)
VOLATILE_PAIR(16)

/* The table of a new object's class. */
extern "C" void __tsan_vptr_update(void *, void *)
{
}

/* Each instrumented file calls it before main(). */
extern "C" void __tsan_init(void)
{
    order_on = true;
}

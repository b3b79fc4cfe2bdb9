/* SPDX-License-Identifier: Apache-2.0 */
/* Who knows what: agents, and how barriers, atomic operations, fences and streams pass knowledge on. */
#include "tools/hopper/order_agents.h"

#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>

#include "tools/hopper/device_memory.h"

namespace hopper
{

bool order_on;
std::vector<agent> &agents = *new std::vector<agent>(1);

/* ---- agents ---- */
/* The agents of a CTA. A CTA that starts later may reuse the agents of one that has ended; their clocks continue. */
struct agent_set {
    uint32_t threads, first;
    std::map<uint64_t, std::pair<uint32_t, uint64_t>> others; /* kind and index: agent, and the CTA that used it last */
};

struct order_cta {
    struct agent_set *set;
    struct origin at;
    std::unique_ptr<order_cell[]> cells;
    std::map<uint32_t, bool> mbarriers;
};

static std::map<uint32_t, std::vector<agent_set *>> &free_sets = *new std::map<uint32_t, std::vector<agent_set *>>();
static uint64_t ctas_begun;

static uint32_t new_agents(uint32_t count)
{
    uint32_t first = (uint32_t)agents.size();
    agents.resize(first + count);
    return first;
}

static void live(uint32_t number, enum agent_kind kind, const struct cta *c, uint32_t index)
{
    agents[number].lives.push_back(
        {agents[number].now + 1, kind, c->of->kernel, c->of->number, c->index, index, c->order->at});
}

static uint32_t agent_of(struct cta *c, enum agent_kind kind, uint32_t index)
{
    auto &found = c->order->set->others[(uint64_t)kind << 32 | index];
    if (found.first == 0)
        found.first = new_agents(1);
    if (found.second != c->order->at.cta) {
        found.second = c->order->at.cta;
        live(found.first, kind, c, index);
    }
    return found.first;
}

void order_cta_begins(struct cta *c)
{
    static uint64_t clusters;
    if (!order_on)
        return;
    uint32_t threads = (uint32_t)c->threads.size();
    auto &sets = free_sets[threads];
    if (sets.empty())
        sets.push_back(new agent_set{threads, new_agents(threads), {}});
    c->order = std::make_shared<order_cta>();
    c->order->set = sets.back();
    sets.pop_back();
    if (c->rank == 0)
        clusters++;
    c->order->at = {c->of->device, clusters, ++ctas_begun};
    c->order->cells.reset(new order_cell[c->shared_bytes / CELL_BYTES + 1]());
    for (auto &f : c->threads)
        order_thread_begins(&f);
}

void order_cta_ends(struct cta *c)
{
    if (c->order)
        free_sets[c->order->set->threads].push_back(c->order->set);
}

struct order_cell *order_cells(struct cta *c)
{
    return c->order->cells.get();
}

void order_thread_begins(struct fiber *f)
{
    uint32_t own = f->block->order->set->first + f->thread;
    live(own, AGENT_THREAD, f->block, f->thread);
    f->order = std::make_shared<order_thread>();
    struct stamp *now = &f->order->now;
    now->base = {f->block->of->begin, f->block->of->begin, f->block->of->begin};
    now->from = f->block->order->at;
    agents[own].now++;
    now->points[OWN] = {own, agents[own].now, agents[own].now, agents[own].now - 1, agents[own].now - 1};
}

static struct order_thread *running(void)
{
    return order_on && self && scheduler_is_here() ? self->order.get() : NULL;
}

/* Later accesses of this thread get a new time. */
static void tick(struct order_thread *t)
{
    struct point *own = &t->now.points[OWN];
    own->seen = ++agents[own->agent].now;
}

static struct point *point_of(struct order_thread *t, int which, uint32_t agent)
{
    struct point *p = &t->now.points[which];
    if (p->agent == 0)
        *p = {agent, agents[agent].now + 1, 0, 0, 0};
    return p;
}

/* A vector that was joined once stays known, and a polling thread acquires the same one again and again. */
static void acquire_clocks(clocks_ref *known, const clocks_ref &from, uint64_t *joined)
{
    if (!from || joined[from->id % JOINS_REMEMBERED] == from->id)
        return;
    joined[from->id % JOINS_REMEMBERED] = from->id;
    *known = clocks_join(*known, from);
}

static void acquire_view(struct order_thread *t, const struct view &v)
{
    acquire_clocks(&t->now.base.seen, v.seen, t->joined[0]);
    acquire_clocks(&t->now.base.global, v.global, t->joined[1]);
    acquire_clocks(&t->now.base.shared, v.shared, t->joined[2]);
}

/* ---- sums ---- */
static void merge_once(clocks_ref *to, const clocks_ref &from, uint64_t *merged)
{
    if (!from || from->id == *merged)
        return;
    *merged = from->id;
    clocks_merge(to, from);
}

void order_add(struct order_sum *sum, const struct stamp &s)
{
    merge_once(&sum->known.seen, s.base.seen, &sum->merged[0]);
    merge_once(&sum->known.global, s.base.global, &sum->merged[1]);
    merge_once(&sum->known.shared, s.base.shared, &sum->merged[2]);
    for (const struct point &p : s.points)
        if (p.agent != 0)
            view_raise(&sum->known, p.agent, p.seen, p.global, p.shared);
}

void order_thread_ends(struct fiber *f)
{
    struct order_thread *t = f->order.get();
    if (!order_on || !t)
        return;
    /* Bulk stores end before their launch does. */
    for (int which : {STORES, STORE_SOURCES})
        if (t->now.points[which].agent != 0)
            t->now.points[which].seen = agents[t->now.points[which].agent].now;
    order_add(&f->block->of->end, t->now);
    f->order.reset();
}

clocks_ref order_launch_ends(struct launch *l)
{
    clocks_merge(&l->end.known.seen, l->begin); /* also for a launch without threads */
    return l->end.known.seen;
}

/* ---- barriers ---- */
void order_arrive(struct order_barrier *b, struct fiber *f)
{
    if (!order_on)
        return;
    order_add(&b->arriving, f->order->now);
    tick(f->order.get());
}

void order_complete(struct order_barrier *b)
{
    b->done = b->arriving.known;
    b->arriving = {};
}

void order_pass(const struct order_barrier *b, struct fiber *f)
{
    if (order_on)
        acquire_view(f->order.get(), b->done);
}

void order_meet(struct fiber *const *threads, uint32_t count)
{
    struct order_barrier b = {};
    if (!order_on)
        return;
    for (uint32_t i = 0; i < count; i++)
        order_arrive(&b, threads[i]);
    order_complete(&b);
    for (uint32_t i = 0; i < count; i++)
        order_pass(&b, threads[i]);
}

/* ---- mbarriers ---- */
void order_mbarrier_init(struct cta *c, uint32_t offset, void *from)
{
    if (running())
        order_shared(self, c, offset, 8, ACCESS_WRITE, from);
}

/* A use is compared only with the barrier's initialisation: hundreds of threads use a barrier, and they do so
 * atomically. */
void order_mbarrier_used(struct cta *c, uint32_t offset, const char *what, void *from)
{
    struct order_thread *t = running();
    if (!t)
        return;
    struct touch x = {
        t->now, t->now.points[OWN].agent, t->now.points[OWN].seen, ENTRY_STRONG, SCOPE_CLUSTER, true, what, self, from};
    touch_cells(c->order->cells.get(), offset, 8, x, false);
}

/* TMA completes bytes on the barrier. */
static void copy_uses_mbarrier(const struct fiber *f, struct cta *c, uint32_t offset, void *from)
{
    struct order_thread *t = f->order.get();
    struct touch x = {
        t->now, 0, 0, ENTRY_STRONG | ENTRY_ASYNC, SCOPE_CLUSTER, true, "copy that completes on a barrier", f, from};
    touch_cells(c->order->cells.get(), offset, 8, x, false);
}

bool scope_within(enum scope scope, const struct origin &a, const struct origin &b)
{
    switch (scope) {
    case SCOPE_CTA:
        return a.cta == b.cta && a.device >= 0 && a.device == b.device;
    case SCOPE_CLUSTER:
        return a.cluster == b.cluster && a.device >= 0 && a.device == b.device;
    case SCOPE_GPU:
        return a.device == b.device;
    default:
        return true;
    }
}

void order_mbarrier_arrive(struct mbarrier *b, struct cta *c, enum scope scope)
{
    struct order_thread *t = running();
    if (!t)
        return;
    if (scope_within(scope, t->now.from, c->order->at))
        order_add(&b->order.arriving, t->now);
    else
        order_add(&b->narrow, t->now); /* only for the text of a report */
    tick(t);
}

void order_mbarrier_complete(struct mbarrier *b, struct cta *c, uint32_t offset)
{
    if (!order_on)
        return;
    uint32_t loads = agent_of(c, AGENT_LOADS, offset), time = ++agents[loads].now;
    view_raise(&b->order.arriving.known, loads, time, time, time);
    order_complete(&b->order);
}

void order_mbarrier_pass(const struct mbarrier *b, struct fiber *f)
{
    order_pass(&b->order, f);
    if (order_on)
        view_merge(&f->order->narrow, b->narrow.known);
}

/* ---- atomic operations ---- */
struct word {
    uint64_t value;
    bool written; /* it was written since, with a value that is not known */
    std::vector<order_release> releases;
};
static std::unordered_map<uintptr_t, word> &words = *new std::unordered_map<uintptr_t, word>();
static struct order_sum &told_outside = *new struct order_sum(); /* everything that was released to host memory */

static void release_to(std::vector<order_release> *to, enum scope scope, const struct stamp &s)
{
    for (auto &r : *to)
        if (r.scope == scope && (scope == SCOPE_SYS ? r.from.device == s.from.device : r.from.cta == s.from.cta))
            return order_add(&r.what, s);
    to->push_back({scope, s.from, {}});
    order_add(&to->back().what, s);
}

/* Whether a poll has read the same as the previous one. */
static bool is_same(const struct order_release &a, const struct order_release &b)
{
    const struct view &x = a.what.known, &y = b.what.known;
    auto id = [](const clocks_ref &c) { return c ? c->id : 0; };
    return a.scope == b.scope && a.from.device == b.from.device && a.from.cta == b.from.cta &&
           id(x.seen) == id(y.seen) && id(x.global) == id(y.global) && id(x.shared) == id(y.shared);
}

void order_acquire(const void *p, uint32_t bytes, uint64_t seen, enum order how, enum scope scope)
{
    struct order_thread *t = running();
    if (!t)
        return;
    auto found = words.find((uintptr_t)p);
    if (found == words.end())
        found = words.insert({(uintptr_t)p, word{~seen, false, {}}}).first;
    (void)bytes;
    struct word *w = &found->second;
    if (w->written)
        w->value = seen;
    w->written = false;
    /* the host or a NIC has written the word, and may have seen everything that was released to it */
    if (w->value != seen) {
        w->value = seen;
        w->releases.clear();
        w->releases.push_back({SCOPE_SYS, {-1, 0, 0}, told_outside});
        clocks_merge(&w->releases.back().what.known.seen, order_host());
    }
    for (const auto &r : w->releases) {
        enum scope both = r.scope < scope ? r.scope : scope;
        if (!scope_within(both, r.from, t->now.from))
            view_merge(&t->narrow, r.what.known);
        else if (how & ORDER_ACQUIRE)
            acquire_view(t, r.what.known);
        else if (order_release next = {both, r.from, r.what}; t->unfenced.empty() || !is_same(t->unfenced.back(), next))
            t->unfenced.push_back(next);
    }
    /* the word is polled repeatedly, so a fence would acquire the newest release, which includes the older ones */
    if (t->unfenced.size() > 64)
        t->unfenced.erase(t->unfenced.begin(), t->unfenced.end() - 32);
}

void order_release_unknown(const void *p)
{
    order_release_word(p, 0, 0, ORDER_RELAXED, SCOPE_SYS, false);
    if (running())
        words[(uintptr_t)p].written = true;
}

void order_release_word(const void *p, uint32_t bytes, uint64_t now, enum order how, enum scope scope, bool chain)
{
    struct order_thread *t = running();
    struct word *w;
    if (!t)
        return;
    (void)bytes;
    w = &words[(uintptr_t)p];
    w->value = now;
    w->written = false;
    if (!chain)
        w->releases.clear();
    for (int s = 0; s <= scope; s++)
        if (t->fenced[s] && (s == scope || t->fenced[s] != t->fenced[s + 1])) {
            struct stamp fenced = *t->fenced[s];
            fenced.points[ATOMICS] = t->now.points[ATOMICS];
            release_to(&w->releases, (enum scope)s, fenced);
        }
    if (how & ORDER_RELEASE)
        release_to(&w->releases, scope, t->now);
    if (scope == SCOPE_SYS && order_is_host_memory(p)) {
        if (t->fenced[SCOPE_SYS])
            order_add(&told_outside, *t->fenced[SCOPE_SYS]);
        if (how & ORDER_RELEASE)
            order_add(&told_outside, t->now);
    }
    tick(t);
}

void order_fence(enum scope scope)
{
    struct order_thread *t = running();
    std::vector<order_release> later;
    if (!t)
        return;
    for (auto &r : t->unfenced) {
        enum scope both = r.scope < scope ? r.scope : scope;
        if (scope_within(both, r.from, t->now.from))
            acquire_view(t, r.what.known);
        else
            later.push_back(r);
    }
    t->unfenced = later;
    auto s = std::make_shared<stamp>(t->now);
    for (int i = 0; i <= scope; i++)
        t->fenced[i] = s;
    tick(t);
}

void order_fence_async(bool global)
{
    struct order_thread *t = running();
    if (!t)
        return;
    (global ? t->now.base.global : t->now.base.shared) = t->now.base.seen;
    for (struct point &p : t->now.points)
        (global ? p.global : p.shared) = p.seen;
    tick(t);
}

/* ---- copies and products ---- */
struct async_agent order_load_agent(struct cta *to, uint32_t bar_offset, const char *name)
{
    if (!running())
        return {};
    uint32_t a = agent_of(to, AGENT_LOADS, bar_offset);
    copy_uses_mbarrier(self, to, bar_offset, NULL);
    return {a, agents[a].now + 1, name};
}

struct async_agent order_store_agent(const char *name, bool source)
{
    struct order_thread *t = running();
    if (!t)
        return {};
    uint32_t a = agent_of(self->block, source ? AGENT_STORE_SOURCES : AGENT_STORES, self->thread);
    struct point *p = point_of(t, source ? STORE_SOURCES : STORES, a);
    uint32_t time = ++agents[a].now;
    if (!source)
        t->stores = time - p->first + 1;
    return {a, time, name};
}

void order_group_committed(void)
{
    enum { MOST_LEFT = 64 };
    struct order_thread *t = running();
    if (!t)
        return;
    t->groups.push_back(t->stores);
    if (t->groups.size() > MOST_LEFT)
        t->groups.pop_front();
}

void order_groups_waited(uint32_t left, bool read_only)
{
    struct order_thread *t = running();
    if (!t || t->groups.size() <= left)
        return;
    uint32_t number = t->groups[t->groups.size() - 1 - left];
    for (int which : {STORE_SOURCES, STORES}) {
        struct point *p = &t->now.points[which];
        uint32_t time = p->first + number - 1;
        if (number != 0)
            p->seen = time > p->seen ? time : p->seen;
        if (read_only)
            break;
    }
}

struct async_agent order_next_atomic(void)
{
    struct order_thread *t = running();
    uint32_t a = t->now.points[ATOMICS].agent;
    if (a == 0)
        a = agent_of(self->block, AGENT_ATOMICS, self->thread);
    struct point *p = point_of(t, ATOMICS, a);
    p->seen = ++agents[a].now;
    return {a, p->seen, "an atomic access"};
}

struct async_agent order_product_agent(void)
{
    struct order_thread *t = running();
    if (!t)
        return {};
    uint32_t a = agent_of(self->block, AGENT_PRODUCTS, self->thread / WARPGROUP);
    struct agent *all = &agents[a];
    return {a, ++all->now, "wgmma"};
}

/* Every thread of the warpgroup counts its products in the same way, from 1 on. */
void order_products_waited(uint64_t number)
{
    struct order_thread *t = running();
    if (!t || number == 0)
        return;
    uint32_t a = agent_of(self->block, AGENT_PRODUCTS, self->thread / WARPGROUP);
    struct point *p = &t->now.points[PRODUCTS];
    *p = {a, agents[a].lives.back().first, 0, p->global, p->shared};
    p->seen = p->first + (uint32_t)number - 1;
}

/* ---- host and streams ---- */
static std::mutex host_lock;
static clocks_ref &host_seen = *new clocks_ref();

clocks_ref order_host(void)
{
    std::lock_guard<std::mutex> held(host_lock);
    return host_seen;
}

void order_host_saw(const clocks_ref &seen)
{
    if (!order_on)
        return;
    std::lock_guard<std::mutex> held(host_lock);
    host_seen = clocks_join_anywhere(host_seen, seen);
}

static uint32_t engine_of(const void *stream)
{
    static std::map<const void *, uint32_t> all;
    uint32_t &a = all[stream];
    if (a == 0) {
        a = new_agents(1);
        agents[a].lives.push_back({1, AGENT_ENGINE, NULL, 0, 0, 0, {-1, 0, 0}});
    }
    return a;
}

static struct stamp engine_knows(uint32_t agent, const clocks_ref &seen)
{
    struct stamp s = {};
    s.base = {seen, seen, seen};
    s.points[OWN] = {agent, 1, agents[agent].now, 0, 0};
    s.from = {-1, 0, 0};
    return s;
}

void order_engine(const void *stream, clocks_ref *seen, const void *to, const void *from, size_t bytes)
{
    if (!order_on)
        return;
    uint32_t a = engine_of(stream), time = ++agents[a].now;
    struct touch x = {engine_knows(a, *seen), a, time, 0, SCOPE_SYS, false, "copy engine", NULL, NULL};
    if (from)
        touch_global(from, bytes, x);
    x.kind = ENTRY_WRITE;
    touch_global(to, bytes, x);
    clocks_raise(seen, a, time);
}

void order_engine_word(const void *stream, clocks_ref *seen, const void *to, uint32_t bytes)
{
    if (!order_on)
        return;
    uint32_t a = engine_of(stream), time = ++agents[a].now;
    uint64_t value = 0;
    struct touch x = {engine_knows(a, *seen), a,    time, ENTRY_WRITE | ENTRY_STRONG, SCOPE_SYS, false,
                      "copy engine",          NULL, NULL};
    touch_global(to, bytes, x);
    memcpy(&value, to, bytes);
    struct word *w = &words[(uintptr_t)to];
    w->value = value;
    w->releases.clear();
    /* Earlier copies of this engine are not fenced for the copies of a kernel that reads the word. */
    struct stamp s = engine_knows(a, *seen);
    s.base.global = s.base.shared = NULL;
    release_to(&w->releases, SCOPE_SYS, s);
    clocks_raise(seen, a, time);
}

void order_forget_words(uintptr_t from, uintptr_t to)
{
    for (auto w = words.begin(); w != words.end();)
        w = w->first >= from && w->first < to ? words.erase(w) : std::next(w);
}

} // namespace hopper

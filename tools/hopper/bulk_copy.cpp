/* SPDX-License-Identifier: Apache-2.0 */
/* Bulk and tensor copies. A copy reads its source after a random delay and writes its destination after another one; of
 * several destinations, each has a delay of its own. */
#include "tools/hopper/bulk_copy.h"

#include <cmath>
#include <cstring>
#include <unordered_set>

#include "tools/hopper/mbarrier.h"
#include "tools/hopper/order.h"
#include "tools/hopper/place.h"
#include "tools/hopper/tile_map.h"

namespace hopper
{

static const char GROUP_WAIT[] = "bulk groups";

struct copy {
    const char *name;
    struct fiber *issuer;    /* NULL after its CTA has left; only stores may outlive their CTA */
    struct cluster *cluster; /* likewise */
    struct launch *of;
    struct cta *block;
    struct tile_map map;
    int32_t at[TILE_DIMS];
    uint32_t shared; /* offset in shared memory: of a store's source, of a load's destination */
    uint32_t source; /* copies between CTAs: offset in the issuer's shared memory */
    uint32_t bytes, bar;
    bool tiled, from_shared;
    enum reduction how;
    uint64_t sum;
    uint32_t writes_fenced; /* value of the issuer's warp when the copy was issued */
    std::vector<uint8_t> buffer;
    std::shared_ptr<copy_group> group;
    std::vector<struct destination *> destinations;
    uint32_t unwritten; /* destinations still to be written */
};

/* One destination of a load. */
struct destination {
    struct copy *of;
    struct cta *to;
};

static std::unordered_set<struct copy *> &copies = *new std::unordered_set<struct copy *>(); /* in flight */

uint64_t shared_checksum(const uint8_t *p, uint32_t bytes, uint64_t sum)
{
    for (uint32_t i = 0; i < bytes; i += 16) {
        uint64_t a, b;
        memcpy(&a, p + i, 8);
        memcpy(&b, p + i + 8, 8);
        sum = (sum ^ a) * 0x9e3779b97f4a7c15ull + b;
        sum ^= sum >> 29;
    }
    return sum;
}

/* ---- boxes ---- */
/* Calls each(global, valid bytes, skipped bytes, offset in the box) for every row of the box. global is NULL where the
 * whole row lies outside the tensor. */
template <class Each> static void for_rows(const struct copy *c, Each each)
{
    const struct tile_map *m = &c->map;
    uint32_t row_bytes = (uint32_t)m->box[0] * m->element_bytes, rows = c->bytes / row_bytes;
    int64_t first = c->at[0], last = first + m->box[0], from = first < 0 ? 0 : first;
    int64_t to = last > (int64_t)m->size[0] ? (int64_t)m->size[0] : last;
    for (uint32_t row = 0; row < rows; row++) {
        uint32_t left = row;
        bool inside = from < to;
        uint64_t where = m->base + (uint64_t)from * m->element_bytes;
        for (uint32_t d = 1; d < m->dims; d++) {
            int64_t x = c->at[d] + (int64_t)(left % m->box[d]);
            left /= m->box[d];
            inside = inside && x >= 0 && x < (int64_t)m->size[d];
            where += (uint64_t)x * m->stride[d - 1];
        }
        each(inside ? (uint8_t *)(uintptr_t)where : NULL, inside ? (uint32_t)(to - from) * m->element_bytes : 0,
             (uint32_t)(from - first) * m->element_bytes, row * row_bytes);
    }
}

/* Copies between the box in linear order and the box as it lies in shared memory. */
static void move_swizzled(const struct copy *c, uint8_t *shared, uint8_t *ordered, bool to_shared)
{
    uint32_t span = c->tiled ? c->map.swizzle_bytes : 16;
    for (uint32_t i = 0; i < c->bytes; i += 16) {
        uint8_t *s = shared + swizzled(c->shared + i, span);
        if (to_shared)
            memcpy(s, ordered + i, 16);
        else
            memcpy(ordered + i, s, 16);
    }
}

/* Bytes that another copy has written since the last fence of the issuer's warp may still be invisible to this copy,
 * even if the warp has seen the flag that announces them. */
static void check_global_fenced(const struct copy *c, const uint8_t *global, uint32_t bytes)
{
    if (memory_newest_write(global, bytes) > c->writes_fenced && !late_writes_forgiven)
        violation("%s: a %s reads %u bytes at %p, which another copy has written since this warp's last "
                  "fence.proxy.async.global: the fence is missing, or so is the wait for those bytes",
                  fiber_name(c->issuer).c_str(), c->name, bytes, (const void *)global);
}

static void read_global(struct copy *c)
{
    auto get = [c](const uint8_t *global, uint32_t bytes, uint32_t skipped, uint32_t offset) {
        if (!global)
            return;
        check_global_fenced(c, global, bytes);
        memcpy(c->buffer.data() + offset + skipped, global, bytes);
    };
    c->buffer.assign(c->bytes, 0);
    if (c->tiled)
        for_rows(c, get);
    else
        get((const uint8_t *)(uintptr_t)c->map.base, c->bytes, 0, 0);
}

static void add(uint8_t *to, const uint8_t *from, uint32_t bytes, enum reduction how)
{
    uint32_t each = how == REDUCE_ADD_BF16 ? 2 : 4;
    for (uint32_t i = 0; i < bytes; i += each) {
        uint32_t a = 0, b = 0;
        float x, y;
        memcpy(&a, to + i, each);
        memcpy(&b, from + i, each);
        if (how == REDUCE_ADD_U32) {
            a += b;
        } else if (how == REDUCE_ADD_F32) {
            memcpy(&x, &a, 4);
            memcpy(&y, &b, 4);
            x += y;
            memcpy(&a, &x, 4);
        } else {
            a <<= 16, b <<= 16;
            memcpy(&x, &a, 4);
            memcpy(&y, &b, 4);
            x += y;
            memcpy(&a, &x, 4);
            a = std::isnan(x) ? 0x7fff : (a + 0x7fff + (a >> 16 & 1)) >> 16;
        }
        memcpy(to + i, &a, each);
    }
}

static void write_global(struct copy *c)
{
    auto put = [c](uint8_t *global, uint32_t bytes, uint32_t skipped, uint32_t offset) {
        if (!global)
            return;
        memory_note_write(global, bytes);
        if (c->how == REDUCE_NONE)
            memcpy(global, c->buffer.data() + offset + skipped, bytes);
        else
            add(global, c->buffer.data() + offset + skipped, bytes, c->how);
    };
    if (c->tiled)
        for_rows(c, put);
    else
        put((uint8_t *)(uintptr_t)c->map.base, c->bytes, 0, 0);
    /* A thread that learns of the completion may signal another OS thread. */
    __atomic_thread_fence(__ATOMIC_RELEASE);
}

/* Checks that the memory which the copy touches exists and may be reached. */
static void check_global(const struct copy *c)
{
    if (!c->tiled) {
        memory_check(c->issuer, (const void *)(uintptr_t)c->map.base, c->bytes, c->name);
        return;
    }
    uint8_t *low = NULL, *high = NULL;
    struct allocation a;
    for_rows(c, [&](uint8_t *global, uint32_t bytes, uint32_t, uint32_t) {
        if (!global)
            return;
        low = !low || global < low ? global : low;
        high = global + bytes > high ? global + bytes : high;
    });
    if (low && memory_find(low, (size_t)(high - low), &a))
        return memory_check(c->issuer, low, (size_t)(high - low), c->name);
    for_rows(c, [&](uint8_t *global, uint32_t bytes, uint32_t, uint32_t) {
        if (global)
            memory_check(c->issuer, global, bytes, c->name);
    });
}

/* ---- memory order ---- */
static void order_global(const struct copy *c, const struct async_agent &a, enum access how, void *from)
{
    if (!order_on)
        return;
    if (!c->tiled)
        return order_async_global(self, a, (const void *)(uintptr_t)c->map.base, c->bytes, how, c->how != REDUCE_NONE,
                                  from);
    for_rows(c, [&](uint8_t *global, uint32_t bytes, uint32_t, uint32_t) {
        if (global)
            order_async_global(self, a, global, bytes, how, c->how != REDUCE_NONE, from);
    });
}

/* A load has read its source when the copy to this CTA is complete, or the copy to the first of several CTAs. */
static void order_load(const struct copy *c, void *from)
{
    const struct destination *reader = c->destinations[0];
    for (const struct destination *l : c->destinations) {
        order_async_shared(self, order_load_agent(l->to, c->bar - SHARED_BASE, c->name), l->to, c->shared, c->bytes,
                           ACCESS_WRITE, from);
        reader = l->to == self->block ? l : reader;
    }
    struct async_agent a = order_load_agent(reader->to, c->bar - SHARED_BASE, c->name);
    if (c->from_shared)
        order_async_shared(self, a, self->block, c->source, c->bytes, ACCESS_READ, from);
    else
        order_global(c, a, ACCESS_READ, from);
}

static void order_store(const struct copy *c, void *from)
{
    order_async_shared(self, order_store_agent(c->name, true), self->block, c->shared, c->bytes, ACCESS_READ, from);
    order_global(c, order_store_agent(c->name, false), ACCESS_WRITE, from);
}

/* ---- issuing ---- */
static struct copy *copy_new(const char *name)
{
    struct copy *c = new copy();
    c->name = name;
    c->issuer = self;
    c->block = self->block;
    c->cluster = self->block->cluster;
    c->of = self->block->of;
    c->writes_fenced = self->warp->writes_fenced;
    copies.insert(c);
    return c;
}

static void set_range(struct copy *c, const void *global, uint32_t bytes)
{
    c->map.base = (uint64_t)(uintptr_t)global;
    c->bytes = bytes;
    if (bytes == 0 || bytes % 16 != 0 || c->map.base % 16 != 0)
        violation("%s: %s of %u bytes at %p: address and size must be multiples of 16", fiber_name(self).c_str(),
                  c->name, bytes, global);
    check_global(c);
}

static void set_tile(struct copy *c, const CUtensorMap *map, const int32_t *at, int dims)
{
    memcpy(&c->map, map, sizeof(c->map));
    c->tiled = true;
    if (c->map.magic != TILE_MAP_MAGIC)
        violation("%s: %s: %p is not a tensor map", fiber_name(self).c_str(), c->name, (const void *)map);
    if (c->map.dims != dims)
        violation("%s: %s: %d coordinates for a tensor map of %u dimensions", fiber_name(self).c_str(), c->name, dims,
                  c->map.dims);
    c->bytes = c->map.element_bytes;
    for (int i = 0; i < dims; i++) {
        c->at[i] = at[i];
        c->bytes *= c->map.box[i];
    }
    check_global(c);
}

static uint32_t check_shared(struct cta *from, uint32_t address, const struct copy *c)
{
    return (uint32_t)(shared_bytes_at(from, address, c->bytes, c->tiled ? 128 : 16, c->name) -
                      shared_cta(from, address, c->name)->shared);
}

/* ---- loads ---- */
static void load_write(void *object)
{
    struct destination *l = (struct destination *)object;
    struct copy *c = l->of;
    struct cluster *cluster = c->cluster;
    move_swizzled(c, l->to->shared, c->buffer.data(), true);
    shared_mark_clean(l->to, c->shared, c->bytes);
    l->to->incoming--;
    mbarrier_complete_bytes(c->issuer, l->to, c->bar, c->bytes);
    delete l;
    if (--c->unwritten == 0) {
        copies.erase(c);
        delete c;
    }
    scheduler_operation_ended(cluster);
}

static void check_unchanged(const struct copy *c, uint32_t offset)
{
    if (shared_checksum(c->block->shared + offset, c->bytes, 0) != c->sum)
        violation("%s: %u bytes at shared offset %u changed after a %s was issued and before it read them: "
                  "wait for the copy before writing there again",
                  fiber_name(c->issuer).c_str(), c->bytes, offset, c->name);
}

static void load_read(void *object)
{
    struct copy *c = (struct copy *)object;
    if (c->from_shared) {
        check_unchanged(c, c->source);
        c->buffer.assign(c->block->shared + c->source, c->block->shared + c->source + c->bytes);
        c->block->outgoing--;
    } else {
        read_global(c);
    }
    for (struct destination *l : c->destinations)
        scheduler_run_late(load_write, l);
}

static void load_begin(struct copy *c, uint32_t dst, uint32_t bar, uint16_t ctas, void *from)
{
    struct cluster *cluster = c->cluster;
    std::vector<struct destination *> &all = c->destinations;
    c->bar = bar & 0xffffff;
    if (ctas == 0 && dst >> 24 != bar >> 24)
        violation("%s: %s to %#x completes on the barrier %#x of another CTA", fiber_name(self).c_str(), c->name, dst,
                  bar);
    if (ctas >> cluster->ctas.size() != 0)
        violation("%s: %s to CTAs %#x of a cluster of %zu", fiber_name(self).c_str(), c->name, ctas,
                  cluster->ctas.size());
    for (uint32_t i = 0; i < cluster->ctas.size(); i++)
        if (ctas >> i & 1)
            all.push_back(new destination{c, shared_cta(self->block, (dst & 0xffffff) | (i + 1) << 24, c->name)});
    if (ctas == 0)
        all.push_back(new destination{c, shared_cta(self->block, dst, c->name)});
    for (struct destination *l : all) {
        c->shared = check_shared(l->to, dst & 0xffffff, c);
        l->to->incoming++;
        scheduler_operation_began(cluster);
    }
    c->unwritten = (uint32_t)all.size();
    order_load(c, from);
    scheduler_run_late(load_read, c);
    thread_yield();
}

void bulk_load_bytes(uint32_t dst, const void *src, uint32_t bytes, uint32_t bar, uint16_t ctas)
{
    struct copy *c = copy_new("bulk load");
    set_range(c, src, bytes);
    load_begin(c, dst, bar, ctas, CALLER);
}

void tile_load(uint32_t dst, const CUtensorMap *map, uint32_t bar, const int32_t *at, int dims, uint16_t ctas)
{
    struct copy *c = copy_new("tensor load");
    set_tile(c, map, at, dims);
    load_begin(c, dst, bar, ctas, CALLER);
}

void bulk_copy_shared(uint32_t dst, uint32_t src, uint32_t bytes, uint32_t bar)
{
    struct copy *c = copy_new("bulk copy between CTAs");
    c->bytes = bytes;
    c->from_shared = true;
    if (bytes == 0 || bytes % 16 != 0)
        violation("%s: %s of %u bytes: not a multiple of 16", fiber_name(self).c_str(), c->name, bytes);
    c->source = check_shared(self->block, src, c);
    shared_check_fenced(self, self->block, c->source, bytes, c->name);
    c->sum = shared_checksum(self->block->shared + c->source, bytes, 0);
    self->block->outgoing++;
    load_begin(c, dst, bar, 0, CALLER);
}

/* ---- stores ---- */
static void wake_group_waiter(struct fiber *f)
{
    if (f && f->state == THREAD_BLOCKED && f->wait.what == GROUP_WAIT)
        scheduler_wake(f);
}

static void store_write(void *object)
{
    struct copy *c = (struct copy *)object;
    struct launch *of = c->of;
    struct cluster *cluster = c->cluster;
    write_global(c);
    c->group->unwritten--;
    wake_group_waiter(c->issuer);
    copies.erase(c);
    delete c;
    if (cluster)
        scheduler_operation_ended(cluster);
    of->in_flight--;
    scheduler_retire(of);
}

static void store_read(void *object)
{
    struct copy *c = (struct copy *)object;
    check_unchanged(c, c->shared);
    c->buffer.resize(c->bytes);
    move_swizzled(c, c->block->shared, c->buffer.data(), false);
    c->block->outgoing--;
    c->group->unread--;
    wake_group_waiter(c->issuer);
    scheduler_run_late(store_write, c);
}

static void store_begin(struct copy *c, uint32_t src, void *from)
{
    if (self->groups.empty() || self->groups.back()->committed)
        self->groups.push_back(std::make_shared<copy_group>());
    c->group = self->groups.back();
    c->shared = check_shared(self->block, src, c);
    shared_check_fenced(self, self->block, c->shared, c->bytes, c->name);
    c->sum = shared_checksum(self->block->shared + c->shared, c->bytes, 0);
    c->group->unread++;
    c->group->unwritten++;
    c->block->outgoing++;
    c->of->in_flight++;
    order_store(c, from);
    scheduler_operation_began(c->cluster);
    scheduler_run_late(store_read, c);
    thread_yield();
}

void bulk_store_bytes(void *dst, uint32_t src, uint32_t bytes, enum reduction how)
{
    struct copy *c = copy_new(how == REDUCE_NONE ? "bulk store" : "bulk reduction");
    set_range(c, dst, bytes);
    c->how = how;
    store_begin(c, src, CALLER);
}

void tile_store(const CUtensorMap *map, uint32_t src, const int32_t *at, int dims, enum reduction how)
{
    struct copy *c = copy_new(how == REDUCE_NONE ? "tensor store" : "tensor reduction");
    set_tile(c, map, at, dims);
    c->how = how;
    store_begin(c, src, CALLER);
}

void tile_prefetch(const CUtensorMap *map)
{
    (void)map;
}

void group_commit(void)
{
    if (self->groups.empty() || self->groups.back()->committed)
        self->groups.push_back(std::make_shared<copy_group>());
    self->groups.back()->committed = true;
    order_group_committed();
}

static bool groups_done(const struct fiber *f, uint32_t left, bool read_only)
{
    size_t committed = f->groups.size();
    if (committed != 0 && !f->groups.back()->committed)
        committed--;
    for (size_t i = 0; i + left < committed; i++)
        if (read_only ? f->groups[i]->unread != 0 : f->groups[i]->unwritten != 0)
            return false;
    return true;
}

void group_wait(uint32_t left, bool read_only)
{
    struct place_effect e = place_taken();
    while (!groups_done(self, left, read_only))
        scheduler_block({GROUP_WAIT, left, read_only, CALLER});
    if (!e.removed)
        order_groups_waited(left, read_only);
    while (!self->groups.empty() && self->groups.front()->committed && self->groups.front()->unwritten == 0)
        self->groups.erase(self->groups.begin());
    thread_yield();
}

/* ---- ends ---- */
void copies_cta_left(struct cta *b)
{
    if (b->incoming != 0)
        violation("%s leaves while %u copies to its shared memory are in flight", cta_name(b).c_str(), b->incoming);
    if (b->outgoing != 0)
        violation("%s leaves while %u copies have still to read its shared memory", cta_name(b).c_str(), b->outgoing);
    for (struct copy *c : copies) {
        if (c->block != b)
            continue;
        if (!c->group)
            violation("%s leaves while its %s is in flight", cta_name(b).c_str(), c->name);
        scheduler_operation_ended(c->cluster);
        c->issuer = NULL;
        c->cluster = NULL;
    }
}

void copies_forget(void)
{
    for (struct copy *c : copies)
        delete c;
    copies.clear();
}

} // namespace hopper

/* SPDX-License-Identifier: Apache-2.0 */
/* What threads do together: collectives of a warp, barriers of a CTA, the barrier of a cluster. */
#include <cstring>

#include "tools/hopper/device_memory.h"
#include "tools/hopper/order.h"
#include "tools/hopper/place.h"

namespace hopper
{

/* ---- warp ---- */
typedef void (*together_fn)(uint64_t values[WARP]);

static const char SYNCWARP[] = "__syncwarp";

static bool same_name(const char *a, const char *b)
{
    return a == b || strcmp(a, b) == 0;
}

/* The index of the collective that waits for these lanes; a new one if there is none. */
static size_t find_meeting(const char *name, uint32_t mask, void *from)
{
    std::vector<meeting> &all = self->warp->meetings;
    for (size_t i = 0; i < all.size(); i++) {
        const struct meeting *m = &all[i];
        if ((m->mask & mask) == 0)
            continue;
        if (m->mask == mask && same_name(m->name, name))
            return i;
        violation("%s: reaches %s for lanes %08x, while lanes %08x of its warp wait at %s for lanes %08x (%s): "
                  "all lanes of a collective must be at the same one",
                  fiber_name(self).c_str(), name, mask, m->here, m->name, m->mask, code_location(m->from).c_str());
    }
    all.emplace_back();
    all.back().name = name;
    all.back().mask = mask;
    all.back().here = 0;
    all.back().from = from;
    return all.size() - 1;
}

static void meet_in_order(struct warp *w, uint32_t mask)
{
    struct fiber *lanes[WARP];
    uint32_t count = 0;
    for (uint32_t l = 0; l < WARP; l++)
        if (mask >> l & 1)
            lanes[count++] = &w->block->threads[w->index * WARP + l];
    order_meet(lanes, count);
}

/* All lanes have arrived: gives each lane the values of all, and lets the others continue. */
static void end_meeting(const struct meeting *m)
{
    for (uint32_t l = 0; l < WARP; l++) {
        if ((m->mask >> l & 1) == 0)
            continue;
        if (m->values_of[l])
            memcpy(m->values_of[l], m->values, sizeof(m->values));
        if (l != self->lane)
            scheduler_wake(&self->warp->block->threads[self->warp->index * WARP + l]);
    }
}

/* The lane that comes last calls together(), before any lane continues. values: NULL, or where this lane gets the
 * values of all lanes. */
static void meet(const char *name, uint32_t mask, uint64_t mine, uint64_t *values, together_fn together, void *from)
{
    struct warp *w = self->warp;
    bool ordered = order_on && same_name(name, SYNCWARP) && !place_taken().removed;
    if ((mask >> self->lane & 1) == 0 || (mask & ~w->alive) != 0)
        violation("%s: %s for lanes %08x, but %s (alive: %08x)", fiber_name(self).c_str(), name, mask,
                  mask >> self->lane & 1 ? "some of them have left" : "this lane is not one of them", w->alive);
    size_t index = find_meeting(name, mask, from);
    struct meeting *m = &w->meetings[index];
    m->values[self->lane] = mine;
    m->values_of[self->lane] = values;
    m->here |= 1u << self->lane;
    if (m->here != mask)
        return scheduler_block({name, mask, 0, from});
    if (together)
        together(m->values);
    if (ordered) /* the other collectives exchange values and order no memory */
        meet_in_order(w, mask);
    end_meeting(m);
    w->meetings.erase(w->meetings.begin() + (long)index);
    scheduler_pause(); /* the other lanes continue at the same time */
}

void warp_meet(const char *name, uint32_t mask, uint64_t mine, uint64_t *values)
{
    meet(name, mask, mine, values, NULL, CALLER);
}

void warp_thread_left(struct fiber *f)
{
    struct warp *w = f->warp;
    w->alive &= ~(1u << f->lane);
    for (auto &m : w->meetings)
        if (m.mask >> f->lane & 1)
            violation("%s: leaves, while lanes %08x of its warp wait for it at %s (%s)", fiber_name(f).c_str(), m.here,
                      m.name, code_location(m.from).c_str());
}

/* ---- matrices of 8 x 8 16-bit elements ---- */
struct matrix_lane {
    struct fiber *lane;
    uint32_t address;
    uint32_t *registers;
    const uint32_t *given;
    int count;
    bool transposed;
    void *from;
};

/* Of matrix i, lane i * 8 + row has the address of a row; lane row * 4 + column / 2 has its elements, in register i. */
static void move_matrices(uint64_t values[WARP], bool store)
{
    const struct matrix_lane *first = (const struct matrix_lane *)(uintptr_t)values[0];
    const char *what = store ? "stmatrix" : "ldmatrix";
    for (int i = 0; i < first->count; i++)
        for (int row = 0; row < 8; row++) {
            const struct matrix_lane *at = (const struct matrix_lane *)(uintptr_t)values[i * 8 + row];
            struct cta *c = at->lane->block;
            uint16_t *line = (uint16_t *)shared_bytes_at(c, at->address, 16, 16, what);
            order_shared(at->lane, c, (uint32_t)((uint8_t *)line - c->shared), 16, store ? ACCESS_WRITE : ACCESS_READ,
                         at->from);
            for (int column = 0; column < 8; column++) {
                int major = first->transposed ? column : row, minor = first->transposed ? row : column;
                const struct matrix_lane *holder = (const struct matrix_lane *)(uintptr_t)values[major * 4 + minor / 2];
                if (store) {
                    line[column] = (uint16_t)(holder->given[i] >> (minor % 2 * 16));
                } else {
                    uint16_t *halves = (uint16_t *)&holder->registers[i];
                    halves[minor % 2] = line[column];
                }
            }
            if (store)
                shared_mark_dirty(at->lane, c, (uint32_t)((uint8_t *)line - c->shared), 16);
        }
}

static void store_together(uint64_t values[WARP])
{
    move_matrices(values, true);
}

static void load_together(uint64_t values[WARP])
{
    move_matrices(values, false);
}

void warp_store_matrix(uint32_t address, const uint32_t *registers, int count, bool transposed)
{
    struct matrix_lane mine = {self, address, NULL, registers, count, transposed, CALLER};
    meet("stmatrix", ~0u, (uintptr_t)&mine, NULL, store_together, CALLER);
}

void warp_load_matrix(uint32_t address, uint32_t *registers, int count, bool transposed)
{
    struct matrix_lane mine = {self, address, registers, NULL, count, transposed, CALLER};
    meet("ldmatrix", ~0u, (uintptr_t)&mine, NULL, load_together, CALLER);
}

/* ---- registers ---- */
static uint32_t registers_held(const struct cta *c)
{
    uint32_t sum = 0;
    for (const auto &w : c->warps)
        sum += w.registers;
    return sum;
}

void warpgroup_registers(uint32_t count, bool more)
{
    struct cta *c = self->block;
    struct warp *w = self->warp;
    if (count % 8 != 0 || count < 24 || count > 256)
        violation("%s: setmaxnreg %u: must be 24 to 256 in steps of 8", fiber_name(self).c_str(), count);
    meet(more ? "setmaxnreg.inc" : "setmaxnreg.dec", ~0u, count, NULL, NULL, CALLER);
    if (self->lane != 0)
        return;
    if (more ? count < w->registers : count > w->registers)
        violation("%s: setmaxnreg.%s to %u, but the warp has %u registers a thread", fiber_name(self).c_str(),
                  more ? "inc" : "dec", count, w->registers);
    for (int tries = 0; registers_held(c) - w->registers + count > c->register_pool; tries++) {
        if (tries == 1000)
            violation("%s: setmaxnreg.inc to %u would wait for ever: the CTA's warps hold %u of %u registers a thread",
                      fiber_name(self).c_str(), count, registers_held(c), c->register_pool);
        thread_sleep(100);
    }
    w->registers = count;
}

/* ---- CTA ---- */
static void complete_named(struct named_barrier *b)
{
    b->here = 0;
    b->phase++;
    b->count_of_last = b->counted;
    b->counted = 0;
    order_complete(&b->order);
    for (fiber *f : b->waiting) {
        order_pass(&b->order, f);
        scheduler_wake(f);
    }
    b->waiting.clear();
}

static void arrive_named(uint32_t id, uint32_t threads, bool wait, void *from)
{
    struct cta *c = self->block;
    struct named_barrier *b = &c->named[id];
    if (id >= BARRIERS || threads % WARP != 0)
        violation("%s: barrier %u for %u threads: barriers are numbered below %u, and the threads must be whole warps",
                  fiber_name(self).c_str(), id, threads, (uint32_t)BARRIERS);
    if (b->here != 0 && b->want != threads)
        violation("%s: reaches barrier %u for %u threads, where %u wait for %u", fiber_name(self).c_str(), id, threads,
                  b->here, b->want);
    b->want = threads;
    b->here++;
    order_arrive(&b->order, self);
    if (b->here >= (threads == 0 ? c->alive : threads)) {
        complete_named(b);
        if (wait)
            order_pass(&b->order, self);
        scheduler_pause();
    } else if (wait) {
        b->waiting.push_back(self);
        scheduler_block({"barrier of the CTA", id, threads, from});
    }
}

void block_barrier(uint32_t id, uint32_t threads, bool wait)
{
    arrive_named(id, threads, wait, CALLER);
}

uint32_t block_count(bool predicate)
{
    self->block->named[0].counted += predicate;
    arrive_named(0, 0, true, CALLER);
    return self->block->named[0].count_of_last;
}

void block_thread_left(struct fiber *f)
{
    struct cta *c = f->block;
    struct named_barrier *b = &c->named[0];
    if (b->here != 0 && b->want == 0 && b->here >= c->alive)
        complete_named(b);
}

/* ---- cluster ---- */
static void complete_cluster(struct cluster *c)
{
    c->phase++;
    c->arrived = 0;
    order_complete(&c->order);
    for (fiber *f : c->waiting) {
        order_pass(&c->order, f);
        scheduler_wake(f);
    }
    c->waiting.clear();
}

void cluster_barrier_arrive(void)
{
    struct cluster *c = self->block->cluster;
    meet("barrier.cluster.arrive.aligned", self->warp->alive, 0, NULL, NULL, CALLER);
    if (self->cluster_arrived)
        violation("%s: arrives at the cluster's barrier twice without waiting", fiber_name(self).c_str());
    self->cluster_phase = c->phase + 1;
    self->cluster_arrived = true;
    order_arrive(&c->order, self);
    if (++c->arrived >= c->alive)
        complete_cluster(c);
    thread_yield();
}

void cluster_barrier_wait(void)
{
    struct cluster *c = self->block->cluster;
    meet("barrier.cluster.wait.aligned", self->warp->alive, 0, NULL, NULL, CALLER);
    if (!self->cluster_arrived)
        violation("%s: waits at the cluster's barrier without having arrived", fiber_name(self).c_str());
    self->cluster_arrived = false;
    if (c->phase >= self->cluster_phase)
        return order_pass(&c->order, self);
    c->waiting.push_back(self);
    scheduler_block({"barrier of the cluster", c->phase, 0, CALLER});
}

void cluster_thread_left(struct fiber *f)
{
    struct cluster *c = f->block->cluster;
    if (f->cluster_phase > c->phase)
        c->arrived--; /* it has left after arriving: counted neither as arrived nor as alive */
    if (c->arrived != 0 && c->arrived >= c->alive)
        complete_cluster(c);
}

} // namespace hopper

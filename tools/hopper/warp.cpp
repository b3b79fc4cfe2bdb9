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

static std::shared_ptr<meeting> find_meeting(const char *name, uint32_t mask, void *from)
{
    struct warp *w = self->warp;
    for (auto &m : w->meetings) {
        if ((m->mask & mask) == 0)
            continue;
        if (m->mask == mask && strcmp(m->name, name) == 0)
            return m;
        violation("%s: reaches %s for lanes %08x, while lanes %08x of its warp wait at %s for lanes %08x (%s): "
                  "all lanes of a collective must be at the same one",
                  fiber_name(self).c_str(), name, mask, m->here, m->name, m->mask, code_location(m->from).c_str());
    }
    auto m = std::make_shared<meeting>();
    m->name = name;
    m->mask = mask;
    m->from = from;
    w->meetings.push_back(m);
    return m;
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

/* The lane that comes last calls together(), before any lane goes on. */
static void meet(const char *name, uint32_t mask, uint64_t mine, uint64_t values[WARP], together_fn together,
                 void *from)
{
    struct warp *w = self->warp;
    bool ordered = strcmp(name, "__syncwarp") == 0 && !place_taken().removed;
    if ((mask >> self->lane & 1) == 0 || (mask & ~w->alive) != 0)
        violation("%s: %s for lanes %08x, but %s (alive: %08x)", fiber_name(self).c_str(), name, mask,
                  mask >> self->lane & 1 ? "some of them have left" : "this lane is not one of them", w->alive);
    auto m = find_meeting(name, mask, from);
    m->values[self->lane] = mine;
    m->here |= 1u << self->lane;
    if (m->here != mask) {
        scheduler_block({name, mask, 0, from});
        memcpy(values, m->values, sizeof(m->values));
        return;
    }
    for (size_t i = 0; i < w->meetings.size(); i++)
        if (w->meetings[i] == m)
            w->meetings.erase(w->meetings.begin() + (long)i);
    if (together)
        together(m->values);
    if (ordered) /* the other collectives exchange values and order no memory */
        meet_in_order(w, mask);
    for (uint32_t l = 0; l < WARP; l++)
        if (l != self->lane && (mask >> l & 1))
            scheduler_wake(&w->block->threads[w->index * WARP + l]);
    scheduler_pause(); /* the other lanes go on at the same time */
    memcpy(values, m->values, sizeof(m->values));
}

void warp_meet(const char *name, uint32_t mask, uint64_t mine, uint64_t values[32])
{
    meet(name, mask, mine, values, NULL, CALLER);
}

void warp_thread_left(struct fiber *f)
{
    struct warp *w = f->warp;
    w->alive &= ~(1u << f->lane);
    for (auto &m : w->meetings)
        if (m->mask >> f->lane & 1)
            violation("%s: leaves, while lanes %08x of its warp wait for it at %s (%s)", fiber_name(f).c_str(), m->here,
                      m->name, code_location(m->from).c_str());
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
    uint64_t values[WARP];
    meet("stmatrix", ~0u, (uintptr_t)&mine, values, store_together, CALLER);
}

void warp_load_matrix(uint32_t address, uint32_t *registers, int count, bool transposed)
{
    struct matrix_lane mine = {self, address, registers, NULL, count, transposed, CALLER};
    uint64_t values[WARP];
    meet("ldmatrix", ~0u, (uintptr_t)&mine, values, load_together, CALLER);
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
    uint64_t values[WARP];
    if (count % 8 != 0 || count < 24 || count > 256)
        violation("%s: setmaxnreg %u: must be 24 to 256 in steps of 8", fiber_name(self).c_str(), count);
    meet(more ? "setmaxnreg.inc" : "setmaxnreg.dec", ~0u, count, values, NULL, CALLER);
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
    uint64_t values[WARP];
    meet("barrier.cluster.arrive.aligned", self->warp->alive, 0, values, NULL, CALLER);
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
    uint64_t values[WARP];
    meet("barrier.cluster.wait.aligned", self->warp->alive, 0, values, NULL, CALLER);
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

/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/hopper/scheduler.h"

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <execinfo.h>
#include <mutex>
#include <queue>
#include <thread>
#include <time.h>

#include "tools/hopper/bulk_copy.h"
#include "tools/hopper/fiber.h"
#include "tools/hopper/hopper.h"
#include "tools/hopper/order.h"
#include "tools/hopper/wgmma.h"

/* Kernels read these by CUDA's own names. */
uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace hopper
{

struct coordinates *here;
struct fiber *self;

struct event {
    uint64_t due, tie;
    void (*run)(void *);
    void *object;
    bool operator<(const event &other) const
    {
        return due != other.due ? due > other.due : tie > other.tie;
    }
};

static struct machine {
    std::vector<warp *> ready; /* warps with a lane that can run */
    bool free_lanes;
    uint64_t plan;   /* drawn for each turn of a warp; decides at which of their yields the lanes stop */
    uint64_t yields; /* how often the running lane has yielded in this turn */
    std::priority_queue<event> events;
    uint64_t step, random, launches;
    uint32_t population;
    /* Threads that woke while none could run, with nothing else in between. */
    uint64_t asleep_in_a_row;
    uint64_t napped_ns;  /* how long the scheduler has asked to sleep, in total */
    void *stack_pointer; /* the scheduler's own, while a fiber runs */
    std::vector<std::unique_ptr<launch>> running;
} &machine = *new struct machine();

/* Never destroyed: the scheduler's thread waits here when the process ends. */
static struct mailbox {
    std::mutex lock;
    std::condition_variable news;
    std::atomic<bool> pending;
} &mail = *new mailbox();

/* ---- chance ---- */
uint64_t scheduler_random(void)
{
    machine.random ^= machine.random << 13;
    machine.random ^= machine.random >> 7;
    machine.random ^= machine.random << 17;
    return machine.random * 0x2545f4914f6cdd1dull >> 16;
}

uint32_t scheduler_population(void)
{
    return machine.population;
}

void scheduler_run_after(uint64_t steps, void (*run)(void *), void *object)
{
    machine.events.push({machine.step + steps, scheduler_random(), run, object});
}

void scheduler_run_late(void (*run)(void *), void *object)
{
    static const uint32_t spread[8] = {0, 0, 1, 1, 4, 4, 16, 128}; /* in eighths of the number of threads */
    uint64_t dice = scheduler_random(), most = (uint64_t)spread[dice % 8] * (machine.population / 8 + 8);
    if ((dice >> 8 & 31) == 0)
        most = 768 * (machine.population / 8 + 8); /* a few are so late that others overtake them many times */
    scheduler_run_after(most == 0 ? 0 : scheduler_random() % most, run, object);
}

/* ---- threads ---- */
static void check_stack(const struct fiber *f)
{
    if (!fiber_stack_intact(f->stack))
        violation("stack of %zu bytes overrun: large local arrays?", (size_t)STACK_BYTES);
}

static void leave_fiber(void)
{
    struct fiber *f = self;
    if (machine.plan % 128 == 0) /* seldom, because the end of a stack is far from what is in the cache */
        check_stack(f);
    hopper_fiber_switch(&f->stack_pointer, machine.stack_pointer);
}

static void make_ready(struct fiber *f)
{
    struct warp *w = f->warp;
    f->state = THREAD_READY;
    w->ready |= 1u << f->lane;
    if (!w->queued)
        machine.ready.push_back(w);
    w->queued = true;
}

void scheduler_abandon_fiber(void)
{
    hopper_fiber_switch(&self->stack_pointer, machine.stack_pointer);
    abort();
}

void scheduler_pause(void)
{
    make_ready(self);
    leave_fiber();
}

/* Whether a lane stops depends only on the plan and on how many yields it has passed. Lanes of one turn that execute
 * the same code therefore stop at the same place, as lanes of a GPU do that execute one instruction. */
void thread_yield(void)
{
    if (scheduler_mix(machine.plan + ++machine.yields) >> 32 & 3)
        return;
    scheduler_pause();
}

static void wake_sleeper(void *object)
{
    make_ready((struct fiber *)object);
}

/* Most threads sleep long, and longer after many times. Otherwise thousands of threads that poll a flag would take most
 * turns from threads with work. A quarter poll again soon, and may be the first to see a change. Lanes of one turn
 * sleep equally long, as a warp does that executes one instruction. */
void thread_sleep(uint32_t ns)
{
    uint64_t dice = scheduler_mix(machine.plan), most = 16 + ns / 8 + machine.population / 8;
    uint32_t often = self->sleeps / 8 < 3 ? self->sleeps++ / 8 : 3;
    self->state = THREAD_ASLEEP;
    self->last_read = NULL;
    scheduler_run_after((dice >> 2) % (dice % 4 == 0 ? most : most << (3 + often)), wake_sleeper, self);
    leave_fiber();
}

int64_t thread_clock(void)
{
    return (int64_t)(machine.step * 16);
}

/* The scheduler's thread runs all kernels. Its time is its CPU time and the naps that it asked for, however long they
 * lasted. So on a busy host time passes more slowly, and waits of kernels do not time out because of the load. */
uint64_t thread_timer_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec + machine.napped_ns;
}

static thread_local bool is_scheduler;

bool scheduler_is_here(void)
{
    return is_scheduler;
}

int thread_gettime(int clock, struct timespec *now)
{
    if (!is_scheduler)
        return clock_gettime(clock, now);
    uint64_t ns = thread_timer_ns();
    *now = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
    return 0;
}

/* ---- deadlock ---- */
static void check_deadlock(struct cluster *c)
{
    if (c->awake != 0 || c->in_flight != 0 || c->alive == 0)
        return;
    violation_set("deadlock in " + kernel_name(c->of->kernel) + ", device " + std::to_string(c->of->device) +
                  ": every thread of a cluster waits, and no copy or product is under way" + describe_waits(c));
    throw violation_raised();
}

/* Runs on the scheduler's own stack, where check_deadlock() may throw. The cluster may be gone by now. */
static void check_later(void *object)
{
    for (auto &l : machine.running)
        for (auto &c : l->running)
            if (c.get() == object)
                check_deadlock(c.get());
}

void scheduler_block(const struct wait_reason &reason)
{
    struct cluster *c = self->block->cluster;
    self->state = THREAD_BLOCKED;
    self->sleeps = 0;
    self->wait = reason;
    if (--c->awake == 0 && c->in_flight == 0)
        scheduler_run_after(0, check_later, c);
    leave_fiber();
}

void scheduler_wake(struct fiber *f)
{
    f->block->cluster->awake++;
    make_ready(f);
}

void scheduler_operation_began(struct cluster *c)
{
    c->in_flight++;
}

void scheduler_operation_ended(struct cluster *c)
{
    if (--c->in_flight == 0 && c->awake == 0)
        scheduler_run_after(0, check_later, c);
}

/* ---- launches ---- */
static void thread_left(struct fiber *f);

static void fiber_main(void)
{
    struct fiber *f = self;
    f->block->of->body();
    f = self;
    thread_left(f);
    hopper_fiber_switch(&f->stack_pointer, machine.stack_pointer);
    abort();
}

/* A thread has a stack from its first turn until it has left. Most threads of plain kernels run to their end in one
 * turn, so they use the same stack one after the other, and it stays in the cache. */
static void give_stack_back(struct fiber *f)
{
    if (f->stack)
        fiber_stack_return(f->stack);
    f->stack = NULL;
}

static void fill_threads(struct cta *b)
{
    const struct launch *l = b->of;
    uint32_t threads = l->block.x * l->block.y * l->block.z, warps = (threads + WARP - 1) / WARP;
    b->threads.resize(threads);
    b->warps.resize(warps);
    b->alive = threads;
    b->register_pool = 65536 / (threads == 0 ? 1 : threads) / 8 * 8;
    for (uint32_t i = 0; i < warps; i++) {
        uint32_t lanes = threads - i * WARP;
        b->warps[i].block = b;
        b->warps[i].index = i;
        b->warps[i].alive = lanes >= WARP ? ~0u : (1u << lanes) - 1;
        b->warps[i].registers = b->register_pool;
        b->warps[i].writes_fenced = memory_write_count(); /* a launch sees all writes that came before it */
    }
    b->register_pool *= warps;
    for (uint32_t i = 0; i < threads; i++) {
        struct fiber *f = &b->threads[i];
        f->at.thread = {i % l->block.x, i / l->block.x % l->block.y, i / (l->block.x * l->block.y)};
        f->at.block = b->id;
        f->at.block_dim = l->block;
        f->at.grid_dim = l->grid;
        f->at.cluster_rank = b->rank;
        f->at.cluster_size = l->cluster_size;
        f->block = b;
        f->warp = &b->warps[i / WARP];
        f->thread = i;
        f->lane = i % WARP;
        make_ready(f);
    }
}

static void fill_cta(struct cta *b, uint32_t index)
{
    const struct launch *l = b->of;
    b->index = index;
    b->id = {index % l->grid.x, index / l->grid.x % l->grid.y, index / (l->grid.x * l->grid.y)};
    b->shared_bytes = l->shared_bytes;
    if (l->shared_bytes != 0) {
        b->shared = (uint8_t *)aligned_alloc(1024, (l->shared_bytes + 1023) / 1024 * 1024);
        memset(b->shared, 0xff, l->shared_bytes); /* not-a-numbers; on a GPU, the old contents */
    }
    b->dirty.resize((l->shared_bytes + 15) / 16);
    b->barriers.resize((l->shared_bytes + 7) / 8);
    for (uint32_t i = 0; i * WARPGROUP < l->block.x * l->block.y * l->block.z; i++)
        b->warpgroups.push_back(warpgroup_new(b));
    fill_threads(b);
    order_cta_begins(b);
}

static bool start_cluster(struct launch *l)
{
    auto c = std::make_unique<cluster>();
    c->of = l;
    for (uint32_t i = 0; i < l->cluster_size; i++) {
        c->ctas.push_back(std::make_unique<cta>());
        c->ctas[i]->of = l;
        c->ctas[i]->cluster = c.get();
        c->ctas[i]->rank = i;
    }
    if (!sms_reserve(l, c.get()))
        return false;
    for (uint32_t i = 0; i < l->cluster_size; i++) {
        fill_cta(c->ctas[i].get(), l->started * l->cluster_size + i);
        c->alive += c->ctas[i]->alive;
    }
    c->awake = c->alive;
    machine.population += c->alive;
    l->started++;
    l->running.push_back(std::move(c));
    return true;
}

static void start_streams(void *)
{
    streams_start_ready();
}

static void start_clusters(void)
{
    for (auto &l : machine.running) {
        while (l->started < l->clusters && start_cluster(l.get())) {
        }
        if (l->started < l->clusters || l->placed)
            continue;
        l->placed = true;
        scheduler_run_after(1, start_streams, NULL); /* later work in the same hardware queue may start now */
    }
}

void scheduler_launch(std::unique_ptr<launch> l)
{
    l->number = machine.launches++;
    machine.running.push_back(std::move(l));
    start_clusters();
}

void scheduler_retire(struct launch *l)
{
    if (l->finished < l->clusters || l->in_flight != 0)
        return;
    for (size_t i = 0; i < machine.running.size(); i++)
        if (machine.running[i].get() == l) {
            void *stream = l->stream;
            clocks_ref seen = order_launch_ends(l);
            machine.running.erase(machine.running.begin() + (long)i);
            stream_finished(stream, seen);
            return;
        }
}

static void free_cluster(struct cluster *c)
{
    for (auto &b : c->ctas) {
        order_cta_ends(b.get());
        for (auto &f : b->threads)
            give_stack_back(&f);
        free(b->shared);
        sms_release(b.get());
    }
}

/* All threads of the cluster have left. Runs on the scheduler's own stack: the last of them is freed with it. */
static void remove_cluster(void *object)
{
    struct cluster *c = (struct cluster *)object;
    struct launch *l = c->of;
    for (size_t i = 0; i < l->running.size(); i++)
        if (l->running[i].get() == c) {
            free_cluster(c);
            l->running.erase(l->running.begin() + (long)i);
            break;
        }
    l->finished++;
    start_clusters();
    scheduler_retire(l);
}

static void thread_left(struct fiber *f)
{
    struct cta *b = f->block;
    struct cluster *c = b->cluster;
    check_stack(f);
    f->state = THREAD_GONE;
    order_thread_ends(f);
    wgmma_thread_left(f);
    warp_thread_left(f);
    b->alive--;
    c->alive--;
    block_thread_left(f);
    cluster_thread_left(f);
    if (b->alive == 0)
        copies_cta_left(b);
    machine.population--;
    if (--c->awake == 0 && c->in_flight == 0)
        scheduler_run_after(0, check_later, c);
    if (c->alive == 0)
        scheduler_run_after(0, remove_cluster, c);
}

/* ---- the loop ---- */
/* For a while some warps are passed over again and again, so that CTAs and ranks get far out of step. */
static struct warp *choose(void)
{
    static const uint8_t laziness[8] = {0, 0, 0, 0, 128, 230, 250, 254};
    struct warp *w;
    size_t i = 0;
    for (int tries = 0; tries < 6; tries++) {
        uint64_t dice = scheduler_random();
        i = (dice >> 16) % machine.ready.size();
        w = machine.ready[i];
        if ((dice & 0x3ff) == 0)
            w->lazy = laziness[dice >> 10 & 7];
        if ((dice >> 40 & 255) >= w->lazy)
            break;
    }
    w = machine.ready[i];
    machine.ready[i] = machine.ready.back();
    machine.ready.pop_back();
    w->queued = false;
    return w;
}

static void run_events(void)
{
    bool idle = machine.ready.empty();
    while (!machine.events.empty() && machine.events.top().due <= machine.step) {
        event e = machine.events.top();
        machine.events.pop();
        machine.asleep_in_a_row = e.run == wake_sleeper ? machine.asleep_in_a_row + idle : 0;
        e.run(e.object);
    }
}

static void run_fiber(struct fiber *f)
{
    self = f;
    machine.yields = 0;
    here = &f->at;
    threadIdx = f->at.thread;
    blockIdx = f->at.block;
    blockDim = f->at.block_dim;
    gridDim = f->at.grid_dim;
    if (!f->stack) {
        f->stack = fiber_stack_take();
        f->stack_pointer = fiber_prepare(f->stack, fiber_main);
    }
    hopper_fiber_switch(&machine.stack_pointer, f->stack_pointer);
    self = NULL;
    here = NULL;
    if (f->state == THREAD_GONE)
        give_stack_back(f);
    if (violation_text()[0] != 0)
        throw violation_raised();
}

/* Brings what a switch to the thread touches into the cache. */
static void fetch_fiber(const struct fiber *f)
{
    for (uint32_t line = 0; line < 3; line++)
        __builtin_prefetch((const uint8_t *)f + line * 64);
}

static void fetch_stack(const struct fiber *f)
{
    for (uint32_t line = 0; line < 6 && f->stack; line++)
        __builtin_prefetch((const uint8_t *)f->stack_pointer + line * 64);
}

/* Runs all lanes that can run, each to its next stop, as a GPU nearly always does. With HOPPER_LANES=free it runs one
 * lane alone, so that lanes get as far apart as their collectives allow. CUDA promises no more than that. */
static void run_warp(struct warp *w)
{
    uint32_t turn = (uint32_t)scheduler_random() % WARP, lanes = w->ready, first = w->index * WARP;
    struct fiber *running[WARP];
    uint32_t count = 0;
    if (machine.free_lanes) {
        while ((lanes & 1u << turn) == 0)
            turn = (turn + 1) % WARP;
        lanes = 1u << turn;
    }
    w->ready &= ~lanes;
    machine.plan = scheduler_random();
    for (lanes = lanes >> turn | lanes << (WARP - turn) % WARP; lanes != 0; lanes &= lanes - 1)
        fetch_fiber(running[count++] = &w->block->threads[first + (turn + (uint32_t)__builtin_ctz(lanes)) % WARP]);
    for (uint32_t i = 0; i < count; i++) {
        fetch_stack(running[i + 2 < count ? i + 2 : count - 1]);
        run_fiber(running[i]);
    }
    if (w->ready != 0 && !w->queued) {
        w->queued = true;
        machine.ready.push_back(w);
    }
}

/* All threads poll memory that only host threads change, so this leaves the core to host threads. sched_yield() would
 * not: Linux may let a thread that sometimes sleeps wait for seconds when another thread of its session always runs
 * (autogroups; seen for up to 11 s with 6.18). */
static void nap(void)
{
    enum : uint64_t { AFTER = 4096, EVERY = 128 };
    static const struct timespec pause = {0, 50000};
    if (machine.asleep_in_a_row < AFTER)
        return;
    machine.asleep_in_a_row = AFTER - EVERY;
    nanosleep(&pause, NULL);
    machine.napped_ns += (uint64_t)pause.tv_nsec;
}

/* No thread can run now: moves time on to the next event, or waits for host threads. */
static void pass_time(void)
{
    if (!machine.events.empty()) {
        machine.step = machine.events.top().due;
        nap();
        return;
    }
    std::unique_lock<std::mutex> held(mail.lock);
    mail.news.wait(held, [] { return mail.pending.load(); });
}

static void run_some(void)
{
    if (mail.pending.load(std::memory_order_relaxed) && mail.pending.exchange(false)) /* the load alone is cheap */
        streams_start_ready();
    machine.step++;
    run_events();
    if (machine.ready.empty())
        pass_time();
    else
        run_warp(choose());
}

/* Ends everything that runs, after a violation. */
static void drop_all(void)
{
    machine.events = std::priority_queue<event>();
    machine.ready.clear();
    copies_forget();
    for (auto &l : machine.running)
        for (auto &c : l->running)
            free_cluster(c.get());
    machine.running.clear();
    machine.population = 0;
    streams_fail();
}

static void scheduler_main(void)
{
    void *caller;
    is_scheduler = true;
    (void)backtrace(&caller, 1); /* the first call loads a library, and needs more stack than a CUDA thread has */
    for (;;) {
        try {
            run_some();
        } catch (const violation_raised &) {
            self = NULL;
            violation_report();
            drop_all();
        }
    }
}

static void start_scheduler(void)
{
    static std::once_flag once;
    std::call_once(once, [] {
        const char *lanes = getenv("HOPPER_LANES");
        machine.free_lanes = lanes && strcmp(lanes, "free") == 0;
        machine.random = hopper_seed() * 0x9e3779b97f4a7c15ull | 1;
        for (int i = 0; i < 8; i++)
            (void)scheduler_random();
        std::thread(scheduler_main).detach();
    });
}

void scheduler_notify(void)
{
    start_scheduler();
    std::lock_guard<std::mutex> held(mail.lock);
    mail.pending = true;
    mail.news.notify_one();
}

} // namespace hopper

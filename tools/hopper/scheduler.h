/* SPDX-License-Identifier: Apache-2.0 */
/* The emulated machine: launches, clusters, CTAs, warps, threads, and the scheduler, which is the one OS thread that
 * runs them all. Only that thread may touch what is declared here; host threads call scheduler_notify(), and
 * reach streams (stream.h) under their lock. */
#ifndef TOOLS_HOPPER_SCHEDULER_H
#define TOOLS_HOPPER_SCHEDULER_H

#include <functional>
#include <memory>
#include <stdint.h>
#include <vector>

#include "tools/hopper/violation.h"
#include "tools/hopper/instructions.h"
#include "tools/hopper/order_clock.h"

namespace hopper
{

enum : uint32_t { SHARED_BASE = 1024, OWN_WINDOW = 0, WARP = 32, WARPGROUP = 128, BARRIERS = 16 };

struct cta;
struct cluster;
struct launch;
struct warp;
struct warpgroup;
struct order_thread;
struct order_cta;

/* The bulk stores of one thread between two commits. */
struct copy_group {
    uint32_t unread = 0, unwritten = 0;
    bool committed = false;
};

enum thread_state { THREAD_READY, THREAD_ASLEEP, THREAD_BLOCKED, THREAD_GONE };

/* The reason why a thread is blocked; shown when nothing can run any more. */
struct wait_reason {
    const char *what;
    uint64_t object, value;
    void *from; /* address in the kernel */
};

/* One CUDA thread. */
struct fiber {
    struct coordinates at;
    void *stack_pointer;
    uint8_t *stack; /* NULL before its first turn, and once it has left */
    struct cta *block;
    struct warp *warp;
    uint32_t thread, lane;
    enum thread_state state;
    struct wait_reason wait;
    const void *last_read; /* of its atomic loads since it last slept; NULL: none */
    uint32_t sleeps;       /* since it last was blocked, wrote an atomic word or fenced */
    /* 16-byte granules of shared memory that it has written and not yet fenced */
    std::vector<uint32_t> dirty;
    std::vector<std::shared_ptr<copy_group>> groups; /* there are only a few */
    uint64_t cluster_phase; /* the phase of the cluster barrier that its last arrival helps to complete */
    bool cluster_arrived;   /* it has arrived at the cluster barrier, and has not waited since */
    uint64_t wgmma_issued;
    std::vector<uint64_t> wgmma_groups; /* how many operations had been issued at each commit */
    bool wgmma_fenced;
    std::shared_ptr<struct order_thread> order; /* members named `order`, here and below: see order.h */
};

/* The lanes of a warp that have reached a collective. */
struct meeting {
    const char *name;
    uint32_t mask, here;
    uint64_t values[WARP];
    uint64_t *values_of[WARP]; /* where each lane gets all values, or NULL */
    void *from;
};

struct warp {
    struct cta *block;
    uint32_t index, alive;
    uint32_t ready;
    bool queued;
    uint8_t lazy; /* the scheduler passes over the warp in this many of 256 choices; changes at random */
    uint32_t registers;
    uint32_t writes_fenced; /* memory_write_count() at its last fence.proxy.async.global */
    std::vector<meeting> meetings;
};

struct named_barrier {
    uint32_t here = 0, want = 0; /* want 0: every thread of the CTA that has not left */
    uint32_t counted = 0, count_of_last = 0;
    uint64_t phase = 0;
    std::vector<fiber *> waiting;
    struct order_barrier order;
};

struct mbarrier {
    uint32_t arrivals, pending;
    int64_t bytes; /* bytes that are expected and have not arrived */
    uint64_t phase;
    std::vector<fiber *> waiting;
    struct order_barrier order;
    struct order_sum narrow; /* releases that arrived with a scope too narrow for the waiting threads */
};

struct cta {
    struct launch *of;
    struct cluster *cluster;
    uint32_t rank, index, alive;
    uint3 id;
    int sm;
    uint8_t *shared;
    uint32_t shared_bytes;
    std::vector<uint32_t> dirty; /* per 16-byte granule: 1 + the thread that wrote it last and has not fenced since */
    std::vector<std::unique_ptr<mbarrier>> barriers; /* indexed by shared offset / 8 */
    struct named_barrier named[BARRIERS];
    std::vector<fiber> threads;
    std::vector<warp> warps;
    std::vector<std::shared_ptr<warpgroup>> warpgroups;
    uint32_t incoming, outgoing; /* copies that have still to write, and still to read, its shared memory */
    uint32_t register_pool;
    std::shared_ptr<struct order_cta> order;
};

struct cluster {
    struct launch *of;
    std::vector<std::unique_ptr<cta>> ctas;
    uint32_t alive, awake; /* threads; awake: THREAD_READY or THREAD_ASLEEP */
    uint32_t in_flight;    /* asynchronous operations in flight that may wake a thread */
    uint64_t phase;
    uint32_t arrived;
    std::vector<fiber *> waiting;
    struct order_barrier order;
};

struct launch {
    const void *kernel;
    std::function<void()> body;
    int device;
    dim3 grid, block;
    uint32_t cluster_size, shared_bytes;
    uint32_t clusters, started, finished;
    bool placed;        /* all clusters have been started */
    uint32_t in_flight; /* writes to global memory that have not landed */
    uint64_t number;
    std::vector<std::unique_ptr<cluster>> running;
    void *stream;
    clocks_ref begin; /* what its stream knew when it began */
    struct order_sum end;
};

extern struct fiber *self;
/* Whether this is the scheduler's OS thread. */
bool scheduler_is_here(void);

/* ---- called by the other parts of the emulator, on the scheduler's thread ---- */
uint64_t scheduler_random(void);
/* A number that looks random and depends only on x. */
static inline uint64_t scheduler_mix(uint64_t x)
{
    x *= 0x9e3779b97f4a7c15ull;
    return x ^ x >> 29;
}
/* The number of CUDA threads that run now. Random delays grow with it. */
uint32_t scheduler_population(void);
/* Runs run(object) after a random delay, which is sometimes zero and sometimes very long; or after a given number of
 * steps. */
void scheduler_run_late(void (*run)(void *), void *object);
void scheduler_run_after(uint64_t steps, void (*run)(void *), void *object);
/* In an instruction: the address in the kernel that called it. */
#define CALLER __builtin_return_address(0)
/* Stops the running thread until scheduler_wake(). reason.from: CALLER. */
void scheduler_block(const struct wait_reason &reason);
void scheduler_wake(struct fiber *f);
/* Stops the running thread, which continues together with the lanes of its warp that can run now. */
void scheduler_pause(void);
/* Leaves the running thread for ever; the scheduler then ends all launches. */
[[noreturn]] void scheduler_abandon_fiber(void);
/* Describes the object that f waits for; mbarrier.cpp. */
std::string describe_wait(const struct fiber *f);
/* Describes which warps wait for what, in one line for each different wait of a CTA; deadlock.cpp. */
std::string describe_waits(const struct cluster *c);
/* Counts the asynchronous operations of a cluster: while one is in flight, a waiting cluster is not deadlocked. */
void scheduler_operation_began(struct cluster *c);
void scheduler_operation_ended(struct cluster *c);
/* Starts the launch's clusters as soon as each has room. stream_finished() is called when the launch is over. */
void scheduler_launch(std::unique_ptr<launch> l);
void scheduler_retire(struct launch *l);
/* A thread, or the last thread of a CTA, has left. That may complete a barrier that others wait at. */
void block_thread_left(struct fiber *f);
void cluster_thread_left(struct fiber *f);
void warp_thread_left(struct fiber *f);
void copies_cta_left(struct cta *c);

/* ---- for host threads ---- */
/* Tells the scheduler that streams have new work. */
void scheduler_notify(void);

/* ---- defined by stream.cpp, called on the scheduler's thread ---- */
/* Starts the work of all streams that can start. */
void streams_start_ready(void);
void stream_finished(void *stream, const clocks_ref &seen);
void streams_fail(void);

/* ---- defined by occupancy.cpp ---- */
/* Reserves room on SMs for all CTAs of a cluster; false: there is not enough now. */
bool sms_reserve(struct launch *l, struct cluster *c);
void sms_release(struct cta *c);

} // namespace hopper

#endif

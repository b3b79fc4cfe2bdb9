/* SPDX-License-Identifier: Apache-2.0 */
/* The emulated machine: launches, CTAs, threads, and the one OS thread that runs them all. Everything here belongs to
 * that thread, except what engine_submit() and the streams (stream.h) guard by their lock. */
#ifndef TOOLS_HOPPER_SCHEDULER_H
#define TOOLS_HOPPER_SCHEDULER_H

#include <deque>
#include <functional>
#include <memory>
#include <stdint.h>
#include <vector>

#include "tools/hopper/violation.h"
#include "tools/hopper/instructions.h"

namespace hopper
{

enum : uint32_t { SHARED_BASE = 1024, OWN_WINDOW = 0, WARP = 32, WARPGROUP = 128, BARRIERS = 16 };

struct cta;
struct cluster;
struct launch;
struct warp;
struct warpgroup;

/* Bulk stores of one thread between two commits. */
struct copy_group {
    uint32_t unread = 0, unwritten = 0;
    bool committed = false;
};

enum thread_state { THREAD_READY, THREAD_ASLEEP, THREAD_BLOCKED, THREAD_GONE };

/* What a blocked thread waits for. */
struct wait_reason {
    const char *what;
    uint64_t object, value;
    void *from; /* address in the kernel */
};

/* One CUDA thread. */
struct fiber {
    struct place at;
    void *stack_pointer;
    uint8_t *stack;
    struct cta *block;
    struct warp *lanes;
    uint32_t thread, lane;
    enum thread_state state;
    struct wait_reason wait;
    /* shared memory written and not yet fenced: granules */
    std::vector<uint32_t> dirty;
    std::deque<std::shared_ptr<copy_group>> groups;
    uint64_t cluster_phase; /* of the cluster barrier: the one that its last arrival completes */
    bool cluster_arrived;   /* and has not waited since */
    uint64_t barrier_phase; /* of what it waits for */
    uint64_t wgmma_issued;
    std::deque<uint64_t> wgmma_groups; /* operations issued up to each commit */
    bool wgmma_fenced;
};

/* Lanes that have come to a collective. */
struct meeting {
    const char *name;
    uint32_t mask, here, left;
    uint64_t values[WARP];
    void *from;
};

struct warp {
    struct cta *block;
    uint32_t index, alive;
    uint32_t ready;
    bool queued;
    uint8_t lazy; /* of 256: how often it is passed over; changes at random */
    uint32_t registers;
    uint32_t writes_fenced; /* what copies had written to global memory at its last fence.proxy.async.global */
    std::vector<std::shared_ptr<meeting>> meetings;
};

struct named_barrier {
    uint32_t here = 0, want = 0; /* want 0: every thread that is still there */
    uint32_t counted = 0, count_of_last = 0;
    uint64_t phase = 0;
    std::vector<fiber *> waiting;
};

struct mbarrier {
    uint32_t arrivals, pending;
    int64_t bytes; /* still to come */
    uint64_t phase;
    std::vector<fiber *> waiting;
};

struct cta {
    struct launch *of;
    struct cluster *group;
    uint32_t rank, index, alive;
    uint3 id;
    int sm;
    uint8_t *shared;
    uint32_t shared_bytes;
    std::vector<uint32_t> dirty; /* by granule of 16 bytes: 1 + thread that wrote it last, without a fence since */
    std::vector<std::unique_ptr<mbarrier>> barriers; /* by offset / 8 */
    struct named_barrier named[BARRIERS];
    std::vector<fiber> threads;
    std::vector<warp> warps;
    std::vector<std::shared_ptr<warpgroup>> warpgroups;
    uint32_t incoming, outgoing; /* copies that will write, or have still to read, its shared memory */
    uint32_t register_pool;
};

struct cluster {
    struct launch *of;
    std::vector<std::unique_ptr<cta>> ctas;
    uint32_t alive, awake; /* threads; awake: ready or asleep */
    uint32_t in_flight;    /* asynchronous operations that may wake one */
    uint64_t phase;
    uint32_t arrived;
    std::vector<fiber *> waiting;
};

struct launch {
    const void *kernel;
    std::function<void()> body;
    int device;
    dim3 grid, block;
    uint32_t cluster_size, shared_bytes;
    uint32_t clusters, placed, gone;
    uint32_t in_flight; /* writes to global memory that have not landed */
    uint64_t number;
    std::vector<std::unique_ptr<cluster>> running;
    void *stream;
};

extern struct fiber *self;

/* ---- for the parts of the machine ---- */
uint64_t engine_random(void);
/* Threads that live now: the unit in which delays are chosen. */
uint32_t engine_population(void);
/* Runs run(object) after a delay that is sometimes none and sometimes very long. */
void engine_later(void (*run)(void *), void *object);
void engine_after(uint64_t steps, void (*run)(void *), void *object);
/* The running thread stops until engine_wake(). from: __builtin_return_address(0) of what the kernel called. */
void engine_block(const struct wait_reason &reason);
void engine_wake(struct fiber *f);
/* The running thread stops, and goes on with those lanes of its warp that can go on now. */
void engine_stop(void);
/* Leaves the running thread for good, for the engine to end everything. */
[[noreturn]] void engine_abandon(void);
/* What is known about the object of a wait; mbarrier.cpp. */
std::string describe_wait(const struct fiber *f);
/* An asynchronous operation of this cluster begins or ends. */
void engine_begin(struct cluster *c);
void engine_end(struct cluster *c);
/* Every cluster that has room starts; when a launch is over stream_finished() is told. */
void engine_launch(std::unique_ptr<launch> l);
void engine_retire(struct launch *l);
/* A thread has left, which may complete what others wait for. */
void block_thread_left(struct fiber *f);
void cluster_thread_left(struct fiber *f);
void warp_thread_left(struct fiber *f);
void copy_cta_left(struct cta *c);

/* ---- for host threads ---- */
void engine_start(void);
/* There is something for engine_pump(). */
void engine_notify(void);
/* Defined by the streams: start what can start. On the engine's thread. */
void stream_pump(void);
void stream_finished(void *stream);
void stream_all_failed(void);
/* Room for one more cluster; false: none now. */
bool device_place(struct launch *l, struct cluster *c);
void device_vacate(struct cta *c);

} // namespace hopper

#endif

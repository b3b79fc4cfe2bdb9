/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/hopper/stream.h"

#include <condition_variable>
#include <cstring>
#include <mutex>
#include <time.h>

#include "tools/hopper/device_memory.h"
#include "tools/hopper/order.h"

namespace hopper
{

/* Never destroyed: the scheduler's thread may still be at work when the process ends. */
static std::mutex &lock = *new std::mutex(); /* protects everything below, and every stream and event */
static std::condition_variable &changed = *new std::condition_variable();
static std::vector<std::unique_ptr<stream_state>> &streams = *new std::vector<std::unique_ptr<stream_state>>();
static uint64_t numbers;
static bool failed;

struct stream_state *stream_open(int device, bool blocking)
{
    std::lock_guard<std::mutex> held(lock);
    streams.push_back(std::make_unique<stream_state>());
    streams.back()->device = device;
    streams.back()->blocking = blocking;
    return streams.back().get();
}

void stream_close(struct stream_state *s)
{
    std::lock_guard<std::mutex> held(lock);
    for (size_t i = 0; i < streams.size(); i++)
        if (streams[i].get() == s) {
            streams.erase(streams.begin() + (long)i);
            return;
        }
}

struct stream_state *stream_of(cudaStream_t handle, int device)
{
    static struct stream_state *null_streams[64]; /* guarded by lock */
    if (handle && handle != cudaStreamLegacy && handle != cudaStreamPerThread)
        return (struct stream_state *)handle;
    {
        std::lock_guard<std::mutex> held(lock);
        if (null_streams[device])
            return null_streams[device];
    }
    struct stream_state *s = stream_open(device, true);
    std::lock_guard<std::mutex> held(lock);
    if (!null_streams[device]) {
        null_streams[device] = s;
        s->null = true;
    }
    return null_streams[device];
}

cudaError_t stream_enqueue(struct stream_state *s, work w)
{
    {
        std::lock_guard<std::mutex> held(lock);
        if (failed)
            return cudaErrorLaunchFailure;
        if (s->into) {
            s->into->nodes.emplace_back(s, std::move(w));
            return cudaSuccess;
        }
        w.number = numbers++;
        w.host_seen = order_host();
        s->queue.push_back(std::move(w));
    }
    scheduler_notify();
    return cudaSuccess;
}

template <class Condition> static cudaError_t wait_until(Condition condition)
{
    std::unique_lock<std::mutex> held(lock);
    changed.wait(held, [&] { return failed || condition(); });
    return failed ? cudaErrorLaunchFailure : cudaSuccess;
}

/* Waits only for what was enqueued before the call. */
cudaError_t stream_wait(struct stream_state *s)
{
    uint64_t until;
    {
        std::lock_guard<std::mutex> held(lock);
        until = numbers;
    }
    return wait_until([&] {
        if (!s->queue.empty() && s->queue.front().number < until)
            return false;
        order_host_saw(s->seen);
        return true;
    });
}

bool stream_idle(struct stream_state *s)
{
    std::lock_guard<std::mutex> held(lock);
    if (s->queue.empty())
        order_host_saw(s->seen);
    return s->queue.empty() || failed;
}

cudaError_t stream_wait_device(int device)
{
    uint64_t until;
    {
        std::lock_guard<std::mutex> held(lock);
        until = numbers;
    }
    return wait_until([&] {
        for (auto &s : streams)
            if (s->device == device && !s->queue.empty() && s->queue.front().number < until)
                return false;
        for (auto &s : streams)
            if (s->device == device)
                order_host_saw(s->seen);
        return true;
    });
}

cudaError_t stream_wait_kernels(int device)
{
    return wait_until([&] {
        for (auto &s : streams)
            if (s->device == device && !s->queue.empty() && s->queue.front().started &&
                s->queue.front().kind == WORK_LAUNCH)
                return false;
        return true;
    });
}

bool stream_captures(struct stream_state *s)
{
    std::lock_guard<std::mutex> held(lock);
    return s->into;
}

cudaError_t stream_record(struct stream_state *s, struct event_state *e)
{
    work w = {};
    w.kind = WORK_RECORD;
    w.event = e;
    {
        std::lock_guard<std::mutex> held(lock);
        e->captured = s->into;
        w.count = s->into ? 0 : ++e->recorded;
    }
    return stream_enqueue(s, w);
}

cudaError_t stream_wait_event(struct stream_state *s, struct event_state *e)
{
    work w = {};
    w.kind = WORK_WAIT;
    w.event = e;
    {
        std::lock_guard<std::mutex> held(lock);
        w.count = e->recorded;
        if (!s->into && e->captured) {
            s->into = e->captured;
            s->into->joined.push_back(s);
        }
    }
    return stream_enqueue(s, w);
}

cudaError_t event_wait(struct event_state *e)
{
    return wait_until([&] {
        if (e->done < e->recorded)
            return false;
        order_host_saw(e->seen);
        return true;
    });
}

bool event_reached(struct event_state *e)
{
    std::lock_guard<std::mutex> held(lock);
    if (e->done >= e->recorded)
        order_host_saw(e->seen);
    return failed || e->done >= e->recorded;
}

bool capture_begin(struct stream_state *s, struct capture *c)
{
    std::lock_guard<std::mutex> held(lock);
    if (s->into)
        return false;
    c->origin = s;
    c->joined = {s};
    s->into = c;
    return true;
}

bool capture_end(struct stream_state *s, struct capture *c)
{
    std::lock_guard<std::mutex> held(lock);
    if (s->into != c || c->origin != s)
        return false;
    for (auto *joined : c->joined)
        joined->into = NULL;
    for (auto &node : c->nodes)
        if (node.second.event)
            node.second.event->captured = NULL;
    return true;
}

/* ---- on the scheduler's thread ---- */
/* The null stream of a device waits for its blocking streams, and they wait for it. */
/* With CUDA_DEVICE_MAX_CONNECTIONS=1 all work of a device goes through one hardware queue: work starts when all earlier
 * work has started, including all CTAs of earlier launches. */
static bool queue_holds_locked(const struct stream_state *s)
{
    static const char *const connections = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
    if (!connections || strtol(connections, NULL, 10) != 1)
        return false;
    for (auto &other : streams)
        for (const work &w : other->queue)
            if (other.get() != s && other->device == s->device && w.number < s->queue.front().number &&
                (!w.started || (w.running && !w.running->placed)))
                return true;
    return false;
}

static bool may_start_locked(const struct stream_state *s)
{
    const work &w = s->queue.front();
    if (queue_holds_locked(s))
        return false;
    if (w.kind == WORK_WAIT && w.event->done < w.count)
        return false;
    if (!s->blocking)
        return true;
    for (auto &other : streams)
        if (other.get() != s && other->device == s->device && other->blocking && (other->null || s->null) &&
            !other->queue.empty() && other->queue.front().number < w.number)
            return false;
    return true;
}

static void write_rows(struct stream_state *s, const work &w)
{
    bool word = w.kind == WORK_COPY && w.rows == 1 && (w.bytes == 4 || w.bytes == 8);
    for (size_t row = 0; row < w.rows; row++) {
        memory_note_write(w.to + row * w.to_pitch, w.bytes);
        if (w.kind == WORK_SET)
            memset(w.to + row * w.to_pitch, w.value, w.bytes);
        else
            memcpy(w.to + row * w.to_pitch, w.from + row * w.from_pitch, w.bytes);
        if (word)
            order_engine_word(s, &s->seen, w.to, (uint32_t)w.bytes);
        else
            order_engine(s, &s->seen, w.to + row * w.to_pitch, w.kind == WORK_SET ? NULL : w.from + row * w.from_pitch,
                         w.bytes);
    }
    __atomic_thread_fence(__ATOMIC_RELEASE);
}

static void finish_copy(void *object)
{
    struct stream_state *s = (struct stream_state *)object;
    write_rows(s, s->queue.front());
    stream_finished(s, NULL);
}

/* Orders the first work of s after its predecessors: in its queue, in the host's program, and in streams that it waits
 * for. */
static void order_start_locked(struct stream_state *s)
{
    const work &w = s->queue.front();
    s->seen = clocks_join(s->seen, w.host_seen);
    if (w.kind == WORK_WAIT)
        s->seen = clocks_join(s->seen, w.event->seen);
    for (auto &other : streams)
        if (s->blocking && other->device == s->device && other->blocking && (other->null || s->null))
            s->seen = clocks_join(s->seen, other->seen);
}

/* True: the work is done already. */
static bool start_locked(struct stream_state *s, std::vector<std::unique_ptr<launch>> *launches)
{
    work &w = s->queue.front();
    w.started = true;
    order_start_locked(s);
    switch (w.kind) {
    case WORK_LAUNCH:
        launches->push_back(w.make());
        launches->back()->stream = s;
        launches->back()->begin = s->seen;
        w.running = launches->back().get();
        return false;
    case WORK_COPY:
    case WORK_SET:
        scheduler_run_late(finish_copy, s);
        return false;
    case WORK_RECORD:
        w.event->done = w.count > w.event->done ? w.count : w.event->done;
        w.event->ns = thread_timer_ns();
        w.event->seen = s->seen;
        return true;
    case WORK_WAIT:
        return true;
    case WORK_HOST:
        w.host(w.user);
        return true;
    }
    return true;
}

void streams_start_ready(void)
{
    std::vector<std::unique_ptr<launch>> launches;
    {
        std::lock_guard<std::mutex> held(lock);
        for (bool moved = true; moved;) {
            moved = false;
            for (auto &s : streams)
                while (!s->queue.empty() && !s->queue.front().started && may_start_locked(s.get()) && !failed) {
                    moved = true;
                    if (!start_locked(s.get(), &launches))
                        break;
                    s->queue.pop_front();
                    changed.notify_all();
                }
        }
    }
    for (auto &l : launches)
        scheduler_launch(std::move(l));
}

void stream_finished(void *object, const clocks_ref &seen)
{
    struct stream_state *s = (struct stream_state *)object;
    {
        std::lock_guard<std::mutex> held(lock);
        s->seen = clocks_join(s->seen, seen);
        s->queue.pop_front();
        changed.notify_all();
    }
    streams_start_ready();
}

void streams_fail(void)
{
    std::lock_guard<std::mutex> held(lock);
    failed = true;
    for (auto &s : streams)
        s->queue.clear();
    changed.notify_all();
}

} // namespace hopper

/* ---- host threads that poll ---- */
enum : long { POLL_NS = 100000 };

extern "C" int __real_sched_yield(void);
extern "C" int __wrap_sched_yield(void);

/* A thread that yields has found nothing to do. Most such threads are proxies. Without naps the proxies of a few ranks
 * keep all cores busy, and slow down the scheduler, for whose work they wait. The linker redirects sched_yield() here
 * (--wrap). */
int __wrap_sched_yield(void)
{
    static const struct timespec nap = {0, POLL_NS};
    return hopper::scheduler_is_here() ? __real_sched_yield() : nanosleep(&nap, NULL);
}

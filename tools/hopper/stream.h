/* SPDX-License-Identifier: Apache-2.0 */
/* Streams and events: the work that host threads enqueue and the scheduler does. */
#ifndef TOOLS_HOPPER_STREAM_H
#define TOOLS_HOPPER_STREAM_H

#include <deque>
#include <cuda_runtime_api.h>

#include "tools/hopper/scheduler.h"

namespace hopper
{

enum work_kind { WORK_LAUNCH, WORK_COPY, WORK_SET, WORK_RECORD, WORK_WAIT, WORK_HOST };

struct capture;

struct event_state {
    uint64_t recorded = 0, done = 0; /* records enqueued, records reached */
    uint64_t ns = 0;
    clocks_ref seen;
    struct capture *captured = NULL; /* set while its newest record belongs to this capture */
};

struct work {
    enum work_kind kind;
    std::function<std::unique_ptr<launch>()> make; /* launch */
    uint8_t *to;                                   /* copy, set */
    const uint8_t *from;
    size_t bytes, rows, to_pitch, from_pitch;
    int value;
    struct event_state *event;
    uint64_t count; /* record, wait: the number of the record */
    void (*host)(void *);
    void *user;
    const struct launch *running; /* launch: once it has started */
    clocks_ref host_seen;         /* what the host had seen (see order.h, also for `seen` below) */
    uint64_t number;              /* order of enqueueing, over all streams of the process */
    bool started;
};

struct stream_state {
    int device;
    bool null, blocking; /* blocking: keeps order with the null stream of its device */
    std::deque<work> queue;
    clocks_ref seen;
    struct capture *into; /* if set, work is added to this capture instead of the queue */
};

/* The work that was enqueued between the beginning and the end of a capture: on the stream that began it, and on the
 * streams that have waited for an event of a captured stream since. */
struct capture {
    struct stream_state *origin;
    std::vector<std::pair<stream_state *, work>> nodes;
    std::vector<stream_state *> joined; /* including the stream that began it */
};

/* Any thread may call these. handle 0: the null stream of `device`. */
struct stream_state *stream_open(int device, bool blocking);
void stream_close(struct stream_state *s);
struct stream_state *stream_of(cudaStream_t handle, int device);
/* These return cudaErrorLaunchFailure after a violation. */
cudaError_t stream_enqueue(struct stream_state *s, work w);
cudaError_t stream_wait(struct stream_state *s);
bool stream_idle(struct stream_state *s);
cudaError_t stream_wait_device(int device);
/* Waits until no kernel runs on the device. */
cudaError_t stream_wait_kernels(int device);
bool stream_captures(struct stream_state *s);
cudaError_t stream_record(struct stream_state *s, struct event_state *e);
cudaError_t stream_wait_event(struct stream_state *s, struct event_state *e);
/* Waits until the newest record of the event is reached. */
cudaError_t event_wait(struct event_state *e);
bool event_reached(struct event_state *e);

/* False: the stream is being captured already. */
bool capture_begin(struct stream_state *s, struct capture *c);
/* False: s did not begin the capture. */
bool capture_end(struct stream_state *s, struct capture *c);

} // namespace hopper

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* Streams and events: the work that host threads enqueue and the engine does. */
#ifndef TOOLS_HOPPER_STREAM_H
#define TOOLS_HOPPER_STREAM_H

#include <cuda_runtime_api.h>

#include "tools/hopper/scheduler.h"

namespace hopper
{

enum work_kind { WORK_LAUNCH, WORK_COPY, WORK_SET, WORK_RECORD, WORK_WAIT, WORK_HOST };

struct capture;

struct event_state {
    uint64_t recorded = 0, done = 0; /* records enqueued, records reached */
    uint64_t ns = 0;
    struct capture *captured = NULL; /* its newest record is a part of this graph */
};

struct work {
    enum work_kind kind;
    std::function<std::unique_ptr<launch>()> make; /* launch */
    uint8_t *to;                                   /* copy, set */
    const uint8_t *from;
    size_t bytes, rows, to_pitch, from_pitch;
    int value;
    struct event_state *event;
    uint64_t count; /* record, wait: which record */
    void (*host)(void *);
    void *user;
    uint64_t number; /* over all streams of the process */
    bool started;
};

struct stream_state {
    int device;
    bool null, blocking; /* blocking: in order with the null stream of its device */
    std::deque<work> queue;
    struct capture *into; /* what is enqueued becomes a part of this graph instead */
};

/* What streams were given between the beginning and the end of a capture: the first one's own, and that of those that
 * waited for an event of it. */
struct capture {
    struct stream_state *origin;
    std::vector<std::pair<stream_state *, work>> nodes;
    std::vector<stream_state *> joined; /* origin included */
};

/* Thread-safe. 0 stands for the null stream of `device`. */
struct stream_state *stream_open(int device, bool blocking);
void stream_close(struct stream_state *s);
struct stream_state *stream_of(cudaStream_t handle, int device);
/* cudaErrorLaunchFailure once anything was violated. */
cudaError_t stream_enqueue(struct stream_state *s, work w);
cudaError_t stream_wait(struct stream_state *s);
bool stream_idle(struct stream_state *s);
cudaError_t stream_wait_device(int device);
cudaError_t stream_record(struct stream_state *s, struct event_state *e);
cudaError_t stream_wait_event(struct stream_state *s, struct event_state *e);
/* Of an event: until its newest record is reached. */
cudaError_t event_wait(struct event_state *e);
bool event_reached(struct event_state *e);

/* False: the stream is being captured already, or is not. */
bool capture_begin(struct stream_state *s, struct capture *c);
bool capture_end(struct stream_state *s, struct capture *c);

} // namespace hopper

#endif

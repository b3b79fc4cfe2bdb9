/* SPDX-License-Identifier: Apache-2.0 */
/* Streams and events: the work that host threads enqueue and the engine does. */
#ifndef TEST_HOPPER_STREAM_H
#define TEST_HOPPER_STREAM_H

#include <cuda_runtime_api.h>

#include "test/hopper/engine.h"

namespace hopper
{

enum work_kind { WORK_LAUNCH, WORK_COPY, WORK_SET, WORK_RECORD, WORK_WAIT, WORK_HOST };

struct event_state {
    uint64_t recorded = 0, done = 0; /* records enqueued, records reached */
    uint64_t ns = 0;
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

} // namespace hopper

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* CUDA graphs made by capturing streams. A launch enqueues the captured work again: that of the first stream on the
 * stream of the launch, that of the others on streams of the graph's own, with events of its own between them. */
#include <map>
#include <mutex>

#include "tools/hopper/stream.h"

using namespace hopper;

struct replay {
    struct capture of;
    std::map<stream_state *, stream_state *> streams; /* captured stream: the graph's own */
    std::map<event_state *, event_state *> events;
};

static std::mutex lock; /* protects captures */
static std::map<stream_state *, capture *> &captures = *new std::map<stream_state *, capture *>();

static struct stream_state *stream_here(cudaStream_t stream)
{
    int device = 0;
    (void)cudaGetDevice(&device);
    return stream_of(stream, device);
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode)
{
    struct stream_state *s = stream_here(stream);
    struct capture *c = new capture();
    std::lock_guard<std::mutex> held(lock);
    if (s->null || !capture_begin(s, c)) {
        delete c;
        return cudaErrorIllegalState;
    }
    captures[s] = c;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
    struct stream_state *s = stream_here(stream);
    std::lock_guard<std::mutex> held(lock);
    auto found = captures.find(s);
    if (found == captures.end() || !capture_end(s, found->second))
        return cudaErrorIllegalState;
    *graph = (cudaGraph_t)found->second;
    captures.erase(found);
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    delete (struct capture *)graph;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long)
{
    struct replay *r = new replay();
    r->of = *(struct capture *)graph;
    for (auto *s : r->of.joined)
        if (s != r->of.origin)
            r->streams[s] = stream_open(s->device, false);
    for (auto &node : r->of.nodes)
        if (node.second.event && r->events.count(node.second.event) == 0)
            r->events[node.second.event] = new event_state();
    *exec = (cudaGraphExec_t)r;
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream)
{
    struct replay *r = (struct replay *)exec;
    cudaError_t e = cudaSuccess;
    for (auto &node : r->of.nodes) {
        struct stream_state *s = node.first == r->of.origin ? stream_here(stream) : r->streams[node.first];
        const work &w = node.second;
        if (w.kind == WORK_RECORD)
            e = stream_record(s, r->events[w.event]);
        else if (w.kind == WORK_WAIT)
            e = stream_wait_event(s, r->events[w.event]);
        else
            e = stream_enqueue(s, w);
        if (e != cudaSuccess)
            return e;
    }
    return e;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    struct replay *r = (struct replay *)exec;
    cudaError_t e = cudaSuccess;
    for (auto &s : r->streams) {
        e = stream_wait(s.second);
        stream_close(s.second);
    }
    for (auto &event : r->events) {
        (void)event_wait(event.second);
        delete event.second;
    }
    delete r;
    return e;
}

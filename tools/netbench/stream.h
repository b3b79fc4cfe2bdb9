/* SPDX-License-Identifier: Apache-2.0 */
/* One comm to a peer and one from a peer, driven as NCCL's progress thread does: no call waits. */
#ifndef NETBENCH_STREAM_H
#define NETBENCH_STREAM_H

#include <stdint.h>

#include "tools/netbench/net.h"
#include "tools/netbench/plan.h"

/* A buffer, and its registration with each comm of the stream. */
struct buffer {
    uint8_t *data;
    size_t bytes;
    void *send_mhandle, *recv_mhandle;
};

/* A position in the plan: a multi-receive of a step, and how many of its chunks are posted. */
struct cursor {
    int step, multi, chunk;
};

struct receive {
    void *request;
    void *flush; /* while flushing */
    struct cursor at;
    int chunks;
};

struct stream {
    const struct net *net;
    const struct options *options;
    struct route route;
    int device;
    void *listen, *send, *recv;
    /* NCCL passes the same writable handle to each call of connect, so a plugin may keep state in it. */
    bool has_handle;
    uint8_t handle[NET_HANDLE_BYTES];
    struct buffer input, output, scratch; /* input and output are the rank's memory, scratch is the stream's own */
    struct plan plan;
    size_t slot_offset; /* of this iteration in input and output */
    /* receiving */
    struct cursor next_recv;
    int posted, received; /* multi-receives */
    struct receive receive[OUTSTANDING_MAX];
    /* sending */
    struct cursor next_send;
    uint32_t sent, acknowledged; /* messages */
    void *request[OUTSTANDING_MAX * MULTI_MAX];
    uint64_t errors;
};

/* Bytes of scratch that one stream needs. */
size_t stream_scratch_bytes(const struct options *options);

void stream_begin(struct stream *stream, size_t slot_offset);
/* Return 1 when something happened, 0 when not, or -EIO after printing why. */
int stream_step(struct stream *stream);
bool stream_is_done(const struct stream *stream);
/* One line for the report of a hang. */
void stream_describe(const struct stream *stream, char *text, size_t bytes);

#endif

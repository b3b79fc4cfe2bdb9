/* SPDX-License-Identifier: Apache-2.0 */
/** One comm to a peer and one from a peer, driven as NCCL's progress thread does: never waiting in any call. */
#ifndef NETBENCH_LANE_H
#define NETBENCH_LANE_H

#include <stdint.h>

#include "tools/netbench/net.h"
#include "tools/netbench/plan.h"

/** A buffer and what each comm of a lane calls it. */
struct buffer {
    uint8_t *data;
    size_t bytes;
    void *send_mhandle, *recv_mhandle;
};

/** A place in the plan: a group, and how many of its chunks are posted. */
struct cursor {
    int step, group, chunk;
};

struct receive {
    void *request;
    void *flush; /* while flushing */
    struct cursor at;
    int chunks;
};

struct lane {
    const struct net *net;
    const struct options *options;
    struct share share;
    int device;
    void *listen, *send, *recv;
    /* NCCL hands connect the same writable handle each time: so plugins may keep state there. */
    bool has_handle;
    uint8_t handle[NET_HANDLE_BYTES];
    struct buffer input, output, scratch; /* their data and size are the rank's; scratch is the lane's own */
    struct plan plan;
    size_t slot_offset; /* of this iteration in input and output */
    /* receiving */
    struct cursor next_recv;
    int posted, received; /* groups */
    struct receive receive[OUTSTANDING_MAX];
    /* sending */
    struct cursor next_send;
    uint32_t sent, acknowledged; /* messages */
    void *request[OUTSTANDING_MAX * GROUP_MAX];
    uint64_t errors;
};

/** Bytes of scratch that one lane needs. */
size_t lane_scratch_bytes(const struct options *options);

void lane_begin(struct lane *lane, size_t slot_offset);
/** Return 1 when something happened, 0 when not, or -EIO after printing why. */
int lane_step(struct lane *lane);
bool lane_is_done(const struct lane *lane);
/** One line for the report of a hang. */
void lane_describe(const struct lane *lane, char *text, size_t bytes);

#endif

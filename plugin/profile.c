/* SPDX-License-Identifier: Apache-2.0 */
#include "plugin/profile.h"

#include <stdlib.h>

#include "plugin/comm.h"

/* What the profiler has returned for each buffer of each request; NULL: the profiler wants no event for it. */
struct profile_events {
    void *event[COMM_REQUESTS][COMM_MAX_RECVS];
};

/* The requests of a comm are an array. */
static size_t index_of(const struct request *request)
{
    const struct request *first = request->comm->kind == COMM_SEND ? ((struct send_comm *)request->comm)->request
                                                                   : ((struct recv_comm *)request->comm)->request;

    return (size_t)(request - first);
}

void profile_start(struct request *request, int index, void *parent, int opcode, size_t length_bytes)
{
    struct comm *comm = request->comm;
    struct net_profile_ib_v1 data = {.type = NET_PROFILE_QUEUE,
                                     .transfer.device = comm->rails.rail[0],
                                     .transfer.id = index_of(request),
                                     .transfer.opcode = opcode,
                                     .transfer.queue = (int)prs_peer_queue_number(comm->peer),
                                     .transfer.length_bytes = length_bytes};
    void **event;

    if (!parent)
        return;
    if (!comm->events)
        comm->events = calloc(1, sizeof(*comm->events));
    if (!comm->events)
        return; /* the profile has a gap */
    event = &comm->events->event[index_of(request)][index];
    *event = NULL; /* NCCL does not change it if there is no profiler */
    comm->profile(event, NET_PROFILE_START, parent, NET_PROFILE_IB_V1, &data);
    if (*event)
        request->profiled = true;
}

void profile_stop(struct request *request)
{
    void **events = request->comm->events->event[index_of(request)];

    request->profiled = false;
    for (int i = 0; i < COMM_MAX_RECVS; i++) {
        if (events[i])
            request->comm->profile(&events[i], NET_PROFILE_STOP, NULL, 0, NULL);
        events[i] = NULL;
    }
}

void profile_free(struct comm *comm)
{
    free(comm->events);
    comm->events = NULL;
}

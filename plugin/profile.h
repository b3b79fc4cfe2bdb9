/* SPDX-License-Identifier: Apache-2.0 */
/* Tells NCCL's profiler when a transfer starts and ends on the network. */
#ifndef PERSEUS_PLUGIN_PROFILE_H
#define PERSEUS_PLUGIN_PROFILE_H

#include <stddef.h>

struct comm;
struct request;

/* Buffer `index` of the request has started. parent: what NCCL passed for it. opcode: of verbs; 0: a receive. Call it
 * only if the comm has a profile function. */
void profile_start(struct request *request, int index, void *parent, int opcode, size_t length_bytes);
/* All buffers of a request whose `profiled` is set are done. */
void profile_stop(struct request *request);
/* For the close of a comm. NCCL's profiler may be gone by then: nothing is told. */
void profile_free(struct comm *comm);

#endif

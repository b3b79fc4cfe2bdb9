/* SPDX-License-Identifier: Apache-2.0 */
/* Connect, register and close all streams of a rank: what NCCL's service thread does. */
#ifndef NETBENCH_CONNECTION_H
#define NETBENCH_CONNECTION_H

#include "tools/netbench/stream.h"
#include "tools/netbench/job.h"

/* Listen, publish handles, connect and accept until every stream has both comms. Return 0 or -errno after printing
 * why. */
int connection_open(struct job *job, struct stream *streams, int count);
/* Register every stream's buffers on its comms. */
int connection_register(struct stream *streams, int count);
/* Register and deregister other memory on the comms of one stream, as happens with user buffers. */
int connection_churn(struct stream *stream);
int connection_deregister(struct stream *streams, int count);
int connection_close(struct stream *streams, int count);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* The data path, which NCCL's progress thread calls. The signatures are those of the newest table. */
#ifndef PERSEUS_PLUGIN_REQUEST_H
#define PERSEUS_PLUGIN_REQUEST_H

#include "plugin/comm.h"

/* Make a list of the requests of a new comm. Return the first. */
struct request *request_pool(struct request *request, struct comm *comm);
/* prs_notify_fn of a receive comm. */
void request_arrived(void *recv_comm, uint32_t id, uint64_t bytes);

net_result request_isend(void *send_comm, void *data, size_t size, int tag, void *mhandle, void *profile,
                         void **request);
net_result request_irecv(void *recv_comm, int n, void **data, size_t *sizes, int *tags, void **mhandles,
                         void **profiles, void **request);
/* Sizes are int in versions 7 and 8. */
net_result request_isend_narrow(void *send_comm, void *data, int size, int tag, void *mhandle, void **request);
net_result request_irecv_narrow(void *recv_comm, int n, void **data, int *sizes, int *tags, void **mhandles,
                                void **request);
net_result request_iflush(void *recv_comm, int n, void **data, int *sizes, void **mhandles, void **request);
net_result request_test(void *request, int *done, int *sizes);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* One interface for the GIN and RMA tables, for tests. */
#ifndef TEST_PLUGIN_GIN_API_H
#define TEST_PLUGIN_GIN_API_H

#include "plugin/abi_gin.h"
#include "tools/common/ranks.h"

/* The arguments of a transfer, in any version. */
struct gin_call {
    uint64_t src_offset, dst_offset, size, signal_offset, value;
    void *src, *dst, *signal;
    uint32_t rank, operation; /* operation 0: no signal */
    bool weak;
    bool more; /* v15 on: another transfer to this rank follows */
    int context;
};

struct gin_api {
    int version;
    const struct gin_v11 *v11;
    const struct gin_v12 *v12;
    const struct gin_v13 *v13;
    const struct rma_v14 *v14;
    const struct rma_v15 *v15;
    const struct rma_v16 *v16;
    const struct rma_v17 *v17;
    rma_put_v15 *put; /* this and the next two: of the version, v15 on */
    rma_put_signal_v15 *put_signal;
    rma_get_v15 *get;
    void *plugin, *listen_comm, *coll, *set; /* set: argument of transfers and progress; in v11 and v12 the comm */
    struct ranks *ranks;
    uint32_t rank, size;
};

/* What gin_api_open() asks for; -1: nothing. */
extern int gin_api_traffic_class;
/* A text, and the number of lines of the plugin's log that contain it. */
extern const char *gin_api_looks_for;
extern int gin_api_found;

/* Load, init, listen, exchange handles, connect, make contexts. Return 0, 77 (no device) or 1, reported on stderr. */
int gin_api_open(struct gin_api *api, struct ranks *ranks, uint32_t size, int version, int contexts);
void gin_api_close(struct gin_api *api);
net_result gin_api_reg(struct gin_api *api, void *data, size_t size, uint64_t flags, void **mhandle);
net_result gin_api_dereg(struct gin_api *api, void *mhandle);
net_result gin_api_put(struct gin_api *api, const struct gin_call *call, void **request);
net_result gin_api_get(struct gin_api *api, const struct gin_call *call, void **request); /* v13 on */
net_result gin_api_flush(struct gin_api *api, void *mhandle, uint32_t rank, void **request);
net_result gin_api_test(struct gin_api *api, void *request, int *done);
net_result gin_api_progress(struct gin_api *api);
bool gin_api_has_error(struct gin_api *api);
/* v16 on. Return what NCCL's device code reads as flushesAllPutsOnAnySignal. */
bool gin_api_signal_flushes(struct gin_api *api);
/* Test until the request is done. Return 0, a result of the plugin, or -1 after the time limit. */
int gin_api_wait(struct gin_api *api, void *request);

#endif

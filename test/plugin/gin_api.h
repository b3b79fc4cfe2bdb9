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
    int context;
};

struct gin_api {
    int version;
    const struct gin_v11 *v11;
    const struct gin_v12 *v12;
    const struct gin_v13 *v13;
    const struct rma_v14 *v14;
    void *plugin, *listen_comm, *coll, *set; /* set: argument of transfers and progress; in v11 and v12 the comm */
    struct ranks *ranks;
    uint32_t rank, size;
};

/* Load, init, listen, exchange handles, connect, make contexts. Return 0, 77 (no device) or 1, reported on stderr. */
int gin_api_open(struct gin_api *api, struct ranks *ranks, uint32_t size, int version, int contexts);
void gin_api_close(struct gin_api *api);
net_result gin_api_reg(struct gin_api *api, void *data, size_t size, uint64_t flags, void **mhandle);
net_result gin_api_dereg(struct gin_api *api, void *mhandle);
net_result gin_api_put(struct gin_api *api, const struct gin_call *call, void **request);
net_result gin_api_get(struct gin_api *api, const struct gin_call *call, void **request); /* v13, v14 */
net_result gin_api_flush(struct gin_api *api, void *mhandle, uint32_t rank, void **request);
net_result gin_api_test(struct gin_api *api, void *request, int *done);
net_result gin_api_progress(struct gin_api *api);
bool gin_api_has_error(struct gin_api *api);
/* Test until the request is done. Return 0, a result of the plugin, or -1 after the time limit. */
int gin_api_wait(struct gin_api *api, void *request);

#endif

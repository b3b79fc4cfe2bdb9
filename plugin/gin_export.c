/* SPDX-License-Identifier: Apache-2.0 */
/* The tables of GIN and RMA, and the functions in which their versions differ. */
#include <errno.h>

#include "plugin/compat.h"
#include "plugin/device.h"
#include "plugin/gin.h"
#include "plugin/result.h"
#include "transport/util/error.h"

#define EXPORT __attribute__((visibility("default")))

/* As in the network tables, so that NCCL knows that the devices are the same. */
#define PLUGIN_NAME "Perseus"

extern const struct gin_v11 ncclGinPlugin_v11;
extern const struct gin_v12 ncclGinPlugin_v12;
extern const struct gin_v13 ncclGinPlugin_v13;
extern const struct rma_v14 ncclRmaPlugin_v14;
extern const struct rma_v15 ncclRmaPlugin_v15;
extern const struct rma_v16 ncclRmaPlugin_v16;
extern const struct rma_v17 ncclRmaPlugin_v17;

static net_result init(void **context, uint64_t comm_id, net_log_fn *log)
{
    return device_init(context, comm_id, NULL, log, NULL);
}

static net_result properties_v12(int device, struct net_properties_v12 *properties)
{
    net_result result = device_properties(device, properties);

    if (result == NET_SUCCESS)
        properties->device_type = GIN_DEVICE_PROXY;
    return result;
}

static net_result properties_v11(int device, struct net_properties_v11 *properties)
{
    net_result result = compat_properties_v11(device, properties);

    if (result == NET_SUCCESS)
        properties->device_type = GIN_DEVICE_PROXY;
    return result;
}

/* The context is not used: NCCL passes the net plugin's to RMA's connect, and that may be another vendor's plugin. */
static net_result connect_v11(void *context, void *handles[], int ranks, int rank, void *listen_comm, void **coll_comm)
{
    (void)context;
    return gin_comm_connect(handles, ranks, rank, 1, listen_comm, coll_comm);
}

static net_result connect_v12(void *context, void *handles[], int ranks, int rank, int connections, int queue_depth,
                              void *listen_comm, void **coll_comm)
{
    (void)context;
    (void)queue_depth; /* not needed: requests without room wait in their queue */
    return gin_comm_connect(handles, ranks, rank, connections > 0 ? connections : 1, listen_comm, coll_comm);
}

static net_result connect_v13(void *context, void *handles[], int ranks, int rank, void *listen_comm, void **coll_comm)
{
    (void)context;
    return gin_comm_connect(handles, ranks, rank, 0, listen_comm, coll_comm);
}

static net_result create(void *coll_comm, int contexts, int traffic_class, bool says_more, void **set)
{
    return gin_set_create(coll_comm,
                          &(struct gin_set_options){.contexts = contexts > 0 ? contexts : 1,
                                                    .traffic_class = traffic_class,
                                                    .says_more = says_more},
                          set);
}

static net_result create_v13(void *coll_comm, struct gin_config_v13 *config, void **set,
                             struct net_device_handle **offload)
{
    (void)offload; /* some versions of NCCL pass NULL */
    return create(coll_comm, config->contexts, config->traffic_class, false, set);
}

/* The stride limits which ranks are used. It is not needed, since a rank is connected when it is first used. */
static int check_stride(const struct rma_config_v14 *config, void **set)
{
    *set = NULL;
    return config->rank_stride < 0 ? prs_fail(-EINVAL, "RMA: rank stride %d", config->rank_stride) : 0;
}

static net_result create_v14(void *coll_comm, struct rma_config_v14 *config, void **set)
{
    int r = check_stride(config, set);

    return r < 0 ? result_from_errno(r) : create(coll_comm, config->contexts, config->traffic_class, false, set);
}

static net_result create_v15(void *coll_comm, struct rma_config_v14 *config, void **set)
{
    int r = check_stride(config, set);

    return r < 0 ? result_from_errno(r) : create(coll_comm, config->contexts, config->traffic_class, true, set);
}

static net_result create_v17(void *coll_comm, struct rma_config *config, void **set)
{
    return create(coll_comm, config->contexts, config->traffic_class, true, set);
}

/* ---- transfers: up to v13 every signal is strong ---- */

static net_result put_signal_v15(void *set, int context, GIN_PUT, GIN_SIGNAL, bool strong, uint32_t flags,
                                 void **request)
{
    struct gin_transfer t = {.src_offset = src_offset,
                             .dst_offset = dst_offset,
                             .size = size,
                             .src = src,
                             .dst = dst,
                             .rank = rank,
                             .signal_offset = signal_offset,
                             .signal = signal,
                             .value = value,
                             .operation = operation,
                             .strong = strong,
                             .more = flags & RMA_TRANSFER_MORE};

    return gin_request_put(gin_set_of(set), context, &t, request);
}

static net_result put_signal_v14(void *set, int context, GIN_PUT, GIN_SIGNAL, bool strong, void **request)
{
    return put_signal_v15(set, context, src_offset, src, size, dst_offset, dst, rank, signal_offset, signal, value,
                          operation, strong, 0, request);
}

static net_result put_signal_v13(void *set, int context, GIN_PUT, GIN_SIGNAL, void **request)
{
    return put_signal_v15(set, context, src_offset, src, size, dst_offset, dst, rank, signal_offset, signal, value,
                          operation, true, 0, request);
}

static net_result put_signal_v12(void *coll_comm, GIN_PUT, GIN_SIGNAL, int connection, void **request)
{
    return put_signal_v13(coll_comm, connection, src_offset, src, size, dst_offset, dst, rank, signal_offset, signal,
                          value, operation, request);
}

static net_result put_signal_v11(void *coll_comm, GIN_PUT, GIN_SIGNAL, void **request)
{
    return put_signal_v13(coll_comm, 0, src_offset, src, size, dst_offset, dst, rank, signal_offset, signal, value,
                          operation, request);
}

static net_result put_v15(void *set, int context, GIN_PUT, uint32_t flags, void **request)
{
    return put_signal_v15(set, context, src_offset, src, size, dst_offset, dst, rank, 0, NULL, 0, GIN_SIGNAL_NONE,
                          false, flags, request);
}

static net_result put_v13(void *set, int context, GIN_PUT, void **request)
{
    return put_v15(set, context, src_offset, src, size, dst_offset, dst, rank, 0, request);
}

static net_result put_v12(void *coll_comm, GIN_PUT, int connection, void **request)
{
    return put_v13(coll_comm, connection, src_offset, src, size, dst_offset, dst, rank, request);
}

static net_result put_v11(void *coll_comm, GIN_PUT, void **request)
{
    return put_v13(coll_comm, 0, src_offset, src, size, dst_offset, dst, rank, request);
}

static net_result get_v13(void *set, int context, GIN_GET, void **request)
{
    return gin_request_get(set, context, remote_offset, remote, size, local_offset, local, rank, 0, request);
}

#define SAME_IN_ALL                                                                                                    \
    .name = PLUGIN_NAME, .init = init, .devices = device_count, .listen = gin_comm_listen,                             \
    .dereg = gin_memory_release, .close_coll = gin_comm_close, .close_listen = gin_comm_close_listen,                  \
    .test = gin_request_test, .progress = gin_request_progress, .query_last_error = gin_comm_error,                    \
    .finalize = device_finalize

EXPORT const struct gin_v11 ncclGinPlugin_v11 = {
    SAME_IN_ALL,
    .properties = properties_v11,
    .connect = connect_v11,
    .reg = gin_memory_reg,
    .reg_dmabuf = gin_memory_reg_dmabuf,
    .iput = put_v11,
    .iput_signal = put_signal_v11,
};

EXPORT const struct gin_v12 ncclGinPlugin_v12 = {
    SAME_IN_ALL,
    .properties = properties_v11,
    .connect = connect_v12,
    .reg = gin_memory_reg,
    .reg_dmabuf = gin_memory_reg_dmabuf,
    .iput = put_v12,
    .iput_signal = put_signal_v12,
};

EXPORT const struct gin_v13 ncclGinPlugin_v13 = {
    SAME_IN_ALL,
    .properties = properties_v12,
    .connect = connect_v13,
    .create_context = create_v13,
    .reg = gin_memory_reg,
    .reg_dmabuf = gin_memory_reg_dmabuf,
    .destroy_context = gin_set_destroy,
    .iput = put_v13,
    .iput_signal = put_signal_v13,
    .iget = get_v13,
    .iflush = gin_request_flush,
};

#define SAME_IN_RMA                                                                                                    \
    SAME_IN_ALL, .properties = properties_v12, .connect = connect_v13, .reg = rma_memory_reg,                          \
                 .reg_dmabuf = rma_memory_reg_dmabuf, .destroy_context = gin_set_destroy, .iflush = gin_request_flush

EXPORT const struct rma_v14 ncclRmaPlugin_v14 = {
    SAME_IN_RMA, .create_context = create_v14, .iput = put_v13, .iput_signal = put_signal_v14, .iget = get_v13,
};

EXPORT const struct rma_v15 ncclRmaPlugin_v15 = {
    SAME_IN_RMA, .create_context = create_v15, .iput = put_v15, .iput_signal = put_signal_v15, .iget = gin_request_get,
};

EXPORT const struct rma_v16 ncclRmaPlugin_v16 = {
    SAME_IN_RMA,     .rma_properties = gin_comm_properties, .create_context = create_v15,
    .iput = put_v15, .iput_signal = put_signal_v15,         .iget = gin_request_get,
};

EXPORT const struct rma_v17 ncclRmaPlugin_v17 = {
    SAME_IN_RMA,     .rma_properties = gin_comm_properties, .create_context = create_v17,
    .iput = put_v15, .iput_signal = put_signal_v15,         .iget = gin_request_get,
};

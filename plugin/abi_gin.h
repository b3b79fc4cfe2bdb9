/* SPDX-License-Identifier: Apache-2.0 */
/* NCCL's GIN ABI (GPU-initiated networking through a host proxy), versions 11 to 13, and its RMA ABI, versions 14 to
 * 17, declared here from their documented layout. Each table is a data symbol: `ncclGinPlugin_v<N>`,
 * `ncclRmaPlugin_v<N>`. RMA v13 is GIN v13 under another name: NCCL 2.30.7 uses the GIN symbol for it. GIN v14 and v15
 * move no data from the host, so this plugin has none. doc/nccl.md says which NCCL uses which table. */
#ifndef PERSEUS_PLUGIN_ABI_GIN_H
#define PERSEUS_PLUGIN_ABI_GIN_H

#include <stdbool.h>

#include "plugin/abi.h"

enum {
    GIN_DEVICE_PROXY = 2, /* netDeviceType of these tables: a proxy on the host moves the data */
    GIN_SIGNAL_NONE = 0,
    GIN_SIGNAL_INC = 1,
    GIN_SIGNAL_ADD = 2,
};

/* Flags of regMrSym. */
enum gin_memory_flags {
    GIN_MEMORY_STRICT = 1,      /* it holds signals: no relaxed PCI ordering */
    GIN_MEMORY_NEVER_RESET = 2, /* a hint: its counters only grow */
};

/* Flags of transfers, RMA v15 on. */
enum rma_transfer_flags {
    RMA_TRANSFER_MORE = 1, /* another transfer to the same rank follows in the same round of NCCL's proxy */
};

struct gin_config_v13 {
    int signals, counters, contexts, queue_depth, traffic_class;
};
struct rma_config_v14 { /* v14 to v16 */
    int contexts, traffic_class, rank_stride;
};
/* The members with which every version of the RMA configuration begins. No release that we could check has v17. Its
 * drafts differ in the members that follow, which say which ranks are used. The plugin does not need these. */
struct rma_config {
    int contexts, traffic_class;
};
struct rma_properties_v16 {
    /* When a signal is visible, so are all puts that the NICs had received before it, from any rank. */
    bool signal_flushes_all_puts;
};
static_assert(sizeof(struct gin_config_v13) == 20 && sizeof(struct rma_config_v14) == 12, "NCCL ABI");
static_assert(offsetof(struct rma_config_v14, traffic_class) == offsetof(struct rma_config, traffic_class), "NCCL ABI");
static_assert(sizeof(struct rma_properties_v16) == 1, "NCCL ABI");

typedef net_result gin_init_fn(void **context, uint64_t comm_id, net_log_fn *log);
typedef net_result gin_connect_v11(void *context, void *handles[], int ranks, int rank, void *listen_comm,
                                   void **coll_comm);
typedef net_result gin_connect_v12(void *context, void *handles[], int ranks, int rank, int connections,
                                   int queue_depth, void *listen_comm, void **coll_comm);
typedef net_result gin_create_v11(void *coll_comm, int signals, int counters, void **set,
                                  struct net_device_handle **offload);
typedef net_result gin_create_v12(void *coll_comm, int signals, int counters, int contexts, void **set,
                                  struct net_device_handle **offload);
typedef net_result gin_create_v13(void *coll_comm, struct gin_config_v13 *config, void **set,
                                  struct net_device_handle **offload);
typedef net_result rma_create_v14(void *coll_comm, struct rma_config_v14 *config, void **set);
typedef net_result rma_create_v17(void *coll_comm, struct rma_config *config, void **set);
typedef net_result rma_properties_v16_fn(void *coll_comm, struct rma_properties_v16 *properties);
/* for_kernels: kernels put this handle into their commands, and the proxy passes it as source, destination or
 * signal. */
typedef net_result gin_reg_fn(void *coll_comm, void *data, size_t size, int type, uint64_t flags, void **mhandle,
                              void **for_kernels);
typedef net_result gin_reg_dmabuf_fn(void *coll_comm, void *data, size_t size, int type, uint64_t offset, int fd,
                                     uint64_t flags, void **mhandle, void **for_kernels);
typedef net_result rma_reg_fn(void *coll_comm, void *data, size_t size, int type, uint64_t flags, void **mhandle);
typedef net_result rma_reg_dmabuf_fn(void *coll_comm, void *data, size_t size, int type, uint64_t offset, int fd,
                                     uint64_t flags, void **mhandle);

#define GIN_PUT    uint64_t src_offset, void *src, size_t size, uint64_t dst_offset, void *dst, uint32_t rank
#define GIN_SIGNAL uint64_t signal_offset, void *signal, uint64_t value, uint32_t operation
typedef net_result gin_put_v11(void *coll_comm, GIN_PUT, void **request);
typedef net_result gin_put_v12(void *coll_comm, GIN_PUT, int connection, void **request);
typedef net_result gin_put_v13(void *set, int context, GIN_PUT, void **request);
typedef net_result gin_put_signal_v11(void *coll_comm, GIN_PUT, GIN_SIGNAL, void **request);
typedef net_result gin_put_signal_v12(void *coll_comm, GIN_PUT, GIN_SIGNAL, int connection, void **request);
typedef net_result gin_put_signal_v13(void *set, int context, GIN_PUT, GIN_SIGNAL, void **request);
typedef net_result rma_put_signal_v14(void *set, int context, GIN_PUT, GIN_SIGNAL, bool strong, void **request);
typedef net_result rma_put_v15(void *set, int context, GIN_PUT, uint32_t flags, void **request);
typedef net_result rma_put_signal_v15(void *set, int context, GIN_PUT, GIN_SIGNAL, bool strong, uint32_t flags,
                                      void **request);
#define GIN_GET uint64_t remote_offset, void *remote, size_t size, uint64_t local_offset, void *local, uint32_t rank
typedef net_result gin_get_v13(void *set, int context, GIN_GET, void **request);
typedef net_result rma_get_v15(void *set, int context, GIN_GET, uint32_t flags, void **request);
typedef net_result gin_flush_v13(void *set, int context, void *mhandle, uint32_t rank, void **request);
typedef net_result gin_test_fn(void *coll_comm, void *request, int *done);
typedef net_result gin_progress_fn(void *set_or_comm);
typedef net_result gin_error_fn(void *set_or_comm, bool *has_error);

#define GIN_TABLE_HEAD(properties_fn)                                                                                  \
    const char *name;                                                                                                  \
    gin_init_fn *init;                                                                                                 \
    net_devices_v6 *devices;                                                                                           \
    properties_fn *properties;                                                                                         \
    net_listen_v11 *listen
#define GIN_TABLE_MEMORY(reg_fn, dmabuf_fn)                                                                            \
    reg_fn *reg;                                                                                                       \
    dmabuf_fn *reg_dmabuf;                                                                                             \
    net_dereg_v6 *dereg;                                                                                               \
    net_close_v6 *destroy_context;                                                                                     \
    net_close_v6 *close_coll;                                                                                          \
    net_close_v6 *close_listen
#define GIN_TABLE_TAIL                                                                                                 \
    gin_test_fn *test;                                                                                                 \
    gin_progress_fn *progress; /* may be NULL: test() progresses, too */                                               \
    gin_error_fn *query_last_error;                                                                                    \
    net_finalize_v11 *finalize

struct gin_v11 {
    GIN_TABLE_HEAD(net_properties_v11_fn);
    gin_connect_v11 *connect;
    gin_create_v11 *create_context; /* never called for a proxy; may be NULL in v11 and v12 */
    GIN_TABLE_MEMORY(gin_reg_fn, gin_reg_dmabuf_fn);
    gin_put_v11 *iput;
    gin_put_signal_v11 *iput_signal;
    GIN_TABLE_TAIL;
};
struct gin_v12 {
    GIN_TABLE_HEAD(net_properties_v11_fn);
    gin_connect_v12 *connect;
    gin_create_v12 *create_context;
    GIN_TABLE_MEMORY(gin_reg_fn, gin_reg_dmabuf_fn);
    gin_put_v12 *iput;
    gin_put_signal_v12 *iput_signal;
    GIN_TABLE_TAIL;
};
struct gin_v13 {
    GIN_TABLE_HEAD(net_properties_v12_fn);
    gin_connect_v11 *connect;
    gin_create_v13 *create_context;
    GIN_TABLE_MEMORY(gin_reg_fn, gin_reg_dmabuf_fn);
    gin_put_v13 *iput;
    gin_put_signal_v13 *iput_signal;
    gin_get_v13 *iget;
    gin_flush_v13 *iflush;
    GIN_TABLE_TAIL;
};
struct rma_v14 {
    GIN_TABLE_HEAD(net_properties_v12_fn);
    gin_connect_v11 *connect;
    rma_create_v14 *create_context;
    GIN_TABLE_MEMORY(rma_reg_fn, rma_reg_dmabuf_fn);
    gin_put_v13 *iput;
    rma_put_signal_v14 *iput_signal;
    gin_get_v13 *iget;
    gin_flush_v13 *iflush;
    GIN_TABLE_TAIL;
};

#define RMA_TABLE_V15(create_fn)                                                                                       \
    gin_connect_v11 *connect; /* a draft of v17 passes one more argument, which the callee ignores */                  \
    create_fn *create_context;                                                                                         \
    GIN_TABLE_MEMORY(rma_reg_fn, rma_reg_dmabuf_fn);                                                                   \
    rma_put_v15 *iput;                                                                                                 \
    rma_put_signal_v15 *iput_signal;                                                                                   \
    rma_get_v15 *iget;                                                                                                 \
    gin_flush_v13 *iflush;                                                                                             \
    GIN_TABLE_TAIL
#define RMA_TABLE_HEAD_V16                                                                                             \
    const char *name;                                                                                                  \
    gin_init_fn *init;                                                                                                 \
    net_devices_v6 *devices;                                                                                           \
    rma_properties_v16_fn *rma_properties;                                                                             \
    net_properties_v12_fn *properties;                                                                                 \
    net_listen_v11 *listen
struct rma_v15 {
    GIN_TABLE_HEAD(net_properties_v12_fn);
    RMA_TABLE_V15(rma_create_v14);
};
struct rma_v16 {
    RMA_TABLE_HEAD_V16;
    RMA_TABLE_V15(rma_create_v14);
};
struct rma_v17 {
    RMA_TABLE_HEAD_V16;
    RMA_TABLE_V15(rma_create_v17);
};

#define GIN_ASSERT_HEAD(type)                                                                                          \
    NET_ASSERT_SLOT(type, name, 0);                                                                                    \
    NET_ASSERT_SLOT(type, init, 1);                                                                                    \
    NET_ASSERT_SLOT(type, listen, 4);                                                                                  \
    NET_ASSERT_SLOT(type, connect, 5);                                                                                 \
    NET_ASSERT_SLOT(type, create_context, 6);                                                                          \
    NET_ASSERT_SLOT(type, reg, 7);                                                                                     \
    NET_ASSERT_SLOT(type, dereg, 9);                                                                                   \
    NET_ASSERT_SLOT(type, destroy_context, 10);                                                                        \
    NET_ASSERT_SLOT(type, close_listen, 12);                                                                           \
    NET_ASSERT_SLOT(type, iput, 13);                                                                                   \
    NET_ASSERT_SLOT(type, iput_signal, 14)
GIN_ASSERT_HEAD(gin_v11);
GIN_ASSERT_HEAD(gin_v12);
GIN_ASSERT_HEAD(gin_v13);
GIN_ASSERT_HEAD(rma_v14);
GIN_ASSERT_HEAD(rma_v15);
#define RMA_ASSERT_V16(type)                                                                                           \
    NET_ASSERT_SLOT(type, devices, 2);                                                                                 \
    NET_ASSERT_SLOT(type, rma_properties, 3);                                                                          \
    NET_ASSERT_SLOT(type, properties, 4);                                                                              \
    NET_ASSERT_SLOT(type, listen, 5);                                                                                  \
    NET_ASSERT_SLOT(type, connect, 6);                                                                                 \
    NET_ASSERT_SLOT(type, create_context, 7);                                                                          \
    NET_ASSERT_SLOT(type, reg, 8);                                                                                     \
    NET_ASSERT_SLOT(type, dereg, 10);                                                                                  \
    NET_ASSERT_SLOT(type, destroy_context, 11);                                                                        \
    NET_ASSERT_SLOT(type, close_listen, 13);                                                                           \
    NET_ASSERT_SLOT(type, iput, 14);                                                                                   \
    NET_ASSERT_SLOT(type, iput_signal, 15);                                                                            \
    NET_ASSERT_SLOT(type, iget, 16);                                                                                   \
    NET_ASSERT_SLOT(type, iflush, 17);                                                                                 \
    NET_ASSERT_SLOT(type, test, 18);                                                                                   \
    NET_ASSERT_SLOT(type, progress, 19);                                                                               \
    NET_ASSERT_SLOT(type, query_last_error, 20);                                                                       \
    NET_ASSERT_SLOT(type, finalize, 21)
RMA_ASSERT_V16(rma_v16);
RMA_ASSERT_V16(rma_v17);
NET_ASSERT_SLOT(gin_v11, test, 15);
NET_ASSERT_SLOT(gin_v12, finalize, 18);
NET_ASSERT_SLOT(gin_v13, iflush, 16);
NET_ASSERT_SLOT(gin_v13, test, 17);
NET_ASSERT_SLOT(rma_v14, finalize, 20);
NET_ASSERT_SLOT(rma_v15, finalize, 20);
static_assert(sizeof(struct gin_v11) == 19 * sizeof(void *) && sizeof(struct gin_v12) == 19 * sizeof(void *),
              "NCCL ABI");
static_assert(sizeof(struct gin_v13) == 21 * sizeof(void *) && sizeof(struct rma_v14) == 21 * sizeof(void *),
              "NCCL ABI");
static_assert(sizeof(struct rma_v15) == 21 * sizeof(void *) && sizeof(struct rma_v16) == 22 * sizeof(void *),
              "NCCL ABI");
static_assert(sizeof(struct rma_v17) == 22 * sizeof(void *), "NCCL ABI");

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* NCCL's net-plugin ABI, versions 6 to 12, declared here from its documented layout, so that no NCCL header is needed.
 * Every size, and every offset that a version changed, is asserted.
 *
 * A plugin exports one data symbol for each version, `ncclNetPlugin_v<N>`, of type struct net_v<N>. NCCL tries the
 * newest first and uses the first that it finds. The order of members is the ABI; the names are ours. NCCL 2.19 and
 * newer, which this plugin supports, try v7 before v6; perseus-netbench also drives other vendors' v6 tables. */
#ifndef PERSEUS_PLUGIN_ABI_H
#define PERSEUS_PLUGIN_ABI_H

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

/* What every function returns; an int in the ABI. */
enum net_result {
    NET_SUCCESS = 0,
    NET_CUDA_ERROR = 1,
    NET_SYSTEM_ERROR = 2,
    NET_INTERNAL_ERROR = 3,
    NET_INVALID_ARGUMENT = 4,
    NET_INVALID_USAGE = 5,
    NET_REMOTE_ERROR = 6,
    NET_IN_PROGRESS = 7,
};
typedef int net_result;

enum net_log_level {
    NET_LOG_NONE = 0,
    NET_LOG_VERSION = 1,
    NET_LOG_WARN = 2,
    NET_LOG_INFO = 3,
    NET_LOG_ABORT = 4,
    NET_LOG_TRACE = 5,
};
enum net_log_subsystem { NET_LOG_INIT = 0x1, NET_LOG_NET = 0x10 };

/* Masks of ptrSupport, and the type of a registration (one bit). */
enum net_pointer { NET_PTR_HOST = 1, NET_PTR_CUDA = 2, NET_PTR_DMABUF = 4 };

enum {
    NET_HANDLE_BYTES = 128,
    NET_MAX_REQUESTS = 32,  /* this many, times maxRecvs, may be outstanding on one comm */
    NET_DEVICE_HOST = 0,    /* netDeviceType of plugins that a CPU drives */
    NET_DEVICE_VERSION = 0, /* netDeviceVersion that goes with it */
    NET_UNDEFINED = -1,     /* traffic class, rail, plane, attributes */
    NET_VDEVICE_MAX_V9 = 4, /* members of a virtual device, v9 to v11 */
    NET_VDEVICE_MAX_V12 = 8,
};
/* On entry of irecv, *request may be this (v9 on): the caller does not need this completion, only the buffers. */
#define NET_REQUEST_OPTIONAL ((void *)0x1)

typedef void net_log_fn(int level, unsigned long subsystems, const char *file, int line, const char *format, ...);
typedef net_result net_profile_fn(void **event, int type, void *parent, int64_t plugin, void *extra);

/* Arguments of net_profile_fn, v10 on. The layout of an event is that of NCCL's own IB transport, so that profilers for
 * that transport work with this plugin, too. */
enum {
    NET_PROFILE_START = 0,
    NET_PROFILE_STOP = 1,
    NET_PROFILE_IB_V1 = 1 << 16 | 1, /* the argument `plugin`: transport IB, version 1 */
    NET_PROFILE_QUEUE = 1,           /* type: a transfer on a queue pair */
};
struct net_profile_ib_v1 {
    uint8_t type;
    struct {
        int device;
        uint64_t id;
        int opcode; /* opcode of verbs; 0: a receive */
        int queue;
        size_t length_bytes;
    } transfer; /* in NCCL a member of a union, hence its alignment */
};
static_assert(sizeof(struct net_profile_ib_v1) == 40 && offsetof(struct net_profile_ib_v1, transfer.device) == 8,
              "NCCL ABI");
static_assert(offsetof(struct net_profile_ib_v1, transfer.id) == 16 &&
                  offsetof(struct net_profile_ib_v1, transfer.opcode) == 24 &&
                  offsetof(struct net_profile_ib_v1, transfer.queue) == 28 &&
                  offsetof(struct net_profile_ib_v1, transfer.length_bytes) == 32,
              "NCCL ABI");

/* Device-side handle of plugins that a GPU drives (v7 on); others ignore it. */
struct net_device_handle {
    int kind, version;
    void *handle;
    size_t size;
    int needs_progress;
};
static_assert(sizeof(struct net_device_handle) == 32, "NCCL ABI");

struct net_vdevice_v9 { /* v9 to v11 */
    int count;
    int device[NET_VDEVICE_MAX_V9];
};
struct net_vdevice_v12 {
    int count;
    int device[NET_VDEVICE_MAX_V12];
};
static_assert(sizeof(struct net_vdevice_v9) == 20 && sizeof(struct net_vdevice_v12) == 36, "NCCL ABI");

struct net_config { /* v10 on */
    int traffic_class;
};

struct net_peer_attributes {
    int32_t max_concurrent_peers, min_concurrent_peers, max_flows_per_peer, min_flows_per_peer;
};
struct net_attributes { /* v11 on: a hint about what will run */
    struct net_peer_attributes send, recv;
    uint32_t functions, algorithms, protocols;
};
static_assert(sizeof(struct net_attributes) == 44, "NCCL ABI");

/* ---- properties: each version inserted or appended members ---- */

struct net_properties_v6 {
    char *name, *pci_path;
    uint64_t guid;
    int ptr_support, speed, port;
    float latency;
    int max_comms, max_recvs;
};
struct net_properties_v7 {
    char *name, *pci_path;
    uint64_t guid;
    int ptr_support, speed, port;
    float latency;
    int max_comms, max_recvs, device_type, device_version;
};
struct net_properties_v8 {
    char *name, *pci_path;
    uint64_t guid;
    int ptr_support, reg_is_global, speed, port;
    float latency;
    int max_comms, max_recvs, device_type, device_version;
};
struct net_properties_v9 { /* v9 and v10 */
    char *name, *pci_path;
    uint64_t guid;
    int ptr_support, reg_is_global, force_flush, speed, port;
    float latency;
    int max_comms, max_recvs, device_type, device_version;
    struct net_vdevice_v9 vdevice;
    size_t max_p2p_bytes, max_coll_bytes;
};
struct net_properties_v11 {
    char *name, *pci_path;
    uint64_t guid;
    int ptr_support, reg_is_global, force_flush, speed, port;
    float latency;
    int max_comms, max_recvs, device_type, device_version;
    struct net_vdevice_v9 vdevice;
    size_t max_p2p_bytes, max_coll_bytes;
    int max_multi_request;
};
struct net_properties_v12 {
    char *name, *pci_path;
    uint64_t guid;
    int ptr_support, reg_is_global, force_flush, speed, port;
    float latency;
    int max_comms, max_recvs, device_type, device_version;
    struct net_vdevice_v12 vdevice;
    size_t max_p2p_bytes, max_coll_bytes;
    int max_multi_request;
    int16_t rail_id, plane_id;
};

#define NET_ASSERT_AT(type, member, offset) static_assert(offsetof(struct type, member) == (offset), "NCCL ABI")
static_assert(sizeof(struct net_properties_v6) == 48 && sizeof(struct net_properties_v7) == 56, "NCCL ABI");
static_assert(sizeof(struct net_properties_v8) == 64 && sizeof(struct net_properties_v9) == 104, "NCCL ABI");
static_assert(sizeof(struct net_properties_v11) == 112 && sizeof(struct net_properties_v12) == 128, "NCCL ABI");
NET_ASSERT_AT(net_properties_v6, guid, 16);
NET_ASSERT_AT(net_properties_v6, speed, 28);
NET_ASSERT_AT(net_properties_v6, latency, 36);
NET_ASSERT_AT(net_properties_v6, max_recvs, 44);
NET_ASSERT_AT(net_properties_v7, speed, 28);
NET_ASSERT_AT(net_properties_v7, device_version, 52);
NET_ASSERT_AT(net_properties_v8, reg_is_global, 28);
NET_ASSERT_AT(net_properties_v8, speed, 32);
NET_ASSERT_AT(net_properties_v8, device_version, 56);
NET_ASSERT_AT(net_properties_v9, force_flush, 32);
NET_ASSERT_AT(net_properties_v9, speed, 36);
NET_ASSERT_AT(net_properties_v9, device_version, 60);
NET_ASSERT_AT(net_properties_v9, vdevice, 64);
NET_ASSERT_AT(net_properties_v9, max_p2p_bytes, 88);
NET_ASSERT_AT(net_properties_v9, max_coll_bytes, 96);
NET_ASSERT_AT(net_properties_v11, vdevice, 64);
NET_ASSERT_AT(net_properties_v11, max_multi_request, 104);
NET_ASSERT_AT(net_properties_v12, vdevice, 64);
NET_ASSERT_AT(net_properties_v12, max_p2p_bytes, 104);
NET_ASSERT_AT(net_properties_v12, max_multi_request, 120);
NET_ASSERT_AT(net_properties_v12, rail_id, 124);
NET_ASSERT_AT(net_properties_v12, plane_id, 126);

/* ---- functions: the suffix is the first version with this signature ---- */

typedef net_result net_init_v6(net_log_fn *log);
typedef net_result net_init_v10(net_log_fn *log, net_profile_fn *profile);
typedef net_result net_init_v11(void **context, uint64_t comm_id, struct net_config *config, net_log_fn *log,
                                net_profile_fn *profile);
typedef net_result net_devices_v6(int *count);
typedef net_result net_properties_v6_fn(int device, struct net_properties_v6 *properties);
typedef net_result net_properties_v7_fn(int device, struct net_properties_v7 *properties);
typedef net_result net_properties_v8_fn(int device, struct net_properties_v8 *properties);
typedef net_result net_properties_v9_fn(int device, struct net_properties_v9 *properties);
typedef net_result net_properties_v11_fn(int device, struct net_properties_v11 *properties);
typedef net_result net_properties_v12_fn(int device, struct net_properties_v12 *properties);
typedef net_result net_listen_v6(int device, void *handle, void **listen_comm);
typedef net_result net_listen_v11(void *context, int device, void *handle, void **listen_comm);
typedef net_result net_connect_v6(int device, void *handle, void **send_comm);
typedef net_result net_connect_v7(int device, void *handle, void **send_comm, struct net_device_handle **offload);
typedef net_result net_connect_v10(int device, struct net_config *config, void *handle, void **send_comm,
                                   struct net_device_handle **offload);
typedef net_result net_connect_v11(void *context, int device, void *handle, void **send_comm,
                                   struct net_device_handle **offload);
typedef net_result net_accept_v6(void *listen_comm, void **recv_comm);
typedef net_result net_accept_v7(void *listen_comm, void **recv_comm, struct net_device_handle **offload);
typedef net_result net_reg_v6(void *comm, void *data, int size, int type, void **mhandle);
typedef net_result net_reg_v8(void *comm, void *data, size_t size, int type, void **mhandle);
typedef net_result net_reg_dmabuf_v6(void *comm, void *data, size_t size, int type, uint64_t offset, int fd,
                                     void **mhandle);
typedef net_result net_dereg_v6(void *comm, void *mhandle);
typedef net_result net_isend_v6(void *comm, void *data, int size, int tag, void *mhandle, void **request);
typedef net_result net_isend_v9(void *comm, void *data, size_t size, int tag, void *mhandle, void **request);
typedef net_result net_isend_v10(void *comm, void *data, size_t size, int tag, void *mhandle, void *profile,
                                 void **request);
typedef net_result net_irecv_v6(void *comm, int n, void **data, int *sizes, int *tags, void **mhandles, void **request);
typedef net_result net_irecv_v9(void *comm, int n, void **data, size_t *sizes, int *tags, void **mhandles,
                                void **request);
typedef net_result net_irecv_v10(void *comm, int n, void **data, size_t *sizes, int *tags, void **mhandles,
                                 void **profiles, void **request);
typedef net_result net_iflush_v6(void *comm, int n, void **data, int *sizes, void **mhandles, void **request);
typedef net_result net_test_v6(void *request, int *done, int *sizes);
typedef net_result net_close_v6(void *comm);
typedef net_result net_device_mr_v7(void *comm, void *mhandle, void **device_mhandle);
typedef net_result net_consumed_v7(void *comm, int n, void *request);
typedef net_result net_make_vdevice_v9(int *device, struct net_vdevice_v9 *members);
typedef net_result net_make_vdevice_v12(int *device, struct net_vdevice_v12 *members);
typedef net_result net_finalize_v11(void *context);
typedef net_result net_set_attributes_v11(void *context, struct net_attributes *attributes);

/* ---- tables ---- */

/* The first 17 members keep their order in every version; only signatures change. */
#define NET_TABLE_HEAD(init_fn, properties_fn, listen_fn, connect_fn, accept_fn, reg_fn, isend_fn, irecv_fn)           \
    const char *name;                                                                                                  \
    init_fn *init;                                                                                                     \
    net_devices_v6 *devices;                                                                                           \
    properties_fn *properties;                                                                                         \
    listen_fn *listen;                                                                                                 \
    connect_fn *connect;                                                                                               \
    accept_fn *accept;                                                                                                 \
    reg_fn *reg;                                                                                                       \
    net_reg_dmabuf_v6 *reg_dmabuf;                                                                                     \
    net_dereg_v6 *dereg;                                                                                               \
    isend_fn *isend;                                                                                                   \
    irecv_fn *irecv;                                                                                                   \
    net_iflush_v6 *iflush;                                                                                             \
    net_test_v6 *test;                                                                                                 \
    net_close_v6 *close_send;                                                                                          \
    net_close_v6 *close_recv;                                                                                          \
    net_close_v6 *close_listen
#define NET_TABLE_OFFLOAD                                                                                              \
    net_device_mr_v7 *device_mr; /* may be NULL, like reg_dmabuf, consumed, make_vdevice and set_attributes */         \
    net_consumed_v7 *consumed

struct net_v6 {
    NET_TABLE_HEAD(net_init_v6, net_properties_v6_fn, net_listen_v6, net_connect_v6, net_accept_v6, net_reg_v6,
                   net_isend_v6, net_irecv_v6);
};
struct net_v7 {
    NET_TABLE_HEAD(net_init_v6, net_properties_v7_fn, net_listen_v6, net_connect_v7, net_accept_v7, net_reg_v6,
                   net_isend_v6, net_irecv_v6);
    NET_TABLE_OFFLOAD;
};
struct net_v8 {
    NET_TABLE_HEAD(net_init_v6, net_properties_v8_fn, net_listen_v6, net_connect_v7, net_accept_v7, net_reg_v8,
                   net_isend_v6, net_irecv_v6);
    NET_TABLE_OFFLOAD;
};
struct net_v9 {
    NET_TABLE_HEAD(net_init_v6, net_properties_v9_fn, net_listen_v6, net_connect_v7, net_accept_v7, net_reg_v8,
                   net_isend_v9, net_irecv_v9);
    NET_TABLE_OFFLOAD;
    net_make_vdevice_v9 *make_vdevice;
};
struct net_v10 {
    NET_TABLE_HEAD(net_init_v10, net_properties_v9_fn, net_listen_v6, net_connect_v10, net_accept_v7, net_reg_v8,
                   net_isend_v10, net_irecv_v10);
    NET_TABLE_OFFLOAD;
    net_make_vdevice_v9 *make_vdevice;
};
struct net_v11 {
    NET_TABLE_HEAD(net_init_v11, net_properties_v11_fn, net_listen_v11, net_connect_v11, net_accept_v7, net_reg_v8,
                   net_isend_v10, net_irecv_v10);
    NET_TABLE_OFFLOAD;
    net_make_vdevice_v9 *make_vdevice;
    net_finalize_v11 *finalize;
    net_set_attributes_v11 *set_attributes;
};
struct net_v12 {
    NET_TABLE_HEAD(net_init_v11, net_properties_v12_fn, net_listen_v11, net_connect_v11, net_accept_v7, net_reg_v8,
                   net_isend_v10, net_irecv_v10);
    NET_TABLE_OFFLOAD;
    net_make_vdevice_v12 *make_vdevice;
    net_finalize_v11 *finalize;
    net_set_attributes_v11 *set_attributes;
};

#define NET_ASSERT_SLOT(type, member, slot) NET_ASSERT_AT(type, member, (slot) * sizeof(void *))
#define NET_ASSERT_HEAD(type)                                                                                          \
    NET_ASSERT_SLOT(type, name, 0);                                                                                    \
    NET_ASSERT_SLOT(type, init, 1);                                                                                    \
    NET_ASSERT_SLOT(type, devices, 2);                                                                                 \
    NET_ASSERT_SLOT(type, properties, 3);                                                                              \
    NET_ASSERT_SLOT(type, listen, 4);                                                                                  \
    NET_ASSERT_SLOT(type, connect, 5);                                                                                 \
    NET_ASSERT_SLOT(type, accept, 6);                                                                                  \
    NET_ASSERT_SLOT(type, reg, 7);                                                                                     \
    NET_ASSERT_SLOT(type, reg_dmabuf, 8);                                                                              \
    NET_ASSERT_SLOT(type, dereg, 9);                                                                                   \
    NET_ASSERT_SLOT(type, isend, 10);                                                                                  \
    NET_ASSERT_SLOT(type, irecv, 11);                                                                                  \
    NET_ASSERT_SLOT(type, iflush, 12);                                                                                 \
    NET_ASSERT_SLOT(type, test, 13);                                                                                   \
    NET_ASSERT_SLOT(type, close_send, 14);                                                                             \
    NET_ASSERT_SLOT(type, close_recv, 15);                                                                             \
    NET_ASSERT_SLOT(type, close_listen, 16)
#define NET_ASSERT_OFFLOAD(type)                                                                                       \
    NET_ASSERT_HEAD(type);                                                                                             \
    NET_ASSERT_SLOT(type, device_mr, 17);                                                                              \
    NET_ASSERT_SLOT(type, consumed, 18)
#define NET_ASSERT_CONTEXT(type)                                                                                       \
    NET_ASSERT_OFFLOAD(type);                                                                                          \
    NET_ASSERT_SLOT(type, make_vdevice, 19);                                                                           \
    NET_ASSERT_SLOT(type, finalize, 20);                                                                               \
    NET_ASSERT_SLOT(type, set_attributes, 21)
NET_ASSERT_HEAD(net_v6);
NET_ASSERT_OFFLOAD(net_v7);
NET_ASSERT_OFFLOAD(net_v8);
NET_ASSERT_OFFLOAD(net_v9);
NET_ASSERT_SLOT(net_v9, make_vdevice, 19);
NET_ASSERT_OFFLOAD(net_v10);
NET_ASSERT_SLOT(net_v10, make_vdevice, 19);
NET_ASSERT_CONTEXT(net_v11);
NET_ASSERT_CONTEXT(net_v12);
static_assert(sizeof(struct net_v6) == 17 * sizeof(void *) && sizeof(struct net_v7) == 19 * sizeof(void *), "NCCL ABI");
static_assert(sizeof(struct net_v8) == 19 * sizeof(void *) && sizeof(struct net_v9) == 20 * sizeof(void *), "NCCL ABI");
static_assert(sizeof(struct net_v10) == 20 * sizeof(void *) && sizeof(struct net_v11) == 22 * sizeof(void *),
              "NCCL ABI");
static_assert(sizeof(struct net_v12) == 22 * sizeof(void *), "NCCL ABI");

#endif

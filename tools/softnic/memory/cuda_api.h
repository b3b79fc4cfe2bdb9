/* SPDX-License-Identifier: Apache-2.0 */
/* The CUDA driver, opened at run time: building needs no CUDA, and a process without it never notices. The declarations
 * of the few functions used are this project's own; tools/softnic/test/test_cuda_abi.c compares them with cuda.h where
 * the kernels are built. */
#ifndef SOFTNIC_CUDA_API_H
#define SOFTNIC_CUDA_API_H

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef unsigned long long sn_cu_ptr; /* a device address */

enum {
    SN_CU_OK = 0,
    SN_CU_NOT_INITIALIZED = 3,
    SN_CU_NOT_READY = 600,
    SN_CU_NOT_SUPPORTED = 801,
    SN_CU_ATTR_MEMORY_TYPE = 2,
    SN_CU_ATTR_BUFFER_ID = 7,
    SN_CU_ATTR_IS_MANAGED = 8,
    SN_CU_ATTR_DEVICE_ORDINAL = 9,
    SN_CU_ATTR_LEGACY_IPC = 10,
    SN_CU_MEMORY_HOST = 1,
    SN_CU_MEMORY_DEVICE = 2,
    SN_CU_DEVICE_ATTR_DMA_BUF = 124,
    SN_CU_STREAM_NON_BLOCKING = 1,
    SN_CU_EVENT_DISABLE_TIMING = 2,
    SN_CU_HOST_PORTABLE = 1,
    SN_CU_IPC_LAZY_PEER = 1,
    SN_CU_HANDLE_POSIX_FD = 1,
    SN_CU_LOCATION_DEVICE = 1,
    SN_CU_ACCESS_READWRITE = 3,
    SN_CU_CAPTURE_RELAXED = 2,
    SN_CU_WRITE_WORD = 5,
    SN_CU_COPY_STREAM_ORDER = 1,
    SN_CUDA_MAX_DEVS = 32,
    SN_CUDA_STREAMS = 8,
};

struct sn_cu_uuid {
    uint8_t bytes[16];
};

struct sn_cu_ipc {
    uint8_t bytes[64];
};

struct sn_cu_access {
    int location_type, location_id, flags;
};

/* An operation on memory that a stream carries out itself. Only one of the driver's operations is used: write a word of
 * 64 bits, after all earlier work of the stream is visible. */
struct sn_cu_mem_op {
    int operation; /* SN_CU_WRITE_WORD */
    sn_cu_ptr addr;
    uint64_t value;
    unsigned flags;
    sn_cu_ptr unused[2];
};

/* How copies of a batch are made. */
struct sn_cu_copy_attributes {
    int order;     /* SN_CU_COPY_STREAM_ORDER: the sources are read in the order of the stream */
    int unused[4]; /* hints for memory that may move */
    unsigned flags;
};

/* X(field, symbol, parameters): every one returns a CUresult. */
#define SN_CUDA_CALLS(X)                                                                                               \
    X(init, "cuInit", (unsigned flags))                                                                                \
    X(device_count, "cuDeviceGetCount", (int *count))                                                                  \
    X(device_get, "cuDeviceGet", (int *dev, int ordinal))                                                              \
    X(device_attribute, "cuDeviceGetAttribute", (int *value, int attribute, int dev))                                  \
    X(device_uuid, "cuDeviceGetUuid", (struct sn_cu_uuid * uuid, int dev))                                             \
    X(primary_retain, "cuDevicePrimaryCtxRetain", (void **ctx, int dev))                                               \
    X(primary_state, "cuDevicePrimaryCtxGetState", (int dev, unsigned *flags, int *active))                            \
    X(ctx_push, "cuCtxPushCurrent_v2", (void *ctx))                                                                    \
    X(ctx_pop, "cuCtxPopCurrent_v2", (void **ctx))                                                                     \
    X(capture_mode, "cuThreadExchangeStreamCaptureMode", (int *mode))                                                  \
    X(pointer_attribute, "cuPointerGetAttribute", (void *data, int attribute, sn_cu_ptr ptr))                          \
    X(address_range, "cuMemGetAddressRange_v2", (sn_cu_ptr * base, size_t * bytes, sn_cu_ptr ptr))                     \
    X(host_alloc, "cuMemHostAlloc", (void **host, size_t bytes, unsigned flags))                                       \
    X(ipc_get, "cuIpcGetMemHandle", (struct sn_cu_ipc * handle, sn_cu_ptr ptr))                                        \
    X(ipc_open, "cuIpcOpenMemHandle_v2", (sn_cu_ptr * ptr, struct sn_cu_ipc handle, unsigned flags))                   \
    X(ipc_close, "cuIpcCloseMemHandle", (sn_cu_ptr ptr))                                                               \
    X(vmm_retain, "cuMemRetainAllocationHandle", (unsigned long long *handle, void *addr))                             \
    X(vmm_export, "cuMemExportToShareableHandle",                                                                      \
      (void *out, unsigned long long handle, int type, unsigned long long flags))                                      \
    X(vmm_import, "cuMemImportFromShareableHandle", (unsigned long long *handle, void *os_handle, int type))           \
    X(vmm_release, "cuMemRelease", (unsigned long long handle))                                                        \
    X(vmm_reserve, "cuMemAddressReserve",                                                                              \
      (sn_cu_ptr * ptr, size_t bytes, size_t alignment, sn_cu_ptr wanted, unsigned long long flags))                   \
    X(vmm_free, "cuMemAddressFree", (sn_cu_ptr ptr, size_t bytes))                                                     \
    X(vmm_map, "cuMemMap",                                                                                             \
      (sn_cu_ptr ptr, size_t bytes, size_t offset, unsigned long long handle, unsigned long long flags))               \
    X(vmm_unmap, "cuMemUnmap", (sn_cu_ptr ptr, size_t bytes))                                                          \
    X(vmm_access, "cuMemSetAccess", (sn_cu_ptr ptr, size_t bytes, const struct sn_cu_access *desc, size_t count))      \
    X(copy, "cuMemcpyAsync", (sn_cu_ptr dst, sn_cu_ptr src, size_t bytes, void *stream))                               \
    X(mem_ops, "cuStreamBatchMemOp_v2", (void *stream, unsigned count, struct sn_cu_mem_op *ops, unsigned flags))      \
    X(stream_create, "cuStreamCreate", (void **stream, unsigned flags))                                                \
    X(event_create, "cuEventCreate", (void **event, unsigned flags))                                                   \
    X(event_record, "cuEventRecord", (void *event, void *stream))                                                      \
    X(event_query, "cuEventQuery", (void *event))                                                                      \
    X(error_name, "cuGetErrorName", (int result, const char **name))

/* The same; NULL where the driver is older than 13.0. */
#define SN_CUDA_NEWER_CALLS(X)                                                                                         \
    X(copy_batch, "cuMemcpyBatchAsync_v2",                                                                             \
      (sn_cu_ptr * dst, sn_cu_ptr * src, size_t * bytes, size_t count, struct sn_cu_copy_attributes * attributes,      \
       size_t * first_copies, size_t attribute_count, void *stream))

struct sn_cuda_stream;

struct sn_cuda {
#define SN_CUDA_FIELD(field, symbol, parameters) int(*field) parameters;
    SN_CUDA_CALLS(SN_CUDA_FIELD)
    SN_CUDA_NEWER_CALLS(SN_CUDA_FIELD)
#undef SN_CUDA_FIELD
};

/* A GPU as this process uses it: the primary context, which the application uses as well, and streams of our own in
 * it. */
struct sn_cuda_dev {
    int ordinal, dev;
    struct sn_cu_uuid uuid;
    void *ctx; /* NULL until used */
    struct sn_cuda_stream *streams[SN_CUDA_STREAMS];
    unsigned next_stream;
    int saved_events;
    void *events[256]; /* created, not in use */
};

/* The driver. start: open and initialize it if the application has not; otherwise NULL unless it is loaded already.
 * NULL without a driver. Any thread. */
const struct sn_cuda *sn_cuda_get(bool start);

/* Whether this process could load the driver. It is not initialized: that would slow every program down on a GPU host,
 * and CUDA would not survive a later fork. Any thread. */
bool sn_cuda_installed(void);

/* Log that a call failed. Return -EIO. */
int sn_cuda_failed(const struct sn_cuda *cuda, const char *call, int result);

/* How many GPUs this process sees; 0 without a driver. */
int sn_cuda_count(const struct sn_cuda *cuda);

/* A GPU made ready for use (context retained, streams made), or NULL (logged). */
struct sn_cuda_dev *sn_cuda_dev_get(const struct sn_cuda *cuda, int ordinal);

/* The ordinal of a GPU here, or -1 when this process cannot see that GPU. */
int sn_cuda_dev_find(const struct sn_cuda *cuda, const struct sn_cu_uuid *uuid);

/* The GPU to work from when no memory of this process decides it: one that is ready, since making one ready (streams,
 * pinned memory) may wait for kernels; else one whose context the application has made; else `liked`; else 0. `liked`
 * is tried first each time. */
int sn_cuda_dev_prefer(const struct sn_cuda *cuda, int liked);

/* Make the GPU current for this thread, and lift the restrictions of a stream capture that another thread may have
 * under way: nothing done here touches a captured stream. Pairs with sn_cuda_leave. Return 0 or -EIO (logged). */
int sn_cuda_enter(const struct sn_cuda *cuda, struct sn_cuda_dev *dev, int *saved_mode);
void sn_cuda_leave(const struct sn_cuda *cuda, int saved_mode);

/* An event of this GPU, which must be current, or NULL (logged). Give it back when it has completed. */
void *sn_cuda_event_take(const struct sn_cuda *cuda, struct sn_cuda_dev *dev);
void sn_cuda_event_give(struct sn_cuda_dev *dev, void *event);

#endif

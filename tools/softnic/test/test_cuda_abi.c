/* SPDX-License-Identifier: Apache-2.0 */
/* Compare tools/softnic/memory/cuda_api.h and the calls of tools/softnic/cuda/driver_calls.c with the driver's own
 * header: most of the test is that this compiles. */
#include <cuda.h>
#include <stdio.h>
#include <string.h>

#include "tools/softnic/cuda/driver_calls.c"

#define SAME(ours, theirs) static_assert((int)(ours) == (int)(theirs), #theirs)
SAME(SN_CU_OK, CUDA_SUCCESS);
SAME(SN_CU_NOT_INITIALIZED, CUDA_ERROR_NOT_INITIALIZED);
SAME(SN_CU_NOT_READY, CUDA_ERROR_NOT_READY);
SAME(SN_CU_ATTR_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
SAME(SN_CU_ATTR_BUFFER_ID, CU_POINTER_ATTRIBUTE_BUFFER_ID);
SAME(SN_CU_ATTR_IS_MANAGED, CU_POINTER_ATTRIBUTE_IS_MANAGED);
SAME(SN_CU_ATTR_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
SAME(SN_CU_ATTR_LEGACY_IPC, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE);
SAME(SN_CU_MEMORY_HOST, CU_MEMORYTYPE_HOST);
SAME(SN_CU_MEMORY_DEVICE, CU_MEMORYTYPE_DEVICE);
SAME(SN_CU_DEVICE_ATTR_DMA_BUF, CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED);
SAME(SN_CU_STREAM_NON_BLOCKING, CU_STREAM_NON_BLOCKING);
SAME(SN_CU_EVENT_DISABLE_TIMING, CU_EVENT_DISABLE_TIMING);
SAME(SN_CU_HOST_PORTABLE, CU_MEMHOSTALLOC_PORTABLE);
SAME(SN_CU_IPC_LAZY_PEER, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
SAME(SN_CU_HANDLE_POSIX_FD, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
SAME(SN_CU_LOCATION_DEVICE, CU_MEM_LOCATION_TYPE_DEVICE);
SAME(SN_CU_ACCESS_READWRITE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
SAME(SN_CU_CAPTURE_RELAXED, CU_STREAM_CAPTURE_MODE_RELAXED);
SAME(SN_CU_WRITE_WORD, CU_STREAM_MEM_OP_WRITE_VALUE_64);
SAME(CU_STREAM_WRITE_VALUE_DEFAULT, 0);
SAME(SN_CU_NOT_SUPPORTED, CUDA_ERROR_NOT_SUPPORTED);

SAME(sizeof(sn_cu_ptr), sizeof(CUdeviceptr));
SAME(sizeof(struct sn_cu_uuid), sizeof(CUuuid));
SAME(sizeof(struct sn_cu_ipc), sizeof(CUipcMemHandle));
SAME(sizeof(struct sn_cu_access), sizeof(CUmemAccessDesc));
SAME(offsetof(struct sn_cu_access, location_type), offsetof(CUmemAccessDesc, location.type));
SAME(offsetof(struct sn_cu_access, location_id), offsetof(CUmemAccessDesc, location.id));
SAME(offsetof(struct sn_cu_access, flags), offsetof(CUmemAccessDesc, flags));

SAME(sizeof(struct sn_cu_mem_op), sizeof(CUstreamBatchMemOpParams));
SAME(offsetof(struct sn_cu_mem_op, operation), offsetof(CUstreamBatchMemOpParams, operation));
SAME(offsetof(struct sn_cu_mem_op, addr), offsetof(CUstreamBatchMemOpParams, writeValue.address));
SAME(offsetof(struct sn_cu_mem_op, value), offsetof(CUstreamBatchMemOpParams, writeValue.value64));
SAME(offsetof(struct sn_cu_mem_op, flags), offsetof(CUstreamBatchMemOpParams, writeValue.flags));

#if CUDA_VERSION >= 13000
SAME(SN_CU_COPY_STREAM_ORDER, CU_MEMCPY_SRC_ACCESS_ORDER_STREAM);
SAME(CU_MEMCPY_FLAG_DEFAULT, 0);
SAME(sizeof(struct sn_cu_copy_attributes), sizeof(CUmemcpyAttributes));
SAME(offsetof(struct sn_cu_copy_attributes, order), offsetof(CUmemcpyAttributes, srcAccessOrder));
SAME(offsetof(struct sn_cu_copy_attributes, flags), offsetof(CUmemcpyAttributes, flags));
#    define NEWER_FUNCTIONS(X) X(copy_batch, cuMemcpyBatchAsync_v2)
#    define NEWER_CALLS(X)     SN_CUDA_NEWER_CALLS(X)
#else
#    define NEWER_FUNCTIONS(X)
#    define NEWER_CALLS(X)
#endif

SAME(LEGACY_STREAM, (uintptr_t)CU_STREAM_LEGACY);
SAME(THREAD_STREAM, (uintptr_t)CU_STREAM_PER_THREAD);
SAME(PTDS_FLAG, CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM);
SAME(TYPE_HOST, CU_MEMORYTYPE_HOST);
SAME(TYPE_UNIFIED, CU_MEMORYTYPE_UNIFIED);
SAME(sizeof(struct sn_cu_copy2d), sizeof(CUDA_MEMCPY2D));
SAME(sizeof(struct sn_cu_copy3d), sizeof(CUDA_MEMCPY3D));
#define SAME_FIELD(ours, theirs)                                                                                       \
    SAME(offsetof(struct sn_cu_copy2d, ours), offsetof(CUDA_MEMCPY2D, theirs));                                        \
    SAME(offsetof(struct sn_cu_copy3d, ours), offsetof(CUDA_MEMCPY3D, theirs))
SAME_FIELD(src_type, srcMemoryType);
SAME_FIELD(src_host, srcHost);
SAME_FIELD(src_device, srcDevice);
SAME_FIELD(dst_type, dstMemoryType);
SAME_FIELD(dst_host, dstHost);
SAME_FIELD(dst_device, dstDevice);
SAME_FIELD(width, WidthInBytes);
SAME_FIELD(height, Height);
SAME(offsetof(struct sn_cu_copy3d, depth), offsetof(CUDA_MEMCPY3D, Depth));

/* In the order of SN_CUDA_CALLS. */
#define FUNCTIONS(X)                                                                                                   \
    X(init, cuInit)                                                                                                    \
    X(device_count, cuDeviceGetCount)                                                                                  \
    X(device_get, cuDeviceGet)                                                                                         \
    X(device_attribute, cuDeviceGetAttribute)                                                                          \
    X(device_uuid, cuDeviceGetUuid)                                                                                    \
    X(primary_retain, cuDevicePrimaryCtxRetain)                                                                        \
    X(primary_state, cuDevicePrimaryCtxGetState)                                                                       \
    X(ctx_push, cuCtxPushCurrent_v2)                                                                                   \
    X(ctx_pop, cuCtxPopCurrent_v2)                                                                                     \
    X(capture_mode, cuThreadExchangeStreamCaptureMode)                                                                 \
    X(pointer_attribute, cuPointerGetAttribute)                                                                        \
    X(address_range, cuMemGetAddressRange_v2)                                                                          \
    X(host_alloc, cuMemHostAlloc)                                                                                      \
    X(ipc_get, cuIpcGetMemHandle)                                                                                      \
    X(ipc_open, cuIpcOpenMemHandle_v2)                                                                                 \
    X(ipc_close, cuIpcCloseMemHandle)                                                                                  \
    X(vmm_retain, cuMemRetainAllocationHandle)                                                                         \
    X(vmm_export, cuMemExportToShareableHandle)                                                                        \
    X(vmm_import, cuMemImportFromShareableHandle)                                                                      \
    X(vmm_release, cuMemRelease)                                                                                       \
    X(vmm_reserve, cuMemAddressReserve)                                                                                \
    X(vmm_free, cuMemAddressFree)                                                                                      \
    X(vmm_map, cuMemMap)                                                                                               \
    X(vmm_unmap, cuMemUnmap)                                                                                           \
    X(vmm_access, cuMemSetAccess)                                                                                      \
    X(copy, cuMemcpyAsync)                                                                                             \
    X(mem_ops, cuStreamBatchMemOp_v2)                                                                                  \
    X(stream_create, cuStreamCreate)                                                                                   \
    X(event_create, cuEventCreate)                                                                                     \
    X(event_record, cuEventRecord)                                                                                     \
    X(event_query, cuEventQuery)                                                                                       \
    X(error_name, cuGetErrorName)

/* -Wcast-function-type checks that the numbers of parameters are equal, that each pair has the same size, and that both
 * are pointers if one is. For a handle by value it sees only that the types differ; its size is compared above. */
#pragma GCC diagnostic error "-Wcast-function-type"
typedef CUresult ipc_open_type(CUdeviceptr *, CUipcMemHandle, unsigned);
static_assert(__builtin_types_compatible_p(__typeof__(cuIpcOpenMemHandle_v2), ipc_open_type), "cuIpcOpenMemHandle_v2");
#define cuIpcOpenMemHandle_v2  (CUresult(*)(CUdeviceptr *, struct sn_cu_ipc, unsigned))(void *) 0
#define CHECK(field, function) sizeof((__typeof__(((struct sn_cuda *)NULL)->field))function),
static const size_t checked[] = {FUNCTIONS(CHECK) NEWER_FUNCTIONS(CHECK)};
#undef cuIpcOpenMemHandle_v2

/* Those that stand in for the driver's. */
#define CHECK_OURS(name, symbol)              sizeof((__typeof__(&our_##symbol))symbol),
#define CHECK_OURS_BOTH(name, symbol, suffix) CHECK_OURS(name, symbol)
static const size_t checked_ours[] = {CALLS(CHECK_OURS, CHECK_OURS_BOTH)};

#define THEIR_NAME(field, function) #function,
static const char *const their_names[] = {FUNCTIONS(THEIR_NAME) NEWER_FUNCTIONS(THEIR_NAME)};
#define OUR_NAME(field, symbol, parameters) symbol,
static const char *const our_names[] = {SN_CUDA_CALLS(OUR_NAME) NEWER_CALLS(OUR_NAME)};
SAME(sizeof(our_names), sizeof(their_names));

int main(void)
{
    (void)checked_ours;
    for (size_t i = 0; i < sizeof(checked) / sizeof(checked[0]); i++)
        if (strcmp(our_names[i], their_names[i])) {
            fprintf(stderr, "call %zu is opened as %s, compared with %s\n", i, our_names[i], their_names[i]);
            return 1;
        }
    return 0;
}

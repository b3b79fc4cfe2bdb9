/* SPDX-License-Identifier: Apache-2.0 */
/* A CUDA driver without a GPU, to test programs of the driver API: libcuda.so.1 with the functions that the software
 * NIC, the transport and their tests call. "Device memory" is a memfd. Its device address is not accessible, so a stray
 * CPU access is a fault; the driver has its own mapping of it. Asynchronous copies run later, on a thread of their
 * stream. Everything that the real driver forbids or does slowly is an error here: calls without a current context,
 * copies from pageable memory, handles used on the wrong kind of memory, a DMA-BUF of less than whole pages. Addresses
 * are 64 bits, as CUdeviceptr is. */
#ifndef TEST_SOFTNIC_FAKE_CUDA_DRIVER_H
#define TEST_SOFTNIC_FAKE_CUDA_DRIVER_H

#include <stddef.h>
#include <stdint.h>

#pragma GCC visibility push(default) /* the rest of the library is not exported */

struct fake_ipc {
    uint8_t bytes[64];
};

/* As CUmemAllocationProp. */
struct fake_vmm_prop {
    int type, handle_types, location_type, location_id;
    void *win32;
    uint8_t flags[8]; /* [1]: a NIC may read and write it */
};
_Static_assert(sizeof(struct fake_vmm_prop) == 32, "as the real one's");

/* As CUstreamBatchMemOpParams, of a write. */
struct fake_mem_op {
    int operation;
    uint64_t addr, value;
    unsigned flags;
    uint64_t unused[2];
};
_Static_assert(sizeof(struct fake_mem_op) == 48, "as the real one's");

/* As CUmemcpyAttributes. */
struct fake_copy_attributes {
    int order, unused[4];
    unsigned flags;
};

/* With FAKE_CUDA_SHARED=FILE in the environment, all processes with the same file share failures on demand and counts
 * of calls: one process can request a failure that another one gets. */

/* Make the next call of that name fail. This works for calls that allocate, map, register, export a range, open memory
 * of another process, copy, or query an event. */
void fakeCudaFail(const char *call, int result);
/* Let the next `after` calls succeed, and the one after them fail. */
void fakeCudaFailLater(const char *call, int after, int result);

/* Return how often it was called; works for calls that can be made to fail. */
int fakeCudaCalls(const char *call);

/* The objects that this process has at the moment. */
struct fake_counts {
    int started;    /* cuInit was called */
    int allocated;  /* by cuMemAlloc */
    int reserved;   /* by cuMemAddressReserve */
    int mapped;     /* by cuMemMap */
    int registered; /* by cuMemHostRegister */
    int refused;    /* calls so far that freed something unknown or already freed */
};
void fakeCudaCounts(struct fake_counts *out);

int cuInit(unsigned flags);
int cuGetErrorName(int result, const char **name);
int cuGetErrorString(int result, const char **text);
int cuDeviceGetCount(int *count);
int cuDeviceGet(int *dev, int ordinal);
int cuDeviceGetAttribute(int *value, int attribute, int dev);
int cuDeviceGetUuid(void *uuid, int dev);
int cuDevicePrimaryCtxRetain(void **ctx, int dev);
int cuDevicePrimaryCtxGetState(int dev, unsigned *flags, int *active);
int cuCtxPushCurrent_v2(void *ctx);
int cuCtxPopCurrent_v2(void **ctx);
int cuCtxGetDevice(int *dev);
int cuCtxGetCurrent(void **ctx);
int cuCtxSetCurrent(void *ctx);
int cuCtxSynchronize(void);
int cuThreadExchangeStreamCaptureMode(int *mode);
int cuPointerGetAttribute(void *data, int attribute, uint64_t va);
int cuMemGetAddressRange_v2(uint64_t *base, size_t *bytes, uint64_t va);
int cuMemAlloc_v2(uint64_t *va, size_t bytes);
int cuMemFree_v2(uint64_t va);
int cuMemHostAlloc(void **host, size_t bytes, unsigned flags);
int cuMemHostRegister_v2(void *host, size_t bytes, unsigned flags);
int cuMemHostUnregister(void *host);
int cuMemHostGetDevicePointer_v2(uint64_t *va, void *host, unsigned flags);
int cuMemGetHandleForAddressRange(void *handle, uint64_t va, size_t bytes, int type, unsigned long long flags);
int cuIpcGetMemHandle(struct fake_ipc *out, uint64_t va);
int cuIpcOpenMemHandle_v2(uint64_t *va, struct fake_ipc in, unsigned flags);
int cuIpcCloseMemHandle(uint64_t va);
int cuMemGetAllocationGranularity(size_t *bytes, const struct fake_vmm_prop *prop, int option);
int cuMemCreate(unsigned long long *handle, size_t bytes, const struct fake_vmm_prop *prop, unsigned long long flags);
int cuMemRelease(unsigned long long handle);
int cuMemRetainAllocationHandle(unsigned long long *handle, void *addr);
int cuMemExportToShareableHandle(void *out, unsigned long long handle, int type, unsigned long long flags);
int cuMemImportFromShareableHandle(unsigned long long *handle, void *os_handle, int type);
int cuMemAddressReserve(uint64_t *va, size_t bytes, size_t alignment, uint64_t wanted, unsigned long long flags);
int cuMemAddressFree(uint64_t va, size_t bytes);
int cuMemMap(uint64_t va, size_t bytes, size_t offset, unsigned long long handle, unsigned long long flags);
int cuMemUnmap(uint64_t va, size_t bytes);
int cuMemSetAccess(uint64_t va, size_t bytes, const void *desc, size_t count);
int cuStreamCreate(void **stream, unsigned flags);
int cuMemcpyAsync(uint64_t dst, uint64_t src, size_t bytes, void *stream);
int cuMemcpyBatchAsync_v2(uint64_t *dst, uint64_t *src, size_t *bytes, size_t count,
                          const struct fake_copy_attributes *attributes, const size_t *first_copies,
                          size_t attribute_count, void *stream);
int cuStreamBatchMemOp_v2(void *stream, unsigned count, const struct fake_mem_op *ops, unsigned flags);
int cuStreamQuery(void *stream);
int cuStreamSynchronize(void *stream);
int cuStreamIsCapturing(void *stream, int *status);
int cuStreamBeginCapture_v2(void *stream, int mode);
int cuStreamEndCapture(void *stream, void **graph);
int cuEventCreate(void **event, unsigned flags);
int cuEventRecord(void *event, void *stream);
int cuEventQuery(void *event);
int cuMemcpy(uint64_t dst, uint64_t src, size_t bytes);
int cuMemsetD8_v2(uint64_t va, unsigned char value, size_t bytes);
int cuMemcpyHtoD_v2(uint64_t dst, const void *src, size_t bytes);
int cuMemcpyDtoH_v2(void *dst, uint64_t src, size_t bytes);
int cuModuleLoadData(void **module, const void *image);
int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **parameters, void **extra);
int cuGetProcAddress(const char *name, void **out, int version, uint64_t flags);
int cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *status);

#pragma GCC visibility pop

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* The functions of driver.c; addresses are 64 bits, as CUdeviceptr is. */
#ifndef TEST_SOFTNIC_FAKE_CUDA_DRIVER_H
#define TEST_SOFTNIC_FAKE_CUDA_DRIVER_H

#include <stddef.h>
#include <stdint.h>

struct fake_ipc {
    uint8_t bytes[64];
};

/* The beginning of CUmemAllocationProp. */
struct fake_vmm_prop {
    int type, handle_types, location_type, location_id;
    void *win32;
    uint8_t flags[32];
};

/* Make the next call of that name fail. Knows cuMemcpyAsync, cuEventQuery, cuIpcOpenMemHandle_v2,
 * cuMemImportFromShareableHandle. */
void fakeCudaFail(const char *call, int result);

int cuInit(unsigned flags);
int cuGetErrorName(int result, const char **name);
int cuDeviceGetCount(int *count);
int cuDeviceGet(int *dev, int ordinal);
int cuDeviceGetAttribute(int *value, int attribute, int dev);
int cuDeviceGetUuid(void *uuid, int dev);
int cuDevicePrimaryCtxRetain(void **ctx, int dev);
int cuDevicePrimaryCtxGetState(int dev, unsigned *flags, int *active);
int cuCtxPushCurrent_v2(void *ctx);
int cuCtxPopCurrent_v2(void **ctx);
int cuThreadExchangeStreamCaptureMode(int *mode);
int cuPointerGetAttribute(void *data, int attribute, uint64_t va);
int cuMemGetAddressRange_v2(uint64_t *base, size_t *bytes, uint64_t va);
int cuMemAlloc_v2(uint64_t *va, size_t bytes);
int cuMemFree_v2(uint64_t va);
int cuMemHostAlloc(void **host, size_t bytes, unsigned flags);
int cuIpcGetMemHandle(struct fake_ipc *out, uint64_t va);
int cuIpcOpenMemHandle_v2(uint64_t *va, struct fake_ipc in, unsigned flags);
int cuIpcCloseMemHandle(uint64_t va);
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
int cuEventCreate(void **event, unsigned flags);
int cuEventRecord(void *event, void *stream);
int cuEventQuery(void *event);
int cuMemcpyHtoD_v2(uint64_t dst, const void *src, size_t bytes);
int cuMemcpyDtoH_v2(void *dst, uint64_t src, size_t bytes);
int cuModuleLoadData(void **module, const void *image);

#endif

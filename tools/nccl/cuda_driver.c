/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/nccl/cuda_driver.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { CUDA_OK = 0, CUDA_NOT_READY = 600, STREAM_NON_BLOCKING = 1 };

/* CUDA's driver API on LP64: results are enums of int's size, handles are pointers, device pointers have 64 bits. */
static struct {
    int (*init)(unsigned flags);
    int (*device_count)(int *count);
    int (*device_get)(int *device, int ordinal);
    int (*context_retain)(void **context, int device);
    int (*context_set)(void *context);
    int (*mem_alloc)(cuda_ptr *ptr, size_t bytes);
    int (*copy_in_async)(cuda_ptr dst, const void *src, size_t bytes, cuda_stream stream);
    int (*copy_out)(void *dst, cuda_ptr src, size_t bytes);
    int (*copy_async)(cuda_ptr dst, cuda_ptr src, size_t bytes, cuda_stream stream);
    int (*fill_async)(cuda_ptr dst, unsigned char byte, size_t bytes, cuda_stream stream);
    int (*stream_new)(cuda_stream *stream, unsigned flags);
    int (*stream_query)(cuda_stream stream);
    int (*event_new)(cuda_event *event, unsigned flags);
    int (*event_mark)(cuda_event event, cuda_stream stream);
    int (*event_elapsed)(float *msec, cuda_event start, cuda_event end);
    int (*error_name)(int error, const char **name);
} cu;
static int open_result = 1;
static pthread_once_t open_once = PTHREAD_ONCE_INIT;

static void open_driver(void)
{
    static const struct {
        void *slot;
        const char *name;
    } symbols[] = {
        {&cu.init, "cuInit"},
        {&cu.device_count, "cuDeviceGetCount"},
        {&cu.device_get, "cuDeviceGet"},
        {&cu.context_retain, "cuDevicePrimaryCtxRetain"},
        {&cu.context_set, "cuCtxSetCurrent"},
        {&cu.mem_alloc, "cuMemAlloc_v2"},
        {&cu.copy_in_async, "cuMemcpyHtoDAsync_v2"},
        {&cu.copy_out, "cuMemcpyDtoH_v2"},
        {&cu.copy_async, "cuMemcpyDtoDAsync_v2"},
        {&cu.fill_async, "cuMemsetD8Async"},
        {&cu.stream_new, "cuStreamCreate"},
        {&cu.stream_query, "cuStreamQuery"},
        {&cu.event_new, "cuEventCreate"},
        {&cu.event_mark, "cuEventRecord"},
        {&cu.event_elapsed, "cuEventElapsedTime"},
        {&cu.error_name, "cuGetErrorName"},
    };
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);

    open_result = -ENOSYS;
    if (!library)
        return;
    for (size_t i = 0; i < sizeof(symbols) / sizeof(symbols[0]); i++) {
        *(void **)symbols[i].slot = dlsym(library, symbols[i].name);
        if (!*(void **)symbols[i].slot)
            return;
    }
    open_result = cu.init(0) == CUDA_OK ? 0 : -ENODEV;
}

static void must(int result, const char *call)
{
    const char *name = NULL;

    if (result == CUDA_OK)
        return;
    if (cu.error_name(result, &name) != CUDA_OK || !name)
        name = "unknown";
    fprintf(stderr, "perseus-nccl: %s failed: %s (%d)\n", call, name, result);
    exit(1);
}

int cuda_device_count(void)
{
    int count = 0;

    pthread_once(&open_once, open_driver);
    if (open_result || cu.device_count(&count) != CUDA_OK)
        return 0;
    return count;
}

int cuda_use_device(int device)
{
    void *context = NULL;
    int handle = 0;

    pthread_once(&open_once, open_driver);
    if (open_result) {
        fprintf(stderr, "perseus-nccl: no CUDA driver (libcuda.so.1): %d\n", open_result);
        return open_result;
    }
    must(cu.device_get(&handle, device), "cuDeviceGet");
    must(cu.context_retain(&context, handle), "cuDevicePrimaryCtxRetain");
    must(cu.context_set(context), "cuCtxSetCurrent");
    return 0;
}

cuda_ptr cuda_alloc(size_t bytes)
{
    cuda_ptr ptr = 0;

    must(cu.mem_alloc(&ptr, bytes), "cuMemAlloc");
    return ptr;
}

void cuda_copy_in_async(cuda_ptr dst, const void *src, size_t bytes, cuda_stream stream)
{
    must(cu.copy_in_async(dst, src, bytes, stream), "cuMemcpyHtoDAsync");
}

void cuda_copy_out(void *dst, cuda_ptr src, size_t bytes)
{
    must(cu.copy_out(dst, src, bytes), "cuMemcpyDtoH");
}

void cuda_copy_async(cuda_ptr dst, cuda_ptr src, size_t bytes, cuda_stream stream)
{
    must(cu.copy_async(dst, src, bytes, stream), "cuMemcpyDtoDAsync");
}

void cuda_fill_async(cuda_ptr dst, uint8_t byte, size_t bytes, cuda_stream stream)
{
    must(cu.fill_async(dst, byte, bytes, stream), "cuMemsetD8Async");
}

cuda_stream cuda_stream_new(void)
{
    cuda_stream stream = NULL;

    must(cu.stream_new(&stream, STREAM_NON_BLOCKING), "cuStreamCreate");
    return stream;
}

int cuda_stream_idle(cuda_stream stream)
{
    int result = cu.stream_query(stream);

    if (result == CUDA_NOT_READY)
        return 0;
    must(result, "cuStreamQuery");
    return 1;
}

cuda_event cuda_event_new(void)
{
    cuda_event event = NULL;

    must(cu.event_new(&event, 0), "cuEventCreate");
    return event;
}

void cuda_event_mark(cuda_event event, cuda_stream stream)
{
    must(cu.event_mark(event, stream), "cuEventRecord");
}

double cuda_event_usec(cuda_event start, cuda_event end)
{
    float msec = 0;

    must(cu.event_elapsed(&msec, start, end), "cuEventElapsedTime");
    return msec * 1e3;
}

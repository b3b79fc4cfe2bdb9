/* SPDX-License-Identifier: Apache-2.0 */
/* The calls of CUDA's driver API that perseus-nccl needs, found at run time, so that it builds and starts without
 * CUDA. */
#ifndef TOOLS_NCCL_CUDA_DRIVER_H
#define TOOLS_NCCL_CUDA_DRIVER_H

#include <stddef.h>
#include <stdint.h>

typedef struct cuda_stream_object *cuda_stream;
typedef struct cuda_event_object *cuda_event;
typedef uint64_t cuda_ptr;

/* Open libcuda.so.1 and make device's primary context current on this thread. Return 0, or -errno with a line
 * on stderr. */
int cuda_use_device(int device);
/* How many devices there are; 0 without a driver. */
int cuda_device_count(void);

/* When CUDA fails, each of these ends the process with a line that names the call: a benchmark cannot continue. */
cuda_ptr cuda_alloc(size_t bytes);
/* In the order of the stream: cuMemcpyHtoD returns before the bytes are in place, and no other stream waits for
 * them. */
void cuda_copy_in_async(cuda_ptr dst, const void *src, size_t bytes, cuda_stream stream);
void cuda_copy_out(void *dst, cuda_ptr src, size_t bytes);
void cuda_copy_async(cuda_ptr dst, cuda_ptr src, size_t bytes, cuda_stream stream);
void cuda_fill_async(cuda_ptr dst, uint8_t byte, size_t bytes, cuda_stream stream);
cuda_stream cuda_stream_new(void);
/* 1: all work is done, 0: not yet. */
int cuda_stream_idle(cuda_stream stream);
cuda_event cuda_event_new(void);
void cuda_event_mark(cuda_event event, cuda_stream stream);
double cuda_event_usec(cuda_event start, cuda_event end);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* Stands between the application and the CUDA driver for the calls that could wait for the GPU with the driver's lock
 * held: they wait before the call, without the lock. See "What a copy may wait for" in doc/softnic.md. */
#ifndef SOFTNIC_CUDA_DRIVER_CALLS_H
#define SOFTNIC_CUDA_DRIVER_CALLS_H

#include <stddef.h>

#include "tools/softnic/memory/cuda_api.h"

/* As in cuda.h (tools/softnic/test/test_cuda_abi.c compares them). */
struct sn_cu_copy2d {
    size_t src_x, src_y;
    int src_type;
    const void *src_host;
    sn_cu_ptr src_device;
    void *src_array;
    size_t src_pitch, dst_x, dst_y;
    int dst_type;
    void *dst_host;
    sn_cu_ptr dst_device;
    void *dst_array;
    size_t dst_pitch, width, height;
};

struct sn_cu_copy3d {
    size_t src_x, src_y, src_z, src_lod;
    int src_type;
    const void *src_host;
    sn_cu_ptr src_device;
    void *src_array, *reserved0;
    size_t src_pitch, src_height, dst_x, dst_y, dst_z, dst_lod;
    int dst_type;
    void *dst_host;
    sn_cu_ptr dst_device;
    void *dst_array, *reserved1;
    size_t dst_pitch, dst_height, width, height, depth;
};

#define SN_DRIVER_CALLS_LIBRARY "libsoftnic_driver_calls.so"

/* The function to call instead of that function of the driver; NULL: there is none. Any thread. */
__attribute__((visibility("default"))) void *softnic_driver_call(const char *symbol);

#endif

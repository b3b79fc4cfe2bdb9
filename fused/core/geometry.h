/* SPDX-License-Identifier: Apache-2.0 */
/* Arithmetic that the schedules of all kernels share. Plain C: the kernels, the host and the CPU protocol tests use it. */
#ifndef PERSEUS_FUSED_GEOMETRY_H
#define PERSEUS_FUSED_GEOMETRY_H

#include <stdint.h>

#ifdef __CUDACC__
#    define PRS_SHARED static __host__ __device__ __forceinline__
#else
#    define PRS_SHARED static inline
#endif

/* Flags and counters only grow, modulo 2^32. */
PRS_SHARED int prs_flag_reached(uint32_t seen, uint32_t want)
{
    return (int32_t)(seen - want) >= 0;
}

PRS_SHARED uint32_t prs_ceil_div(uint32_t a, uint32_t b)
{
    return (a + b - 1) / b;
}

#endif

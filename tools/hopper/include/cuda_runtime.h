/* SPDX-License-Identifier: Apache-2.0 */
/* Replaces CUDA's own header when kernels are compiled as C++ for the emulator: declares names that nvcc knows without
 * a header. The include path finds it first. The runtime's C interface is declared by CUDA's own cuda_runtime_api.h. */
#ifndef TOOLS_HOPPER_INCLUDE_CUDA_RUNTIME_H
#define TOOLS_HOPPER_INCLUDE_CUDA_RUNTIME_H

#include <algorithm>
#include <cmath>
#include <cstring>
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime_api.h>
#include <sched.h>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector_functions.h>

#include "tools/hopper/instructions.h"
#include "tools/hopper/launch.h"

#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__
#undef __noinline__
#define __noinline__ __attribute__((noinline))
#undef __shared__
/* Such a variable would be local to each thread here. Kernels use dynamic_shared() of ptx.cuh. */
#define __shared__          shared_variables_are_not_emulated_use_dynamic_shared
#define __builtin_assume(x) ((void)(x))

/* Those of the running thread; scheduler.cpp sets them whenever it switches. */
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
static const int warpSize = 32;

/* include/perseus/sync.h calls it while it waits, when it is compiled as host code. */
static inline int hopper_sched_yield(void)
{
    if (!hopper::here)
        return sched_yield();
    hopper::thread_sleep(40);
    return 0;
}
#define sched_yield hopper_sched_yield

/* prs_now_ns() calls it to limit a kernel's waits for its proxy. */
static inline int hopper_clock_gettime(clockid_t clock, struct timespec *now)
{
    return hopper::thread_gettime(clock, now);
}
#define clock_gettime hopper_clock_gettime

#define HOPPER_DEVICE static inline __attribute__((always_inline, unused))

/* ---- time ---- */
HOPPER_DEVICE long long clock64(void)
{
    return hopper::thread_clock();
}

HOPPER_DEVICE void __nanosleep(unsigned ns)
{
    hopper::thread_sleep(ns);
}

[[noreturn]] HOPPER_DEVICE void __trap(void)
{
    hopper::thread_trap();
}

/* ---- warps ---- */
template <class T> HOPPER_DEVICE uint64_t hopper_bits(T v)
{
    uint64_t bits = 0;
    static_assert(sizeof(T) <= 8, "what a shuffle moves");
    memcpy(&bits, &v, sizeof(T));
    return bits;
}

template <class T> HOPPER_DEVICE T hopper_value(uint64_t bits)
{
    T v;
    memcpy(&v, &bits, sizeof(T));
    return v;
}

HOPPER_DEVICE uint32_t hopper_lane(void)
{
    return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32;
}

HOPPER_DEVICE void __syncwarp(unsigned mask = 0xffffffffu)
{
    hopper::warp_meet("__syncwarp", mask, 0, nullptr);
}

HOPPER_DEVICE unsigned __ballot_sync(unsigned mask, int predicate)
{
    uint64_t values[32];
    unsigned votes = 0;
    hopper::warp_meet("__ballot_sync", mask, predicate != 0, values);
    for (int l = 0; l < 32; l++)
        votes |= (mask >> l & 1 && values[l]) ? 1u << l : 0;
    return votes;
}

HOPPER_DEVICE int __any_sync(unsigned mask, int predicate)
{
    return __ballot_sync(mask, predicate) != 0;
}

HOPPER_DEVICE int __all_sync(unsigned mask, int predicate)
{
    return __ballot_sync(mask, predicate) == mask;
}

template <class T> HOPPER_DEVICE T hopper_shuffle(unsigned mask, T mine, int from, bool keep)
{
    uint64_t values[32];
    hopper::warp_meet("shfl.sync", mask, hopper_bits(mine), values);
    return keep || from < 0 || from > 31 ? mine : hopper_value<T>(values[from]);
}

template <class T> HOPPER_DEVICE T __shfl_sync(unsigned mask, T v, int lane, int width = 32)
{
    int me = (int)hopper_lane();
    return hopper_shuffle(mask, v, me / width * width + (lane & (width - 1)), false);
}

template <class T> HOPPER_DEVICE T __shfl_xor_sync(unsigned mask, T v, int bits, int width = 32)
{
    int me = (int)hopper_lane(), from = me ^ bits;
    return hopper_shuffle(mask, v, from, from / width > me / width);
}

template <class T> HOPPER_DEVICE T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32)
{
    int me = (int)hopper_lane(), from = me - (int)delta;
    return hopper_shuffle(mask, v, from, from < me / width * width);
}

template <class T> HOPPER_DEVICE T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32)
{
    int me = (int)hopper_lane(), from = me + (int)delta;
    return hopper_shuffle(mask, v, from, from >= me / width * width + width);
}

template <class T, class Join> HOPPER_DEVICE T hopper_reduce(unsigned mask, T v, Join join)
{
    uint64_t values[32];
    T sum = v;
    hopper::warp_meet("redux.sync", mask, hopper_bits(v), values);
    for (uint32_t l = 0; l < 32; l++)
        if (l != hopper_lane() && (mask >> l & 1))
            sum = join(sum, hopper_value<T>(values[l]));
    return sum;
}

template <class T> HOPPER_DEVICE T __reduce_add_sync(unsigned mask, T v)
{
    return hopper_reduce(mask, v, [](T a, T b) { return (T)(a + b); });
}

template <class T> HOPPER_DEVICE T __reduce_max_sync(unsigned mask, T v)
{
    return hopper_reduce(mask, v, [](T a, T b) { return a > b ? a : b; });
}

template <class T> HOPPER_DEVICE T __reduce_min_sync(unsigned mask, T v)
{
    return hopper_reduce(mask, v, [](T a, T b) { return a < b ? a : b; });
}

template <class T> HOPPER_DEVICE T __reduce_or_sync(unsigned mask, T v)
{
    return hopper_reduce(mask, v, [](T a, T b) { return (T)(a | b); });
}

template <class T> HOPPER_DEVICE T __reduce_and_sync(unsigned mask, T v)
{
    return hopper_reduce(mask, v, [](T a, T b) { return (T)(a & b); });
}

template <class T> HOPPER_DEVICE unsigned __match_any_sync(unsigned mask, T v)
{
    uint64_t values[32];
    unsigned same = 0;
    hopper::warp_meet("match.sync", mask, hopper_bits(v), values);
    for (int l = 0; l < 32; l++)
        same |= (mask >> l & 1 && values[l] == hopper_bits(v)) ? 1u << l : 0;
    return same;
}

/* ---- CTA ---- */
HOPPER_DEVICE void __syncthreads(void)
{
    hopper::block_barrier(0, 0, true);
}

HOPPER_DEVICE int __syncthreads_count(int predicate)
{
    return (int)hopper::block_count(predicate != 0);
}

HOPPER_DEVICE int __syncthreads_or(int predicate)
{
    return hopper::block_count(predicate != 0) != 0;
}

HOPPER_DEVICE int __syncthreads_and(int predicate)
{
    return hopper::block_count(predicate == 0) == 0;
}

/* ---- memory ---- */
HOPPER_DEVICE void __threadfence(void)
{
    hopper::atomic_fence(hopper::SCOPE_GPU);
}

HOPPER_DEVICE void __threadfence_system(void)
{
    hopper::atomic_fence(hopper::SCOPE_SYS);
}

HOPPER_DEVICE void __threadfence_block(void)
{
    hopper::atomic_fence(hopper::SCOPE_CTA);
}

template <class T> HOPPER_DEVICE T __ldg(const T *p)
{
    return *p;
}

template <class T> HOPPER_DEVICE T __ldcg(const T *p)
{
    return *p;
}

/* An atomic function of CUDA orders nothing else. */
template <hopper::scope SCOPE = hopper::SCOPE_GPU, class T, class Change>
HOPPER_DEVICE T hopper_atomic(T *p, Change change)
{
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "of a word");
    uint64_t old = 0; /* a guess: the first exchange returns the actual value */
    while (!hopper::atomic_swap(p, sizeof(T), &old, hopper_bits(change(hopper_value<T>(old))), hopper::ORDER_RELAXED,
                                SCOPE)) {
    }
    return hopper_value<T>(old);
}

#define HOPPER_ATOMIC(name, next)                                                                                      \
    template <hopper::scope SCOPE = hopper::SCOPE_GPU, class T, class V> HOPPER_DEVICE T name(T *p, V v)               \
    {                                                                                                                  \
        return hopper_atomic<SCOPE>(p, [v](T old) { return (T)(next); });                                              \
    }
HOPPER_ATOMIC(atomicAdd, old + (T)v)
HOPPER_ATOMIC(atomicSub, old - (T)v)
HOPPER_ATOMIC(atomicExch, ((void)old, v))
HOPPER_ATOMIC(atomicMax, old > (T)v ? old : (T)v)
HOPPER_ATOMIC(atomicMin, old < (T)v ? old : (T)v)
HOPPER_ATOMIC(atomicOr, old | (T)v)
HOPPER_ATOMIC(atomicAnd, old &(T)v)

template <hopper::scope SCOPE = hopper::SCOPE_GPU, class T, class V, class W>
HOPPER_DEVICE T atomicCAS(T *p, V want, W v)
{
    return hopper_atomic<SCOPE>(p, [want, v](T old) { return old == (T)want ? (T)v : old; });
}

#define atomicAdd_system  atomicAdd<hopper::SCOPE_SYS>
#define atomicAdd_block   atomicAdd<hopper::SCOPE_CTA>
#define atomicExch_system atomicExch<hopper::SCOPE_SYS>
#define atomicMax_system  atomicMax<hopper::SCOPE_SYS>
#define atomicOr_system   atomicOr<hopper::SCOPE_SYS>
#define atomicCAS_system  atomicCAS<hopper::SCOPE_SYS>

/* ---- numbers ---- */
HOPPER_DEVICE int __popc(unsigned v)
{
    return __builtin_popcount(v);
}

/* Four of the eight bytes of low and high, by the digits of `which`, the last digit first. */
HOPPER_DEVICE unsigned __byte_perm(unsigned low, unsigned high, unsigned which)
{
    unsigned long long all = (unsigned long long)high << 32 | low;
    unsigned v = 0;
    for (int i = 0; i < 4; i++)
        v |= (unsigned)(all >> (which >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return v;
}

HOPPER_DEVICE int __ffs(int v)
{
    return __builtin_ffs(v);
}

HOPPER_DEVICE int __clz(int v)
{
    return v == 0 ? 32 : __builtin_clz((unsigned)v);
}

HOPPER_DEVICE float __uint_as_float(unsigned v)
{
    return hopper_value<float>(v);
}

HOPPER_DEVICE unsigned __float_as_uint(float v)
{
    return (unsigned)hopper_bits(v);
}

HOPPER_DEVICE float __int_as_float(int v)
{
    return __uint_as_float((unsigned)v);
}

HOPPER_DEVICE int __float_as_int(float v)
{
    return (int)__float_as_uint(v);
}

HOPPER_DEVICE long long __double_as_longlong(double v)
{
    return (long long)hopper_bits(v);
}

#define __expf  expf
#define __logf  logf
#define __log2f log2f

HOPPER_DEVICE float __fdividef(float a, float b)
{
    return a / b;
}

HOPPER_DEVICE float __frcp_rn(float v)
{
    return 1.0f / v;
}

HOPPER_DEVICE float rsqrtf(float v)
{
    return 1.0f / sqrtf(v);
}

template <class A, class B> HOPPER_DEVICE typename std::common_type<A, B>::type min(A a, B b)
{
    return b < a ? b : a;
}

template <class A, class B> HOPPER_DEVICE typename std::common_type<A, B>::type max(A a, B b)
{
    return a < b ? b : a;
}

/* ---- launches ---- */
template <class... Want, class... Given>
static inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(Want...),
                                             Given &&...given)
{
    std::tuple<typename std::decay<Want>::type...> arguments(std::forward<Given>(given)...);
    return hopper::launch_enqueue(config, (const void *)kernel, [=] { std::apply(kernel, arguments); });
}

template <class T> static inline cudaError_t cudaMalloc(T **out, size_t bytes)
{
    return cudaMalloc((void **)out, bytes);
}

template <class... Want>
static inline cudaError_t cudaFuncSetAttribute(void (*kernel)(Want...), cudaFuncAttribute attribute, int value)
{
    return cudaFuncSetAttribute((const void *)kernel, attribute, value);
}

template <class... Want>
static inline cudaError_t cudaOccupancyMaxActiveClusters(int *count, void (*kernel)(Want...),
                                                         const cudaLaunchConfig_t *config)
{
    return cudaOccupancyMaxActiveClusters(count, (const void *)kernel, config);
}

#endif

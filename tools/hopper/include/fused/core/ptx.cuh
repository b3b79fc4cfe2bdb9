/* SPDX-License-Identifier: Apache-2.0 */
/* Replaces fused/core/ptx.cuh on the emulator: the same functions, each a call into tools/hopper/instructions.h.
 * tools/hopper/check_instructions.py checks that none is missing. */
#ifndef PERSEUS_FUSED_PTX_CUH
#define PERSEUS_FUSED_PTX_CUH

#include <cuda.h>
#include <cuda_runtime.h>
#include <perseus/sync.h>
#include <stdint.h>

#define PRS_DEVICE          static __device__ __inline__ __attribute__((always_inline, unused))
#define PRS_DEVICE_OUTLINED static __device__ __noinline__

PRS_DEVICE uint8_t *dynamic_shared(void)
{
    return (uint8_t *)hopper::shared_dynamic();
}

PRS_DEVICE uint32_t smem_address(const void *p)
{
    return hopper::shared_address(p);
}

PRS_DEVICE void cluster_arrive(void)
{
    hopper::cluster_barrier_arrive();
}

PRS_DEVICE void cluster_wait(void)
{
    hopper::cluster_barrier_wait();
}

PRS_DEVICE uint64_t global_timer_ns(void)
{
    return hopper::thread_timer_ns();
}

PRS_DEVICE void sleep_until(int64_t until)
{
    while (clock64() < until)
        __nanosleep(100);
}

/* ---- registers ---- */
template <int N> PRS_DEVICE void registers_take(void)
{
    hopper::warpgroup_registers(N, true);
}

template <int N> PRS_DEVICE void registers_give(void)
{
    hopper::warpgroup_registers(N, false);
}

/* ---- named barriers ---- */
PRS_DEVICE void barrier_sync(uint32_t id, uint32_t threads)
{
    hopper::block_barrier(id, threads, true);
}

PRS_DEVICE void barrier_arrive(uint32_t id, uint32_t threads)
{
    hopper::block_barrier(id, threads, false);
}

/* ---- mbarrier ---- */
PRS_DEVICE void mbarrier_init(uint64_t *bar, uint32_t arrivals)
{
    hopper::mbarrier_start(smem_address(bar), arrivals);
}

PRS_DEVICE void mbarrier_init_fence(void)
{
    hopper::mbarrier_start_fence();
}

PRS_DEVICE void mbarrier_expect(uint64_t *bar, uint32_t bytes)
{
    hopper::mbarrier_signal(smem_address(bar), 1, bytes, hopper::SCOPE_CTA);
}

PRS_DEVICE void mbarrier_arrive(uint64_t *bar)
{
    hopper::mbarrier_signal(smem_address(bar), 1, 0, hopper::SCOPE_CTA);
}

PRS_DEVICE void mbarrier_arrive_at(uint64_t *bar, uint32_t cta)
{
    hopper::mbarrier_signal(hopper::shared_map(smem_address(bar), cta), 1, 0, hopper::SCOPE_CLUSTER);
}

PRS_DEVICE bool mbarrier_try_wait(uint64_t *bar, uint32_t parity)
{
    return hopper::mbarrier_done(smem_address(bar), parity);
}

PRS_DEVICE bool mbarrier_test(uint64_t *bar, uint32_t parity)
{
    return hopper::mbarrier_done(smem_address(bar), parity);
}

PRS_DEVICE void mbarrier_wait(uint64_t *bar, uint32_t parity)
{
    hopper::mbarrier_block(smem_address(bar), parity);
}

/* ---- bulk copies ---- */
PRS_DEVICE void tensor_map_prefetch(const CUtensorMap *map)
{
    hopper::tile_prefetch(map);
}

PRS_DEVICE void tma_load_2d(void *dst, const CUtensorMap *map, uint64_t *bar, int32_t x, int32_t y)
{
    int32_t at[] = {x, y};
    hopper::tile_load(smem_address(dst), map, smem_address(bar), at, 2, 0);
}

PRS_DEVICE void tma_load_3d(void *dst, const CUtensorMap *map, uint64_t *bar, int32_t x, int32_t y, int32_t z)
{
    int32_t at[] = {x, y, z};
    hopper::tile_load(smem_address(dst), map, smem_address(bar), at, 3, 0);
}

PRS_DEVICE void tma_load_4d(void *dst, const CUtensorMap *map, uint64_t *bar, int32_t x, int32_t y, int32_t z,
                            int32_t u)
{
    int32_t at[] = {x, y, z, u};
    hopper::tile_load(smem_address(dst), map, smem_address(bar), at, 4, 0);
}

PRS_DEVICE void tma_load_5d(void *dst, const CUtensorMap *map, uint64_t *bar, int32_t x, int32_t y, int32_t z,
                            int32_t u, int32_t v)
{
    int32_t at[] = {x, y, z, u, v};
    hopper::tile_load(smem_address(dst), map, smem_address(bar), at, 5, 0);
}

PRS_DEVICE void tma_load_2d_multicast(void *dst, const CUtensorMap *map, uint64_t *bar, int32_t x, int32_t y,
                                      uint16_t ctas)
{
    int32_t at[] = {x, y};
    hopper::tile_load(smem_address(dst), map, smem_address(bar), at, 2, ctas);
}

PRS_DEVICE void tma_store_2d(const CUtensorMap *map, const void *src, int32_t x, int32_t y)
{
    int32_t at[] = {x, y};
    hopper::tile_store(map, smem_address(src), at, 2, hopper::REDUCE_NONE);
}

PRS_DEVICE void tma_store_3d(const CUtensorMap *map, const void *src, int32_t x, int32_t y, int32_t z)
{
    int32_t at[] = {x, y, z};
    hopper::tile_store(map, smem_address(src), at, 3, hopper::REDUCE_NONE);
}

PRS_DEVICE void bulk_load(void *dst, const void *src, uint32_t bytes, uint64_t *bar)
{
    hopper::bulk_load_bytes(smem_address(dst), src, bytes, smem_address(bar), 0);
}

PRS_DEVICE void bulk_store(void *dst, const void *src, uint32_t bytes)
{
    hopper::bulk_store_bytes(dst, smem_address(src), bytes, hopper::REDUCE_NONE);
}

PRS_DEVICE void bulk_add_f32(float *dst, const void *src, uint32_t bytes)
{
    hopper::bulk_store_bytes(dst, smem_address(src), bytes, hopper::REDUCE_ADD_F32);
}

PRS_DEVICE void bulk_send(void *dst, const void *src, uint32_t bytes, uint64_t *bar, uint32_t cta)
{
    hopper::bulk_copy_shared(hopper::shared_map(smem_address(dst), cta), smem_address(src), bytes,
                             hopper::shared_map(smem_address(bar), cta));
}

PRS_DEVICE void bulk_commit(void)
{
    hopper::group_commit();
}

template <int N> PRS_DEVICE void bulk_wait_read(void)
{
    hopper::group_wait(N, true);
}

template <int N> PRS_DEVICE void bulk_wait_done(void)
{
    hopper::group_wait(N, false);
}

/* ---- proxies, flags ---- */
PRS_DEVICE void fence_async_shared(void)
{
    hopper::shared_fence_async();
}

PRS_DEVICE void fence_async_global(void)
{
    hopper::global_fence_async();
}

PRS_DEVICE uint32_t load_acquire_sys(const uint32_t *p)
{
    return (uint32_t)hopper::atomic_load(p, 4, hopper::ORDER_ACQUIRE, hopper::SCOPE_SYS);
}

PRS_DEVICE void store_release_sys(uint32_t *p, uint32_t v)
{
    hopper::atomic_store(p, 4, v, hopper::ORDER_RELEASE, hopper::SCOPE_SYS);
}

PRS_DEVICE uint4 load_relaxed_sys_v4(const void *p)
{
    const uint32_t *words = (const uint32_t *)p;
    uint32_t v[4];
    for (int i = 0; i < 4; i++)
        v[i] = (uint32_t)hopper::atomic_load(words + i, 4, hopper::ORDER_RELAXED, hopper::SCOPE_SYS);
    return make_uint4(v[0], v[1], v[2], v[3]);
}

PRS_DEVICE void store_relaxed_sys_v4(void *p, uint4 v)
{
    uint32_t *words = (uint32_t *)p;
    const uint32_t values[4] = {v.x, v.y, v.z, v.w};
    for (int i = 0; i < 4; i++)
        hopper::atomic_store(words + i, 4, values[i], hopper::ORDER_RELAXED, hopper::SCOPE_SYS);
}

PRS_DEVICE void fence_release_sys(void)
{
    hopper::atomic_fence(hopper::SCOPE_SYS);
}

PRS_DEVICE void add_relaxed_sys(uint32_t *p, uint32_t v)
{
    (void)hopper::atomic_add(p, 4, v, hopper::ORDER_RELAXED, hopper::SCOPE_SYS);
}

PRS_DEVICE void fence_release_gpu(void)
{
    hopper::atomic_fence(hopper::SCOPE_GPU);
}

PRS_DEVICE void add_relaxed_gpu(uint32_t *p, uint32_t v)
{
    (void)hopper::atomic_add(p, 4, v, hopper::ORDER_RELAXED, hopper::SCOPE_GPU);
}

PRS_DEVICE uint32_t add_acq_rel_gpu(uint32_t *p, uint32_t v)
{
    return (uint32_t)hopper::atomic_add(p, 4, v, hopper::ORDER_ACQ_REL, hopper::SCOPE_GPU);
}

/* ---- shared memory vectors ---- */
PRS_DEVICE void store_matrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3)
{
    uint32_t registers[4] = {r0, r1, r2, r3};
    hopper::warp_store_matrix(address, registers, 4, false);
}

PRS_DEVICE void store_shared_v4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3)
{
    uint32_t registers[4] = {r0, r1, r2, r3};
    hopper::shared_store(address, registers, 16);
}

PRS_DEVICE void store_shared_at(uint32_t *to, uint32_t v, uint32_t cta)
{
    hopper::shared_store(hopper::shared_map(smem_address(to), cta), &v, 4);
}

PRS_DEVICE uint4 load_shared_v4(uint32_t address)
{
    uint4 v;
    memcpy(&v, hopper::shared_load(address, 16), 16);
    return v;
}

PRS_DEVICE uint32_t pack_bf16x2(float lo, float hi)
{
    __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
    uint32_t bits;
    memcpy(&bits, &v, 4);
    return bits;
}

PRS_DEVICE uint32_t pack_f16x2(float lo, float hi)
{
    __half2 v = __floats2half2_rn(lo, hi);
    uint32_t bits;
    memcpy(&bits, &v, 4);
    return bits;
}

PRS_DEVICE float f16_low(uint32_t v)
{
    return __half2float(__ushort_as_half((unsigned short)v));
}

PRS_DEVICE float f16_high(uint32_t v)
{
    return f16_low(v >> 16);
}

PRS_DEVICE uint32_t pack_e4m3x2(float lo, float hi)
{
    return __nv_cvt_float2_to_fp8x2(make_float2(lo, hi), __NV_SATFINITE, __NV_E4M3);
}

PRS_DEVICE float exp2_fast(float x)
{
    return exp2f(x);
}

PRS_DEVICE float divide_fast(float a, float b)
{
    return a / b;
}

PRS_DEVICE float bf16_low(uint32_t v)
{
    return __uint_as_float(v << 16);
}

PRS_DEVICE float bf16_high(uint32_t v)
{
    return __uint_as_float(v & 0xffff0000u);
}

/* ---- tensor cores ---- */
PRS_DEVICE uint64_t matrix_descriptor(uint32_t address, uint32_t leading_bytes)
{
    return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)(leading_bytes >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 |
           (uint64_t)1 << 62;
}

PRS_DEVICE void wgmma_fence(void)
{
    hopper::wgmma_fence_registers();
}

PRS_DEVICE void wgmma_commit(void)
{
    hopper::wgmma_commit_group();
}

template <int N> PRS_DEVICE void wgmma_wait(void)
{
    hopper::wgmma_wait_group(N);
}

template <int N> PRS_DEVICE void registers_pin(float (&d)[N])
{
    (void)d;
}

/* Called by each wgmma with A in shared memory, for any N: it follows from the size of d. */
template <int TRANS_B, hopper::wgmma_type TYPE, int SIZE>
PRS_DEVICE void wgmma_shared(float (&d)[SIZE], uint64_t a, uint64_t b, uint32_t add)
{
    struct hopper::wgmma_call call = {SIZE * 2, a, b, NULL, add != 0, false, TRANS_B != 0, TYPE};
    hopper::wgmma_issue(d, &call);
}

/* The same with both operands transposed (MN-major). */
template <hopper::wgmma_type TYPE, int SIZE>
PRS_DEVICE void wgmma_outer(float (&d)[SIZE], uint64_t a, uint64_t b, uint32_t add)
{
    struct hopper::wgmma_call call = {SIZE * 2, a, b, NULL, add != 0, true, true, TYPE};
    hopper::wgmma_issue(d, &call);
}

/* The same with A in registers. */
template <int TRANS_B, hopper::wgmma_type TYPE, int SIZE>
PRS_DEVICE void wgmma_registers(float (&d)[SIZE], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b,
                                uint32_t add)
{
    uint32_t a[4] = {a0, a1, a2, a3};
    struct hopper::wgmma_call call = {SIZE * 2, 0, b, a, add != 0, false, TRANS_B != 0, TYPE};
    hopper::wgmma_issue(d, &call);
}

template <int TRANS_B> PRS_DEVICE void wgmma_m64n256k16_bf16(float (&d)[128], uint64_t a, uint64_t b, uint32_t add)
{
    wgmma_shared<TRANS_B, hopper::WGMMA_BF16>(d, a, b, add);
}

template <int TRANS_B> PRS_DEVICE void wgmma_m64n256k16_f16(float (&d)[128], uint64_t a, uint64_t b, uint32_t add)
{
    wgmma_shared<TRANS_B, hopper::WGMMA_F16>(d, a, b, add);
}

template <int TRANS_B> PRS_DEVICE void wgmma_m64n192k16_bf16(float (&d)[96], uint64_t a, uint64_t b, uint32_t add)
{
    wgmma_shared<TRANS_B, hopper::WGMMA_BF16>(d, a, b, add);
}

template <int TRANS_B> PRS_DEVICE void wgmma_m64n192k16_f16(float (&d)[96], uint64_t a, uint64_t b, uint32_t add)
{
    wgmma_shared<TRANS_B, hopper::WGMMA_F16>(d, a, b, add);
}

template <int TRANS_B> PRS_DEVICE void wgmma_m64n176k16_bf16(float (&d)[88], uint64_t a, uint64_t b, uint32_t add)
{
    wgmma_shared<TRANS_B, hopper::WGMMA_BF16>(d, a, b, add);
}

template <int TRANS_B> PRS_DEVICE void wgmma_m64n128k16_bf16(float (&d)[64], uint64_t a, uint64_t b, uint32_t add)
{
    wgmma_shared<TRANS_B, hopper::WGMMA_BF16>(d, a, b, add);
}

template <int TRANS_B> PRS_DEVICE void wgmma_m64n64k16_bf16(float (&d)[32], uint64_t a, uint64_t b, uint32_t add)
{
    wgmma_shared<TRANS_B, hopper::WGMMA_BF16>(d, a, b, add);
}

template <int TRANS_B> PRS_DEVICE void wgmma_m64n32k16_bf16(float (&d)[16], uint64_t a, uint64_t b, uint32_t add)
{
    wgmma_shared<TRANS_B, hopper::WGMMA_BF16>(d, a, b, add);
}

PRS_DEVICE void wgmma_m64n64k16_bf16_outer(float (&d)[32], uint64_t a, uint64_t b, uint32_t add)
{
    wgmma_outer<hopper::WGMMA_BF16>(d, a, b, add);
}

template <int TRANS_B> PRS_DEVICE void wgmma_m64n16k16_bf16(float (&d)[8], uint64_t a, uint64_t b, uint32_t add)
{
    wgmma_shared<TRANS_B, hopper::WGMMA_BF16>(d, a, b, add);
}

template <int TRANS_B> PRS_DEVICE void wgmma_m64n8k16_bf16(float (&d)[4], uint64_t a, uint64_t b, uint32_t add)
{
    wgmma_shared<TRANS_B, hopper::WGMMA_BF16>(d, a, b, add);
}

template <int TRANS_B>
PRS_DEVICE void wgmma_m64n96k16_bf16_registers(float (&d)[48], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                               uint64_t b, uint32_t add)
{
    wgmma_registers<TRANS_B, hopper::WGMMA_BF16>(d, a0, a1, a2, a3, b, add);
}

template <int TRANS_B>
PRS_DEVICE void wgmma_m64n256k16_bf16_registers(float (&d)[128], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                                uint64_t b, uint32_t add)
{
    wgmma_registers<TRANS_B, hopper::WGMMA_BF16>(d, a0, a1, a2, a3, b, add);
}

template <int TRANS_B>
PRS_DEVICE void wgmma_m64n128k16_bf16_registers(float (&d)[64], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                                uint64_t b, uint32_t add)
{
    wgmma_registers<TRANS_B, hopper::WGMMA_BF16>(d, a0, a1, a2, a3, b, add);
}

template <int TRANS_B>
PRS_DEVICE void wgmma_m64n64k16_bf16_registers(float (&d)[32], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                               uint64_t b, uint32_t add)
{
    wgmma_registers<TRANS_B, hopper::WGMMA_BF16>(d, a0, a1, a2, a3, b, add);
}

PRS_DEVICE void wgmma_m64n256k32_e4m3(float (&d)[128], uint64_t a, uint64_t b, uint32_t add)
{
    wgmma_shared<0, hopper::WGMMA_E4M3>(d, a, b, add);
}

PRS_DEVICE void wgmma_m64n128k32_e4m3(float (&d)[64], uint64_t a, uint64_t b, uint32_t add)
{
    wgmma_shared<0, hopper::WGMMA_E4M3>(d, a, b, add);
}

PRS_DEVICE void wgmma_m64n64k32_e4m3(float (&d)[32], uint64_t a, uint64_t b, uint32_t add)
{
    wgmma_shared<0, hopper::WGMMA_E4M3>(d, a, b, add);
}

PRS_DEVICE void wgmma_m64n32k32_e4m3(float (&d)[16], uint64_t a, uint64_t b, uint32_t add)
{
    wgmma_shared<0, hopper::WGMMA_E4M3>(d, a, b, add);
}

PRS_DEVICE void wgmma_m64n16k32_e4m3(float (&d)[8], uint64_t a, uint64_t b, uint32_t add)
{
    wgmma_shared<0, hopper::WGMMA_E4M3>(d, a, b, add);
}

PRS_DEVICE void wgmma_m64n8k32_e4m3(float (&d)[4], uint64_t a, uint64_t b, uint32_t add)
{
    wgmma_shared<0, hopper::WGMMA_E4M3>(d, a, b, add);
}

#ifdef HOPPER_PLACES
#    define HOPPER_PLACED(name, ...)        (hopper::place_is(__FILE__, __LINE__, #    name), name(__VA_ARGS__))
#    define load_acquire_sys(...)           HOPPER_PLACED(load_acquire_sys, __VA_ARGS__)
#    define store_release_sys(...)          HOPPER_PLACED(store_release_sys, __VA_ARGS__)
#    define add_acq_rel_gpu(...)            HOPPER_PLACED(add_acq_rel_gpu, __VA_ARGS__)
#    define fence_release_sys(...)          HOPPER_PLACED(fence_release_sys, __VA_ARGS__)
#    define fence_release_gpu(...)          HOPPER_PLACED(fence_release_gpu, __VA_ARGS__)
#    define fence_async_shared(...)         HOPPER_PLACED(fence_async_shared, __VA_ARGS__)
#    define fence_async_global(...)         HOPPER_PLACED(fence_async_global, __VA_ARGS__)
#    define mbarrier_init_fence(...)        HOPPER_PLACED(mbarrier_init_fence, __VA_ARGS__)
#    define __syncwarp(...)                 HOPPER_PLACED(__syncwarp, __VA_ARGS__)
#    define __threadfence(...)              HOPPER_PLACED(__threadfence, __VA_ARGS__)
#    define __threadfence_system(...)       HOPPER_PLACED(__threadfence_system, __VA_ARGS__)
#    define prs_load_acquire_sys(...)       HOPPER_PLACED(prs_load_acquire_sys, __VA_ARGS__)
#    define prs_load_acquire_gpu(...)       HOPPER_PLACED(prs_load_acquire_gpu, __VA_ARGS__)
#    define prs_load_pair_acquire_sys(...)  HOPPER_PLACED(prs_load_pair_acquire_sys, __VA_ARGS__)
#    define prs_store_release_sys(...)      HOPPER_PLACED(prs_store_release_sys, __VA_ARGS__)
#    define prs_store_four_release_sys(...) HOPPER_PLACED(prs_store_four_release_sys, __VA_ARGS__)
#    define prs_store_release_gpu(...)      HOPPER_PLACED(prs_store_release_gpu, __VA_ARGS__)
#    define prs_add_release_sys(...)        HOPPER_PLACED(prs_add_release_sys, __VA_ARGS__)
#    define prs_add_acq_rel_gpu(...)        HOPPER_PLACED(prs_add_acq_rel_gpu, __VA_ARGS__)
#    define prs_compare_and_swap_gpu(...)   HOPPER_PLACED(prs_compare_and_swap_gpu, __VA_ARGS__)
#    define prs_fence_acq_rel_sys(...)      HOPPER_PLACED(prs_fence_acq_rel_sys, __VA_ARGS__)
/* These have template arguments, so the macro replaces only the name. */
#    define bulk_wait_done hopper::place_is(__FILE__, __LINE__, "bulk_wait_done"), bulk_wait_done
#    define bulk_wait_read hopper::place_is(__FILE__, __LINE__, "bulk_wait_read"), bulk_wait_read
#endif

#endif

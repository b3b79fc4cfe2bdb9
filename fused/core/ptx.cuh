/* SPDX-License-Identifier: Apache-2.0 */
/* Each PTX instruction is one named inline function. Nothing here knows tiles, roles or protocols. */
#ifndef PERSEUS_FUSED_PTX_CUH
#define PERSEUS_FUSED_PTX_CUH

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#define PRS_DEVICE static __device__ __forceinline__
/* For functions that run rarely. If they were inlined, the roles would need more registers. */
#define PRS_DEVICE_OUTLINED static __device__ __noinline__

/* The dynamic shared memory of this CTA; swizzles look at address bits below 1024. */
PRS_DEVICE uint8_t *dynamic_shared(void)
{
    extern __shared__ __align__(1024) uint8_t prs_dynamic_shared[];
    return prs_dynamic_shared;
}

PRS_DEVICE uint32_t smem_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

PRS_DEVICE void cluster_arrive(void)
{
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

PRS_DEVICE void cluster_wait(void)
{
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

PRS_DEVICE uint64_t global_timer_ns(void)
{
    uint64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

/* Sleeps until the SM's clock has passed `until`. */
PRS_DEVICE void sleep_until(int64_t until)
{
    while (clock64() < until)
        __nanosleep(100);
}

/* ---- registers ---- */
template <int N> PRS_DEVICE void registers_take(void)
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N> PRS_DEVICE void registers_give(void)
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

/* ---- mbarrier ---- */
PRS_DEVICE void mbarrier_init(uint64_t *bar, uint32_t arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(bar)), "r"(arrivals) : "memory");
}

/* Makes freshly initialised barriers visible to the other CTA of the cluster and to TMA. */
PRS_DEVICE void mbarrier_init_fence(void)
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

PRS_DEVICE void mbarrier_expect(uint64_t *bar, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(bar)), "r"(bytes)
                 : "memory");
}

PRS_DEVICE void mbarrier_arrive(uint64_t *bar)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(bar)) : "memory");
}

/* Arrives on the barrier at the same offset in the shared memory of another CTA of the cluster, or of this one. */
PRS_DEVICE void mbarrier_arrive_at(uint64_t *bar, uint32_t cta)
{
    asm volatile("{\n"
                 ".reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
                 "}" ::"r"(smem_address(bar)),
                 "r"(cta)
                 : "memory");
}

PRS_DEVICE bool mbarrier_try_wait(uint64_t *bar, uint32_t parity)
{
    uint32_t done;
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n"
                 "}"
                 : "=r"(done)
                 : "r"(smem_address(bar)), "r"(parity)
                 : "memory");
    return done != 0;
}

/* Does not wait. */
PRS_DEVICE bool mbarrier_test(uint64_t *bar, uint32_t parity)
{
    uint32_t done;
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n"
                 "}"
                 : "=r"(done)
                 : "r"(smem_address(bar)), "r"(parity)
                 : "memory");
    return done != 0;
}

/* It has no time limit, because every arrival comes from this cluster or from TMA. Waits for other GPUs have a limit
 * (sync.cuh), so a lost peer cannot leave a barrier incomplete. */
PRS_DEVICE void mbarrier_wait(uint64_t *bar, uint32_t parity)
{
    while (!mbarrier_try_wait(bar, parity)) {
    }
}

/* ---- named barriers ---- */
/* Waits until `threads` threads have arrived at barrier `id`, by this call or by the next function. */
PRS_DEVICE void barrier_sync(uint32_t id, uint32_t threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* Counts this warp's threads as arrived, and does not wait. */
PRS_DEVICE void barrier_arrive(uint32_t id, uint32_t threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* ---- bulk copies ---- */
PRS_DEVICE void tensor_map_prefetch(const CUtensorMap *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"((uint64_t)map) : "memory");
}

PRS_DEVICE void tma_load_2d(void *dst, const CUtensorMap *map, uint64_t *bar, int32_t x, int32_t y)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4}], [%2];" ::"r"(smem_address(dst)),
                 "l"((uint64_t)map), "r"(smem_address(bar)), "r"(x), "r"(y)
                 : "memory");
}

/* The box lands at the same offset, and completes on the same barrier, in every CTA of the mask. */
PRS_DEVICE void tma_load_2d_multicast(void *dst, const CUtensorMap *map, uint64_t *bar, int32_t x, int32_t y,
                                      uint16_t ctas)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
                 " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(smem_address(dst)),
                 "l"((uint64_t)map), "r"(smem_address(bar)), "r"(x), "r"(y), "h"(ctas)
                 : "memory");
}

PRS_DEVICE void tma_load_3d(void *dst, const CUtensorMap *map, uint64_t *bar, int32_t x, int32_t y, int32_t z)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(smem_address(dst)),
                 "l"((uint64_t)map), "r"(smem_address(bar)), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

PRS_DEVICE void tma_store_2d(const CUtensorMap *map, const void *src, int32_t x, int32_t y)
{
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"((uint64_t)map),
        "r"(smem_address(src)), "r"(x), "r"(y)
        : "memory");
}

PRS_DEVICE void tma_store_3d(const CUtensorMap *map, const void *src, int32_t x, int32_t y, int32_t z)
{
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"((uint64_t)map),
        "r"(smem_address(src)), "r"(x), "r"(y), "r"(z)
        : "memory");
}

PRS_DEVICE void bulk_load(void *dst, const void *src, uint32_t bytes, uint64_t *bar)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     smem_address(dst)),
                 "l"((uint64_t)__cvta_generic_to_global(src)), "r"(bytes), "r"(smem_address(bar))
                 : "memory");
}

PRS_DEVICE void bulk_store(void *dst, const void *src, uint32_t bytes)
{
    asm volatile(
        "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"((uint64_t)__cvta_generic_to_global(dst)),
        "r"(smem_address(src)), "r"(bytes)
        : "memory");
}

/* Copies shared memory of this CTA to the offset of dst in CTA `cta` of the cluster, and completes on bar there. */
PRS_DEVICE void bulk_send(void *dst, const void *src, uint32_t bytes, uint64_t *bar, uint32_t cta)
{
    asm volatile("{\n"
                 ".reg .b32 to, there;\n"
                 "mapa.shared::cluster.u32 to, %0, %4;\n"
                 "mapa.shared::cluster.u32 there, %3, %4;\n"
                 "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [to], [%1], %2, [there];\n"
                 "}" ::"r"(smem_address(dst)),
                 "r"(smem_address(src)), "r"(bytes), "r"(smem_address(bar)), "r"(cta)
                 : "memory");
}

/* Adds fp32 elements to memory; in no order with other bulk stores that are incomplete. */
PRS_DEVICE void bulk_add_f32(float *dst, const void *src, uint32_t bytes)
{
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                     (uint64_t)__cvta_generic_to_global(dst)),
                 "r"(smem_address(src)), "r"(bytes)
                 : "memory");
}

PRS_DEVICE void bulk_commit(void)
{
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* Waits until at most N groups still have bytes to read from shared memory. The shared memory of the others may be
 * written again; nothing is promised about their destination. */
template <int N> PRS_DEVICE void bulk_wait_read(void)
{
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

/* Waits until at most N groups are incomplete. The writes of the others are visible to this thread, which may signal
 * them now. */
template <int N> PRS_DEVICE void bulk_wait_done(void)
{
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}

/* ---- bulk copies: attention ---- */
PRS_DEVICE void tma_load_5d(void *dst, const CUtensorMap *map, uint64_t *bar, int32_t x, int32_t y, int32_t z,
                            int32_t u, int32_t v)
{
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(smem_address(dst)),
                 "l"((uint64_t)map), "r"(smem_address(bar)), "r"(x), "r"(y), "r"(z), "r"(u), "r"(v)
                 : "memory");
}

/* ---- proxies, flags ---- */
/* Makes ordinary stores to shared memory visible to TMA and the tensor cores. */
PRS_DEVICE void fence_async_shared(void)
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* Makes global memory that this thread has acquired visible to TMA. */
PRS_DEVICE void fence_async_global(void)
{
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

PRS_DEVICE uint32_t load_acquire_sys(const uint32_t *p)
{
    uint32_t v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

PRS_DEVICE void store_release_sys(uint32_t *p, uint32_t v)
{
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

/* Loads four neighbouring words (16-byte aligned). Each of them is a separate access; they order nothing else. */
PRS_DEVICE uint4 load_relaxed_sys_v4(const void *p)
{
    uint4 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}

PRS_DEVICE void store_relaxed_sys_v4(void *p, uint4 v)
{
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

/* Orders everything that this thread has seen or written before the next add_relaxed_sys(). */
PRS_DEVICE void fence_release_sys(void)
{
    asm volatile("fence.acq_rel.sys;" ::: "memory");
}

PRS_DEVICE void add_relaxed_sys(uint32_t *p, uint32_t v)
{
    asm volatile("red.relaxed.sys.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

PRS_DEVICE uint32_t add_acq_rel_gpu(uint32_t *p, uint32_t v)
{
    uint32_t old;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
    return old;
}

/* Like fence_release_sys(), but before add_relaxed_gpu(), for data that only this GPU reads. */
PRS_DEVICE void fence_release_gpu(void)
{
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

PRS_DEVICE void add_relaxed_gpu(uint32_t *p, uint32_t v)
{
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

/* ---- shared memory vectors ---- */
PRS_DEVICE void store_matrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0), "r"(r1),
                 "r"(r2), "r"(r3)
                 : "memory");
}

PRS_DEVICE void store_shared_v4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3)
{
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0), "r"(r1), "r"(r2), "r"(r3)
                 : "memory");
}

/* Stores in the shared memory of CTA `cta` of the cluster, at the offset of `to`. */
PRS_DEVICE void store_shared_at(uint32_t *to, uint32_t v, uint32_t cta)
{
    asm volatile("{\n"
                 ".reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %0, %1;\n"
                 "st.shared::cluster.u32 [there], %2;\n"
                 "}" ::"r"(smem_address(to)),
                 "r"(cta), "r"(v)
                 : "memory");
}

PRS_DEVICE uint4 load_shared_v4(uint32_t address)
{
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

/* Two floats to bf16x2, round to nearest even; lo lands in the low half. */
PRS_DEVICE uint32_t pack_bf16x2(float lo, float hi)
{
    uint32_t v;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(hi), "f"(lo));
    return v;
}

PRS_DEVICE float bf16_low(uint32_t v)
{
    return __uint_as_float(v << 16);
}

PRS_DEVICE float bf16_high(uint32_t v)
{
    return __uint_as_float(v & 0xffff0000u);
}

/* The same for f16x2; numbers that are too large become infinite. */
PRS_DEVICE uint32_t pack_f16x2(float lo, float hi)
{
    uint32_t v;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(hi), "f"(lo));
    return v;
}

PRS_DEVICE float f16_low(uint32_t v)
{
    return __half2float(__ushort_as_half((unsigned short)v));
}

PRS_DEVICE float f16_high(uint32_t v)
{
    return f16_low(v >> 16);
}

/* The same for e4m3x2, in the low 16 bits; numbers that are too large, and infinities, become 448. */
PRS_DEVICE uint32_t pack_e4m3x2(float lo, float hi)
{
    uint16_t v;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(v) : "f"(hi), "f"(lo));
    return v;
}

/* 2^x, 2 ulp; -infinity gives 0. */
PRS_DEVICE float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* a / b, 2 ulp; 0 for an infinite b. */
PRS_DEVICE float divide_fast(float a, float b)
{
    float y;
    asm("div.approx.ftz.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

#include "fused/core/wgmma.cuh"

#endif

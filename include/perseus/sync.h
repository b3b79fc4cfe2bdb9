/* SPDX-License-Identifier: Apache-2.0 */
/**
 * The few memory operations that GPU, CPU and NIC agree on, each by one name that compiles for the device (PTX) and for
 * the host (compiler builtins), so that threads of a CPU can run the device protocol.
 *
 * "sys" reaches the CPU, the NIC and other GPUs; "gpu" only the threads of this GPU. On the host both are the same. */
#ifndef PERSEUS_SYNC_H
#define PERSEUS_SYNC_H

#include <stdint.h>

#if defined(__CUDACC__)
#    define PRS_HD static __host__ __device__ __forceinline__
#else
#    define PRS_HD static inline __attribute__((unused))
#endif

#if !defined(__CUDA_ARCH__)
#    include <sched.h>
#    include <time.h>
#endif

PRS_HD uint64_t prs_load_relaxed(const uint64_t *word)
{
#if defined(__CUDA_ARCH__)
    uint64_t value;
    asm volatile("ld.relaxed.sys.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
#else
    return __atomic_load_n(word, __ATOMIC_RELAXED);
#endif
}

PRS_HD uint64_t prs_load_acquire_sys(const uint64_t *word)
{
#if defined(__CUDA_ARCH__)
    uint64_t value;
    asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
#else
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
#endif
}

PRS_HD uint64_t prs_load_acquire_gpu(const uint64_t *word)
{
#if defined(__CUDA_ARCH__)
    uint64_t value;
    asm volatile("ld.acquire.gpu.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
#else
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
#endif
}

/** Two neighbouring words (16-byte aligned) for the price of one read; each by itself as prs_load_acquire_sys(). */
PRS_HD void prs_load_pair_acquire_sys(const uint64_t *words, uint64_t *first, uint64_t *second)
{
#if defined(__CUDA_ARCH__)
    asm volatile("ld.acquire.sys.v2.u64 {%0, %1}, [%2];" : "=l"(*first), "=l"(*second) : "l"(words) : "memory");
#else
    *first = __atomic_load_n(&words[0], __ATOMIC_ACQUIRE);
    *second = __atomic_load_n(&words[1], __ATOMIC_ACQUIRE);
#endif
}

PRS_HD void prs_store_relaxed(uint64_t *word, uint64_t value)
{
#if defined(__CUDA_ARCH__)
    asm volatile("st.relaxed.sys.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
#else
    __atomic_store_n(word, value, __ATOMIC_RELAXED);
#endif
}

PRS_HD void prs_store_release_sys(uint64_t *word, uint64_t value)
{
#if defined(__CUDA_ARCH__)
    asm volatile("st.release.sys.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
#else
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
#endif
}

/**
 * Four neighbouring words (16-byte aligned), in any order among themselves; everything written before is visible to who
 * acquires any of them. Dearer than one prs_store_release_sys() only by the stores: behind a store to host memory a
 * release waits until that has crossed PCIe and was answered, 0.7 us and more, so the fence comes before all four. */
PRS_HD void prs_store_four_release_sys(uint64_t *words, const uint64_t *values)
{
#if defined(__CUDA_ARCH__)
    asm volatile("fence.acq_rel.sys;" ::: "memory");
    asm volatile("st.relaxed.sys.v2.u64 [%0], {%1, %2};" ::"l"(words), "l"(values[0]), "l"(values[1]) : "memory");
    asm volatile("st.relaxed.sys.v2.u64 [%0], {%1, %2};" ::"l"(words + 2), "l"(values[2]), "l"(values[3]) : "memory");
#else
    for (int i = 0; i < 4; i++) /* ThreadSanitizer knows no fences */
        __atomic_store_n(&words[i], values[i], __ATOMIC_RELEASE);
#endif
}

PRS_HD void prs_store_release_gpu(uint64_t *word, uint64_t value)
{
#if defined(__CUDA_ARCH__)
    asm volatile("st.release.gpu.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
#else
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
#endif
}

/** Add and return the value before; orders nothing else. */
PRS_HD uint64_t prs_add_relaxed_gpu(uint64_t *word, uint64_t value)
{
#if defined(__CUDA_ARCH__)
    uint64_t before;
    asm volatile("atom.relaxed.gpu.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(word), "l"(value) : "memory");
    return before;
#else
    return __atomic_fetch_add(word, value, __ATOMIC_RELAXED);
#endif
}

PRS_HD uint64_t prs_add_acq_rel_gpu(uint64_t *word, uint64_t value)
{
#if defined(__CUDA_ARCH__)
    uint64_t before;
    asm volatile("atom.acq_rel.gpu.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(word), "l"(value) : "memory");
    return before;
#else
    return __atomic_fetch_add(word, value, __ATOMIC_ACQ_REL);
#endif
}

/** For a word that another GPU or the CPU reads: everything written before is visible to who acquires the sum. */
PRS_HD void prs_add_release_sys(uint64_t *word, uint64_t value)
{
#if defined(__CUDA_ARCH__)
    asm volatile("red.release.sys.add.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
#else
    (void)__atomic_fetch_add(word, value, __ATOMIC_RELEASE);
#endif
}

/** If the word is `expected` make it value; return what it was. */
PRS_HD uint64_t prs_swap_if_gpu(uint64_t *word, uint64_t expected, uint64_t value)
{
#if defined(__CUDA_ARCH__)
    uint64_t before;
    asm volatile("atom.acq_rel.gpu.cas.b64 %0, [%1], %2, %3;"
                 : "=l"(before)
                 : "l"(word), "l"(expected), "l"(value)
                 : "memory");
    return before;
#else
    (void)__atomic_compare_exchange_n(word, &expected, value, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    return expected;
#endif
}

/** What this thread has read or written is before what it does next, for every other thread of the system. */
PRS_HD void prs_fence_acq_rel_sys(void)
{
#if defined(__CUDA_ARCH__)
    asm volatile("fence.acq_rel.sys;" ::: "memory");
#else
    __atomic_thread_fence(__ATOMIC_ACQ_REL);
#endif
}

/** Nanoseconds of a clock that only grows; coarse (about 1 us) on a GPU. */
PRS_HD uint64_t prs_now_ns(void)
{
#if defined(__CUDA_ARCH__)
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
#else
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
#endif
}

/** Between two looks at a word that is not yet there. */
PRS_HD void prs_spin_pause(void)
{
#if defined(__CUDA_ARCH__)
    __nanosleep(40);
#else
    sched_yield();
#endif
}

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/**
 * The few memory operations by which GPU, CPU and NIC communicate. Each function compiles for the device (PTX) and for
 * the host (compiler builtins), so that threads of a CPU can run the device protocol.
 *
 * "sys": ordered for the CPU, the NIC and other GPUs too; "gpu": for the threads of this GPU only. On the host both
 * are the same. */
#ifndef PERSEUS_SYNC_H
#define PERSEUS_SYNC_H

#include <stdint.h>

/** Makes a function of this header compile for the device and for the host. */
#if defined(__CUDACC__)
#    define PRS_HD static __host__ __device__ __forceinline__
#else
#    define PRS_HD static inline __attribute__((unused))
#endif

#if !defined(__CUDA_ARCH__)
#    include <sched.h>
#    include <time.h>
#    if defined(CLOCK_MONOTONIC)
#        define PRS_CLOCK_MONOTONIC CLOCK_MONOTONIC
#    else /* -std=c11 hides what POSIX adds to <time.h> */
#        define PRS_CLOCK_MONOTONIC 1
extern int clock_gettime(int clock, struct timespec *now);
#    endif
#endif

/** Load a word; orders nothing else. */
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

/** Load a word: what its writer released before it is visible afterwards. The writer may be a GPU or a NIC. */
PRS_HD uint64_t prs_load_acquire_sys(const uint64_t *word)
{
#if defined(__CUDA_ARCH__)
    uint64_t value;
    asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
#elif defined(__aarch64__)
    uint64_t value = __atomic_load_n(word, __ATOMIC_ACQUIRE);
    __asm__ volatile("dmb oshld" ::: "memory"); /* the acquire alone orders only writes of other CPUs */
    return value;
#else
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
#endif
}

/** As prs_load_acquire_sys(), for words that threads of this GPU write. */
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

/** Load two neighbouring words (16-byte aligned) at the cost of one read, each as by prs_load_acquire_sys(). */
PRS_HD void prs_load_pair_acquire_sys(const uint64_t *words, uint64_t *first, uint64_t *second)
{
#if defined(__CUDA_ARCH__)
    asm volatile("ld.acquire.sys.v2.u64 {%0, %1}, [%2];" : "=l"(*first), "=l"(*second) : "l"(words) : "memory");
#else
    *first = __atomic_load_n(&words[0], __ATOMIC_ACQUIRE);
    *second = __atomic_load_n(&words[1], __ATOMIC_ACQUIRE);
#endif
}

/** Store a word; orders nothing else. */
PRS_HD void prs_store_relaxed(uint64_t *word, uint64_t value)
{
#if defined(__CUDA_ARCH__)
    asm volatile("st.relaxed.sys.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
#else
    __atomic_store_n(word, value, __ATOMIC_RELAXED);
#endif
}

/** Store a word: everything written before is visible to a reader that acquires it. */
PRS_HD void prs_store_release_sys(uint64_t *word, uint64_t value)
{
#if defined(__CUDA_ARCH__)
    asm volatile("st.release.sys.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
#else
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
#endif
}

/**
 * Store four neighbouring words (16-byte aligned), in any order among themselves: everything written before is visible
 * to a reader that acquires any of them. A release after a store to host memory waits until that store has crossed PCIe
 * and was answered, 0.7 us and more. So the fence comes before all four, and they cost little more than one. */
PRS_HD void prs_store_four_release_sys(uint64_t *words, const uint64_t *values)
{
#if defined(__CUDA_ARCH__)
    asm volatile("fence.acq_rel.sys;" ::: "memory");
    asm volatile("st.relaxed.sys.v2.u64 [%0], {%1, %2};" ::"l"(words), "l"(values[0]), "l"(values[1]) : "memory");
    asm volatile("st.relaxed.sys.v2.u64 [%0], {%1, %2};" ::"l"(words + 2), "l"(values[2]), "l"(values[3]) : "memory");
#else
    for (int i = 0; i < 4; i++) /* each with release: ThreadSanitizer knows no fences */
        __atomic_store_n(&words[i], values[i], __ATOMIC_RELEASE);
#endif
}

/** As prs_store_release_sys(), for words that threads of this GPU read. */
PRS_HD void prs_store_release_gpu(uint64_t *word, uint64_t value)
{
#if defined(__CUDA_ARCH__)
    asm volatile("st.release.gpu.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
#else
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
#endif
}

/** Add to a word and return its former value; orders nothing else. */
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

/** Add to a word and return its former value: acquires what earlier adds have released, and releases. */
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

/** Add to a word that another GPU or the CPU reads: everything written before is visible to a reader that acquires
 * it. */
PRS_HD void prs_add_release_sys(uint64_t *word, uint64_t value)
{
#if defined(__CUDA_ARCH__)
    asm volatile("red.release.sys.add.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
#else
    (void)__atomic_fetch_add(word, value, __ATOMIC_RELEASE);
#endif
}

/** Store value in the word if the word is `expected`; return its former value. Acquires and releases. */
PRS_HD uint64_t prs_compare_and_swap_gpu(uint64_t *word, uint64_t expected, uint64_t value)
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

/** Order what this thread has read and written before what it does next, for every other thread of the system. */
PRS_HD void prs_fence_acq_rel_sys(void)
{
#if defined(__CUDA_ARCH__)
    asm volatile("fence.acq_rel.sys;" ::: "memory");
#else
    __atomic_thread_fence(__ATOMIC_ACQ_REL);
#endif
}

/** Nanoseconds of a clock that never goes back; coarse (about 1 us) on a GPU. */
PRS_HD uint64_t prs_now_ns(void)
{
#if defined(__CUDA_ARCH__)
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
#else
    struct timespec now;
    clock_gettime(PRS_CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
#endif
}

/** Pause between two reads of a word that is awaited. */
PRS_HD void prs_spin_pause(void)
{
#if defined(__CUDA_ARCH__)
    __nanosleep(40);
#else
    sched_yield();
#endif
}

#endif

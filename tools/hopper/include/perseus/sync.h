/* SPDX-License-Identifier: Apache-2.0 */
/* Replaces include/perseus/sync.h for kernels on the emulator: the same functions, with the scopes that they have on a
 * GPU. tools/hopper/check_instructions.py checks that none is missing. C code gets the header itself. */
#ifndef __cplusplus
#    include_next <perseus/sync.h>
#endif
#ifndef PERSEUS_SYNC_H
#    define PERSEUS_SYNC_H

#    include <cuda_runtime.h>
#    include <stdint.h>
#    include <time.h>

#    define PRS_HD static inline __attribute__((always_inline, unused))

PRS_HD uint64_t prs_load_relaxed(const uint64_t *word)
{
    return hopper::atomic_load(word, 8, hopper::ORDER_RELAXED, hopper::SCOPE_SYS);
}

PRS_HD uint64_t prs_load_acquire_sys(const uint64_t *word)
{
    return hopper::atomic_load(word, 8, hopper::ORDER_ACQUIRE, hopper::SCOPE_SYS);
}

PRS_HD uint64_t prs_load_acquire_gpu(const uint64_t *word)
{
    return hopper::atomic_load(word, 8, hopper::ORDER_ACQUIRE, hopper::SCOPE_GPU);
}

PRS_HD void prs_load_pair_acquire_sys(const uint64_t *words, uint64_t *first, uint64_t *second)
{
    *first = prs_load_acquire_sys(&words[0]);
    *second = prs_load_acquire_sys(&words[1]);
}

PRS_HD void prs_store_relaxed(uint64_t *word, uint64_t value)
{
    hopper::atomic_store(word, 8, value, hopper::ORDER_RELAXED, hopper::SCOPE_SYS);
}

PRS_HD void prs_store_release_sys(uint64_t *word, uint64_t value)
{
    hopper::atomic_store(word, 8, value, hopper::ORDER_RELEASE, hopper::SCOPE_SYS);
}

PRS_HD void prs_fence_acq_rel_sys(void)
{
    hopper::atomic_fence(hopper::SCOPE_SYS);
}

PRS_HD void prs_store_four_release_sys(uint64_t *words, const uint64_t *values)
{
    prs_fence_acq_rel_sys();
    for (int i = 0; i < 4; i++)
        prs_store_relaxed(&words[i], values[i]);
}

PRS_HD void prs_store_release_gpu(uint64_t *word, uint64_t value)
{
    hopper::atomic_store(word, 8, value, hopper::ORDER_RELEASE, hopper::SCOPE_GPU);
}

PRS_HD uint64_t prs_add_relaxed_gpu(uint64_t *word, uint64_t value)
{
    return hopper::atomic_add(word, 8, value, hopper::ORDER_RELAXED, hopper::SCOPE_GPU);
}

PRS_HD uint64_t prs_add_acq_rel_gpu(uint64_t *word, uint64_t value)
{
    return hopper::atomic_add(word, 8, value, hopper::ORDER_ACQ_REL, hopper::SCOPE_GPU);
}

PRS_HD void prs_add_release_sys(uint64_t *word, uint64_t value)
{
    (void)hopper::atomic_add(word, 8, value, hopper::ORDER_RELEASE, hopper::SCOPE_SYS);
}

PRS_HD uint64_t prs_compare_and_swap_gpu(uint64_t *word, uint64_t expected, uint64_t value)
{
    (void)hopper::atomic_swap(word, 8, &expected, value, hopper::ORDER_ACQ_REL, hopper::SCOPE_GPU);
    return expected;
}

PRS_HD uint64_t prs_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

PRS_HD void prs_spin_pause(void)
{
    sched_yield();
}

#endif

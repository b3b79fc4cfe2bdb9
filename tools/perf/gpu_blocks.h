/* SPDX-License-Identifier: Apache-2.0 */
/* What the blocks of perseus-perf --gpu do. This file compiles for the device (gpu.cu) and for the host, where threads
 * stand for the blocks (test/perf/gpu_threads.c): the same commands in the same order, without a GPU. */
#ifndef TOOLS_PERF_GPU_BLOCKS_H
#define TOOLS_PERF_GPU_BLOCKS_H

#include "tools/perf/gpu.h"

enum { GPU_GROUPS_MAX = 128, GPU_STRIDE_LARGE = 64, GPU_STRIDE_FROM = 16384 };

/* Data that the blocks of the sender share, in device memory; zeroed before a run. */
struct gpu_shared {
    uint64_t barrier; /* arrivals over all barriers */
    uint64_t start_ns;
    struct prs_arrival_counter groups[GPU_GROUPS_MAX];
    struct prs_device_signal deposits[GPU_GROUPS_MAX]; /* one for each transfer */
};

/* What one block knows. */
struct gpu_block {
    const struct gpu_plan *plan;
    struct gpu_shared *shared;
    struct gpu_meeting *meeting;
    double *us;        /* [2 * iterations] */
    uint32_t transfer; /* that this block sends */
    uint64_t passed;   /* barriers */
};

/* ---- test data: the same values as in bench.c ---- */

PRS_HD uint64_t gpu_mark(uint64_t iteration, uint64_t slot, uint64_t word)
{
    uint64_t x = iteration * 0x9e3779b97f4a7c15u ^ slot << 40 ^ word;

    return x ^ x >> 31;
}

PRS_HD uint64_t gpu_stride(const struct gpu_plan *plan)
{
    return plan->bytes <= GPU_STRIDE_FROM ? 1 : GPU_STRIDE_LARGE;
}

PRS_HD uint64_t *gpu_data(const struct gpu_plan *plan, uint64_t offset)
{
    return (uint64_t *)(uintptr_t)(prs_device_map(&plan->device, 0, plan->device.rank) + offset);
}

PRS_HD uint64_t *gpu_signal(const struct gpu_plan *plan, uint64_t transfer)
{
    return (uint64_t *)(uintptr_t)prs_device_map(&plan->device, 1, plan->device.rank) + transfer;
}

/* This and the two functions below are called by each thread, `index` of `count`. */
PRS_HD void gpu_fill(const struct gpu_plan *plan, uint64_t slot, uint64_t iteration, uint32_t index, uint32_t count)
{
    uint64_t *words = gpu_data(plan, slot * plan->bytes), all = plan->bytes / 8, stride = gpu_stride(plan);

    for (uint64_t i = index * stride; i < all; i += count * stride)
        words[i] = gpu_mark(iteration, slot, i);
    if (index == 0)
        words[all - 1] = gpu_mark(iteration, slot, all - 1);
}

/* How many words of a transfer that arrived are wrong. */
PRS_HD uint64_t gpu_wrong(const struct gpu_plan *plan, uint32_t transfer, uint64_t iteration, uint32_t index,
                          uint32_t count)
{
    uint64_t slot = transfer % plan->slots, all = plan->bytes / 8, stride = gpu_stride(plan), found = 0;
    const uint64_t *words = gpu_data(plan, plan->half + slot * plan->bytes);

    for (uint64_t i = index * stride; i < all; i += count * stride)
        found += words[i] != gpu_mark(iteration, slot, i);
    if (index == 0)
        found += words[all - 1] != gpu_mark(iteration, slot, all - 1);
    return found;
}

PRS_HD void gpu_poison(const struct gpu_plan *plan, uint64_t slot, uint32_t index, uint32_t count)
{
    uint64_t *words = gpu_data(plan, plan->half + slot * plan->bytes), all = plan->bytes / 8, stride = gpu_stride(plan);

    for (uint64_t i = index * stride; i < all; i += count * stride)
        words[i] = plan->poison;
    if (index == 0)
        words[all - 1] = plan->poison;
}

/* Thread 0 of a receiver's block: wait for a transfer's signal. Only after it may the data be read: completion at the
 * sender does not mean that the signal was raised (under `counted` the receiver raises it). */
PRS_HD int gpu_await(const struct gpu_plan *plan, uint32_t transfer, uint64_t iteration)
{
    return prs_wait_signal(&plan->device, gpu_signal(plan, transfer), PRS_COMPARE_EQ, iteration);
}

/* ---- the sender ---- */

/* Wait for all blocks, which run at the same time; called by thread 0 of each. Ends early when the device fails. */
PRS_HD int gpu_meet(struct gpu_block *block)
{
    struct prs_wait wait = {0, 0};
    uint64_t want = ++block->passed * block->plan->concurrency, have;
    int r = 0;

    prs_add_acq_rel_gpu(&block->shared->barrier, 1);
    while (r == 0 && (have = prs_load_acquire_gpu(&block->shared->barrier)) < want)
        r = prs_wait_more(&block->plan->device, &wait, PRS_WAIT_ROUND, 0xffff, want, have);
    return r;
}

PRS_HD uint32_t gpu_group(const struct gpu_plan *plan, uint32_t transfer)
{
    return transfer % plan->peers + plan->peers * (uint32_t)(transfer / plan->peers / plan->group);
}

/* Called once, by one thread, before the first barrier. */
PRS_HD void gpu_begin_groups(struct gpu_block *block)
{
    const struct gpu_plan *plan = block->plan;
    uint32_t sizes[GPU_GROUPS_MAX], next = 0;

    if (plan->group == 0)
        return;
    for (uint32_t g = 0; g < GPU_GROUPS_MAX; g++)
        sizes[g] = 0;
    for (uint32_t t = 0; t < plan->concurrency; t++)
        sizes[gpu_group(plan, t)]++;
    for (uint32_t g = 0; g < GPU_GROUPS_MAX; g++) {
        prs_arrival_counter_init(&block->shared->groups[g], g + 1, sizes[g] ? sizes[g] : 1,
                                 &block->shared->deposits[next]);
        next += sizes[g];
    }
}

PRS_HD int gpu_start_transfer(const struct gpu_block *block, uint64_t iteration, int with_signals)
{
    const struct gpu_plan *plan = block->plan;
    uint32_t t = block->transfer;
    uint64_t at = t % plan->slots * plan->bytes;
    struct prs_device_put put = {at, plan->half + at, plan->bytes, 1 + t % plan->peers, 0, 0, 1 + t};
    struct prs_device_signal signal = {t * 8ull, iteration, 1 + t % plan->peers, 1, 1 + t, 0, 0};
    int r;

    if (plan->group == 0)
        return with_signals ? prs_put_signal(&plan->device, &put, &signal, NULL) : prs_put(&plan->device, &put, NULL);
    put.group = gpu_group(plan, t) + 1;
    r = prs_put(&plan->device, &put, NULL);
    if (r == 0 && with_signals)
        r = prs_arrival_counter_arrive(&plan->device, &block->shared->groups[put.group - 1], &signal);
    return r < 0 ? r : 0;
}

/* Called by block 0: wait until everything is complete, tell the CPU, and wait until the receivers have checked. */
PRS_HD int gpu_end_iteration(const struct gpu_block *block, uint64_t iteration)
{
    const struct prs_device *device = &block->plan->device;
    int r = prs_quiet(device);

    block->us[iteration - 1] = (double)(prs_now_ns() - block->shared->start_ns) / 1e3;
    if (!r) {
        prs_store_release_sys(&block->meeting->sent, iteration);
        r = prs_wait_signal(device, &block->meeting->checked, PRS_COMPARE_GE, iteration);
    }
    return r;
}

/* Thread 0 of a block runs one iteration; the block has filled its source. Return 0 or the device's error. */
PRS_HD int gpu_iterate(struct gpu_block *block, uint64_t iteration)
{
    int r = gpu_meet(block);

    if (r == 0 && block->transfer == 0)
        block->shared->start_ns = prs_now_ns();
    r = r ? r : gpu_meet(block);
    r = r ? r : gpu_start_transfer(block, iteration, iteration % 2 == 0);
    r = r ? r : gpu_meet(block);
    if (r == 0 && block->transfer == 0)
        r = gpu_end_iteration(block, iteration);
    return r ? r : gpu_meet(block); /* no block fills its source before the receivers have checked */
}

#endif

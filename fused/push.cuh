/* SPDX-License-Identifier: Apache-2.0 */
/* Warp 3: pushes the own block of A to the other ranks (all-gather), or waits for their results (all-reduce). */
#ifndef PERSEUS_FUSED_PUSH_CUH
#define PERSEUS_FUSED_PUSH_CUH

#include "fused/cta.cuh"

/* To all other ranks at once, or, paced, to one after the other at even distance, which leaves the SM's own loads room
 * between the stores. *next: when the next store may be issued, SM clock. */
PRS_DEVICE void push_chunk(const struct prs_kernel_args &args, const struct cta_place &at, const uint8_t *slot,
                           const struct prs_chunk &c, int64_t *next)
{
    const struct prs_schedule *s = &args.schedule;
    for (uint32_t p = 1; p < s->world; p++) {
        uint32_t owner = (s->rank + p) % s->world, place = prs_schedule_slot(s, s->rank, owner);
        uint8_t *bank = args.staging[p] + (at.epoch & 1) * args.staging_bank_bytes;
        if (args.paced || p == 1) {
            sleep_until(*next);
            *next = clock64() + args.push_gap;
        }
        bulk_store(bank + prs_layout_gathered(s, place, c.row / PRS_TILE_M, c.step) +
                       c.row % PRS_TILE_M / PRS_PUSH_ROWS * PRS_PUSH_BYTES,
                   slot, PRS_PUSH_BYTES);
    }
    bulk_commit();
}

PRS_DEVICE void signal_chunk(const struct prs_kernel_args &args, const struct prs_chunk &c)
{
    const struct prs_schedule *s = &args.schedule;
    fence_release_sys(); /* R3: one fence for all ranks. Pairs with the acquire in await_strips(). */
    for (uint32_t p = 1; p < s->world; p++) {
        uint32_t owner = (s->rank + p) % s->world, place = prs_schedule_slot(s, s->rank, owner);
        add_relaxed_sys(args.flags[p] + prs_schedule_arrival(s, place, c.row / PRS_TILE_M, c.step / PRS_STRIP_STEPS),
                        1);
    }
}

/* Two chunks are under way at any time; a chunk is signalled once it has landed everywhere, two chunks later. */
PRS_DEVICE void push_block(const struct prs_kernel_args &args, const struct cta_memory &m, const struct cta_place &at)
{
    const struct prs_schedule *s = &args.schedule;
    uint32_t first = at.cluster * 2 + at.rank, chunks = prs_schedule_chunks(s), count = 0;
    struct prs_chunk c, before = {0, 0}, landed = {0, 0}; /* chunks i, i - 1, i - 2 */
    int64_t next = 0;
    if (first >= args.push_ctas)
        return;
    for (uint32_t i = first; i < chunks; i += args.push_ctas, count++) {
        uint32_t slot = count % PRS_PUSH_SLOTS, phase = count / PRS_PUSH_SLOTS & 1;
        uint8_t *buffer = m.base + PRS_SMEM_PUSH + slot * PRS_PUSH_BYTES;
        prs_schedule_chunk(s, i, &c);
        bulk_wait_read<PRS_PUSH_SLOTS - 1>();
        mbarrier_expect(&m.pushed[slot], PRS_PUSH_BYTES);
        tma_load_2d(buffer, &args.push_source, &m.pushed[slot], (int32_t)(c.step * PRS_TILE_K), (int32_t)c.row);
        mbarrier_wait(&m.pushed[slot], phase);
        push_chunk(args, at, buffer, c, &next);
        bulk_wait_done<PRS_PUSH_SLOTS>();
        if (count >= PRS_PUSH_SLOTS)
            signal_chunk(args, landed);
        landed = before;
        before = c;
    }
    bulk_wait_done<0>();
    if (count > 1)
        signal_chunk(args, landed);
    if (count > 0)
        signal_chunk(args, before);
}

/* All-reduce: the launch must not end before the other ranks' results have landed here. */
PRS_DEVICE void await_broadcast(const struct prs_kernel_args &args, const struct cta_place &at)
{
    const struct prs_schedule *s = &args.schedule;
    uint32_t slot = threadIdx.x % 32, want = at.epoch * prs_schedule_tiles(s) * 2;
    if (slot + 1 < s->world)
        wait_flag(&args.sync, args.done[0] + slot, want, PRS_AWAIT_BROADCAST, (s->rank + 1 + slot) % s->world, slot);
}

#endif

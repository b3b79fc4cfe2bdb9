/* SPDX-License-Identifier: Apache-2.0 */
/* All-gather: warp 3, when it has pushed, writes the A of all ranks to the caller's memory, chunk by chunk as it
 * arrives. */
#ifndef PERSEUS_FUSED_GEMM_KEEP_CUH
#define PERSEUS_FUSED_GEMM_KEEP_CUH

#include "fused/gemm/push.cuh"

/* This rank's block, which needs no message, comes first; then the others in the order in which they arrive: by copy
 * engine one after the other, pushed all together. */
PRS_DEVICE struct pushed_chunk find_kept(const struct prs_schedule *s, uint32_t at)
{
    struct pushed_chunk k = {{0, 0}, s->place.rank};
    uint32_t chunks = prs_schedule_chunks(s), others = s->place.world - 1;
    if (at < chunks) {
        prs_schedule_chunk(s, at, &k.c);
    } else if (s->segments != 0) {
        k.block = prs_place_after(&s->place, others - (at / chunks - 1));
        prs_schedule_chunk(s, at % chunks, &k.c);
    } else {
        k.block = prs_place_after(&s->place, 1 + (at - chunks) % others);
        prs_schedule_chunk(s, (at - chunks) / others, &k.c);
    }
    return k;
}

PRS_DEVICE void await_kept(const struct prs_kernel_args &args, const struct pushed_chunk &k)
{
    const struct prs_schedule *s = &launch_here()->schedule;
    uint32_t slot = prs_schedule_slot(s, k.block, s->place.rank), row_tile = k.c.row / PRS_TILE_M;
    if (s->segments != 0) {
        uint32_t index =
            prs_schedule_segment_flag(s, slot, row_tile / 2 / s->band, k.c.step / prs_schedule_segment_steps(s));
        /* MUTANT(emulator copied_rows_are_kept) wait for copied rows before they are kept:
         * s/wait_flag/if (0) wait_flag/ */
        wait_flag(&args.sync, args.flags[0] + index, launch_here()->epoch, PRS_AWAIT_CHUNK, k.block, index);
    } else {
        uint32_t strip = k.c.step / PRS_STRIP_STEPS, index = prs_schedule_arrival(s, slot, row_tile, strip);
        /* MUTANT(emulator pushed_rows_are_kept) wait for pushed rows before they are kept:
         * s/wait_flag/if (0) wait_flag/ */
        wait_flag(&args.sync, arrivals_at(args, launch_here()->epoch, 0, index),
                  prs_schedule_arrivals(s, row_tile, strip), PRS_AWAIT_CHUNK, k.block, index);
    }
    fence_async_global(); /* arrivals were read by ordinary loads, the chunk is read by TMA */
}

template <class E>
PRS_DEVICE void load_kept(const struct prs_kernel_args &args, const struct pushed_chunk &k, uint8_t *buffer,
                          uint64_t *bar)
{
    const struct prs_schedule *s = &launch_here()->schedule;
    uint32_t slot = prs_schedule_slot(s, k.block, s->place.rank), column = k.c.step * element<E::type>::in_row;
    mbarrier_expect(bar, PRS_PUSH_BYTES);
    if (k.block == s->place.rank)
        tma_load_2d(buffer, &args.push_source, bar, (int32_t)column, (int32_t)k.c.row);
    else if (s->segments != 0)
        tma_load_2d(buffer, &args.keep_from, bar, (int32_t)column,
                    (int32_t)(slot * s->most_pairs * PRS_PAIR_M + k.c.row));
    else
        bulk_load(buffer, args.staging[0] + staging_bank(args) + chunk_place(s, slot, k.c), PRS_PUSH_BYTES, bar);
}

template <class E>
PRS_DEVICE void store_kept(const struct prs_kernel_args &args, const struct pushed_chunk &k, const uint8_t *buffer)
{
    const struct prs_schedule *s = &launch_here()->schedule;
    uint32_t row = k.c.row, plane = k.block;
    if (args.whole != 0) {
        row += plane * s->block_rows;
        plane = 0;
    }
    tma_store_3d(&args.keep_to, buffer, (int32_t)(k.c.step * element<E::type>::in_row), (int32_t)row, (int32_t)plane);
    bulk_commit();
}

/* One thread. loaded: how many chunks this CTA has loaded into the push buffers in this launch. While a chunk is
 * loaded, the one before it is stored. Out of line and with plain numbers it costs the other roles no registers. */
template <class E> PRS_DEVICE_OUTLINED void keep_rows(const struct prs_kernel_args &args, uint32_t loaded)
{
    struct cta_memory m = cta_memory_map(dynamic_shared());
    const struct prs_schedule *s = &launch_here()->schedule;
    uint32_t all = prs_schedule_chunks(s) * s->place.world, *claims = claim_counter(args, PRS_CLAIM_ROWS);
    struct pushed_chunk before;
    uint8_t *from = NULL;
    for (uint32_t i = atomicAdd(claims, 1u);; i = atomicAdd(claims, 1u), loaded++) {
        uint32_t slot = loaded % PRS_PUSH_SLOTS;
        uint8_t *buffer = m.base + PRS_SMEM_PUSH + slot * PRS_PUSH_BYTES;
        struct pushed_chunk k;
        if (i < all) {
            k = find_kept(s, i);
            if (k.block != s->place.rank)
                await_kept(args, k);
            /* MUTANT(emulator pushed_rows_are_kept) wait before a buffer of kept rows is loaded again: delete */
            bulk_wait_read<0>();
            load_kept<E>(args, k, buffer, &m.pushed[slot]);
        }
        if (from) {
            uint32_t last = loaded - 1;
            /* MUTANT(emulator pushed_rows_are_kept) wait until rows that are kept are loaded: delete */
            mbarrier_wait(&m.pushed[last % PRS_PUSH_SLOTS], last / PRS_PUSH_SLOTS & 1);
            store_kept<E>(args, before, from);
        }
        if (i >= all)
            break;
        before = k;
        from = buffer;
    }
    bulk_wait_done<0>();
}

#endif

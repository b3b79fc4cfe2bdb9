/* SPDX-License-Identifier: Apache-2.0 */
/* Data that crosses between nodes: sums, rows of A and rows of the result. The CTA that completes a piece puts it. Rows
 * of the result that arrive are spread inside this node. */
#ifndef PERSEUS_FUSED_RELAY_CUH
#define PERSEUS_FUSED_RELAY_CUH

#include "fused/core/cta.cuh"
#include "fused/core/element.cuh"
#include "fused/core/far.cuh"
#include "fused/gemm/launch.cuh"

/* In each launch a counter gains exactly `whole`. The last arrival leaves it at zero for the next launch. */
PRS_DEVICE bool is_last(const struct prs_kernel_args &args, uint32_t counter, uint32_t whole)
{
    if (!arrives_last(args.far.counters + counter, whole))
        return false;
    args.far.counters[counter] = 0;
    return true;
}

/* A counter of this node's rows of A, at neighbour p. */
PRS_DEVICE uint32_t *arrivals_at(const struct prs_kernel_args &args, uint32_t epoch, uint32_t p, uint32_t counter)
{
    return args.flags[p] + (epoch & 1) * args.flag_bank + counter;
}

/* All-reduce: tells the other ranks of this node that a piece of the result has landed there. */
PRS_DEVICE void count_broadcast(const struct prs_kernel_args &args, uint32_t epoch)
{
    const struct prs_place *at = &args.schedule.place;
    for (uint32_t p = 1; p < at->local_ranks; p++)
        add_relaxed_sys(args.done[p] + (epoch & 1) * at->local_ranks +
                            prs_index_after(at->local_rank, (at->local_rank + p) % at->local_ranks, at->local_ranks),
                        1);
}

/* The functions below run rarely. They are out of line and take plain numbers, and so cost the roles no registers. */

/* Called when half of a tile of this node's sums for a counterpart's block has landed in the slot from which it is put.
 * The second half of the last tile of a group puts the group, and signals. */
PRS_DEVICE_OUTLINED void relay_tile(const struct prs_kernel_args &args, uint32_t epoch, uint32_t block, uint32_t tile)
{
    const struct prs_schedule *s = &launch_here()->schedule;
    uint32_t node = block / s->place.local_ranks, to = prs_index_after(node, s->place.node, s->place.nodes), place;
    uint64_t bank = staging_bank(args);
    struct prs_piece_group g;
    /* MUTANT(emulator nodes/reduce_scatter_is_right) only the second half of a tile puts it: s/2/1/ */
    if (!is_last(args, prs_schedule_tile_counter(s, to, tile), 2))
        return;
    g = prs_schedule_group(s, tile / s->columns, tile % s->columns);
    /* MUTANT(emulator nodes/reduce_scatter_is_right) a signal only after all tiles of its group: s/g.pieces/1/ */
    if (!is_last(args, prs_schedule_group_counter(s, to, g.index), g.pieces))
        return;
    place = prs_schedule_group_place(s, &g);
    put_far(args, block, args.far.staging_window, bank + prs_layout_place(s, prs_schedule_relay_slot(s, node), place),
            bank + prs_layout_place(s, prs_schedule_arrive_slot(s, s->place.node, node), place),
            (uint64_t)g.pieces * PRS_PARTIAL_TILE, g.index);
    signal_far(args, block, prs_schedule_group_word(s, prs_index_after(s->place.node, node, s->place.nodes), g.index),
               epoch, g.index);
}

/* All-reduce: called when half a tile of this rank's block is in C. The CTA that completes a row tile puts its rows,
 * which are contiguous, into the counterparts' C. */
template <class E>
PRS_DEVICE_OUTLINED void put_rows(const struct prs_kernel_args &args, uint32_t epoch, uint32_t row_tile)
{
    const struct prs_schedule *s = &launch_here()->schedule;
    uint32_t rows = prs_schedule_tile_rows(s, row_tile);
    uint32_t group = prs_schedule_groups(s) + row_tile;
    uint64_t pitch = args.n * (uint64_t)element<E::sum>::bytes;
    uint64_t where = args.far.result_offset + ((uint64_t)s->place.rank * s->block_rows + row_tile * PRS_TILE_M) * pitch;
    if (!is_last(args, prs_schedule_row_counter(s, row_tile), 2 * s->columns) || rows == 0)
        return;
    for (uint32_t i = 1; i < s->place.nodes; i++) {
        uint32_t node = (s->place.node + i) % s->place.nodes,
                 peer = prs_place_rank(&s->place, node, s->place.local_rank);
        put_far(args, peer, args.far.result_window, where, where, rows * pitch, group);
        signal_far(args, peer, prs_schedule_row_word(s, prs_index_after(s->place.node, node, s->place.nodes), row_tile),
                   epoch, group);
    }
}

/* All-gather: the offset of piece `at` of a band in a slot. */
PRS_DEVICE uint64_t strip_place(const struct prs_schedule *s, uint32_t slot, uint32_t band, uint32_t at)
{
    uint32_t strips = prs_schedule_strips(s);
    return prs_layout_gathered(s, slot, band * s->band * 2 + at / strips, at % strips * PRS_STRIP_STEPS);
}

/* Where the scales of that piece begin, which is where those of all earlier pieces in the band end. */
PRS_DEVICE uint64_t strip_scales_place(const struct prs_schedule *s, uint32_t sent, uint32_t slot, uint32_t band,
                                       uint32_t at)
{
    uint32_t strips = prs_schedule_strips(s), step = at % strips * PRS_STRIP_STEPS;
    return prs_layout_scales(s, sent, slot, step < sent ? step : sent, (band * s->band * 2 + at / strips) * PRS_TILE_M);
}

/* All-gather: called when a chunk of this rank's block has landed in the slot from which it is put. The last chunk of
 * the last strip of a group puts the group, and signals. */
template <bool SCALED>
PRS_DEVICE_OUTLINED void relay_chunk(const struct prs_kernel_args &args, uint32_t epoch, uint32_t row_tile,
                                     uint32_t strip)
{
    const struct prs_schedule *s = &launch_here()->schedule;
    uint32_t slot = prs_schedule_slot(s, s->place.rank, s->place.rank);
    uint32_t *landed = arrivals_at(args, epoch, 0, prs_schedule_arrival(s, slot, row_tile, strip));
    uint64_t bank = staging_bank(args), from, bytes, scales = 0, scale_bytes = 0;
    uint32_t sent = args.scales.sent;
    struct prs_piece_group g;
    if (!arrives_last(landed, prs_schedule_arrivals(s, row_tile, strip)))
        return;
    g = prs_schedule_group(s, row_tile, strip);
    if (!is_last(args, prs_schedule_group_counter(s, 0, g.index), g.pieces))
        return;
    from = strip_place(s, slot, g.band, g.first);
    bytes = strip_place(s, slot, g.band, g.first + g.pieces) - from;
    if (SCALED) {
        scales = strip_scales_place(s, sent, slot, g.band, g.first);
        scale_bytes = strip_scales_place(s, sent, slot, g.band, g.first + g.pieces) - scales;
    }
    for (uint32_t i = 1; i < s->place.nodes; i++) {
        uint32_t node = (s->place.node + i) % s->place.nodes,
                 peer = prs_place_rank(&s->place, node, s->place.local_rank),
                 there = prs_schedule_slot(s, s->place.rank, peer);
        put_far(args, peer, args.far.staging_window, bank + from, bank + strip_place(s, there, g.band, g.first), bytes,
                g.index);
        /* MUTANT(emulator fp8_nodes/fp8_scales_cross_with_their_rows) scales are put: s/!= 0/> ~0u/ */
        if (SCALED && scale_bytes != 0)
            put_far(args, peer, args.far.staging_window, bank + scales,
                    bank + strip_scales_place(s, sent, there, g.band, g.first), scale_bytes, g.index);
        signal_far(args, peer,
                   prs_schedule_group_word(s, prs_index_after(s->place.node, node, s->place.nodes), g.index), epoch,
                   g.index);
    }
}

/* A warp copies 16-byte vectors, and has four loads in flight at a time. */
PRS_DEVICE void copy_row(uint4 *to, const uint4 *from, uint32_t vectors, uint32_t lane)
{
    uint32_t i = lane;
    for (; i + 96 < vectors; i += 128) {
        uint4 a = from[i], b = from[i + 32], c = from[i + 64], d = from[i + 96];
        to[i] = a, to[i + 32] = b, to[i + 64] = c, to[i + 96] = d;
    }
    for (; i < vectors; i += 32)
        to[i] = from[i];
}

/* A whole warp claims the next row. */
PRS_DEVICE uint32_t claim_row(const struct prs_kernel_args &args)
{
    uint32_t i = threadIdx.x % 32 == 0 ? atomicAdd(claim_counter(args, PRS_CLAIM_ROWS), 1u) : 0;
    return __shfl_sync(~0u, i, 0);
}

/* All-reduce: one warp of every CTA claims rows of the counterparts' blocks, and copies them to the other ranks of
 * this node. */
template <class E> PRS_DEVICE_OUTLINED void forward_rows(const struct prs_kernel_args &args, uint32_t epoch)
{
    const struct prs_schedule *s = &launch_here()->schedule;
    uint32_t lane = threadIdx.x % 32, vectors = args.n / element<E::sum>::in_vector;
    for (uint32_t i; (i = claim_row(args)) < (s->place.nodes - 1) * s->block_rows;) {
        uint32_t row, block = prs_schedule_forward_row(s, i, &row),
                      from = prs_index_after(block / s->place.local_ranks, s->place.node, s->place.nodes);
        uint32_t word = prs_schedule_row_word(s, from, row / PRS_TILE_M);
        uint64_t where = ((uint64_t)block * s->block_rows + row) * args.n * element<E::sum>::bytes;
        /* MUTANT(emulator nodes/allreduce_is_right) wait for other nodes' results:
         * s/wait_flag(&args.sync, far_flag(args, word), epoch, PRS_AWAIT_BROADCAST, block, word)// */
        if (lane == 0)
            wait_flag(&args.sync, far_flag(args, word), epoch, PRS_AWAIT_BROADCAST, block, word);
        __syncwarp();
        for (uint32_t p = 1; p < s->place.local_ranks; p++)
            copy_row((uint4 *)(args.far.result[p] + where), (const uint4 *)(args.far.result[0] + where), vectors, lane);
        __syncwarp();
        if (lane == 0) {
            fence_release_sys(); /* [broadcast-row]: one fence for all ranks, before the counts in await_broadcast() */
            count_broadcast(args, epoch);
        }
    }
}

#endif

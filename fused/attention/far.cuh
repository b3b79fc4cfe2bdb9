/* SPDX-License-Identifier: Apache-2.0 */
/* Ring attention between nodes: puts slabs of the own slice to the counterparts, and gives the counterparts credit for
 * what they put here. All functions run rarely, are out of line and take plain numbers, so that they cost the roles no
 * registers. */
#ifndef PERSEUS_FUSED_ATTENTION_FAR_CUH
#define PERSEUS_FUSED_ATTENTION_FAR_CUH

#include "fused/attention/cta.cuh"
#include "fused/core/far.cuh"

/* Bytes from the beginning of staging memory. */
PRS_DEVICE uint64_t staging_place(const struct prs_attention_args &args, uint32_t stage, uint32_t row)
{
    return ((uint64_t)stage * args.schedule.segment_rows + row) * args.row_bytes;
}

/* Called when a message has landed in the relay slot; index: of its arrival counter. The call for a slab's last message
 * puts the slab to the counterparts that read it. The slot may be written again only with their credit for it, which
 * says that the puts are done. */
PRS_DEVICE_OUTLINED void relay_message(const struct prs_attention_args &args, uint32_t epoch, uint32_t index)
{
    const struct prs_attention_schedule *s = &args.schedule;
    uint32_t slab = index % s->slabs, segment = index / s->slabs % s->segments;
    uint32_t kind = index / s->slabs / s->segments % 2, pair = index / s->slabs / s->segments / 2 % s->pairs;
    uint32_t row = slab * s->slab_chunks * s->chunk_rows, rows = s->segment_rows - row;
    if (!arrives_last(arrival_at(args, 0, epoch, index), prs_attention_arrivals(s, slab)))
        return;
    rows = rows < s->slab_chunks * s->chunk_rows ? rows : s->slab_chunks * s->chunk_rows;
    for (uint32_t back = 1; back < s->place.nodes; back++) {
        uint32_t peer = prs_place_counterpart(&s->place, s->place.nodes - back);
        uint32_t from = prs_attention_stage(s, s->place.world, pair, kind, segment);
        uint32_t to = prs_attention_stage(s, back * s->place.local_ranks, pair, kind, segment);
        if (segment >= prs_attention_interest(s, s->place.rank, peer))
            continue;
        put_far(args, peer, args.far.staging_window, staging_place(args, from, row), staging_place(args, to, row),
                rows * args.row_bytes, index);
        signal_far(args, peer, prs_attention_far_slab(s, back, pair, kind, segment, slab), epoch, index);
    }
}

/* One thread of each CTA calls it. The first one of the rank gives credit to the counterparts, group by group, when
 * what they put here has been read and forwarded. Its wait holds up no other role. */
PRS_DEVICE_OUTLINED void give_far_credit(const struct prs_attention_args &args)
{
    const struct prs_attention_schedule *s = &args.schedule;
    uint32_t epoch = launch_epoch(&args.sync);
    if (atomicAdd(&args.claims->credit, 1u) != 0)
        return;
    for (uint32_t group = 0; group < s->groups; group++) {
        const uint32_t *read = args.finished + group, *sent = read + s->groups;
        wait_flag(&args.sync, read, args.pieces_of[group], PRS_AWAIT_CTAS, s->place.rank, group);
        wait_flag(&args.sync, sent, prs_attention_forwards(s, group), PRS_AWAIT_CTAS, s->place.rank, s->groups + group);
        for (uint32_t way = 1; way < s->place.nodes; way++)
            signal_far(args, prs_place_counterpart(&s->place, way), prs_attention_far_credit(s, way, group), epoch,
                       group);
    }
}

#endif

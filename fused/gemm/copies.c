/* SPDX-License-Identifier: Apache-2.0 */
#include "fused/gemm/copies.h"

/* A piece, then its flag. */
static int copy_piece(struct prs_gemm_plan *p, const struct prs_copy *piece)
{
    const struct prs_kernel_args *args = &p->args;
    const struct prs_schedule *s = &p->schedule;
    uint32_t bytes = prs_operand_bytes(&p->shape);
    uint64_t pitch = (uint64_t)p->shape.k * bytes, from_pitch = prs_pitch(p->shape.lda, p->shape.k) * bytes,
             row = (uint64_t)piece->band * s->band * PRS_PAIR_M;
    uint64_t rows = (uint64_t)s->band * PRS_PAIR_M, width = (uint64_t)prs_schedule_segment_steps(s) * PRS_STAGE_ROW;
    uint64_t begin = piece->segment * width;
    const uint8_t *from = (const uint8_t *)p->operands.a + row * from_pitch + begin;
    uint32_t slot = prs_schedule_slot(s, s->place.rank, (s->place.rank + piece->distance) % s->place.world);
    uint8_t *to = args->staging[piece->distance] + ((uint64_t)slot * s->most_pairs * PRS_PAIR_M + row) * pitch + begin;
    uint32_t *flag = args->flags[piece->distance] + prs_schedule_segment_flag(s, slot, piece->band, piece->segment);
    int r;
    if (begin >= pitch)
        return 0; /* an empty piece, for which no rank waits */
    if (row + rows > s->block_rows)
        rows = s->block_rows - row;
    if (begin + width > pitch)
        width = pitch - begin;
    r = prs_copy_stream_rows(p->base.copies, to, pitch, from, from_pitch, width, rows);
    return r ? r : prs_copy_stream_word(p->base.copies, flag, &args->sync.words->copying);
}

/* Copies the scales of all rows before the first rows. Copies are done in order, so every flag also covers the
 * scales. */
static int copy_scales(struct prs_gemm_plan *p, const struct prs_copy *piece)
{
    const struct prs_kernel_args *args = &p->args;
    const struct prs_schedule *s = &p->schedule;
    uint32_t slot = prs_schedule_slot(s, s->place.rank, (s->place.rank + piece->distance) % s->place.world);
    uint8_t *to = args->staging[piece->distance] + prs_layout_scales(s, args->scales.sent, slot, 0, 0);
    if (args->scales.sent == 0 || piece->band != 0 || piece->segment != 0)
        return 0;
    return prs_copy_stream_rows(p->base.copies, to, prs_scales_pitch(s) * sizeof(float), args->scales.a,
                                args->scales.a_pitch * sizeof(float), s->block_rows * sizeof(float), args->scales.sent);
}

int prs_copies_enqueue(struct prs_gemm_plan *p)
{
    const struct prs_schedule *s = &p->schedule;
    int r = 0;
    for (uint32_t at = 0; at < prs_schedule_copies(s) && !r; at++) {
        struct prs_copy piece;
        prs_schedule_copy(s, at, &piece);
        r = copy_scales(p, &piece);
        if (!r)
            r = copy_piece(p, &piece);
    }
    return r;
}

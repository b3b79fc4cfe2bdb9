/* SPDX-License-Identifier: Apache-2.0 */
#include "fused/gemm/gather_time.h"

#include <math.h>

#include "fused/core/machine.h"

/* Fitted to the times of whole launches of 2 and 4 x H200, ranks as threads (doc/results/allgather-pieces-2xH200.json,
 * allgather-choice-2xH200.json, allgather-turns-4xH200.json: test_gather_time.c has rows of each), and close to
 * measurements of these parts alone (doc/fused-notes.md): a copy engine moves 353 to 358 GB/s in large pieces, a piece
 * and its flag take 4.3 to 5 us in addition to the bytes, and a call of the host 2.5 to 3.2 us. If ranks are processes,
 * launches take 5 to 10 us longer, with pushed rows too: the bench's streams are idle then, so the time of the launch
 * itself counts. */
static const double KERNEL_BEGINS_US = 11; /* after the kernel that waits for credit has begun */
static const double CALLS_BEGIN_US = 5;    /* the kernel is launched before the first copy is enqueued */
static const double CALL_US = 2.5;         /* two calls for each piece: rows, flag */
static const double PIECE_US = 4.4;
static const double END_US = 5;
/* The longer a product takes beyond this, the lower the clock that the power limit allows. */
static const double COOL_US = 400;
static const double HEAT = 0.05; /* 0.68 at 700 us, 0.71 at 2900, 0.74 at 6000 */
/* The rows and columns of the units that run at the same time are read from memory once each: the cost of each row or
 * column beyond the fewest possible. Bands of 48 pairs, 11 columns: 3 % slower in all, which is 6 % for the others'
 * block. */
/* MUTANT(model gather) tall bands read more: s/.002// */
static const double READ = 0.002;

/* Pushed. A chunk of 8 KB goes to one rank in 4.7 us at best (2 GPUs: 62 of each CTA in 330, 94 in 480 us); to three,
 * the links are the limit. */
/* MUTANT(model gather) a chunk takes its time with one peer: s/4.7/0/ */
static const double CHUNK_US = 4.7;
static const double PUSH_ENDS_US = 17; /* before the first chunk, and after the last */
static const double PUSH_WAVE = 0.4;   /* of a unit's time is left when the last chunk has come */
/* MUTANT(model gather) what is pushed holds loads up: s/.4// */
/* delay of loads: this part of the links' time, times the ratio of the links' time to the product's */
static const double PUSH_STALL = 0.4;

static const double NEARLY = 1.01; /* times within this factor count as equal */

enum {
    MOST_PLAYED = 8192, /* units times segments: 0.1 ms */
    MOST_PIECES = 16,   /* pieces of a block: a 16th of it arrives, and is computed, soon enough */
    MOST_SEGMENTS = 4
};

/* Units that the busiest cluster computes one after the other. */
static double waves(const struct prs_schedule *s, uint32_t clusters)
{
    return ceil((double)s->units / clusters);
}

static double step_us(const struct prs_schedule *s, uint32_t clusters)
{
    double step = PRS_STEP_US * s->wide / PRS_TILE_N, cool = waves(s, clusters) * s->k_steps * step / COOL_US;
    /* MUTANT(model gather) long products are slower: s/(cool > 1 ? pow(cool, HEAT) : 1)/1/ */
    return step * (cool > 1 ? pow(cool, HEAT) : 1);
}

/* The time of a step when units come in bands, relative to the time in a square of units, which reads least. */
static double reading(const struct prs_schedule *s, uint32_t clusters)
{
    double tall = fmin(clusters, fmax(s->band, (double)clusters / s->columns));
    return 1 + READ * (tall + clusters / tall - 2 * sqrt(clusters));
}

/* When a piece of a band of another rank's block arrives. All ranks do the same at the same time, so this is when this
 * rank's copy over the same distance is done. A stream's copies run in order, each when the engine is free and the host
 * has enqueued it; all but the last of a block are equal, so the slower of the two sets the pace from the first on. */
/* MUTANT(model gather) blocks come one after the other:
 * s/prs_index_after(s->place.rank, u->block, s->place.world)/0/ */
static double piece_comes(const struct prs_schedule *s, const struct prs_unit *u, uint32_t segment)
{
    uint32_t band = u->pair / s->band, turn = prs_index_after(s->place.rank, u->block, s->place.world);
    uint32_t first = band * s->band * PRS_PAIR_M, rows = s->band * PRS_PAIR_M;
    uint32_t step = segment * prs_schedule_segment_steps(s), steps = prs_schedule_segment_steps(s);
    double piece = ((double)turn * s->bands + band) * s->segments + segment + 1, before, own;
    /* MUTANT(model gather) the last band may be short: delete */
    if (rows > s->block_rows - first)
        rows = s->block_rows - first;
    if (steps > s->k_steps - step)
        steps = s->k_steps - step;
    before = ((double)turn * s->block_rows + first) * s->k_steps + (double)rows * step;
    own = (double)rows * steps;
    before *= PRS_STAGE_ROW / PRS_COPY_BYTES_PER_US;
    own = own * PRS_STAGE_ROW / PRS_COPY_BYTES_PER_US + PIECE_US;
    /* MUTANT(model gather) the host may be what is late: s/fmax(2 * CALL_US * piece, /fmax(0, / */
    /* MUTANT(model gather) a piece costs more than its bytes: s/+ PIECE_US * (piece - 1)// */
    return CALLS_BEGIN_US + own + fmax(2 * CALL_US * piece, 2 * CALL_US + before + PIECE_US * (piece - 1));
}

/* Pieces of a band that are not empty. */
static uint32_t pieces_of(const struct prs_schedule *s)
{
    return prs_ceil_div(s->k_steps, prs_schedule_segment_steps(s));
}

/* A unit of another rank's block that a cluster takes at `now`. */
static double play_unit(const struct prs_schedule *s, const struct prs_unit *u, double now, double step)
{
    uint32_t steps = prs_schedule_segment_steps(s), pieces = pieces_of(s);
    /* MUTANT(model gather) a unit begins with its first piece: s/i)/pieces - 1)/ */
    /* MUTANT(model gather) a unit waits for each piece: s/i)/0)/ */
    for (uint32_t i = 0; i < pieces; i++)
        now = fmax(now, piece_comes(s, u, i)) + step * (i + 1 < pieces ? steps : s->k_steps - i * steps);
    return now;
}

/* As load_tiles() takes them. */
static double play_cluster(const struct prs_schedule *s, uint32_t cluster, uint32_t clusters, double near, double far)
{
    double now = KERNEL_BEGINS_US;
    struct prs_cursor cursor = {0, 0};
    for (uint32_t at = cluster; at < s->units; at += clusters) {
        struct prs_unit u;
        prs_schedule_unit(s, &cursor, at, &u);
        now = u.block == s->place.rank ? now + s->k_steps * near : play_unit(s, &u, now, far);
    }
    return now;
}

double prs_gather_product_us(const struct prs_schedule *s, uint32_t clusters)
{
    return KERNEL_BEGINS_US + waves(s, clusters) * s->k_steps * step_us(s, clusters) + END_US;
}

double prs_gather_copied_us(const struct prs_schedule *s, uint32_t clusters)
{
    double near = step_us(s, clusters), far = near * reading(s, clusters), end = 0;
    if ((uint64_t)s->units * s->segments > MOST_PLAYED) {
        struct prs_unit last = {(s->place.rank + 1) % s->place.world, s->pairs - 1, 0};
        double begins = KERNEL_BEGINS_US + (waves(s, clusters) - 1) * s->k_steps * far;
        /* MUTANT(model gather) huge products take their time:
         * s/fmax(begins, piece_comes(s, &last, pieces_of(s) - 1)/piece_comes(s, &last, pieces_of(s) - 1/ */
        /* MUTANT(model gather) huge products wait for the links:
         * s/fmax(begins, piece_comes(s, &last, pieces_of(s) - 1))/begins/ */
        return fmax(begins, piece_comes(s, &last, pieces_of(s) - 1)) + s->k_steps * far + END_US;
    }
    for (uint32_t cluster = 0; cluster < clusters && cluster < s->units; cluster++)
        end = fmax(end, play_cluster(s, cluster, clusters, near, far));
    return end + END_US;
}

double prs_gather_pushed_us(const struct prs_schedule *s, uint32_t clusters, double spread_us)
{
    uint32_t ctas = 2 * clusters;
    double others = s->place.world - 1, unit = s->k_steps * step_us(s, clusters);
    double bytes = others * s->block_rows * s->k_steps * PRS_STAGE_ROW, product = waves(s, clusters) * unit;
    double chunk = fmax(CHUNK_US, others * PRS_PUSH_ROWS * PRS_STAGE_ROW * ctas / PRS_STORE_BYTES_PER_US);
    /* MUTANT(model gather) what is spread takes longer: s/fmax(spread_us, /fmax(0, / */
    double pushing = fmax(spread_us, ceil((double)prs_schedule_chunks(s) / ctas) * chunk);
    double links = bytes / PRS_STORE_BYTES_PER_US;
    /* MUTANT(model gather) the last chunk is waited for: s/+ PUSH_WAVE * unit// */
    return fmax(pushing + PUSH_ENDS_US + PUSH_WAVE * unit,
                prs_gather_product_us(s, clusters) + PUSH_STALL * links * links / product);
}

/* The size of a band if a block has `bands` bands; 0: impossible. */
static uint32_t band_of(const struct prs_schedule *s, uint32_t bands)
{
    uint32_t band = prs_ceil_div(s->pairs, bands);
    return prs_ceil_div(s->pairs, band) == bands ? band : 0;
}

static double play_pieces(struct prs_schedule *s, uint32_t clusters, uint32_t band, uint32_t segments)
{
    s->band = band > s->pairs ? s->pairs : band;
    s->bands = prs_ceil_div(s->pairs, s->band);
    s->segments = segments;
    return prs_gather_copied_us(s, clusters);
}

double prs_gather_best_pieces(const struct prs_schedule *shape, uint32_t clusters, uint32_t *band, uint32_t *segments)
{
    struct prs_schedule s = *shape;
    double enough = NEARLY * prs_gather_product_us(&s, clusters), best = INFINITY;
    uint32_t given_band = *band, given_segments = *segments;
    if (given_band != 0 && given_segments != 0)
        return play_pieces(&s, clusters, given_band, given_segments);
    /* A given band or number of segments is kept: further pieces come only from dividing the other one. */
    for (uint32_t count = 1; count <= MOST_PIECES && best > enough; count++)
        for (uint32_t i = 1; i <= MOST_SEGMENTS && i <= s.k_steps && i <= count; i++) {
            uint32_t try_band = count % i == 0 ? band_of(&s, count / i) : 0;
            double us;
            /* MUTANT(model gather) a band that is given stays: s/? given_band/? band_of(&s, i)/ */
            if (given_band != 0)
                try_band = i == count ? given_band : 0;
            if (try_band == 0 || (given_segments != 0 && i > 1))
                continue;
            /* MUTANT(model gather) segments that are given stay: s/given_segments != 0 ? given_segments :// */
            us = play_pieces(&s, clusters, try_band, given_segments != 0 ? given_segments : i);
            /* MUTANT(model gather) the fewest of what is as fast: s#NEARLY *## */
            if (NEARLY * us >= best)
                continue;
            best = us;
            *band = try_band, *segments = s.segments;
        }
    return best;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels' protocol on threads: the schedules and flags of fused/schedule.h, with one word in place of each piece
 * of data. Data are plain memory, flags are atomics with the orders the kernels use, so that ThreadSanitizer sees a
 * wait that is missing or too weak. Each cluster is a thread that computes and a thread that stores; ranks run free,
 * with random delays, through many epochs that begin shortly before the epoch wraps. */
#include "fused/schedule.h"

#include <criterion/criterion.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { WORLD = 4, CLUSTERS = 2, HALVES = 2, CTAS = 2, SLABS = 2, FIRST_EPOCH = 0xfffffff0, WAIT_SECONDS = 60 };

#ifdef __SANITIZE_THREAD__
enum { EPOCHS = 2000 };
#else
enum { EPOCHS = 3000 };
#endif

/* One piece on its way from a computing thread to its storing thread. */
struct slab {
    struct prs_unit unit;
    uint32_t cta, half, value;
    uint32_t full; /* atomic: 1 full, 0 free */
};

struct cluster {
    struct model *model;
    uint32_t rank, index;
    struct slab slabs[SLABS];
    struct slab left[CTAS * HALVES]; /* what each warpgroup keeps in registers, as in multiply.cuh */
    bool any_left[CTAS * HALVES];
    uint32_t filled, stored;
    uint32_t random[2];
};

struct rank {
    struct prs_schedule s;
    uint32_t *staging[2];   /* plain */
    uint32_t *result;       /* plain */
    uint32_t *flags, *done; /* atomic */
    uint32_t epoch, exits;  /* atomic: as in prs_plan_words */
};

struct model {
    struct rank ranks[WORLD];
    struct cluster clusters[WORLD][CLUSTERS];
    uint32_t failed; /* atomic: somebody gave up or found a wrong value */
    char text[160];
};

/* ---- helpers -------------------------------------------------------------------------------------------------------
 */
static uint32_t load(const uint32_t *p)
{
    return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}

static void raise_to(uint32_t *p, uint32_t v)
{
    __atomic_store_n(p, v, __ATOMIC_RELEASE);
}

static void fail(struct model *m, const char *what, uint32_t rank, uint32_t index, uint32_t want, uint32_t seen)
{
    uint32_t none = 0;
    if (!__atomic_compare_exchange_n(&m->failed, &none, 1, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
        return;
    snprintf(m->text, sizeof(m->text), "rank %u: %s %u: want %u, have %u", rank, what, index, want, seen);
    raise_to(&m->failed, 2);
}

static bool wait_for(struct model *m, const uint32_t *flag, uint32_t want, const char *what, uint32_t rank,
                     uint32_t index)
{
    time_t give_up = time(NULL) + WAIT_SECONDS;
    for (uint32_t spins = 1;; spins++) {
        uint32_t seen = load(flag);
        if (prs_flag_reached(seen, want))
            return true;
        if (load(&m->failed) != 0)
            return false;
        if (spins % 1024 == 0 && time(NULL) > give_up) {
            fail(m, what, rank, index, want, seen);
            return false;
        }
        sched_yield();
    }
}

static void dawdle(uint32_t *random)
{
    *random = *random * 1664525u + 1013904223u;
    if (*random >> 26 == 0)
        usleep(*random >> 8 & 127);
}

static uint32_t product(uint32_t epoch, uint32_t rank, uint32_t block, uint32_t piece)
{
    uint32_t x = epoch * 2654435761u ^ rank * 40503u ^ block * 9973u ^ piece * 69069u;
    return x ^ x >> 15;
}

static bool reduces(const struct rank *r)
{
    return r->s.kind != PRS_KIND_ALLGATHER;
}

/* Number of one half of one tile within a block. */
static uint32_t piece_of(const struct prs_schedule *s, const struct slab *x)
{
    return prs_schedule_tile(s, &x->unit, x->cta) * HALVES + x->half;
}

/* ---- warps 1 and 2: store ------------------------------------------------------------------------------------------
 */
static void store_slab(struct model *m, uint32_t rank, uint32_t epoch, const struct slab *x)
{
    struct rank *me = &m->ranks[rank];
    const struct prs_schedule *s = &me->s;
    uint32_t piece = piece_of(s, x), pieces = prs_schedule_tiles(s) * HALVES;
    if (reduces(me) && x->unit.block != rank) {
        struct rank *owner = &m->ranks[x->unit.block];
        uint32_t slot = prs_schedule_slot(s, rank, x->unit.block), tile = prs_schedule_tile(s, &x->unit, x->cta);
        owner->staging[epoch & 1][slot * pieces + piece] = x->value;
        raise_to(&owner->flags[prs_schedule_partial_flag(s, slot, tile, x->half)], epoch);
        return;
    }
    me->result[x->unit.block * pieces + piece] = x->value;
    if (s->kind != PRS_KIND_ALLREDUCE)
        return;
    for (uint32_t p = 1; p < WORLD; p++) {
        struct rank *peer = &m->ranks[(rank + p) % WORLD];
        peer->result[x->unit.block * pieces + piece] = x->value;
        __atomic_fetch_add(&peer->done[prs_schedule_slot(s, rank, (rank + p) % WORLD)], 1, __ATOMIC_RELEASE);
    }
}

static bool store_epoch(struct cluster *c, uint32_t epoch)
{
    const struct prs_schedule *s = &c->model->ranks[c->rank].s;
    for (uint32_t unit = c->index; unit < s->units; unit += CLUSTERS) {
        for (uint32_t i = 0; i < CTAS * HALVES; i++, c->stored++) {
            struct slab *x = &c->slabs[c->stored % SLABS];
            if (!wait_for(c->model, &x->full, 1, "slab to store", c->rank, c->stored))
                return false;
            dawdle(&c->random[1]);
            store_slab(c->model, c->rank, epoch, x);
            raise_to(&x->full, 0);
        }
    }
    return true;
}

/* ---- warps 4 to 11: compute ----------------------------------------------------------------------------------------
 */
static bool hand_over(struct cluster *c, const struct slab *x)
{
    struct slab *to = &c->slabs[c->filled % SLABS];
    while (load(&to->full) != 0) {
        if (load(&c->model->failed) != 0)
            return false;
        sched_yield();
    }
    to->unit = x->unit, to->cta = x->cta, to->half = x->half, to->value = x->value;
    raise_to(&to->full, 1);
    c->filled++;
    return true;
}

static bool hand_over_left(struct cluster *c, uint32_t i)
{
    bool good = !c->any_left[i] || hand_over(c, &c->left[i]);
    c->any_left[i] = false;
    return good;
}

static bool hand_over_all_left(struct cluster *c)
{
    bool good = true;
    for (uint32_t i = 0; i < CTAS * HALVES && good; i++)
        good = hand_over_left(c, i);
    return good;
}

static bool add_partials(struct cluster *c, uint32_t epoch, struct slab *x)
{
    struct rank *me = &c->model->ranks[c->rank];
    const struct prs_schedule *s = &me->s;
    uint32_t tile = prs_schedule_tile(s, &x->unit, x->cta), pieces = prs_schedule_tiles(s) * HALVES;
    for (uint32_t slot = 0; slot < WORLD - 1; slot++) {
        uint32_t flag = prs_schedule_partial_flag(s, slot, tile, x->half);
        if (!wait_for(c->model, &me->flags[flag], epoch, "partial sums, flag", c->rank, flag))
            return false;
        x->value += me->staging[epoch & 1][slot * pieces + piece_of(s, x)];
    }
    return true;
}

/* All-gather: every chunk of the row tile, in the order of K steps; the sum of what should be there is the result. */
static bool read_rows(struct cluster *c, uint32_t epoch, struct slab *x)
{
    struct rank *me = &c->model->ranks[c->rank];
    const struct prs_schedule *s = &me->s;
    uint32_t slot = prs_schedule_slot(s, x->unit.block, c->rank), tile = x->unit.pair * 2 + x->cta;
    uint32_t chunk_rows = s->pairs * 2 * 2, bank = s->segments != 0 ? 0 : epoch & 1;
    x->value = 0;
    for (uint32_t step = 0; step < s->k_steps; step++) {
        uint32_t index = s->segments != 0 ? prs_schedule_segment_flag(s, slot, x->unit.pair / s->band,
                                                                      step / prs_schedule_segment_steps(s))
                                          : prs_schedule_arrival(s, slot, tile, step / PRS_STRIP_STEPS);
        uint32_t want = s->segments != 0 ? epoch : epoch * prs_schedule_arrivals(s, tile, step / PRS_STRIP_STEPS);
        if (!wait_for(c->model, &me->flags[index], want, "rows of A, flag", c->rank, index))
            return false;
        for (uint32_t i = 0; i < 2; i++) {
            uint32_t row = tile * PRS_TILE_M + i * PRS_PUSH_ROWS;
            if (row < s->block_rows)
                x->value += me->staging[bank][(slot * chunk_rows + tile * 2 + i) * s->k_steps + step];
        }
    }
    return true;
}

static bool compute_epoch(struct cluster *c, uint32_t epoch)
{
    struct rank *me = &c->model->ranks[c->rank];
    const struct prs_schedule *s = &me->s;
    struct prs_cursor cursor = {0, 0};
    for (uint32_t unit = c->index; unit < s->units; unit += CLUSTERS) {
        struct slab x = {.full = 0};
        prs_schedule_unit(s, &cursor, unit, &x.unit);
        /* As in multiply_tiles(): without this ranks can wait for what each other still hold. */
        if (reduces(me) && x.unit.block == c->rank && !hand_over_all_left(c))
            return false;
        for (uint32_t i = 0; i < CTAS * HALVES; i++) {
            x.cta = i / HALVES, x.half = i % HALVES;
            x.value = product(epoch, c->rank, x.unit.block, piece_of(s, &x));
            dawdle(&c->random[0]);
            if (reduces(me) && x.unit.block == c->rank && !add_partials(c, epoch, &x))
                return false;
            if (!reduces(me) && x.unit.block != c->rank && !read_rows(c, epoch, &x))
                return false;
            if (!hand_over_left(c, i))
                return false;
            c->left[i] = x;
            c->any_left[i] = true;
        }
    }
    return hand_over_all_left(c);
}

/* ---- warp 3, or a copy engine --------------------------------------------------------------------------------------
 */
static uint32_t chunk_value(uint32_t epoch, uint32_t rank, uint32_t row, uint32_t step)
{
    return product(epoch, rank, row, step + 1000);
}

static void push_epoch(struct cluster *c, uint32_t epoch)
{
    const struct prs_schedule *s = &c->model->ranks[c->rank].s;
    uint32_t chunk_rows = s->pairs * 2 * 2;
    for (uint32_t i = c->index; i < prs_schedule_chunks(s); i += CLUSTERS) {
        struct prs_chunk k;
        prs_schedule_chunk(s, i, &k);
        dawdle(&c->random[1]);
        for (uint32_t p = 1; p < WORLD; p++) {
            uint32_t owner = (c->rank + p) % WORLD, slot = prs_schedule_slot(s, c->rank, owner);
            struct rank *to = &c->model->ranks[owner];
            to->staging[epoch & 1][(slot * chunk_rows + k.row / PRS_PUSH_ROWS) * s->k_steps + k.step] =
                chunk_value(epoch, c->rank, k.row / PRS_PUSH_ROWS, k.step);
            __atomic_fetch_add(&to->flags[prs_schedule_arrival(s, slot, k.row / PRS_TILE_M, k.step / PRS_STRIP_STEPS)],
                               1, __ATOMIC_RELEASE);
        }
    }
}

static bool copy_epoch(struct cluster *c, uint32_t epoch)
{
    struct rank *me = &c->model->ranks[c->rank];
    const struct prs_schedule *s = &me->s;
    uint32_t chunk_rows = s->pairs * 2 * 2, steps = prs_schedule_segment_steps(s);
    for (uint32_t slot = 0; slot < WORLD - 1; slot++)
        if (!wait_for(c->model, &me->done[slot], epoch - 1, "credit of slot", c->rank, slot))
            return false;
    /* In turn, all of one rank goes before the next; else one step of all ranks before the next step. */
    for (uint32_t turn = 1; turn <= (s->in_turn ? WORLD - 1 : 1); turn++) {
        for (uint32_t i = 0; i < s->bands * s->k_steps; i++) {
            uint32_t band = i / s->k_steps, step = i % s->k_steps;
            for (uint32_t p = turn; p <= (s->in_turn ? turn : WORLD - 1); p++) {
                uint32_t owner = (c->rank + p) % WORLD, slot = prs_schedule_slot(s, c->rank, owner);
                struct rank *to = &c->model->ranks[owner];
                for (uint32_t row = band * s->band * 4;
                     row < (band + 1) * s->band * 4 && row < prs_ceil_div(s->block_rows, 64); row++)
                    to->staging[0][(slot * chunk_rows + row) * s->k_steps + step] =
                        chunk_value(epoch, c->rank, row, step);
                dawdle(&c->random[1]);
                if (step % steps == steps - 1 || step + 1 == s->k_steps)
                    raise_to(&to->flags[prs_schedule_segment_flag(s, slot, band, step / steps)], epoch);
            }
        }
    }
    return true;
}

/* ---- one launch after the other ------------------------------------------------------------------------------------
 */
static uint32_t expected(const struct rank *r, uint32_t rank, uint32_t epoch, uint32_t block, uint32_t piece)
{
    uint32_t sum = 0, tile = piece / HALVES, row_tile = tile / r->s.columns;
    if (r->s.kind == PRS_KIND_ALLGATHER && block == rank)
        return product(epoch, rank, block, piece);
    if (r->s.kind == PRS_KIND_ALLGATHER) {
        for (uint32_t step = 0; step < r->s.k_steps; step++)
            for (uint32_t i = 0; i < 2; i++)
                if (row_tile * PRS_TILE_M + i * PRS_PUSH_ROWS < r->s.block_rows)
                    sum += chunk_value(epoch, block, row_tile * 2 + i, step);
        return sum;
    }
    for (uint32_t sender = 0; sender < WORLD; sender++)
        sum += product(epoch, sender, block, piece);
    return sum;
}

static void check_epoch(struct model *m, uint32_t rank, uint32_t epoch)
{
    struct rank *r = &m->ranks[rank];
    uint32_t pieces = prs_schedule_tiles(&r->s) * HALVES;
    for (uint32_t block = 0; block < WORLD; block++) {
        if (r->s.kind == PRS_KIND_REDUCE_SCATTER && block != rank)
            continue;
        for (uint32_t piece = 0; piece < pieces; piece++) {
            uint32_t want = expected(r, rank, epoch, block, piece), have = r->result[block * pieces + piece];
            if (want != have)
                fail(m, "result, piece", rank, block * pieces + piece, want, have);
        }
    }
}

/* The last thread to leave checks, as a kernel that reads the result would, and opens the next epoch. */
static void leave(struct cluster *c, uint32_t epoch)
{
    struct rank *r = &c->model->ranks[c->rank];
    if (__atomic_add_fetch(&r->exits, 1, __ATOMIC_ACQ_REL) != (epoch - (uint32_t)FIRST_EPOCH) * CLUSTERS * 2)
        return;
    check_epoch(c->model, c->rank, epoch);
    if (r->s.segments != 0)
        for (uint32_t p = 1; p < WORLD; p++)
            raise_to(
                &c->model->ranks[(c->rank + p) % WORLD].done[prs_schedule_slot(&r->s, c->rank, (c->rank + p) % WORLD)],
                epoch);
    raise_to(&r->epoch, epoch);
}

static void *compute_thread(void *arg)
{
    struct cluster *c = arg;
    for (uint32_t i = 1; i <= EPOCHS; i++) {
        uint32_t epoch = FIRST_EPOCH + i;
        if (!wait_for(c->model, &c->model->ranks[c->rank].epoch, epoch - 1, "epoch", c->rank, 0) ||
            !compute_epoch(c, epoch))
            return NULL;
        leave(c, epoch);
    }
    return NULL;
}

static void *store_thread(void *arg)
{
    struct cluster *c = arg;
    struct rank *me = &c->model->ranks[c->rank];
    for (uint32_t i = 1; i <= EPOCHS; i++) {
        uint32_t epoch = FIRST_EPOCH + i, want = epoch * prs_schedule_tiles(&me->s) * HALVES;
        if (!wait_for(c->model, &me->epoch, epoch - 1, "epoch", c->rank, 0))
            return NULL;
        if (!reduces(me) && me->s.segments == 0)
            push_epoch(c, epoch);
        if (me->s.segments != 0 && c->index == 0 && !copy_epoch(c, epoch))
            return NULL;
        if (!store_epoch(c, epoch))
            return NULL;
        for (uint32_t slot = 0; me->s.kind == PRS_KIND_ALLREDUCE && c->index == 0 && slot < WORLD - 1; slot++)
            if (!wait_for(c->model, &me->done[slot], want, "broadcast of slot", c->rank, slot))
                return NULL;
        leave(c, epoch);
    }
    return NULL;
}

/* ---- setting up ----------------------------------------------------------------------------------------------------
 */
static void init_rank(struct rank *r, uint32_t rank, const struct prs_schedule *shape)
{
    uint32_t pieces, cells, tiles, strips;
    r->s = *shape;
    r->s.rank = rank;
    tiles = prs_schedule_tiles(&r->s), pieces = tiles * HALVES, strips = prs_schedule_strips(&r->s);
    cells = WORLD * (pieces + r->s.pairs * 4 * r->s.k_steps);
    for (uint32_t bank = 0; bank < 2; bank++)
        r->staging[bank] = calloc(cells, sizeof(uint32_t));
    r->result = calloc(WORLD * pieces, sizeof(uint32_t));
    r->flags = calloc(cells + WORLD * r->s.pairs * 2 * strips, sizeof(uint32_t));
    r->done = calloc(WORLD, sizeof(uint32_t));
    r->epoch = FIRST_EPOCH;
    /* As they would stand after FIRST_EPOCH launches. */
    for (uint32_t i = 0; i < WORLD; i++)
        r->done[i] = r->s.kind == PRS_KIND_ALLREDUCE ? (uint32_t)FIRST_EPOCH * tiles * HALVES : (uint32_t)FIRST_EPOCH;
    for (uint32_t i = 0; i < cells; i++)
        r->flags[i] = FIRST_EPOCH;
    for (uint32_t slot = 0; r->s.kind == PRS_KIND_ALLGATHER && r->s.segments == 0 && slot < WORLD - 1; slot++)
        for (uint32_t tile = 0; tile < r->s.pairs * 2; tile++)
            for (uint32_t strip = 0; strip < strips; strip++)
                r->flags[prs_schedule_arrival(&r->s, slot, tile, strip)] =
                    FIRST_EPOCH * prs_schedule_arrivals(&r->s, tile, strip);
}

static void fini_rank(struct rank *r)
{
    free(r->staging[0]);
    free(r->staging[1]);
    free(r->result);
    free(r->flags);
    free(r->done);
}

static void run(uint32_t kind, uint32_t m, uint32_t n, uint32_t k, uint32_t band, uint32_t lag, uint32_t segments,
                uint32_t in_turn)
{
    struct model *model = calloc(1, sizeof(*model));
    pthread_t threads[WORLD][CLUSTERS][2];
    struct prs_schedule shape;
    uint32_t seed = (uint32_t)time(NULL);
    prs_schedule_init(&shape, kind, 0, WORLD, m, n, k, band, lag);
    shape.segments = segments;
    shape.in_turn = in_turn;
    for (uint32_t r = 0; r < WORLD; r++)
        init_rank(&model->ranks[r], r, &shape);
    for (uint32_t r = 0; r < WORLD; r++) {
        for (uint32_t i = 0; i < CLUSTERS; i++) {
            struct cluster *c = &model->clusters[r][i];
            c->model = model, c->rank = r, c->index = i;
            c->random[0] = seed + r * 100 + i, c->random[1] = seed * 3 + r * 100 + i;
            cr_assert_eq(pthread_create(&threads[r][i][0], NULL, compute_thread, c), 0);
            cr_assert_eq(pthread_create(&threads[r][i][1], NULL, store_thread, c), 0);
        }
    }
    for (uint32_t r = 0; r < WORLD; r++)
        for (uint32_t i = 0; i < CLUSTERS; i++)
            for (uint32_t t = 0; t < 2; t++)
                pthread_join(threads[r][i][t], NULL);
    cr_assert_eq(load(&model->failed), 0, "seed %u: %s", seed, model->text);
    for (uint32_t r = 0; r < WORLD; r++)
        cr_assert_eq(model->ranks[r].epoch, (uint32_t)FIRST_EPOCH + EPOCHS, "rank %u stopped at epoch %u", r,
                     model->ranks[r].epoch);
    for (uint32_t r = 0; r < WORLD; r++)
        fini_rank(&model->ranks[r]);
    free(model);
}

Test(protocol, reduce_scatter_adds_every_partial_of_its_own_epoch, .timeout = 600)
{
    run(PRS_KIND_REDUCE_SCATTER, WORLD * 768, 256, 64, 1, 1, 0, 0);
}

Test(protocol, reduce_scatter_with_a_short_last_band_and_a_longer_lag, .timeout = 600)
{
    run(PRS_KIND_REDUCE_SCATTER, WORLD * 700, 300, 64, 2, 2, 0, 0);
}

Test(protocol, allreduce_ends_only_when_all_blocks_have_come, .timeout = 600)
{
    run(PRS_KIND_ALLREDUCE, WORLD * 512, 256, 64, 1, 1, 0, 0);
}

Test(protocol, pushed_rows_are_read_in_their_own_epoch, .timeout = 600)
{
    run(PRS_KIND_ALLGATHER, WORLD * 300, 256, 320, 1, 1, 0, 0);
}

Test(protocol, copied_rows_are_not_overwritten_before_all_have_read_them, .timeout = 600)
{
    run(PRS_KIND_ALLGATHER, WORLD * 300, 256, 320, 1, 1, 2, 0);
}

Test(protocol, rows_copied_in_turn_are_awaited_block_by_block, .timeout = 600)
{
    run(PRS_KIND_ALLGATHER, WORLD * 300, 256, 320, 1, 1, 2, 1);
}

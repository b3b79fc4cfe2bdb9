/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "test/fused/model.h"

/* ---- helpers ---- */
uint32_t model_product(uint32_t epoch, uint32_t rank, uint32_t block, uint32_t piece)
{
    uint32_t x = epoch * 2654435761u ^ rank * 40503u ^ block * 9973u ^ piece * 69069u;
    return x ^ x >> 15;
}

uint32_t model_claim(struct rank *r, enum prs_gemm_claims kind)
{
    return watch_count(&r->claimed[kind]) - 1;
}

uint32_t *model_arrivals(struct rank *r, uint32_t epoch, uint32_t index)
{
    return &r->flags[(epoch & 1) * r->flag_bank + index];
}

uint32_t *model_done(struct rank *r, uint32_t epoch, uint32_t slot)
{
    return &r->done[(epoch & 1) * WORLD + slot];
}

static bool reduces(const struct rank *r)
{
    return r->s.op != PRS_GEMM_ALLGATHER;
}

/* The number of one half of one tile within a block. */
static uint32_t piece_of(const struct prs_schedule *s, const struct slab *x)
{
    return prs_schedule_tile(s, &x->unit, x->cta) * HALVES + x->half;
}

/* The index in a slot of partial sums. */
static uint32_t place_of(const struct prs_schedule *s, const struct slab *x)
{
    return prs_schedule_tile_place(s, prs_schedule_tile(s, &x->unit, x->cta)) * HALVES + x->half;
}

/* ---- warps 1 and 2: store ---- */
static void store_slab(struct model *m, uint32_t rank, uint32_t epoch, const struct slab *x)
{
    struct rank *me = &m->ranks[rank];
    const struct prs_schedule *s = &me->s;
    uint32_t piece = piece_of(s, x), pieces = prs_schedule_tiles(s) * HALVES,
             tile = prs_schedule_tile(s, &x->unit, x->cta);
    uint32_t part = reduces(me) ? prs_schedule_part(s, x->unit.block) : PRS_PART_OWN;
    if (part == PRS_PART_SEND) {
        struct rank *adds = &m->ranks[s->place.node * s->place.local_ranks + x->unit.block % s->place.local_ranks];
        uint32_t slot = prs_schedule_send_slot(s, rank, x->unit.block);
        adds->staging[epoch & 1][slot * pieces + place_of(s, x)] = x->value;
        watch_raise(&adds->flags[prs_schedule_partial_flag(s, slot, tile, x->half)], epoch);
        return;
    }
    if (part == PRS_PART_RELAY) {
        me->staging[epoch & 1][prs_schedule_relay_slot(s, x->unit.block / s->place.local_ranks) * pieces +
                               place_of(s, x)] = x->value;
        far_relay_tile(m, rank, epoch, x->unit.block, tile);
        return;
    }
    me->result[x->unit.block * pieces + piece] = x->value;
    if (s->op != PRS_GEMM_ALLREDUCE)
        return;
    for (uint32_t p = 1; p < s->place.local_ranks; p++) {
        uint32_t local = (s->place.local_rank + p) % s->place.local_ranks;
        struct rank *peer = &m->ranks[s->place.node * s->place.local_ranks + local];
        peer->result[x->unit.block * pieces + piece] = x->value;
        watch_add(model_done(peer, epoch, prs_index_after(s->place.local_rank, local, s->place.local_ranks)));
    }
    if (s->place.nodes > 1)
        far_put_rows(m, rank, epoch, x->unit.pair * 2 + x->cta);
}

static bool store_epoch(struct cluster *c, uint32_t epoch)
{
    for (;; c->stored++) {
        struct slab *x = &c->slabs[c->stored % SLABS];
        bool end;
        if (!watch_wait(&c->model->watch, &x->full, 1, "slab to store", c->rank, c->stored, c->rank))
            return false;
        end = x->unit.block == WORLD;
        watch_dawdle(&c->random[1]);
        if (!end)
            store_slab(c->model, c->rank, epoch, x);
        watch_raise(&x->full, 0);
        if (!end)
            continue;
        c->stored++;
        return true;
    }
}

/* ---- warps 4 to 11: compute ---- */
static bool hand_over(struct cluster *c, const struct slab *x)
{
    struct slab *to = &c->slabs[c->filled % SLABS];
    while (watch_load(&to->full) != 0) {
        if (watch_load(&c->model->watch.failed) != 0)
            return false;
        watch_pause(&to->full, 1);
    }
    to->unit = x->unit, to->cta = x->cta, to->half = x->half, to->value = x->value;
    watch_raise(&to->full, 1);
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
    for (uint32_t i = 0; i < prs_schedule_sources(s, x->unit.block); i++) {
        struct prs_source from = prs_schedule_source(s, x->unit.block, i);
        uint32_t index = prs_schedule_partial_flag(s, from.slot, tile, x->half);
        const uint32_t *flag = &me->flags[index];
        if (from.far) {
            index = prs_schedule_group_word(s, i - (s->place.local_ranks - 1),
                                            prs_schedule_group(s, x->unit.pair * 2 + x->cta, x->unit.column).index);
            flag = &me->signals[index];
        }
        if (!watch_wait(&c->model->watch, flag, epoch, from.far ? "partial sums, signal" : "partial sums, flag",
                        c->rank, index, from.rank))
            return false;
        x->value += me->staging[epoch & 1][from.slot * pieces + place_of(s, x)];
    }
    return true;
}

/* All-gather: read every chunk of the row tile, in the order of K steps. The result is the sum of the values. */
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
        uint32_t want = s->segments != 0 ? epoch : prs_schedule_arrivals(s, tile, step / PRS_STRIP_STEPS);
        const uint32_t *flag = s->segments != 0 ? &me->flags[index] : model_arrivals(me, epoch, index);
        if (!watch_wait(&c->model->watch, flag, want, "rows of A, flag", c->rank, index, x->unit.block))
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
    const struct slab end = {.unit = {.block = WORLD}};
    uint32_t next = model_claim(me, PRS_CLAIM_UNITS);
    for (uint32_t unit; (unit = next) < s->units;) {
        struct slab x = {.full = 0};
        next = model_claim(me, PRS_CLAIM_UNITS); /* as early as ever */
        prs_schedule_unit(s, &cursor, unit, &x.unit);
        /* As in multiply_tiles(). Otherwise each of two ranks can wait for slabs that the other one still holds. */
        if (reduces(me) && prs_schedule_part(s, x.unit.block) != PRS_PART_SEND && !hand_over_all_left(c))
            return false;
        for (uint32_t i = 0; i < CTAS * HALVES; i++) {
            x.cta = i / HALVES, x.half = i % HALVES;
            x.value = model_product(epoch, c->rank, x.unit.block, piece_of(s, &x));
            watch_dawdle(&c->random[0]);
            if (reduces(me) && prs_schedule_part(s, x.unit.block) != PRS_PART_SEND && !add_partials(c, epoch, &x))
                return false;
            if (!reduces(me) && x.unit.block != c->rank && !read_rows(c, epoch, &x))
                return false;
            if (!hand_over_left(c, i))
                return false;
            c->left[i] = x;
            c->any_left[i] = true;
        }
    }
    return hand_over_all_left(c) && hand_over(c, &end);
}

/* ---- warp 3, or a copy engine ---- */
static uint32_t chunk_value(uint32_t epoch, uint32_t rank, uint32_t row, uint32_t step)
{
    return model_product(epoch, rank, row, step + 1000);
}

/* Returns the first chunk of another node that it has claimed. */
static uint32_t push_epoch(struct cluster *c, uint32_t epoch)
{
    struct rank *me = &c->model->ranks[c->rank];
    const struct prs_schedule *s = &me->s;
    uint32_t chunk_rows = s->pairs * 2 * 2, out = prs_schedule_slot(s, c->rank, c->rank);
    for (uint32_t i;;) {
        struct prs_chunk k;
        uint32_t value;
        i = model_claim(me, PRS_CLAIM_CHUNKS);
        if (i >= prs_schedule_chunks(s))
            return i;
        prs_schedule_chunk(s, i, &k);
        value = chunk_value(epoch, c->rank, k.row / PRS_PUSH_ROWS, k.step);
        watch_dawdle(&c->random[2]);
        for (uint32_t p = 1; p < s->place.local_ranks; p++) {
            uint32_t owner = s->place.node * s->place.local_ranks + (s->place.local_rank + p) % s->place.local_ranks;
            uint32_t slot = prs_schedule_slot(s, c->rank, owner);
            struct rank *to = &c->model->ranks[owner];
            to->staging[epoch & 1][(slot * chunk_rows + k.row / PRS_PUSH_ROWS) * s->k_steps + k.step] = value;
            watch_add(
                model_arrivals(to, epoch, prs_schedule_arrival(s, slot, k.row / PRS_TILE_M, k.step / PRS_STRIP_STEPS)));
        }
        if (s->place.nodes == 1)
            continue;
        me->staging[epoch & 1][(out * chunk_rows + k.row / PRS_PUSH_ROWS) * s->k_steps + k.step] = value;
        far_relay_chunk(c->model, c->rank, epoch, &k);
    }
}

static bool copy_epoch(struct cluster *c, uint32_t epoch)
{
    struct rank *me = &c->model->ranks[c->rank];
    const struct prs_schedule *s = &me->s;
    uint32_t chunk_rows = s->pairs * 2 * 2, steps = prs_schedule_segment_steps(s);
    for (uint32_t slot = 0; slot < WORLD - 1; slot++)
        if (!watch_wait(&c->model->watch, &me->done[slot], epoch - 1, "credit of slot", c->rank, slot,
                        (c->rank + 1 + slot) % WORLD))
            return false;
    for (uint32_t at = 0; at < prs_schedule_copies(s); at++) {
        struct prs_copy piece;
        uint32_t owner, slot, first, end;
        prs_schedule_copy(s, at, &piece);
        owner = (c->rank + piece.distance) % WORLD, slot = prs_schedule_slot(s, c->rank, owner);
        first = piece.segment * steps, end = first + steps < s->k_steps ? first + steps : s->k_steps;
        for (uint32_t row = piece.band * s->band * 4;
             row < (piece.band + 1) * s->band * 4 && row < prs_ceil_div(s->block_rows, 64); row++)
            for (uint32_t step = first; step < end; step++)
                c->model->ranks[owner].staging[0][(slot * chunk_rows + row) * s->k_steps + step] =
                    chunk_value(epoch, c->rank, row, step);
        watch_dawdle(&c->random[2]);
        watch_raise(&c->model->ranks[owner].flags[prs_schedule_segment_flag(s, slot, piece.band, piece.segment)],
                    epoch);
    }
    return true;
}

/* ---- one launch after the other ---- */
static uint32_t expected(const struct rank *r, uint32_t rank, uint32_t epoch, uint32_t block, uint32_t piece)
{
    uint32_t sum = 0, tile = piece / HALVES, row_tile = tile / r->s.columns;
    if (r->s.op == PRS_GEMM_ALLGATHER && block == rank)
        return model_product(epoch, rank, block, piece);
    if (r->s.op == PRS_GEMM_ALLGATHER) {
        for (uint32_t step = 0; step < r->s.k_steps; step++)
            for (uint32_t i = 0; i < 2; i++)
                if (row_tile * PRS_TILE_M + i * PRS_PUSH_ROWS < r->s.block_rows)
                    sum += chunk_value(epoch, block, row_tile * 2 + i, step);
        return sum;
    }
    for (uint32_t sender = 0; sender < WORLD; sender++)
        sum += model_product(epoch, sender, block, piece);
    return sum;
}

static void check_epoch(struct model *m, uint32_t rank, uint32_t epoch)
{
    struct rank *r = &m->ranks[rank];
    uint32_t pieces = prs_schedule_tiles(&r->s) * HALVES;
    for (uint32_t block = 0; block < WORLD; block++) {
        if (r->s.op == PRS_GEMM_REDUCE_SCATTER && block != rank)
            continue;
        for (uint32_t piece = 0; piece < pieces; piece++) {
            uint32_t want = expected(r, rank, epoch, block, piece), have = r->result[block * pieces + piece];
            if (r->s.place.nodes > 1 && prs_schedule_tile_rows(&r->s, piece / HALVES / r->s.columns) == 0)
                continue; /* rows that do not exist are not put */
            if (want != have)
                watch_fail(&m->watch, "result, piece", rank, piece, block, want, have);
        }
    }
}

/* What launch_end() does. */
static void restart_counters(struct rank *r, uint32_t epoch)
{
    for (uint32_t kind = 0; kind < PRS_CLAIMS; kind++)
        watch_raise(&r->claimed[kind], 0);
    for (uint32_t i = 0; r->s.op == PRS_GEMM_ALLGATHER && r->s.segments == 0 && i < r->flag_bank; i++)
        watch_raise(model_arrivals(r, epoch, i), 0);
    for (uint32_t slot = 0; r->s.op == PRS_GEMM_ALLREDUCE && slot < WORLD; slot++)
        watch_raise(model_done(r, epoch, slot), 0);
}

/* Makes the schedule of an epoch, with a number of rows that is the same on all ranks. */
static void choose_rows(const struct model *m, struct rank *r, uint32_t epoch)
{
    uint32_t most = m->run.m / WORLD;
    r->s = r->most;
    if (m->run.any_rows)
        prs_schedule_rows(&r->s, WORLD * (1 + model_product(epoch, 1, 2, 3) % most), false);
}

/* The last thread to leave checks the result, as a kernel that reads it would, and opens the next epoch. */
static void leave(struct cluster *c, uint32_t epoch)
{
    struct rank *r = &c->model->ranks[c->rank];
    if (watch_count(&c->exits) == (epoch - FIRST_EPOCH) * ROLES)
        watch_add(&r->finished);
    if (watch_count(&r->exits) != (epoch - FIRST_EPOCH) * CLUSTERS * ROLES)
        return;
    if (r->s.place.nodes > 1 && !nic_quiet(&r->nic))
        return;
    check_epoch(c->model, c->rank, epoch);
    /* Between launches the caller may write the result. */
    memset(r->result, 0xee, (size_t)WORLD * prs_schedule_tiles(&r->most) * HALVES * sizeof(uint32_t));
    restart_counters(r, epoch);
    choose_rows(c->model, r, epoch + 1);
    if (r->s.segments != 0)
        for (uint32_t p = 1; p < WORLD; p++)
            watch_raise(
                &c->model->ranks[(c->rank + p) % WORLD].done[prs_schedule_slot(&r->s, c->rank, (c->rank + p) % WORLD)],
                epoch);
    watch_raise(&r->epoch, epoch);
}

/* Waits until the epoch may begin, and until there is room for this cluster; false: the rank stops before this epoch,
 * or another thread failed. */
static bool enter(struct cluster *c, uint32_t epoch)
{
    struct model *m = c->model;
    struct rank *me = &m->ranks[c->rank];
    const struct prs_place *at = &me->most.place; /* me->s changes until the epoch has begun */
    if (at->node == at->nodes - 1 && watch_leaves(&m->watch, epoch - FIRST_EPOCH))
        return false;
    if (!watch_wait(&m->watch, &me->epoch, epoch - 1, "epoch", c->rank, 0, c->rank))
        return false;
    return m->run.resident == 0 ||
           watch_wait(&m->watch, &me->finished, (epoch - 1 - FIRST_EPOCH) * CLUSTERS + c->index + 1 - m->run.resident,
                      "room", c->rank, c->index, c->rank);
}

static void *compute_thread(void *arg)
{
    struct cluster *c = arg;
    for (uint32_t i = 1; i <= c->model->epochs; i++) {
        if (!enter(c, FIRST_EPOCH + i) || !compute_epoch(c, FIRST_EPOCH + i))
            return NULL;
        leave(c, FIRST_EPOCH + i);
    }
    return NULL;
}

static void *store_thread(void *arg)
{
    struct cluster *c = arg;
    for (uint32_t i = 1; i <= c->model->epochs; i++) {
        if (!enter(c, FIRST_EPOCH + i) || !store_epoch(c, FIRST_EPOCH + i))
            return NULL;
        leave(c, FIRST_EPOCH + i);
    }
    return NULL;
}

static bool await_broadcasts(struct cluster *c, uint32_t epoch)
{
    struct rank *me = &c->model->ranks[c->rank];
    const struct prs_schedule *s = &me->s;
    for (uint32_t slot = 0; slot < s->place.local_ranks - 1; slot++)
        if (!watch_wait(&c->model->watch, model_done(me, epoch, slot), prs_schedule_broadcasts(s), "broadcast of slot",
                        c->rank, slot,
                        s->place.node * s->place.local_ranks + (s->place.local_rank + 1 + slot) % s->place.local_ranks))
            return false;
    return true;
}

static bool spread_epoch(struct cluster *c, uint32_t epoch)
{
    const struct prs_schedule *s = &c->model->ranks[c->rank].s;
    if (s->segments != 0)
        return c->index != 0 || copy_epoch(c, epoch);
    if (s->op == PRS_GEMM_ALLGATHER) {
        uint32_t next = push_epoch(c, epoch);
        return s->place.nodes == 1 || far_forward_chunks(c, epoch, next);
    }
    if (s->op != PRS_GEMM_ALLREDUCE)
        return true;
    if (s->place.nodes > 1 && !far_forward_rows(c, epoch))
        return false;
    return c->index != 0 || await_broadcasts(c, epoch);
}

static void *spread_thread(void *arg)
{
    struct cluster *c = arg;
    for (uint32_t i = 1; i <= c->model->epochs; i++) {
        if (!enter(c, FIRST_EPOCH + i) || !spread_epoch(c, FIRST_EPOCH + i))
            return NULL;
        leave(c, FIRST_EPOCH + i);
    }
    return NULL;
}

/* ---- setting up ---- */
/* Signals have the values that they have after FIRST_EPOCH launches. */
static void init_far(struct rank *r)
{
    const struct prs_schedule *s = &r->s;
    uint32_t words = prs_schedule_row_word(s, 0, s->pairs * 2), counters = prs_schedule_row_counter(s, s->pairs * 2);
    r->signals = calloc(words + 1, sizeof(uint32_t));
    r->counter = calloc(counters, sizeof(uint32_t));
    for (uint32_t i = 0; i < words; i++)
        r->signals[i] = FIRST_EPOCH;
}

static void init_rank(struct rank *r, uint32_t rank, const struct prs_schedule *shape)
{
    uint32_t pieces, cells, tiles, slots;
    r->s = *shape;
    r->s.place.rank = rank;
    r->s.place.node = rank / r->s.place.local_ranks;
    r->s.place.local_rank = rank % r->s.place.local_ranks;
    tiles = prs_schedule_tiles(&r->s), pieces = tiles * HALVES;
    slots = prs_schedule_slots(&r->s) > WORLD ? prs_schedule_slots(&r->s) : WORLD;
    cells = slots * (pieces + r->s.pairs * 4 * r->s.k_steps);
    for (uint32_t bank = 0; bank < 2; bank++)
        r->staging[bank] = calloc(cells, sizeof(uint32_t));
    r->result = calloc(WORLD * pieces, sizeof(uint32_t));
    r->flag_bank = prs_schedule_arrival(&r->s, WORLD, 0, 0);
    r->flags = calloc(cells + 2 * r->flag_bank, sizeof(uint32_t));
    r->done = calloc(2 * WORLD, sizeof(uint32_t));
    r->epoch = FIRST_EPOCH;
    /* Flags have the values that they have after FIRST_EPOCH launches; counters are zero. */
    for (uint32_t i = 0; r->s.segments != 0 && i < WORLD; i++)
        r->done[i] = FIRST_EPOCH;
    for (uint32_t i = 0; (r->s.op != PRS_GEMM_ALLGATHER || r->s.segments != 0) && i < cells; i++)
        r->flags[i] = FIRST_EPOCH;
    init_far(r);
}

static void fini_rank(struct rank *r)
{
    free(r->signals);
    free(r->counter);
    free(r->staging[0]);
    free(r->staging[1]);
    free(r->result);
    free(r->flags);
    free(r->done);
}

static void start_rank(struct model *m, uint32_t rank, uint32_t seed, pthread_t (*threads)[ROLES])
{
    static void *(*const roles[ROLES])(void *) = {compute_thread, store_thread, spread_thread};
    for (uint32_t i = 0; i < CLUSTERS; i++) {
        struct cluster *c = &m->clusters[rank][i];
        c->model = m, c->rank = rank, c->index = i;
        for (uint32_t role = 0; role < ROLES; role++) {
            c->random[role] = seed * (role + 1) + rank * 100 + i;
            cr_assert_eq(pthread_create(&threads[i][role], NULL, roles[role], c), 0);
        }
    }
}

struct model *model_run(const struct model_run *run)
{
    struct model *m = calloc(1, sizeof(*m));
    pthread_t threads[WORLD][CLUSTERS][ROLES];
    struct prs_schedule shape;
    uint32_t seed = (uint32_t)time(NULL);
    prs_schedule_init(&shape, run->op, 0, WORLD, run->nodes, run->m, prs_ceil_div(run->n, PRS_TILE_N),
                      prs_ceil_div(run->k, PRS_STAGE_ROW / 2), run->band);
    shape.segments = run->segments;
    shape.group = run->group != 0 ? run->group : 1;
    m->epochs = run->epochs;
    watch_init(&m->watch, WORLD * CLUSTERS * ROLES, WORLD / run->nodes * CLUSTERS * ROLES, run->lost_after);
    printf("seed %u\n", seed);
    m->run = *run;
    for (uint32_t r = 0; r < WORLD; r++) {
        init_rank(&m->ranks[r], r, &shape);
        m->ranks[r].most = m->ranks[r].s;
        choose_rows(m, &m->ranks[r], FIRST_EPOCH + 1);
    }
    for (uint32_t r = 0; r < WORLD; r++) {
        nic_open(&m->ranks[r].nic, &m->watch, seed + r);
        start_rank(m, r, seed, threads[r]);
    }
    for (uint32_t r = 0; r < WORLD; r++)
        for (uint32_t i = 0; i < CLUSTERS * ROLES; i++)
            pthread_join(threads[r][i / ROLES][i % ROLES], NULL);
    for (uint32_t r = 0; r < WORLD; r++)
        nic_close(&m->ranks[r].nic);
    return m;
}

void model_close(struct model *m)
{
    for (uint32_t r = 0; r < WORLD; r++)
        fini_rank(&m->ranks[r]);
    free(m);
}

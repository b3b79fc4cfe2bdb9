/* SPDX-License-Identifier: Apache-2.0 */
/* The protocol of MoE dispatch on threads, as test_protocol.c does for the others: fused/route.h with one word in place
 * of each row. Data are plain memory, flags are atomics with the orders the kernels use, so that ThreadSanitizer sees a
 * wait that is missing or too weak. Every CTA is three threads (push, place, and load with multiply), which together
 * also run the rank's two kernels one after the other; ranks run free, with random delays, from shortly before the
 * epoch wraps. Choices are anew in every epoch: even, all to one expert, half of the experts empty, ranks without
 * tokens. */
#include "fused/route.h"

#include <criterion/criterion.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { WORLD = 4, CTAS = 2, THREADS = 3, LOCAL = 3, EXPERTS = WORLD * LOCAL, CHOICES = 3, TOKENS = 50, COLUMNS = 2 };
enum { BLOCKS = TOKENS * WORLD * CHOICES / PRS_TILE_M + LOCAL + 1, ROWS = BLOCKS * PRS_TILE_M };
enum { FIRST_EPOCH = 0xfffffff0, WAIT_SECONDS = 60 };

#ifdef __SANITIZE_THREAD__
enum { EPOCHS = 1500 };
#else
enum { EPOCHS = 2500 };
#endif

struct rank {
    struct prs_route r;
    /* plain */
    int64_t chosen[TOKENS][CHOICES];
    uint32_t tokens[TOKENS], count;
    uint32_t chunks[CTAS][EXPERTS][2]; /* choices, leads */
    uint32_t sent[WORLD][TOKENS], sent_count[WORLD];
    uint8_t *inbox;
    uint32_t staging[(WORLD - 1) * TOKENS];
    struct prs_route_item *items[WORLD * TOKENS]; /* each of prs_route_item_bytes() */
    struct prs_route_expert experts[LOCAL];
    struct prs_route_row map[ROWS];
    uint32_t blocks, item_count, rows[ROWS], out[ROWS][COLUMNS];
    bool refused;
    uint32_t refusals;
    /* atomic */
    uint32_t inbox_flags[WORLD], staging_flags[(WORLD - 1) * TOKENS], ready[BLOCKS];
    uint32_t met, routed, exits, epoch, next;
};

struct cta {
    struct model *model;
    uint32_t rank, index, role;
    uint32_t random;
};

struct model {
    struct rank ranks[WORLD];
    struct cta ctas[WORLD][CTAS][THREADS];
    uint32_t failed; /* atomic: somebody gave up or found a wrong value */
    char text[200];
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

static bool wait_for(struct cta *c, const uint32_t *flag, uint32_t want, bool exact, const char *what, uint32_t index)
{
    time_t give_up = time(NULL) + WAIT_SECONDS;
    for (uint32_t spins = 1;; spins++) {
        uint32_t seen = load(flag);
        if (exact ? seen == want : prs_flag_reached(seen, want))
            return true;
        if (load(&c->model->failed) != 0)
            return false;
        if (spins % 1024 == 0 && time(NULL) > give_up) {
            fail(c->model, what, c->rank, index, want, seen);
            return false;
        }
        sched_yield();
    }
}

static void dawdle(uint32_t *random)
{
    *random = *random * 1664525u + 1013904223u;
    if (*random >> 25 == 0)
        usleep(*random >> 8 & 127);
}

static uint32_t mix(uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t x = a * 2654435761u ^ b * 40503u ^ c * 69069u;
    x ^= x >> 15, x *= 2246822519u, x ^= x >> 13;
    return x;
}

/* ---- what every rank can recompute of every other ------------------------------------------------------------------
 */
static uint32_t count_of(uint32_t epoch, uint32_t rank)
{
    uint32_t x = mix(epoch, rank, 1);
    return x % 5 == 0 ? 0 : x % 5 == 1 ? TOKENS : x / 8 % (TOKENS + 1);
}

static int64_t choice_of(uint32_t epoch, uint32_t rank, uint32_t token, uint32_t slot)
{
    uint32_t x = mix(epoch, rank * 1000 + token, slot + 2) / 4;
    switch (mix(epoch, 5, 5) % 5) {
    case 0:
        return mix(epoch, 6, 6) % EXPERTS; /* all choices of all tokens: the same expert, more than once a token */
    case 1:
        return x % (EXPERTS / 2) * 2;
    case 2:
        return x % 3 == 0 ? -1 : (int64_t)(x / 3 % EXPERTS);
    case 3:
        return slot == 0 ? 0 : x % EXPERTS;
    default:
        return x % EXPERTS;
    }
}

static uint32_t value_of(uint32_t epoch, uint32_t rank, uint32_t token)
{
    return mix(epoch, rank * 1000 + token, 99);
}

static uint32_t product_of(uint32_t row, uint32_t expert, uint32_t column)
{
    return row ^ mix(expert, column, 3);
}

static uint32_t weight_bits(uint32_t token, uint32_t slot)
{
    return token * 64 + slot;
}

/* ---- the routing kernel ---------------------------------------------------------------------------------------------
 */
static void make_input(struct rank *me, uint32_t epoch)
{
    me->count = count_of(epoch, me->r.rank);
    for (uint32_t t = 0; t < me->count; t++) {
        me->tokens[t] = value_of(epoch, me->r.rank, t);
        for (uint32_t j = 0; j < CHOICES; j++)
            me->chosen[t][j] = choice_of(epoch, me->r.rank, t, j);
    }
}

static void chunk_of(const struct rank *me, uint32_t count, uint32_t cta, uint32_t *from, uint32_t *to)
{
    uint32_t each = prs_route_chunk_tokens(&me->r, count);
    *from = cta * each < count ? cta * each : count;
    *to = *from + each < count ? *from + each : count;
}

static void count_choices(struct rank *me, uint32_t count, uint32_t cta, uint16_t (*index)[CHOICES],
                          uint16_t (*lead)[CHOICES])
{
    uint32_t from, to;
    chunk_of(me, count, cta, &from, &to);
    memset(me->chunks[cta], 0, sizeof(me->chunks[cta]));
    for (uint32_t t = from; t < to; t++)
        for (uint32_t j = 0; j < CHOICES; j++) {
            uint32_t code = prs_route_code(&me->r, me->chosen[t], j), e = code & PRS_ROUTE_NONE;
            if (code == PRS_ROUTE_NONE)
                continue;
            index[t][j] = (uint16_t)me->chunks[cta][e][0]++;
            if (code & PRS_ROUTE_LEAD)
                lead[t][j] = (uint16_t)me->chunks[cta][e][1]++;
        }
}

static void send_record(struct model *m, struct rank *me, uint32_t bank, uint32_t token, uint32_t slot, uint32_t place,
                        const uint32_t *first_index, uint16_t (*index)[CHOICES])
{
    const struct prs_route *r = &me->r;
    uint32_t expert = (uint32_t)me->chosen[token][slot], p = (expert / LOCAL + WORLD - r->rank) % WORLD;
    struct rank *to = &m->ranks[(r->rank + p) % WORLD];
    struct prs_route_head *head =
        (struct prs_route_head *)(to->inbox + prs_route_record_at(r, bank, prs_route_mirror(r, p), place));
    struct prs_route_use *use = (struct prs_route_use *)(head + 1);
    uint32_t uses = 0;
    for (uint32_t j = prs_route_next_use(r, me->chosen[token], slot, CHOICES); j < CHOICES;
         j = prs_route_next_use(r, me->chosen[token], slot, j)) {
        uint32_t e = (uint32_t)me->chosen[token][j], bits = weight_bits(token, j);
        struct prs_route_use u = {e % LOCAL, j, first_index[e] + index[token][j], 0};
        memcpy(&u.weight, &bits, sizeof(bits));
        use[uses++] = u;
    }
    head->token = token, head->uses = uses;
    me->sent[p][place] = token;
}

static void send_all(struct model *m, struct rank *me, uint32_t count, uint32_t bank, uint32_t cta,
                     uint16_t (*index)[CHOICES], uint16_t (*lead)[CHOICES])
{
    const struct prs_route *r = &me->r;
    uint32_t first_index[EXPERTS], first_lead[EXPERTS], from, to;
    for (uint32_t owner = 0; owner < WORLD; owner++) {
        uint32_t p = (owner + WORLD - r->rank) % WORLD, leads = 0;
        uint32_t *counts = (uint32_t *)(m->ranks[owner].inbox + prs_route_counts_at(r, bank, prs_route_mirror(r, p)));
        for (uint32_t e = owner * LOCAL; e < (owner + 1) * LOCAL; e++) {
            uint32_t all[2] = {0, 0};
            for (uint32_t c = 0; c < CTAS; c++) {
                if (c == cta)
                    first_index[e] = all[0], first_lead[e] = leads + all[1];
                all[0] += me->chunks[c][e][0], all[1] += me->chunks[c][e][1];
            }
            leads += all[1];
            if (cta == 0)
                counts[e % LOCAL * 2] = all[0], counts[e % LOCAL * 2 + 1] = all[1];
        }
        if (cta == 0)
            me->sent_count[p] = leads;
    }
    chunk_of(me, count, cta, &from, &to);
    for (uint32_t t = from; t < to; t++)
        for (uint32_t j = 0; j < CHOICES; j++) {
            uint32_t code = prs_route_code(r, me->chosen[t], j);
            if (code != PRS_ROUTE_NONE && (code & PRS_ROUTE_LEAD) != 0)
                send_record(m, me, bank, t, j, first_lead[code & PRS_ROUTE_NONE] + lead[t][j], first_index, index);
        }
}

struct tables {
    uint32_t row_base[WORLD][LOCAL], lead_base[WORLD][LOCAL], lead_first[WORLD][LOCAL], sent[WORLD];
    uint32_t rows[LOCAL], first_block[LOCAL], first_item[LOCAL], blocks, items;
};

static void receive_counts(const struct rank *me, uint32_t bank, struct tables *t)
{
    memset(t, 0, sizeof(*t));
    for (uint32_t e = 0; e < LOCAL; e++) {
        t->first_block[e] = t->blocks, t->first_item[e] = t->items;
        for (uint32_t p = 0; p < WORLD; p++) {
            const uint32_t *counts = (const uint32_t *)(me->inbox + prs_route_counts_at(&me->r, bank, p));
            t->row_base[p][e] = t->rows[e];
            t->lead_base[p][e] = t->items - t->first_item[e];
            t->lead_first[p][e] = t->sent[p];
            t->rows[e] += counts[e * 2];
            t->items += counts[e * 2 + 1];
            t->sent[p] += counts[e * 2 + 1];
        }
        t->blocks += prs_ceil_div(t->rows[e], PRS_TILE_M);
    }
}

static void receive_record(struct rank *me, uint32_t bank, const struct tables *t, uint32_t p, uint32_t i)
{
    const struct prs_route_head *head =
        (const struct prs_route_head *)(me->inbox + prs_route_record_at(&me->r, bank, p, i));
    const struct prs_route_use *use = (const struct prs_route_use *)(head + 1);
    uint32_t lead = use[0].expert;
    struct prs_route_item *item = me->items[t->first_item[lead] + t->lead_base[p][lead] + i - t->lead_first[p][lead]];
    item->peer = p, item->at = p == 0 ? head->token : i, item->uses = head->uses;
    for (uint32_t u = 0; u < head->uses; u++) {
        uint32_t e = use[u].expert, row = t->first_block[e] * PRS_TILE_M + t->row_base[p][e] + use[u].index;
        struct prs_route_row x = {(me->r.rank + p) % WORLD, head->token, use[u].slot, use[u].weight};
        item->row[u] = row;
        me->map[row] = x;
    }
}

static bool route(struct cta *c, uint32_t epoch)
{
    struct model *m = c->model;
    struct rank *me = &m->ranks[c->rank];
    uint16_t index[TOKENS][CHOICES], lead[TOKENS][CHOICES];
    uint32_t bank = epoch & 1, step = (epoch - 1) * 2 * CTAS;
    struct tables t;
    count_choices(me, me->count, c->index, index, lead);
    __atomic_fetch_add(&me->met, 1, __ATOMIC_ACQ_REL);
    if (!wait_for(c, &me->met, step + CTAS, false, "routing CTAs", c->index))
        return false;
    dawdle(&c->random);
    send_all(m, me, me->count, bank, c->index, index, lead);
    dawdle(&c->random);
    if (__atomic_add_fetch(&me->met, 1, __ATOMIC_ACQ_REL) == step + 2 * CTAS)
        for (uint32_t p = 0; p < WORLD; p++)
            raise_to(&m->ranks[(c->rank + p) % WORLD].inbox_flags[prs_route_mirror(&me->r, p)], epoch);
    for (uint32_t p = 0; p < WORLD; p++)
        if (!wait_for(c, &me->inbox_flags[p], epoch, false, "counts of the peer at distance", p))
            return false;
    receive_counts(me, bank, &t);
    if (c->index == 0) {
        me->refused = t.blocks > me->r.blocks;
        me->blocks = me->refused ? 0 : t.blocks;
        me->item_count = me->refused ? 0 : t.items;
        for (uint32_t e = 0; e < LOCAL; e++)
            me->experts[e].first_row = t.first_block[e] * PRS_TILE_M, me->experts[e].rows = t.rows[e];
        for (uint32_t b = 0; b < me->blocks; b++)
            __atomic_store_n(&me->ready[b], 0, __ATOMIC_RELAXED);
    }
    for (uint32_t p = 0; p < WORLD && t.blocks <= me->r.blocks; p++)
        for (uint32_t i = c->index; i < t.sent[p]; i += CTAS)
            receive_record(me, bank, &t, p, i);
    return true;
}

/* ---- the product's kernel -------------------------------------------------------------------------------------------
 */
static void push(struct cta *c, uint32_t epoch)
{
    struct rank *me = &c->model->ranks[c->rank];
    for (uint32_t i = c->index; i < TOKENS * (WORLD - 1); i += CTAS) {
        uint32_t p = 1 + i % (WORLD - 1), row = i / (WORLD - 1), at;
        struct rank *to = &c->model->ranks[(c->rank + p) % WORLD];
        if (row >= me->sent_count[p])
            continue;
        at = prs_route_row_flag(&me->r, prs_route_mirror(&me->r, p), row);
        dawdle(&c->random);
        to->staging[at] = me->tokens[me->sent[p][row]];
        raise_to(&to->staging_flags[at], epoch);
    }
}

static bool place(struct cta *c, uint32_t epoch)
{
    struct rank *me = &c->model->ranks[c->rank];
    for (uint32_t i = c->index; i < me->item_count; i += CTAS) {
        const struct prs_route_item *item = me->items[i];
        uint32_t value;
        if (item->peer == 0) {
            value = me->tokens[item->at];
        } else {
            uint32_t at = prs_route_row_flag(&me->r, item->peer, item->at);
            if (!wait_for(c, &me->staging_flags[at], epoch, true, "a token's row", at))
                return false;
            value = me->staging[at];
        }
        dawdle(&c->random);
        for (uint32_t u = 0; u < item->uses; u++)
            me->rows[item->row[u]] = value;
        for (uint32_t u = 0; u < item->uses; u++)
            __atomic_fetch_add(&me->ready[item->row[u] / PRS_TILE_M], 1, __ATOMIC_RELEASE);
    }
    return true;
}

static bool multiply(struct cta *c)
{
    struct rank *me = &c->model->ranks[c->rank];
    struct prs_route_cursor cursor = {0};
    for (;;) { /* units as they come */
        struct prs_route_unit u;
        uint32_t unit = __atomic_fetch_add(&me->next, 1, __ATOMIC_RELAXED);
        if (unit >= me->blocks * COLUMNS)
            return true;
        prs_route_unit(&me->r, me->experts, &cursor, unit, &u);
        if (!wait_for(c, &me->ready[u.block], u.rows, false, "block", u.block))
            return false;
        for (uint32_t i = u.block * PRS_TILE_M; i < u.block * PRS_TILE_M + u.rows; i++)
            me->out[i][u.column] = product_of(me->rows[i], me->r.rank * LOCAL + u.expert, u.column);
    }
}

/* ---- checks, by definition and not by tables ------------------------------------------------------------------------
 */
static void check_epoch(struct model *m, uint32_t rank, uint32_t epoch)
{
    struct rank *me = &m->ranks[rank];
    uint32_t row = 0;
    for (uint32_t e = 0; e < LOCAL && !me->refused; e++) {
        uint32_t first = row = prs_ceil_div(row, PRS_TILE_M) * PRS_TILE_M;
        for (uint32_t p = 0; p < WORLD; p++) {
            uint32_t from = (rank + p) % WORLD;
            for (uint32_t t = 0; t < count_of(epoch, from); t++)
                for (uint32_t j = 0; j < CHOICES; j++) {
                    uint32_t bits = weight_bits(t, j);
                    struct prs_route_row want = {from, t, j, 0};
                    if (choice_of(epoch, from, t, j) != (int64_t)(rank * LOCAL + e))
                        continue;
                    memcpy(&want.weight, &bits, sizeof(bits));
                    if (memcmp(&want, &me->map[row], sizeof(want)) != 0)
                        fail(m, "map of row", rank, row, t, me->map[row].token);
                    for (uint32_t c = 0; c < COLUMNS; c++) {
                        uint32_t product = product_of(value_of(epoch, from, t), rank * LOCAL + e, c);
                        if (me->out[row][c] != product)
                            fail(m, "result of row", rank, row, product, me->out[row][c]);
                    }
                    row++;
                }
        }
        if (me->experts[e].rows != row - first || (row != first && me->experts[e].first_row != first))
            fail(m, "rows of expert", rank, e, row - first, me->experts[e].rows);
    }
    me->refusals += me->refused;
    memset(me->out, 0xff, sizeof(me->out));
    memset(me->rows, 0xff, sizeof(me->rows));
}

/* The last thread of a kernel lets the next one begin. */
static bool end_routing(struct cta *c, uint32_t epoch)
{
    struct rank *me = &c->model->ranks[c->rank];
    uint32_t want = (epoch - (uint32_t)FIRST_EPOCH) * CTAS;
    if (c->role == 0)
        __atomic_fetch_add(&me->routed, 1, __ATOMIC_ACQ_REL);
    return wait_for(c, &me->routed, want, false, "end of routing", c->index);
}

static void end_launch(struct cta *c, uint32_t epoch)
{
    struct rank *me = &c->model->ranks[c->rank];
    if (__atomic_add_fetch(&me->exits, 1, __ATOMIC_ACQ_REL) != (epoch - (uint32_t)FIRST_EPOCH) * CTAS * THREADS)
        return;
    check_epoch(c->model, c->rank, epoch);
    make_input(me, epoch + 1);
    __atomic_store_n(&me->next, 0, __ATOMIC_RELAXED);
    raise_to(&me->epoch, epoch);
}

static void *run_thread(void *arg)
{
    struct cta *c = arg;
    struct rank *me = &c->model->ranks[c->rank];
    for (uint32_t i = 1; i <= EPOCHS; i++) {
        uint32_t epoch = FIRST_EPOCH + i;
        bool good = wait_for(c, &me->epoch, epoch - 1, false, "epoch", 0);
        if (good && c->role == 0)
            good = route(c, epoch);
        good = good && end_routing(c, epoch);
        if (good && c->role == 0)
            good = multiply(c);
        if (good && c->role == 1)
            good = place(c, epoch);
        if (good && c->role == 2)
            push(c, epoch);
        if (!good)
            return NULL;
        end_launch(c, epoch);
    }
    return NULL;
}

static void init_rank(struct rank *me, uint32_t rank, uint32_t blocks)
{
    struct prs_route r = {rank, WORLD, EXPERTS, LOCAL, CHOICES, TOKENS, blocks, COLUMNS,
                          16,   CTAS,  0,       1,     rank,    WORLD,  8};
    me->r = r;
    me->inbox = calloc(1, prs_route_counts_at(&r, 2, 0));
    for (uint32_t i = 0; i < WORLD * TOKENS; i++)
        me->items[i] = calloc(1, prs_route_item_bytes(&r));
    /* As they would stand after FIRST_EPOCH launches. */
    for (uint32_t p = 0; p < WORLD; p++)
        me->inbox_flags[p] = FIRST_EPOCH;
    me->met = (uint32_t)FIRST_EPOCH * 2 * CTAS;
    me->epoch = FIRST_EPOCH;
    make_input(me, (uint32_t)FIRST_EPOCH + 1);
}

static struct model *run(uint32_t blocks_of_last)
{
    struct model *m = calloc(1, sizeof(*m));
    pthread_t threads[WORLD][CTAS][THREADS];
    uint32_t seed = (uint32_t)time(NULL);
    for (uint32_t r = 0; r < WORLD; r++)
        init_rank(&m->ranks[r], r, r == WORLD - 1 ? blocks_of_last : BLOCKS);
    for (uint32_t r = 0; r < WORLD; r++)
        for (uint32_t i = 0; i < CTAS; i++)
            for (uint32_t t = 0; t < THREADS; t++) {
                struct cta *c = &m->ctas[r][i][t];
                c->model = m, c->rank = r, c->index = i, c->role = t, c->random = seed + r * 100 + i * 10 + t;
                cr_assert_eq(pthread_create(&threads[r][i][t], NULL, run_thread, c), 0);
            }
    for (uint32_t r = 0; r < WORLD; r++)
        for (uint32_t i = 0; i < CTAS; i++)
            for (uint32_t t = 0; t < THREADS; t++)
                pthread_join(threads[r][i][t], NULL);
    cr_assert_eq(load(&m->failed), 0, "seed %u: %s", seed, m->text);
    for (uint32_t r = 0; r < WORLD; r++)
        cr_assert_eq(m->ranks[r].epoch, (uint32_t)FIRST_EPOCH + EPOCHS, "rank %u stopped at epoch %u", r,
                     m->ranks[r].epoch);
    return m;
}

static void fini(struct model *m)
{
    for (uint32_t r = 0; r < WORLD; r++) {
        free(m->ranks[r].inbox);
        for (uint32_t i = 0; i < WORLD * TOKENS; i++)
            free(m->ranks[r].items[i]);
    }
    free(m);
}

Test(moe, every_row_of_every_epoch_is_in_its_expert_once_and_multiplied, .timeout = 600)
{
    struct model *m = run(BLOCKS);
    for (uint32_t r = 0; r < WORLD; r++)
        cr_assert_eq(m->ranks[r].refusals, 0);
    fini(m);
}

/* A refusal must not leave the others waiting, nor the epochs after it wrong. */
Test(moe, a_rank_without_room_does_not_hold_up_the_others, .timeout = 600)
{
    struct model *m = run(LOCAL);
    cr_assert_gt(m->ranks[WORLD - 1].refusals, 0, "this test must see refusals");
    cr_assert_eq(m->ranks[0].refusals, 0);
    fini(m);
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Ring attention's protocol on threads: the schedule, counters and credits of fused/attention_schedule.h, with one word
 * in place of each message, and of each part of a task. Data are plain memory, flags are atomics with the orders the
 * kernel uses, so that ThreadSanitizer sees a wait that is missing or too weak. Each CTA is a thread that reads what
 * its tasks load and a thread that sends; ranks run free, with random delays, through many epochs that begin shortly
 * before the epoch wraps.
 */
#include "fused/attention_deal.h"

#include <criterion/criterion.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { MAX_WORLD = 4, CTAS = 2, IN_FLIGHT = 2, FIRST_EPOCH = 0xfffffff0, WAIT_SECONDS = 60 };

#ifdef __SANITIZE_THREAD__
enum { EPOCHS = 2000 };
#else
enum { EPOCHS = 4000 };
#endif

struct rank {
    struct prs_attention_schedule s;
    struct prs_attention_deal deal;
    uint32_t *left;                          /* plain: what each part leaves */
    uint32_t *parts_done;                    /* atomic */
    uint32_t *staging;                       /* plain: [stage][message of the segment] */
    uint32_t *arrivals, *credits, *finished; /* atomic */
    uint32_t epoch, exits;                   /* atomic: as in prs_plan_words */
};

struct model {
    struct rank ranks[MAX_WORLD];
    uint32_t failed; /* atomic: somebody gave up or read a wrong value */
    char text[160];
};

struct cta {
    struct model *model;
    uint32_t rank, index;
    uint32_t random[2];
};

static uint32_t load(const uint32_t *p)
{
    return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}

static void fail(struct model *m, const char *what, uint32_t rank, uint32_t index, uint32_t want, uint32_t seen)
{
    uint32_t none = 0;
    if (!__atomic_compare_exchange_n(&m->failed, &none, 1, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
        return;
    snprintf(m->text, sizeof(m->text), "rank %u: %s %u: want %u, have %u", rank, what, index, want, seen);
    __atomic_store_n(&m->failed, 2, __ATOMIC_RELEASE);
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

static uint32_t chunks_of(const struct prs_attention_schedule *s)
{
    return prs_ceil_div(s->segment_rows, s->chunk_rows);
}

static uint32_t value_of(uint32_t epoch, uint32_t source, uint32_t pair, uint32_t kind, uint32_t segment,
                         uint32_t chunk)
{
    uint32_t x =
        epoch * 2654435761u ^ source * 40503u ^ pair * 9973u ^ (kind * 2 + segment) * 69069u ^ chunk * 1812433253u;
    return x ^ x >> 15;
}

/* ---- warp 1: send --------------------------------------------------------------------------------------------------
 */
struct queue {
    uint32_t length;
    uint32_t *counter[IN_FLIGHT];
};

static void count_oldest(struct queue *q)
{
    __atomic_fetch_add(q->counter[0], 1, __ATOMIC_RELEASE);
    q->counter[0] = q->counter[1];
    q->length--;
}

static bool await_credit(struct cta *c, const struct prs_attention_message *x, uint32_t epoch, struct queue *q)
{
    struct rank *me = &c->model->ranks[c->rank];
    bool earlier;
    uint32_t index = prs_attention_credit(&me->s, x->distance, prs_attention_evicted(&me->s, x->group, &earlier));
    uint32_t want = earlier ? epoch - 1 : epoch;
    if (prs_flag_reached(load(&me->credits[index]), want))
        return true;
    while (q->length != 0)
        count_oldest(q);
    return wait_for(c->model, &me->credits[index], want, "credit", c->rank, index);
}

static bool push_epoch(struct cta *c, uint32_t epoch)
{
    struct rank *me = &c->model->ranks[c->rank];
    const struct prs_attention_schedule *s = &me->s;
    struct queue q = {0, {NULL, NULL}};
    uint32_t credited = UINT32_MAX;
    for (uint32_t i = c->index; i < prs_attention_messages(s); i += CTAS) {
        struct prs_attention_message x;
        struct rank *to;
        if (!prs_attention_message_at(s, i, &x))
            continue;
        to = &c->model->ranks[(c->rank + s->world - x.distance) % s->world];
        if (credited != x.group * s->world + x.distance && !await_credit(c, &x, epoch, &q))
            return false;
        credited = x.group * s->world + x.distance;
        dawdle(&c->random[1]);
        to->staging[prs_attention_stage(s, x.distance, x.pair, x.kind, x.segment) * chunks_of(s) +
                    x.row / s->chunk_rows] = value_of(epoch, c->rank, x.pair, x.kind, x.segment, x.row / s->chunk_rows);
        if (q.length == IN_FLIGHT)
            count_oldest(&q);
        q.counter[q.length++] = &to->arrivals[prs_attention_arrival(s, x.distance, x.pair, x.kind, x.segment, x.slab)];
    }
    while (q.length != 0)
        count_oldest(&q);
    return true;
}

/* ---- warp 0 and the consumers --------------------------------------------------------------------------------------
 */
static bool read_block(struct cta *c, uint32_t epoch, const struct prs_attention_task *t,
                       const struct prs_attention_walk *w, uint32_t kind)
{
    struct rank *me = &c->model->ranks[c->rank];
    const struct prs_attention_schedule *s = &me->s;
    uint32_t distance = w->span / s->segments, segment = w->span % s->segments;
    uint32_t stage = prs_attention_stage(s, distance, t->pair, kind, segment);
    uint32_t row = w->block * s->block_rows / s->chunk_rows * s->chunk_rows, end = (w->block + 1) * s->block_rows;
    for (; row < end && row < s->segment_rows; row += s->chunk_rows) {
        uint32_t chunk = row / s->chunk_rows, slab = chunk / s->slab_chunks;
        uint32_t index = prs_attention_arrival(s, distance, t->pair, kind, segment, slab);
        uint32_t want = value_of(epoch, (c->rank + distance) % s->world, t->pair, kind, segment, chunk), have;
        if (!wait_for(c->model, &me->arrivals[index], epoch * prs_attention_arrivals(s, slab), "slab", c->rank, index))
            return false;
        have = me->staging[stage * chunks_of(s) + chunk];
        if (have != want) {
            fail(c->model, "word of stage", c->rank, stage, want, have);
            return false;
        }
    }
    return true;
}

static void finish_groups(struct cta *c, uint32_t epoch, uint32_t from, uint32_t to)
{
    struct rank *me = &c->model->ranks[c->rank];
    const struct prs_attention_schedule *s = &me->s;
    for (uint32_t group = from; group < to; group++) {
        if (__atomic_add_fetch(&me->finished[group], 1, __ATOMIC_ACQ_REL) != epoch * CTAS)
            continue;
        for (uint32_t p = 1; p < s->world; p++)
            __atomic_store_n(&c->model->ranks[(c->rank + p) % s->world].credits[prs_attention_credit(s, p, group)],
                             epoch, __ATOMIC_RELEASE);
    }
}

/* Whoever is last sees what all parts have left. */
static bool merge_parts(struct cta *c, uint32_t epoch, const struct prs_attention_piece *piece)
{
    struct rank *me = &c->model->ranks[c->rank];
    struct prs_attention_part p;
    uint32_t sum = 0, want = 0;
    if (piece->part == 0)
        return true;
    p = me->deal.parts[piece->part - 1];
    me->left[piece->part - 1] = epoch * 31 + piece->begin.span * 7 + piece->begin.block;
    if (__atomic_add_fetch(&me->parts_done[p.first], 1, __ATOMIC_ACQ_REL) != p.parts)
        return true;
    me->parts_done[p.first] = 0;
    for (uint32_t i = p.first; i < p.first + p.parts; i++)
        sum += me->left[i];
    for (uint32_t i = 0; i < me->deal.pieces_count; i++)
        if (memcmp(&me->deal.pieces[i].task, &piece->task, sizeof(piece->task)) == 0)
            want += epoch * 31 + me->deal.pieces[i].begin.span * 7 + me->deal.pieces[i].begin.block;
    if (sum != want)
        fail(c->model, "sum of part", c->rank, piece->part, want, sum);
    return sum == want;
}

static bool compute_epoch(struct cta *c, uint32_t epoch)
{
    const struct prs_attention_schedule *s = &c->model->ranks[c->rank].s;
    const struct prs_attention_deal *deal = &c->model->ranks[c->rank].deal;
    uint32_t finished = 0;
    for (uint32_t i = deal->starts[c->index]; i < deal->starts[c->index + 1]; i++) {
        const struct prs_attention_piece *piece = &deal->pieces[i];
        struct prs_attention_walk w = piece->begin;
        finish_groups(c, epoch, finished, piece->task.group);
        finished = piece->task.group;
        do {
            dawdle(&c->random[0]);
            if (w.span >= s->segments && (!read_block(c, epoch, &piece->task, &w, PRS_KEYS) ||
                                          !read_block(c, epoch, &piece->task, &w, PRS_VALUES)))
                return false;
        } while (prs_attention_next(s, &piece->task, &w));
        if (!merge_parts(c, epoch, piece))
            return false;
    }
    finish_groups(c, epoch, finished, s->groups);
    return true;
}

/* ---- one launch after the other ------------------------------------------------------------------------------------
 */
static void leave(struct cta *c, uint32_t epoch)
{
    struct rank *r = &c->model->ranks[c->rank];
    if (__atomic_add_fetch(&r->exits, 1, __ATOMIC_ACQ_REL) == (epoch - (uint32_t)FIRST_EPOCH) * CTAS * 2)
        __atomic_store_n(&r->epoch, epoch, __ATOMIC_RELEASE);
}

static void run_epochs(struct cta *c, bool (*role)(struct cta *c, uint32_t epoch))
{
    for (uint32_t i = 1; i <= EPOCHS; i++) {
        uint32_t epoch = FIRST_EPOCH + i;
        if (!wait_for(c->model, &c->model->ranks[c->rank].epoch, epoch - 1, "epoch", c->rank, 0) || !role(c, epoch))
            return;
        leave(c, epoch);
    }
}

static void *compute_thread(void *arg)
{
    run_epochs(arg, compute_epoch);
    return NULL;
}

static void *push_thread(void *arg)
{
    run_epochs(arg, push_epoch);
    return NULL;
}

/* As it stands after FIRST_EPOCH launches. */
static void init_rank(struct rank *r)
{
    const struct prs_attention_schedule *s = &r->s;
    uint32_t arrivals = prs_attention_arrival(s, s->world, 0, 0, 0, 0), credits = prs_attention_credit(s, s->world, 0);
    cr_assert_eq(prs_attention_deal_init(&r->deal, s, CTAS), 0);
    r->left = calloc(r->deal.parts_count + 1, sizeof(uint32_t));
    r->parts_done = calloc(r->deal.parts_count + 1, sizeof(uint32_t));
    r->staging = calloc((size_t)prs_attention_stages(s) * chunks_of(s), sizeof(uint32_t));
    r->arrivals = calloc(arrivals, sizeof(uint32_t));
    r->credits = calloc(credits, sizeof(uint32_t));
    r->finished = calloc(s->groups, sizeof(uint32_t));
    r->epoch = FIRST_EPOCH;
    for (uint32_t i = 0; i < arrivals; i++)
        r->arrivals[i] = FIRST_EPOCH * prs_attention_arrivals(s, i % s->slabs);
    for (uint32_t i = 0; i < credits; i++)
        r->credits[i] = FIRST_EPOCH;
    for (uint32_t i = 0; i < s->groups; i++)
        r->finished[i] = (uint32_t)FIRST_EPOCH * CTAS;
}

static void run(const struct prs_attention_schedule *sizes, uint32_t world, const struct prs_attention_shares *shares)
{
    struct model *model = calloc(1, sizeof(*model));
    struct cta ctas[MAX_WORLD][CTAS];
    pthread_t threads[MAX_WORLD][CTAS][2];
    uint32_t seed = (uint32_t)time(NULL);
    for (uint32_t r = 0; r < world; r++) {
        model->ranks[r].s = *sizes;
        prs_attention_schedule_init(&model->ranks[r].s, r, world, shares);
        init_rank(&model->ranks[r]);
    }
    for (uint32_t r = 0; r < world; r++)
        for (uint32_t i = 0; i < CTAS; i++) {
            ctas[r][i] = (struct cta){model, r, i, {seed + r * 100 + i, seed * 3 + r * 100 + i}};
            cr_assert_eq(pthread_create(&threads[r][i][0], NULL, compute_thread, &ctas[r][i]), 0);
            cr_assert_eq(pthread_create(&threads[r][i][1], NULL, push_thread, &ctas[r][i]), 0);
        }
    for (uint32_t r = 0; r < world; r++)
        for (uint32_t i = 0; i < CTAS * 2; i++)
            pthread_join(threads[r][i / 2][i % 2], NULL);
    cr_assert_eq(load(&model->failed), 0, "seed %u: %s", seed, model->text);
    for (uint32_t r = 0; r < world; r++) {
        cr_assert_eq(model->ranks[r].epoch, (uint32_t)FIRST_EPOCH + EPOCHS, "rank %u stopped at epoch %u", r,
                     model->ranks[r].epoch);
        prs_attention_deal_fini(&model->ranks[r].deal);
        free(model->ranks[r].left);
        free(model->ranks[r].parts_done);
        free(model->ranks[r].staging);
        free(model->ranks[r].arrivals);
        free(model->ranks[r].credits);
        free(model->ranks[r].finished);
    }
    free(model);
}

static const struct prs_attention_schedule SMALL = {
    .tile_rows = 128, .block_rows = 176, .group = 1, .depth = 64, .chunk_rows = 32, .slab_chunks = 2};

Test(attention_protocol, resident_keys_are_read_in_their_own_epoch, .timeout = 600)
{
    struct prs_attention_shares shares = {1, 2, 2, 0, 200};
    run(&SMALL, 4, &shares);
}

Test(attention_protocol, causal_ranks_get_only_what_they_look_at, .timeout = 600)
{
    struct prs_attention_shares shares = {1, 2, 2, 1, 260};
    run(&SMALL, 4, &shares);
}

Test(attention_protocol, a_ring_of_two_buffers_is_not_overwritten_before_all_have_read_it, .timeout = 600)
{
    struct prs_attention_shares shares = {1, 10, 5, 0, 100};
    struct prs_attention_schedule sizes = SMALL;
    sizes.depth = 2;
    run(&sizes, 3, &shares);
}

Test(attention_protocol, a_causal_ring_with_a_short_last_group_comes_to_an_end, .timeout = 600)
{
    struct prs_attention_shares shares = {1, 5, 5, 1, 130};
    struct prs_attention_schedule sizes = SMALL;
    sizes.depth = 2;
    sizes.group = 2;
    run(&sizes, 3, &shares);
}

Test(attention_protocol, one_buffer_is_enough, .timeout = 600)
{
    struct prs_attention_shares shares = {1, 3, 3, 0, 70};
    struct prs_attention_schedule sizes = SMALL;
    sizes.depth = 1;
    run(&sizes, 2, &shares);
}

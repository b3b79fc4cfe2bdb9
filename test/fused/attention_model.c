/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "test/fused/attention_model.h"

struct cta {
    struct attention_model *model;
    uint32_t rank, index;
    uint32_t random[2];
    uint32_t ended; /* atomic: roles that have ended, counted over all launches */
};

/* The rank that comes `p` later in this rank's node. */
static uint32_t neighbour(const struct prs_attention_schedule *s, uint32_t p)
{
    return s->place.node * s->place.local_ranks + (s->place.local_rank + p) % s->place.local_ranks;
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

static uint32_t claim(uint32_t *counter)
{
    return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED);
}

/* Arrival counter of a launch. */
static uint32_t *arrival_of(struct attention_rank *r, uint32_t epoch, uint32_t index)
{
    /* MUTANT(model attention) arrivals have two banks: s/epoch & 1/0 * epoch/ */
    return &r->arrivals[(epoch & 1) * r->arrival_words + index];
}

/* ---- warp 1: send ---- */
/* Where to count a message: peer 0 is this rank; the message has then landed in its relay slot. forwards: 0, or 1 + the
 * group of rows of another node. */
struct sent {
    uint32_t peer, index, forwards;
    uint32_t *to, value; /* to: NULL once it has landed */
};

struct queue {
    uint32_t length;
    struct sent sent[IN_FLIGHT];
};

static void land(struct sent *x)
{
    if (x->to)
        *x->to = x->value;
    x->to = NULL;
}

/* As relay_message() in far.cuh. */
static void relay_message(struct cta *c, uint32_t epoch, uint32_t index)
{
    struct attention_rank *me = &c->model->ranks[c->rank];
    const struct prs_attention_schedule *s = &me->s;
    uint32_t slab = index % s->slabs, segment = index / s->slabs % s->segments;
    uint32_t kind = index / s->slabs / s->segments % 2, pair = index / s->slabs / s->segments / 2 % s->room_pairs;
    uint32_t messages = prs_attention_arrivals(s, slab), first = slab * s->slab_chunks;
    /* MUTANT(model attention) a slab is put with its last message: s/messages/messages - (messages - 1)/ */
    if (watch_count(arrival_of(me, epoch, index)) != messages)
        return;
    for (uint32_t back = 1; back < s->place.nodes; back++) {
        uint32_t peer = prs_place_counterpart(&s->place, s->place.nodes - back);
        uint32_t from = prs_attention_stage(s, s->place.world, pair, kind, segment);
        /* MUTANT(model attention) a slab's place is that of its sender: s/back/(s->place.nodes - back)/ */
        uint32_t to = prs_attention_stage(s, back * s->place.local_ranks, pair, kind, segment);
        struct attention_rank *there = &c->model->ranks[peer];
        if (segment >= prs_attention_interest(s, s->place.rank, peer))
            continue;
        nic_post(&me->nic, &(struct nic_command){.from = &me->staging[from * chunks_of(s) + first],
                                                 .to = &there->staging[to * chunks_of(s) + first],
                                                 .words = messages,
                                                 .peer = peer,
                                                 .group = index});
        /* MUTANT(model attention) a signal stays behind its put: s/index/index + 1/ */
        nic_post(&me->nic, &(struct nic_command){
                               /* MUTANT(model attention) a slab's signal names the way to its sender:
                                * s/back/s->place.nodes - back/ */
                               .to = &there->signals[prs_attention_far_slab(s, back, pair, kind, segment, slab)],
                               .value = epoch,
                               .peer = peer,
                               .group = index});
    }
}

/* As in far.cuh: the last of a group's pieces and forwarded messages gives credit to other nodes. */
static void count_for_far(struct cta *c, uint32_t epoch, uint32_t group)
{
    struct attention_rank *me = &c->model->ranks[c->rank];
    const struct prs_attention_schedule *s = &me->s;
    /* MUTANT(model attention) credit when all messages have been forwarded:
     * s#prs_attention_forwards(s, group)#0# */
    uint32_t all = me->deal.pieces_of[group] + prs_attention_forwards(s, group);
    if (watch_count(&me->finished[s->groups + group]) != all)
        return;
    for (uint32_t way = 1; way < s->place.nodes; way++) {
        uint32_t peer = prs_place_counterpart(&s->place, way);
        nic_post(&me->nic,
                 &(struct nic_command){/* MUTANT(model attention) each node's credit has a word: s/way/1/ */
                                       .to = &c->model->ranks[peer].signals[prs_attention_far_credit(s, way, group)],
                                       .value = epoch,
                                       .peer = peer,
                                       .group = group});
    }
}

static void count_oldest(struct cta *c, uint32_t epoch, struct queue *q)
{
    const struct prs_attention_schedule *s = &c->model->ranks[c->rank].s;
    struct sent *x = &q->sent[0];
    /* MUTANT(model attention) a message is counted when it has landed: delete */
    land(x);
    if (s->place.nodes > 1 && x->peer == 0)
        relay_message(c, epoch, x->index);
    else
        watch_add(arrival_of(&c->model->ranks[neighbour(s, x->peer)], epoch, x->index));
    if (x->forwards != 0)
        count_for_far(c, epoch, x->forwards - 1);
    q->sent[0] = q->sent[1];
    q->length--;
}

static void count_all(struct cta *c, uint32_t epoch, struct queue *q)
{
    while (q->length != 0)
        count_oldest(c, epoch, q);
}

/* Waits until the flag is raised. First adds all messages that this CTA has sent to the arrival counters of their
 * receivers: a rank may wait for one of them before it raises the flag. */
static bool await_flag(struct cta *c, uint32_t epoch, struct queue *q, const uint32_t *flag, uint32_t want,
                       const char *what, uint32_t index, uint32_t from)
{
    if (prs_flag_reached(watch_load(flag), want))
        return true;
    /* MUTANT(model attention) nothing is held back while waiting: delete */
    count_all(c, epoch, q);
    return watch_wait(&c->model->watch, flag, want, what, c->rank, index, from);
}

static bool await_credit(struct cta *c, const struct prs_attention_message *x, uint32_t epoch, struct queue *q)
{
    struct attention_rank *me = &c->model->ranks[c->rank];
    const struct prs_attention_schedule *s = &me->s;
    bool earlier;
    uint32_t evicted, want;
    if (!prs_attention_evicted(s, x->group, me->groups_before, &evicted, &earlier))
        return true;
    want = earlier ? me->before : epoch;
    if (x->distance == 0) { /* the relay slot: all counterparts */
        /* MUTANT(model attention) the credit of all nodes: s/s->place.nodes;/2;/ */
        /* MUTANT(model attention) a relay slot is written with credit: s/s->place.nodes;/1;/ */
        for (uint32_t back = 1; back < s->place.nodes; back++) {
            uint32_t word = prs_attention_far_credit(s, back, evicted);
            if (!await_flag(c, epoch, q, &me->signals[word], want, "far credit", word,
                            prs_place_counterpart(&s->place, s->place.nodes - back)))
                return false;
        }
        return true;
    }
    evicted = prs_attention_credit(s, x->distance, evicted);
    return await_flag(c, epoch, q, &me->credits[evicted], want, "credit", evicted,
                      neighbour(s, s->place.local_ranks - x->distance));
}

static bool await_message(struct cta *c, const struct prs_attention_message *x, uint32_t epoch, struct queue *q,
                          uint32_t *credited)
{
    struct attention_rank *me = &c->model->ranks[c->rank];
    const struct prs_attention_schedule *s = &me->s;
    uint32_t buffer = x->group * s->place.local_ranks + x->distance;
    /* MUTANT(model attention) another node's slab is awaited: s/!= 0/> s->place.nodes/ */
    if (x->way != 0) {
        uint32_t word = prs_attention_far_slab(s, x->way, x->pair, x->kind, x->segment, x->slab);
        if (!await_flag(c, epoch, q, &me->signals[word], epoch, "far slab", word,
                        prs_place_counterpart(&s->place, x->way)))
            return false;
    }
    /* MUTANT(model attention) a neighbour's place needs its credit:
     * s/(x->way == 0 || x->distance != 0)/x->distance == 0/ */
    if (*credited != buffer && (x->way == 0 || x->distance != 0) && !await_credit(c, x, epoch, q))
        return false;
    *credited = buffer;
    return true;
}

/* A message arrives at once, or only just before it is counted. */
static void send_message(struct cta *c, const struct prs_attention_message *x, uint32_t epoch, struct queue *q)
{
    struct attention_rank *me = &c->model->ranks[c->rank];
    const struct prs_attention_schedule *s = &me->s;
    uint32_t order = prs_attention_order(s, x->way, x->distance), chunk = x->row / s->chunk_rows;
    uint32_t peer = x->distance == 0 ? 0 : s->place.local_ranks - x->distance;
    uint32_t stage = prs_attention_stage(s, order, x->pair, x->kind, x->segment);
    struct sent *to = &q->sent[q->length++];
    to->forwards = x->way != 0 ? 1 + x->group : 0;
    to->peer = peer, to->index = prs_attention_arrival(s, order, x->pair, x->kind, x->segment, x->slab);
    to->to = &c->model->ranks[neighbour(s, peer)].staging[stage * chunks_of(s) + chunk];
    to->value = value_of(epoch, c->rank, x->pair, x->kind, x->segment, chunk);
    if (x->way != 0) {
        stage = prs_attention_stage(s, x->way * s->place.local_ranks, x->pair, x->kind, x->segment);
        to->value = me->staging[stage * chunks_of(s) + chunk];
    }
    if (c->random[1] >> 16 & 1)
        land(to);
}

static bool push_epoch(struct cta *c, uint32_t epoch)
{
    struct attention_rank *me = &c->model->ranks[c->rank];
    const struct prs_attention_schedule *s = &me->s;
    struct queue q = {.length = 0};
    uint32_t credited = UINT32_MAX;
    for (uint32_t i = claim(&me->messages); i < prs_attention_messages(s); i = claim(&me->messages)) {
        struct prs_attention_message x;
        if (!prs_attention_message_at(s, i, &x))
            continue;
        if (!await_message(c, &x, epoch, &q, &credited))
            return false;
        if (x.way != 0 && x.distance == 0) { /* the message is here already */
            watch_add(arrival_of(
                me, epoch, prs_attention_arrival(s, x.way * s->place.local_ranks, x.pair, x.kind, x.segment, x.slab)));
            continue;
        }
        watch_dawdle(&c->random[1]);
        if (q.length == IN_FLIGHT)
            count_oldest(c, epoch, &q);
        send_message(c, &x, epoch, &q);
    }
    count_all(c, epoch, &q);
    return true;
}

/* ---- copy engines: one copy after the other, as on one stream ---- */
/* The index at which copy engines write a word: the same as in the sender's tensor. */
static uint32_t copied_word(const struct prs_attention_schedule *s, uint32_t order, uint32_t kind, uint32_t pair,
                            uint32_t segment, uint32_t chunk)
{
    return ((prs_attention_tensor(s, order, kind) * s->pairs + pair) * s->segments + segment) * chunks_of(s) + chunk;
}

static void copy_group(struct cta *c, uint32_t epoch, uint32_t group, uint32_t distance)
{
    struct attention_rank *me = &c->model->ranks[c->rank];
    const struct prs_attention_schedule *s = &me->s;
    struct attention_rank *there = &c->model->ranks[neighbour(s, s->place.world - distance)];
    uint32_t *flag = &there->arrivals[prs_attention_copied(s, distance, group)];
    /* MUTANT(model copied) a flag follows its rows: s/for (uint32_t i/watch_raise(flag, epoch); for (uint32_t i/ */
    for (uint32_t i = 0; i < prs_attention_group_pairs(s, group) * 2 * s->segments; i++) {
        uint32_t pair = group * s->group + i / s->segments / 2, kind = i / s->segments % 2, segment = i % s->segments;
        for (uint32_t chunk = 0; chunk < chunks_of(s); chunk++)
            there->staging[copied_word(s, distance, kind, pair, segment, chunk)] =
                value_of(epoch, c->rank, pair, kind, segment, chunk);
    }
    watch_raise(flag, epoch);
}

static bool copy_epoch(struct cta *c, uint32_t epoch)
{
    struct attention_rank *me = &c->model->ranks[c->rank];
    const struct prs_attention_schedule *s = &me->s;
    if (claim(&me->messages) != 0)
        return true;
    /* MUTANT(model copied) credit of the launch before: s/me->before/me->before - 1/ */
    /* MUTANT(model copied) credit for all groups: s/prs_attention_credit(s, s->place.world, 0)/s->groups/ */
    for (uint32_t i = 0; i < prs_attention_credit(s, s->place.world, 0); i++)
        /* MUTANT(model batch) copies need credit only of groups that the launch before had:
         * s/< me->groups_before/< s->room_groups/ */
        if (i % s->room_groups < me->groups_before &&
            !watch_wait(&c->model->watch, &me->credits[i], me->before, "credit", c->rank, i,
                        neighbour(s, s->place.world - 1 - i / s->room_groups)))
            return false;
    for (uint32_t group = 0; group < s->groups; group++)
        for (uint32_t distance = 1; distance < s->place.world; distance++) {
            watch_dawdle(&c->random[1]);
            copy_group(c, epoch, group, distance);
        }
    return true;
}

/* ---- warp 0 and the consumers ---- */
static bool read_block(struct cta *c, uint32_t epoch, const struct prs_attention_task *t,
                       const struct prs_attention_walk *w, uint32_t kind)
{
    struct attention_rank *me = &c->model->ranks[c->rank];
    const struct prs_attention_schedule *s = &me->s;
    uint32_t order = w->span / s->segments, segment = w->span % s->segments;
    uint32_t stage = prs_attention_stage(s, order, t->pair, kind, segment),
             source = prs_place_in_order(&s->place, order);
    bool copied = c->model->copied;
    uint32_t row = w->block * s->block_rows / s->chunk_rows * s->chunk_rows, end = (w->block + 1) * s->block_rows;
    for (; row < end && row < s->segment_rows; row += s->chunk_rows) {
        uint32_t chunk = row / s->chunk_rows, slab = chunk / s->slab_chunks;
        uint32_t index = copied ? prs_attention_copied(s, order, t->group)
                                : prs_attention_arrival(s, order, t->pair, kind, segment, slab);
        const uint32_t *flag = copied ? &me->arrivals[index] : arrival_of(me, epoch, index);
        uint32_t word = copied ? copied_word(s, order, kind, t->pair, segment, chunk) : stage * chunks_of(s) + chunk;
        uint32_t want = value_of(epoch, source, t->pair, kind, segment, chunk), have;
        if (!watch_wait(&c->model->watch, flag, copied ? epoch : prs_attention_arrivals(s, slab), "slab", c->rank,
                        index, source))
            return false;
        have = me->staging[word];
        if (have != want) {
            watch_fail(&c->model->watch, "word of staging memory", c->rank, word, source, want, have);
            return false;
        }
    }
    return true;
}

/* As count_pieces() in credit.cuh. */
static void count_piece(struct cta *c, uint32_t epoch, uint32_t group)
{
    struct attention_rank *me = &c->model->ranks[c->rank];
    const struct prs_attention_schedule *s = &me->s;
    if (s->place.nodes > 1)
        count_for_far(c, epoch, group);
    /* MUTANT(model attention) credit for the node when all pieces have been read:
     * s#pieces_of[group]#pieces_of[0] / 2# */
    if (watch_count(&me->finished[group]) != me->deal.pieces_of[group])
        return;
    for (uint32_t p = 1; p < s->place.local_ranks; p++)
        watch_raise(&c->model->ranks[neighbour(s, p)].credits[prs_attention_credit(s, p, group)], epoch);
}

/* The thread that comes last sees what all parts have left. */
static bool merge_parts(struct cta *c, uint32_t epoch, const struct prs_attention_piece *piece)
{
    struct attention_rank *me = &c->model->ranks[c->rank];
    struct prs_attention_part p;
    uint32_t sum = 0, want = 0;
    if (piece->part == 0)
        return true;
    p = me->deal.parts[piece->part - 1];
    me->left[piece->part - 1] = epoch * 31 + piece->begin.span * 7 + piece->begin.block;
    if (watch_count(&me->parts_done[p.first]) != p.parts)
        return true;
    me->parts_done[p.first] = 0;
    for (uint32_t i = p.first; i < p.first + p.parts; i++)
        sum += me->left[i];
    for (uint32_t i = 0; i < me->deal.pieces_count; i++)
        if (memcmp(&me->deal.pieces[i].task, &piece->task, sizeof(piece->task)) == 0)
            want += epoch * 31 + me->deal.pieces[i].begin.span * 7 + me->deal.pieces[i].begin.block;
    if (sum != want)
        watch_fail(&c->model->watch, "sum of part", c->rank, piece->part, c->rank, want, sum);
    return sum == want;
}

static bool next_step(const struct cta *c, const struct prs_attention_task *t, struct prs_attention_walk *w)
{
    const struct attention_rank *me = &c->model->ranks[c->rank];
    return c->model->backward ? prs_backward_next(&me->s, &me->shape, t, w, me->s.place.nodes > 1)
                              : prs_attention_next(&me->s, t, w);
}

static bool compute_epoch(struct cta *c, uint32_t epoch)
{
    struct attention_rank *me = &c->model->ranks[c->rank];
    const struct prs_attention_schedule *s = &me->s;
    for (uint32_t i = claim(&me->pieces); i < me->deal.pieces_count; i = claim(&me->pieces)) {
        const struct prs_attention_piece *piece = &me->deal.pieces[i];
        struct prs_attention_walk w = piece->begin;
        do {
            struct prs_attention_walk at = w;
            if (c->model->backward)
                at.span = prs_backward_span(s, &me->shape, &w, s->place.nodes > 1);
            watch_dawdle(&c->random[0]);
            if (at.span >= s->segments && (!read_block(c, epoch, &piece->task, &at, PRS_KEYS) ||
                                           !read_block(c, epoch, &piece->task, &at, PRS_VALUES)))
                return false;
        } while (next_step(c, &piece->task, &w));
        count_piece(c, epoch, piece->task.group);
        if (!merge_parts(c, epoch, piece))
            return false;
    }
    return true;
}

/* ---- one launch after the other ---- */
/* Whatever ranks do, this is the same for all. */
static uint32_t batch_of(const struct attention_model *model, const struct attention_rank *r, uint32_t epoch)
{
    uint32_t most = r->s.room_pairs / r->s.heads_kv;
    return model->varies ? 1 + (epoch * 2654435761u >> 16) % most : most;
}

static void begin_launch(const struct attention_model *model, struct attention_rank *r, uint32_t epoch)
{
    const struct attention_launch *launch = &r->of[batch_of(model, r, epoch) - 1];
    r->s = launch->s;
    r->deal = launch->deal;
}

/* Unlike in the kernel, a launch ends here while puts and signals are under way: only credits say when memory may be
 * written again. */
static void leave(struct cta *c, uint32_t epoch)
{
    struct attention_rank *r = &c->model->ranks[c->rank];
    if (watch_count(&c->ended) % ROLES == 0)
        watch_count(&r->ended);
    if (watch_count(&r->exits) != CTAS * ROLES)
        return;
    r->exits = r->pieces = r->messages = 0;
    r->before = epoch;
    r->groups_before = r->s.groups;
    r->pairs += r->s.pairs;
    r->groups += r->s.groups;
    for (uint32_t i = 0; i < 2 * r->s.groups; i++)
        r->finished[i] = 0;
    for (uint32_t i = 0; i < r->arrival_words && !c->model->copied; i++)
        *arrival_of(r, epoch, i) = 0;
    begin_launch(c->model, r, epoch + 1);
    watch_raise(&r->epoch, epoch);
}

/* A CTA begins when there is room for it. */
static bool await_room(struct cta *c, uint32_t launch)
{
    uint32_t resident = c->model->resident != 0 ? c->model->resident : c->rank % CTAS + 1;
    uint32_t others = c->index < resident ? 0 : c->index - resident + 1;
    return others == 0 || watch_wait(&c->model->watch, &c->model->ranks[c->rank].ended, (launch - 1) * CTAS + others,
                                     "CTAs that have left", c->rank, c->index, c->rank);
}

static void run_epochs(struct cta *c, bool (*role)(struct cta *c, uint32_t epoch))
{
    struct prs_place place = c->model->ranks[c->rank].of[0].s.place;
    for (uint32_t i = 1; i <= EPOCHS; i++) {
        uint32_t epoch = FIRST_EPOCH + i;
        if ((place.node == place.nodes - 1 && watch_leaves(&c->model->watch, i)) ||
            !watch_wait(&c->model->watch, &c->model->ranks[c->rank].epoch, epoch - 1, "epoch", c->rank, 0, c->rank) ||
            !await_room(c, i) || !role(c, epoch))
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
    run_epochs(arg, ((struct cta *)arg)->model->copied ? copy_epoch : push_epoch);
    return NULL;
}

/* Tasks of the backward pass, which are not cut. */
static void deal_backward(const struct attention_rank *r, struct attention_launch *x)
{
    cr_assert_eq(prs_attention_deal_whole(&x->deal, &x->s), 0);
    for (uint32_t i = 0; i < x->deal.pieces_count; i++) {
        struct prs_attention_piece *piece = &x->deal.pieces[i];
        prs_backward_task_at(&x->s, &r->shape, i, &piece->task);
        prs_backward_begin(&x->s, &r->shape, &piece->task, &piece->begin);
    }
}

/* Fills in the launches of the plan r->s. Returns the most parts of one. */
static uint32_t deal_launches(struct attention_rank *r, bool backward)
{
    uint32_t most = 0;
    r->shape = (struct prs_backward_shape){r->s.heads_kv, 1};
    cr_assert_leq(r->s.batch, MAX_BATCH);
    for (uint32_t i = 0; i < r->s.batch; i++) {
        struct attention_launch *x = &r->of[i];
        x->s = prs_attention_smaller(&r->s, false, i + 1, r->s.segments * r->s.segment_rows);
        if (backward)
            deal_backward(r, x);
        else
            cr_assert_eq(prs_attention_deal_init(&x->deal, &x->s, CTAS), 0);
        most = x->deal.parts_count > most ? x->deal.parts_count : most;
    }
    return most;
}

/* Gives all flags of a rank the values that they have after FIRST_EPOCH launches. */
static void init_rank(const struct attention_model *model, struct attention_rank *r)
{
    const struct prs_attention_schedule *s = &r->s;
    uint32_t arrivals = prs_attention_arrival(s, prs_attention_slots(s) + 1, 0, 0, 0, 0);
    uint32_t credits = prs_attention_credit(s, s->place.local_ranks, 0), words = prs_attention_far_words(s);
    uint32_t parts = deal_launches(r, model->backward);
    r->left = calloc(parts + 1, sizeof(uint32_t));
    r->parts_done = calloc(parts + 1, sizeof(uint32_t));
    r->staging = calloc((size_t)prs_attention_stages(s) * chunks_of(s), sizeof(uint32_t));
    r->arrivals = calloc((size_t)2 * arrivals, sizeof(uint32_t));
    r->arrival_words = arrivals;
    r->credits = calloc(credits + 1, sizeof(uint32_t)); /* a node of one rank has no credits */
    r->finished = calloc(2 * s->groups, sizeof(uint32_t));
    r->signals = calloc(words, sizeof(uint32_t));
    r->epoch = r->before = FIRST_EPOCH;
    r->groups_before = s->groups;
    for (uint32_t i = 0; i < arrivals && model->copied; i++)
        r->arrivals[i] = FIRST_EPOCH;
    for (uint32_t i = 0; i < credits; i++)
        r->credits[i] = FIRST_EPOCH;
    for (uint32_t i = 0; i < words; i++)
        r->signals[i] = FIRST_EPOCH;
    begin_launch(model, r, FIRST_EPOCH + 1);
}

static void fini_rank(struct attention_rank *r)
{
    for (uint32_t i = 0; i < MAX_BATCH; i++)
        prs_attention_deal_fini(&r->of[i].deal);
    free(r->left);
    free(r->parts_done);
    free(r->staging);
    free(r->arrivals);
    free(r->credits);
    free(r->finished);
    free(r->signals);
}

void attention_model_check_rank(const struct attention_model *model, uint32_t rank)
{
    const struct attention_rank *r = &model->ranks[rank];
    const struct prs_attention_schedule *s = &r->s;
    uint64_t segments = 0;
    cr_assert_eq(r->epoch, FIRST_EPOCH + EPOCHS, "rank %u stopped at epoch %u", rank, r->epoch);
    for (uint32_t way = 1; way < s->place.nodes; way++)
        segments += prs_attention_interest(s, rank, prs_place_counterpart(&s->place, way));
    cr_assert_eq(r->nic.words, segments * r->pairs * 2 * chunks_of(s));
    cr_assert_eq(r->nic.puts, segments * r->pairs * 2 * s->slabs);
    cr_assert_eq(r->nic.signals, r->nic.puts + (uint64_t)(s->place.nodes - 1) * r->groups);
}

void attention_model_run(struct attention_model *model, const struct prs_attention_schedule *sizes, uint32_t world,
                         const struct prs_attention_slice *slice, uint32_t lost_after)
{
    static void *(*const roles[ROLES])(void *) = {compute_thread, push_thread};
    struct cta ctas[MAX_WORLD][CTAS];
    pthread_t threads[MAX_WORLD][CTAS * ROLES];
    uint32_t seed = (uint32_t)time(NULL), roles_of_rank = CTAS * ROLES;
    printf("seed %u\n", seed);
    watch_init(&model->watch, world * roles_of_rank, world / slice->nodes * roles_of_rank, lost_after);
    for (uint32_t r = 0; r < world; r++) {
        model->ranks[r].s = *sizes;
        prs_attention_schedule_init(&model->ranks[r].s, r, world, slice);
        init_rank(model, &model->ranks[r]);
        if (slice->nodes > 1)
            nic_open(&model->ranks[r].nic, &model->watch, seed + r);
    }
    for (uint32_t r = 0; r < world; r++)
        for (uint32_t i = 0; i < roles_of_rank; i++) {
            struct cta *c = &ctas[r][i % CTAS];
            if (i < CTAS)
                *c = (struct cta){model, r, i, {seed + r * 100 + i, seed * 3 + r * 100 + i}, 0};
            cr_assert_eq(pthread_create(&threads[r][i], NULL, roles[i / CTAS], c), 0);
        }
    for (uint32_t r = 0; r < world; r++)
        for (uint32_t i = 0; i < roles_of_rank; i++)
            pthread_join(threads[r][i], NULL);
    for (uint32_t r = 0; r < world && slice->nodes > 1; r++)
        nic_close(&model->ranks[r].nic);
}

void attention_model_close(struct attention_model *model, uint32_t world)
{
    for (uint32_t r = 0; r < world; r++)
        fini_rank(&model->ranks[r]);
    free(model);
}

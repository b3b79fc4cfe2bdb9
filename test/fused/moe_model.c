/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "test/fused/moe_model.h"

/* ---- one launch after the other ---- */
/* The last thread of a kernel lets the next one begin. */
static bool end_routing(struct cta *c, uint32_t epoch)
{
    struct rank *me = &c->model->ranks[c->rank];
    if (c->role == 0)
        watch_count(&me->routed);
    /* The product's kernel begins when all CTAs of the routing kernel have ended. */
    return watch_wait(&c->model->watch, &me->routed, (epoch - FIRST_EPOCH) * CTAS, "end of routing", c->rank, c->index,
                      c->rank);
}

static void end_launch(struct cta *c, uint32_t epoch)
{
    struct rank *me = &c->model->ranks[c->rank];
    if (watch_count(&c->model->roles_ended[c->rank][c->index]) % THREADS == 0)
        watch_count(&me->ended);
    if (watch_count(&me->exits) != CTAS * THREADS)
        return;
    /* MUTANT(model moe) a launch ends when its puts are complete: s/me->r.place.nodes > 1 && !nic_quiet(&me->nic)/0/ */
    if (me->r.place.nodes > 1 && !nic_quiet(&me->nic))
        return;
    model_check(c->model, c->rank, epoch);
    model_make_input(me, epoch + 1);
    me->claimed = me->counted = me->chunks_sent = me->parts = me->exits = 0;
    me->units = me->lists = me->pushed = me->relays = me->forwarded = 0;
    watch_raise(&me->epoch, epoch);
}

/* A CTA begins when there is room for it. ended: CTAs of this kernel, over all launches. */
static bool await_room(struct cta *c, uint32_t launch, const uint32_t *ended)
{
    uint32_t resident = c->model->resident != 0 ? c->model->resident : c->rank % CTAS + 1;
    uint32_t others = c->index < resident ? 0 : c->index - resident + 1;
    return others == 0 || watch_wait(&c->model->watch, ended, (launch - 1) * CTAS + others, "CTAs that have left",
                                     c->rank, c->index, c->rank);
}

static void *run_thread(void *arg)
{
    static bool (*const roles[THREADS])(struct cta *, uint32_t) = {model_multiply, model_place, model_send_rows};
    struct cta *c = arg;
    struct rank *me = &c->model->ranks[c->rank];
    for (uint32_t i = 1; i <= c->model->epochs; i++) {
        uint32_t epoch = FIRST_EPOCH + i;
        if ((me->r.place.node == me->r.place.nodes - 1 && watch_leaves(&c->model->watch, i)) ||
            !watch_wait(&c->model->watch, &me->epoch, epoch - 1, "epoch", c->rank, 0, c->rank) ||
            (c->role == 0 && (!await_room(c, i, &me->routed) || !model_route(c, epoch))) || !end_routing(c, epoch) ||
            !await_room(c, i, &me->ended) || !roles[c->role](c, epoch))
            return NULL;
        end_launch(c, epoch);
    }
    return NULL;
}

/* ---- setting up ---- */
static void init_rank(struct rank *me, uint32_t rank, const struct model_run *run)
{
    uint32_t blocks = rank == WORLD - 1 ? run->blocks_of_last : BLOCKS;
    struct prs_route r = {.experts = EXPERTS,
                          .experts_per_rank = LOCAL,
                          .choices = CHOICES,
                          .tokens = TOKENS,
                          .blocks = blocks,
                          .columns = COLUMNS,
                          .row_bytes = sizeof(uint32_t),
                          .chunks = CHUNKS,
                          .put = run->put,
                          .group = run->group,
                          .passes = 2};
    prs_place_init(&r.place, rank, WORLD, run->nodes);
    me->r = r;
    cr_assert(prs_route_relay_word(&r, r.place.nodes, 0) <= NIC_WORDS);
    me->messages = calloc(1, prs_route_messages_bytes(&r));
    for (uint32_t i = 0; i < WORLD * TOKENS; i++)
        me->deliveries[i] = calloc(1, prs_route_delivery_bytes(&r));
    /* Their values after FIRST_EPOCH launches; the last rows were sent as long ago as is possible. */
    for (uint32_t p = 0; p < WORLD; p++)
        me->message_flags[p] = me->signal[p] = FIRST_EPOCH;
    me->epoch = FIRST_EPOCH;
    model_make_input(me, FIRST_EPOCH + 1);
}

struct model *model_run(const struct model_run *run)
{
    struct model *m = calloc(1, sizeof(*m));
    pthread_t threads[WORLD][CTAS * THREADS];
    uint32_t seed = (uint32_t)time(NULL);
    printf("seed %u\n", seed);
    m->epochs = run->epochs;
    m->resident = run->resident;
    watch_init(&m->watch, WORLD * CTAS * THREADS, WORLD / run->nodes * CTAS * THREADS, run->lost_after);
    for (uint32_t r = 0; r < WORLD; r++) {
        init_rank(&m->ranks[r], r, run);
        if (run->nodes > 1)
            nic_open(&m->ranks[r].nic, &m->watch, seed + r);
    }
    for (uint32_t r = 0; r < WORLD; r++)
        for (uint32_t i = 0; i < CTAS * THREADS; i++) {
            struct cta *c = &m->ctas[r][i / THREADS][i % THREADS];
            *c = (struct cta){m, r, i / THREADS, i % THREADS, seed + r * 100 + i};
            cr_assert_eq(pthread_create(&threads[r][i], NULL, run_thread, c), 0);
        }
    for (uint32_t r = 0; r < WORLD; r++)
        for (uint32_t i = 0; i < CTAS * THREADS; i++)
            pthread_join(threads[r][i], NULL);
    for (uint32_t r = 0; r < WORLD && run->nodes > 1; r++)
        nic_close(&m->ranks[r].nic);
    return m;
}

void model_close(struct model *m)
{
    for (uint32_t r = 0; r < WORLD; r++) {
        free(m->ranks[r].messages);
        for (uint32_t i = 0; i < WORLD * TOKENS; i++)
            free(m->ranks[r].deliveries[i]);
    }
    free(m);
}

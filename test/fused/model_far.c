/* SPDX-License-Identifier: Apache-2.0 */
/* Does what fused/gemm/relay.cuh and push.cuh do, with a word for each piece. */
#include <string.h>

#include "test/fused/model.h"

/* ---- puts ---- */
static bool is_last(struct rank *me, uint32_t counter, uint32_t whole)
{
    if (watch_count(&me->counter[counter]) != whole)
        return false;
    watch_raise(&me->counter[counter], 0);
    return true;
}

static void signal(struct rank *me, struct rank *to, uint32_t peer, uint32_t word, uint32_t epoch, uint32_t group)
{
    nic_post(&me->nic, &(struct nic_command){.to = &to->signals[word], .value = epoch, .peer = peer, .group = group});
}

void far_relay_tile(struct model *m, uint32_t rank, uint32_t epoch, uint32_t block, uint32_t tile)
{
    struct rank *me = &m->ranks[rank], *owner = &m->ranks[block];
    const struct prs_schedule *s = &me->s;
    uint32_t node = block / s->place.local_ranks, to = prs_index_after(node, s->place.node, s->place.nodes);
    uint32_t pieces = prs_schedule_tiles(s) * HALVES, place;
    struct prs_piece_group g = prs_schedule_group(s, tile / s->columns, tile % s->columns);
    if (!is_last(me, prs_schedule_tile_counter(s, to, tile), HALVES) ||
        !is_last(me, prs_schedule_group_counter(s, to, g.index), g.pieces))
        return;
    place = prs_schedule_group_place(s, &g) * HALVES;
    nic_post(&me->nic,
             &(struct nic_command){
                 .from = &me->staging[epoch & 1][prs_schedule_relay_slot(s, node) * pieces + place],
                 .to = &owner->staging[epoch & 1][prs_schedule_arrive_slot(s, s->place.node, node) * pieces + place],
                 .words = g.pieces * HALVES,
                 .peer = block,
                 .group = g.index});
    signal(me, owner, block, prs_schedule_group_word(s, prs_index_after(s->place.node, node, s->place.nodes), g.index),
           epoch, g.index);
}

void far_put_rows(struct model *m, uint32_t rank, uint32_t epoch, uint32_t row_tile)
{
    struct rank *me = &m->ranks[rank];
    const struct prs_schedule *s = &me->s;
    uint32_t words = s->columns * HALVES, group = prs_schedule_groups(s) + row_tile;
    uint32_t where = rank * prs_schedule_tiles(s) * HALVES + row_tile * words;
    if (!is_last(me, prs_schedule_row_counter(s, row_tile), words) || prs_schedule_tile_rows(s, row_tile) == 0)
        return;
    for (uint32_t i = 1; i < s->place.nodes; i++) {
        uint32_t node = (s->place.node + i) % s->place.nodes, peer = node * s->place.local_ranks + s->place.local_rank;
        struct rank *to = &m->ranks[peer];
        nic_post(
            &me->nic,
            &(struct nic_command){
                .from = &me->result[where], .to = &to->result[where], .words = words, .peer = peer, .group = group});
        signal(me, to, peer, prs_schedule_row_word(s, prs_index_after(s->place.node, node, s->place.nodes), row_tile),
               epoch, group);
    }
}

/* Of the 64-row half `i` of a strip. */
static uint32_t strip_place(const struct prs_schedule *s, uint32_t slot, uint32_t row_tile, uint32_t strip, uint32_t i)
{
    return (slot * s->pairs * 4 + row_tile * 2 + i) * s->k_steps + strip * PRS_STRIP_STEPS;
}

/* In the model the halves of a row tile are apart, so a group has a command for each half of each strip. */
static void put_strips(struct model *m, uint32_t rank, uint32_t epoch, const struct prs_piece_group *g, uint32_t peer)
{
    struct rank *me = &m->ranks[rank];
    const struct prs_schedule *s = &me->s;
    uint32_t strips = prs_schedule_strips(s), to = prs_schedule_slot(s, rank, peer);
    uint32_t slot = prs_schedule_slot(s, rank, rank);
    for (uint32_t at = g->first; at < g->first + g->pieces; at++) {
        uint32_t row_tile = g->band * s->band * 2 + at / strips, strip = at % strips;
        uint32_t steps = s->k_steps - strip * PRS_STRIP_STEPS;
        uint32_t rows = prs_ceil_div(prs_schedule_tile_rows(s, row_tile), PRS_PUSH_ROWS);
        for (uint32_t half = 0; half < rows; half++)
            nic_post(&me->nic, &(struct nic_command){
                                   .from = &me->staging[epoch & 1][strip_place(s, slot, row_tile, strip, half)],
                                   .to = &m->ranks[peer].staging[epoch & 1][strip_place(s, to, row_tile, strip, half)],
                                   .words = steps < PRS_STRIP_STEPS ? steps : PRS_STRIP_STEPS,
                                   .peer = peer,
                                   .group = g->index});
    }
}

void far_relay_chunk(struct model *m, uint32_t rank, uint32_t epoch, const struct prs_chunk *c)
{
    struct rank *me = &m->ranks[rank];
    const struct prs_schedule *s = &me->s;
    uint32_t row_tile = c->row / PRS_TILE_M, strip = c->step / PRS_STRIP_STEPS;
    uint32_t slot = prs_schedule_slot(s, rank, rank);
    struct prs_piece_group g = prs_schedule_group(s, row_tile, strip);
    if (watch_count(model_arrivals(me, epoch, prs_schedule_arrival(s, slot, row_tile, strip))) !=
            prs_schedule_arrivals(s, row_tile, strip) ||
        !is_last(me, prs_schedule_group_counter(s, 0, g.index), g.pieces))
        return;
    for (uint32_t i = 1; i < s->place.nodes; i++) {
        uint32_t node = (s->place.node + i) % s->place.nodes, peer = node * s->place.local_ranks + s->place.local_rank;
        put_strips(m, rank, epoch, &g, peer);
        signal(me, &m->ranks[peer], peer,
               prs_schedule_group_word(s, prs_index_after(s->place.node, node, s->place.nodes), g.index), epoch,
               g.index);
    }
}

/* ---- what is spread inside the node ---- */
bool far_forward_chunks(struct cluster *c, uint32_t epoch, uint32_t at)
{
    struct rank *me = &c->model->ranks[c->rank];
    const struct prs_schedule *s = &me->s;
    for (; at < s->place.nodes * prs_schedule_chunks(s); at = model_claim(me, PRS_CLAIM_CHUNKS)) {
        uint32_t i = at - prs_schedule_chunks(s);
        struct prs_chunk k;
        uint32_t block = prs_schedule_forward(s, i, &k), tile = k.row / PRS_TILE_M, strip = k.step / PRS_STRIP_STEPS;
        uint32_t word =
            prs_schedule_group_word(s, prs_index_after(block / s->place.local_ranks, s->place.node, s->place.nodes),
                                    prs_schedule_group(s, tile, strip).index);
        uint32_t row = k.row / PRS_PUSH_ROWS, here = prs_schedule_slot(s, block, c->rank);
        if (!watch_wait(&c->model->watch, &me->signals[word], epoch, "rows of A, signal", c->rank, word, block))
            return false;
        for (uint32_t p = 1; p < s->place.local_ranks; p++) {
            uint32_t peer = s->place.node * s->place.local_ranks + (s->place.local_rank + p) % s->place.local_ranks,
                     slot = prs_schedule_slot(s, block, peer);
            struct rank *to = &c->model->ranks[peer];
            to->staging[epoch & 1][(slot * s->pairs * 4 + row) * s->k_steps + k.step] =
                me->staging[epoch & 1][(here * s->pairs * 4 + row) * s->k_steps + k.step];
            watch_add(model_arrivals(to, epoch, prs_schedule_arrival(s, slot, tile, strip)));
        }
        watch_add(model_arrivals(me, epoch, prs_schedule_arrival(s, here, tile, strip)));
        watch_dawdle(&c->random[2]);
    }
    return true;
}

/* A row tile travels with its first row; the other rows are only counted. */
bool far_forward_rows(struct cluster *c, uint32_t epoch)
{
    struct rank *me = &c->model->ranks[c->rank];
    const struct prs_schedule *s = &me->s;
    uint32_t words = s->columns * HALVES;
    for (uint32_t i; (i = model_claim(me, PRS_CLAIM_ROWS)) < (s->place.nodes - 1) * s->block_rows;) {
        uint32_t row, block = prs_schedule_forward_row(s, i, &row), tile = row / PRS_TILE_M;
        uint32_t word = prs_schedule_row_word(
            s, prs_index_after(block / s->place.local_ranks, s->place.node, s->place.nodes), tile);
        uint32_t where = block * prs_schedule_tiles(s) * HALVES + tile * words;
        if (!watch_wait(&c->model->watch, &me->signals[word], epoch, "reduced tiles, signal", c->rank, word, block))
            return false;
        for (uint32_t p = 1; p < s->place.local_ranks; p++) {
            uint32_t peer = s->place.node * s->place.local_ranks + (s->place.local_rank + p) % s->place.local_ranks;
            struct rank *to = &c->model->ranks[peer];
            if (row % PRS_TILE_M == 0)
                memcpy(&to->result[where], &me->result[where], words * sizeof(uint32_t));
            watch_add(model_done(
                to, epoch, prs_index_after(s->place.local_rank, peer % s->place.local_ranks, s->place.local_ranks)));
        }
    }
    return true;
}

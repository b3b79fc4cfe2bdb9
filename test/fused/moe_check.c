/* SPDX-License-Identifier: Apache-2.0 */
/* A launch's input, and the output that it must have: by definition, not from the kernels' tables. */
#include <string.h>

#include "test/fused/moe_model.h"

static uint32_t mix(uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t x = a * 2654435761u ^ b * 40503u ^ c * 69069u;
    x ^= x >> 15, x *= 2246822519u, x ^= x >> 13;
    return x;
}

static uint32_t count_of(uint32_t epoch, uint32_t rank)
{
    uint32_t x = mix(epoch, rank, 1);
    return x % 5 == 0 ? 0 : x % 5 == 1 ? TOKENS : x / 8 % (TOKENS + 1);
}

static int64_t choice_of(uint32_t epoch, uint32_t rank, uint32_t token, uint32_t slot)
{
    uint32_t x = mix(epoch, rank * 1000 + token, slot + 2) / 4;
    switch (mix(epoch, 5, 5) % 6) {
    case 0:
        return mix(epoch, 6, 6) % EXPERTS; /* all choices of all tokens are the same expert, several times per token */
    case 1:
        return x % (EXPERTS / 2) * 2;
    case 2:
        return x % 3 == 0 ? -1 : (int64_t)(x / 3 % EXPERTS);
    case 3:
        return slot == 0 ? 0 : x % EXPERTS;
    case 4:
        return x % (EXPERTS / 2) + epoch % 2 * (EXPERTS / 2); /* half of the ranks get nothing */
    default:
        return x % EXPERTS;
    }
}

static uint32_t value_of(uint32_t epoch, uint32_t rank, uint32_t token)
{
    return mix(epoch, rank * 1000 + token, 99);
}

uint32_t model_product(uint32_t row, uint32_t expert, uint32_t column)
{
    return row ^ mix(expert, column, 3);
}

uint32_t model_weight_bits(uint32_t token, uint32_t slot)
{
    return token * 64 + slot;
}

void model_make_input(struct rank *me, uint32_t epoch)
{
    me->count = count_of(epoch, me->r.place.rank);
    for (uint32_t t = 0; t < me->count; t++) {
        me->tokens[t] = value_of(epoch, me->r.place.rank, t);
        for (uint32_t j = 0; j < CHOICES; j++)
            me->chosen[t][j] =
                prs_route_expert(prs_route_place(&me->r, NULL, choice_of(epoch, me->r.place.rank, t, j), t));
    }
}

/* Row `row` is choice `slot` of a token, multiplied by the expert. */
static void check_row(struct model *m, uint32_t rank, uint32_t epoch, uint32_t row, const struct prs_moe_row *from,
                      uint32_t expert)
{
    struct rank *me = &m->ranks[rank];
    struct prs_moe_row want = *from;
    uint32_t bits = model_weight_bits(from->token, from->slot);
    memcpy(&want.weight, &bits, sizeof(bits));
    if (memcmp(&want, &me->map[row], sizeof(want)) != 0)
        watch_fail(&m->watch, "map of row", rank, row, from->rank, from->token, me->map[row].token);
    for (uint32_t c = 0; c < COLUMNS; c++) {
        uint32_t product = model_product(value_of(epoch, from->rank, from->token), expert, c);
        if (me->out[row][c] != product)
            watch_fail(&m->watch, "result of row", rank, row, from->rank, product, me->out[row][c]);
    }
}

/* Tokens of a rank that have a choice among these experts. */
static uint32_t tokens_for(uint32_t epoch, uint32_t rank, uint32_t first, uint32_t experts)
{
    uint32_t tokens = 0;
    for (uint32_t t = 0; t < count_of(epoch, rank); t++) {
        bool any = false;
        for (uint32_t j = 0; j < CHOICES; j++) {
            int64_t e = choice_of(epoch, rank, t, j);
            any |= e >= (int64_t)first && e < (int64_t)(first + experts);
        }
        tokens += any;
    }
    return tokens;
}

/* To each rank of another node one put of mail, to each counterpart one of notes, and each token once to its node. */
static void add_traffic(struct rank *me, uint32_t epoch)
{
    const struct prs_route *r = &me->r;
    for (uint32_t peer = 0; peer < WORLD; peer++) {
        if (peer / r->place.local_ranks == r->place.node)
            continue;
        me->puts++, me->signals++;
        me->words += prs_route_entry_at(r, 0, 0, tokens_for(epoch, r->place.rank, peer * LOCAL, LOCAL)) / 4;
    }
    for (uint32_t node = 0; node < r->place.nodes; node++) {
        uint32_t tokens =
            tokens_for(epoch, r->place.rank, node * r->place.local_ranks * LOCAL, r->place.local_ranks * LOCAL);
        if (node == r->place.node)
            continue;
        me->puts += 1 + prs_ceil_div(tokens, r->put);
        me->signals += prs_ceil_div(tokens, r->group);
        me->words += 4 + (tokens * r->place.local_ranks + 3) / 4 * 4 + tokens;
    }
}

/* The i-th sender of an expert's rows: node by node, beginning with this rank's node, and on each node beginning with
 * this rank's local rank. */
static uint32_t sender(const struct prs_route *r, uint32_t i)
{
    return (r->place.node + i / r->place.local_ranks) % r->place.nodes * r->place.local_ranks +
           (r->place.rank + i) % r->place.local_ranks;
}

/* Items and blocks of rows of this node come before all others. */
static void check_order(struct model *m, uint32_t rank, uint32_t epoch)
{
    struct rank *me = &m->ranks[rank];
    bool far = false;
    for (uint32_t i = 0; i < me->item_count; i++) {
        bool crosses = prs_route_node_of(&me->r, me->deliveries[i]->peer) != 0;
        if (far && !crosses)
            watch_fail(&m->watch, "delivery after one of another node", rank, i, rank, epoch, me->deliveries[i]->at);
        far = crosses;
    }
    for (uint32_t e = 0; e < LOCAL && me->r.place.nodes > 1; e++) {
        const struct prs_moe_expert_rows *x = &me->experts[e];
        uint32_t near = 0, want;
        while (near < x->rows && me->map[x->first_row + near].rank / me->r.place.local_ranks == me->r.place.node)
            near++;
        want = near == x->rows ? (near + PRS_TILE_M - 1) / PRS_TILE_M : near / PRS_TILE_M;
        if (e < LOCAL / 2) /* the first half of the experts has no first pass */
            want = 0;
        if (me->near[e] != want)
            watch_fail(&m->watch, "blocks of the first pass", rank, e, rank, want, me->near[e]);
    }
}

void model_check(struct model *m, uint32_t rank, uint32_t epoch)
{
    struct rank *me = &m->ranks[rank];
    uint32_t row = 0, dropped = 0;
    for (uint32_t e = rank * LOCAL; e < (rank + 1) * LOCAL; e++) {
        const struct prs_moe_expert_rows *x = &me->experts[e % LOCAL];
        uint32_t first = row = prs_ceil_div(row, PRS_TILE_M) * PRS_TILE_M, capacity = me->r.blocks * PRS_TILE_M, kept;
        for (uint32_t p = 0; p < WORLD; p++) {
            uint32_t from = sender(&me->r, p);
            for (uint32_t i = 0; i < count_of(epoch, from) * CHOICES; i++)
                if (choice_of(epoch, from, i / CHOICES, i % CHOICES) == (int64_t)e && row++ < capacity)
                    check_row(m, rank, epoch, row - 1, &(struct prs_moe_row){from, i / CHOICES, i % CHOICES, 0}, e);
        }
        kept = first >= capacity ? 0 : (row < capacity ? row : capacity) - first;
        dropped += row - first - kept;
        if (x->rows != kept || (kept != 0 && x->first_row != first))
            watch_fail(&m->watch, "rows of expert", rank, e, rank, kept, x->rows);
    }
    if (me->dropped != dropped)
        watch_fail(&m->watch, "dropped rows", rank, epoch, rank, dropped, me->dropped);
    for (row = me->r.blocks * PRS_TILE_M; row < ROWS; row++)
        if (memcmp(&me->map[row], &(struct prs_moe_row){0}, sizeof(me->map[row])) != 0)
            watch_fail(&m->watch, "row without room", rank, row, me->map[row].rank, 0, me->map[row].token);
    check_order(m, rank, epoch);
    me->drops += dropped != 0;
    add_traffic(me, epoch);
    if (me->nic.puts != me->puts || me->nic.signals != me->signals || me->nic.words != me->words)
        watch_fail(&m->watch, "words put so far in epoch", rank, epoch, rank, (uint32_t)me->words,
                   (uint32_t)me->nic.words);
    memset(me->out, 0xff, sizeof(me->out));
    memset(me->rows, 0xff, sizeof(me->rows));
}

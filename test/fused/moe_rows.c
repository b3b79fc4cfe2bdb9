/* SPDX-License-Identifier: Apache-2.0 */
/* Sends and multiplies rows like fused/moe/rows.cuh and engine.cuh. */
#include "test/fused/moe_model.h"

/* ---- warp 3 ---- */
/* Called when a row for the node at distance n is in the slot from which it is put. */
static void relay_row_out(struct cta *c, uint32_t epoch, uint32_t n, uint32_t row)
{
    struct rank *me = &c->model->ranks[c->rank];
    const struct prs_route *r = &me->r;
    uint32_t all = me->relayed_count[n], first = row / r->put * r->put, group = row / r->group;
    uint32_t rows = prs_route_piece_rows(row, r->put, all);
    uint32_t puts = prs_ceil_div(prs_route_piece_rows(row, r->group, all), r->put);
    uint32_t peer = prs_place_counterpart(&r->place, n), from = prs_distance_back(n, r->place.nodes);
    struct rank *to = &c->model->ranks[peer];
    /* MUTANT(model moe) a put waits for all its rows: s/rows/1/ */
    if (watch_count(&me->counters[prs_route_put_counter(r, n, row)]) != rows)
        return;
    /* MUTANT(model moe) counters begin anew: delete */
    __atomic_store_n(&me->counters[prs_route_put_counter(r, n, row)], 0, __ATOMIC_RELAXED);
    nic_post(&me->nic, &(struct nic_command){.to = &to->relay[prs_route_relay_at(r, 0, from, first) / 4],
                                             .from = &me->relay[prs_route_relay_at(r, 1, n, first) / 4],
                                             .words = rows,
                                             .peer = peer,
                                             .group = group});
    /* MUTANT(model moe) a signal waits for all puts of its group: s/puts/1/ */
    if (watch_count(&me->counters[prs_route_group_counter(r, n, row)]) != puts)
        return;
    __atomic_store_n(&me->counters[prs_route_group_counter(r, n, row)], 0, __ATOMIC_RELAXED);
    /* MUTANT(model moe) a signal stays behind its puts: s/group}/group + 1000}/ */
    nic_post(&me->nic, &(struct nic_command){.to = &to->signal[prs_route_relay_word(r, from, group)],
                                             .value = epoch,
                                             .peer = peer,
                                             .group = group});
}

struct outgoing {
    uint32_t n, row, value;
};

static void land(struct rank *me, const struct outgoing *x)
{
    me->relay[prs_route_relay_at(&me->r, 1, x->n, x->row) / 4] = x->value;
}

/* A row arrives at once, or only when the next one has been fetched. */
static void tell(struct cta *c, uint32_t epoch, const struct outgoing *last)
{
    if (last->n == 0)
        return;
    /* MUTANT(model moe) a row is counted when it has landed: delete */
    land(&c->model->ranks[c->rank], last);
    relay_row_out(c, epoch, last->n, last->row);
}

static void relay_out(struct cta *c, uint32_t epoch)
{
    struct rank *me = &c->model->ranks[c->rank];
    struct outgoing last = {0, 0, 0};
    uint32_t others = me->r.place.nodes - 1;
    for (uint32_t i; (i = model_claim(&me->relays)) < TOKENS * others;) {
        uint32_t n = 1 + i % others, row = i / others;
        if (row >= me->relayed_count[n])
            continue;
        watch_dawdle(&c->random);
        tell(c, epoch, &last);
        last = (struct outgoing){n, row, me->tokens[me->relayed[n][row]]};
        if (c->random >> 16 & 1)
            land(me, &last);
    }
    tell(c, epoch, &last);
}

/* Sends a row to all ranks of this node that need it, this rank included. flags: raised when it has landed. */
static void give_row(struct cta *c, uint32_t epoch, uint32_t n, uint32_t row, bool flags)
{
    struct rank *me = &c->model->ranks[c->rank];
    const struct prs_route *r = &me->r;
    const int32_t *note =
        (const int32_t *)(me->messages + prs_route_forwarding_at(r, epoch & 1, n) + 16) + row * r->place.local_ranks;
    for (uint32_t seat = 0; seat < r->place.local_ranks; seat++) {
        uint32_t p = prs_route_local(r, seat), at = (uint32_t)note[seat];
        /* MUTANT(model moe) the sender is far from each seat as it says:
         * s/prs_place_after(&r->place, p)/r->place.rank/ */
        uint32_t sender =
            (prs_place_counterpart(&r->place, n) + r->place.world - prs_place_after(&r->place, p)) % r->place.world;
        struct rank *to = &c->model->ranks[prs_place_after(&r->place, p)];
        if (note[seat] == PRS_ROUTE_NOWHERE)
            continue;
        if (flags)
            watch_raise(&to->staging_flags[prs_route_row_flag(r, sender, at)], epoch);
        else
            to->staging[prs_route_staging_at(r, sender, at) / 4] = me->relay[prs_route_relay_at(r, 0, n, row) / 4];
    }
}

/* Rows that counterparts put here: the next one to forward, all nodes in turn, and the last one, as long as it has not
 * been signalled. */
struct incoming {
    uint32_t at, end;
    uint32_t n, row;
    uint32_t last_n, last_row; /* last_n 0: all rows have been signalled */
};

static uint32_t rows_from(const struct rank *me, uint32_t epoch, uint32_t n)
{
    return *(const uint32_t *)(me->messages + prs_route_forwarding_at(&me->r, epoch & 1, n));
}

static void find_incoming(struct rank *me, uint32_t epoch, struct incoming *in)
{
    for (; in->at < in->end; in->at = model_claim(&me->forwarded)) {
        in->n = 1 + in->at % (me->r.place.nodes - 1), in->row = in->at / (me->r.place.nodes - 1);
        if (in->row < rows_from(me, epoch, in->n))
            return;
    }
}

static void flag_incoming(struct cta *c, uint32_t epoch, struct incoming *in)
{
    if (in->last_n != 0)
        give_row(c, epoch, in->last_n, in->last_row, true);
    in->last_n = 0;
}

/* Forwards one row if it has arrived; with `waits`, waits for it. Returns whether a row was forwarded. */
static bool hand_on(struct cta *c, uint32_t epoch, struct incoming *in, bool waits)
{
    struct rank *me = &c->model->ranks[c->rank];
    const struct prs_route *r = &me->r;
    uint32_t word = prs_route_relay_word(r, in->n, in->row / r->group);
    if (in->at >= in->end || watch_load(&me->signal[word]) != epoch) {
        /* MUTANT(model moe) nobody waits for a row while the next one is awaited: delete */
        flag_incoming(c, epoch, in);
        if (!waits || in->at >= in->end)
            return false;
        if (in->last_n != 0)
            watch_fail(&c->model->watch, "row that is not told of while waiting", c->rank, in->last_row, c->rank, 0, 0);
    }
    /* MUTANT(model moe) another node's rows are awaited: s/(!/(0 && !/ */
    /* MUTANT(model moe) a group's word holds the epoch: s/watch_wait_exactly/watch_wait/ */
    if (!watch_wait_exactly(&c->model->watch, &me->signal[word], epoch, "another node's rows", c->rank, word,
                            prs_place_counterpart(&r->place, in->n)))
        return false;
    watch_dawdle(&c->random);
    /* MUTANT(model moe) each row that is handed on is told of: delete */
    flag_incoming(c, epoch, in);
    /* MUTANT(model moe) a row is told of when it has been handed on: delete */
    give_row(c, epoch, in->n, in->row, false);
    in->last_n = in->n, in->last_row = in->row;
    in->at = model_claim(&me->forwarded);
    find_incoming(me, epoch, in);
    return true;
}

/* Sends own rows to this node, and between two of them forwards a row that came. */
static void push_rows(struct cta *c, uint32_t epoch, struct incoming *in)
{
    struct rank *me = &c->model->ranks[c->rank];
    const struct prs_route *r = &me->r;
    uint32_t others = r->place.local_ranks - 1;
    for (uint32_t i; (i = model_claim(&me->pushed)) < TOKENS * others;) {
        uint32_t p = prs_route_local(r, (r->place.local_rank + 1 + i % others) % r->place.local_ranks),
                 row = i / others;
        uint32_t from = prs_distance_back(p, r->place.world);
        struct rank *to = &c->model->ranks[prs_place_after(&r->place, p)];
        if (row >= me->sent_count[p])
            continue;
        /* MUTANT(model moe) rows are handed on between own ones: s/(hand_on/(0 && hand_on/ */
        while (hand_on(c, epoch, in, false) && __atomic_fetch_add(&me->early, 1, __ATOMIC_RELAXED) % 2 != 0)
            ;
        watch_dawdle(&c->random);
        to->staging[prs_route_staging_at(r, from, row) / 4] = me->tokens[me->sent[p][row]];
        watch_raise(&to->staging_flags[prs_route_row_flag(r, from, row)], epoch);
    }
}

bool model_send_rows(struct cta *c, uint32_t epoch)
{
    struct rank *me = &c->model->ranks[c->rank];
    struct incoming in = {.at = model_claim(&me->forwarded)};
    /* MUTANT(model moe) own rows go before others' are awaited: delete */
    if (me->r.place.nodes > 1)
        relay_out(c, epoch);
    for (uint32_t n = 1; n < me->r.place.nodes; n++)
        in.end = rows_from(me, epoch, n) > in.end ? rows_from(me, epoch, n) : in.end;
    /* MUTANT(model moe) the rows of all nodes are handed on: delete */
    in.end *= me->r.place.nodes - 1;
    /* MUTANT(model moe) own rows go before others' are awaited:
     * s/&in)/&in); while (hand_on(c, epoch, &in, true)) {} if (me->r.place.nodes > 1) relay_out(c, epoch)/ */
    find_incoming(me, epoch, &in);
    if (me->r.place.local_ranks > 1)
        push_rows(c, epoch, &in);
    /* MUTANT(model moe) a rank without room still hands rows on: s/(hand_on/(me->dropped == 0 && hand_on/ */
    while (hand_on(c, epoch, &in, true))
        ;
    /* MUTANT(model moe) a rank without room still hands rows on: s/in.at >= in.end/true/ */
    return in.at >= in.end;
}

/* ---- warp 2 ---- */
static void put_in_place(struct rank *me, const struct prs_route_delivery *delivery, uint32_t value)
{
    for (uint32_t u = 0; u < delivery->targets; u++)
        me->rows[delivery->row[u]] = value;
}

static void count_delivery(struct rank *me, const struct prs_route_delivery **last)
{
    for (uint32_t u = 0; *last && u < (*last)->targets; u++)
        watch_add(&me->ready[(*last)->row[u] / PRS_TILE_M]);
    *last = NULL;
}

/* A delivery is signalled when the next one has been fetched; between nodes also before a wait for the next one. */
bool model_place(struct cta *c, uint32_t epoch)
{
    struct rank *me = &c->model->ranks[c->rank];
    const struct prs_route_delivery *last = NULL;
    for (uint32_t i; (i = model_claim(&me->lists)) < me->item_count;) {
        const struct prs_route_delivery *delivery = me->deliveries[i];
        uint32_t value;
        if (delivery->peer == 0) {
            value = me->tokens[delivery->at];
        } else {
            uint32_t at = prs_route_row_flag(&me->r, delivery->peer, delivery->at);
            if (me->r.place.nodes > 1 && watch_load(&me->staging_flags[at]) != epoch) {
                /* MUTANT(model moe) no block waits for a row while the next one is awaited: delete */
                count_delivery(me, &last);
                if (last)
                    watch_fail(&c->model->watch, "row that is not told of while waiting", c->rank, i, c->rank, 0, 0);
            }
            /* MUTANT(model moe) a row's flag holds the epoch: s/watch_wait_exactly/watch_wait/ */
            if (!watch_wait_exactly(&c->model->watch, &me->staging_flags[at], epoch, "a token's row", c->rank, at,
                                    prs_place_after(&me->r.place, delivery->peer)))
                return false;
            value = me->staging[prs_route_staging_at(&me->r, delivery->peer, delivery->at) / 4];
        }
        watch_dawdle(&c->random);
        count_delivery(me, &last);
        put_in_place(me, delivery, value);
        last = delivery;
    }
    count_delivery(me, &last);
    return true;
}

/* ---- warps 0, 1 and 4 to 11 ---- */
bool model_multiply(struct cta *c, uint32_t epoch)
{
    struct rank *me = &c->model->ranks[c->rank];
    struct prs_route_cursor cursor = {0};
    (void)epoch;
    for (;;) { /* units as they come */
        struct prs_route_unit u;
        uint32_t unit = model_claim(&me->units);
        if (unit >= me->blocks * COLUMNS)
            return true;
        prs_route_unit(&me->r, me->experts, me->r.place.nodes > 1 ? me->near : NULL, &cursor, unit, &u);
        if (!watch_wait(&c->model->watch, &me->ready[u.block], u.rows, "block", c->rank, u.block, c->rank))
            return false;
        for (uint32_t i = u.block * PRS_TILE_M; i < u.block * PRS_TILE_M + u.rows; i++)
            me->out[i][u.column] = model_product(me->rows[i], me->r.place.rank * LOCAL + u.expert, u.column);
    }
}

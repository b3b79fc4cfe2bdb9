/* SPDX-License-Identifier: Apache-2.0 */
/* The routing kernel, as fused/moe/route.cuh has it. */
#include <string.h>

#include "test/fused/moe_model.h"

/* Numbers each choice of the chunks that a CTA has claimed among those of its chunk and the same expert. */
struct numbers {
    uint16_t index[TOKENS][CHOICES], lead[TOKENS][CHOICES], relay[TOKENS][CHOICES];
};

/* first_*: positions of a chunk. Leads have the order in which the owner gets them, relay leads that in which its node
 * gets them. */
struct places {
    uint32_t first_index[EXPERTS], first_lead[EXPERTS], first_relay[EXPERTS];
};

/* ---- count and send ---- */
static void chunk_of(const struct rank *me, uint32_t chunk, uint32_t *from, uint32_t *to)
{
    uint32_t each = prs_route_chunk_tokens(&me->r, me->count);
    *from = chunk * each < me->count ? chunk * each : me->count;
    *to = *from + each < me->count ? *from + each : me->count;
}

static void count_choices(struct rank *me, uint32_t chunk, struct numbers *n)
{
    uint32_t from, to;
    chunk_of(me, chunk, &from, &to);
    memset(me->chunks[chunk], 0, sizeof(me->chunks[chunk]));
    for (uint32_t t = from; t < to; t++)
        for (uint32_t j = 0; j < CHOICES; j++) {
            uint32_t code = prs_route_code(&me->r, me->chosen[t], j), *counts;
            if (code == PRS_ROUTE_NONE)
                continue;
            counts = me->chunks[chunk][code & PRS_ROUTE_NONE];
            n->index[t][j] = (uint16_t)counts[0]++;
            if (code & PRS_ROUTE_LEAD)
                n->lead[t][j] = (uint16_t)counts[1]++;
            if (code & PRS_ROUTE_RELAY)
                n->relay[t][j] = (uint16_t)counts[2]++;
        }
}

/* Writes into the peer's inbox, or, for another node, into the message that is put there. */
static uint8_t *message_to(struct model *m, struct rank *me, uint32_t bank, uint32_t p)
{
    const struct prs_route *r = &me->r;
    if (prs_route_node_of(r, p) != 0)
        return me->messages + prs_route_outgoing_at(r, p);
    return m->ranks[prs_place_after(&r->place, p)].messages +
           prs_route_counts_at(r, bank, prs_distance_back(p, r->place.world));
}

static uint32_t chunks_before(const struct rank *me, uint32_t expert, uint32_t what, uint32_t chunks)
{
    uint32_t sum = 0;
    for (uint32_t c = 0; c < chunks; c++)
        sum += me->chunks[c][expert][what];
    return sum;
}

/* With the first chunk the counts are sent. */
static void place_leads(struct model *m, struct rank *me, uint32_t bank, uint32_t chunk, struct places *at)
{
    const struct prs_route *r = &me->r;
    for (uint32_t owner = 0; owner < WORLD; owner++) {
        uint32_t p = (owner + WORLD - r->place.rank) % WORLD, leads = 0;
        uint32_t *counts = (uint32_t *)message_to(m, me, bank, p);
        for (uint32_t e = owner * LOCAL; e < (owner + 1) * LOCAL; e++) {
            at->first_index[e] = chunks_before(me, e, 0, chunk);
            at->first_lead[e] = leads + chunks_before(me, e, 1, chunk);
            leads += chunks_before(me, e, 1, CHUNKS);
            if (chunk == 0)
                counts[e % LOCAL * 2] = chunks_before(me, e, 0, CHUNKS),
                                   counts[e % LOCAL * 2 + 1] = chunks_before(me, e, 1, CHUNKS);
        }
        if (chunk == 0)
            me->sent_count[p] = leads;
    }
}

static void place_relay_leads(struct rank *me, uint32_t chunk, struct places *at)
{
    const struct prs_route *r = &me->r;
    uint32_t expert_at[EXPERTS];
    for (uint32_t e = 0; e < EXPERTS; e++)
        expert_at[prs_route_relay_order(r, e)] = e;
    for (uint32_t b = 1; b < r->place.nodes; b++) {
        uint32_t first = (r->place.node + b) % r->place.nodes * r->place.local_ranks * LOCAL, leads = 0;
        for (uint32_t i = first; i < first + r->place.local_ranks * LOCAL; i++) {
            at->first_relay[expert_at[i]] = leads + chunks_before(me, expert_at[i], 2, chunk);
            leads += chunks_before(me, expert_at[i], 2, CHUNKS);
        }
        if (chunk != 0)
            continue;
        me->relayed_count[b] = leads;
        *(uint32_t *)(me->messages + prs_route_forwarding_at(r, 2, b)) = leads;
    }
}

static void send_entry(struct model *m, struct rank *me, uint32_t bank, uint32_t token, uint32_t slot,
                       const struct places *at, const struct numbers *n)
{
    const struct prs_route *r = &me->r;
    uint32_t expert = me->chosen[token][slot], p = (expert / LOCAL + WORLD - r->place.rank) % WORLD, targets = 0;
    uint32_t place = at->first_lead[expert] + n->lead[token][slot];
    struct prs_route_entry *head =
        (struct prs_route_entry *)(message_to(m, me, bank, p) + prs_route_entry_at(r, 0, 0, place));
    struct prs_route_target *use = (struct prs_route_target *)(head + 1);
    for (uint32_t j = prs_route_next_target(r, me->chosen[token], slot, CHOICES); j < CHOICES;
         j = prs_route_next_target(r, me->chosen[token], slot, j)) {
        uint32_t e = me->chosen[token][j], bits = model_weight_bits(token, j);
        struct prs_route_target u = {e % LOCAL, j, at->first_index[e] + n->index[token][j], 0};
        memcpy(&u.weight, &bits, sizeof(bits));
        use[targets++] = u;
    }
    head->token = token, head->targets = targets;
    me->sent[p][place] = token;
}

/* The position of the token at every local rank of the node. */
static void write_forwarding(struct rank *me, uint32_t token, uint32_t slot, const struct places *at,
                             const struct numbers *n)
{
    const struct prs_route *r = &me->r;
    uint32_t expert = me->chosen[token][slot], node = expert / LOCAL / r->place.local_ranks;
    uint32_t b = (node + r->place.nodes - r->place.node) % r->place.nodes,
             row = at->first_relay[expert] + n->relay[token][slot];
    int32_t *note = (int32_t *)(me->messages + prs_route_forwarding_at(r, 2, b) + 16) + row * r->place.local_ranks;
    me->relayed[b][row] = token;
    /* MUTANT(model moe) notes name every local rank: s/local_ranks/local_ranks - 1/ */
    for (uint32_t seat = 0; seat < r->place.local_ranks; seat++)
        note[seat] = PRS_ROUTE_NOWHERE;
    for (uint32_t j = 0; j < CHOICES; j++) {
        uint32_t code = prs_route_code(r, me->chosen[token], j), e = code & PRS_ROUTE_NONE;
        if (code != PRS_ROUTE_NONE && (code & PRS_ROUTE_LEAD) != 0 && e / LOCAL / r->place.local_ranks == node)
            note[e / LOCAL % r->place.local_ranks] = (int32_t)(at->first_lead[e] + n->lead[token][j]);
    }
}

static void send_chunk(struct cta *c, uint32_t bank, uint32_t chunk, const struct numbers *n)
{
    struct rank *me = &c->model->ranks[c->rank];
    struct places at;
    uint32_t from, to;
    place_leads(c->model, me, bank, chunk, &at);
    place_relay_leads(me, chunk, &at);
    chunk_of(me, chunk, &from, &to);
    for (uint32_t t = from; t < to; t++)
        for (uint32_t j = 0; j < CHOICES; j++) {
            uint32_t code = prs_route_code(&me->r, me->chosen[t], j);
            if (code == PRS_ROUTE_NONE)
                continue;
            if ((code & PRS_ROUTE_LEAD) != 0)
                send_entry(c->model, me, bank, t, j, &at, n);
            if ((code & PRS_ROUTE_RELAY) != 0)
                write_forwarding(me, t, j, &at, n);
        }
}

static void put(struct rank *me, struct rank *to, uint64_t from_at, uint64_t to_at, uint64_t bytes, uint32_t group)
{
    nic_post(&me->nic, &(struct nic_command){.to = (uint32_t *)(to->messages + to_at),
                                             .from = (const uint32_t *)(me->messages + from_at),
                                             .words = (uint32_t)(bytes / 4),
                                             .peer = to->r.place.rank,
                                             .group = group});
}

/* For each rank of other nodes one put and one signal, and the counterparts' notes. */
static void put_messages(struct model *m, struct rank *me, uint32_t epoch)
{
    const struct prs_route *r = &me->r;
    for (uint32_t p = 1; p < WORLD; p++) {
        uint32_t b = prs_route_node_of(r, p), from = prs_distance_back(p, r->place.world), bank = epoch & 1;
        struct rank *peer = &m->ranks[prs_place_after(&r->place, p)];
        if (b == 0)
            continue;
        put(me, peer, prs_route_outgoing_at(r, p), prs_route_counts_at(r, bank, from),
            prs_route_entry_at(r, 0, 0, me->sent_count[p]), p);
        if (peer->r.place.rank == prs_place_counterpart(&r->place, b))
            put(me, peer, prs_route_forwarding_at(r, 2, b),
                prs_route_forwarding_at(r, bank, prs_distance_back(b, r->place.nodes)),
                16 + (me->relayed_count[b] * r->place.local_ranks * 4ull + 15) / 16 * 16, p);
        nic_post(&me->nic, &(struct nic_command){
                               .to = &peer->signal[from], .value = epoch, .peer = peer->r.place.rank, .group = p});
    }
}

/* ---- receive ---- */
struct tables {
    uint32_t row_base[WORLD][LOCAL], lead_base[WORLD][LOCAL], lead_first[WORLD][LOCAL], sent[WORLD];
    uint32_t rows[LOCAL], near[LOCAL], first_block[LOCAL], first_delivery[2][LOCAL], blocks,
        deliveries; /* [1]: of other nodes */
};

static void receive_counts(const struct rank *me, uint32_t bank, struct tables *t)
{
    memset(t, 0, sizeof(*t));
    for (uint32_t e = 0; e < LOCAL; e++) {
        t->first_block[e] = t->blocks;
        for (uint32_t i = 0; i < WORLD; i++) {
            uint32_t p = prs_route_sender(&me->r, i);
            const uint32_t *counts = (const uint32_t *)(me->messages + prs_route_counts_at(&me->r, bank, p));
            t->row_base[p][e] = t->rows[e];
            t->lead_first[p][e] = t->sent[p];
            t->rows[e] += counts[e * 2];
            t->sent[p] += counts[e * 2 + 1];
        }
        /* MUTANT(model moe) the own node's rows end with the first of another's:
         * s/r.place.local_ranks/r.place.local_ranks - 1/ */
        t->near[e] =
            me->r.place.nodes == 1 ? t->rows[e] : t->row_base[prs_route_sender(&me->r, me->r.place.local_ranks)][e];
        t->blocks += prs_ceil_div(t->rows[e], PRS_TILE_M);
    }
    for (uint32_t far = 0; far < 2; far++)
        for (uint32_t e = 0; e < LOCAL; e++) {
            t->first_delivery[far][e] = t->deliveries;
            for (uint32_t i = far ? me->r.place.local_ranks : 0; i < (far ? WORLD : me->r.place.local_ranks); i++) {
                uint32_t p = prs_route_sender(&me->r, i);
                t->lead_base[p][e] = t->deliveries - t->first_delivery[far][e];
                t->deliveries += ((const uint32_t *)(me->messages + prs_route_counts_at(&me->r, bank, p)))[e * 2 + 1];
            }
        }
}

static void receive_entry(struct rank *me, uint32_t bank, const struct tables *t, uint32_t p, uint32_t i)
{
    const struct prs_route_entry *head =
        (const struct prs_route_entry *)(me->messages + prs_route_entry_at(&me->r, bank, p, i));
    const struct prs_route_target *use = (const struct prs_route_target *)(head + 1);
    uint32_t lead = use[0].expert;
    /* MUTANT(model moe) deliveries of other nodes come last: s/prs_route_node_of(&me->r, p) !=// */
    uint32_t first = t->first_delivery[prs_route_node_of(&me->r, p) != 0][lead];
    struct prs_route_delivery *delivery = me->deliveries[first + t->lead_base[p][lead] + i - t->lead_first[p][lead]];
    delivery->peer = p, delivery->at = p == 0 ? head->token : i, delivery->targets = 0;
    for (uint32_t u = 0; u < head->targets; u++) {
        uint32_t e = use[u].expert, row = t->row_base[p][e] + use[u].index;
        struct prs_moe_row x = {(me->r.place.rank + p) % WORLD, head->token, use[u].slot, use[u].weight};
        /* MUTANT(model moe) rows without room are dropped: s/row >= prs_route_kept/0 * prs_route_kept/ */
        if (row >= prs_route_kept(&me->r, t->first_block[e], t->rows[e]))
            continue;
        row += t->first_block[e] * PRS_TILE_M;
        delivery->row[delivery->targets++] = row;
        me->map[row] = x;
    }
}

static bool await_routes(struct cta *c, uint32_t epoch)
{
    struct rank *me = &c->model->ranks[c->rank];
    /* MUTANT(model moe) other nodes' routes are awaited: s/WORLD/2/ */
    for (uint32_t p = 0; p < WORLD; p++) {
        const uint32_t *flag = prs_route_node_of(&me->r, p) != 0 ? &me->signal[p] : &me->message_flags[p];
        if (!watch_wait(&c->model->watch, flag, epoch, "counts of the peer at distance", c->rank, p,
                        prs_place_after(&me->r.place, p)))
            return false;
    }
    return true;
}

static void write_tables(struct rank *me, const struct tables *t)
{
    me->blocks = t->blocks < me->r.blocks ? t->blocks : me->r.blocks;
    me->item_count = t->deliveries;
    me->dropped = 0;
    for (uint32_t e = 0; e < LOCAL; e++) {
        uint32_t kept = prs_route_kept(&me->r, t->first_block[e], t->rows[e]);
        uint32_t block = t->first_block[e] < me->r.blocks ? t->first_block[e] : me->r.blocks;
        me->dropped += t->rows[e] - kept;
        me->experts[e].first_row = block * PRS_TILE_M, me->experts[e].rows = kept;
        me->near[e] = prs_route_near_blocks(&me->r, e, &me->experts[e], t->near[e] < kept ? t->near[e] : kept);
    }
    for (uint32_t b = 0; b < me->blocks; b++)
        __atomic_store_n(&me->ready[b], 0, __ATOMIC_RELAXED);
}

static void receive(struct rank *me, uint32_t bank, uint32_t part)
{
    struct tables t;
    receive_counts(me, bank, &t);
    if (part == 0)
        write_tables(me, &t);
    for (uint32_t p = 0; p < WORLD; p++)
        for (uint32_t i = part; i < t.sent[p]; i += CHUNKS)
            receive_entry(me, bank, &t, p, i);
}

/* The CTA that has sent the last chunk signals all ranks. */
static void signal_ranks(struct cta *c, uint32_t epoch)
{
    struct rank *me = &c->model->ranks[c->rank];
    const struct prs_route *r = &me->r;
    if (watch_count(&me->chunks_sent) != CHUNKS)
        return;
    for (uint32_t p = 0; p < WORLD; p++)
        if (prs_route_node_of(r, p) == 0)
            watch_raise(
                &c->model->ranks[prs_place_after(&r->place, p)].message_flags[prs_distance_back(p, r->place.world)],
                epoch);
    put_messages(c->model, me, epoch);
}

/* Counts all chunks that it can claim, and then sends them. */
static bool send(struct cta *c, uint32_t epoch)
{
    struct rank *me = &c->model->ranks[c->rank];
    struct numbers n;
    bool mine[CHUNKS] = {false}, any = false;
    for (uint32_t chunk; (chunk = model_claim(&me->claimed)) < CHUNKS;) {
        count_choices(me, chunk, &n);
        mine[chunk] = any = true;
        watch_count(&me->counted);
        watch_dawdle(&c->random);
    }
    /* MUTANT(model moe) all chunks are counted before one is sent: s/CHUNKS/1/ */
    if (any && !watch_wait(&c->model->watch, &me->counted, CHUNKS, "counted chunks", c->rank, c->index, c->rank))
        return false;
    for (uint32_t chunk = 0; chunk < CHUNKS; chunk++) {
        if (!mine[chunk])
            continue;
        send_chunk(c, epoch & 1, chunk, &n);
        watch_dawdle(&c->random);
        signal_ranks(c, epoch);
    }
    return true;
}

bool model_route(struct cta *c, uint32_t epoch)
{
    struct rank *me = &c->model->ranks[c->rank];
    if (!send(c, epoch))
        return false;
    for (uint32_t part; (part = model_claim(&me->parts)) < CHUNKS;) {
        if (!await_routes(c, epoch))
            return false;
        receive(me, epoch & 1, part);
    }
    return true;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* The routing kernel turns the router's choices into a plan of which rows are sent to which rank, in one launch of a
 * few CTAs.
 *
 *   count      CTAs claim chunks of tokens, and number the choices of each, expert by expert
 *   send       all chunks are counted, hence the position of each choice is known; receivers get counts and entries
 *   receive    the other ranks' counts are here, hence the position of each row is known; CTAs claim parts of the rows
 *
 * A CTA waits for the counts when it finds no more chunks. Then running CTAs have claimed all chunks, and they count
 * before they wait. So any number of running CTAs is enough, even one. A CTA sends the chunks that it has counted, and
 * reads those again that are no longer in its shared memory.
 *
 * In each launch every rank waits here for every other one. So no rank is in the product of launch e + 1 before all
 * have finished the product of launch e: staging memory needs one bank. Messages are written before that wait. So they
 * may arrive while a slower rank still reads those of the previous launch: they need two banks. They cannot arrive two
 * launches early, because their sender has seen this rank's flag of the launch between. */
#ifndef PERSEUS_FUSED_ROUTE_CUH
#define PERSEUS_FUSED_ROUTE_CUH

#include "fused/core/far.cuh"
#include "fused/moe/count.cuh"

/* ---- send ---- */
/* Tables by expert. FIRST_: counts of all chunks before this one. ALL_: counts of all chunks. ALL_RELAYS is indexed by
 * prs_route_relay_order(). */
enum { FIRST_INDEX = 0, FIRST_LEAD = 1, ALL_ROWS = 2, ALL_LEADS = 3, FIRST_RELAY = 4, ALL_RELAYS = 5 };

PRS_DEVICE void sum_chunks(const struct prs_moe_args &args, const struct route_memory &m,
                           const struct routing_chunk &at)
{
    const struct prs_route *r = &args.route;
    for (uint32_t e = threadIdx.x; e < r->experts; e += PRS_ROUTE_THREADS) {
        uint32_t rows = 0, leads = 0, relays = 0;
#pragma unroll 8
        for (uint32_t chunk = 0; chunk < r->chunks; chunk++) {
            uint64_t all = args.chunks[chunk * r->experts + e];
            if (chunk == at.chunk) {
                m.table[FIRST_INDEX][e] = rows;
                m.table[FIRST_LEAD][e] = leads;
                m.table[FIRST_RELAY][e] = relays;
            }
            rows += (uint32_t)all & 0xffff;
            leads += (uint32_t)all >> 16;
            relays += (uint32_t)(all >> 32);
        }
        m.table[ALL_ROWS][e] = rows;
        m.table[ALL_LEADS][e] = leads;
        m.table[ALL_RELAYS][prs_route_relay_order(r, e)] = relays;
    }
}

/* Where to write the message for the peer at distance p: in the peer's memory, or, if the peer is on another node, in
 * the memory that the put reads. */
PRS_DEVICE uint8_t *message_to(const struct prs_moe_args &args, const struct routing_chunk &at, uint32_t p)
{
    const struct prs_route *r = &args.route;
    if (prs_route_node_of(r, p) != 0)
        return args.messages[0] + prs_route_outgoing_at(r, p);
    return args.messages[prs_route_neighbour(r, p)] +
           prs_route_counts_at(r, at.bank, prs_distance_back(p, r->place.world));
}

/* With chunk 0: sends each peer the counts of its experts. Call it before place_leads() turns ALL_LEADS into prefix
 * sums. */
PRS_DEVICE void send_counts(const struct prs_moe_args &args, const struct route_memory &m,
                            const struct routing_chunk &at)
{
    const struct prs_route *r = &args.route;
    for (uint32_t e = threadIdx.x; e < r->experts; e += PRS_ROUTE_THREADS) {
        uint2 *to = (uint2 *)message_to(args, at, prs_place_distance(&r->place, e / r->experts_per_rank));
        to[e % r->experts_per_rank] = make_uint2(m.table[ALL_ROWS][e], m.table[ALL_LEADS][e]);
    }
}

/* Finds where each expert's leads begin among the entries for its owner, and its relay leads among the rows for its
 * node. */
PRS_DEVICE void place_leads(const struct prs_moe_args &args, const struct route_memory &m,
                            const struct routing_chunk &at)
{
    const struct prs_route *r = &args.route;
    bool writes_totals = at.chunk == 0 && threadIdx.x % 32 == 0;
    for (uint32_t owner = threadIdx.x / 32; owner < r->place.world; owner += PRS_ROUTE_THREADS / 32) {
        uint32_t sent = scan_exclusive(m.table[ALL_LEADS] + owner * r->experts_per_rank, r->experts_per_rank);
        if (writes_totals)
            args.totals->sent[prs_place_distance(&r->place, owner)] = sent;
    }
    for (uint32_t node = threadIdx.x / 32; node < r->place.nodes; node += PRS_ROUTE_THREADS / 32) {
        uint32_t b = prs_distance(r->place.node, node, r->place.nodes);
        uint32_t sent = scan_exclusive(m.table[ALL_RELAYS] + node * r->place.local_ranks * r->experts_per_rank,
                                       r->place.local_ranks * r->experts_per_rank);
        if (!writes_totals)
            continue;
        args.totals->relayed[b] = sent;
        if (b != 0)
            *(uint32_t *)(args.messages[0] + prs_route_forwarding_at(r, 2, b)) = sent;
    }
}

/* The row of a relay lead among all rows for its node. */
PRS_DEVICE uint32_t relay_row(const struct prs_moe_args &args, const struct route_memory &m, uint32_t choice)
{
    uint32_t expert = m.code[choice] & PRS_ROUTE_NONE;
    return m.table[ALL_RELAYS][prs_route_relay_order(&args.route, expert)] + m.table[FIRST_RELAY][expert] +
           m.relay[choice];
}

/* The thread of a relay lead writes the token's row of the forwarding table. */
PRS_DEVICE void write_forwarding(const struct prs_moe_args &args, const struct route_memory &m,
                                 const struct routing_chunk &at, uint32_t choice)
{
    const struct prs_route *r = &args.route;
    uint32_t first = choice / r->choices * r->choices,
             node = (m.code[choice] & PRS_ROUTE_NONE) / r->experts_per_rank / r->place.local_ranks;
    uint32_t b = prs_distance(r->place.node, node, r->place.nodes), row = relay_row(args, m, choice);
    int32_t *places =
        (int32_t *)(args.messages[0] + prs_route_forwarding_at(r, 2, b) + 16) + row * r->place.local_ranks;
    args.far.tokens[b * r->tokens + row] = at.first + choice / r->choices;
    for (uint32_t i = 0; i < r->place.local_ranks; i++)
        places[i] = PRS_ROUTE_NOWHERE;
    for (uint32_t i = first; i < first + r->choices; i++) {
        uint32_t expert = m.code[i] & PRS_ROUTE_NONE;
        if ((m.code[i] & PRS_ROUTE_LEAD) != 0 && expert / r->experts_per_rank / r->place.local_ranks == node)
            places[expert / r->experts_per_rank % r->place.local_ranks] =
                (int32_t)(m.table[ALL_LEADS][expert] + m.table[FIRST_LEAD][expert] + m.lead[i]);
    }
}

/* Writes the entry of one token that is sent. */
PRS_DEVICE void send_entry(const struct prs_moe_args &args, const struct route_memory &m,
                           const struct routing_chunk &at, uint32_t choice)
{
    const struct prs_route *r = &args.route;
    uint32_t local = choice / r->choices, token = at.first + local, lead = choice % r->choices, targets = 0;
    uint32_t expert = m.code[choice] & PRS_ROUTE_NONE, p = prs_place_distance(&r->place, expert / r->experts_per_rank);
    uint32_t place = m.table[ALL_LEADS][expert] + m.table[FIRST_LEAD][expert] + m.lead[choice];
    const uint16_t *codes = m.code + local * r->choices;
    uint4 *to = (uint4 *)(message_to(args, at, p) + prs_route_entry_at(r, 0, 0, place));
    for (uint32_t slot = prs_route_next_target(r, codes, lead, r->choices); slot < r->choices;
         slot = prs_route_next_target(r, codes, lead, slot)) {
        uint32_t e = codes[slot] & PRS_ROUTE_NONE;
        float weight = args.weights[(uint64_t)token * r->choices + slot];
        to[1 + targets++] =
            make_uint4(e % r->experts_per_rank, slot, m.table[FIRST_INDEX][e] + m.index[local * r->choices + slot],
                       __float_as_uint(weight));
    }
    to[0] = make_uint4(token, targets, 0, 0);
    args.sent[(uint64_t)p * r->tokens + place] = token;
}

/* Writes where the result of a choice comes from, if it comes from another rank: that rank's sum of this token's rows
 * comes with the lead; the sum of all ranks of another node comes with the relay lead. receive_entry() writes the
 * sources that are rows of this rank. */
PRS_DEVICE void write_source(const struct prs_moe_args &args, const struct route_memory &m,
                             const struct routing_chunk &at, uint32_t choice)
{
    const struct prs_route *r = &args.route;
    uint32_t code = m.code[choice], expert = code & PRS_ROUTE_NONE, peer = PRS_ROUTE_NO_SOURCE, place = 0;
    if (expert != PRS_ROUTE_NONE) {
        uint32_t p = prs_place_distance(&r->place, expert / r->experts_per_rank), b = prs_route_node_of(r, p);
        if (p == 0)
            return;
        if (b == 0 && (code & PRS_ROUTE_LEAD) != 0)
            peer = p, place = m.table[ALL_LEADS][expert] + m.table[FIRST_LEAD][expert] + m.lead[choice];
        if (b != 0 && (code & PRS_ROUTE_RELAY) != 0)
            peer = prs_place_distance(&r->place, prs_place_counterpart(&r->place, b)),
            place = relay_row(args, m, choice);
    }
    *(uint4 *)&args.sources[(uint64_t)at.first * r->choices + choice] =
        make_uint4(peer, place, __float_as_uint(1.0f), 0);
}

/* Sends the messages for ranks of other nodes, each by one put and one signal, and the forwarding tables for
 * counterparts. */
PRS_DEVICE_OUTLINED void put_messages(const struct prs_moe_args &args, uint32_t epoch)
{
    const struct prs_route *r = &args.route;
    for (uint32_t p = 1; p < r->place.world; p++) {
        uint32_t b = prs_route_node_of(r, p), peer = prs_place_after(&r->place, p);
        uint32_t me = prs_distance_back(p, r->place.world);
        if (b == 0)
            continue;
        put_far(args, peer, args.far.message_window, prs_route_outgoing_at(r, p), prs_route_counts_at(r, epoch & 1, me),
                prs_route_entry_at(r, 0, 0, args.totals->sent[p]), p);
        if (peer == prs_place_counterpart(&r->place, b))
            put_far(args, peer, args.far.message_window, prs_route_forwarding_at(r, 2, b),
                    prs_route_forwarding_at(r, epoch & 1, prs_distance_back(b, r->place.nodes)),
                    16 + ((uint64_t)args.totals->relayed[b] * r->place.local_ranks * 4 + 15) / 16 * 16, p);
        signal_far(args, peer, me, epoch, p);
    }
}

/* The CTA that has sent the last chunk signals all ranks. */
PRS_DEVICE void signal_ranks(const struct prs_moe_args &args, const struct routing_chunk &at)
{
    const struct prs_route *r = &args.route;
    __syncthreads();
    if (threadIdx.x != 0)
        return;
    fence_release_sys(); /* [routing-chunk]: this chunk's messages, before its arrival in arrives_last() below */
    if (!arrives_last(&args.claims->sent, r->chunks))
        return;
    fence_release_sys(); /* [routes]: all chunks' messages, before the flags that receive_counts() waits for */
    for (uint32_t p = 0; p < r->place.world; p++)
        if (prs_route_node_of(r, p) == 0)
            store_release_sys(args.message_flags[prs_route_neighbour(r, p)] + prs_distance_back(p, r->place.world),
                              at.epoch);
    if (r->place.nodes > 1)
        put_messages(args, at.epoch);
}

/* Sends a chunk that is in shared memory. */
PRS_DEVICE void send_chunk(const struct prs_moe_args &args, const struct route_memory &m,
                           const struct routing_chunk &at)
{
    const struct prs_route *r = &args.route;
    sum_chunks(args, m, at);
    __syncthreads();
    if (at.chunk == 0)
        send_counts(args, m, at);
    if (at.chunk == 0 && threadIdx.x == 0 && args.status)
        write_send_status(args);
    __syncthreads();
    place_leads(args, m, at);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < at.tokens * r->choices; i += PRS_ROUTE_THREADS) {
        if (m.code[i] & PRS_ROUTE_LEAD)
            send_entry(args, m, at, i);
        if (m.code[i] & PRS_ROUTE_RELAY)
            write_forwarding(args, m, at, i);
        write_source(args, m, at, i);
    }
    signal_ranks(args, at);
}

/* Sends the chunks that this CTA has counted: first the one in shared memory. */
PRS_DEVICE void send_chunks(const struct prs_moe_args &args, const struct route_memory &m, uint32_t epoch,
                            uint32_t last)
{
    for (uint32_t chunk = last, next = 0; chunk < args.route.chunks; chunk = next++) {
        if (chunk != last)
            take_chunk(args, epoch, chunk, true);
        send_chunk(args, m, chunk_at(args, epoch, chunk));
        while (next < args.route.chunks && (next == last || (m.mine[next / 32] >> next % 32 & 1) == 0))
            next++;
    }
}

/* ---- receive ---- */
/* The same tables with other contents: [p][expert here], unless the comment of a table says otherwise. */
enum {
    ROW_BASE = 0,   /* position of the sender's first row of the expert among all rows */
    LEAD_BASE = 1,  /* position of its first lead among all leads */
    LEAD_FIRST = 2, /* position of the expert's first lead among the sender's entries */
    ROWS = 3,       /* [expert here] */
    BLOCKS = 4,     /* [expert here]; later: first block */
    /* [expert here]: leads of this node's senders, then of the others; later the expert's first delivery */
    DELIVERIES = 5
};
enum { TOTAL_BLOCKS = 0, TOTAL_DELIVERIES = 1, TOTAL_SENT = 2 };
static_assert(TOTAL_SENT + PRS_ROUTE_MAX_WORLD <= PRS_ROUTE_TOTALS, "one total a sender");

/* The flag of the message of the peer at distance p. */
PRS_DEVICE const uint32_t *routes_flag(const struct prs_moe_args &args, uint32_t p)
{
    if (prs_route_node_of(&args.route, p) != 0)
        return far_flag(args, p);
    return args.message_flags[0] + p;
}

PRS_DEVICE bool receive_counts(const struct prs_moe_args &args, const struct route_memory &m, uint32_t epoch)
{
    const struct prs_route *r = &args.route;
    uint32_t p = threadIdx.x;
    bool lost = p < r->place.world &&
                !wait_flag(&args.sync, routes_flag(args, p), epoch, PRS_AWAIT_ROUTES, prs_place_after(&r->place, p), p);
    if (__syncthreads_or(lost))
        return false;
    for (uint32_t e = threadIdx.x; e < r->experts_per_rank; e += PRS_ROUTE_THREADS) {
        uint32_t rows = 0, leads = 0;
        for (uint32_t i = 0; i < r->place.world; i++) {
            p = prs_route_sender(r, i);
            const uint2 *counts = (const uint2 *)(args.messages[0] + prs_route_counts_at(r, epoch & 1, p));
            uint2 both = counts[e];
            if (i == r->place.local_ranks) {
                m.table[DELIVERIES][e] = leads;
                leads = 0;
            }
            m.table[ROW_BASE][p * r->experts_per_rank + e] = rows;
            m.table[LEAD_BASE][p * r->experts_per_rank + e] = leads;
            m.table[LEAD_FIRST][p * r->experts_per_rank + e] = both.y;
            rows += both.x;
            leads += both.y;
        }
        m.table[ROWS][e] = rows;
        m.table[BLOCKS][e] = prs_ceil_div(rows, PRS_TILE_M);
        m.table[DELIVERIES][(r->place.nodes > 1 ? r->experts_per_rank : 0) + e] = leads;
    }
    __syncthreads();
    for (uint32_t job = threadIdx.x / 32; job < 2 + r->place.world; job += PRS_ROUTE_THREADS / 32) {
        uint32_t *v = job == 0   ? m.table[BLOCKS]
                      : job == 1 ? m.table[DELIVERIES]
                                 : m.table[LEAD_FIRST] + (job - 2) * r->experts_per_rank;
        uint32_t total =
            scan_exclusive(v, job == 1 && r->place.nodes > 1 ? 2 * r->experts_per_rank : r->experts_per_rank);
        if (threadIdx.x % 32 == 0)
            m.total[job == 0 ? TOTAL_BLOCKS : job == 1 ? TOTAL_DELIVERIES : TOTAL_SENT + job - 2] = total;
    }
    __syncthreads();
    return true;
}

/* How many rows of an expert there is room for. */
PRS_DEVICE uint32_t kept_rows(const struct prs_moe_args &args, const struct route_memory &m, uint32_t expert)
{
    return prs_route_kept(&args.route, m.table[BLOCKS][expert], m.table[ROWS][expert]);
}

PRS_DEVICE void write_receive_status(const struct prs_moe_args &args, const struct route_memory &m)
{
    uint32_t dropped = 0;
    for (uint32_t e = 0; e < args.route.experts_per_rank; e++)
        dropped += m.table[ROWS][e] - kept_rows(args, m, e);
    args.status->rows_needed = m.total[TOTAL_BLOCKS] * PRS_TILE_M;
    args.status->rows_dropped = dropped;
}

/* here: all counts have arrived. */
PRS_DEVICE void write_totals(const struct prs_moe_args &args, const struct route_memory &m, bool here)
{
    const struct prs_route *r = &args.route;
    uint32_t blocks = m.total[TOTAL_BLOCKS] < r->blocks ? m.total[TOTAL_BLOCKS] : r->blocks;
    args.totals->blocks = here ? blocks : 0;
    args.totals->deliveries = here ? m.total[TOTAL_DELIVERIES] : 0;
    args.totals->tokens = here ? token_count(args) : 0;
    if (here && args.status)
        write_receive_status(args, m);
    /* A rank that did not answer may still be reading its last message: send it nothing more. */
    for (uint32_t p = 0; p < r->place.world && !here; p++)
        args.totals->sent[p] = args.totals->relayed[p] = 0;
    for (uint32_t b = 1; b < r->place.nodes && !here; b++)
        *(uint32_t *)(args.far.forwarding + b * prs_route_forwarding_bytes(r)) = 0;
}

/* Writes what the product's kernel and the caller read, except deliveries and rows. */
PRS_DEVICE void write_tables(const struct prs_moe_args &args, const struct route_memory &m, uint32_t part)
{
    const struct prs_route *r = &args.route;
    uint32_t thread = part * PRS_ROUTE_THREADS + threadIdx.x, threads = r->chunks * PRS_ROUTE_THREADS;
    for (uint32_t b = thread; b < m.total[TOTAL_BLOCKS] && b < r->blocks; b += threads)
        args.ready[b] = 0;
    for (uint32_t e = thread / 32; e < r->experts_per_rank; e += threads / 32) {
        uint32_t block = m.table[BLOCKS][e] < r->blocks ? m.table[BLOCKS][e] : r->blocks;
        uint32_t first = block * PRS_TILE_M, rows = kept_rows(args, m, e);
        uint32_t end = prs_ceil_div(rows, PRS_TILE_M) * PRS_TILE_M;
        if (threadIdx.x % 32 == 0) {
            struct prs_moe_expert_rows x = {first, rows};
            args.table[e] = x;
            args.stored[e] = 0;
            if (args.expert_map)
                args.expert_map[e] = x;
            if (r->place.nodes > 1) { /* the rows from this node come before those of the first sender on another one */
                uint32_t near = m.table[ROW_BASE][prs_route_sender(r, r->place.local_ranks) * r->experts_per_rank + e];
                args.far.near[e] = prs_route_near_blocks(r, e, &x, near < rows ? near : rows);
            }
        }
        for (uint32_t i = rows + threadIdx.x % 32; args.row_map && i < end; i += 32)
            *(uint4 *)&args.row_map[first + i] = make_uint4(~0u, ~0u, ~0u, 0);
    }
}

/* Writes the delivery of row i from the peer at distance p for the product's kernel, and the map entries of its rows
 * for the caller. For all experts, deliveries from this node come first, so that they do not wait for rows from other
 * nodes. */
/* MUTANT(emulator moe/tokens_cross_between_nodes_and_are_given_to_all_who_want_them)
 * deliveries of other nodes have places of their own: s/prs_route_node_of(r, p) == 0 ? 0 : r->experts_per_rank/0/ */
PRS_DEVICE void receive_entry(const struct prs_moe_args &args, const struct route_memory &m, uint32_t bank, uint32_t p,
                              uint32_t i)
{
    const struct prs_route *r = &args.route;
    const uint4 *from = (const uint4 *)(args.messages[0] + prs_route_entry_at(r, bank, p, i));
    uint4 token = from[0], target = from[1];
    uint32_t lead = target.x, of_p = p * r->experts_per_rank, kept = 0,
             deliveries = prs_route_node_of(r, p) == 0 ? 0 : r->experts_per_rank;
    uint32_t delivery =
        m.table[DELIVERIES][deliveries + lead] + m.table[LEAD_BASE][of_p + lead] + i - m.table[LEAD_FIRST][of_p + lead];
    struct prs_route_delivery *to =
        (struct prs_route_delivery *)(args.deliveries + (uint64_t)delivery * prs_route_delivery_bytes(r));
    for (uint32_t u = 0; u < token.y; u++) {
        uint32_t row;
        target = from[1 + u];
        row = m.table[ROW_BASE][of_p + target.x] + target.z;
        uint4 *source = (uint4 *)&args.sources[(uint64_t)token.x * r->choices + target.y];
        if (p == 0)
            *source = make_uint4(PRS_ROUTE_NO_SOURCE, 0, 0, 0);
        /* MUTANT(emulator moe/rows_beyond_capacity_are_dropped_and_the_next_launch_is_right)
         * a row without room is dropped: delete */
        if (row >= kept_rows(args, m, target.x))
            continue;
        row += m.table[BLOCKS][target.x] * PRS_TILE_M;
        if (p == 0)
            *source = make_uint4(0, row, target.w, 0);
        to->row[prs_route_weight_at(r) + kept] = target.w;
        to->row[kept++] = row;
        if (args.row_map)
            *(uint4 *)&args.row_map[row] = make_uint4(prs_place_after(&r->place, p), token.x, target.y, target.w);
    }
    *(uint4 *)to = make_uint4(p, p == 0 ? token.x : i, kept, 0);
}

PRS_DEVICE void receive_entries(const struct prs_moe_args &args, const struct route_memory &m, uint32_t bank,
                                uint32_t part)
{
    const struct prs_route *r = &args.route;
    for (uint32_t p = 0; p < r->place.world; p++)
        for (uint32_t i = part * PRS_ROUTE_THREADS + threadIdx.x; i < m.total[TOTAL_SENT + p];
             i += r->chunks * PRS_ROUTE_THREADS)
            receive_entry(args, m, bank, p, i);
}

/* Forwarding tables are also needed on the way back, so they become part of the maps. */
PRS_DEVICE void keep_forwarding(const struct prs_moe_args &args, uint32_t bank, uint32_t part)
{
    const struct prs_route *r = &args.route;
    for (uint32_t b = 1; b < r->place.nodes; b++) {
        const uint4 *from = (const uint4 *)(args.messages[0] + prs_route_forwarding_at(r, bank, b));
        uint4 *to = (uint4 *)(args.far.forwarding + b * prs_route_forwarding_bytes(r));
        uint32_t vectors = 1 + prs_ceil_div(*(const uint32_t *)from * r->place.local_ranks, 4);
        for (uint32_t i = part * PRS_ROUTE_THREADS + threadIdx.x; i < vectors; i += r->chunks * PRS_ROUTE_THREADS)
            to[i] = from[i];
    }
}

/* There are as many parts as chunks. */
PRS_DEVICE void receive(const struct prs_moe_args &args, const struct route_memory &m, uint32_t epoch)
{
    uint32_t part = claim_for_cta(m, &args.claims->parts);
    if (part >= args.route.chunks)
        return;
    bool here = receive_counts(args, m, epoch);
    for (; part < args.route.chunks; part = claim_for_cta(m, &args.claims->parts)) {
        if (part == 0 && threadIdx.x == 0)
            write_totals(args, m, here);
        if (!here)
            continue;
        write_tables(args, m, part);
        receive_entries(args, m, epoch & 1, part);
        keep_forwarding(args, epoch & 1, part);
    }
}

/* ---- the kernel ---- */
static __global__ void __launch_bounds__(PRS_ROUTE_THREADS)
    route_kernel(const __grid_constant__ struct prs_moe_args args)
{
    struct route_memory m = route_memory_map(args, dynamic_shared());
    uint32_t epoch = launch_epoch(&args.sync), last = count_chunks(args, m, epoch);
    send_chunks(args, m, epoch, last);
    receive(args, m, epoch); /* its first step lets all threads finish reading the tables, which it reuses */
}

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* Which row of which expert comes from where. Plain C shared by the kernels, the host and the CPU tests: no CUDA, no
 * memory, no clock. fused/README.md has the terms.
 *
 *   router's choices --> message to each owner:  counts of its experts, then an entry for each token --> deliveries
 *   token -------------> its owner on this node: staging ------------------------------------------> rows of experts
 *   token -------------> another node, once:     relay memory of the counterpart --> staging there --> rows there
 *   relay lead --------> forwarding table:       where the counterpart must stage the row, for each rank of its node
 *
 * Experts are numbered over all ranks; rank r owns experts_per_rank of them, from r * experts_per_rank on. With a map,
 * these numbers are *places*, and the router chooses among other, logical numbers. The sender looks up a choice's place
 * once (prs_route_place()); everything after that knows places only and calls them experts. A *choice* is one (token,
 * slot of its top-k) and makes one output row at the owner of its expert. A token travels to an owner once, whatever
 * the number of its choices there: its *entry* lists them as *targets*. The *lead* is the choice with the lowest expert
 * among them. A sender sorts the tokens for an owner by the lead's expert, then by token, so that the rows of the first
 * experts, which the owner computes first, are complete first. It numbers its choices of each expert (`index`) without
 * knowing the counts of other ranks; the owner adds where the sender's part of the expert begins. The owner turns each
 * entry into a *delivery*: the place of the received row and the rows that it is copied to.
 *
 * Peers are named by distance: p = (rank of the peer - own rank) modulo world; 0 is this rank. So are nodes.
 *
 * Several nodes (geometry.h). A token crosses to another node once, to the counterpart of its sender there, which gives
 * it to all ranks of its node that own one of the experts. The choice that comes first in the order of that node
 * (prs_route_relay_order()) is the *relay lead*, by which relayed rows are sorted. */
#ifndef PERSEUS_FUSED_ROUTE_H
#define PERSEUS_FUSED_ROUTE_H

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

#include <perseus/moe.h>
#include "fused/core/tile.h"

/* What its flags stand for (core/sync.h). */
enum prs_moe_awaited {
    PRS_AWAIT_ROUTES = 16, /* a rank's counts and records */
    PRS_AWAIT_TOKEN = 17,  /* a rank's row */
    PRS_AWAIT_BLOCK = 18,  /* rows of a block, from other CTAs of this rank */
    PRS_AWAIT_END = 20,    /* a rank's end of the previous launch */
    PRS_AWAIT_SUM = 21,    /* a rank's sum of the results of a token */
    PRS_AWAIT_EXPERT = 22  /* an expert's results, from this rank's own CTAs */
};

enum {
    PRS_ROUTE_MAX_EXPERTS = 1024,   /* over all ranks */
    PRS_ROUTE_MAX_CHOICES = 32,     /* choices of one token */
    PRS_ROUTE_CHUNK_CHOICES = 8192, /* choices of one chunk; each takes 8 bytes of shared memory */
    PRS_ROUTE_NONE = 0x3fff,        /* code of a choice without an expert; mask of the expert in a code */
    PRS_ROUTE_LEAD = 0x8000,        /* bit of a code: the choice is a lead; next: a relay lead */
    PRS_ROUTE_RELAY = 0x4000,
    PRS_ROUTE_MAX_WORLD = 64,
    PRS_ROUTE_NOWHERE = -1,       /* in a forwarding table: this rank does not get the row */
    PRS_ROUTE_NO_SOURCE = 0xffff, /* peer of a source: nothing comes from this choice */
    PRS_ROUTE_MAX_REPLICAS = PRS_ROUTE_MAX_WORLD,
    /* Between nodes. The software NIC needs at least 4 us for a put; a link of 400G moves 190 KB in that time. So 1024
     * puts of 115 KB take 4.2 ms (moe-nodes-small-puts-2xH200.json: 7244 us with all rows in one group, minus 2980 us
     * of the product). */
    PRS_ROUTE_PUT_BYTES = 512 << 10,
    PRS_ROUTE_MOST_GROUPS = 32,  /* several groups, so that the first experts need not wait for the last rows */
    PRS_ROUTE_LEAST_GROUP = 128, /* at least so many rows, because a signal takes as long as a put */
};

/* bf16 operations per microsecond on all SMs of an H200, in products of an expert's blocks. */
enum { PRS_MOE_FLOPS_PER_US = 740000000 };

struct prs_route {
    struct prs_place place;
    uint32_t experts, experts_per_rank;
    uint32_t choices;   /* k */
    uint32_t tokens;    /* the most that any rank may have */
    uint32_t blocks;    /* capacity of this rank, in blocks of PRS_TILE_M rows */
    uint32_t columns;   /* units in one row block: column tiles of the result, or pairs of them */
    uint32_t row_bytes; /* bytes of a token */
    uint32_t chunks;    /* number of chunks of a rank's tokens, which CTAs of the routing kernel claim */
    uint32_t put;       /* between nodes: rows that one put moves */
    uint32_t group;     /* between nodes: rows that one signal stands for; a multiple of `put` */
    uint32_t passes;    /* between nodes. 2: blocks that need no other node may come first; 1: expert by expert */
    /* A map has `replicas` places for each of `logical` experts. logical 0: no map, an expert's number is its place. */
    uint32_t logical, replicas;
};

/* An entry of a message: one token that is sent, and a target for each of its rows at the receiver. */
struct prs_route_entry {
    uint32_t token, targets, pad[2];
};

struct prs_route_target {
    uint32_t expert; /* number among the receiver's experts; the first target is the lead's */
    uint32_t slot;   /* position in the token's top-k */
    uint32_t index;  /* number among this sender's choices of the expert */
    float weight;
};
static_assert(sizeof(struct prs_route_entry) == 16 && sizeof(struct prs_route_target) == 16,
              "written as 16-byte vectors");

/* A received row: where it lies, and the rows that it is copied to. After the rows come as many router weights
 * (prs_route_weight_at()). The same delivery says what is added up for the sender on the way back. */
struct prs_route_delivery {
    uint32_t peer, at; /* peer 0: this rank's token `at`; else row `at` of those that the peer sends */
    uint32_t targets;
    uint32_t pad;
    uint32_t row[4]; /* in fact as many as a token has choices, rounded up to 4 */
};

/* One term of a token's result, for each of its choices. */
struct prs_route_source {
    /* 0: this rank's row `at`, times the weight; else the sum that the peer sends back for its row `at` */
    uint32_t peer;
    uint32_t at;
    float weight;
    uint32_t pad;
};
static_assert(sizeof(struct prs_route_source) == 16, "written as 16-byte vectors");

/* Chooses the rows that one put moves, and those that one signal stands for, where they are 0, and limits both to their
 * range. */
PRS_SHARED void prs_route_put_sizes(uint32_t tokens, uint32_t row_bytes, uint32_t *put, uint32_t *group)
{
    uint32_t most = tokens < 1 ? 1 : tokens;
    if (*group == 0)
        *group = tokens / PRS_ROUTE_MOST_GROUPS < PRS_ROUTE_LEAST_GROUP ? PRS_ROUTE_LEAST_GROUP
                                                                        : tokens / PRS_ROUTE_MOST_GROUPS;
    if (*put == 0)
        *put = PRS_ROUTE_PUT_BYTES / row_bytes / 8 * 8;
    *group = *group > most ? most : *group;
    *put = *put < 1 ? 1 : *put > *group ? *group : *put;
    *group = prs_ceil_div(*group, *put) * *put;
}

PRS_SHARED uint32_t prs_route_entry_bytes(const struct prs_route *r)
{
    return 16 * (1 + r->choices);
}

PRS_SHARED uint32_t prs_route_delivery_bytes(const struct prs_route *r)
{
    return 16 + 2 * 16 * prs_ceil_div(r->choices, 4);
}

/* Where the weight of a delivery's first row lies among the words of prs_route_delivery.row. */
PRS_SHARED uint32_t prs_route_weight_at(const struct prs_route *r)
{
    return 4 * prs_ceil_div(r->choices, 4);
}

/* Bytes of the counts in a message. Each sender has a message in each bank: the numbers of rows and leads of each
 * expert here, then the entries. */
PRS_SHARED uint64_t prs_route_counts_bytes(const struct prs_route *r)
{
    return (uint64_t)r->experts_per_rank * 8;
}

PRS_SHARED uint64_t prs_route_message_bytes(const struct prs_route *r)
{
    return (prs_route_counts_bytes(r) + 15) / 16 * 16 + (uint64_t)r->tokens * prs_route_entry_bytes(r);
}

/* Offset of the counts from the sender at distance p, in bank `bank`. */
PRS_SHARED uint64_t prs_route_counts_at(const struct prs_route *r, uint32_t bank, uint32_t p)
{
    /* MUTANT(model moe) mail has two banks: s#bank#(bank / 2 * 2)# */
    return ((uint64_t)bank * r->place.world + p) * prs_route_message_bytes(r);
}

PRS_SHARED uint64_t prs_route_entry_at(const struct prs_route *r, uint32_t bank, uint32_t p, uint32_t at)
{
    return prs_route_counts_at(r, bank, p) + (prs_route_counts_bytes(r) + 15) / 16 * 16 +
           (uint64_t)at * prs_route_entry_bytes(r);
}

/* Offset of row `at` from the peer at distance p >= 1. One bank is enough: a row of epoch e + 1 is sent only after all
 * ranks have begun e + 1; see route.cuh. */
PRS_SHARED uint64_t prs_route_staging_at(const struct prs_route *r, uint32_t p, uint32_t at)
{
    return ((uint64_t)(p - 1) * r->tokens + at) * r->row_bytes;
}

/* Index of the word that holds the epoch once the row has arrived. */
PRS_SHARED uint32_t prs_route_row_flag(const struct prs_route *r, uint32_t p, uint32_t at)
{
    return (p - 1) * r->tokens + at;
}

/* ---- several nodes ---- */
/* Distance of the node of the peer at distance p; 0 is this node. */
PRS_SHARED uint32_t prs_route_node_of(const struct prs_route *r, uint32_t p)
{
    return prs_place_node_distance(&r->place, prs_place_after(&r->place, p));
}

/* Index of the neighbour that is at distance p. */
PRS_SHARED uint32_t prs_route_neighbour(const struct prs_route *r, uint32_t p)
{
    return prs_place_neighbour_index(&r->place, prs_place_after(&r->place, p));
}

/* Distance of the rank of this node with that local rank. */
PRS_SHARED uint32_t prs_route_local(const struct prs_route *r, uint32_t local_rank)
{
    return prs_place_distance(&r->place, prs_place_rank(&r->place, r->place.node, local_rank));
}

/* Position of the expert in its node's order: the first experts of all its ranks, then the second ones, and so on. */
PRS_SHARED uint32_t prs_route_relay_order(const struct prs_route *r, uint32_t expert)
{
    uint32_t rank = expert / r->experts_per_rank;
    return rank / r->place.local_ranks * r->place.local_ranks * r->experts_per_rank +
           expert % r->experts_per_rank * r->place.local_ranks + rank % r->place.local_ranks;
}

/* After the two banks of received messages come the messages for other nodes, [distance of the receiver], in the same
 * layout: puts read them here. Then come forwarding tables: received ones [bank][distance of the sender's node], and
 * those to be put [distance of the receiver's node]. */
PRS_SHARED uint64_t prs_route_outgoing_at(const struct prs_route *r, uint32_t p)
{
    return prs_route_counts_at(r, 2, p);
}

PRS_SHARED uint64_t prs_route_forwarding_bytes(const struct prs_route *r)
{
    return 16 + ((uint64_t)r->tokens * r->place.local_ranks * 4 + 15) / 16 * 16;
}

/* Offset of a forwarding table: number of rows, padding, then [row][local rank] the row's position in that rank's
 * staging. bank 2: the tables to be put. */
PRS_SHARED uint64_t prs_route_forwarding_at(const struct prs_route *r, uint32_t bank, uint32_t b)
{
    /* MUTANT(model moe) forwarding tables have two banks: s#bank#(bank / 2 * 2)# */
    return prs_route_counts_at(r, 3, 0) + ((uint64_t)bank * r->place.nodes + b) * prs_route_forwarding_bytes(r);
}

/* Size of the memory for all messages and forwarding tables. */
PRS_SHARED uint64_t prs_route_messages_bytes(const struct prs_route *r)
{
    return r->place.nodes == 1 ? prs_route_counts_at(r, 2, 0) : prs_route_forwarding_at(r, 3, 0);
}

/* Offset in relay memory of a row from the node at distance b >= 1, or (out = 1) of a row for it; 2 and 3: the same for
 * the way back. */
PRS_SHARED uint64_t prs_route_relay_at(const struct prs_route *r, uint32_t out, uint32_t b, uint32_t row)
{
    /* MUTANT(model moe) rows in and rows out are apart: s/out * (r->place.nodes - 1)/0 * out/ */
    return (((uint64_t)out * (r->place.nodes - 1) + b - 1) * r->tokens + row) * r->row_bytes;
}

/* Distance of the i-th sender in the order of an expert's rows: senders on this node come first. */
PRS_SHARED uint32_t prs_route_sender(const struct prs_route *r, uint32_t i)
{
    /* MUTANT(model moe) rows of the own node come first: s@, i)@, r->place.world - 1 - i)@ */
    return prs_place_distance(&r->place, prs_place_in_order(&r->place, i));
}

PRS_SHARED uint32_t prs_route_groups(const struct prs_route *r)
{
    return prs_ceil_div(r->tokens, r->group);
}

/* Index of a signal word: there is one for each rank's message, then [distance of the sender's node][group]. */
PRS_SHARED uint32_t prs_route_relay_word(const struct prs_route *r, uint32_t b, uint32_t group)
{
    /* MUTANT(model moe) groups of all sizes have a word each: s/prs_route_groups(r/(prs_route_groups(r) - 1/ */
    return r->place.world + (b - 1) * prs_route_groups(r) + group;
}

/* Counters of relay_row_out(): the rows of each put, then the puts of each group. */
PRS_SHARED uint32_t prs_route_put_counter(const struct prs_route *r, uint32_t b, uint32_t row)
{
    return (b - 1) * prs_ceil_div(r->tokens, r->put) + row / r->put;
}

PRS_SHARED uint32_t prs_route_group_counter(const struct prs_route *r, uint32_t b, uint32_t row)
{
    return prs_route_put_counter(r, r->place.nodes, 0) + (b - 1) * prs_route_groups(r) + row / r->group;
}

/* Sums that return have signal words and counters of their own, after those of dispatch. Then there is a signal word
 * for the end of each counterpart's launch. */
PRS_SHARED uint32_t prs_route_back_word(const struct prs_route *r, uint32_t b, uint32_t group)
{
    return prs_route_relay_word(r, r->place.nodes, 0) + prs_route_relay_word(r, b, group) - r->place.world;
}

PRS_SHARED uint32_t prs_route_end_word(const struct prs_route *r, uint32_t b)
{
    return prs_route_back_word(r, r->place.nodes, 0) + b;
}

PRS_SHARED uint32_t prs_route_back_counters(const struct prs_route *r)
{
    return prs_route_group_counter(r, r->place.nodes, 0);
}

/* The number of rows in the piece that holds `row`, when `count` rows are cut into pieces of `size`. */
PRS_SHARED uint32_t prs_route_piece_rows(uint32_t row, uint32_t size, uint32_t count)
{
    uint32_t left = count - row / size * size;
    return left < size ? left : size;
}

/* Why a choice has no place. */
enum prs_route_no_place {
    PRS_ROUTE_NO_CHOICE = -1,
    PRS_ROUTE_WRONG_CHOICE = -2, /* an expert that does not exist */
    PRS_ROUTE_ABSENT = -3,       /* the map has no place for the expert */
    PRS_ROUTE_WRONG_PLACE = -4   /* the map has a place that does not exist */
};

/* The place for a token's choice, or enum prs_route_no_place. Tokens take turns among the places that the map has for
 * an expert. Their rank counts too, so that ranks with few tokens do not all begin with the same place. */
/* MUTANT(model route) moe, only what exists is looked up: s/choice >= r->logical/choice > r->logical/ */
/* MUTANT(model route) moe, a place that does not exist is an error: s/place < r->experts/place <= r->experts/ */
PRS_SHARED int32_t prs_route_place(const struct prs_route *r, const int32_t *map, int64_t choice, uint32_t token)
{
    const int32_t *places;
    uint32_t present = 0, turn;
    if (choice < 0)
        return PRS_ROUTE_NO_CHOICE;
    if (r->logical == 0)
        return choice < r->experts ? (int32_t)choice : PRS_ROUTE_WRONG_CHOICE;
    if (choice >= r->logical)
        return PRS_ROUTE_WRONG_CHOICE;
    places = map + choice * r->replicas;
    for (uint32_t i = 0; i < r->replicas; i++)
        present += places[i] >= 0;
    if (present == 0)
        return PRS_ROUTE_ABSENT;
    /* MUTANT(model route) moe, tokens take turns: s/token + r->place.rank/r->place.rank/ */
    turn = (token + r->place.rank) % present;
    for (uint32_t i = 0;; i++) {
        uint32_t place = (uint32_t)places[i];
        /* MUTANT(model route) moe, empty entries have no turn: s/places[i] >= 0 && // */
        if (places[i] >= 0 && turn-- == 0)
            return place < r->experts ? (int32_t)place : PRS_ROUTE_WRONG_PLACE;
    }
}

/* The place in 16 bits: an expert, or PRS_ROUTE_NONE. */
PRS_SHARED uint16_t prs_route_expert(int32_t place)
{
    return (uint16_t)(place < 0 ? PRS_ROUTE_NONE : place);
}

/* The code of choice `slot` of a token: its expert, with PRS_ROUTE_LEAD and PRS_ROUTE_RELAY; PRS_ROUTE_NONE if it has
 * no expert. experts: those of all choices of the token. */
PRS_SHARED uint32_t prs_route_code(const struct prs_route *r, const uint16_t *experts, uint32_t slot)
{
    uint32_t expert = experts[slot], owner, order, code;
    if (expert == PRS_ROUTE_NONE)
        return PRS_ROUTE_NONE;
    owner = expert / r->experts_per_rank;
    order = prs_route_relay_order(r, expert);
    code = expert | PRS_ROUTE_LEAD | (owner / r->place.local_ranks == r->place.node ? 0 : PRS_ROUTE_RELAY);
    for (uint32_t j = 0; j < r->choices; j++) {
        uint32_t other = experts[j];
        if (j == slot || other == PRS_ROUTE_NONE)
            continue;
        if (other / r->experts_per_rank == owner && (other < expert || (other == expert && j < slot)))
            code &= ~(uint32_t)PRS_ROUTE_LEAD;
        if ((code & PRS_ROUTE_RELAY) != 0 &&
            other / r->experts_per_rank / r->place.local_ranks == owner / r->place.local_ranks &&
            (prs_route_relay_order(r, other) < order || (other == expert && j < slot)))
            code &= ~(uint32_t)PRS_ROUTE_RELAY;
    }
    return code;
}

/* Iterates over the choices of a token that go to the owner of its lead `lead` (a slot): the lead, then the others by
 * slot. codes: those of all choices of the token. before: the result of the last call, at first `choices`. Returns
 * `choices` when there are no more. */
PRS_SHARED uint32_t prs_route_next_target(const struct prs_route *r, const uint16_t *codes, uint32_t lead,
                                          uint32_t before)
{
    uint32_t owner = (codes[lead] & PRS_ROUTE_NONE) / r->experts_per_rank;
    if (before == r->choices)
        return lead;
    for (uint32_t j = before == lead ? 0 : before + 1; j < r->choices; j++) {
        uint32_t expert = codes[j] & PRS_ROUTE_NONE;
        if (j != lead && expert != PRS_ROUTE_NONE && expert / r->experts_per_rank == owner)
            return j;
    }
    return r->choices;
}

/* How many tokens a chunk has if this rank has `count`. */
PRS_SHARED uint32_t prs_route_chunk_tokens(const struct prs_route *r, uint32_t count)
{
    return prs_ceil_div(count, r->chunks);
}

/* How many of an expert's rows fit into this rank's blocks. first_block: the expert's first block. */
PRS_SHARED uint32_t prs_route_kept(const struct prs_route *r, uint32_t first_block, uint32_t rows)
{
    uint32_t room = first_block < r->blocks ? (r->blocks - first_block) * PRS_TILE_M : 0;
    return rows < room ? rows : room;
}

/* ---- what the product computes ---- */
struct prs_route_unit {
    uint32_t expert;
    uint32_t block;  /* number among the blocks of this rank's rows */
    uint32_t rows;   /* rows in use, 1 .. PRS_TILE_M */
    uint32_t column; /* number of the column tile, or of the pair of tiles */
};

/* Where the search for a unit's expert stands. With two passes it never goes back: a CTA's units come in ascending
 * order. */
struct prs_route_cursor {
    uint32_t expert;
    /* far: 1 in the second of two passes; before: how many blocks of this pass come before the expert's */
    uint32_t far, before;
};

PRS_SHARED uint32_t prs_route_expert_blocks(const struct prs_moe_expert_rows *e)
{
    return prs_ceil_div(e->rows, PRS_TILE_M);
}

/* How many blocks of a rank's expert number `expert` come in the first pass, because they need no row from another
 * node. The first `near` rows of the expert are from this node. Experts of the first half have no such blocks. The
 * blocks of the second half are enough work until rows arrive, and rows for the first experts arrive first. The weights
 * of an expert in both passes are read twice (doc/fused-notes.md). */
PRS_SHARED uint32_t prs_route_near_blocks(const struct prs_route *r, uint32_t expert,
                                          const struct prs_moe_expert_rows *e, uint32_t near)
{
    /* MUTANT(model route) moe, one pass tells no blocks apart: s/r->passes == 1 ||// */
    /* MUTANT(model route) moe, the first half of the experts is met once: s#|| expert < r->experts_per_rank / 2## */
    if (r->passes == 1 || expert < r->experts_per_rank / 2)
        return 0;
    /* MUTANT(model route) moe, a last block without a row of another node does not wait: s/near == e->rows/0/ */
    /* MUTANT(model route) moe, a block with a row of another node waits for it:
     * s#near / PRS_TILE_M#prs_ceil_div(near, PRS_TILE_M)# */
    return near == e->rows ? prs_route_expert_blocks(e) : near / PRS_TILE_M;
}

/* Returns the number of blocks of the cursor's expert in its pass; *first: the first of them. */
/* MUTANT(model route) moe, what waits for no other node is multiplied first:
 * s/c->far ? near[c->expert] : 0; return c->far/0; return c->far == 0/ */
PRS_SHARED uint32_t prs_route_pass(const struct prs_moe_expert_rows *experts, const uint32_t *near,
                                   const struct prs_route_cursor *c, uint32_t *first)
{
    /* MUTANT(model route) moe, the second pass begins where the first ended: s/c->far ? near[c->expert] :// */
    *first = c->far ? near[c->expert] : 0;
    return c->far ? prs_route_expert_blocks(&experts[c->expert]) - *first : near[c->expert];
}

/* The expert that a block belongs to: the last one that begins at or before it. An expert without rows begins where the
 * next one does. */
PRS_SHARED uint32_t prs_route_block_expert(const struct prs_route *r, const struct prs_moe_expert_rows *experts,
                                           uint32_t block)
{
    uint32_t expert = 0;
    for (uint32_t left = r->experts_per_rank; left > 1;) {
        uint32_t half = left / 2;
        /* MUTANT(model route) moe, an expert begins with its first block: s/<=/</ */
        expert += experts[expert + half].first_row / PRS_TILE_M <= block ? half : 0;
        left -= half;
    }
    return expert;
}

/* Finds unit `at`, which must exist and, with `near`, must not be smaller than in the cursor's last call. The order is
 * expert by expert, so that an expert's weights are read from memory once, and within an expert in rasters of
 * PRS_RASTER row blocks. near: prs_route_near_blocks() of each expert; those blocks come in a first pass, all others in
 * a second. NULL: one pass. */
PRS_SHARED void prs_route_unit(const struct prs_route *r, const struct prs_moe_expert_rows *experts,
                               const uint32_t *near, struct prs_route_cursor *c, uint32_t at, struct prs_route_unit *u)
{
    uint32_t block = at / r->columns, begin = 0, blocks, rows, first, left;
    const struct prs_moe_expert_rows *e;
    if (!near) {
        c->expert = prs_route_block_expert(r, experts, block);
        blocks = prs_route_expert_blocks(&experts[c->expert]);
        c->before = experts[c->expert].first_row / PRS_TILE_M;
    } else {
        while (blocks = prs_route_pass(experts, near, c, &begin), c->before + blocks <= block) {
            c->before += blocks;
            /* MUTANT(model route) moe, the second pass has all experts: s/0/1/ */
            if (++c->expert == r->experts_per_rank)
                c->expert = 0, c->far = 1;
        }
    }
    e = &experts[c->expert];
    at -= c->before * r->columns;
    first = at / (PRS_RASTER * r->columns) * PRS_RASTER;
    rows = blocks - first;
    block = begin + first +
            prs_tile_raster(rows < PRS_RASTER ? rows : PRS_RASTER, at % (PRS_RASTER * r->columns), &u->column);
    left = e->rows - block * PRS_TILE_M;
    u->expert = c->expert;
    u->block = e->first_row / PRS_TILE_M + block;
    u->rows = left < PRS_TILE_M ? left : PRS_TILE_M;
}

#endif

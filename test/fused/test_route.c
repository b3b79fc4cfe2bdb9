/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <stdlib.h>
#include <string.h>

#include "fused/moe/route.h"

static struct prs_route route_of(uint32_t world, uint32_t experts, uint32_t choices, uint32_t tokens)
{
    struct prs_route r = {.experts = experts, .experts_per_rank = experts / world, .choices = choices};
    prs_place_init(&r.place, 0, world, 1);
    r.put = 4, r.group = 8, r.passes = 2;
    r.tokens = tokens, r.blocks = 64, r.columns = 3, r.row_bytes = 32, r.chunks = 4;
    return r;
}

/* The same for a rank on several nodes. */
static struct prs_route route_over(uint32_t nodes, uint32_t locals, uint32_t rank, uint32_t local, uint32_t choices)
{
    struct prs_route r = route_of(nodes * locals, nodes * locals * local, choices, 21);
    prs_place_init(&r.place, rank, nodes * locals, nodes);
    return r;
}

static uint32_t next_random(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

static void random_choices(const struct prs_route *r, uint16_t *chosen, uint32_t *random)
{
    for (uint32_t j = 0; j < r->choices; j++)
        chosen[j] = next_random(random) % 8 == 0 ? PRS_ROUTE_NONE : (uint16_t)(next_random(random) % r->experts);
}

Test(route, a_token_has_one_lead_at_each_owner_and_it_is_the_lowest_expert)
{
    struct prs_route r = route_of(4, 16, 6, 8);
    uint32_t random = 7;
    for (int round = 0; round < 5000; round++) {
        uint16_t chosen[6], lowest[4] = {99, 99, 99, 99};
        uint32_t leads[4] = {0, 0, 0, 0};
        random_choices(&r, chosen, &random);
        for (uint32_t j = 0; j < r.choices; j++)
            if (chosen[j] != PRS_ROUTE_NONE && chosen[j] < lowest[chosen[j] / 4])
                lowest[chosen[j] / 4] = chosen[j];
        for (uint32_t j = 0; j < r.choices; j++) {
            uint32_t code = prs_route_code(&r, chosen, j);
            cr_assert_eq(code == PRS_ROUTE_NONE, chosen[j] == PRS_ROUTE_NONE);
            if (code == PRS_ROUTE_NONE)
                continue;
            cr_assert_eq(code & PRS_ROUTE_NONE, chosen[j]);
            if ((code & PRS_ROUTE_LEAD) == 0)
                continue;
            leads[chosen[j] / 4]++;
            cr_assert_eq(chosen[j], lowest[chosen[j] / 4]);
        }
        for (uint32_t owner = 0; owner < 4; owner++)
            cr_assert_eq(leads[owner], lowest[owner] < 99, "owner %u has %u leads", owner, leads[owner]);
    }
}

Test(route, an_expert_that_does_not_exist_is_no_choice)
{
    struct prs_route r = route_of(2, 4, 3, 8);
    int64_t chosen[3] = {4, INT64_MAX, 3};
    uint16_t experts[3];
    for (uint32_t j = 0; j < 3; j++)
        experts[j] = prs_route_expert(prs_route_place(&r, NULL, chosen[j], j));
    cr_assert_eq(prs_route_place(&r, NULL, 4, 0), PRS_ROUTE_WRONG_CHOICE);
    cr_assert_eq(prs_route_place(&r, NULL, -1, 0), PRS_ROUTE_NO_CHOICE);
    cr_assert_eq(prs_route_code(&r, experts, 0), PRS_ROUTE_NONE);
    cr_assert_eq(prs_route_code(&r, experts, 1), PRS_ROUTE_NONE);
    cr_assert_eq(prs_route_code(&r, experts, 2), 3 | PRS_ROUTE_LEAD);
}

/* ---- a map of experts ---- */
static struct prs_route route_with_map(uint32_t rank, uint32_t logical, uint32_t replicas)
{
    struct prs_route r = route_of(2, 8, 2, 64);
    r.place.rank = rank;
    r.logical = logical, r.replicas = replicas;
    return r;
}

Test(route, tokens_take_turns_among_the_places_of_an_expert)
{
    static const int32_t map[3][4] = {{5, -1, 2, -7}, {0, 1, 6, 3}, {-1, -1, 7, -1}};
    for (uint32_t rank = 0; rank < 2; rank++) {
        struct prs_route r = route_with_map(rank, 3, 4);
        for (uint32_t token = 0; token < 24; token++) {
            cr_assert_eq(prs_route_place(&r, &map[0][0], 0, token), (token + rank) % 2 == 0 ? 5 : 2);
            cr_assert_eq(prs_route_place(&r, &map[0][0], 1, token), map[1][(token + rank) % 4]);
            cr_assert_eq(prs_route_place(&r, &map[0][0], 2, token), 7);
        }
    }
}

Test(route, an_expert_without_a_place_is_absent_and_a_place_that_does_not_exist_is_wrong)
{
    static const int32_t map[5][2] = {{-1, -9}, {8, -1}, {7, INT32_MAX}, {INT32_MIN, 0}, {0, 0}};
    struct prs_route r = route_with_map(0, 4, 2);
    cr_assert_eq(prs_route_place(&r, &map[0][0], 0, 3), PRS_ROUTE_ABSENT);
    cr_assert_eq(prs_route_place(&r, &map[0][0], 1, 3), PRS_ROUTE_WRONG_PLACE);
    cr_assert_eq(prs_route_place(&r, &map[0][0], 2, 2), 7);
    cr_assert_eq(prs_route_place(&r, &map[0][0], 2, 3), PRS_ROUTE_WRONG_PLACE);
    cr_assert_eq(prs_route_place(&r, &map[0][0], 3, 3), 0);
    cr_assert_eq(prs_route_place(&r, &map[0][0], 4, 3), PRS_ROUTE_WRONG_CHOICE, "beyond the map");
    cr_assert_eq(prs_route_place(&r, &map[0][0], INT64_MAX, 3), PRS_ROUTE_WRONG_CHOICE);
    cr_assert_eq(prs_route_place(&r, &map[0][0], INT64_MIN, 3), PRS_ROUTE_NO_CHOICE);
    for (int32_t place = PRS_ROUTE_WRONG_PLACE; place < 0; place++)
        cr_assert_eq(prs_route_expert(place), PRS_ROUTE_NONE);
}

Test(route, a_record_uses_each_choice_of_its_owner_once_and_the_lead_first)
{
    struct prs_route r = route_of(3, 9, 7, 8);
    uint32_t random = 11;
    for (int round = 0; round < 5000; round++) {
        uint16_t chosen[7];
        uint32_t used[7] = {0}, owners = 0;
        random_choices(&r, chosen, &random);
        for (uint32_t lead = 0; lead < r.choices; lead++) {
            uint32_t code = prs_route_code(&r, chosen, lead), slot = r.choices, steps = 0;
            if (code == PRS_ROUTE_NONE || (code & PRS_ROUTE_LEAD) == 0)
                continue;
            owners++;
            while ((slot = prs_route_next_target(&r, chosen, lead, slot)) != r.choices) {
                cr_assert(steps++ != 0 || slot == lead, "the lead must come first");
                cr_assert_eq(chosen[slot] / 3, chosen[lead] / 3);
                used[slot]++;
                cr_assert_leq(steps, r.choices);
            }
        }
        for (uint32_t j = 0; j < r.choices; j++)
            cr_assert_eq(used[j], chosen[j] != PRS_ROUTE_NONE, "slot %u of round %d is used %u times, %u owners", j,
                         round, used[j], owners);
    }
}

struct group {
    uint32_t columns, rows[6];
};

static struct group groups[] = {
    {1, {1, 0, 0, 128, 129, 0}}, {3, {0, 0, 700, 0, 64, 1}}, {8, {5000, 1, 0, 0, 0, 2000}},
    {5, {0, 0, 0, 0, 0, 1}},     {4, {0, 0, 0, 0, 0, 0}},
};

static uint32_t fill_groups(const struct group *g, struct prs_moe_expert_rows *experts)
{
    uint32_t blocks = 0;
    for (uint32_t e = 0; e < 6; e++) {
        experts[e].first_row = blocks * PRS_TILE_M;
        experts[e].rows = g->rows[e];
        blocks += prs_route_expert_blocks(&experts[e]);
    }
    return blocks;
}

ParameterizedTestParameters(route, every_block_of_every_expert_is_multiplied_once)
{
    return cr_make_param_array(struct group, groups, sizeof(groups) / sizeof(groups[0]));
}

/* Units of all experts as three CTAs would take them; rows that each expert gets. Returns how many units came before
 * the first unit whose block is not among the first `near` of its expert. */
static uint32_t walk_units(const struct prs_route *r, const struct prs_moe_expert_rows *experts, const uint32_t *near,
                           uint32_t units, uint32_t *rows)
{
    uint32_t first_far = units;
    for (uint32_t start = 0; start < 3; start++) {
        struct prs_route_cursor cursor = {0};
        for (uint32_t unit = start; unit < units; unit += 3) {
            const struct prs_moe_expert_rows *e;
            struct prs_route_unit u;
            prs_route_unit(r, experts, near, &cursor, unit, &u);
            cr_assert(u.expert < 6 && u.column < r->columns, "unit %u is outside", unit);
            cr_assert(u.rows >= 1 && u.rows <= PRS_TILE_M);
            e = &experts[u.expert];
            cr_assert(u.block * PRS_TILE_M >= e->first_row && u.block * PRS_TILE_M + u.rows <= e->first_row + e->rows,
                      "unit %u: rows of another expert", unit);
            rows[u.expert] += u.rows;
            if (near && u.block - e->first_row / PRS_TILE_M >= near[u.expert] && unit < first_far)
                first_far = unit;
        }
    }
    return first_far;
}

ParameterizedTest(struct group *g, route, every_block_of_every_expert_is_multiplied_once)
{
    struct prs_route r = route_of(1, 6, 1, 8192);
    struct prs_moe_expert_rows experts[6];
    uint32_t blocks = fill_groups(g, experts), rows[6] = {0};
    r.columns = g->columns;
    walk_units(&r, experts, NULL, blocks * r.columns, rows);
    for (uint32_t e = 0; e < 6; e++)
        cr_assert_eq(rows[e], g->rows[e] * r.columns, "expert %u: %u rows multiplied", e, rows[e]);
}

ParameterizedTestParameters(route, blocks_that_wait_for_no_other_node_are_multiplied_first)
{
    return cr_make_param_array(struct group, groups, sizeof(groups) / sizeof(groups[0]));
}

ParameterizedTest(struct group *g, route, blocks_that_wait_for_no_other_node_are_multiplied_first)
{
    static const uint32_t shares[][6] = {
        {0}, {100, 100, 100, 100, 100, 100}, {50, 100, 0, 99, 100, 51}, {1, 0, 40, 100, 7, 90}};
    struct prs_route r = route_over(2, 1, 0, 6, 1);
    struct prs_moe_expert_rows experts[6];
    uint32_t blocks = fill_groups(g, experts);
    r.columns = g->columns;
    for (uint32_t i = 0; i < sizeof(shares) / sizeof(*shares); i++) {
        uint32_t near[6], rows[6] = {0}, sum = 0;
        for (uint32_t e = 0; e < 6; e++) {
            near[e] = prs_route_near_blocks(&r, e, &experts[e], g->rows[e] * shares[i][e] / 100);
            sum += near[e];
        }
        cr_assert_eq(walk_units(&r, experts, near, blocks * r.columns, rows), sum * r.columns);
        for (uint32_t e = 0; e < 6; e++)
            cr_assert_eq(rows[e], g->rows[e] * r.columns, "expert %u: %u rows multiplied", e, rows[e]);
    }
}

Test(route, a_block_waits_for_another_node_when_it_has_a_row_of_one)
{
    static const uint32_t rows[][3] = {{0, 0, 0},     {1, 0, 0},     {1, 1, 1},     {128, 127, 0},
                                       {128, 128, 1}, {129, 128, 1}, {129, 129, 2}, {400, 383, 2},
                                       {400, 384, 3}, {400, 399, 3}, {400, 400, 4}};
    struct prs_route r = route_over(2, 1, 0, 4, 1);
    for (uint32_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        struct prs_moe_expert_rows e = {256, rows[i][0]};
        r.passes = 2;
        cr_assert_eq(prs_route_near_blocks(&r, 2, &e, rows[i][1]), rows[i][2], "%u of %u rows", rows[i][1], rows[i][0]);
        cr_assert_eq(prs_route_near_blocks(&r, 1, &e, rows[i][1]), 0, "of the first half of the experts");
        r.passes = 1;
        cr_assert_eq(prs_route_near_blocks(&r, 2, &e, rows[i][1]), 0);
    }
}

/* ---- several nodes ---- */
Test(route, a_token_crosses_once_to_each_node_by_the_choice_that_is_computed_first_there)
{
    uint32_t random = 5;
    for (int round = 0; round < 5000; round++) {
        struct prs_route r = route_over(3, 2, (uint32_t)round % 6, 3, 5);
        uint32_t leads[3] = {0, 0, 0}, first[3] = {999, 999, 999}, lead_is[3] = {0, 0, 0};
        uint16_t chosen[5];
        random_choices(&r, chosen, &random);
        for (uint32_t j = 0; j < r.choices; j++) {
            uint32_t code = prs_route_code(&r, chosen, j), order, node;
            if (chosen[j] == PRS_ROUTE_NONE)
                continue;
            node = chosen[j] / 6, order = prs_route_relay_order(&r, chosen[j]);
            first[node] = order < first[node] ? order : first[node];
            if ((code & PRS_ROUTE_RELAY) != 0)
                leads[node]++, lead_is[node] = order;
        }
        for (uint32_t node = 0; node < 3; node++) {
            cr_assert_eq(leads[node], node != r.place.node && first[node] != 999,
                         "node %u of a rank of node %u: %u leads", node, r.place.node, leads[node]);
            cr_assert(leads[node] == 0 || lead_is[node] == first[node]);
        }
    }
}

Test(route, a_nodes_order_takes_the_first_experts_of_all_its_ranks_first)
{
    struct prs_route r = route_over(2, 3, 1, 4, 2);
    uint8_t seen[24] = {0};
    for (uint32_t e = 0; e < 24; e++) {
        uint32_t at = prs_route_relay_order(&r, e);
        cr_assert_eq(at / 12, e / 12, "an expert leaves its node");
        cr_assert_eq(at % 12 / 3, e % 4, "expert %u of its rank comes at %u", e % 4, at % 12);
        cr_assert_eq(seen[at]++, 0);
    }
}

Test(route, senders_of_the_own_node_come_first_and_each_once)
{
    for (uint32_t rank = 0; rank < 6; rank++) {
        struct prs_route r = route_over(3, 2, rank, 1, 1), alone = route_of(6, 6, 1, 1);
        uint32_t seen = 0;
        prs_place_init(&alone.place, rank, 6, 1);
        for (uint32_t i = 0; i < 6; i++) {
            uint32_t p = prs_route_sender(&r, i);
            cr_assert(p < 6 && (seen >> p & 1) == 0);
            seen |= 1u << p;
            cr_assert_eq(prs_route_node_of(&r, p), i / 2);
            cr_assert(i % 2 != 0 || prs_place_after(&r.place, p) == prs_place_counterpart(&r.place, i / 2));
            cr_assert_eq(prs_route_sender(&alone, i), i);
        }
        cr_assert_eq(prs_route_sender(&r, 0), 0);
    }
}

Test(route, distances_name_each_other_over_nodes)
{
    for (uint32_t rank = 0; rank < 6; rank++) {
        struct prs_route r = route_over(3, 2, rank, 1, 1);
        for (uint32_t local = 0; local < 2; local++)
            cr_assert_eq(prs_place_after(&r.place, prs_route_local(&r, local)), r.place.node * 2 + local);
        for (uint32_t p = 0; p < 6; p++) {
            struct prs_route peer = route_over(3, 2, prs_place_after(&r.place, p), 1, 1);
            uint32_t b = prs_route_node_of(&r, p);
            cr_assert_eq(prs_place_after(&peer.place, prs_distance_back(p, r.place.world)), rank);
            cr_assert_eq(prs_place_counterpart(&peer.place, prs_distance_back(b, r.place.nodes)) / 2, r.place.node);
            cr_assert_eq(prs_place_counterpart(&r.place, b) % 2, r.place.local_rank);
            cr_assert_eq(prs_place_counterpart(&r.place, b) / 2, peer.place.node);
        }
    }
}

static void claim(uint8_t *bytes, uint64_t end, uint64_t at, uint64_t count, const char *what)
{
    for (uint64_t i = at; i < at + count; i++) {
        cr_assert_lt(i, end, "%s goes beyond the end", what);
        cr_assert_eq(bytes[i]++, 0, "%s overlaps", what);
    }
}

Test(route, no_mail_note_word_or_counter_overlaps)
{
    struct prs_route r = route_over(3, 2, 4, 5, 3);
    uint64_t end = prs_route_messages_bytes(&r), words = prs_route_relay_word(&r, 3, 0);
    uint64_t counters = prs_route_group_counter(&r, 3, 0), relay = prs_route_relay_at(&r, 2, 1, 0);
    uint8_t *bytes = calloc(end, 1), word[100] = {0}, counter[100] = {0}, *row = calloc(relay, 1);
    cr_assert(words <= 100 && counters <= 100);
    for (uint32_t p = 0; p < r.place.world; p++) {
        uint64_t size = prs_route_entry_at(&r, 0, 0, r.tokens);
        claim(bytes, end, prs_route_counts_at(&r, 0, p), size, "bank 0");
        claim(bytes, end, prs_route_counts_at(&r, 1, p), size, "bank 1");
        claim(bytes, end, prs_route_outgoing_at(&r, p), size, "outbox");
        claim(word, words, p, 1, "word of routes");
    }
    for (uint32_t b = 1; b < r.place.nodes; b++) {
        for (uint32_t bank = 0; bank < 3; bank++)
            claim(bytes, end, prs_route_forwarding_at(&r, bank, b), 16 + 4 * r.tokens * r.place.local_ranks, "note");
        for (uint32_t i = 0; i < r.tokens; i++) {
            claim(row, relay, prs_route_relay_at(&r, 0, b, i), r.row_bytes, "row in");
            claim(row, relay, prs_route_relay_at(&r, 1, b, i), r.row_bytes, "row out");
        }
        for (uint32_t i = 0; i < r.tokens; i += r.put)
            claim(counter, counters, prs_route_put_counter(&r, b, i), 1, "counter of a put");
        for (uint32_t i = 0; i < r.tokens; i += r.group) {
            claim(counter, counters, prs_route_group_counter(&r, b, i), 1, "counter of a group");
            claim(word, words, prs_route_relay_word(&r, b, i / r.group), 1, "word of a group");
        }
    }
    free(bytes);
    free(row);
}

Test(route, the_pieces_of_relayed_rows_add_up)
{
    for (uint32_t count = 1; count < 60; count++)
        for (uint32_t size = 8; size <= 24; size += 8) {
            uint32_t rows = 0;
            for (uint32_t row = 0; row < count; row += size)
                rows += prs_route_piece_rows(row, size, count);
            cr_assert_eq(rows, count);
        }
}

Test(route, nothing_in_an_inbox_overlaps)
{
    struct prs_route r = route_of(4, 20, 3, 10);
    uint64_t end = prs_route_counts_at(&r, 2, 0);
    uint8_t *bytes = calloc(end, 1);
    for (uint32_t bank = 0; bank < 2; bank++)
        for (uint32_t p = 0; p < r.place.world; p++) {
            uint64_t at = prs_route_counts_at(&r, bank, p);
            cr_assert_eq(at % 16, 0);
            for (uint64_t i = 0; i < prs_route_counts_bytes(&r); i++)
                cr_assert_eq(bytes[at + i]++, 0);
            for (uint32_t row = 0; row < r.tokens; row++) {
                at = prs_route_entry_at(&r, bank, p, row);
                cr_assert_eq(at % 16, 0);
                cr_assert_leq(at + prs_route_entry_bytes(&r), end);
                for (uint64_t i = 0; i < prs_route_entry_bytes(&r); i++)
                    cr_assert_eq(bytes[at + i]++, 0);
            }
        }
    free(bytes);
}

Test(route, what_i_am_to_a_peer_is_the_mirror_of_what_it_is_to_me)
{
    for (uint32_t world = 1; world <= 8; world++)
        for (uint32_t p = 0; p < world; p++) {
            struct prs_route r = route_of(world, world, 1, 1);
            uint32_t me = 1 % world, peer = (me + p) % world;
            cr_assert_eq((peer + prs_distance_back(p, r.place.world)) % world, me);
        }
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "fused/route.h"

#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <stdlib.h>
#include <string.h>

static struct prs_route route_of(uint32_t world, uint32_t experts, uint32_t choices, uint32_t tokens)
{
    struct prs_route r = {.world = world, .experts = experts, .local = experts / world, .choices = choices};
    r.nodes = 1, r.seats = world, r.group = 8;
    r.tokens = tokens, r.blocks = 64, r.columns = 3, r.row_bytes = 32, r.ctas = 4;
    return r;
}

static uint32_t next_random(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

static void random_choices(const struct prs_route *r, int64_t *chosen, uint32_t *random)
{
    for (uint32_t j = 0; j < r->choices; j++)
        chosen[j] = next_random(random) % 8 == 0 ? -1 : (int64_t)(next_random(random) % r->experts);
}

Test(route, a_token_has_one_lead_at_each_owner_and_it_is_the_lowest_expert)
{
    struct prs_route r = route_of(4, 16, 6, 8);
    uint32_t random = 7;
    for (int round = 0; round < 5000; round++) {
        int64_t chosen[6], lowest[4] = {99, 99, 99, 99};
        uint32_t leads[4] = {0, 0, 0, 0};
        random_choices(&r, chosen, &random);
        for (uint32_t j = 0; j < r.choices; j++)
            if (chosen[j] >= 0 && chosen[j] < lowest[chosen[j] / 4])
                lowest[chosen[j] / 4] = chosen[j];
        for (uint32_t j = 0; j < r.choices; j++) {
            uint32_t code = prs_route_code(&r, chosen, j);
            cr_assert_eq(code == PRS_ROUTE_NONE, chosen[j] < 0);
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
    cr_assert_eq(prs_route_code(&r, chosen, 0), PRS_ROUTE_NONE);
    cr_assert_eq(prs_route_code(&r, chosen, 1), PRS_ROUTE_NONE);
    cr_assert_eq(prs_route_code(&r, chosen, 2), 3 | PRS_ROUTE_LEAD);
}

Test(route, a_record_uses_each_choice_of_its_owner_once_and_the_lead_first)
{
    struct prs_route r = route_of(3, 9, 7, 8);
    uint32_t random = 11;
    for (int round = 0; round < 5000; round++) {
        int64_t chosen[7];
        uint32_t used[7] = {0}, owners = 0;
        random_choices(&r, chosen, &random);
        for (uint32_t lead = 0; lead < r.choices; lead++) {
            uint32_t code = prs_route_code(&r, chosen, lead), slot = r.choices, steps = 0;
            if (code == PRS_ROUTE_NONE || (code & PRS_ROUTE_LEAD) == 0)
                continue;
            owners++;
            while ((slot = prs_route_next_use(&r, chosen, lead, slot)) != r.choices) {
                cr_assert(steps++ != 0 || slot == lead, "the lead must come first");
                cr_assert_eq(chosen[slot] / 3, chosen[lead] / 3);
                used[slot]++;
                cr_assert_leq(steps, r.choices);
            }
        }
        for (uint32_t j = 0; j < r.choices; j++)
            cr_assert_eq(used[j], chosen[j] >= 0, "slot %u of round %d is used %u times, %u owners", j, round, used[j],
                         owners);
    }
}

struct group {
    uint32_t columns, rows[6];
};

static struct group groups[] = {
    {1, {1, 0, 0, 128, 129, 0}}, {3, {0, 0, 700, 0, 64, 1}}, {8, {5000, 1, 0, 0, 0, 2000}},
    {5, {0, 0, 0, 0, 0, 1}},     {4, {0, 0, 0, 0, 0, 0}},
};

static uint32_t fill_groups(const struct group *g, struct prs_route_expert *experts)
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

ParameterizedTest(struct group *g, route, every_block_of_every_expert_is_multiplied_once)
{
    struct prs_route r = route_of(1, 6, 1, 8192);
    struct prs_route_expert experts[6];
    uint32_t blocks = fill_groups(g, experts), rows[6] = {0};
    r.columns = g->columns;
    for (uint32_t start = 0; start < 3; start++) { /* as three CTAs would */
        struct prs_route_cursor cursor = {0};
        for (uint32_t unit = start; unit < blocks * r.columns; unit += 3) {
            struct prs_route_unit u;
            prs_route_unit(&r, experts, &cursor, unit, &u);
            cr_assert(u.expert < 6 && u.column < r.columns, "unit %u is outside", unit);
            cr_assert(u.rows >= 1 && u.rows <= PRS_TILE_M);
            cr_assert(u.block * PRS_TILE_M >= experts[u.expert].first_row &&
                          u.block * PRS_TILE_M + u.rows <= experts[u.expert].first_row + g->rows[u.expert],
                      "unit %u: rows of another expert", unit);
            rows[u.expert] += u.rows;
        }
    }
    for (uint32_t e = 0; e < 6; e++)
        cr_assert_eq(rows[e], g->rows[e] * r.columns, "expert %u: %u rows multiplied", e, rows[e]);
}

Test(route, nothing_in_an_inbox_overlaps)
{
    struct prs_route r = route_of(4, 20, 3, 10);
    uint64_t end = prs_route_counts_at(&r, 2, 0);
    uint8_t *bytes = calloc(end, 1);
    for (uint32_t bank = 0; bank < 2; bank++)
        for (uint32_t p = 0; p < r.world; p++) {
            uint64_t at = prs_route_counts_at(&r, bank, p);
            cr_assert_eq(at % 16, 0);
            for (uint64_t i = 0; i < prs_route_counts_bytes(&r); i++)
                cr_assert_eq(bytes[at + i]++, 0);
            for (uint32_t row = 0; row < r.tokens; row++) {
                at = prs_route_record_at(&r, bank, p, row);
                cr_assert_eq(at % 16, 0);
                cr_assert_leq(at + prs_route_record_bytes(&r), end);
                for (uint64_t i = 0; i < prs_route_record_bytes(&r); i++)
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
            cr_assert_eq((peer + prs_route_mirror(&r, p)) % world, me);
        }
}

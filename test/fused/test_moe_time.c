/* SPDX-License-Identifier: Apache-2.0 */
/* How many microseconds a launch takes in the order of fused/moe/route.h: two nodes of one GPU, DeepSeek-V3's experts,
 * a link of 400G. Rows come group by group in the order in which they are sent; clusters take units as they come and
 * wait for their rows. Only the effects of the order are modelled: forwarding and placing rows takes no time here. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>

#include "fused/moe/route.h"
#include "fused/core/machine.h"

enum { HIDDEN = 7168, COLUMNS = 2048, EXPERTS = 256, LOCAL = EXPERTS / 2, CHOICES = 8, CLUSTERS = 66, TOKENS = 8192 };

struct launch {
    struct prs_route r;
    uint16_t chosen[2][TOKENS][CHOICES]; /* [rank]: this rank's is 0 */
    double arrival[TOKENS];              /* of rank 1's tokens */
    struct prs_moe_expert_rows experts[LOCAL];
    uint32_t near[LOCAL];                     /* blocks */
    double *ready;                            /* [block] */
    uint32_t blocks, filled[LOCAL], far_rows; /* far_rows: how many have crossed */
};

static uint32_t next_random(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

static void choose(struct launch *l)
{
    uint32_t random = 5;
    for (uint32_t i = 0; i < 2 * l->r.tokens; i++)
        for (uint32_t j = 0; j < CHOICES; j++) {
            uint16_t *chosen = l->chosen[i / l->r.tokens][i % l->r.tokens];
            uint32_t before = 0;
            chosen[j] = (uint16_t)(next_random(&random) % EXPERTS);
            while (before < j && chosen[before] != chosen[j])
                before++;
            j -= before < j; /* all different */
        }
}

/* Sorted by relay lead; a row arrives with the last row of its group. */
static void let_cross(struct launch *l)
{
    struct prs_route sender = l->r;
    uint32_t tokens = l->r.tokens, *order = malloc(tokens * sizeof(*order));
    sender.place.rank = sender.place.node = 1;
    for (uint32_t e = 0; e < LOCAL; e++)
        for (uint32_t t = 0; t < tokens; t++)
            for (uint32_t j = 0; j < CHOICES; j++)
                if (l->chosen[1][t][j] == e && (prs_route_code(&sender, l->chosen[1][t], j) & PRS_ROUTE_RELAY) != 0)
                    order[l->far_rows++] = t;
    for (uint32_t i = 0; i < l->far_rows; i++) {
        uint32_t sent = i - i % l->r.group + prs_route_piece_rows(i, l->r.group, l->far_rows);
        l->arrival[order[i]] = (double)sent * l->r.row_bytes / PRS_ROW_PORT_BYTES_PER_US;
    }
    free(order);
}

static void add_row(struct launch *l, uint32_t expert, double when)
{
    double *ready = &l->ready[(l->experts[expert].first_row + l->filled[expert]++) / PRS_TILE_M];
    *ready = when > *ready ? when : *ready;
}

/* Rows of every expert, own ones first, and when each block has all of them. */
static void receive(struct launch *l)
{
    uint32_t rows[2][LOCAL] = {{0}};
    for (uint32_t i = 0; i < 2 * l->r.tokens * CHOICES; i++) {
        uint32_t rank = i / CHOICES / l->r.tokens;
        uint32_t expert = l->chosen[rank][i / CHOICES % l->r.tokens][i % CHOICES];
        if (expert < LOCAL)
            rows[rank][expert]++;
    }
    for (uint32_t e = 0; e < LOCAL; e++) {
        l->experts[e] = (struct prs_moe_expert_rows){l->blocks * PRS_TILE_M, rows[0][e] + rows[1][e]};
        l->near[e] = prs_route_near_blocks(&l->r, e, &l->experts[e], rows[0][e]);
        l->blocks += prs_route_expert_blocks(&l->experts[e]);
    }
    l->ready = calloc(l->blocks, sizeof(*l->ready));
    for (uint32_t i = 0; i < 2 * l->r.tokens * CHOICES; i++) {
        uint32_t rank = i / CHOICES / l->r.tokens, token = i / CHOICES % l->r.tokens;
        uint32_t expert = l->chosen[rank][token][i % CHOICES];
        if (expert < LOCAL)
            add_row(l, (uint32_t)expert, rank == 0 ? 0 : l->arrival[token]);
    }
}

/* The time until the last unit is done. */
static double multiply(const struct launch *l)
{
    double free_at[CLUSTERS] = {0}, last = 0;
    double unit_us = 2.0 * PRS_TILE_M * HIDDEN * COLUMNS / l->r.columns * CLUSTERS / PRS_MOE_FLOPS_PER_US;
    struct prs_route_cursor cursor = {0};
    for (uint32_t unit = 0; unit < l->blocks * l->r.columns; unit++) {
        struct prs_route_unit u;
        uint32_t c = 0;
        prs_route_unit(&l->r, l->experts, l->near, &cursor, unit, &u);
        for (uint32_t i = 1; i < CLUSTERS; i++)
            c = free_at[i] < free_at[c] ? i : c;
        free_at[c] =
            (free_at[c] > l->ready[u.block] ? free_at[c] : l->ready[u.block]) + unit_us * (u.rows > 64 ? 1 : 0.5);
        last = free_at[c] > last ? free_at[c] : last;
    }
    return last;
}

static double launch_us(uint32_t tokens, uint32_t group, uint32_t passes)
{
    struct launch *l = calloc(1, sizeof(*l));
    double us;
    l->r = (struct prs_route){.experts = EXPERTS, .experts_per_rank = LOCAL, .choices = CHOICES, .tokens = tokens};
    prs_place_init(&l->r.place, 0, 2, 2);
    l->r.put = 32, l->r.group = group, l->r.passes = passes;
    l->r.columns = COLUMNS / (2 * PRS_TILE_N), l->r.row_bytes = HIDDEN * 2;
    choose(l);
    let_cross(l);
    receive(l);
    us = multiply(l);
    printf("%u tokens, groups of %u, %u passes: %.0f us, the link %.0f\n", tokens, group, passes, us,
           l->far_rows * (double)l->r.row_bytes / PRS_ROW_PORT_BYTES_PER_US);
    free(l->ready);
    free(l);
    return us;
}

Test(moe_time, what_needs_no_other_node_hides_the_link, .timeout = 120)
{
    double one = launch_us(8192, 256, 1), two = launch_us(8192, 256, 2);
    cr_assert_lt(two, one * 0.87, "%.0f us in two passes, %.0f in one", two, one);
}

/* Few rows per expert: no block has only rows of this node, so no weight is read twice. */
Test(moe_time, few_tokens_are_multiplied_in_one_pass, .timeout = 120)
{
    cr_assert_float_eq(launch_us(2048, 128, 2), launch_us(2048, 128, 1), 1e-6);
    cr_assert_float_eq(launch_us(512, 128, 2), launch_us(512, 128, 1), 1e-6);
}

Test(moe_time, the_first_experts_do_not_wait_for_the_last_rows, .timeout = 120)
{
    double all = launch_us(2048, 2048, 2), some = launch_us(2048, 128, 2);
    cr_assert_lt(some, all * 0.85, "%.0f us in groups of 128, %.0f in one", some, all);
}

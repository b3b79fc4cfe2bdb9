/* SPDX-License-Identifier: Apache-2.0 */
/* Completions come in any order. They are reported in the order of posting. */
#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "transport/nic/reorder.h"

enum { DEPTH = 8, ROW_TEXT = 48 };

/* posted: S signaled, u unsignaled. Steps: a digit completes that position; the brackets hold what is then reported. */
struct row {
    char posted[DEPTH + 1];
    char steps[ROW_TEXT];
};

ParameterizedTestParameters(reorder, reports_signaled_requests_oldest_first)
{
    static struct row rows[] = {
        {"S", "0[0]"},                                    /* the simplest */
        {"SS", "1[]0[01]"},                               /* the later one first */
        {"uS", "0[]1[1]"},                                /* an unsignaled one is not reported */
        {"uS", "1[]0[1]"},                                /* but later ones wait for it */
        {"Su", "0[0]1[]"},                                /* one at the end stays unreported */
        {"SuS", "2[]1[]0[02]"},                           /* backwards */
        {"uuS", "2[]0[]1[2]"},                            /* the middle one comes last */
        {"SSSS", "2[]0[0]3[]1[123]"},                     /* reported in two parts */
        {"SSSSSSSS", "7[]6[]5[]4[]3[]2[]1[]0[01234567]"}, /* full, backwards */
        {"uuuuuuuS", "7[]0[]2[]1[]4[]3[]6[]5[7]"},        /* pairs */
        {"uuuuuuuu", "0[]1[]2[]3[]4[]5[]6[]7[]"},         /* none is reported */
    };

    return cr_make_param_array(struct row, rows, sizeof(rows) / sizeof(*rows));
}

/* first: the position that stands for digit 0; near 2^32 positions wrap around. */
static void play(const struct row *row, uint32_t first)
{
    struct prs_reorder reorder;
    char seen[ROW_TEXT] = "";
    uint32_t position;

    cr_assert_eq(prs_reorder_init(&reorder, DEPTH), 0);
    prs_reorder_begin(&reorder, first);
    for (const char *at = row->posted; *at; at++)
        prs_reorder_post(&reorder, *at == 'S');
    if (*row->posted)
        prs_reorder_begin(&reorder, first + DEPTH); /* without effect: some are in flight */
    for (const char *at = row->steps; *at; at++) {
        if (*at < '0' || *at > '7' || (at[1] != '['))
            continue;
        cr_assert_eq(prs_reorder_complete(&reorder, first + (uint32_t)(*at - '0')), 0);
        snprintf(seen + strlen(seen), sizeof(seen) - strlen(seen), "%c[", *at);
        while (prs_reorder_next(&reorder, &position))
            snprintf(seen + strlen(seen), sizeof(seen) - strlen(seen), "%u", position - first);
        snprintf(seen + strlen(seen), sizeof(seen) - strlen(seen), "]");
    }
    cr_assert_str_eq(seen, row->steps, "of %s from %u", row->posted, first);
    prs_reorder_fini(&reorder);
}

ParameterizedTest(struct row *row, reorder, reports_signaled_requests_oldest_first)
{
    play(row, 0);
    play(row, 5);
    play(row, UINT32_MAX - 2);
}

Test(reorder, refuses_the_completion_of_a_request_that_is_not_in_flight)
{
    struct prs_reorder reorder;
    uint32_t position;

    cr_assert_eq(prs_reorder_init(&reorder, DEPTH), 0);
    cr_assert_eq(prs_reorder_complete(&reorder, 0), -EPROTO, "nothing was posted");
    prs_reorder_post(&reorder, true);
    prs_reorder_post(&reorder, true);
    cr_assert_eq(prs_reorder_complete(&reorder, 2), -EPROTO, "not posted yet");
    cr_assert_eq(prs_reorder_complete(&reorder, 1), 0);
    cr_assert_eq(prs_reorder_complete(&reorder, 1), -EPROTO, "a second time, after a gap");
    cr_assert_eq(prs_reorder_complete(&reorder, 0), 0);
    cr_assert_eq(prs_reorder_complete(&reorder, 0), -EPROTO, "a second time, before all others");
    cr_assert(prs_reorder_next(&reorder, &position) && position == 0);
    prs_reorder_fini(&reorder);
}

Test(reorder, slots_are_used_again_lap_after_lap)
{
    struct prs_reorder reorder;
    uint32_t position, next = 0;

    cr_assert_eq(prs_reorder_init(&reorder, DEPTH), 0);
    for (uint32_t lap = 0; lap < 100; lap++) {
        for (uint32_t i = 0; i < DEPTH; i++)
            prs_reorder_post(&reorder, (lap + i) % 3 == 0);
        for (uint32_t i = 0; i < DEPTH; i++) /* 3 and DEPTH have no common divisor: each comes once */
            cr_assert_eq(prs_reorder_complete(&reorder, lap * DEPTH + (i * 3 + lap) % DEPTH), 0);
        while (prs_reorder_next(&reorder, &position)) {
            while ((next / DEPTH + next % DEPTH) % 3 != 0)
                next++;
            cr_assert_eq(position, next++);
        }
    }
    cr_assert_geq(next, 99u * DEPTH);
    prs_reorder_fini(&reorder);
}

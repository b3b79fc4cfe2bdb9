/* SPDX-License-Identifier: Apache-2.0 */
/* Completions in any order, told of in the order of posting. */
#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "transport/prefix.h"

enum { DEPTH = 8, ROW_TEXT = 48 };

/* posted: S signaled, u not. Steps: a digit completes that position; then what is told of, in brackets. */
struct row {
    char posted[DEPTH + 1];
    char steps[ROW_TEXT];
};

ParameterizedTestParameters(prefix, tells_of_signaled_requests_oldest_first)
{
    static struct row rows[] = {
        {"S", "0[0]"},                                    /* the simplest */
        {"SS", "1[]0[01]"},                               /* the later one first */
        {"uS", "0[]1[1]"},                                /* an unsignaled one is not told of */
        {"uS", "1[]0[1]"},                                /* but is waited for */
        {"Su", "0[0]1[]"},                                /* one at the end stays untold */
        {"SuS", "2[]1[]0[02]"},                           /* backwards */
        {"uuS", "2[]0[]1[2]"},                            /* the gap in the middle */
        {"SSSS", "2[]0[0]3[]1[123]"},                     /* in pieces */
        {"SSSSSSSS", "7[]6[]5[]4[]3[]2[]1[]0[01234567]"}, /* full, backwards */
        {"uuuuuuuS", "7[]0[]2[]1[]4[]3[]6[]5[7]"},        /* pairs */
        {"uuuuuuuu", "0[]1[]2[]3[]4[]5[]6[]7[]"},         /* nobody asks */
    };

    return cr_make_param_array(struct row, rows, sizeof(rows) / sizeof(*rows));
}

/* first: the position that stands for digit 0; near 2^32 positions wrap around. */
static void play(const struct row *row, uint32_t first)
{
    struct prs_prefix prefix;
    char seen[ROW_TEXT] = "";
    uint32_t position;

    cr_assert_eq(prs_prefix_init(&prefix, DEPTH), 0);
    prefix.head = prefix.tail = prefix.told = first;
    for (const char *at = row->posted; *at; at++)
        prs_prefix_post(&prefix, *at == 'S');
    for (const char *at = row->steps; *at; at++) {
        if (*at < '0' || *at > '7' || (at[1] != '['))
            continue;
        cr_assert_eq(prs_prefix_done(&prefix, first + (uint32_t)(*at - '0')), 0);
        snprintf(seen + strlen(seen), sizeof(seen) - strlen(seen), "%c[", *at);
        while (prs_prefix_next(&prefix, &position))
            snprintf(seen + strlen(seen), sizeof(seen) - strlen(seen), "%u", position - first);
        snprintf(seen + strlen(seen), sizeof(seen) - strlen(seen), "]");
    }
    cr_assert_str_eq(seen, row->steps, "of %s from %u", row->posted, first);
    prs_prefix_fini(&prefix);
}

ParameterizedTest(struct row *row, prefix, tells_of_signaled_requests_oldest_first)
{
    play(row, 0);
    play(row, 5);
    play(row, UINT32_MAX - 2);
}

Test(prefix, refuses_a_completion_of_what_is_not_in_flight)
{
    struct prs_prefix prefix;
    uint32_t position;

    cr_assert_eq(prs_prefix_init(&prefix, DEPTH), 0);
    cr_assert_eq(prs_prefix_done(&prefix, 0), -EPROTO, "nothing was posted");
    prs_prefix_post(&prefix, true);
    prs_prefix_post(&prefix, true);
    cr_assert_eq(prs_prefix_done(&prefix, 2), -EPROTO, "not posted yet");
    cr_assert_eq(prs_prefix_done(&prefix, 1), 0);
    cr_assert_eq(prs_prefix_done(&prefix, 1), -EPROTO, "a second time, behind a gap");
    cr_assert_eq(prs_prefix_done(&prefix, 0), 0);
    cr_assert_eq(prs_prefix_done(&prefix, 0), -EPROTO, "a second time, before all others");
    cr_assert(prs_prefix_next(&prefix, &position) && position == 0);
    prs_prefix_fini(&prefix);
}

Test(prefix, slots_are_used_again_lap_after_lap)
{
    struct prs_prefix prefix;
    uint32_t position, next = 0;

    cr_assert_eq(prs_prefix_init(&prefix, DEPTH), 0);
    for (uint32_t lap = 0; lap < 100; lap++) {
        for (uint32_t i = 0; i < DEPTH; i++)
            prs_prefix_post(&prefix, (lap + i) % 3 == 0);
        for (uint32_t i = 0; i < DEPTH; i++) /* 3 and the depth have no common divisor: each once */
            cr_assert_eq(prs_prefix_done(&prefix, lap * DEPTH + (i * 3 + lap) % DEPTH), 0);
        while (prs_prefix_next(&prefix, &position)) {
            while ((next / DEPTH + next % DEPTH) % 3 != 0)
                next++;
            cr_assert_eq(position, next++);
        }
    }
    cr_assert_geq(next, 99u * DEPTH);
    prs_prefix_fini(&prefix);
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Which rails may be paired. */
#include <criterion/criterion.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "transport/peer/handshake.h"

static struct prs_wire_rail rail_of(const char *queue_kind)
{
    struct prs_wire_rail rail = {.name = "some", .rail_id = -1, .plane_id = -1, .port = 1, .mtu = 5, .reads = 1};

    snprintf(rail.queue_kind, sizeof(rail.queue_kind), "%s", queue_kind);
    return rail;
}

Test(handshake, rails_of_different_kinds_of_queues_are_not_paired)
{
    struct prs_wire_rail rc = rail_of("rc"), srd = rail_of("srd");
    struct prs_wire_pair pair[PRS_MAX_RAILS];

    cr_assert_eq(prs_wire_pair_rails(&rc, 1, &srd, 1, pair), -ENETUNREACH);
    cr_assert(strstr(prs_error_text(), "rc queues") && strstr(prs_error_text(), "srd queues"), "%s", prs_error_text());
    cr_assert_eq(prs_wire_pair_rails(&srd, 1, &rc, 1, pair), -ENETUNREACH);
    cr_assert_eq(prs_wire_pair_rails(&srd, 1, &srd, 1, pair), 1);
}

/* In a rail-optimised network, a rail reaches only rails with its own number. */
Test(handshake, rails_that_are_known_to_differ_are_not_paired_beside_equal_ones)
{
    static const struct {
        int16_t ours[2], theirs[2];
        int pairs;
    } rows[] = {
        {{0, 1}, {1, 0}, 2},  {{0, 1}, {1, 2}, 1}, {{-1, -1}, {1, 2}, 2},
        {{0, -1}, {0, 3}, 2}, {{0, 1}, {2, 3}, 2}, /* no numbers are equal: any pair is tried */
    };

    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        struct prs_wire_rail ours[2] = {rail_of("rc"), rail_of("rc")};
        struct prs_wire_rail theirs[2] = {rail_of("rc"), rail_of("rc")};
        struct prs_wire_pair pair[PRS_MAX_RAILS];

        for (int k = 0; k < 2; k++) {
            ours[k].rail_id = rows[i].ours[k];
            theirs[k].rail_id = rows[i].theirs[k];
        }
        cr_assert_eq(prs_wire_pair_rails(ours, 2, theirs, 2, pair), rows[i].pairs, "row %zu", i);
    }
}

/* Each side has one rail, and one that stands by. Rails in use are paired with each other whatever their numbers are;
 * those that stand by come last, or not at all. */
Test(handshake, standby_rails_are_paired_with_each_other)
{
    static const struct {
        int16_t ours[2], theirs[2]; /* the second stands by */
        bool theirs_stands_by;
        int pairs;
    } rows[] = {
        {{0, 1}, {0, 1}, true, 2}, {{0, 1}, {1, 0}, true, 2},    {{0, 1}, {2, 1}, true, 2},
        {{0, 1}, {0, 2}, true, 1}, {{-1, -1}, {-1, 0}, true, 2}, {{0, 1}, {0, 1}, false, 1},
    };

    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        struct prs_wire_rail ours[2] = {rail_of("rc"), rail_of("rc")};
        struct prs_wire_rail theirs[2] = {rail_of("rc"), rail_of("rc")};
        struct prs_wire_pair pair[PRS_MAX_RAILS];

        for (int k = 0; k < 2; k++) {
            ours[k].rail_id = rows[i].ours[k];
            theirs[k].rail_id = rows[i].theirs[k];
        }
        ours[1].standby = 1;
        theirs[1].standby = rows[i].theirs_stands_by;
        cr_assert_eq(prs_wire_pair_rails(ours, 2, theirs, 2, pair), rows[i].pairs, "row %zu", i);
        cr_assert(pair[0].connector_rail == 0 && pair[0].listener_rail == 0, "row %zu", i);
        if (rows[i].pairs == 2)
            cr_assert(pair[1].connector_rail == 1 && pair[1].listener_rail == 1, "row %zu", i);
    }
}

Test(handshake, a_rail_without_a_kind_of_queues_is_refused)
{
    struct prs_wire_hello hello = {.rail_count = 1, .queues_per_rail = 1, .rail = {rail_of("srd")}};

    cr_assert_eq(prs_wire_check_hello(&hello, "a peer"), 0);
    hello.rail[0].queue_kind[0] = 0;
    cr_assert_eq(prs_wire_check_hello(&hello, "a peer"), -EPROTO);
    memset(hello.rail[0].queue_kind, 'x', sizeof(hello.rail[0].queue_kind));
    cr_assert_eq(prs_wire_check_hello(&hello, "a peer"), -EPROTO, "it does not end");
}

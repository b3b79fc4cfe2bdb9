/* SPDX-License-Identifier: Apache-2.0 */
/* Which rails may be paired. */
#include <criterion/criterion.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "transport/peer/handshake.h"

static struct prs_wire_rail rail_of(const char *queue_kind)
{
    struct prs_wire_rail rail = {.name = "some", .rail_id = -1, .plane_id = -1, .port = 1};

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

/* ---- what no peer says ---- */

static const uint8_t own_cookie[16] = {1, 2, 3};

/* What a side that expects a HELLO makes of this frame. */
static int receive(const struct prs_frame_head *head, struct prs_stream *stream)
{
    static const union prs_address nobody = {.v4 = {.sin_family = AF_INET}};
    static const uint8_t body[sizeof(union prs_wire_any)];
    int fds[2], r;

    cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
    cr_assert_eq(send(fds[0], head, sizeof(*head), 0), (ssize_t)sizeof(*head));
    cr_assert_eq(send(fds[0], body, sizeof(struct prs_wire_hello), 0), (ssize_t)sizeof(struct prs_wire_hello));
    prs_stream_init(stream, fds[1], &nobody, own_cookie);
    stream->is_stranger = true;
    r = prs_stream_get(stream, PRS_FRAME_HELLO);
    prs_stream_close(stream);
    close(fds[0]);
    return r;
}

Test(handshake, a_frame_that_cannot_be_is_refused_and_its_sender_stays_a_stranger)
{
    static const struct prs_frame_head good = {.magic = PRS_FRAME_MAGIC,
                                               .version = PRS_WIRE_VERSION,
                                               .type = PRS_FRAME_HELLO,
                                               .length = sizeof(struct prs_wire_hello),
                                               .cookie = {1, 2, 3}};
    struct prs_frame_head wrong[5] = {good, good, good, good, good};
    struct prs_stream stream;

    wrong[0].magic++;
    wrong[1].version++;
    wrong[2].cookie[15]++;
    wrong[3].type = 0; /* it has no body */
    wrong[3].length = 0;
    wrong[4].length--;
    for (int i = 0; i < 5; i++) {
        cr_expect_eq(receive(&wrong[i], &stream), -EPROTO, "frame %d", i);
        cr_expect(stream.is_stranger, "frame %d", i);
    }
    cr_expect_eq(receive(&good, &stream), 0, "%s", prs_error_text());
    cr_expect(!stream.is_stranger);
}

static struct prs_wire_hello good_hello(void)
{
    return (struct prs_wire_hello){.rail_count = 1, .queues_per_rail = 1, .rail = {rail_of("rc")}};
}

Test(handshake, a_hello_that_cannot_be_is_refused)
{
    struct prs_wire_hello wrong[8], good = good_hello();

    for (int i = 0; i < 8; i++)
        wrong[i] = good;
    wrong[0].rail_count = 0;
    wrong[1].rail_count = PRS_MAX_RAILS + 1;
    for (int i = 0; i < PRS_MAX_RAILS; i++) /* all are good, and there are too many */
        wrong[1].rail[i] = good.rail[0];
    memset(wrong[2].rail[0].name, 'n', sizeof(wrong[2].rail[0].name));
    wrong[3].rail[0].standby = 2;
    wrong[4].queues_per_rail = 0;
    wrong[5].queues_per_rail = PRS_ORDER_MAX_QUEUES_PER_RAIL + 1;
    wrong[6].private_data.bytes = PRS_PRIVATE_DATA_BYTES + 1;
    wrong[7].rail[0].queue_kind[0] = 0;
    for (int i = 0; i < 8; i++)
        cr_expect_eq(prs_wire_check_hello(&wrong[i], "a peer"), -EPROTO, "hello %d", i);
    cr_expect_eq(prs_wire_check_hello(&good, "a peer"), 0, "%s", prs_error_text());
}

Test(handshake, a_reply_that_cannot_be_is_refused)
{
    enum { OWN = 2 };
    struct prs_wire_reply good = {.rail_count = 2,
                                  .pair_count = 2,
                                  .queues_per_pair = 2,
                                  .queues = {.count = 4},
                                  .rail = {rail_of("rc"), rail_of("rc")},
                                  .pair = {{0, 1}, {1, 0}}};
    struct prs_wire_reply wrong[8];

    for (int i = 0; i < 8; i++)
        wrong[i] = good;
    wrong[0].queues.count = 3;
    wrong[1].pair_count = 0;
    wrong[2].pair_count = PRS_MAX_RAILS + 1;
    wrong[3].queues_per_pair = 0;
    wrong[4].pair[1].connector_rail = OWN;
    wrong[5].pair[1].listener_rail = 2;
    wrong[6].pair[1].connector_rail = 0; /* twice */
    wrong[7].private_data.bytes = PRS_PRIVATE_DATA_BYTES + 1;
    for (int i = 0; i < 8; i++)
        cr_expect_eq(prs_wire_check_reply(&wrong[i], OWN, "a peer"), -EPROTO, "reply %d", i);
    cr_expect_eq(prs_wire_check_reply(&good, OWN, "a peer"), 0, "%s", prs_error_text());
}

/* SPDX-License-Identifier: Apache-2.0 */
/* What a side says of lost rails when it contradicts itself, fails, or says nothing more. Without a NIC. */
#include <criterion/criterion.h>
#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "test/support/fake_sides.h"
#include "transport/peer/health.h"
#include "transport/peer/note.h"
#include "transport/util/clock.h"

static struct prs_peer *peer_of(int s)
{
    return &sides[s].peer;
}

/* Side A says this to side B. */
static void say(const struct prs_wire_note *note)
{
    prs_note_send(peer_of(A), note);
}

static void must_fail(int r, int error, const char *text)
{
    cr_assert_eq(r, error, "%d: %s", r, peer_of(B)->error_text);
    cr_assert_eq(peer_of(B)->error, error);
    cr_assert(strstr(peer_of(B)->error_text, text), "%s", peer_of(B)->error_text);
    close_sides();
}

/* Let B continue until the path has reached this stage. */
static void step_until(enum prs_path_stage stage)
{
    for (int i = 0; path_at(B)->stage != stage; i++) {
        cr_assert_lt(i, 100);
        cr_assert_eq(prs_failover_step(peer_of(B)), 0, "%s", peer_of(B)->error_text);
    }
}

Test(failover, a_side_that_has_failed_says_why)
{
    struct prs_wire_note note = {.type = PRS_NOTE_FAILED};

    open_sides();
    memset(note.why, 'y', sizeof(note.why)); /* without an end */
    say(&note);
    must_fail(prs_failover_read(peer_of(B)), -ECONNRESET, "has failed: yyy");
}

Test(failover, the_failure_of_a_peer_reaches_the_other_side)
{
    open_sides();
    prs_note_tell_failure(peer_of(A), "its cable was eaten");
    must_fail(prs_failover_read(peer_of(B)), -ECONNRESET, "its cable was eaten");
}

/* Each side has lost different rails. */
Test(failover, without_a_rail_that_both_have_the_peer_fails)
{
    struct prs_wire_note note = {.type = PRS_NOTE_DOWN, .path = 0, .why = "the other cable"};

    open_sides();
    cr_assert(prs_failover_start(peer_of(B), 1, "one cable"));
    cr_assert(prs_failover_start(peer_of(B), 2, "another cable"));
    cr_assert(!prs_failover_start(peer_of(B), 0, "the last one"), "the last path was given up");
    cr_assert_eq(path_at(B)->stage, PRS_PATH_UP);
    say(&note);
    must_fail(prs_failover_read(peer_of(B)), -ENETDOWN, "no rail is left: the other side lost it: the other cable");
}

/* Or the other side has lost its count; then messages that we send again may have arrived already. */
Test(failover, a_side_that_took_more_than_was_sent_ends_the_peer)
{
    struct prs_wire_note note = {.type = PRS_NOTE_DOWN, .taken = {5}};
    int r = 0;

    open_sides();
    say(&note);
    for (int i = 0; !r; i++) {
        cr_assert_lt(i, 100);
        r = prs_failover_step(peer_of(B));
        if (!r && path_at(B)->stage == PRS_PATH_UP)
            r = prs_failover_read(peer_of(B)) < 0;
    }
    must_fail(peer_of(B)->error, -EPROTO, "has taken more");
}

Test(failover, a_path_is_told_of_once)
{
    struct prs_wire_note note = {.type = PRS_NOTE_DOWN};

    open_sides();
    say(&note);
    cr_assert_eq(prs_failover_read(peer_of(B)), PRS_AGAIN);
    cr_assert(path_at(B)->told && path_at(B)->stage == PRS_PATH_DRAINING);
    say(&note);
    must_fail(prs_failover_read(peer_of(B)), -EPROTO, "unexpected");
}

/* Both limits are far away until they pass. */
Test(failover, a_nic_that_does_not_flush_its_queues_ends_the_peer)
{
    open_sides();
    fake(peer_of(B)->link[0])->polls_until_flushed = 1000;
    cr_assert(prs_failover_start(peer_of(B), 0, "a cable"));
    path_at(B)->since_ns = prs_clock_ns() - (PRS_FAILOVER_DRAIN_MS - 5000) * 1000000ull;
    cr_assert_eq(prs_failover_step(peer_of(B)), 0);
    cr_assert_eq(path_at(B)->stage, PRS_PATH_DRAINING);
    path_at(B)->since_ns = prs_clock_ns() - PRS_FAILOVER_DRAIN_MS * 1000000ull;
    must_fail(prs_failover_step(peer_of(B)), -EIO, "did not flush its queues within 10000 ms after: a cable");
}

Test(failover, a_side_that_does_not_say_what_it_has_taken_ends_the_peer)
{
    open_sides();
    cr_assert(prs_failover_start(peer_of(B), 0, "a cable"));
    step_until(PRS_PATH_AGREEING);
    path_at(B)->since_ns = prs_clock_ns() - (sides[B].fabric.config.timeout_ms - 30000) * 1000000ull;
    cr_assert_eq(prs_failover_step(peer_of(B)), 0);
    path_at(B)->since_ns = prs_clock_ns() - sides[B].fabric.config.timeout_ms * 1000000ull;
    must_fail(prs_failover_step(peer_of(B)), -ETIMEDOUT, "has not said within 60000 ms");
}

/* No thread could be started to watch it. Events that the thread would have polled are kept for the owner, which closes
 * first. */
Test(failover, events_that_are_kept_end_with_the_peer)
{
    open_sides();
    cr_assert(prs_failover_start(peer_of(B), 0, "a cable"));
    (void)prs_failover_keep_events(peer_of(B), 0);
    cr_assert_not_null(peer_of(B)->failover->kept, "the sanitizer of addresses sees whether this is freed");
    close_sides();
}

/* ---- requests that fail while a farewell may come ---- */

static enum prs_path_stage stage_at(uint32_t path)
{
    return peer_of(B)->failover->path[path].stage;
}

Test(failover, all_paths_whose_requests_failed_are_given_up_when_no_farewell_comes)
{
    open_sides();
    fail_early(B);
    fail_request(B, 2);
    fail_request(B, 0);
    cr_assert(stage_at(0) == PRS_PATH_UP && stage_at(2) == PRS_PATH_UP);
    cr_assert_eq(prs_health_check(peer_of(B)), 0);
    cr_assert(stage_at(0) == PRS_PATH_UP && stage_at(2) == PRS_PATH_UP, "a farewell may still come");
    peer_of(B)->farewell_ns = prs_clock_ns();
    cr_assert_eq(prs_health_check(peer_of(B)), 0);
    cr_assert(stage_at(0) == PRS_PATH_DRAINING && stage_at(2) == PRS_PATH_DRAINING);
    cr_assert_eq(stage_at(1), PRS_PATH_UP);
    close_sides();
}

/* A path that was given up before is not the one to name, nor is what the failure flushed. */
Test(failover, the_error_names_the_request_that_failed_on_the_last_path)
{
    struct prs_event flushed = {
        .kind = PRS_EVENT_ERROR, .queue = 2, .error = -ECONNRESET, .text = "flushed", .cause = "the test"};

    open_sides();
    fail_early(B);
    fail_request(B, 0);
    peer_of(B)->farewell_ns = prs_clock_ns();
    cr_assert_eq(prs_health_check(peer_of(B)), 0);
    cr_assert_eq(stage_at(0), PRS_PATH_DRAINING);
    fail_request(B, 1);
    fail_request(B, 2);
    cr_assert_eq(prs_health_judge(peer_of(B), &flushed), 0);
    peer_of(B)->farewell_ns = prs_clock_ns();
    must_fail(prs_health_check(peer_of(B)), -ETIMEDOUT, "on queue 2");
}

Test(failover, requests_that_failed_on_all_paths_end_the_peer_when_no_farewell_comes)
{
    open_sides();
    fail_early(B);
    for (uint32_t path = 0; path < PATHS; path++)
        fail_request(B, path);
    peer_of(B)->farewell_ns = prs_clock_ns();
    must_fail(prs_health_check(peer_of(B)), -ETIMEDOUT, "; no other rail is left");
}

/* ---- the stream ---- */

Test(failover, a_farewell_is_no_failure_and_after_it_nothing_is_told)
{
    struct prs_wire_note note = {.type = PRS_NOTE_DOWN};
    char byte;

    open_sides();
    note.type = PRS_NOTE_FAREWELL;
    cr_assert_eq(send(peer_of(A)->stream_fd, &note.type, 1, 0), 1);
    cr_assert_eq(prs_failover_read(peer_of(B)), 0);
    cr_assert(peer_of(B)->remote_closed);
    cr_assert(!prs_failover_start(peer_of(B), 0, "too late"), "nobody is there to agree");
    prs_note_tell_failure(peer_of(B), "too late");
    cr_assert_lt(recv(peer_of(A)->stream_fd, &byte, 1, MSG_DONTWAIT), 0);
    close_sides();
}

Test(failover, a_note_may_come_in_pieces_and_a_stream_that_ends_in_one_is_lost)
{
    struct prs_wire_note note = {.type = PRS_NOTE_DOWN};
    size_t part = 43;

    open_sides();
    for (size_t at = 0; at < sizeof(note); at += part) {
        if (part > sizeof(note) - at)
            part = sizeof(note) - at;
        cr_assert_eq(path_at(B)->stage, PRS_PATH_UP);
        cr_assert_eq(send(peer_of(A)->stream_fd, (char *)&note + at, part, 0), (ssize_t)part);
        cr_assert_eq(prs_failover_read(peer_of(B)), PRS_AGAIN);
    }
    cr_assert_eq(path_at(B)->stage, PRS_PATH_DRAINING);
    cr_assert_eq(send(peer_of(A)->stream_fd, &note, 43, 0), 43);
    shutdown(peer_of(A)->stream_fd, SHUT_WR);
    cr_assert_eq(prs_failover_read(peer_of(B)), -ECONNRESET);
    close_sides();
}

/* The other side cannot fail over, so the only valid notes are a farewell and a loss. */
Test(failover, a_peer_without_failover_takes_no_other_notes)
{
    struct prs_wire_note note = {.type = PRS_NOTE_DOWN};

    open_sides();
    prs_failover_close(peer_of(B));
    say(&note);
    must_fail(prs_failover_read(peer_of(B)), -EPROTO, "sent a byte 0x44");
}

/* ---- the other side has lost another rank ---- */

/* Side B reads a note in pieces, and keeps it. */
static void read_loss(uint32_t rank, char filling)
{
    struct prs_wire_note note = {.type = PRS_NOTE_LOST, .rank = rank};
    size_t part = 43;

    memset(note.loss, filling, sizeof(note.loss)); /* without an end */
    for (size_t at = 0; at < sizeof(note); at += part) {
        if (part > sizeof(note) - at)
            part = sizeof(note) - at;
        cr_assert_eq(send(peer_of(A)->stream_fd, (char *)&note + at, part, 0), (ssize_t)part);
        cr_assert_eq(prs_failover_read(peer_of(B)), PRS_AGAIN);
    }
    cr_assert_eq(prs_health_check(peer_of(B)), 0, "what was sent before may not be raised yet: %s",
                 peer_of(B)->error_text);
}

static void end_after_loss(uint32_t rank, const char *text)
{
    read_loss(rank, 'z');
    read_loss(rank + 1, 'y'); /* changes nothing */
    cr_assert_eq(peer_of(B)->loss->rank, rank);
    cr_assert_eq(peer_of(B)->loss->why[PRS_LOSS_TEXT - 1], 0);
    peer_of(B)->loss->since_ns -= 1000000000;
    must_fail(prs_health_check(peer_of(B)), -ECONNRESET, text);
}

Test(failover, a_loss_ends_a_peer_for_which_nothing_arrives_any_more)
{
    open_sides();
    end_after_loss(7, " has lost rank 7: zzz");
}

Test(failover, a_loss_is_told_without_failover_too)
{
    open_sides();
    prs_failover_close(peer_of(B));
    end_after_loss(UINT32_MAX - 1, " has lost rank 4294967294: zzz");
}

/* The side that has lost a rank may close at once. */
Test(failover, a_farewell_does_not_hide_a_loss)
{
    const char farewell = PRS_NOTE_FAREWELL;

    open_sides();
    read_loss(7, 'z');
    cr_assert_eq(send(peer_of(A)->stream_fd, &farewell, 1, 0), 1);
    cr_assert_eq(prs_health_check(peer_of(B)), 0, "%s", peer_of(B)->error_text);
    cr_assert(peer_of(B)->remote_closed);
    peer_of(B)->loss->since_ns -= 1000000000;
    must_fail(prs_health_check(peer_of(B)), -ECONNRESET, " has lost rank 7: zzz");
}

Test(failover, a_rail_may_be_lost_after_a_loss)
{
    struct prs_wire_note note = {.type = PRS_NOTE_DOWN};

    open_sides();
    read_loss(7, 'z');
    say(&note);
    cr_assert_eq(prs_failover_read(peer_of(B)), PRS_AGAIN);
    cr_assert_eq(path_at(B)->stage, PRS_PATH_DRAINING);
    close_sides();
}

Test(failover, a_loss_is_told_once_and_without_the_rails_of_the_lost_connection)
{
    static struct prs_peer failed = {.error_text = "no answer; peer 10.0.0.1 over one rail",
                                     .description = "peer 10.0.0.1 over one rail"};
    char byte;

    open_sides();
    prs_note_tell_loss(peer_of(A), 3, &failed);
    cr_assert_eq(prs_failover_read(peer_of(B)), PRS_AGAIN);
    cr_assert_eq(peer_of(B)->loss->rank, 3);
    cr_assert_str_eq(peer_of(B)->loss->why, "no answer");
    prs_note_tell_loss(peer_of(A), 4, &failed);
    cr_assert_lt(recv(peer_of(B)->stream_fd, &byte, 1, MSG_DONTWAIT), 0, "it was told twice");
    peer_of(B)->remote_closed = true;
    prs_note_tell_loss(peer_of(B), 4, &failed);
    cr_assert_lt(recv(peer_of(A)->stream_fd, &byte, 1, MSG_DONTWAIT), 0, "it was told though it had closed");
    close_sides();
}

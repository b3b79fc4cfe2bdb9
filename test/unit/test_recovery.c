/* SPDX-License-Identifier: Apache-2.0 */
/* Two sides of a connection, joined by a stream, agree that a path is lost and give it new queues. Here without a NIC:
 * what each side does is chosen one step at a time, and a path may fail at every one of them. */
#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "test/support/fake_sides.h"
#include "transport/peer/fail.h"
#include "transport/peer/health.h"
#include "transport/peer/note.h"
#include "transport/peer/recovery.h"
#include "transport/nic/verbs/address.h"
#include "transport/util/clock.h"
#include "transport/peer/watch.h"

enum { LIMIT_MS = 100000 };

/* ---- what a side may do ---- */

/* A side that continues over other queues knows that nothing more comes over these, and both sides use the same
 * ones. */
static void check(const char *after)
{
    for (int s = 0; s < 2; s++) {
        const struct prs_failover_path *own = path_at(s), *other = path_at(!s);
        const struct fake_link *link = fake(sides[s].peer.link[0]), *far = fake(sides[!s].peer.link[0]);

        cr_assert_eq(sides[s].peer.error, 0, "side %d after %s: %s", s, after, sides[s].peer.error_text);
        if (own->stage == PRS_PATH_DOWN && own->epoch == other->epoch)
            cr_assert(far->base.stopped, "side %d goes on after %s, and the other may still write", s, after);
        if (own->stage == PRS_PATH_UP && !link->base.stopped && !far->base.stopped && own->epoch == other->epoch)
            cr_assert(link->connected_to == far->number && far->connected_to == link->number,
                      "after %s the sides use different queues: side %d %u to %u, the other %u to %u", after, s,
                      link->number, link->connected_to, far->number, far->connected_to);
        if (own->stage == PRS_PATH_UP && other->stage == PRS_PATH_UP && own->epoch != other->epoch)
            cr_assert(0, "after %s both use the path, with different queues", after);
    }
}

static void read_notes(int s)
{
    cr_assert(prs_failover_read(&sides[s].peer) == PRS_AGAIN, "side %d: %s", s, sides[s].peer.error_text);
    check("reading");
}

static void step(int s)
{
    if (prs_failover_is_active(&sides[s].peer))
        cr_assert_eq(prs_failover_step(&sides[s].peer), 0, "side %d: %s", s, sides[s].peer.error_text);
    check("a step");
}

static void look(int s)
{
    sides[s].peer.failover->look_ns = 0;
    sides[s].peer.failover->looks = 1u << 20;
    cr_assert_eq(prs_failover_recover(&sides[s].peer), 0, "side %d: %s", s, sides[s].peer.error_text);
    check("a look");
}

static void lose(int s)
{
    cr_assert(prs_failover_start(&sides[s].peer, 0, "lost by the test"));
    check("a loss");
}

static bool both_use(uint8_t epoch)
{
    return path_at(A)->stage == PRS_PATH_UP && path_at(B)->stage == PRS_PATH_UP && path_at(A)->epoch == epoch &&
           path_at(B)->epoch == epoch && sides[A].peer.order.path[0].use == PRS_PATH_USED &&
           sides[B].peer.order.path[0].use == PRS_PATH_USED;
}

static void go_on(void)
{
    for (int s = 0; s < 2; s++) {
        read_notes(s);
        step(s);
        look(s);
    }
}

static void settle(void)
{
    uint64_t give_up = prs_clock_ms() + LIMIT_MS;

    while (!both_use(path_at(A)->epoch)) {
        go_on();
        cr_assert(prs_clock_ms() < give_up, "stages %d %d, attempt %d, epochs %u %u", (int)path_at(A)->stage,
                  (int)path_at(B)->stage, (int)path_at(A)->attempt, path_at(A)->epoch, path_at(B)->epoch);
    }
}

/* ---- one after the other ---- */

Test(recovery, a_lost_path_gets_new_queues)
{
    open_sides();
    lose(B);
    settle();
    cr_assert(both_use(1));
    cr_assert_eq(links_open, 2 * PATHS);
    close_sides();
}

static void give_path_up(int first)
{
    lose(first);
    for (int i = 0; path_at(A)->stage != PRS_PATH_DOWN || path_at(B)->stage != PRS_PATH_DOWN; i++) {
        cr_assert_lt(i, 100);
        for (int s = 0; s < 2; s++) {
            read_notes(s);
            step(s);
        }
    }
}

/* B fences without being asked, and sends a note. A answers, has all that it needs, and offers queues, before B reads
 * anything, long after it was told that a note would come. */
Test(recovery, an_offer_may_be_read_together_with_the_loss)
{
    open_sides();
    lose(B);
    while (path_at(B)->stage != PRS_PATH_AGREEING)
        step(B);
    read_notes(A);
    while (path_at(A)->stage != PRS_PATH_DOWN)
        step(A);
    look(A);
    cr_assert_eq(path_at(A)->attempt, PRS_ATTEMPT_OFFERED);
    prs_failover_expect_note(&sides[B].peer);
    sides[B].peer.failover->expect_until_ns = prs_clock_ns() - 1000000000;
    read_notes(B);
    cr_assert(path_at(B)->told && path_at(B)->asked && path_at(B)->stage == PRS_PATH_AGREEING);
    step(B);
    look(B);
    cr_assert_eq(path_at(B)->stage, PRS_PATH_JOINED);
    settle();
    cr_assert(both_use(1));
    close_sides();
}

Test(recovery, a_port_that_is_down_neither_offers_nor_accepts)
{
    open_sides();
    give_path_up(A);
    sides[A].domain[0].down_since_ns[1] = 1;
    look(A);
    cr_assert_eq(path_at(A)->attempt, PRS_ATTEMPT_NONE);
    sides[A].domain[0].down_since_ns[1] = 0;
    sides[B].domain[0].down_since_ns[1] = 1;
    look(A);
    cr_assert_eq(path_at(A)->attempt, PRS_ATTEMPT_OFFERED);
    look(B);
    cr_assert(path_at(B)->asked && path_at(B)->stage == PRS_PATH_DOWN);
    sides[B].domain[0].down_since_ns[1] = 0;
    settle();
    cr_assert(both_use(1));
    close_sides();
}

Test(recovery, queues_that_are_not_answered_are_given_up_and_made_again)
{
    open_sides();
    give_path_up(A);
    answers = false;
    for (int i = 0; path_at(A)->epoch == 0 || path_at(B)->stage != PRS_PATH_DOWN; i++) {
        cr_assert_lt(i, 100);
        go_on();
    }
    answers = true;
    settle();
    cr_assert(both_use(path_at(A)->epoch) && path_at(A)->epoch >= 2);
    close_sides();
}

/* A NIC that waits for an answer far longer than the queues retry, as TCP may. */
Test(recovery, queues_that_are_never_answered_are_given_up)
{
    open_sides();
    give_path_up(A);
    for (int i = 0; path_at(A)->attempt != PRS_ATTEMPT_TRYING; i++) {
        cr_assert_lt(i, 100);
        go_on();
    }
    fake(path_at(A)->next)->posted = 0;
    go_on();
    cr_assert_eq(path_at(A)->attempt, PRS_ATTEMPT_TRYING);
    path_at(A)->again_ns = 1; /* that long ago */
    look(A);
    cr_assert_eq(path_at(A)->attempt, PRS_ATTEMPT_GIVEN_UP);
    settle();
    cr_assert(both_use(path_at(A)->epoch) && path_at(A)->epoch == 2);
    close_sides();
}

/* A rail whose ports are up and that carries nothing. When its port comes up again, it is tried at once. */
Test(recovery, a_path_that_carries_nothing_is_tried_ever_more_rarely)
{
    uint64_t end_ms = prs_clock_ms() + 1000;

    open_sides();
    sides[A].fabric.config.recovery_ms = sides[B].fabric.config.recovery_ms = 1;
    give_path_up(A);
    answers = false;
    while (prs_clock_ms() < end_ms || (path_at(A)->epoch < 2 && prs_clock_ms() < end_ms + LIMIT_MS))
        go_on();
    /* Delays of 10, 20, ... 320 ms: seven attempts, where each 10 ms would make a hundred. */
    cr_assert(path_at(A)->epoch >= 2 && path_at(A)->epoch <= 10, "%u attempts", path_at(A)->epoch);
    sides[A].domain[0].down_since_ns[1] = 1;
    while (path_at(A)->attempt != PRS_ATTEMPT_NONE)
        go_on();
    go_on();
    cr_assert_leq(path_at(A)->again_ns, prs_clock_ns() + 1000000, "its port will be up, and it will wait");
    answers = true;
    sides[A].domain[0].down_since_ns[1] = 0;
    settle();
    close_sides();
}

Test(recovery, without_the_variable_nothing_is_offered)
{
    open_sides();
    sides[A].fabric.config.recovery = sides[B].fabric.config.recovery = 0;
    give_path_up(A);
    for (int i = 0; i < 10; i++)
        go_on();
    cr_assert(path_at(A)->attempt == PRS_ATTEMPT_NONE && !path_at(A)->next && !path_at(B)->asked);
    close_sides();
}

/* While it is not known whether the other side has closed, requests fail on both paths. The other side gives up one
 * path, which is used again before the wait for a farewell is over. */
Test(recovery, a_path_that_is_used_again_takes_no_other_failure_with_it)
{
    struct prs_peer *peer = &sides[A].peer;

    open_sides();
    fail_request(A, 0);
    fail_request(A, 1);
    lose(B);
    settle();
    cr_assert(both_use(1));
    cr_assert_eq(peer->failover->path[1].stage, PRS_PATH_UP);
    cr_assert(peer->farewell_ns, "the failure of path 1 is forgotten");
    peer->farewell_ns = 1;
    cr_assert_eq(prs_health_check(peer), 0, "%s", peer->error_text);
    cr_assert_eq(peer->failover->path[1].stage, PRS_PATH_DRAINING, "the failure of path 1 is forgotten");
    cr_assert_eq(path_at(A)->stage, PRS_PATH_UP, "the new queues of path 0 have not failed");
    cr_assert_eq(peer->farewell_ns, 0);
    close_sides();
}

/* Each progress finds something on path 0. */
Test(recovery, a_failure_is_decided_although_another_path_is_never_idle)
{
    struct prs_peer *peer = &sides[A].peer;

    open_sides();
    fail_request(A, 1);
    for (int i = 0; i < 2; i++) {
        cr_assert_eq(peer->failover->path[1].stage, PRS_PATH_UP);
        cr_assert_eq(prs_order_knock(&peer->order), 0);
        cr_assert_eq(prs_peer_progress(peer), 1, "%s", peer->error_text);
        peer->farewell_ns = i ? peer->farewell_ns : 1;
    }
    cr_assert_eq(peer->failover->path[1].stage, PRS_PATH_DRAINING);
    close_sides();
}

/* ---- a note at the wrong time ---- */

struct wrong {
    enum prs_note_type type;
    int to;
    uint8_t epoch, path;
    enum { KEPT, LOST, OFFERED } after; /* both sides have given path 0 up; and A has offered queues */
    uint8_t mtu, reads;
};

ParameterizedTestParameters(recovery, a_note_that_cannot_be_is_refused)
{
    static struct wrong rows[] = {
        {PRS_NOTE_OFFER, B, 1, 0, KEPT, 5, 1},
        {PRS_NOTE_OFFER, A, 1, 0, LOST, 5, 1},
        {PRS_NOTE_OFFER, B, 0, 0, LOST, 5, 1},
        {PRS_NOTE_OFFER, B, 2, 0, LOST, 5, 1},
        {PRS_NOTE_OFFER, B, 1, 2, LOST, 5, 1},
        {PRS_NOTE_OFFER, B, 1, 0, LOST, 0, 1}, /* values that no queue can be connected with */
        {PRS_NOTE_OFFER, B, 1, 0, LOST, 6, 1},
        {PRS_NOTE_OFFER, B, 1, 0, LOST, 5, 0},
        {PRS_NOTE_OFFER, B, 1, 0, OFFERED, 5, 1}, /* the second */
        {PRS_NOTE_ACCEPT, A, 1, 0, LOST, 5, 1},
        {PRS_NOTE_ACCEPT, B, 1, 0, LOST, 5, 1},
        {PRS_NOTE_ACCEPT, A, 2, 0, OFFERED, 5, 1},
        {PRS_NOTE_ACCEPT, A, 1, 0, OFFERED, 0, 1},
        {PRS_NOTE_ACCEPT, A, 1, 0, OFFERED, 255, 1},
        {PRS_NOTE_ACCEPT, A, 1, 0, OFFERED, 5, 0},
        {PRS_NOTE_READY, B, 0, 0, KEPT, 0, 0},
        {PRS_NOTE_READY, B, 0, 0, LOST, 0, 0},
        {PRS_NOTE_READY, A, 0, 0, LOST, 0, 0},
        {PRS_NOTE_DOWN, A, 1, 0, KEPT, 0, 0},
        {PRS_NOTE_DOWN, B, 1, 0, LOST, 0, 0},
        {PRS_NOTE_DOWN, A, 0, 0, LOST, 0, 0},
        {PRS_NOTE_DOWN, B, 0, PATHS, KEPT, 0, 0},
        {PRS_NOTE_DOWN, B, 0, 9, KEPT, 0, 0},
        {(enum prs_note_type)'X', B, 0, 0, KEPT, 0, 0},
    };
    return cr_make_param_array(struct wrong, rows, sizeof(rows) / sizeof(*rows));
}

static struct prs_nic_address port_of(uint8_t mtu, uint8_t reads)
{
    struct prs_verbs_own_port port = {.port = {.mtu = mtu, .reads = reads}};
    struct prs_rail_address address;

    prs_verbs_tell_port(&port, &address);
    return address.told;
}

ParameterizedTest(struct wrong *row, recovery, a_note_that_cannot_be_is_refused)
{
    struct prs_wire_note note = {.type = (uint8_t)row->type, .path = row->path, .epoch = row->epoch};

    open_sides();
    if (row->after != KEPT)
        give_path_up(A);
    if (row->after == OFFERED) {
        look(A);
        cr_assert_eq(path_at(A)->attempt, PRS_ATTEMPT_OFFERED);
    }
    if (row->type == PRS_NOTE_OFFER || row->type == PRS_NOTE_ACCEPT)
        note.where = port_of(row->mtu, row->reads);
    prs_note_send(&sides[!row->to].peer, &note);
    cr_assert_eq(prs_failover_read(&sides[row->to].peer), -EPROTO);
    cr_assert(strstr(sides[row->to].peer.error_text, "unexpected"), "%s", sides[row->to].peer.error_text);
    sides[0].peer.error = sides[1].peer.error = 0;
    close_sides();
}

/* ---- a path fails at any moment ---- */

static void act(int s, unsigned what)
{
    switch (what) {
    case 0:
        read_notes(s);
        break;
    case 1:
        step(s);
        break;
    default:
        look(s);
    }
}

ParameterizedTestParameters(recovery, a_path_that_flaps_ends_in_use)
{
    static unsigned seeds[16];

    for (unsigned i = 0; i < 16; i++)
        seeds[i] = i + 1;
    return cr_make_param_array(unsigned, seeds, 16);
}

ParameterizedTest(unsigned *seed, recovery, a_path_that_flaps_ends_in_use)
{
    unsigned random = *seed;

    for (int round = 0; round < 500; round++) {
        open_sides();
        for (int faults = 0, acts = 0; faults < 6 && acts < 4000; acts++) {
            int s = rand_r(&random) % 2;

            answers = rand_r(&random) % 8;
            if (rand_r(&random) % 24 == 0 && path_at(s)->epoch < 100) {
                lose(s);
                faults++;
            } else {
                act(s, (unsigned)rand_r(&random) % 3);
            }
        }
        answers = true;
        settle();
        close_sides();
    }
}

/* ---- an owner that does not poll ---- */

/* The thread answers a loss, keeps the offer, and leaves the queues to the owner. */
Test(recovery, the_thread_keeps_an_offer_for_the_owner)
{
    uint64_t give_up = prs_clock_ms() + LIMIT_MS;
    bool asked = false;

    open_sides();
    prs_watch_add(&sides[B].peer);
    cr_assert(prs_failover_start(&sides[A].peer, 0, "lost by the test"));
    while (!asked) {
        (void)prs_failover_read(&sides[A].peer);
        if (prs_failover_is_active(&sides[A].peer))
            cr_assert_eq(prs_failover_step(&sides[A].peer), 0);
        sides[A].peer.failover->look_ns = 0;
        sides[A].peer.failover->looks = 1u << 20;
        cr_assert_eq(prs_failover_recover(&sides[A].peer), 0);
        prs_peer_lock(&sides[B].peer);
        asked = path_at(B)->asked;
        prs_peer_unlock(&sides[B].peer);
        cr_assert(prs_clock_ms() < give_up);
    }
    cr_assert_eq(path_at(B)->stage, PRS_PATH_AGREEING);
    prs_watch_remove(&sides[B].peer);
    prs_failover_catch_up(&sides[B].peer);
    settle();
    cr_assert(both_use(1));
    close_sides();
}

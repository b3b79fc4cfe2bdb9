/* SPDX-License-Identifier: Apache-2.0 */
/* Two sides of a connection, joined by a stream, agree that a path is lost and give it new queues. Here without a NIC:
 * what each side does is chosen one step at a time, and a path may fail at every one of them. */
#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "test/support/fake_verbs.h"
#include "transport/peer/fail.h"
#include "transport/peer/links.h"
#include "transport/peer/note.h"
#include "transport/peer/peer.h"
#include "transport/peer/recovery.h"
#include "transport/util/clock.h"
#include "transport/peer/watch.h"

enum { PATHS = 2, A = 0 /* offers */, B = 1, LIMIT_MS = 10000 };

/* ---- a NIC whose queues only know whom they are connected to ---- */

struct fake_link {
    struct prs_link base;
    struct prs_queue queue, *list[1];
    uint32_t number, connected_to, posted;
    int polls_until_flushed; /* after it was stopped */
};

static uint32_t links_open, last_number;
static bool answers; /* whether writes of no bytes are answered */

static struct fake_link *fake(struct prs_link *link)
{
    return (struct fake_link *)link;
}

static const struct prs_nic_ops fake_nic;

static const bool never_overrun;

static int open_link(const struct prs_link_options *options, struct prs_link **out)
{
    struct fake_link *link = calloc(1, sizeof(*link));

    cr_assert(link);
    link->base =
        (struct prs_link){.overrun = &never_overrun, .rail = options->rail, .own = *options->own, .queue_count = 1};
    link->base.queue = link->list;
    link->list[0] = &link->queue;
    link->queue = (struct prs_queue){
        .link = &link->base, .id = options->ids[0], .qp = &fake_verbs.qp.qp_base, .takes_inline = true};
    link->base.ops = &fake_nic;
    link->number = ++last_number;
    link->polls_until_flushed = 2;
    links_open++;
    *out = &link->base;
    return 0;
}

static void close_link(struct prs_link *link)
{
    links_open--;
    free(link);
}

static void tell_address(const struct prs_queue *queue, struct prs_queue_address *out)
{
    *out = (struct prs_queue_address){.number = ((struct fake_link *)queue->link)->number};
}

static uint8_t reads(const struct prs_rail *rail)
{
    return 1;
}

static int connect_queue(struct prs_queue *queue, const struct prs_queue_address *address,
                         const struct prs_link_remote *remote, int *error)
{
    fake(queue->link)->connected_to = address->number;
    return 0;
}

static int post(struct prs_queue *queue, const struct prs_wr *ring, uint32_t mask, uint32_t first, uint32_t count)
{
    fake(queue->link)->posted += count;
    return 0;
}

static uint32_t taken(const struct prs_queue *queue)
{
    return 0;
}

static bool drained(const struct prs_link *link)
{
    return link->stopped && fake((struct prs_link *)link)->polls_until_flushed-- <= 0;
}

static int poll_link(struct prs_link *link, struct prs_event *events)
{
    struct fake_link *at = fake(link);

    if (!at->posted)
        return 0;
    at->posted = 0;
    events[0] = (struct prs_event){.kind = PRS_EVENT_DONE, .queue = at->queue.id};
    if (!answers || link->stopped)
        events[0] = (struct prs_event){.kind = PRS_EVENT_ERROR, .queue = at->queue.id, .text = "no answer"};
    return 1;
}

static const struct prs_nic_ops fake_nic = {.in_order = true,
                                            .open = open_link,
                                            .close = close_link,
                                            .address = tell_address,
                                            .reads = reads,
                                            .connect = connect_queue,
                                            .post = post,
                                            .taken = taken,
                                            .drained = drained,
                                            .poll = poll_link};

/* ---- two sides ---- */

struct side {
    struct prs_fabric fabric;
    struct prs_domain domain[PATHS];
    struct prs_peer peer;
};

static struct side sides[2];

static struct prs_failover_path *path_at(int s)
{
    return &sides[s].peer.failover->path[0];
}

static void open_side(struct side *side, int fd, bool offers)
{
    struct prs_order_options options = {.policy = PRS_POLICY_COUNTED,
                                        .in_order = true,
                                        .fence = true,
                                        .failover = true,
                                        .max_ops = 64,
                                        .path_count = PATHS,
                                        .queues_per_path = 1,
                                        .depth = 16,
                                        .max_part_bytes = 1 << 20};

    memset(side, 0, sizeof(*side));
    side->fabric.config = (struct prs_config){.timeout_ms = 60000, .return_async_events = 1, .recovery = 1};
    side->peer.fabric = &side->fabric;
    side->peer.nic = &fake_nic;
    side->peer.stream_fd = fd;
    side->peer.offers = offers;
    side->peer.path_count = PATHS;
    side->peer.queues = PATHS;
    side->peer.queues_per_path = 1;
    for (uint32_t i = 0; i < PATHS; i++) {
        side->domain[i].context = &fake_verbs.extended.context;
        side->fabric.rail[i] = (struct prs_rail){.domain = &side->domain[i], .port = 1};
        side->peer.path[i].local_rail = (int)i;
        options.path[i] = (struct prs_order_path){.local_rail = i, .remote_rail = i, .rate = 1000};
    }
    cr_assert_eq(prs_order_init(&side->peer.order, &options), 0);
    for (uint32_t i = 0; i < PATHS; i++) {
        cr_assert_eq(prs_links_open_path(&side->peer, i, &side->fabric.rail[i].address, NULL, &side->peer.link[i]), 0);
        side->peer.queue[i] = side->peer.link[i]->queue[0];
    }
    cr_assert_eq(prs_failover_open(&side->peer), 0);
}

static void open_sides(void)
{
    int fds[2];

    fake_verbs_install();
    answers = true;
    links_open = last_number = 0;
    cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    for (int s = 0; s < 2; s++)
        open_side(&sides[s], fds[s], s == A);
    for (uint32_t i = 0; i < PATHS; i++)
        for (int s = 0; s < 2; s++)
            fake(sides[s].peer.link[i])->connected_to = fake(sides[!s].peer.link[i])->number;
}

static void close_sides(void)
{
    for (int s = 0; s < 2; s++) {
        struct prs_peer *peer = &sides[s].peer;

        prs_recovery_close(peer);
        for (uint32_t i = 0; i < PATHS; i++)
            close_link(peer->link[i]);
        prs_order_fini(&peer->order);
        prs_failover_close(peer);
        close(peer->stream_fd);
    }
    cr_assert_eq(links_open, 0, "%u links were not closed", links_open);
}

/* ---- what a side may do ---- */

/* Whoever goes on over other queues knows that nothing more comes over these, and both sides use the same. */
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
    cr_assert_eq(links_open, 4);
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

/* B fences by itself and tells. A answers, has all that it needs, and offers queues, before B reads anything, long after
 * it was told that a note would come. */
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

/* A rail whose ports are up and that carries nothing. When its port comes up again, it is tried at once. */
Test(recovery, a_path_that_carries_nothing_is_tried_ever_more_rarely)
{
    uint64_t end_ms = prs_clock_ms() + 1000;

    open_sides();
    sides[A].fabric.config.recovery_ms = sides[B].fabric.config.recovery_ms = 1;
    give_path_up(A);
    answers = false;
    while (prs_clock_ms() < end_ms)
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

/* ---- a note at the wrong time ---- */

struct wrong {
    enum prs_note_type type;
    int to;
    uint8_t epoch, path;
    bool lost; /* both sides have given path 0 up */
};

ParameterizedTestParameters(recovery, a_note_that_cannot_be_is_refused)
{
    static struct wrong rows[] = {
        {PRS_NOTE_OFFER, B, 1, 0, false}, {PRS_NOTE_OFFER, A, 1, 0, true},  {PRS_NOTE_OFFER, B, 0, 0, true},
        {PRS_NOTE_OFFER, B, 2, 0, true},  {PRS_NOTE_OFFER, B, 1, 2, true},  {PRS_NOTE_ACCEPT, A, 1, 0, true},
        {PRS_NOTE_ACCEPT, B, 1, 0, true}, {PRS_NOTE_READY, B, 0, 0, false}, {PRS_NOTE_READY, B, 0, 0, true},
        {PRS_NOTE_READY, A, 0, 0, true},  {PRS_NOTE_DOWN, A, 1, 0, false},  {PRS_NOTE_DOWN, B, 1, 0, true},
        {PRS_NOTE_DOWN, A, 0, 0, true},   {PRS_NOTE_DOWN, B, 0, 9, false},  {(enum prs_note_type)'X', B, 0, 0, false},
    };
    return cr_make_param_array(struct wrong, rows, sizeof(rows) / sizeof(*rows));
}

ParameterizedTest(struct wrong *row, recovery, a_note_that_cannot_be_is_refused)
{
    struct prs_wire_note note = {.type = (uint8_t)row->type, .path = row->path, .epoch = row->epoch};

    open_sides();
    if (row->lost)
        give_path_up(A);
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

/* SPDX-License-Identifier: Apache-2.0 */
/* Many connections between two rails. Over SRD they share queue pairs; over RC each has its own. Both ends are in one
 * process, and each thread uses connections of its own. */
#include <criterion/criterion.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "test/support/open_files.h"
#include "test/transport/ends.h"
#include "transport/util/clock.h"

enum { CELLS = 256, EFA_QUEUE_PAIRS = 256 };

struct end {
    struct prs_peer *peer;
    uint64_t cell[CELLS]; /* the other end writes here */
    struct prs_region *region;
    struct prs_keys keys;
    uint32_t notified, wrong;
};

struct wire {        /* a connection */
    struct end a, b; /* a connected to b */
    uint32_t sent;   /* messages in each direction */
};

static struct prs_listener *listener;
static struct prs_handle handle;

static void open_all(void)
{
    open_default();
    listener = open_listener(&handle);
}

static void close_all(void)
{
    prs_listener_close(listener);
    close_default();
}

/* The message with this id is in the cell of its number. */
static void on_notify(void *user, uint32_t id, uint64_t bytes)
{
    struct end *end = user;

    end->wrong += bytes != sizeof(*end->cell) || end->cell[id % CELLS] % PRS_NOTIFY_IDS != id;
    end->notified++;
}

static void open_end(struct end *end)
{
    struct prs_mem memory = {.addr = end->cell, .len_bytes = sizeof(end->cell), .kind = PRS_MEM_HOST};

    if (prs_region_register(fabric, &one_rail, &memory, &end->region))
        abort();
    prs_region_keys(end->region, &end->keys);
}

static void close_end(struct end *end)
{
    prs_peer_close(end->peer);
    prs_region_release(end->region);
}

/* Return 0 or the error. Unlike meet(), any thread may call it, but one at a time. */
static int open_wire(struct wire *wire)
{
    struct prs_peer_options options = {.on_notify = on_notify, .traffic_class = -1};
    struct prs_connector *connector;
    int ra = PRS_AGAIN, rb = PRS_AGAIN;

    memset(wire, 0, sizeof(*wire));
    ra = prs_connect(fabric, &one_rail, &handle, &options, &connector);
    if (ra)
        return ra;
    ra = PRS_AGAIN;
    for (uint64_t give_up = prs_clock_ms() + 2 * HEALTHY_MS; ra == PRS_AGAIN || rb == PRS_AGAIN;) {
        if (ra == PRS_AGAIN)
            ra = prs_connector_step(connector, &wire->a.peer);
        if (rb == PRS_AGAIN)
            rb = prs_accept(listener, &options, &wire->b.peer);
        if (ra < 0 || rb < 0 || prs_clock_ms() > give_up)
            return ra < 0 ? ra : rb < 0 ? rb : -1;
    }
    prs_peer_set_user(wire->a.peer, &wire->a);
    prs_peer_set_user(wire->b.peer, &wire->b);
    open_end(&wire->a);
    open_end(&wire->b);
    return 0;
}

static void close_wire(struct wire *wire)
{
    close_end(&wire->a);
    close_end(&wire->b);
}

/* Start to send one message. Return 0, PRS_BUSY or -errno. */
static int send_one(const struct end *from, const struct end *to, struct prs_op *op, uint64_t number)
{
    struct prs_put put = {.src_addr = &number,
                          .len_bytes = sizeof(number),
                          .dst_addr = (uintptr_t)&to->cell[number % CELLS],
                          .dst = &to->keys,
                          .notify_id = (uint32_t)(number % PRS_NOTIFY_IDS),
                          .flags = PRS_PUT_NOTIFY | PRS_PUT_INLINE};

    return prs_peer_put(from->peer, op, &put);
}

/* Send this many more messages in both directions, and take them. Return 0 or the error. */
static int exchange(struct wire *wire, uint32_t more)
{
    uint32_t goal = wire->sent + more;

    for (uint64_t give_up = prs_clock_ms() + HEALTHY_MS; wire->sent < goal;) {
        struct prs_op op[2];
        int r = send_one(&wire->a, &wire->b, &op[0], wire->sent);

        r = r ? r : send_one(&wire->b, &wire->a, &op[1], wire->sent);
        if (r)
            return r;
        wire->sent++;
        while (op[0].status == PRS_OP_PENDING || op[1].status == PRS_OP_PENDING || wire->a.notified < wire->sent ||
               wire->b.notified < wire->sent) {
            r = prs_peer_progress(wire->a.peer);
            r = r < 0 ? r : prs_peer_progress(wire->b.peer);
            if (r < 0 || prs_clock_ms() > give_up)
                return r < 0 ? r : -1;
        }
    }
    return wire->a.notified == goal && wire->b.notified == goal && !wire->a.wrong && !wire->b.wrong ? 0 : -2;
}

static struct wire *new_wires(uint32_t count)
{
    struct wire *wires = calloc(count, sizeof(*wires));

    cr_assert(wires);
    for (uint32_t i = 0; i < count; i++)
        cr_assert_eq(open_wire(&wires[i]), 0, "connection %u: %s", i, prs_error_text());
    return wires;
}

static bool is_shared(const struct wire *one, const struct wire *other)
{
    return prs_peer_queue_number(one->a.peer) == prs_peer_queue_number(other->a.peer) ||
           prs_peer_queue_number(one->b.peer) == prs_peer_queue_number(other->b.peer);
}

static bool rails_keep_order(void)
{
    struct prs_rail_info info;

    cr_assert_eq(prs_rail_query(fabric, 0, &info), 0);
    return info.in_order;
}

/* As many as a rank has with 63 others over 4 communicators, but all from this process to itself, and so between two
 * rails: over SRD that takes the most queue pairs. */
Test(share, the_connections_of_64_ranks_need_few_queue_pairs, .init = open_all, .fini = close_all)
{
    enum { COUNT = 63 * 4 };
    uint32_t number[2 * COUNT], distinct = 0;
    struct wire *wires;

    if (rails_keep_order())
        cr_skip_test("each connection has a queue pair of its own");
    wires = new_wires(COUNT);
    for (uint32_t i = 0; i < 2 * COUNT; i++) {
        const struct end *end = i % 2 ? &wires[i / 2].a : &wires[i / 2].b;
        uint32_t k = 0;

        while (k < distinct && number[k] != prs_peer_queue_number(end->peer))
            k++;
        if (k == distinct)
            number[distinct++] = prs_peer_queue_number(end->peer);
    }
    cr_log_info("%d connections, %u queue pairs for both ends", COUNT, distinct);
    cr_assert_leq(distinct, 32u, "each end needs 16, the square root of %d; an EFA has %d", COUNT, EFA_QUEUE_PAIRS);
    for (uint32_t round = 0; round < 3; round++)
        for (uint32_t i = 0; i < COUNT; i++)
            cr_assert_eq(exchange(&wires[i], 1), 0, "connection %u: %s", i, prs_error_text());
    for (uint32_t i = 0; i < COUNT; i++)
        close_wire(&wires[i]);
    free(wires);
}

struct worker {
    struct wire *wires; /* its own are the first, third, ... of these */
    uint32_t count, messages;
    int result;
};

static void *work(void *arg)
{
    struct worker *worker = arg;

    for (uint32_t sent = 0; !worker->result && sent < worker->messages; sent += 10)
        for (uint32_t i = 0; !worker->result && i < worker->count; i += 2)
            worker->result = exchange(&worker->wires[i], 10);
    return NULL;
}

Test(share, threads_use_connections_of_one_queue_pair, .init = open_all, .fini = close_all)
{
    enum { COUNT = 6 };
    struct wire *wires = new_wires(COUNT);
    struct worker worker[2] = {{wires, COUNT, 1000, 0}, {wires + 1, COUNT - 1, 1000, 0}};
    pthread_t thread;

    cr_assert(rails_keep_order() || is_shared(&wires[0], &wires[1]));
    cr_assert_eq(pthread_create(&thread, NULL, work, &worker[1]), 0);
    work(&worker[0]);
    pthread_join(thread, NULL);
    cr_assert(worker[0].result == 0 && worker[1].result == 0, "%d %d", worker[0].result, worker[1].result);
    for (uint32_t i = 0; i < COUNT; i++)
        close_wire(&wires[i]);
    free(wires);
}

Test(share, one_that_does_not_poll_stops_no_other, .init = open_all, .fini = close_all)
{
    enum { COUNT = 6, UNFINISHED = PRS_NOTIFY_IDS / 2 };
    struct wire *wires = new_wires(COUNT);
    struct end *silent = &wires[0].b;
    struct prs_op op[UNFINISHED];
    uint64_t give_up = prs_clock_ms() + HEALTHY_MS;

    for (uint32_t i = 0; i < UNFINISHED; i++) {
        int r;

        while ((r = send_one(&wires[0].a, silent, &op[i], i)) == PRS_BUSY && prs_clock_ms() < give_up)
            cr_assert_geq(prs_peer_progress(wires[0].a.peer), 0);
        cr_assert_eq(r, 0, "message %u: %d %s", i, r, prs_error_text());
    }
    for (uint32_t i = 1; i < COUNT; i++)
        cr_assert_eq(exchange(&wires[i], 300), 0, "connection %u: %s", i, prs_error_text());
    cr_assert_eq(silent->notified, 0u);
    silent->wrong = 0;
    while (silent->notified < UNFINISHED && prs_clock_ms() < give_up) {
        cr_assert_geq(prs_peer_progress(wires[0].a.peer), 0);
        cr_assert_geq(prs_peer_progress(silent->peer), 0);
    }
    cr_assert_eq(silent->notified, (uint32_t)UNFINISHED);
    for (uint32_t i = 0; i < COUNT; i++)
        close_wire(&wires[i]);
    free(wires);
}

static void *come_and_go(void *arg)
{
    struct worker *worker = arg;
    struct wire *wire = calloc(1, sizeof(*wire));

    for (uint32_t i = 0; wire && !worker->result && i < worker->messages; i++) {
        worker->result = open_wire(wire);
        if (!worker->result)
            worker->result = exchange(wire, 3);
        if (!worker->result)
            close_wire(wire);
    }
    free(wire);
    return NULL;
}

/* A name may be used again only after both sides have closed. Then it must be used again; otherwise the number of queue
 * pairs would grow for ever. */
Test(share, connections_come_and_go_beside_others, .init = open_all, .fini = close_all)
{
    enum { COUNT = 4 };
    const char *wanted = getenv("PERSEUS_TEST_CYCLES"); /* fewer on slow machines */
    uint32_t cycles = wanted && atoi(wanted) < 200 ? (uint32_t)atoi(wanted) : 200;
    struct wire *wires = new_wires(COUNT), *last;
    struct worker worker[2] = {{wires, COUNT, 1500, 0}, {NULL, 0, cycles, 0}};
    int files = open_files();
    pthread_t thread;

    cr_assert_eq(pthread_create(&thread, NULL, come_and_go, &worker[1]), 0);
    work(&worker[0]);
    pthread_join(thread, NULL);
    cr_assert(worker[0].result == 0 && worker[1].result == 0, "%d %d", worker[0].result, worker[1].result);
    last = new_wires(1);
    cr_assert_eq(exchange(last, 1), 0);
    cr_assert(rails_keep_order() || is_shared(last, &wires[0]) || is_shared(last, &wires[1]) ||
              is_shared(last, &wires[2]) || is_shared(last, &wires[3]));
    close_wire(last);
    free(last);
    cr_assert_leq(open_files(), files + 4, "ends of streams are kept");
    for (uint32_t i = 0; i < COUNT; i++)
        close_wire(&wires[i]);
    free(wires);
}

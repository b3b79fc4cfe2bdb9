/* SPDX-License-Identifier: Apache-2.0 */
/* The model of a network: latency, rate and loss, and what fences mean under it. */
#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <stdlib.h>

#include "tools/softnic/test/support.h"
#include "tools/softnic/test/two_ends.h"

/* A late completion may be the machine's fault (others use it), so try again; if none is in time within WAIT_S, the NIC
 * is at fault. */
struct tries {
    uint64_t began;
};

/* How late a try may be, in percent of the modelled time. A sanitizer on a busy machine delays every try. */
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { LATE_PERCENT = 60 };
#else
enum { LATE_PERCENT = 15 };
#endif

static uint64_t late(uint64_t asked_ns)
{
    return asked_ns + asked_ns * LATE_PERCENT / 100;
}

static bool tries_left(struct tries *tries)
{
    tries->began = tries->began ? tries->began : now_ns();
    return now_ns() - tries->began < WAIT_S * 1000000000ull;
}

Test(model, nothing_is_visible_before_it_is_due)
{
    struct sn_config config = model();
    uint64_t posted, seen, done, first_seen = UINT64_MAX, first_done = UINT64_MAX;
    struct tries tries = {0};
    volatile uint8_t *flag;

    config.latency_ns = 3000000;
    start(&config);
    flag = b.buf;
    a.buf[0] = 1;
    for (int i = 0; i < 3 || ((first_done > late(6000000) || first_seen > late(3000000)) && tries_left(&tries)); i++) {
        *flag = 0;
        posted = now_ns();
        cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, 1, &bt, 0, IBV_SEND_SIGNALED, 1), 0);
        while (!*flag && now_ns() < posted + WAIT_S * 1000000000ull)
            ;
        seen = now_ns() - posted;
        wait_wc(a.cq, "modelled write");
        done = now_ns() - posted;
        cr_assert_geq(seen, 3000000, "data after %lu ns, asked 3 ms", seen);
        cr_assert_geq(done, 6000000, "completion after %lu ns, asked a round trip", done);
        first_seen = seen < first_seen ? seen : first_seen;
        first_done = done < first_done ? done : first_done;
    }
    cr_assert_leq(first_seen, late(3000000), "data never before %lu ns", first_seen);
    cr_assert_leq(first_done, late(6000000), "completion never before %lu ns", first_done);
    end_close(&a);
    end_close(&b);
}

/* The engine leaves due work to threads that poll: it must notice when none does. */
Test(model, due_work_is_done_though_nobody_polls)
{
    struct sn_config config = model();
    uint64_t posted;
    volatile uint8_t *flag;

    config.latency_ns = 100000;
    start(&config);
    flag = b.buf;
    for (uint8_t i = 1; i <= 100; i++) {
        if (i <= 50) { /* poll for the first half only */
            a.buf[0] = i;
            cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, 1, &bt, 0, IBV_SEND_SIGNALED, i), 0);
            wait_wc(a.cq, "modelled write");
            continue;
        }
        a.buf[0] = i;
        posted = now_ns();
        cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, 1, &bt, 0, i % 32 ? 0 : IBV_SEND_SIGNALED, i), 0);
        while (*flag != i)
            cr_assert_lt(now_ns() - posted, WAIT_S * 1000000000ull,
                         "write %u: nothing came for %d s, and nobody polled", i, WAIT_S);
    }
    end_close(&a);
    end_close(&b);
}

/* Close all but the device, which belongs to another end. */
static void end_drop(struct end *end)
{
    cr_assert(!ibv_destroy_qp(end->qp) && !ibv_destroy_cq(end->cq) && !ibv_dereg_mr(end->mr) &&
              !ibv_dealloc_pd(end->pd));
    free(end->buf);
}

/* Return how long after its post the last byte of a long write was there. */
static uint64_t long_write(struct end *from, struct end *to, bool behind_a_short_one)
{
    enum { BYTES = 32768 };
    struct address target = end_address(to);
    volatile uint8_t *last = to->buf + BYTES - 1;
    uint64_t posted;

    *last = 0;
    from->buf[BYTES - 1] = 1;
    if (behind_a_short_one)
        cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, 1, &bt, 0, IBV_SEND_SIGNALED, 1), 0);
    posted = now_ns();
    cr_assert_eq(post(from, IBV_WR_RDMA_WRITE, 0, BYTES, &target, 0, IBV_SEND_SIGNALED, 2), 0);
    while (!*last && now_ns() < posted + WAIT_S * 1000000000ull)
        ;
    posted = now_ns() - posted;
    if (behind_a_short_one)
        wait_wc(a.cq, "short write");
    wait_wc(from->cq, "long write");
    return posted;
}

/* A new engine leaves short due work to threads that poll, for 0.4 ms. The write that is alone comes first: it starts
 * the engine's thread, which takes a third of a millisecond under ThreadSanitizer. */
static void long_writes(uint64_t *alone, uint64_t *behind)
{
    struct end_options with = {0}, to = {0};
    struct end more, there;

    pair_open(&a, &b);
    bt = end_address(&b);
    with.ctx = a.ctx;
    to.ctx = b.ctx;
    pair_open_with(&more, &there, &with, &to, &link_default);
    *alone = long_write(&more, &there, false);
    *behind = long_write(&more, &there, true);
    end_drop(&there);
    end_drop(&more);
    end_close(&a);
    end_close(&b);
}

Test(model, long_work_does_not_wait_for_who_may_do_short_work)
{
    struct sn_config config = model();
    enum { ASKED_NS = 1000000, LESS_NS = 300000 /* than those 0.4 ms */, ENOUGH = 32 };
    struct tries tries = {0};
    uint64_t seen = UINT64_MAX, alone = UINT64_MAX, want = ASKED_NS + LESS_NS;

    config.latency_ns = ASKED_NS;
    test_world(&config);
    for (int n = 1; seen > want && tries_left(&tries); n++) {
        uint64_t one, two;

        long_writes(&one, &two);
        alone = one < alone ? one : alone; /* on a slow machine more than the model's */
        seen = two < seen ? two : seen;
        if (n >= ENOUGH)
            want = alone + LESS_NS;
    }
    cr_assert_leq(seen, want, "long write never before %lu ns; alone after %lu, asked 1 ms", seen, alone);
}

Test(model, the_rate_bounds_a_stream)
{
    struct sn_config config = model();
    uint64_t took, fastest = UINT64_MAX;
    struct tries tries = {0};

    config.rate_bps = 1000000000;
    start(&config);
    while (fastest > late(20000000) && tries_left(&tries)) {
        took = now_ns();
        for (int k = 0; k < 40; k++) /* 40 x 500 us */
            cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, 62500, &bt, 0, k == 39 ? IBV_SEND_SIGNALED : 0, 1), 0);
        wait_wc(a.cq, "stream");
        took = now_ns() - took;
        cr_assert_geq(took, 20000000, "2.5 MB at 1 Gbit/s took %lu us, want 20000", took / 1000);
        fastest = took < fastest ? took : fastest;
    }
    cr_assert_leq(fastest, late(20000000), "2.5 MB at 1 Gbit/s never took less than %lu us", fastest / 1000);
    end_close(&a);
    end_close(&b);
}

/* The slower of two links decides, and a new rate holds from the next request on. */
Test(model, a_link_has_its_own_rate_that_may_change)
{
    static const struct {
        uint64_t mine_bps, theirs_bps, want_ns;
    } rows[] = {{1000000000, 0, 20000000}, {4000000000, 500000000, 40000000}, {250000000, 4000000000, 80000000}};
    struct sn_world *world = start(NULL);

    for (size_t row = 0; row < sizeof rows / sizeof *rows; row++) {
        uint64_t want = rows[row].want_ns, took, fastest = UINT64_MAX;
        struct tries tries = {0};

        sn_world_set_rate(world, 0, rows[row].mine_bps);
        sn_world_set_rate(world, 1, rows[row].theirs_bps);
        while (fastest > late(want) && tries_left(&tries)) {
            took = now_ns();
            for (int k = 0; k < 40; k++)
                cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, 62500, &bt, 0, k == 39 ? IBV_SEND_SIGNALED : 0, 1), 0);
            wait_wc(a.cq, "stream");
            took = now_ns() - took;
            cr_assert_geq(took, want, "row %zu: 2.5 MB took %lu us", row, took / 1000);
            fastest = took < fastest ? took : fastest;
        }
        cr_assert_leq(fastest, late(want), "row %zu: never less than %lu us", row, fastest / 1000);
    }
}

/* A fifth of all messages and acknowledgements is lost: some of 40 writes are late by whole time-outs, none is lost for
 * good, and the seed decides which are late. */
static uint64_t retries_of_lossy_writes(uint64_t seed)
{
    struct link_options patient = link_default;
    struct sn_config config = model();
    struct sn_world *world;
    uint64_t began, slowest = 0;

    config.seed = seed;
    world = start(&config);
    end_close(&a);
    end_close(&b);
    patient.timeout = 8; /* 1.05 ms */
    patient.retry_cnt = 7;
    pair_open_with(&a, &b, NULL, &(struct end_options){.dev = 1}, &patient);
    at = end_address(&a);
    bt = end_address(&b);
    sn_world_set_loss(world, 1, 200000000);
    for (uint64_t i = 0; i < 40; i++) {
        a.buf[0] = (uint8_t)(i + 1);
        began = now_ns();
        cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, 1, &bt, 0, IBV_SEND_SIGNALED, i), 0);
        cr_assert_eq(wait_wc(a.cq, "lossy write").status, IBV_WC_SUCCESS);
        slowest = now_ns() - began > slowest ? now_ns() - began : slowest;
        cr_assert_eq(b.buf[0], i + 1);
    }
    cr_assert_gt(slowest, 1000000, "a loss costs the timeout; the slowest took %lu us", slowest / 1000);
    cr_assert_eq(world->devs[0].counters.errors, 0);
    return world->devs[0].counters.retries;
}

struct seed_row {
    uint64_t seed, retries; /* the generator draws the same on any machine */
};

ParameterizedTestParameters(model, the_seed_decides_what_is_lost_and_a_loss_costs_the_timeout)
{
    static struct seed_row rows[] = {{1, 21}, {7, 17}, {8, 27}};

    return cr_make_param_array(struct seed_row, rows, sizeof rows / sizeof *rows);
}

ParameterizedTest(struct seed_row *row, model, the_seed_decides_what_is_lost_and_a_loss_costs_the_timeout)
{
    uint64_t retries = retries_of_lossy_writes(row->seed);

    cr_assert_eq(retries, row->retries, "seed %lu: %lu retries of 40 writes, want %lu", row->seed, retries,
                 row->retries);
}

Test(model, losing_everything_exceeds_the_retries)
{
    struct sn_world *world = start(NULL);

    sn_world_set_loss(world, 0, 1000000000);
    b.buf[0] = 0;
    a.buf[0] = 1;
    cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, 1, &bt, 0, IBV_SEND_SIGNALED, 1), 0);
    cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, 1, &bt, 8, IBV_SEND_SIGNALED, 2), 0);
    cr_assert_eq(wait_wc(a.cq, "lost write").status, IBV_WC_RETRY_EXC_ERR);
    cr_assert_eq(wait_wc(a.cq, "write behind it").status, IBV_WC_WR_FLUSH_ERR);
    cr_assert_eq(b.buf[0], 0);
    cr_assert_eq(world->devs[0].counters.retries, 2u * link_default.retry_cnt);
}

/* A read takes a round trip; a fenced write waits for it, a plain write does not. With the strict meaning, a fenced
 * write waits for writes too. */
static uint64_t flag_delay(enum ibv_wr_opcode first, unsigned int flags)
{
    volatile uint8_t *flag = b.buf + 50000;
    uint64_t posted = now_ns(), seen;

    *flag = 0;
    a.buf[50000] = 1;
    cr_assert_eq(post(&a, first, 0, 8, &bt, 0, 0, 1), 0);
    cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 50000, 1, &bt, 50000, IBV_SEND_SIGNALED | flags, 2), 0);
    while (!*flag && now_ns() < posted + WAIT_S * 1000000000ull)
        ;
    seen = now_ns() - posted;
    wait_wc(a.cq, "flag write");
    return seen;
}

static uint64_t least_flag_delay(enum ibv_wr_opcode first, unsigned int flags)
{
    uint64_t least = UINT64_MAX, delay;
    struct tries tries = {0};

    while (least >= 9000000 && tries_left(&tries)) {
        delay = flag_delay(first, flags);
        least = delay < least ? delay : least;
    }
    return least;
}

Test(model, a_fence_waits_for_reads_not_for_writes)
{
    struct sn_config config = model();

    config.latency_ns = 5000000;
    start(&config);
    cr_assert_geq(flag_delay(IBV_WR_RDMA_READ, IBV_SEND_FENCE), 15000000, "fenced, behind a read");
    cr_assert_lt(least_flag_delay(IBV_WR_RDMA_READ, 0), 9000000, "unfenced, behind a read");
    cr_assert_lt(least_flag_delay(IBV_WR_RDMA_WRITE, IBV_SEND_FENCE), 9000000, "fenced, behind a write");
}

Test(model, a_strict_fence_waits_for_writes_too)
{
    struct sn_config config = model();

    config.latency_ns = 5000000;
    config.fence_meaning = SN_FENCE_STRICT;
    start(&config);
    cr_assert_geq(flag_delay(IBV_WR_RDMA_WRITE, IBV_SEND_FENCE), 15000000, "fenced, behind a write");
}

Test(model, a_modelled_read_sees_the_memory_as_it_was_before_a_later_write)
{
    struct sn_config config = model();

    config.latency_ns = 2000000;
    start(&config);
    b.buf[0] = 1;
    a.buf[8] = 2;
    cr_assert_eq(post(&a, IBV_WR_RDMA_READ, 0, 1, &bt, 0, IBV_SEND_SIGNALED, 1), 0);
    cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 8, 1, &bt, 0, IBV_SEND_SIGNALED, 2), 0);
    wait_wc(a.cq, "read");
    cr_assert_eq(a.buf[0], 1);
    wait_wc(a.cq, "write"); /* completes 2 ms before the read, unless the poster was delayed in between */
    cr_assert_eq(b.buf[0], 2);
    end_close(&a);
    end_close(&b);
}

/* SPDX-License-Identifier: Apache-2.0 */
/* The device protocol with threads as blocks: the same ring, group and wait code that a kernel runs, a real proxy, and
 * a fake NIC that completes late and out of order. Data is plain memory, so ThreadSanitizer checks that each byte a
 * receiver reads happened before through ring, proxy and signal. */
#include <criterion/criterion.h>
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include <perseus/proxy.h>

#include "test/support/fake_team.h"

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { ROUNDS = 300 };
#else
enum { ROUNDS = 10000 };
#endif

enum {
    WORLD = 3,   /* rank 0 sends; 1 and 2 receive */
    BLOCKS = 4,  /* threads that play blocks; each puts to each receiver in each round */
    WORDS = 8,   /* of 8 bytes a put */
    DATA = 0,    /* window of data */
    SIGNALS = 1, /* window of signal words */
    BANKS = 2,   /* receive banks by round parity */
    BANK_WORDS = BLOCKS * WORDS,
    HEALTHY_MS = 60000, /* for what comes: a machine may keep a thread off its cores for seconds */
};

struct fixture {
    struct prs_team *team;
    struct prs_proxy *proxy;
    struct prs_device device;
    uint64_t data[WORLD][BANKS * BANK_WORDS];
    uint64_t signals[WORLD][BANKS * BLOCKS];
    struct prs_group groups[WORLD];
    struct prs_device_signal deposits[WORLD][BLOCKS];
    uint64_t credits[WORLD]; /* rounds that a receiver has read: rank 0 waits for it */
    uint64_t map_peers;      /* bit per rank whose windows are mapped */
};

static struct fixture f;
static const struct fake_team_options busy_team = {.size = WORLD, .window = 16, .seed = 7, .connect_asks = 20};

static void add_windows(void)
{
    struct prs_window_remote data[WORLD] = {0}, signals[WORLD] = {0};
    struct prs_window_options options = {.base = f.data[0], .bytes = sizeof(f.data[0]), .remotes = data};

    for (int rank = 0; rank < WORLD; rank++) {
        data[rank].base = (uint64_t)(uintptr_t)f.data[rank];
        signals[rank].base = (uint64_t)(uintptr_t)f.signals[rank];
        if (f.map_peers & 1u << rank) {
            data[rank].mapped = data[rank].base;
            signals[rank].mapped = signals[rank].base;
        }
    }
    cr_assert_eq(prs_proxy_window(f.proxy, &options), DATA);
    options.base = f.signals[0];
    options.bytes = sizeof(f.signals[0]);
    options.remotes = signals;
    options.flags = PRS_WINDOW_SIGNALS;
    cr_assert_eq(prs_proxy_window(f.proxy, &options), SIGNALS);
}

static void open_fixture(const struct fake_team_options *team, struct prs_proxy_options options)
{
    f.team = fake_team_open(team);
    options.team = f.team;
    options.numa_node = -1;
    cr_assert_eq(prs_proxy_open(&options, &f.proxy), 0);
    add_windows();
    cr_assert_eq(prs_proxy_start(f.proxy, &f.device), 0);
}

static void close_fixture(void)
{
    prs_proxy_close(f.proxy);
    fake_team_close(f.team);
}

static uint64_t word_of(uint32_t rank, uint32_t block, uint64_t round, uint32_t word)
{
    return (uint64_t)rank << 56 | (uint64_t)block << 48 | round << 8 | word;
}

static struct prs_device_put put_of(uint32_t rank, uint32_t block, uint64_t round)
{
    uint64_t at = ((round % BANKS) * BANK_WORDS + block * WORDS) * 8;

    return (struct prs_device_put){.src_offset = at,
                                   .dst_offset = at,
                                   .bytes = WORDS * 8,
                                   .peer = rank,
                                   .dst_window = DATA,
                                   .src_window = DATA,
                                   .group = rank};
}

static struct prs_device_signal signal_of(uint32_t rank, uint32_t block, uint64_t round)
{
    return (struct prs_device_signal){.offset = ((round % BANKS) * BLOCKS + block) * 8,
                                      .value = 1,
                                      .peer = rank,
                                      .window = SIGNALS,
                                      .group = rank,
                                      .add = 1};
}

struct block {
    pthread_t thread;
    uint32_t id;
    bool grouped;
    int result;
    uint64_t wrong;
};

/* One source area a block and bank, the same for every receiver, so the words must not depend on the rank. */
static void *send_rounds(void *argument)
{
    struct block *block = argument;
    uint64_t tickets[BANKS][WORLD] = {{0}};

    for (uint64_t round = 0; round < ROUNDS && block->result >= 0; round++) {
        uint64_t *source = &f.data[0][(round % BANKS) * BANK_WORDS + block->id * WORDS];

        for (int rank = 1; rank < WORLD; rank++)
            if (prs_flush(&f.device, tickets[round % BANKS][rank]) < 0)
                block->result = -1;
        for (uint32_t word = 0; word < WORDS; word++)
            source[word] = word_of(0, block->id, round, word);
        for (uint32_t rank = 1; rank < WORLD && block->result >= 0; rank++) {
            struct prs_device_put put = put_of(rank, block->id, round);
            struct prs_device_signal signal = signal_of(rank, block->id, round);

            /* The receiver has read what lies in this bank. */
            if (round >= BANKS)
                block->result = prs_wait_signal(&f.device, &f.credits[rank], PRS_COMPARE_GE, round - BANKS + 1);
            if (block->result < 0)
                break;
            if (block->grouped) {
                block->result = prs_put(&f.device, &put, &tickets[round % BANKS][rank]);
                if (block->result >= 0)
                    block->result = prs_group_arrive(&f.device, &f.groups[rank], &signal);
            } else {
                block->result = prs_put_signal(&f.device, &put, &signal, &tickets[round % BANKS][rank]);
            }
        }
    }
    return NULL;
}

static void *receive_rounds(void *argument)
{
    struct block *block = argument;
    uint32_t rank = block->id;

    for (uint64_t round = 0; round < ROUNDS; round++) {
        for (uint32_t from = 0; from < BLOCKS; from++) {
            const uint64_t *data = &f.data[rank][(round % BANKS) * BANK_WORDS + from * WORDS];

            block->result = prs_wait_signal(&f.device, &f.signals[rank][(round % BANKS) * BLOCKS + from],
                                            PRS_COMPARE_GE, round / BANKS + 1);
            if (block->result < 0)
                return NULL;
            for (uint32_t word = 0; word < WORDS; word++)
                block->wrong += data[word] != word_of(0, from, round, word);
        }
        __atomic_store_n(&f.credits[rank], round + 1, __ATOMIC_RELEASE);
    }
    return NULL;
}

/* Run all rounds; return how many words were wrong. */
static uint64_t run_rounds(bool grouped)
{
    struct block senders[BLOCKS] = {0}, receivers[WORLD] = {0};
    uint64_t wrong = 0;

    for (uint32_t rank = 1; rank < WORLD; rank++)
        prs_group_begin(&f.groups[rank], rank, BLOCKS, f.deposits[rank]);
    for (uint32_t rank = 1; rank < WORLD; rank++) {
        receivers[rank].id = rank;
        pthread_create(&receivers[rank].thread, NULL, receive_rounds, &receivers[rank]);
    }
    for (uint32_t i = 0; i < BLOCKS; i++) {
        senders[i].id = i;
        senders[i].grouped = grouped;
        pthread_create(&senders[i].thread, NULL, send_rounds, &senders[i]);
    }
    for (uint32_t i = 0; i < BLOCKS; i++) {
        pthread_join(senders[i].thread, NULL);
        cr_assert_geq(senders[i].result, 0, "block %u: %s", i, prs_proxy_error(f.proxy));
    }
    for (uint32_t rank = 1; rank < WORLD; rank++) {
        pthread_join(receivers[rank].thread, NULL);
        cr_assert_eq(receivers[rank].result, 0, "rank %u: %s", rank, prs_proxy_error(f.proxy));
        wrong += receivers[rank].wrong;
    }
    return wrong;
}

Test(device_replay, a_signal_is_seen_only_after_its_put, .timeout = 120)
{
    struct prs_proxy_stats stats;

    open_fixture(&busy_team, (struct prs_proxy_options){.ring_slots = 16, .timeout_ms = HEALTHY_MS});
    cr_assert_eq(run_rounds(false), 0);
    cr_assert_eq(prs_quiet(&f.device), 0);
    cr_assert_eq(prs_proxy_check(f.proxy), 0);
    cr_assert_geq(fake_team_most_in_flight(f.team), 2, "nothing was in flight together: the test tests nothing");
    prs_proxy_stats(f.proxy, &stats);
    cr_assert_eq(stats.puts, (uint64_t)ROUNDS * BLOCKS * (WORLD - 1));
    cr_assert_eq(stats.signals, stats.puts);
    close_fixture();
}

Test(device_replay, a_group_sends_its_signals_behind_all_its_puts, .timeout = 120)
{
    open_fixture(&busy_team, (struct prs_proxy_options){.ring_slots = 16, .timeout_ms = HEALTHY_MS});
    cr_assert_eq(run_rounds(true), 0);
    cr_assert_eq(prs_quiet(&f.device), 0);
    for (int rank = 1; rank < WORLD; rank++)
        cr_assert_eq(f.groups[rank].flushed, (uint64_t)ROUNDS);
    close_fixture();
}

Test(device_replay, a_mapped_peer_needs_no_proxy, .timeout = 120)
{
    struct prs_proxy_stats stats;

    f.map_peers = 1u << 1 | 1u << 2;
    open_fixture(&busy_team, (struct prs_proxy_options){.ring_slots = 16, .timeout_ms = HEALTHY_MS});
    cr_assert_eq(run_rounds(true), 0);
    prs_proxy_stats(f.proxy, &stats);
    cr_assert_eq(stats.commands, 0);
    close_fixture();
}

/* ------------------------------------------------------------------------------------------------------------------ */

static void step_until_idle(void)
{
    for (int i = 0; i < 100000; i++) {
        int r = prs_proxy_step(f.proxy);

        cr_assert_geq(r, 0, "%s", prs_proxy_error(f.proxy));
    }
}

static void put_and_signal(uint32_t rank, uint32_t group, bool put, bool signal)
{
    struct prs_device_put a = put_of(rank, 0, 0);
    struct prs_device_signal b = signal_of(rank, 0, 0);

    a.group = b.group = group;
    if (put)
        cr_assert_eq(prs_put(&f.device, &a, NULL), 0);
    if (signal)
        cr_assert_eq(prs_signal(&f.device, &b, NULL), 0);
}

/* Step until the signal of a put is seen, a hundred times; how often was its data not there yet? */
static int signals_before_data(bool ignore_groups)
{
    struct fake_team_options nic = busy_team;
    int early = 0;

    nic.ignore_groups = ignore_groups;
    open_fixture(&nic, (struct prs_proxy_options){.stepped = true});
    for (uint64_t round = 0; round < 100; round++) {
        struct prs_device_put put = put_of(1, 0, 0);
        struct prs_device_signal signal = signal_of(1, 0, 0);

        f.data[0][0] = round + 1;
        cr_assert_eq(prs_put_signal(&f.device, &put, &signal, NULL), 0);
        while (f.signals[1][0] == round)
            cr_assert_geq(prs_proxy_step(f.proxy), 0);
        early += f.data[1][0] != round + 1;
        while (f.device.control->done < f.device.local->claim)
            cr_assert_geq(prs_proxy_step(f.proxy), 0);
    }
    close_fixture();
    return early;
}

Test(device_replay, a_nic_that_ignores_groups_is_noticed)
{
    cr_assert_eq(signals_before_data(false), 0);
    cr_assert_gt(signals_before_data(true), 0, "signals overtook their puts and nobody saw it");
}

/* The paper's 112 transfers to 4 peers, here 56 to 2: a fence each when coupled, one a destination when grouped. */
Test(device_replay, draining_counts_a_fence_a_group)
{
    struct fake_team_options drained = busy_team;
    struct prs_proxy_stats stats;

    drained.drain = true;
    open_fixture(&drained, (struct prs_proxy_options){.ring_slots = 256, .stepped = true});
    for (int i = 0; i < 56; i++)
        put_and_signal(1 + i % 2, 1, true, true);
    step_until_idle();
    prs_proxy_stats(f.proxy, &stats);
    cr_assert_eq(stats.fences, 56);
    for (int i = 0; i < 56; i++)
        put_and_signal(1 + i % 2, 2, true, false);
    for (int i = 0; i < 56; i++)
        put_and_signal(1 + i % 2, 2, false, true);
    step_until_idle();
    prs_proxy_stats(f.proxy, &stats);
    cr_assert_eq(stats.fences, 58);
    cr_assert_eq(stats.commands, 224);
    cr_assert_eq(prs_quiet(&f.device), 0);
    close_fixture();
}

Test(device_replay, while_it_drains_the_proxy_posts_nothing)
{
    struct fake_team_options drained = busy_team;

    drained.drain = true;
    open_fixture(&drained, (struct prs_proxy_options){.ring_slots = 256, .stepped = true});
    step_until_idle(); /* connect */
    fake_team_hold(f.team, true);
    for (int i = 0; i < 8; i++)
        put_and_signal(1, 1, true, true);
    step_until_idle();
    cr_assert_eq(fake_team_most_in_flight(f.team), 1, "%u in flight behind a fence", fake_team_most_in_flight(f.team));
    fake_team_hold(f.team, false);
    step_until_idle();
    cr_assert_eq(prs_quiet(&f.device), 0);
    close_fixture();
}

static struct prs_cmd_fields good_put(void)
{
    struct prs_device_put put = put_of(1, 0, 0);

    return prs_cmd_of_put(&f.device, &put);
}

static void push_raw(const struct prs_cmd_fields *fields)
{
    uint64_t at = 0;

    cr_assert_eq(prs_ring_claim(&f.device, 1, &at), 0);
    prs_ring_write(&f.device, at, fields);
}

/* A window that is made when the proxy runs: this much memory of each rank. Return its index. */
static uint64_t late[WORLD][8];

static int late_window(void)
{
    struct prs_window_remote remotes[WORLD] = {0};
    struct prs_window_options options = {.base = late[0], .bytes = sizeof(late[0]), .remotes = remotes};

    for (uint32_t rank = 0; rank < WORLD; rank++)
        remotes[rank].base = (uint64_t)(uintptr_t)late[rank];
    return prs_proxy_window(f.proxy, &options);
}

/* Plans open and close while kernels of others run: the device's description stays as it is. */
Test(device_replay, a_window_that_comes_later_is_reached_and_one_that_went_is_not)
{
    struct prs_device_put put = {.bytes = 16, .dst_offset = 32, .peer = 2};
    uint64_t ticket;
    int window;

    open_fixture(&busy_team, (struct prs_proxy_options){.timeout_ms = HEALTHY_MS});
    window = late_window();
    cr_assert_eq(window, 2);
    put.src_window = put.dst_window = (uint32_t)window;
    late[0][0] = 11, late[0][1] = 12;
    cr_assert_eq(prs_put(&f.device, &put, &ticket), 0);
    cr_assert_eq(prs_flush(&f.device, ticket), 0, "%s", prs_proxy_error(f.proxy));
    cr_assert(late[2][4] == 11 && late[2][5] == 12);
    cr_assert_eq(prs_proxy_window_drop(f.proxy, (uint32_t)window), 0);
    cr_assert_eq(prs_proxy_window_drop(f.proxy, (uint32_t)window), -EINVAL, "it went already");
    cr_assert_eq(prs_put(&f.device, &put, NULL), -PRS_DEVICE_MISUSE, "the device knows that it went");
    close_fixture();
}

/* What a kernel left behind that gave up: the command was taken, its peer was not there yet. */
Test(device_replay, a_command_that_waits_while_its_window_goes_is_refused_by_name)
{
    struct prs_device_put put = {.bytes = 16, .dst_offset = 32, .peer = 2};
    int window, r;

    open_fixture(&busy_team, (struct prs_proxy_options){.timeout_ms = HEALTHY_MS, .stepped = true});
    window = late_window();
    put.src_window = put.dst_window = (uint32_t)window;
    late[0][0] = 11;
    cr_assert_eq(prs_put(&f.device, &put, NULL), 0);
    cr_assert_geq(prs_proxy_step(f.proxy), 0, "taken; the peer connects");
    cr_assert_eq(late[2][4], 0);
    cr_assert_eq(prs_proxy_window_drop(f.proxy, (uint32_t)window), 0);
    for (int i = 0; (r = prs_proxy_step(f.proxy)) >= 0; i++)
        cr_assert_lt(i, 1000, "the command is still waiting");
    cr_assert_eq(r, -EINVAL);
    cr_assert(strstr(prs_proxy_error(f.proxy), "window 2, which was given back"), "%s", prs_proxy_error(f.proxy));
    cr_assert_eq(late[2][4], 0);
    close_fixture();
}

Test(device_replay, windows_go_while_the_thread_carries_commands_of_others)
{
    uint64_t ticket = 0;

    open_fixture(&busy_team, (struct prs_proxy_options){.timeout_ms = HEALTHY_MS});
    for (int i = 0; i < 200; i++) {
        struct prs_device_put put = put_of(1, 0, 0);
        int window = late_window();

        cr_assert_eq(window, 2, "its index comes again");
        for (int k = 0; k < 4; k++)
            cr_assert_eq(prs_put(&f.device, &put, &ticket), 0);
        cr_assert_eq(prs_proxy_window_drop(f.proxy, (uint32_t)window), 0);
    }
    cr_assert_eq(prs_flush(&f.device, ticket), 0, "%s", prs_proxy_error(f.proxy));
    close_fixture();
}

Test(device_replay, a_command_out_of_bounds_touches_nothing_and_stops_the_device)
{
    struct prs_cmd_fields bad;

    open_fixture(&busy_team, (struct prs_proxy_options){.timeout_ms = HEALTHY_MS});
    bad = good_put();
    bad.dst_offset = sizeof(f.data[0]) - 8;
    memset(f.data[0], 0x5a, sizeof(f.data[0]));
    push_raw(&bad);
    cr_assert_eq(prs_quiet(&f.device), -PRS_DEVICE_ABORTED);
    cr_assert_eq(prs_proxy_check(f.proxy), -ERANGE);
    cr_assert(strstr(prs_proxy_error(f.proxy), "destination window 0"), "%s", prs_proxy_error(f.proxy));
    for (int rank = 1; rank < WORLD; rank++)
        for (int i = 0; i < BANKS * BANK_WORDS; i++)
            cr_assert_eq(f.data[rank][i], 0);
    close_fixture();
}

Test(device_replay, the_device_refuses_misuse_before_it_reaches_the_ring)
{
    struct prs_device_put put;

    open_fixture(&busy_team, (struct prs_proxy_options){.timeout_ms = HEALTHY_MS});
    put = put_of(WORLD, 0, 0);
    cr_assert_eq(prs_put(&f.device, &put, NULL), -PRS_DEVICE_MISUSE);
    while (prs_proxy_check(f.proxy) == 0)
        sched_yield();
    cr_assert_eq(prs_proxy_check(f.proxy), -EINVAL);
    cr_assert(strstr(prs_proxy_error(f.proxy), "refused a command for peer 0x3"), "%s", prs_proxy_error(f.proxy));
    cr_assert_eq(f.device.local->claim, 0);
    close_fixture();
}

Test(device_replay, a_kernel_of_a_closed_proxy_is_found_out_by_its_epoch)
{
    struct prs_cmd_fields stale;

    open_fixture(&busy_team, (struct prs_proxy_options){.timeout_ms = HEALTHY_MS});
    stale = good_put();
    close_fixture();
    open_fixture(&busy_team, (struct prs_proxy_options){.timeout_ms = HEALTHY_MS});
    cr_assert_neq(stale.epoch, f.device.epoch);
    push_raw(&stale);
    cr_assert_eq(prs_quiet(&f.device), -PRS_DEVICE_ABORTED);
    cr_assert_eq(prs_proxy_check(f.proxy), -ESTALE);
    cr_assert(strstr(prs_proxy_error(f.proxy), "epoch"), "%s", prs_proxy_error(f.proxy));
    close_fixture();
}

Test(device_replay, a_dead_peer_ends_every_wait_with_its_error)
{
    open_fixture(&busy_team, (struct prs_proxy_options){.timeout_ms = HEALTHY_MS});
    fake_team_hold(f.team, true);
    put_and_signal(1, 1, true, true);
    fake_team_kill(f.team, -ECONNRESET);
    cr_assert_eq(prs_quiet(&f.device), -PRS_DEVICE_ABORTED);
    cr_assert_eq(prs_proxy_check(f.proxy), -ECONNRESET);
    cr_assert(strstr(prs_proxy_error(f.proxy), "the peer is dead"), "%s", prs_proxy_error(f.proxy));
    close_fixture();
}

/* A stepped proxy that nobody steps is a proxy that was killed. */
Test(device_replay, without_a_proxy_a_wait_ends_and_says_for_what)
{
    struct prs_ring_control *control;

    open_fixture(&busy_team, (struct prs_proxy_options){.timeout_ms = 50, .stepped = true});
    put_and_signal(1, 1, true, true);
    cr_assert_eq(prs_quiet(&f.device), -PRS_DEVICE_TIMEOUT);
    control = f.device.control;
    cr_assert_eq(control->report.kind, (uint64_t)PRS_WAIT_DONE);
    cr_assert_eq(control->report.want, 2u);
    cr_assert_eq(control->report.have, 0u);
    close_fixture();
}

Test(device_replay, a_signal_that_never_comes_is_named)
{
    open_fixture(&busy_team, (struct prs_proxy_options){.timeout_ms = 50});
    cr_assert_eq(prs_wait_signal(&f.device, &f.signals[0][3], PRS_COMPARE_GE, 9), -PRS_DEVICE_TIMEOUT);
    while (prs_proxy_check(f.proxy) == 0)
        sched_yield();
    cr_assert_eq(prs_proxy_check(f.proxy), -ETIMEDOUT);
    cr_assert(strstr(prs_proxy_error(f.proxy), "signal word") && strstr(prs_proxy_error(f.proxy), "want 9, have 0"),
              "%s", prs_proxy_error(f.proxy));
    close_fixture();
}

/* ------------------------------------------------------------------------------------------------------------------
 * closing with commands in flight */

/* Posted to rank 1 and not completed, as from a kernel that nobody waited for. */
static void open_with_commands_in_flight(bool drain)
{
    struct fake_team_options team = busy_team;

    team.drain = drain;
    open_fixture(&team, (struct prs_proxy_options){.stepped = true, .timeout_ms = HEALTHY_MS});
    step_until_idle(); /* connect */
    fake_team_hold(f.team, true);
    for (int i = 0; i < 3; i++)
        put_and_signal(1, 1, true, true);
    step_until_idle();
    cr_assert_gt(fake_team_in_flight(f.team), 0, "nothing is in flight: the test tests nothing");
}

static void close_lets_commands_end(bool drain, uint64_t signals)
{
    open_with_commands_in_flight(drain);
    fake_team_hold_for(f.team, 1000, 0);
    prs_proxy_close(f.proxy);
    cr_assert_eq(f.signals[1][0], signals, "%" PRIu64 " of %" PRIu64 " signals came", f.signals[1][0], signals);
    cr_assert_eq(fake_team_peer_error(f.team, 1), 0, "the peer was failed, though all was complete in time");
    fake_team_close(f.team);
}

Test(device_replay, a_close_lets_commands_in_flight_end)
{
    close_lets_commands_end(false, 3);
}

Test(device_replay, a_close_lets_commands_behind_a_fence_end)
{
    close_lets_commands_end(true, 1); /* what follows the fence is not taken */
}

/* The close waits as long as it looks, and not as long as something else has its core. */
Test(device_replay, a_close_that_is_kept_off_its_core_lets_commands_end)
{
    open_with_commands_in_flight(false);
    fake_team_hold_for(f.team, 3, 500); /* three looks, and the whole time is over */
    prs_proxy_close(f.proxy);
    cr_assert_eq(f.signals[1][0], 3, "%" PRIu64 " of 3 signals came", f.signals[1][0]);
    cr_assert_eq(fake_team_peer_error(f.team, 1), 0, "the peer was failed, though it was hardly looked at");
    fake_team_close(f.team);
}

/* It once freed ops that the team still had, and whose status the team wrote when it was closed. */
Test(device_replay, a_closed_proxy_leaves_no_op_in_its_team, .timeout = 120)
{
    open_with_commands_in_flight(false);
    prs_proxy_close(f.proxy);
    cr_assert_eq(fake_team_in_flight(f.team), 0, "%u ops are freed and still in flight", fake_team_in_flight(f.team));
    cr_assert_eq(fake_team_peer_error(f.team, 1), -ECANCELED);
    cr_assert_eq(fake_team_peer_error(f.team, 2), 0, "nothing was in flight to rank 2");
    fake_team_close(f.team);
}

Test(device_replay, a_proxy_that_failed_leaves_no_op_in_its_team, .timeout = 120)
{
    open_with_commands_in_flight(false);
    fake_team_kill(f.team, -ECONNRESET);
    cr_assert_eq(prs_proxy_step(f.proxy), -ECONNRESET);
    prs_proxy_close(f.proxy);
    cr_assert_eq(fake_team_in_flight(f.team), 0, "%u ops are freed and still in flight", fake_team_in_flight(f.team));
    fake_team_close(f.team);
}

/* What the ring holds and nobody took stays there; what waits for a peer that never connects holds the close up for its
 * limit and no longer. */
Test(device_replay, a_close_takes_no_new_commands_and_ends_without_a_peer, .timeout = 120)
{
    struct fake_team_options team = busy_team;

    team.connect_asks = UINT32_MAX;
    open_fixture(&team, (struct prs_proxy_options){.stepped = true, .timeout_ms = HEALTHY_MS});
    put_and_signal(1, 1, true, true);
    cr_assert_geq(prs_proxy_step(f.proxy), 0);
    prs_proxy_close(f.proxy);
    cr_assert_eq(fake_team_in_flight(f.team), 0);
    fake_team_close(f.team);

    open_fixture(&busy_team, (struct prs_proxy_options){.stepped = true, .timeout_ms = HEALTHY_MS});
    put_and_signal(1, 1, true, true);
    prs_proxy_close(f.proxy);
    cr_assert_eq(f.signals[1][0], 0, "a command was taken by a close");
    fake_team_close(f.team);
}

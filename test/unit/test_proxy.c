/* SPDX-License-Identifier: Apache-2.0 */
/* The proxy: windows that are added and dropped, bad commands and peers, settling, and closing. */
#include <criterion/criterion.h>
#include <errno.h>
#include <inttypes.h>
#include <sched.h>
#include <string.h>

#include "test/support/device_fixture.h"
#include "transport/util/error.h"

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

static uint64_t late[WORLD][8];

/* Add a window while the proxy runs: this memory of each rank. Return its index. */
static int late_window(void)
{
    struct prs_window_remote remotes[WORLD] = {0};
    struct prs_window_options options = {.base = late[0], .bytes = sizeof(late[0]), .remotes = remotes};

    for (uint32_t rank = 0; rank < WORLD; rank++) {
        remotes[rank].base = (uint64_t)(uintptr_t)late[rank];
        remotes[rank].mapped = f.map_peers & 1u << rank ? remotes[rank].base : 0;
    }
    return prs_proxy_window(f.proxy, &options);
}

/* Plans open and close while the kernels of other plans run, so the device's description must not change. */
Test(proxy, a_window_that_comes_later_is_reached_and_one_that_went_is_not)
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

/* A kernel that gave up left a command. The proxy has taken it, but its peer is still connecting. */
Test(proxy, a_command_that_waits_while_its_window_goes_is_refused_by_name)
{
    struct prs_device_put put = {.bytes = 16, .dst_offset = 32, .peer = 2};
    uint32_t failed = 0;
    int window, r;

    open_fixture(&busy_team, (struct prs_proxy_options){.timeout_ms = HEALTHY_MS, .stepped = true, .failed = &failed});
    window = late_window();
    put.src_window = put.dst_window = (uint32_t)window;
    late[0][0] = 11;
    cr_assert_eq(prs_put(&f.device, &put, NULL), 0);
    cr_assert_geq(prs_proxy_step(f.proxy), 0, "taken; the peer connects");
    cr_assert_eq(failed, 0);
    cr_assert_eq(late[2][4], 0);
    cr_assert_eq(prs_proxy_window_drop(f.proxy, (uint32_t)window), 0);
    for (int i = 0; (r = prs_proxy_step(f.proxy)) >= 0; i++)
        cr_assert_lt(i, 1000, "the command is still waiting");
    cr_assert_eq(r, -EINVAL);
    cr_assert(strstr(prs_proxy_error(f.proxy), "window 2, which was given back"), "%s", prs_proxy_error(f.proxy));
    cr_assert_eq(failed, 1, "other waits are not told");
    cr_assert_eq(late[2][4], 0);
    close_fixture();
}

/* The test does not step the proxy, so a command would have no effect. */
Test(proxy, a_put_and_its_signal_to_a_mapped_peer_are_stores_also_when_window_0_went)
{
    struct prs_device_put put = {.bytes = 8, .dst_offset = 16, .peer = 2};
    struct prs_device_signal signal = {.offset = 8, .value = 5, .peer = 2, .window = SIGNALS};
    int window;

    f.map_peers = 1u << 1 | 1u << 2;
    open_fixture(&busy_team, (struct prs_proxy_options){.timeout_ms = HEALTHY_MS, .stepped = true});
    window = late_window();
    cr_assert_eq(window, 2);
    cr_assert_eq(prs_proxy_window_drop(f.proxy, DATA), 0);
    put.src_window = put.dst_window = (uint32_t)window;
    late[0][0] = 11;
    cr_assert_eq(prs_put_signal(&f.device, &put, &signal, NULL), 0);
    cr_assert_eq(f.signals[2][1], 5);
    cr_assert_eq(late[2][2], 11);
    put.dst_window = 1u << 20;
    cr_assert_eq(prs_put_signal(&f.device, &put, &signal, NULL), -PRS_DEVICE_MISUSE);
    close_fixture();
}

/* Otherwise the store to the signal word would overtake the put, which waits for the proxy. */
Test(proxy, a_window_that_is_mapped_is_refused_where_others_of_that_rank_are_not)
{
    open_fixture(&busy_team, (struct prs_proxy_options){.timeout_ms = HEALTHY_MS, .stepped = true});
    f.map_peers = 1u << 2;
    cr_assert_eq(late_window(), -EINVAL);
    cr_assert(strstr(prs_error_last(), "of rank 2 window 0"), "%s", prs_error_last());
    f.map_peers = 0;
    cr_assert_eq(late_window(), 2);
    close_fixture();
}

/* A command has 16 bits for the rank. One rank more would be read as rank 0 and another window. */
Test(proxy, a_team_of_more_ranks_than_a_command_can_name_is_refused)
{
    struct fake_team_options many = {.size = PRS_CMD_PEERS + 1, .window = 1};
    struct prs_proxy_options options = {.numa_node = -1, .stepped = true};
    struct prs_proxy *proxy = NULL;

    options.team = fake_team_open(&many);
    cr_assert_eq(prs_proxy_open(&options, &proxy), -EINVAL);
    fake_team_close(options.team);
    many.size--;
    options.team = fake_team_open(&many);
    cr_assert_eq(prs_proxy_open(&options, &proxy), 0);
    prs_proxy_close(proxy);
    fake_team_close(options.team);
}

Test(proxy, windows_go_while_the_thread_carries_commands_of_others)
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

/* Stop the thread of the proxy for longer than a drop waits for it. */
static void stop_thread(void)
{
    fake_team_hold_for(f.team, 1, 7000);
    fake_team_hold(f.team, true);
    while (!fake_team_is_asleep(f.team))
        sched_yield();
}

/* The proxy once forgot such a window when the next drop named another one. */
Test(proxy, a_window_whose_drop_timed_out_goes_before_the_next, .timeout = 120)
{
    struct prs_device_put put = {.bytes = 16, .peer = 2};
    int first, second;

    open_fixture(&busy_team, (struct prs_proxy_options){.timeout_ms = HEALTHY_MS});
    first = late_window();
    second = late_window();
    stop_thread();
    cr_assert_eq(prs_proxy_window_drop(f.proxy, (uint32_t)first), -ETIMEDOUT);
    cr_assert(strstr(prs_error_last(), "window 2 within"), "%s", prs_error_last());
    cr_assert_eq(f.device.bytes[first], 0, "a later kernel must not name it");
    cr_assert_eq(prs_proxy_window_drop(f.proxy, (uint32_t)second), 0, "the thread runs again");
    cr_assert_eq(prs_proxy_window_drop(f.proxy, (uint32_t)first), -EINVAL, "it went");
    cr_assert_eq(late_window(), first, "its index comes again");
    put.src_window = put.dst_window = (uint32_t)second;
    cr_assert_eq(prs_put(&f.device, &put, NULL), -PRS_DEVICE_MISUSE);
    close_fixture();
}

Test(proxy, a_drop_that_timed_out_may_be_asked_for_again, .timeout = 120)
{
    int window;

    open_fixture(&busy_team, (struct prs_proxy_options){.timeout_ms = HEALTHY_MS});
    window = late_window();
    stop_thread();
    cr_assert_eq(prs_proxy_window_drop(f.proxy, (uint32_t)window), -ETIMEDOUT);
    cr_assert_eq(prs_proxy_window_drop(f.proxy, (uint32_t)window), 0);
    cr_assert_eq(late_window(), window);
    close_fixture();
}

Test(proxy, a_command_out_of_bounds_touches_nothing_and_stops_the_device)
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

Test(proxy, the_device_refuses_misuse_before_it_reaches_the_ring)
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

Test(proxy, a_kernel_of_a_closed_proxy_is_found_out_by_its_epoch)
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

Test(proxy, a_dead_peer_ends_every_wait_with_its_error)
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

/* ---- a rank that has lost another tells the others ---- */

static void fail_with_ranks_to_tell(uint32_t tells)
{
    struct fake_team_options team = busy_team;
    bool now;

    team.tells = tells;
    open_fixture(&team, (struct prs_proxy_options){.timeout_ms = HEALTHY_MS, .stepped = true});
    cr_assert_geq(prs_proxy_step(f.proxy), 0);
    fake_team_kill(f.team, -ECONNRESET);
    cr_assert_eq(prs_proxy_step(f.proxy), -ECONNRESET);
    cr_assert_eq(fake_team_tells(f.team, &now), 0, "waits on the device come first");
}

/* The team has transfers in flight that are to end before. */
Test(proxy, after_an_error_the_team_is_told_until_all_ranks_know)
{
    bool now = false;

    fail_with_ranks_to_tell(3);
    for (int i = 0; i < 10; i++)
        cr_assert_eq(prs_proxy_step(f.proxy), -ECONNRESET);
    prs_proxy_close(f.proxy);
    cr_assert_eq(fake_team_tells(f.team, &now), 3 + 1);
    cr_assert_not(now, "they knew before the proxy closed");
    fake_team_close(f.team);
}

Test(proxy, one_that_closes_after_an_error_tells_at_once)
{
    bool now = false;

    fail_with_ranks_to_tell(UINT32_MAX);
    cr_assert_eq(prs_proxy_step(f.proxy), -ECONNRESET);
    prs_proxy_close(f.proxy);
    cr_assert_eq(fake_team_tells(f.team, &now), 2);
    cr_assert(now, "nobody is told");
    fake_team_close(f.team);
}

Test(proxy, the_transfers_in_flight_delay_what_is_told_for_a_second, .timeout = 120)
{
    bool now = false;

    fail_with_ranks_to_tell(UINT32_MAX);
    while (!now) {
        cr_assert_eq(prs_proxy_step(f.proxy), -ECONNRESET);
        (void)fake_team_tells(f.team, &now);
        sched_yield();
    }
    close_fixture();
}

Test(proxy, without_an_error_nobody_is_told)
{
    bool now;

    open_fixture(&busy_team, (struct prs_proxy_options){.timeout_ms = HEALTHY_MS, .stepped = true});
    cr_assert_geq(prs_proxy_step(f.proxy), 0);
    prs_proxy_close(f.proxy);
    cr_assert_eq(fake_team_tells(f.team, &now), 0);
    fake_team_close(f.team);
}

/* ---- waits without an end ---- */

/* The test does not step this proxy, as if it had been killed. */
Test(proxy, without_a_proxy_a_wait_ends_and_says_for_what)
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

Test(proxy, a_signal_that_never_comes_is_named)
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

/* ---- settling ---- */

Test(proxy, has_settled_when_its_signals_are_raised)
{
    open_fixture(&busy_team, (struct prs_proxy_options){.stepped = true, .timeout_ms = HEALTHY_MS});
    cr_assert_eq(prs_proxy_settle(f.proxy, HEALTHY_MS), 0, "nothing was sent: %s", prs_proxy_error(f.proxy));
    step_until_idle(); /* connect */
    fake_team_hold(f.team, true);
    put_and_signal(1, 1, true, true);
    step_until_idle();
    cr_assert_eq(prs_proxy_settle(f.proxy, 50), -ETIMEDOUT);
    cr_assert(strstr(prs_error_text(), "rank 0") && strstr(prs_error_text(), "50 ms"), "%s", prs_error_text());
    cr_assert_eq(prs_proxy_check(f.proxy), 0, "a caller that waited in vain may wait again");
    fake_team_hold(f.team, false);
    cr_assert_eq(prs_proxy_settle(f.proxy, HEALTHY_MS), 0, "%s", prs_proxy_error(f.proxy));
    cr_assert_eq(f.signals[1][0], 1);
    close_fixture();
}

Test(proxy, settles_by_its_thread)
{
    open_fixture(&busy_team, (struct prs_proxy_options){.timeout_ms = HEALTHY_MS});
    for (uint64_t i = 1; i <= 100; i++) {
        put_and_signal(1, 1, true, true);
        cr_assert_eq(prs_quiet(&f.device), 0);
        cr_assert_eq(prs_proxy_settle(f.proxy, HEALTHY_MS), 0, "%s", prs_proxy_error(f.proxy));
        cr_assert_eq(f.signals[1][0], i);
    }
    close_fixture();
}

Test(proxy, that_failed_settles_with_its_error)
{
    open_fixture(&busy_team, (struct prs_proxy_options){.timeout_ms = HEALTHY_MS});
    fake_team_hold(f.team, true);
    put_and_signal(1, 1, true, true);
    fake_team_kill(f.team, -ECONNRESET);
    cr_assert_eq(prs_proxy_settle(f.proxy, HEALTHY_MS), -ECONNRESET);
    cr_assert(strstr(prs_error_text(), "the peer is dead"), "%s", prs_error_text());
    close_fixture();
}

/* ---- closing with commands in flight ---- */

/* Post commands to rank 1 that do not complete, as if the caller had not waited for its kernel. */
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
    fake_team_hold_for(f.team, 50, 0); /* looks, each of which counts as 10 ms at most: half of the limit */
    prs_proxy_close(f.proxy);
    cr_assert_eq(f.signals[1][0], signals, "%" PRIu64 " of %" PRIu64 " signals came", f.signals[1][0], signals);
    cr_assert_eq(fake_team_peer_error(f.team, 1), 0, "the peer was failed, though all was complete in time");
    fake_team_close(f.team);
}

Test(proxy, a_close_lets_commands_in_flight_end)
{
    close_lets_commands_end(false, 3);
}

Test(proxy, a_close_lets_commands_behind_a_fence_end)
{
    close_lets_commands_end(true, 1); /* the commands after the fence are not taken */
}

/* The time limit of a close counts only the time in which the close itself runs. */
Test(proxy, a_close_that_is_kept_off_its_core_lets_commands_end)
{
    open_with_commands_in_flight(false);
    fake_team_hold_for(f.team, 3, 500); /* three looks take longer than the whole limit */
    prs_proxy_close(f.proxy);
    cr_assert_eq(f.signals[1][0], 3, "%" PRIu64 " of 3 signals came", f.signals[1][0]);
    cr_assert_eq(fake_team_peer_error(f.team, 1), 0, "the peer was failed, though it was hardly looked at");
    fake_team_close(f.team);
}

/* A close once freed ops that the team still had. The team then wrote their status when it was closed. */
Test(proxy, a_closed_proxy_leaves_no_op_in_its_team, .timeout = 120)
{
    open_with_commands_in_flight(false);
    prs_proxy_close(f.proxy);
    cr_assert_eq(fake_team_in_flight(f.team), 0, "%u ops are freed and still in flight", fake_team_in_flight(f.team));
    cr_assert_eq(fake_team_peer_error(f.team, 1), -ECANCELED);
    cr_assert_eq(fake_team_peer_error(f.team, 2), 0, "nothing was in flight to rank 2");
    fake_team_close(f.team);
}

Test(proxy, a_proxy_that_failed_leaves_no_op_in_its_team, .timeout = 120)
{
    open_with_commands_in_flight(false);
    fake_team_kill(f.team, -ECONNRESET);
    cr_assert_eq(prs_proxy_step(f.proxy), -ECONNRESET);
    prs_proxy_close(f.proxy);
    cr_assert_eq(fake_team_in_flight(f.team), 0, "%u ops are freed and still in flight", fake_team_in_flight(f.team));
    fake_team_close(f.team);
}

/* Commands that nobody took stay in the ring. A command that waits for a peer which never connects delays the close by
 * its limit and no longer. */
Test(proxy, a_close_takes_no_new_commands_and_ends_without_a_peer, .timeout = 120)
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

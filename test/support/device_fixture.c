/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>

#include "test/support/device_fixture.h"

struct fixture f;
const struct fake_team_options busy_team = {.size = WORLD, .window = 16, .seed = 7, .connect_asks = 20};

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

void open_fixture(const struct fake_team_options *team, struct prs_proxy_options options)
{
    f.team = fake_team_open(team);
    options.team = f.team;
    options.numa_node = -1;
    cr_assert_eq(prs_proxy_open(&options, &f.proxy), 0);
    add_windows();
    cr_assert_eq(prs_proxy_start(f.proxy, &f.device), 0);
}

void close_fixture(void)
{
    prs_proxy_close(f.proxy);
    fake_team_close(f.team);
}

struct prs_device_put put_of(uint32_t rank, uint32_t block, uint64_t round)
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

struct prs_device_signal signal_of(uint32_t rank, uint32_t block, uint64_t round)
{
    return (struct prs_device_signal){.offset = ((round % BANKS) * BLOCKS + block) * 8,
                                      .value = 1,
                                      .peer = rank,
                                      .window = SIGNALS,
                                      .group = rank,
                                      .add = 1};
}

void step_until_idle(void)
{
    for (int i = 0; i < 100000; i++) {
        int r = prs_proxy_step(f.proxy);

        cr_assert_geq(r, 0, "%s", prs_proxy_error(f.proxy));
    }
}

void put_and_signal(uint32_t rank, uint32_t group, bool put, bool signal)
{
    struct prs_device_put a = put_of(rank, 0, 0);
    struct prs_device_signal b = signal_of(rank, 0, 0);

    a.group = b.group = group;
    if (put)
        cr_assert_eq(prs_put(&f.device, &a, NULL), 0);
    if (signal)
        cr_assert_eq(prs_signal(&f.device, &b, NULL), 0);
}

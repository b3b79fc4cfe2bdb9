/* SPDX-License-Identifier: Apache-2.0 */
/* The proxy of rank 0 and its command ring, over a team without a NIC (fake_team.h). Each rank has two windows of plain
 * memory. Each Criterion test runs in a process of its own, and so has its own fixture. */
#ifndef TEST_SUPPORT_DEVICE_FIXTURE_H
#define TEST_SUPPORT_DEVICE_FIXTURE_H

#include <perseus/proxy.h>
#include "test/support/fake_team.h"

enum {
    WORLD = 3,   /* rank 0 sends; 1 and 2 receive */
    BLOCKS = 4,  /* threads that play blocks; each puts to each receiver in each round */
    WORDS = 8,   /* of 8 bytes in each put */
    DATA = 0,    /* window of data */
    SIGNALS = 1, /* window of signal words */
    BANKS = 2,   /* receive banks by round parity */
    BANK_WORDS = BLOCKS * WORDS,
    HEALTHY_MS = 60000, /* for a wait that succeeds: a machine may keep a thread off its cores for seconds */
};

struct fixture {
    struct prs_team *team;
    struct prs_proxy *proxy;
    struct prs_device device;
    uint64_t data[WORLD][BANKS * BANK_WORDS];
    uint64_t signals[WORLD][BANKS * BLOCKS];
    struct prs_arrival_counter counters[WORLD];
    struct prs_device_signal deposits[WORLD][BLOCKS];
    uint64_t credits[WORLD]; /* rounds that each receiver has read; rank 0 waits for them */
    uint64_t map_peers;      /* mask of the ranks whose windows are mapped */
};

extern struct fixture f;
extern const struct fake_team_options busy_team; /* completes late and in any order */

/* options.team and numa_node are filled in. */
void open_fixture(const struct fake_team_options *team, struct prs_proxy_options options);
void close_fixture(void);

/* Make a block's put and signal to a rank in a round. Banks alternate, each block has its own part of a bank, and the
 * group is the number of the rank. */
struct prs_device_put put_of(uint32_t rank, uint32_t block, uint64_t round);
struct prs_device_signal signal_of(uint32_t rank, uint32_t block, uint64_t round);
/* Start the put, the signal or both of block 0 and round 0, in a group. */
void put_and_signal(uint32_t rank, uint32_t group, bool put, bool signal);

/* Step a proxy without a thread many times. */
void step_until_idle(void);

#endif

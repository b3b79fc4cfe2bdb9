/* SPDX-License-Identifier: Apache-2.0 */
/* The device protocol with threads as blocks: the code that a kernel runs, a real proxy, and a fake NIC that completes
 * late and out of order. Data is plain memory, so ThreadSanitizer checks that ring, proxy and signal order the write of
 * each byte before its receiver reads it. */
#include <criterion/criterion.h>
#include <pthread.h>
#include <sched.h>
#include <string.h>

#include "test/support/device_fixture.h"

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { ROUNDS = 300 };
#else
enum { ROUNDS = 10000 };
#endif

static uint64_t word_of(uint32_t rank, uint32_t block, uint64_t round, uint32_t word)
{
    return (uint64_t)rank << 56 | (uint64_t)block << 48 | round << 8 | word;
}

struct block {
    pthread_t thread;
    uint32_t id;
    bool grouped;
    int result;
    uint64_t wrong;
};

/* Each block and bank has one source area for all receivers, so the words do not depend on the rank. */
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

            /* Wait until the receiver has read this bank. */
            if (round >= BANKS)
                block->result = prs_wait_signal(&f.device, &f.credits[rank], PRS_COMPARE_GE, round - BANKS + 1);
            if (block->result < 0)
                break;
            if (block->grouped) {
                block->result = prs_put(&f.device, &put, &tickets[round % BANKS][rank]);
                if (block->result >= 0)
                    block->result = prs_arrival_counter_arrive(&f.device, &f.counters[rank], &signal);
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

/* Run all rounds. Return how many words were wrong. */
static uint64_t run_rounds(bool grouped)
{
    struct block senders[BLOCKS] = {0}, receivers[WORLD] = {0};
    uint64_t wrong = 0;

    for (uint32_t rank = 1; rank < WORLD; rank++)
        prs_arrival_counter_init(&f.counters[rank], rank, BLOCKS, f.deposits[rank]);
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
        cr_assert_eq(f.counters[rank].flushed, (uint64_t)ROUNDS);
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

/* In an earlier version, an arrival at a counter that expects none divided by zero. */
Test(device_replay, an_arrival_at_a_group_of_none_is_refused)
{
    struct prs_device_signal signal = signal_of(1, 0, 0);

    open_fixture(&busy_team, (struct prs_proxy_options){.timeout_ms = HEALTHY_MS});
    prs_arrival_counter_init(&f.counters[1], 5, 0, f.deposits[1]);
    cr_assert_eq(prs_arrival_counter_arrive(&f.device, &f.counters[1], &signal), -PRS_DEVICE_MISUSE);
    while (prs_proxy_check(f.proxy) == 0)
        sched_yield();
    cr_assert(strstr(prs_proxy_error(f.proxy), "at group 0x5"), "%s", prs_proxy_error(f.proxy));
    close_fixture();
}

/* A hundred times: step until the signal of a put is seen. Return how often its data had not arrived by then. */
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

/* The paper has 112 transfers to 4 peers, this test 56 to 2. Each put and signal pair costs a fence; all puts, then all
 * signals, cost one fence for each destination. */
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

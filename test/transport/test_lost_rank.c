/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks of a team with a proxy each, in one process. The proxy of rank 1 fails since rank 2 refuses what it writes. The
 * connections of the others work, and they have nothing in flight: they learn of it from those who know. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <perseus/proxy.h>

#include "test/transport/ends.h"
#include "transport/util/clock.h"

enum {
    RANKS = 4,
    CONTEXT = 5,
    WORDS = 16, /* at the start of a rank's window, one for each sender; then data */
    PUTS = 8,
    PUT_BYTES = 1 << 20,
    WINDOW_BYTES = WORDS * 8 + PUTS * PUT_BYTES,
    LIMIT_MS =
        10 * HEALTHY_MS, /* of a wait. So long, that `soon` is more than a slow machine needs, and yet far less */
    SOON_MS = LIMIT_MS / 4,
};

struct rank {
    struct prs_team *team;
    struct prs_proxy *proxy;
    struct prs_device device;
    struct prs_region *region;
    uint64_t *window;
};

static struct rank ranks[RANKS];

static void open_patient(void)
{
    open_with(LIMIT_MS);
}

static void open_rank(uint32_t r, const struct prs_handle *handles, struct prs_listener *listener)
{
    struct prs_team_options options = {.fabric = fabric,
                                       .rails = &one_rail,
                                       .listener = listener,
                                       .handles = handles,
                                       .rank = r,
                                       .world = RANKS,
                                       .traffic_class = -1};
    struct prs_mem memory = {.len_bytes = WINDOW_BYTES, .kind = PRS_MEM_HOST, .flags = PRS_MEM_STRICT};

    cr_assert_eq(prs_team_open(&options, &ranks[r].team), 0, "%s", prs_error_text());
    ranks[r].window = calloc(1, WINDOW_BYTES);
    memory.addr = ranks[r].window;
    cr_assert_eq(prs_region_register(fabric, &one_rail, &memory, &ranks[r].region), 0, "%s", prs_error_text());
}

static void connect_ranks(uint32_t caller, uint32_t called)
{
    uint64_t give_up = prs_clock_ms() + HEALTHY_MS;
    struct prs_peer *peer;
    int r;

    while ((r = prs_team_peer(ranks[caller].team, CONTEXT, called, &peer)) == PRS_AGAIN ||
           !prs_team_rank_info(ranks[called].team, CONTEXT, caller)) {
        cr_assert_geq(r, 0, "%s", prs_error_text());
        cr_assert_geq(prs_team_progress(ranks[caller].team, CONTEXT), 0, "%s", prs_error_text());
        cr_assert_geq(prs_team_progress(ranks[called].team, CONTEXT), 0, "%s", prs_error_text());
        cr_assert_lt(prs_clock_ms(), give_up);
    }
}

/* Rank 1 has a wrong key of rank 2's memory. */
static void open_proxy(uint32_t r)
{
    struct prs_proxy_options options = {
        .team = ranks[r].team, .context_id = CONTEXT, .timeout_ms = LIMIT_MS, .numa_node = -1};
    struct prs_window_remote remotes[RANKS] = {0};
    struct prs_window_options window = {.base = ranks[r].window,
                                        .bytes = WINDOW_BYTES,
                                        .region = ranks[r].region,
                                        .remotes = remotes,
                                        .flags = PRS_WINDOW_SIGNALS};

    for (uint32_t other = 0; other < RANKS; other++) {
        remotes[other].base = (uintptr_t)ranks[other].window;
        prs_region_keys(ranks[other].region, &remotes[other].keys);
        if (r == 1 && other == 2)
            remotes[other].keys.rkey[0] ^= 0x5a5a00;
    }
    cr_assert_eq(prs_proxy_open(&options, &ranks[r].proxy), 0, "%s", prs_error_text());
    cr_assert_eq(prs_proxy_window(ranks[r].proxy, &window), 0, "%s", prs_error_text());
    cr_assert_eq(prs_proxy_start(ranks[r].proxy, &ranks[r].device), 0, "%s", prs_error_text());
}

struct pair_of_ranks {
    uint32_t caller, called;
};

static void open_ranks(const struct pair_of_ranks *pairs, size_t count)
{
    struct prs_handle handles[RANKS];
    struct prs_listener *listener[RANKS];

    for (uint32_t r = 0; r < RANKS; r++)
        listener[r] = open_listener(&handles[r]);
    for (uint32_t r = 0; r < RANKS; r++)
        open_rank(r, handles, listener[r]);
    for (size_t i = 0; i < count; i++)
        connect_ranks(pairs[i].caller, pairs[i].called);
    for (uint32_t r = 0; r < RANKS; r++)
        open_proxy(r);
}

static void close_ranks(void)
{
    for (uint32_t r = 0; r < RANKS; r++)
        prs_proxy_close(ranks[r].proxy);
    for (uint32_t r = 0; r < RANKS; r++) {
        prs_team_close(ranks[r].team);
        prs_region_release(ranks[r].region);
        free(ranks[r].window);
    }
}

static void send_word(uint32_t from, uint32_t to, uint64_t value)
{
    struct prs_device_signal signal = {.offset = 8 * from, .value = value, .peer = to};

    cr_assert_eq(prs_signal(&ranks[from].device, &signal, NULL), 0, "%s", prs_proxy_error(ranks[from].proxy));
}

/* Rank 2's NIC refuses it. */
static void lose_rank_2(void)
{
    struct prs_device_put put = {.src_offset = 8, .dst_offset = 8, .bytes = 8, .peer = 2};

    cr_assert_eq(prs_put(&ranks[1].device, &put, NULL), 0, "%s", prs_proxy_error(ranks[1].proxy));
}

static int await_word(uint32_t at, uint32_t from, uint64_t value)
{
    return prs_wait_signal(&ranks[at].device, &ranks[at].window[from], PRS_COMPARE_GE, value);
}

/* Rank `at` waits for a word that rank `from` will not write. */
static void must_end(uint32_t at, uint32_t from, uint64_t began_ms, const char *names, const char *also)
{
    cr_assert_eq(await_word(at, from, 99), -PRS_DEVICE_ABORTED, "rank %u: %s", at, prs_proxy_error(ranks[at].proxy));
    cr_assert_lt(prs_clock_ms() - began_ms, SOON_MS, "rank %u", at);
    cr_assert(strstr(prs_proxy_error(ranks[at].proxy), names) && strstr(prs_proxy_error(ranks[at].proxy), also), "%s",
              prs_proxy_error(ranks[at].proxy));
}

Test(lost_rank, ranks_that_wait_for_one_that_has_lost_another_are_told, .init = open_patient, .fini = close_default,
     .timeout = 900)
{
    static const struct pair_of_ranks pairs[] = {{0, 1}, {0, 2}, {1, 2}, {0, 3}, {1, 3}, {2, 3}};
    uint64_t began_ms;
    uint32_t failed;
    char text[32];

    open_ranks(pairs, sizeof(pairs) / sizeof(*pairs));
    send_word(1, 0, 1);
    cr_assert_eq(await_word(0, 1, 1), 0, "%s", prs_proxy_error(ranks[0].proxy));
    began_ms = prs_clock_ms();
    lose_rank_2();
    must_end(0, 1, began_ms, "rank 0 to rank ", " has lost rank ");
    must_end(2, 1, began_ms, "rank 2 to rank ", ""); /* its own end may notice it, too */
    must_end(3, 1, began_ms, "rank 3 to rank ", " has lost rank ");
    /* Rank 1 or 2 tells it, or on a busy machine rank 3, which has heard of it. */
    cr_assert_eq(prs_team_failed_rank(ranks[0].team, &failed), 0);
    snprintf(text, sizeof(text), "rank 0 to rank %u,", failed);
    cr_assert(strstr(prs_proxy_error(ranks[0].proxy), text), "%s", prs_proxy_error(ranks[0].proxy));
    cr_assert(strstr(prs_proxy_error(ranks[0].proxy), " has lost rank 1: ") ||
                  strstr(prs_proxy_error(ranks[0].proxy), " has lost rank 2: "),
              "%s", prs_proxy_error(ranks[0].proxy));
    close_ranks();
}

/* Rank 3 is connected to rank 0 only, and rank 0 to rank 1. */
Test(lost_rank, the_word_is_passed_on, .init = open_patient, .fini = close_default, .timeout = 900)
{
    static const struct pair_of_ranks pairs[] = {{0, 1}, {1, 2}, {0, 3}};
    uint64_t began_ms;

    open_ranks(pairs, sizeof(pairs) / sizeof(*pairs));
    began_ms = prs_clock_ms();
    lose_rank_2();
    must_end(3, 0, began_ms, "rank 3 to rank 0, context 5: the peer at ", " has lost rank 1");
    cr_assert(strstr(prs_proxy_error(ranks[3].proxy), " has lost rank 2"), "%s", prs_proxy_error(ranks[3].proxy));
    close_ranks();
}

/* What was posted to rank 0 before the loss, and has not arrived yet. */
Test(lost_rank, what_was_sent_before_arrives, .init = open_patient, .fini = close_default, .timeout = 900)
{
    static const struct pair_of_ranks pairs[] = {{0, 1}, {1, 2}};
    const uint8_t *got;
    uint8_t *sent;
    uint64_t began_ms;

    open_ranks(pairs, sizeof(pairs) / sizeof(*pairs));
    sent = (uint8_t *)&ranks[1].window[WORDS];
    got = (uint8_t *)&ranks[0].window[WORDS];
    for (size_t i = 0; i < (size_t)PUTS * PUT_BYTES; i++)
        sent[i] = (uint8_t)(i * 7 + i / PUT_BYTES + 1);
    began_ms = prs_clock_ms();
    for (uint64_t i = 0; i < PUTS; i++) {
        uint64_t at = WORDS * 8 + i * PUT_BYTES;
        struct prs_device_put put = {.src_offset = at, .dst_offset = at, .bytes = PUT_BYTES, .peer = 0};

        cr_assert_eq(prs_put(&ranks[1].device, &put, NULL), 0);
    }
    send_word(1, 0, 1);
    lose_rank_2();
    must_end(0, 1, began_ms, "rank 0 to rank 1", " has lost rank 2");
    cr_assert_eq(ranks[0].window[1], 1, "the word was lost");
    cr_assert_eq(memcmp(got, sent, (size_t)PUTS * PUT_BYTES), 0, "data was lost");
    close_ranks();
}

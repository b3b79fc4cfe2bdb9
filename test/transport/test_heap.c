/* SPDX-License-Identifier: Apache-2.0 */
/* Symmetric memory, team and proxy of three processes on two nodes. Ranks 0 and 1 are on one node and map each other's
 * memory; rank 2 is reached through the NIC. */
#include <criterion/criterion.h>
#include <dirent.h>
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <perseus/heap.h>

#include "tools/common/ranks.h"

enum { RANKS = 3, NODES = 2, TIMEOUT_S = 200, ROUNDS = 200, WORDS = 512, BANKS = 2, HEALTHY_MS = 60000 };

#define CHECK(condition, ...)                                                                                          \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition);                                            \
            fprintf(stderr, __VA_ARGS__);                                                                              \
            fprintf(stderr, " (%s)\n", prs_error_text());                                                              \
            return 1;                                                                                                  \
        }                                                                                                              \
    } while (0)

struct world {
    struct ranks *ranks;
    struct prs_bootstrap bootstrap;
    struct prs_fabric *fabric;
    struct prs_rail_set rails;
    struct prs_team *team;
    struct prs_heap *heap;
    struct prs_proxy *proxy;
    struct prs_device device;
    uint32_t rank;
};

static int world_open(struct world *w)
{
    struct prs_team_options team = {.fabric = w->fabric, .rails = &w->rails, .traffic_class = -1};
    struct prs_heap_options heap = {
        .fabric = w->fabric, .rails = &w->rails, .data_bytes = 1 << 20, .signal_bytes = 4096, .map_local = true};
    struct prs_proxy_options proxy = {.ring_slots = 64, .numa_node = -1, .timeout_ms = HEALTHY_MS};

    CHECK(prs_bootstrap_team(&w->bootstrap, &team, &w->team) == 0, "team");
    CHECK(prs_heap_open(&w->bootstrap, &heap, &w->heap) == 0, "heap");
    proxy.team = w->team;
    CHECK(prs_proxy_open(&proxy, &w->proxy) == 0, "proxy");
    CHECK(prs_heap_windows(w->heap, w->proxy) == 0, "windows");
    CHECK(prs_proxy_start(w->proxy, &w->device) == 0, "start");
    return 0;
}

static int world_close(struct world *w)
{
    CHECK(ranks_barrier(w->ranks) == 0, "meeting before the end");
    prs_proxy_close(w->proxy);
    prs_team_close(w->team);
    prs_heap_close(w->heap);
    prs_fabric_close(w->fabric);
    return 0;
}

struct test {
    int (*body)(struct world *w);
};

static int run_rank(struct ranks *ranks, void *user)
{
    const struct test *test = user;
    struct world w = {.ranks = ranks, .rank = ranks_rank(ranks), .rails = {.count = 1, .rail = {0}}};

    w.bootstrap = (struct prs_bootstrap){ranks_allgather, ranks, w.rank, RANKS};
    if (prs_fabric_open(NULL, &w.fabric) < 0 || prs_fabric_rails(w.fabric) == 0)
        return 77;
    return test->body(&w);
}

/* Runs in each rank, with its first rail open. */
static int run(int (*body)(struct world *w))
{
    struct test test = {body};
    int r;

#if defined(__SANITIZE_THREAD__)
    cr_skip_test(
        "ThreadSanitizer cannot follow a proxy's thread in a forked rank; device_replay runs it in one process");
#endif
    r = ranks_run(RANKS, NODES, TIMEOUT_S, run_rank, &test);
    if (r == 77)
        cr_skip_test("no RDMA device here");
    return r;
}

static uint64_t mark(uint32_t from, uint32_t to, uint64_t round, uint32_t word)
{
    return (uint64_t)(from + 1) << 56 | (uint64_t)to << 48 | round << 16 | word;
}

static int send_round(struct world *w, uint64_t data, uint64_t round)
{
    uint64_t *source = (uint64_t *)(void *)((char *)prs_heap_base(w->heap, PRS_HEAP_DATA) + data);
    uint64_t bank = (round % BANKS) * RANKS * WORDS;

    /* Write a bank again only after its reader has read it, which the reader reports in a credit word. */
    for (uint32_t to = 0; to < RANKS && round >= BANKS; to++) {
        const uint64_t *credit = (uint64_t *)prs_heap_base(w->heap, PRS_HEAP_SIGNALS) + 16 + to;

        if (to != w->rank)
            CHECK(prs_wait_signal(&w->device, credit, PRS_COMPARE_GE, round - BANKS + 1) == 0, "credit of %u", to);
    }
    for (uint32_t to = 0; to < RANKS; to++) {
        uint64_t from_at = (bank + to * WORDS) * 8, to_at = (BANKS * RANKS * WORDS + bank + w->rank * WORDS) * 8;
        struct prs_device_put put = {data + from_at, data + to_at, WORDS * 8, to, 0, 0, 1};
        struct prs_device_signal signal = {w->rank * 8ull, 1, to, 1, 1, 1, 0};

        if (to == w->rank)
            continue;
        for (uint32_t i = 0; i < WORDS; i++)
            source[bank + to * WORDS + i] = mark(w->rank, to, round, i);
        CHECK(prs_put_signal(&w->device, &put, &signal, NULL) == 0, "put to %u", to);
    }
    return prs_quiet(&w->device);
}

static int receive_round(struct world *w, uint64_t data, uint64_t round)
{
    const uint64_t *arrived = (uint64_t *)(void *)((char *)prs_heap_base(w->heap, PRS_HEAP_DATA) + data);
    const uint64_t *signals = prs_heap_base(w->heap, PRS_HEAP_SIGNALS);

    for (uint32_t from = 0; from < RANKS; from++) {
        uint64_t at = (BANKS + round % BANKS) * RANKS * WORDS + from * WORDS;
        struct prs_device_signal credit = {(16 + w->rank) * 8ull, round + 1, from, 1, 2, 0, 0};

        if (from == w->rank)
            continue;
        CHECK(prs_wait_signal(&w->device, &signals[from], PRS_COMPARE_GE, round + 1) == 0, "signal of %u", from);
        for (uint32_t i = 0; i < WORDS; i++)
            CHECK(arrived[at + i] == mark(from, w->rank, round, i), "rank %u, round %lu: word %u of rank %u", w->rank,
                  (unsigned long)round, i, from);
        CHECK(prs_signal(&w->device, &credit, NULL) == 0, "credit to %u", from);
    }
    return 0;
}

static int exchange(struct world *w)
{
    uint64_t first, data;

    if (world_open(w))
        return 1;
    CHECK(prs_heap_alloc(w->heap, PRS_HEAP_DATA, 100, 1, &first) == 0, "alloc");
    CHECK(prs_heap_alloc(w->heap, PRS_HEAP_DATA, 2ull * BANKS * RANKS * WORDS * 8, 4096, &data) == 0, "alloc");
    for (uint64_t align = 0; align <= 3; align += 3)
        CHECK(prs_heap_alloc(w->heap, PRS_HEAP_DATA, 8, align, &first) == -EINVAL, "an alignment of %lu",
              (unsigned long)align);
    CHECK(first == 0 && data == 4096, "offsets %lu, %lu", (unsigned long)first, (unsigned long)data);
    for (uint32_t rank = 0; rank < RANKS; rank++) {
        bool near = rank != w->rank && rank < 2 && w->rank < 2;

        CHECK((prs_heap_remotes(w->heap, PRS_HEAP_DATA)[rank].mapped != 0) == near, "rank %u maps rank %u: want %d",
              w->rank, rank, near);
    }
    for (uint64_t round = 0; round < ROUNDS; round++) {
        CHECK(send_round(w, data, round) == 0, "%s", prs_proxy_error(w->proxy));
        if (receive_round(w, data, round))
            return 1;
    }
    CHECK(prs_quiet(&w->device) == 0, "%s", prs_proxy_error(w->proxy));
    return world_close(w);
}

Test(heap, ranks_of_a_node_write_memory_and_others_the_nic, .timeout = 400)
{
    cr_assert_eq(run(exchange), 0);
}

static int count_files(void)
{
    struct dirent *entry;
    DIR *dir = opendir("/proc/self/fd");
    int count = -1; /* leave out the folder's own descriptor */

    while (dir && (entry = readdir(dir)))
        count += entry->d_name[0] != '.';
    if (dir)
        closedir(dir);
    return count;
}

/* Otherwise programs that open many heaps would reach the limit of open files. */
static int count_heap_files(struct world *w)
{
    struct prs_heap_options options = {
        .fabric = w->fabric, .rails = &w->rails, .data_bytes = 1 << 20, .signal_bytes = 4096, .map_local = true};
    int before = count_files();

    CHECK(prs_heap_open(&w->bootstrap, &options, &w->heap) == 0, "heap");
    CHECK(count_files() == before, "%d files are open, %d before", count_files(), before);
    prs_heap_close(w->heap);
    CHECK(count_files() == before, "%d files are open, %d before", count_files(), before);
    return 0;
}

Test(heap, keeps_no_file_open, .timeout = 400)
{
    cr_assert_eq(run(count_heap_files), 0);
}

static int unequal(struct world *w)
{
    struct prs_heap_options options = {
        .fabric = w->fabric, .rails = &w->rails, .data_bytes = 1 << 20, .signal_bytes = 4096, .map_local = true};

    if (w->rank == 2)
        options.data_bytes *= 2;
    CHECK(prs_heap_open(&w->bootstrap, &options, &w->heap) == -EINVAL, "opened though rank 2 has another size");
    CHECK(strstr(prs_error_text(), w->rank == 2 ? "on rank 0" : "on rank 2"), "who differs");
    options.data_bytes = w->rank == 1 ? 1ull << 60 : 1 << 20;
    CHECK(prs_heap_open(&w->bootstrap, &options, &w->heap) < 0, "opened though rank 1 has no memory");
    CHECK(w->rank == 1 || strstr(prs_error_text(), "rank 1 failed"), "who failed");
    options.data_bytes = 1 << 20;
    CHECK(prs_heap_open(&w->bootstrap, &options, &w->heap) == 0, "the third time all is well");
    prs_heap_close(w->heap);
    return 0;
}

Test(heap, when_one_rank_fails_all_fail_and_name_it, .timeout = 400)
{
    cr_assert_eq(run(unequal), 0);
}

static int wrong_card(struct world *w)
{
    struct prs_team_options options = {
        .fabric = w->fabric, .rails = &w->rails, .traffic_class = -1, .rank_info = "info"};

    options.rank_info_bytes = w->rank == 1 ? PRS_TEAM_RANK_INFO_BYTES + 1 : 4;
    CHECK(prs_bootstrap_team(&w->bootstrap, &options, &w->team) == -EINVAL, "opened though rank 1 could not");
    CHECK(w->rank == 1 || strstr(prs_error_text(), "rank 1 failed"), "who failed");
    options.rank_info_bytes = 4;
    CHECK(prs_bootstrap_team(&w->bootstrap, &options, &w->team) == 0, "the second time all is well");
    CHECK(ranks_barrier(w->ranks) == 0, "meeting before the end");
    prs_team_close(w->team);
    prs_fabric_close(w->fabric);
    return 0;
}

Test(heap, when_one_rank_cannot_open_its_team_none_has_one, .timeout = 400)
{
    cr_assert_eq(run(wrong_card), 0);
}

/* The handles are invalid, so a connection fails at once. */
static int two_failures(struct world *w)
{
    struct prs_handle handles[RANKS] = {0};
    struct prs_team_options options = {
        .fabric = w->fabric, .rails = &w->rails, .handles = handles, .world = RANKS, .traffic_class = -1};
    struct prs_peer *peer;

    CHECK(prs_listen(w->fabric, &w->rails, &handles[0], &options.listener) == 0, "listen");
    CHECK(prs_team_open(&options, &w->team) == 0, "team");
    CHECK(prs_team_peer(w->team, 3, 1, &peer) < 0 && strstr(prs_error_text(), "to rank 1, context 3"), "the first");
    CHECK(prs_team_peer(w->team, 4, 2, &peer) < 0 && strstr(prs_error_text(), "to rank 2, context 4"), "the second");
    CHECK(strstr(prs_team_error(w->team), "to rank 1, context 3"), "the team keeps the first: %s",
          prs_team_error(w->team));
    prs_team_close(w->team);
    prs_fabric_close(w->fabric);
    return 0;
}

Test(heap, each_failure_of_a_team_names_its_own_rank_and_context, .timeout = 400)
{
    cr_assert_eq(run(two_failures), 0);
}

static int die(struct world *w)
{
    struct prs_device_put put = {0, 4096, 4096, 2, 0, 0, 1};
    uint64_t ticket = 0;
    int r = world_open(w);

    if (r)
        return r;
    if (w->rank == 2) {
        while (!__atomic_load_n(&ranks_words(w->ranks)[0], __ATOMIC_ACQUIRE))
            usleep(1000);
        _exit(0); /* without a farewell to its peers */
    }
    if (w->rank == 1) {
        while (!__atomic_load_n(&ranks_words(w->ranks)[1], __ATOMIC_ACQUIRE))
            usleep(1000);
        _exit(0);
    }
    CHECK(prs_put(&w->device, &put, &ticket) == 0 && prs_flush(&w->device, ticket) == 0, "while all live");
    __atomic_store_n(&ranks_words(w->ranks)[0], 1, __ATOMIC_RELEASE);
    for (int i = 0; i < 30000 && r == 0; i++) {
        r = prs_put(&w->device, &put, &ticket);
        if (!r)
            r = prs_flush(&w->device, ticket);
        usleep(1000);
    }
    CHECK(r == -PRS_DEVICE_ABORTED, "the device was told %d", r);
    CHECK(prs_proxy_check(w->proxy) < 0 && strstr(prs_proxy_error(w->proxy), "rank 0 to rank 2"),
          "the error names whom: %s", prs_proxy_error(w->proxy));
    __atomic_store_n(&ranks_words(w->ranks)[1], 1, __ATOMIC_RELEASE);
    _exit(0);
}

Test(heap, a_rank_that_dies_ends_the_waits_of_a_kernel_by_name, .timeout = 400)
{
    cr_assert_eq(run(die), 0);
}

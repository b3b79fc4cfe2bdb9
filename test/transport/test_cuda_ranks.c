/* SPDX-License-Identifier: Apache-2.0 */
/* More ranks than GPUs: eight processes share one or two, and rank 0 puts to all others from device memory to device
 * memory. The driver is tools/fake_cuda, which copies later, on its own threads. The commands are those of
 * perseus-perf putsignal --gpu: all puts of an iteration, then the signals of each group. Every other iteration has
 * only puts, and its groups stay open. */
#include <criterion/criterion.h>
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <perseus/heap.h>

#include "tools/common/ranks.h"

enum { RANKS = 8, PEERS = RANKS - 1, BYTES = 4096, TRANSFERS = 56, ITERATIONS = 6, HALF = 1 << 20, TIMEOUT_S = 200 };

struct setting {
    const char *policy;
    uint32_t gpus;
};

struct world {
    uint32_t rank;
    struct prs_fabric *fabric;
    struct prs_team *team;
    struct prs_heap *heap;
    struct prs_proxy *proxy;
    struct prs_device device;
    uint64_t data, signals; /* device addresses */
    uint64_t position;      /* of the next command: stands in for the claim word in device memory; one producer only */
    uint64_t words[BYTES / 8];
    int (*copy)(uint64_t, uint64_t, size_t);
};

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "rank %u, %s:%d: %s (%s)\n", w->rank, __FILE__, __LINE__, #condition, prs_error_text());   \
            return 1;                                                                                                  \
        }                                                                                                              \
    } while (0)

static int start_cuda(struct world *w, int device)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), *context = NULL;
    int (*init)(unsigned), (*retain)(void **, int), (*push)(void *);

    CHECK(library);
    CHECK(dlsym(library, "fakeCudaCounts")); /* not a real GPU's driver */
    *(void **)&init = dlsym(library, "cuInit");
    *(void **)&retain = dlsym(library, "cuDevicePrimaryCtxRetain");
    *(void **)&push = dlsym(library, "cuCtxPushCurrent_v2");
    *(void **)&w->copy = dlsym(library, "cuMemcpy");
    CHECK(init && retain && push && w->copy);
    CHECK(init(0) == 0 && retain(&context, device) == 0 && push(context) == 0);
    return 0;
}

static int world_open(struct world *w, struct ranks *ranks, const struct setting *setting)
{
    struct prs_bootstrap bootstrap = {ranks_allgather, ranks, w->rank, RANKS};
    struct prs_rail_set rails = {.count = 1};
    struct prs_team_options team = {.rails = &rails, .traffic_class = -1, .policy = setting->policy};
    struct prs_heap_options heap = {.rails = &rails, .data_bytes = 2 * HALF, .signal_bytes = 4096, .cuda = true};
    struct prs_proxy_options proxy = {.ring_slots = 1024, .cuda = true, .numa_node = -1};

    CHECK(prs_fabric_open(NULL, &w->fabric) == 0 && prs_fabric_rails(w->fabric) > 0);
    if (start_cuda(w, (int)(w->rank % setting->gpus)))
        return 1;
    team.fabric = heap.fabric = w->fabric;
    CHECK(prs_bootstrap_team(&bootstrap, &team, &w->team) == 0);
    CHECK(prs_heap_open(&bootstrap, &heap, &w->heap) == 0);
    CHECK(prs_team_connect(w->team, 0) == 0);
    proxy.team = w->team;
    CHECK(prs_proxy_open(&proxy, &w->proxy) == 0);
    CHECK(prs_heap_windows(w->heap, w->proxy) == 0);
    CHECK(prs_proxy_start(w->proxy, &w->device) == 0);
    w->data = (uint64_t)(uintptr_t)prs_heap_base(w->heap, PRS_HEAP_DATA);
    w->signals = (uint64_t)(uintptr_t)prs_heap_base(w->heap, PRS_HEAP_SIGNALS);
    CHECK(ranks_barrier(ranks) == 0);
    return 0;
}

static void world_close(struct world *w)
{
    prs_proxy_close(w->proxy);
    prs_team_close(w->team);
    prs_heap_close(w->heap);
    prs_fabric_close(w->fabric);
}

static uint64_t mark(uint64_t iteration, uint32_t transfer, uint32_t word)
{
    return iteration << 40 | (uint64_t)transfer << 20 | word;
}

static void push(struct world *w, const struct prs_cmd_fields *fields)
{
    prs_ring_write(&w->device, w->position++, fields);
}

static int send_iteration(struct world *w, uint64_t iteration, bool with_signals)
{
    for (uint32_t t = 0; t < TRANSFERS; t++) {
        for (uint32_t i = 0; i < BYTES / 8; i++)
            w->words[i] = mark(iteration, t, i);
        CHECK(w->copy(w->data + t * BYTES, (uintptr_t)w->words, BYTES) == 0);
    }
    for (uint32_t t = 0; t < TRANSFERS; t++) {
        struct prs_device_put put = {t * BYTES, HALF + t * BYTES, BYTES, 1 + t % PEERS, 0, 0, 1 + t % PEERS};
        struct prs_cmd_fields fields = prs_cmd_of_put(&w->device, &put);

        push(w, &fields);
    }
    for (uint32_t t = 0; t < TRANSFERS && with_signals; t++) {
        struct prs_device_signal signal = {t * 8ull, iteration, 1 + t % PEERS, 1, 1 + t % PEERS, 0, 0};
        struct prs_cmd_fields fields = prs_cmd_of_signal(&w->device, &signal);

        push(w, &fields);
    }
    while (prs_load_acquire_sys(&w->device.control->done) < w->position) {
        CHECK(prs_proxy_check(w->proxy) == 0);
        usleep(50);
    }
    return 0;
}

/* Check each transfer when its signal is seen. Return 0 if all data was right. */
static int receive_iteration(struct world *w, uint64_t iteration)
{
    for (uint32_t t = w->rank - 1; t < TRANSFERS; t += PEERS) {
        uint64_t signal = 0;

        while (signal != iteration) {
            CHECK(w->copy((uintptr_t)&signal, w->signals + t * 8ull, 8) == 0);
            CHECK(prs_proxy_check(w->proxy) == 0);
        }
        CHECK(w->copy((uintptr_t)w->words, w->data + HALF + t * BYTES, BYTES) == 0);
        for (uint32_t i = 0; i < BYTES / 8; i++)
            CHECK(w->words[i] == mark(iteration, t, i));
    }
    return 0;
}

static int exchange(struct ranks *ranks, void *user)
{
    static struct world world;
    struct world *w = &world;

    w->rank = ranks_rank(ranks);
    if (world_open(w, ranks, user))
        return 1;
    for (uint64_t iteration = 1; iteration <= ITERATIONS; iteration++) {
        bool with_signals = iteration % 2 == 0;

        if (w->rank == 0 ? send_iteration(w, iteration, with_signals) : with_signals && receive_iteration(w, iteration))
            return 1;
        CHECK(ranks_barrier(ranks) == 0);
    }
    world_close(w);
    return 0;
}

static void run(uint32_t gpus)
{
    static const char *const policies[] = {"counted", "in_order", "nic_fence", "drain"};

#if defined(__SANITIZE_THREAD__)
    cr_skip_test("ThreadSanitizer cannot follow a proxy's thread in a forked rank");
#endif
    for (size_t i = 0; i < sizeof(policies) / sizeof(policies[0]); i++) {
        struct setting setting = {policies[i], gpus};

        cr_assert_eq(ranks_run(RANKS, 1, TIMEOUT_S, exchange, &setting), 0, "policy %s", policies[i]);
    }
}

Test(cuda_ranks, eight_share_two_gpus, .timeout = 800)
{
    run(2);
}

Test(cuda_ranks, eight_share_one_gpu, .timeout = 800)
{
    run(1);
}

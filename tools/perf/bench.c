/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/perf/bench.h"

#include <dlfcn.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "transport/util/clock.h"

#define GPU_LIBRARY "libperseus-perf-gpu.so"

enum {
    HALF_BYTES = 32 << 20, /* transfers beyond it share slots, whose bytes are the same */
    RING_SLOTS = 4096,
    WINDOW_OPS = 1024,
    SIGNAL_BYTES = 64 << 10,
    IDLE_SPINS = 32,
};

int bench_fail(const struct bench *bench, const char *what, int error)
{
    fprintf(stderr, "rank %u: %s: %s (%s)\n", ranks_rank(bench->ranks), what, strerror(-error), prs_error_text());
    return error;
}

/* The library is beside the program in a build folder, and in PERF_LIBEXECDIR, as seen from there, once installed. */
static void *open_gpu_library(void)
{
    static const char *const folders[] = {"", PERF_LIBEXECDIR "/"};
    char program[512] = "./", path[1024];
    ssize_t length = readlink("/proc/self/exe", program, sizeof(program) - 1);

    if (length > 0)
        program[length] = 0;
    for (int i = 0; i < 2 && (i == 0 || access(path, F_OK)); i++) {
        const char *end = folders[i][0] == '/' ? program : strrchr(program, '/') + 1;

        snprintf(path, sizeof(path), "%.*s%s" GPU_LIBRARY, (int)(end - program), program, folders[i]);
    }
    return dlopen(path, RTLD_NOW | RTLD_LOCAL);
}

static int load_gpu(struct bench *bench)
{
    void *library = open_gpu_library();
    gpu_library_fn *get;

    get = library ? (gpu_library_fn *)(uintptr_t)dlsym(library, "perf_gpu_library") : NULL;
    if (!get) {
        fprintf(stderr, "perseus-perf --gpu: %s\n", dlerror());
        return 1;
    }
    bench->gpu = get();
    return bench->gpu->open(bench->bootstrap.rank);
}

int bench_init(struct bench *bench, struct ranks *ranks, uint32_t size, const struct options *options)
{
    int r, rails;

    memset(bench, 0, sizeof(*bench));
    bench->options = options;
    bench->ranks = ranks;
    bench->bootstrap = (struct prs_bootstrap){ranks_allgather, ranks, ranks_rank(ranks), size};
    r = prs_fabric_open(NULL, &bench->fabric);
    rails = r == 0 ? prs_fabric_rails(bench->fabric) : 0;
    if (rails <= 0) {
        if (bench->bootstrap.rank == 0)
            fprintf(stderr, "perseus-perf: no usable rail%s%s: run it under softnic-run, or see PERSEUS_LOG=info\n",
                    r < 0 ? ": " : "", r < 0 ? prs_error_text() : "");
        return 77;
    }
    bench->rails.count = rails < PRS_MAX_RAILS ? rails : PRS_MAX_RAILS;
    for (int i = 0; i < bench->rails.count; i++)
        bench->rails.rail[i] = i;
    return options->gpu ? load_gpu(bench) : 0;
}

void bench_fini(struct bench *bench)
{
    prs_fabric_close(bench->fabric);
}

int bench_open(struct bench *bench, const char *policy)
{
    struct prs_team_options team = {
        .fabric = bench->fabric,
        .rails = &bench->rails,
        .max_ops = WINDOW_OPS,
        .queues_per_rail = (int)bench->options->queues_per_rail,
        .traffic_class = -1,
        .policy = policy,
    };
    bool cuda = bench->gpu && !bench->gpu->host;
    struct prs_heap_options heap = {
        .fabric = bench->fabric,
        .rails = &bench->rails,
        .data_bytes = 2ull * HALF_BYTES,
        .signal_bytes = SIGNAL_BYTES,
        .cuda = cuda,
    };
    struct prs_proxy_options proxy = {
        .ring_slots = RING_SLOTS,
        .stepped = !bench->gpu,
        .cuda = cuda,
        .numa_node = -1,
    };
    struct prs_rail_info rail;
    int r;

    bench->half = HALF_BYTES;
    r = prs_bootstrap_team(&bench->bootstrap, &team, &bench->team);
    if (r < 0)
        return bench_fail(bench, "opening the team", r);
    r = prs_heap_open(&bench->bootstrap, &heap, &bench->heap);
    if (r < 0)
        return bench_fail(bench, "opening the heap", r);
    r = prs_team_connect(bench->team, 0);
    if (r < 0)
        return bench_fail(bench, "connecting", r);
    proxy.team = bench->team;
    if (prs_rail_query(bench->fabric, bench->rails.rail[0], &rail) == 0)
        proxy.numa_node = rail.numa_node;
    r = prs_proxy_open(&proxy, &bench->proxy);
    if (!r)
        r = prs_heap_windows(bench->heap, bench->proxy);
    if (!r)
        r = prs_proxy_start(bench->proxy, &bench->device);
    if (r < 0)
        return bench_fail(bench, "opening the proxy", r);
    return ranks_barrier(bench->ranks);
}

void bench_close(struct bench *bench)
{
    prs_proxy_close(bench->proxy);
    prs_team_close(bench->team);
    prs_heap_close(bench->heap);
    bench->proxy = NULL;
    bench->team = NULL;
    bench->heap = NULL;
}

int bench_idle(void *user)
{
    struct bench *bench = user;

    return prs_proxy_step(bench->proxy);
}

int bench_quiet(struct bench *bench)
{
    double give_up = bench_now_us() + bench->options->timeout_s * 1e6;
    uint64_t claim = prs_load_relaxed(&bench->device.local->claim);
    unsigned idle = 0;

    while (prs_load_relaxed(&bench->device.control->done) < claim) {
        int r = prs_proxy_step(bench->proxy);

        if (r < 0)
            return bench_fail(bench, "stepping the proxy", r);
        idle = r > 0 ? 0 : idle + 1;
        if (idle > IDLE_SPINS)
            sched_yield(); /* with more ranks than cores, a software NIC's thread may wait for this core */
        if (r == 0 && bench_now_us() > give_up) {
            fprintf(stderr, "rank %u: %llu of %llu commands complete after %u s\n", ranks_rank(bench->ranks),
                    (unsigned long long)bench->device.control->done, (unsigned long long)claim,
                    bench->options->timeout_s);
            return -1;
        }
    }
    return 0;
}

uint64_t *bench_word(const struct bench *bench, uint64_t index)
{
    return (uint64_t *)prs_heap_base(bench->heap, PRS_HEAP_SIGNALS) + index;
}

uint64_t *bench_source(const struct bench *bench, uint64_t offset)
{
    return (uint64_t *)(void *)((char *)prs_heap_base(bench->heap, PRS_HEAP_DATA) + offset);
}

uint64_t *bench_arrival(const struct bench *bench, uint64_t offset)
{
    return bench_source(bench, bench->half + offset);
}

struct prs_device_put bench_put(const struct bench *bench, uint32_t peer, uint64_t offset, uint64_t bytes,
                                uint32_t group)
{
    return (struct prs_device_put){.src_offset = offset,
                                   .dst_offset = bench->half + offset,
                                   .bytes = bytes,
                                   .peer = peer,
                                   .dst_window = PRS_HEAP_DATA,
                                   .src_window = PRS_HEAP_DATA,
                                   .group = group};
}

/* In large transfers only every 64th word (each 512 bytes) and the last are written and checked. */
static uint64_t stride_of(uint64_t bytes)
{
    return bytes <= 16384 ? 1 : 64;
}

static uint64_t mark(uint64_t iteration, uint64_t slot, uint64_t word)
{
    uint64_t x = iteration * 0x9e3779b97f4a7c15u ^ slot << 40 ^ word;

    return x ^ x >> 31;
}

void bench_fill(uint64_t *words, uint64_t bytes, uint64_t iteration, uint64_t slot)
{
    for (uint64_t i = 0; i < bytes / 8; i += stride_of(bytes))
        words[i] = mark(iteration, slot, i);
    words[bytes / 8 - 1] = mark(iteration, slot, bytes / 8 - 1);
}

uint64_t bench_wrong(const uint64_t *words, uint64_t bytes, uint64_t iteration, uint64_t slot)
{
    uint64_t wrong = 0;

    for (uint64_t i = 0; i < bytes / 8; i += stride_of(bytes))
        wrong += words[i] != mark(iteration, slot, i);
    return wrong + (words[bytes / 8 - 1] != mark(iteration, slot, bytes / 8 - 1));
}

void bench_poison(uint64_t *words, uint64_t bytes)
{
    for (uint64_t i = 0; i < bytes / 8; i += stride_of(bytes))
        words[i] = BENCH_POISON;
    words[bytes / 8 - 1] = BENCH_POISON;
}

double bench_now_us(void)
{
    return (double)prs_clock_ns() / 1e3;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

double bench_median(double *values, uint32_t count)
{
    qsort(values, count, sizeof(*values), compare);
    return count % 2 ? values[count / 2] : (values[count / 2 - 1] + values[count / 2]) / 2;
}

double bench_percentile(const double *sorted, uint32_t count, double part)
{
    uint32_t at = (uint32_t)(part * count);

    return sorted[at < count ? at : count - 1];
}

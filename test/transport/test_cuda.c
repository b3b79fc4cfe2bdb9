/* SPDX-License-Identifier: Apache-2.0 */
/* Device memory in the transport, between two processes that start CUDA after the fabric is open. There is no GPU: the
 * driver is tools/fake_cuda, where a CPU that touches device memory ends. */
#include <criterion/criterion.h>
#include <dlfcn.h>
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "test/transport/pair.h"
#include <perseus/heap.h>
#include "tools/fake_cuda/driver.h"

enum { DATA_BYTES = 3 << 20, SIGNAL_BYTES = 4096, RANKS = 2, ROUNDS = 40, SLICE = 70001 };

/* ---- CUDA of a side ---- */

static struct {
    int (*init)(unsigned), (*retain)(void **, int), (*push)(void *);
    int (*alloc)(uint64_t *, size_t), (*free)(uint64_t), (*copy)(uint64_t, uint64_t, size_t);
    int (*range_handle)(void *, uint64_t, size_t, int, unsigned long long);
    void (*fail)(const char *, int, int), (*counts)(struct fake_counts *);
} cu;

static void start_cuda(const struct pair *pair)
{
    static const struct {
        const char *name;
        void *where;
    } symbols[] = {
        {"cuInit", &cu.init},
        {"cuDevicePrimaryCtxRetain", &cu.retain},
        {"cuCtxPushCurrent_v2", &cu.push},
        {"cuMemAlloc_v2", &cu.alloc},
        {"cuMemFree_v2", &cu.free},
        {"cuMemcpy", &cu.copy},
        {"cuMemGetHandleForAddressRange", &cu.range_handle},
        {"fakeCudaCounts", &cu.counts},
        {"fakeCudaFailLater", &cu.fail},
    };
    struct fake_counts have;
    void *library, *context;

    library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    must(library, "%s", dlerror());
    for (size_t i = 0; i < sizeof(symbols) / sizeof(symbols[0]); i++) {
        void *symbol = dlsym(library, symbols[i].name);

        must(symbol, "not the driver of tools/fake_cuda: no %s", symbols[i].name);
        memcpy(symbols[i].where, &symbol, sizeof(symbol));
    }
    cu.counts(&have);
    must(have.started == 0, "the fabric has started CUDA by itself");
    must(cu.init(0) == 0 && cu.retain(&context, pair->side) == 0 && cu.push(context) == 0, "no context");
}

static void copy(uint64_t to, uint64_t from, size_t bytes)
{
    int r = cu.copy(to, from, bytes);

    must(r == 0, "copy of %zu bytes: CUDA error %d", bytes, r);
}

static void write_device(uint64_t to, const void *from, size_t bytes)
{
    copy(to, (uintptr_t)from, bytes);
}

static void read_device(void *to, uint64_t from, size_t bytes)
{
    copy((uintptr_t)to, from, bytes);
}

/* The transport has freed everything that it made, each thing once. The software NIC may keep its mappings of the other
 * side's memory. */
static void must_be_clean(bool nic_was_used)
{
    struct fake_counts have;

    cu.counts(&have);
    must(have.refused == 0, "%d calls gave back what was not there", have.refused);
    must(have.allocated == 0, "%d allocations are left", have.allocated);
    must(have.registered == 0, "%d pieces of host memory are still registered", have.registered);
    must(nic_was_used || (have.mapped == 0 && have.reserved == 0), "%d mappings, %d reservations are left", have.mapped,
         have.reserved);
}

/* ---- regions ---- */

static const struct piece {
    size_t at, bytes;
    bool by_file; /* the caller has a DMA-BUF of the whole allocation, as NCCL has; not over libfabric */
} pieces[] = {
    {0, 4096, false},   {12345, 100001, false}, {4095, 2, false},      {1, 8, false},   {65536 + 17, 65536, false},
    {131072, 1, false}, {0, 4096, true},        {12345, 100001, true}, {4095, 2, true}, {(1 << 18) - 1, 1, true},
};

static struct prs_region *register_piece(struct pair *pair, uint64_t memory, const struct piece *piece)
{
    void *start = (void *)(uintptr_t)(memory + piece->at);
    struct prs_mem mem = {
        .addr = start, .len_bytes = piece->bytes, .kind = PRS_MEM_DMABUF, .dmabuf_fd = -1, .dmabuf_offset = piece->at};
    struct prs_region *region = NULL;
    struct prs_rail_info rail;
    int r = prs_rail_query(pair->fabric, pair->rails.rail[0], &rail);

    must(r == 0, "%s", prs_error_text());
    if (piece->by_file && rail.mem_kinds & PRS_MEM_DMABUF) {
        must(cu.range_handle(&mem.dmabuf_fd, memory, pair->buffer_bytes, 1, 0) == 0, "no DMA-BUF");
        r = prs_region_register(pair->fabric, &pair->rails, &mem, &region);
        close(mem.dmabuf_fd);
    } else {
        r = prs_region_register_cuda(pair->fabric, &pair->rails, start, piece->bytes, 0, &region);
    }
    must(r == 0, "%zu bytes at %zu: %s", piece->bytes, piece->at, prs_error_text());
    return region;
}

/* A's bytes arrive in B's piece, and the bytes around it do not change. */
static void put_piece(struct pair *pair, uint64_t memory, const struct piece *piece)
{
    size_t at = piece->at, bytes = piece->bytes;
    struct prs_region *region;
    struct prs_keys keys, remote = {{0}};
    struct prs_op op;
    uint64_t there;
    uint8_t *have = malloc(pair->buffer_bytes);

    must(have, "malloc");
    pair_fill(pair->buffer, pair->buffer_bytes, 1 + (uint32_t)pair->side);
    write_device(memory, pair->buffer, pair->buffer_bytes);
    region = register_piece(pair, memory, piece);
    prs_region_keys(region, &keys);
    for (int i = 0; i < pair->rails.count; i++)
        remote.rkey[i] = pair_swap(pair, keys.rkey[i]);
    there = pair_swap(pair, memory + at);
    if (pair->side == 0) {
        struct prs_put put = {.src = region,
                              .src_addr = (void *)(uintptr_t)(memory + at),
                              .dst_addr = there,
                              .dst = &remote,
                              .len_bytes = bytes};

        pair_put(pair, &op, &put);
        pair_wait_op(pair, &op);
    }
    pair_barrier(pair);
    prs_region_release(region);
    if (pair->side == 1)
        for (size_t i = 0; i < bytes; i++)
            pair->buffer[at + i] = pair_byte(1, at + i);
    read_device(have, memory, pair->buffer_bytes);
    bool same = memcmp(have, pair->buffer, pair->buffer_bytes) == 0;
    for (size_t i = 0; !same && i < pair->buffer_bytes; i++)
        must(have[i] == pair->buffer[i], "side %d, %zu bytes at %zu: byte %zu is %#x, want %#x", pair->side, bytes, at,
             i, have[i], pair->buffer[i]);
    free(have);
}

static void put_pieces(struct pair *pair)
{
    uint64_t memory = 0;

    start_cuda(pair);
    must(cu.alloc(&memory, pair->buffer_bytes) == 0, "alloc");
    for (size_t i = 0; i < sizeof(pieces) / sizeof(pieces[0]); i++)
        put_piece(pair, memory, &pieces[i]);
    must(cu.free(memory) == 0, "free");
    must_be_clean(true);
}

Test(cuda, memory_at_any_address_is_registered_though_cuda_came_after_the_fabric)
{
    pair_run(&(struct pair_spec){.buffer_bytes = 1 << 18}, put_pieces, put_pieces);
    pair_run(&(struct pair_spec){.buffer_bytes = 1 << 18, .rails = {2, 2}}, put_pieces, put_pieces);
}

static void no_dmabuf(struct pair *pair)
{
    struct prs_region *region = NULL;
    uint64_t memory = 0;
    int r;

    start_cuda(pair);
    must(cu.alloc(&memory, 4096) == 0, "alloc");
    cu.fail("cuMemGetHandleForAddressRange", 0, 801);
    r = prs_region_register_cuda(pair->fabric, &pair->rails, (void *)(uintptr_t)memory, 4096, 0, &region);
    must(r == -EIO && strstr(prs_error_text(), "cuMemGetHandleForAddressRange"), "%d %s", r, prs_error_text());
    must(cu.free(memory) == 0, "free");
    must_be_clean(true);
}

Test(cuda, memory_that_cannot_be_exported_is_refused_by_name)
{
    pair_run(&(struct pair_spec){0}, no_dmabuf, no_dmabuf);
}

/* ---- symmetric memory ---- */

static int allgather(void *user, const void *mine, void *all, size_t bytes)
{
    struct pair *pair = user;

    for (size_t at = 0; at < bytes; at += sizeof(uint64_t)) {
        size_t piece = bytes - at < sizeof(uint64_t) ? bytes - at : sizeof(uint64_t);
        uint64_t own = 0, other;

        memcpy(&own, (const char *)mine + at, piece);
        other = pair_swap(pair, own);
        memcpy((char *)all + (size_t)pair->side * bytes + at, &own, piece);
        memcpy((char *)all + (size_t)!pair->side * bytes + at, &other, piece);
    }
    return 0;
}

struct world {
    struct pair *pair;
    struct prs_bootstrap bootstrap;
    struct prs_team *team;
    struct prs_heap *heap;
    struct prs_proxy *proxy;
    struct prs_device device; /* as a kernel has it */
    struct prs_device host;   /* the same for this CPU, which cannot read device memory */
};

static struct prs_heap_options heap_options(const struct pair *pair, bool same_node)
{
    return (struct prs_heap_options){.fabric = pair->fabric,
                                     .rails = &pair->rails,
                                     .data_bytes = DATA_BYTES,
                                     .signal_bytes = SIGNAL_BYTES,
                                     .cuda = true,
                                     .map_local = true,
                                     .node = same_node ? 1 : 1 + (uint64_t)pair->side,
                                     .timeout_ms = 60000};
}

/* Make the device that a kernel would use, but with its tables and counters in memory that a CPU may touch. */
static void play_kernel(struct world *w)
{
    size_t rows = (size_t)w->device.windows * RANKS, sizes = w->device.windows;
    uint64_t *map = calloc(rows + sizes, sizeof(*map));

    w->host = w->device;
    w->host.local = calloc(1, sizeof(*w->host.local));
    must(map && w->host.local, "calloc");
    read_device(map, (uintptr_t)w->device.map, rows * sizeof(*map));
    read_device(map + rows, (uintptr_t)w->device.bytes, sizes * sizeof(*map));
    w->host.map = map;
    w->host.bytes = map + rows;
    must(map[w->pair->side] == (uintptr_t)prs_heap_base(w->heap, PRS_HEAP_DATA), "own window 0 is at %#lx",
         (unsigned long)map[w->pair->side]);
    must(map[!w->pair->side] == 0, "the other node's window is mapped at %#lx", (unsigned long)map[!w->pair->side]);
    must(map[rows] == prs_heap_bytes(w->heap, PRS_HEAP_DATA) && map[rows + 2] == 0, "sizes of windows: %lu, third: %lu",
         (unsigned long)map[rows], (unsigned long)map[rows + 2]);
}

static void world_open(struct world *w, struct pair *pair)
{
    struct prs_team_options team = {
        .fabric = pair->fabric, .rails = &pair->rails, .traffic_class = -1, .policy = pair->spec->policy};
    struct prs_proxy_options proxy = {.ring_slots = 64, .numa_node = -1, .timeout_ms = 60000, .cuda = true};
    struct prs_heap_options heap = heap_options(pair, false);

    memset(w, 0, sizeof(*w));
    w->pair = pair;
    w->bootstrap = (struct prs_bootstrap){allgather, pair, (uint32_t)pair->side, RANKS};
    must(prs_bootstrap_team(&w->bootstrap, &team, &w->team) == 0, "%s", prs_error_text());
    must(prs_heap_open(&w->bootstrap, &heap, &w->heap) == 0, "%s", prs_error_text());
    proxy.team = w->team;
    must(prs_proxy_open(&proxy, &w->proxy) == 0, "%s", prs_error_text());
    must(prs_heap_windows(w->heap, w->proxy) == 0, "%s", prs_error_text());
    must(prs_proxy_start(w->proxy, &w->device) == 0, "%s", prs_error_text());
    play_kernel(w);
}

static void world_close(struct world *w)
{
    pair_barrier(w->pair);
    prs_proxy_close(w->proxy);
    prs_team_close(w->team);
    prs_heap_close(w->heap);
    free((void *)(uintptr_t)w->host.map);
    free(w->host.local);
}

static void wait_word(struct world *w, uint32_t index, uint64_t value)
{
    uint64_t word = (uintptr_t)prs_heap_base(w->heap, PRS_HEAP_SIGNALS) + 8ull * index, have = 0;

    for (read_device(&have, word, 8); have != value; read_device(&have, word, 8)) { /* bounded by alarm() */
        must(have < value, "signal %u is %lu before it is %lu", index, (unsigned long)have, (unsigned long)value);
        must(prs_proxy_check(w->proxy) == 0, "%s", prs_proxy_error(w->proxy));
        sched_yield();
    }
}

/* Rank 0 puts from an odd address to another and signals; rank 1 sees the signal only after the bytes, and answers. */
static void heap_rounds(struct pair *pair)
{
    enum { FROM = 4097, TO = 1048577 };
    static uint8_t bytes[SLICE];
    struct world w;
    uint64_t base;

    start_cuda(pair);
    world_open(&w, pair);
    base = (uintptr_t)prs_heap_base(w.heap, PRS_HEAP_DATA);
    for (uint32_t round = 1; round <= ROUNDS; round++) {
        struct prs_device_put put = {FROM, TO, SLICE, 1, 0, 0, 1};
        struct prs_device_signal signal = {8, round, 1, 1, 1, 0, 0}, answer = {16, round, 0, 1, 2, 0, 0};

        if (pair->side == 0) {
            pair_fill(bytes, SLICE, round);
            write_device(base + FROM, bytes, SLICE);
            must(prs_put_signal(&w.host, &put, &signal, NULL) == 0, "%s", prs_proxy_error(w.proxy));
            must(prs_quiet(&w.host) == 0, "%s", prs_proxy_error(w.proxy));
            wait_word(&w, 2, round);
        } else {
            wait_word(&w, 1, round);
            read_device(bytes, base + TO, SLICE);
            pair_check(bytes, SLICE, round, "put into device memory");
            must(prs_signal(&w.host, &answer, NULL) == 0, "%s", prs_proxy_error(w.proxy));
        }
    }
    world_close(&w);
    must_be_clean(true);
}

#define ROUNDS_OF(order, name, ...)                                                                                    \
    Test(cuda, a_signal_in_device_memory_follows_its_puts_##name)                                                      \
    {                                                                                                                  \
        pair_run(&(struct pair_spec){.policy = #order, __VA_ARGS__}, heap_rounds, heap_rounds);                        \
    }
ROUNDS_OF(in_order, in_order)
ROUNDS_OF(nic_fence, nic_fence)
ROUNDS_OF(counted, counted)
ROUNDS_OF(counted, counted_over_two_rails, .rails = {2, 2})
ROUNDS_OF(drain, drain)

/* Write to the other rank's memory where it is mapped here; then check the bytes that the other rank wrote. */
static void map_each_other(struct pair *pair)
{
    struct prs_bootstrap bootstrap = {allgather, pair, (uint32_t)pair->side, RANKS};
    struct prs_heap_options options = heap_options(pair, true);
    static uint8_t bytes[SLICE];
    struct prs_heap *heap;
    uint64_t mapped, own;

    start_cuda(pair);
    must(prs_heap_open(&bootstrap, &options, &heap) == 0, "%s", prs_error_text());
    for (int part = 0; part < PRS_HEAP_PARTS; part++) {
        mapped = prs_heap_remotes(heap, part)[!pair->side].mapped;
        own = (uintptr_t)prs_heap_base(heap, part);
        must(mapped != 0 && mapped != own, "part %d of the other rank is mapped at %#lx", part, (unsigned long)mapped);
        read_device(bytes, own, SLICE);
        for (size_t i = 0; i < SLICE; i++)
            must(bytes[i] == 0, "byte %zu of fresh memory is %#x", i, bytes[i]);
        pair_barrier(pair); /* both have read */
        pair_fill(bytes, SLICE, 5 + (uint32_t)pair->side);
        write_device(mapped, bytes, SLICE);
        pair_barrier(pair); /* both have written */
        read_device(bytes, own, SLICE);
        pair_check(bytes, SLICE, 5 + (uint32_t)!pair->side, "the other's write");
    }
    pair_barrier(pair);
    prs_heap_close(heap);
    must_be_clean(false);
}

Test(cuda, ranks_of_a_node_map_each_others_device_memory)
{
    pair_run(&(struct pair_spec){0}, map_each_other, map_each_other);
}

/* ---- failing calls ---- */

static const struct {
    const char *call;
    int after; /* calls that succeed before: two for the heap's own memory, then two for the other rank's */
} heap_failures[] = {
    {"cuMemCreate", 0},
    {"cuMemCreate", 1},
    {"cuMemAddressReserve", 0},
    {"cuMemMap", 0},
    {"cuMemMap", 1},
    {"cuMemSetAccess", 0},
    {"cuMemSetAccess", 1},
    {"cuMemGetHandleForAddressRange", 1},
    {"cuMemImportFromShareableHandle", 0},
    {"cuMemImportFromShareableHandle", 1},
    {"cuMemAddressReserve", 2},
    {"cuMemMap", 2},
    {"cuMemMap", 3},
    {"cuMemSetAccess", 3},
};

static void fail_heaps(struct pair *pair)
{
    struct prs_bootstrap bootstrap = {allgather, pair, (uint32_t)pair->side, RANKS};
    struct prs_heap_options options = heap_options(pair, true);
    struct prs_heap *heap = NULL;

    start_cuda(pair);
    for (size_t i = 0; i < sizeof(heap_failures) / sizeof(heap_failures[0]); i++) {
        const char *call = heap_failures[i].call;
        int r;

        if (pair->side == 0)
            cu.fail(call, heap_failures[i].after, 2);
        r = prs_heap_open(&bootstrap, &options, &heap);
        must(r < 0, "%s after %d: opened", call, heap_failures[i].after);
        if (pair->side == 0)
            must(strstr(prs_error_text(), call), "%s after %d: the text is: %s", call, heap_failures[i].after,
                 prs_error_text());
        else
            must(strstr(prs_error_text(), "rank 0"), "%s: the other's text is: %s", call, prs_error_text());
        must_be_clean(false);
    }
    must(prs_heap_open(&bootstrap, &options, &heap) == 0, "%s", prs_error_text());
    pair_barrier(pair);
    prs_heap_close(heap);
    must_be_clean(false);
}

Test(cuda, a_heap_that_fails_names_the_call_and_gives_back_everything_once)
{
    pair_run(&(struct pair_spec){0}, fail_heaps, fail_heaps);
}

static const struct {
    const char *call;
    int after;
    bool while_starting;
} proxy_failures[] = {
    {"cuMemAlloc_v2", 0, false},
    {"cuMemHostRegister_v2", 0, false},
    {"cuMemAlloc_v2", 1, true},
    {"cuMemcpy", 0, true},
};

static void fail_proxies(struct pair *pair)
{
    struct prs_bootstrap bootstrap = {allgather, pair, (uint32_t)pair->side, RANKS};
    struct prs_team_options team = {.fabric = pair->fabric, .rails = &pair->rails, .traffic_class = -1};
    struct prs_proxy_options options = {.ring_slots = 64, .numa_node = -1, .cuda = true};
    struct prs_device device;
    struct prs_proxy *proxy;

    start_cuda(pair);
    must(prs_bootstrap_team(&bootstrap, &team, &options.team) == 0, "%s", prs_error_text());
    for (size_t i = 0; i < sizeof(proxy_failures) / sizeof(proxy_failures[0]); i++) {
        char name[32] = {0};
        int r;

        strncat(name, proxy_failures[i].call, strcspn(proxy_failures[i].call, "_")); /* without the ABI's version */
        cu.fail(proxy_failures[i].call, proxy_failures[i].after, 2);
        proxy = NULL;
        r = prs_proxy_open(&options, &proxy);
        must((r == 0) == proxy_failures[i].while_starting, "%s: %d", name, r);
        if (!r)
            r = prs_proxy_start(proxy, &device);
        must(r == -ENOMEM && strstr(prs_error_text(), name), "%s: %d %s", name, r, prs_error_text());
        prs_proxy_close(proxy);
        must_be_clean(false);
    }
    must(prs_proxy_open(&options, &proxy) == 0, "%s", prs_error_text());
    prs_proxy_close(proxy); /* never started */
    must_be_clean(false);
    prs_team_close(options.team);
}

Test(cuda, a_proxy_that_fails_names_the_call_and_gives_back_everything_once)
{
    pair_run(&(struct pair_spec){0}, fail_proxies, fail_proxies);
}

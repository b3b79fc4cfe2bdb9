/* SPDX-License-Identifier: Apache-2.0 */
#include <perseus/heap.h>

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "transport/connect/bootstrap.h"
#include "transport/host/cuda.h"
#include "transport/host/fd_pass.h"
#include "transport/nic/fabric.h"
#include "transport/util/error.h"
#include "transport/util/log.h"
#include "transport/util/node.h"

enum {
    RANK_INFO_MAGIC = 0x50484550, /* "PEHP" */
    RANK_INFO_VERSION = 2,
    HOST_GRAIN = 4096,
};

/* What a rank tells the others about itself. It comes from another process, so it is checked. */
struct rank_info {
    uint32_t magic, version;
    int32_t result; /* of all steps before the exchange: when one rank fails, all do */
    uint32_t cuda;
    uint64_t node;
    uint64_t base[PRS_HEAP_PARTS];
    uint64_t bytes[PRS_HEAP_PARTS];
    struct prs_keys keys[PRS_HEAP_PARTS];
    struct prs_fd_pass_address fd_pass;
    char why[160];
};
static_assert(sizeof(struct prs_keys) == 8 * PRS_MAX_RAILS, "plain data");
static_assert(sizeof(struct rank_info) == 24 + 32 + 128 + 32 + 160, "sent to other processes: no hidden padding");

/* The memory of one part: our own, or another rank's mapped into this process. */
struct span {
    void *base; /* NULL: none */
    uint64_t bytes;
    int fd; /* host: memfd; CUDA: exported handle; open until it has been passed on; -1: none */
    struct prs_cuda_span cuda;
};

struct prs_heap {
    struct prs_heap_options options;
    struct prs_bootstrap bootstrap;
    struct span own[PRS_HEAP_PARTS];
    struct prs_region *region[PRS_HEAP_PARTS];
    struct prs_window_remote *remotes[PRS_HEAP_PARTS]; /* [size] */
    struct span *mapped;                               /* [size][PRS_HEAP_PARTS] */
    uint64_t used[PRS_HEAP_PARTS];
    struct prs_fd_pass fd_pass;
};

/* ---- spans ---- */

static int span_map_host(struct span *span)
{
    void *map = mmap(NULL, span->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, span->fd, 0);

    if (map == MAP_FAILED)
        return prs_fail(-errno, "heap: mmap of %" PRIu64 " bytes: %s", span->bytes, strerror(errno));
    span->base = map;
    return 0;
}

static int span_make(struct span *span, uint64_t bytes, bool cuda)
{
    int r;

    if (cuda) {
        r = prs_cuda_span_make(bytes, &span->cuda);
        if (r < 0)
            return r;
        span->base = (void *)(uintptr_t)span->cuda.address;
        span->bytes = span->cuda.bytes;
        return prs_cuda_span_export(&span->cuda, &span->fd);
    }
    span->bytes = (bytes + HOST_GRAIN - 1) / HOST_GRAIN * HOST_GRAIN;
    span->fd = memfd_create("perseus-heap", MFD_CLOEXEC);
    if (span->fd < 0 || ftruncate(span->fd, (off_t)span->bytes) < 0)
        return prs_fail(-errno, "heap: memfd of %" PRIu64 " bytes: %s", span->bytes, strerror(errno));
    return span_map_host(span);
}

/* Close the file. The mapping remains. */
static void span_close(struct span *span)
{
    if (span->fd >= 0)
        close(span->fd);
    span->fd = -1;
}

/* Map memory of another rank. Closes fd in any case. */
static int span_import(struct span *span, int fd, uint64_t bytes, bool cuda)
{
    int r;

    span->fd = fd;
    span->bytes = bytes;
    r = cuda ? prs_cuda_span_import(fd, bytes, &span->cuda) : span_map_host(span);
    if (!r && cuda)
        span->base = (void *)(uintptr_t)span->cuda.address;
    span_close(span);
    return r;
}

static void span_drop(struct span *span)
{
    span_close(span);
    if (span->cuda.handle)
        prs_cuda_span_drop(&span->cuda);
    else if (span->base)
        munmap(span->base, span->bytes);
    memset(span, 0, sizeof(*span));
    span->fd = -1; /* 0 would be a file */
}

/* ---- opening ---- */

static int register_part(struct prs_heap *heap, enum prs_heap_part part)
{
    struct prs_mem mem = {
        .addr = heap->own[part].base,
        .len_bytes = heap->own[part].bytes,
        .kind = PRS_MEM_HOST,
        .dmabuf_fd = -1,
        .flags = part == PRS_HEAP_SIGNALS ? PRS_MEM_STRICT : 0,
    };

    if (!heap->options.fabric || heap->options.rails->count == 0)
        return 0; /* no rails: ranks use only the mappings within their node */
    if (heap->options.cuda)
        return prs_region_register_cuda(heap->options.fabric, heap->options.rails, mem.addr, mem.len_bytes, mem.flags,
                                        &heap->region[part]);
    return prs_region_register(heap->options.fabric, heap->options.rails, &mem, &heap->region[part]);
}

static int make_own(struct prs_heap *heap)
{
    const uint64_t bytes[PRS_HEAP_PARTS] = {heap->options.data_bytes, heap->options.signal_bytes};
    int r = 0;

    for (int part = 0; part < PRS_HEAP_PARTS && !r; part++) {
        r = span_make(&heap->own[part], bytes[part] ? bytes[part] : 1, heap->options.cuda);
        if (!r)
            r = register_part(heap, part);
    }
    return r ? r : prs_fd_pass_open(&heap->fd_pass);
}

static void fill_rank_info(const struct prs_heap *heap, int result, struct rank_info *info)
{
    memset(info, 0, sizeof(*info));
    info->magic = RANK_INFO_MAGIC;
    info->version = RANK_INFO_VERSION;
    info->result = result;
    if (result < 0)
        snprintf(info->why, sizeof(info->why), "%s", prs_error_text());
    info->cuda = heap->options.cuda;
    info->node = heap->options.node ? heap->options.node : prs_node_id();
    info->fd_pass = heap->fd_pass.address;
    for (int part = 0; part < PRS_HEAP_PARTS; part++) {
        info->base[part] = (uint64_t)(uintptr_t)heap->own[part].base;
        info->bytes[part] = heap->own[part].bytes;
        if (heap->region[part])
            prs_region_keys(heap->region[part], &info->keys[part]);
    }
}

static int check_rank_infos(const struct prs_heap *heap, const struct rank_info *infos)
{
    const struct rank_info *mine = &infos[heap->bootstrap.rank];

    for (uint32_t rank = 0; rank < heap->bootstrap.world; rank++) {
        const struct rank_info *info = &infos[rank];

        if (info->magic != RANK_INFO_MAGIC || info->version != RANK_INFO_VERSION)
            return prs_fail(-EPROTO, "heap: rank %u sent magic %#x version %u, want %#x version %d: another release?",
                            rank, info->magic, info->version, RANK_INFO_MAGIC, RANK_INFO_VERSION);
        if (info->result < 0)
            return rank == heap->bootstrap.rank ? info->result
                                                : prs_fail(info->result, "heap: rank %u failed: %.*s", rank,
                                                           (int)sizeof(info->why) - 1, info->why);
        for (int part = 0; part < PRS_HEAP_PARTS; part++)
            if (info->bytes[part] != mine->bytes[part] || info->cuda != mine->cuda)
                return prs_fail(-EINVAL, "heap: part %d is %" PRIu64 " bytes on rank %u, %" PRIu64 " here", part,
                                info->bytes[part], rank, mine->bytes[part]);
    }
    return 0;
}

static int map_node(struct prs_heap *heap, const struct rank_info *infos)
{
    uint32_t size = heap->bootstrap.world, mine = heap->bootstrap.rank, count = 0;
    uint32_t timeout = heap->options.timeout_ms ? heap->options.timeout_ms : heap->options.fabric->config.timeout_ms;
    struct prs_fd_pass_address *addresses = calloc(size, sizeof(*addresses));
    int(*got)[PRS_FD_PASS_FILES] = calloc(size, sizeof(*got));
    uint32_t *ranks = calloc(size, sizeof(*ranks));
    int files[PRS_FD_PASS_FILES] = {heap->own[0].fd, heap->own[1].fd};
    int r = -ENOMEM;

    if (!addresses || !got || !ranks) {
        prs_fail(r, "heap: no memory for %u ranks", size);
        goto free_lists;
    }
    for (uint32_t rank = 0; rank < size; rank++) {
        if (rank == mine || infos[rank].node != infos[mine].node)
            continue;
        addresses[count] = infos[rank].fd_pass;
        ranks[count++] = rank;
    }
    r = prs_fd_pass_exchange(&heap->fd_pass, files, addresses, count, got, timeout);
    for (uint32_t i = 0; i < count && !r; i++) {
        for (int part = 0; part < PRS_HEAP_PARTS; part++) {
            struct span *span = &heap->mapped[ranks[i] * PRS_HEAP_PARTS + part];

            if (!r)
                r = span_import(span, got[i][part], infos[ranks[i]].bytes[part], heap->options.cuda);
            else
                close(got[i][part]);
            heap->remotes[part][ranks[i]].mapped = (uint64_t)(uintptr_t)span->base;
        }
        for (uint32_t k = i + 1; r < 0 && k < count; k++)
            for (int part = 0; part < PRS_HEAP_PARTS; part++)
                close(got[k][part]);
    }
free_lists:
    free(ranks);
    free(got);
    free(addresses);
    return r;
}

static int exchange(struct prs_heap *heap, int result)
{
    struct rank_info mine, *infos = calloc(heap->bootstrap.world, sizeof(*infos));
    int r;

    if (!infos)
        return prs_fail(-ENOMEM, "heap: no memory for %u ranks", heap->bootstrap.world);
    fill_rank_info(heap, result, &mine);
    r = prs_bootstrap_gather(&heap->bootstrap, &mine, infos, sizeof(mine), "heap");
    if (!r)
        r = check_rank_infos(heap, infos);
    if (!r) {
        for (uint32_t rank = 0; rank < heap->bootstrap.world; rank++)
            for (int part = 0; part < PRS_HEAP_PARTS; part++) {
                heap->remotes[part][rank].base = infos[rank].base[part];
                heap->remotes[part][rank].keys = infos[rank].keys[part];
            }
        if (heap->options.map_local)
            r = map_node(heap, infos);
        r = prs_bootstrap_agree(&heap->bootstrap, r, "heap: mapping the node's memory");
    }
    free(infos);
    return r;
}

int prs_heap_open(const struct prs_bootstrap *bootstrap, const struct prs_heap_options *options, struct prs_heap **out)
{
    uint32_t size = bootstrap->world;
    struct prs_heap *heap;
    int r = prs_check_reserved(options, "struct prs_heap_options");

    if (r)
        return r;
    heap = calloc(1, sizeof(*heap));
    if (!heap)
        return prs_fail(-ENOMEM, "heap: no memory");
    heap->options = *options;
    heap->bootstrap = *bootstrap;
    heap->fd_pass.listener = -1;
    heap->mapped = calloc((size_t)size * PRS_HEAP_PARTS, sizeof(*heap->mapped));
    r = heap->mapped ? 0 : -ENOMEM;
    for (uint32_t i = 0; heap->mapped && i < size * PRS_HEAP_PARTS; i++)
        heap->mapped[i].fd = -1;
    for (int part = 0; part < PRS_HEAP_PARTS; part++) {
        heap->own[part].fd = -1;
        heap->remotes[part] = calloc(size, sizeof(*heap->remotes[part]));
        if (!heap->remotes[part])
            r = -ENOMEM;
    }
    if (r < 0) {
        prs_heap_close(heap);
        return prs_fail(r, "heap: no memory for %u ranks", size);
    }
    r = exchange(heap, make_own(heap));
    prs_fd_pass_close(&heap->fd_pass);
    for (int part = 0; part < PRS_HEAP_PARTS; part++)
        span_close(&heap->own[part]);
    if (r < 0) {
        prs_heap_close(heap);
        return r;
    }
    PRS_INFO("heap: rank %u of %u: %" PRIu64 " bytes of data, %" PRIu64 " of signals in %s memory", bootstrap->rank,
             size, heap->own[0].bytes, heap->own[1].bytes, options->cuda ? "device" : "host");
    *out = heap;
    return 0;
}

void prs_heap_close(struct prs_heap *heap)
{
    if (!heap)
        return;
    for (uint32_t i = 0; heap->mapped && i < heap->bootstrap.world * PRS_HEAP_PARTS; i++)
        span_drop(&heap->mapped[i]);
    for (int part = 0; part < PRS_HEAP_PARTS; part++) {
        prs_region_release(heap->region[part]);
        span_drop(&heap->own[part]);
        free(heap->remotes[part]);
    }
    free(heap->mapped);
    free(heap);
}

void *prs_heap_base(const struct prs_heap *heap, enum prs_heap_part part)
{
    return heap->own[part].base;
}

uint64_t prs_heap_bytes(const struct prs_heap *heap, enum prs_heap_part part)
{
    return heap->own[part].bytes;
}

const struct prs_window_remote *prs_heap_remotes(const struct prs_heap *heap, enum prs_heap_part part)
{
    return heap->remotes[part];
}

int prs_heap_alloc(struct prs_heap *heap, enum prs_heap_part part, uint64_t bytes, uint64_t align, uint64_t *offset)
{
    uint64_t start = (heap->used[part] + align - 1) & ~(align - 1);

    if (align == 0 || (align & (align - 1)) != 0)
        return prs_fail(-EINVAL, "heap part %d: an alignment of %" PRIu64 " is not a power of two", part, align);
    if (start < heap->used[part] || start > heap->own[part].bytes || bytes > heap->own[part].bytes - start)
        return prs_fail(-ENOMEM, "heap part %d: %" PRIu64 " bytes requested, %" PRIu64 " of %" PRIu64 " are left", part,
                        bytes, heap->own[part].bytes - heap->used[part], heap->own[part].bytes);
    heap->used[part] = start + bytes;
    *offset = start;
    return 0;
}

int prs_heap_windows(const struct prs_heap *heap, struct prs_proxy *proxy)
{
    for (int part = 0; part < PRS_HEAP_PARTS; part++) {
        struct prs_window_options window = {
            .base = heap->own[part].base,
            .bytes = heap->own[part].bytes,
            .region = heap->region[part],
            .remotes = heap->remotes[part],
            .flags = part == PRS_HEAP_SIGNALS ? PRS_WINDOW_SIGNALS : 0,
        };
        int r = prs_proxy_window(proxy, &window);

        if (r < 0)
            return r;
        if (r != part)
            return prs_fail(-EINVAL, "heap: the proxy already has windows: part %d would be window %d", part, r);
    }
    return 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/fake_cuda/state.h"

#include <fcntl.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { RANGES = 4096 };

pthread_mutex_t fake_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct range ranges[RANGES];
static uint64_t next_id = 1;
static int refused;

enum { CALLS = 64 };

/* Failures and counts of this process, or of several. Without a lock: tests kill and stop processes anywhere. */
struct failures {
    uint64_t call; /* the next one to fail */
    int result, after;
    struct {
        uint64_t call;
        int calls;
    } table[CALLS];
};
static struct failures own, *failures = &own;

static __attribute__((constructor)) void failures_share(void)
{
    const char *path = getenv("FAKE_CUDA_SHARED");
    int fd = path ? open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600) : -1;
    if (fd < 0)
        return;
    if (!ftruncate(fd, sizeof(own))) {
        void *p = fake_map_shared(fd, sizeof(own));
        failures = p ? p : &own;
    }
    close(fd);
}

/* What the shared memory has of a call's name (FNV-1a); never 0. */
static uint64_t key_of(const char *call)
{
    uint64_t key = 14695981039346656037u;

    for (; *call; call++)
        key = (key ^ (uint8_t)*call) * 1099511628211u;
    return key ? key : 1;
}

void fakeCudaFail(const char *call, int result)
{
    fakeCudaFailLater(call, 0, result);
}

void fakeCudaFailLater(const char *call, int after, int result)
{
    __atomic_store_n(&failures->call, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&failures->result, result, __ATOMIC_RELAXED);
    __atomic_store_n(&failures->after, after, __ATOMIC_RELAXED);
    __atomic_store_n(&failures->call, key_of(call), __ATOMIC_RELEASE); /* [fake-failure]: after the two above */
}

/* The counter of that call. */
static int *calls_of(uint64_t key)
{
    for (int i = 0; i < CALLS - 1; i++) {
        uint64_t other = 0;
        if (__atomic_compare_exchange_n(&failures->table[i].call, &other, key, false, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED) ||
            other == key)
            return &failures->table[i].calls;
    }
    return &failures->table[CALLS - 1].calls;
}

int fakeCudaCalls(const char *call)
{
    return __atomic_load_n(calls_of(key_of(call)), __ATOMIC_RELAXED);
}

int fake_failure(const char *call)
{
    uint64_t key = key_of(call);

    __atomic_fetch_add(calls_of(key), 1, __ATOMIC_RELAXED);
    if (__atomic_load_n(&failures->call, __ATOMIC_ACQUIRE) != key || /* pairs with [fake-failure] */
        __atomic_fetch_sub(&failures->after, 1, __ATOMIC_RELAXED) != 0)
        return OK;
    __atomic_store_n(&failures->call, 0, __ATOMIC_RELAXED);
    return __atomic_load_n(&failures->result, __ATOMIC_RELAXED);
}

void fakeCudaCounts(struct fake_counts *out)
{
    pthread_mutex_lock(&fake_mutex);
    *out = (struct fake_counts){.started = fake_started(), .refused = refused};
    for (int i = 0; i < RANGES; i++) {
        out->allocated += ranges[i].kind == LEGACY;
        out->reserved += ranges[i].kind == RESERVED;
        out->mapped += ranges[i].kind == MAPPED;
        out->registered += ranges[i].kind == REGISTERED;
    }
    pthread_mutex_unlock(&fake_mutex);
}

int fake_refuse_locked(int result)
{
    refused++;
    return result;
}

struct range *fake_find(uint64_t va)
{
    for (int i = 0; i < RANGES; i++)
        if (ranges[i].kind != FREE && ranges[i].kind != RESERVED && va >= ranges[i].va &&
            va < ranges[i].va + ranges[i].bytes)
            return &ranges[i];
    return NULL;
}

struct range *fake_find_reserved(uint64_t va)
{
    for (int i = 0; i < RANGES; i++)
        if (ranges[i].kind == RESERVED && va >= ranges[i].va && va < ranges[i].va + ranges[i].bytes)
            return &ranges[i];
    return NULL;
}

struct range *fake_fresh(enum range_kind kind, uint64_t va, uint64_t bytes)
{
    for (int i = 0; i < RANGES; i++)
        if (ranges[i].kind == FREE) {
            ranges[i] = (struct range){
                .kind = kind, .va = va, .bytes = bytes, .fd = -1, .dev = fake_current(), .id = next_id++};
            return &ranges[i];
        }
    return NULL;
}

struct range *fake_next(enum range_kind kind, int *at)
{
    while (*at < RANGES) {
        struct range *range = &ranges[(*at)++];
        if (range->kind == kind)
            return range;
    }
    return NULL;
}

bool fake_any_mapped(uint64_t va, uint64_t bytes)
{
    int at = 0;
    for (const struct range *range; (range = fake_next(MAPPED, &at));)
        if (range->va < va + bytes && range->va + range->bytes > va)
            return true;
    return false;
}

uint8_t *fake_view(uint64_t va, size_t *n)
{
    pthread_mutex_lock(&fake_mutex);
    struct range *r = fake_find(va);
    uint8_t *p = r && (r->kind != MAPPED || r->accessible) ? r->shadow + (va - r->va) : NULL;
    if (p && va + *n > r->va + r->bytes)
        *n = r->va + r->bytes - va;
    pthread_mutex_unlock(&fake_mutex);
    return p;
}

bool fake_has_access(const struct range *r, int dev)
{
    return r->kind != MAPPED || r->access >> dev & 1;
}

bool fake_reaches(int dev, uint64_t a, uint64_t b)
{
    bool reaches = true;

    pthread_mutex_lock(&fake_mutex);
    const struct range *x = fake_find(a), *y = fake_find(b);
    if (x && y && x->kind != PINNED && x->kind != REGISTERED && y->kind != PINNED && y->kind != REGISTERED)
        reaches = fake_has_access(x, dev) && fake_has_access(y, dev);
    pthread_mutex_unlock(&fake_mutex);
    return reaches;
}

bool fake_maps(int dev, uint64_t va)
{
    pthread_mutex_lock(&fake_mutex);
    const struct range *r = fake_find(va);
    bool maps =
        r && (r->kind == LEGACY ? r->dev == dev : (r->kind == MAPPED || r->kind == IPC) && r->access >> dev & 1);
    pthread_mutex_unlock(&fake_mutex);
    return maps;
}

uint8_t *fake_map_shared(int fd, uint64_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return p == MAP_FAILED ? NULL : p;
}

uint64_t fake_reserve(uint64_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? 0 : (uintptr_t)p;
}

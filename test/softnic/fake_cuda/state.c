/* SPDX-License-Identifier: Apache-2.0 */
#include "test/softnic/fake_cuda/state.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

enum { RANGES = 4096 };

pthread_mutex_t fake_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct range ranges[RANGES];
static uint64_t next_id = 1;
static int refused;

static char fail_call[32];
static int fail_result, fail_after;

void fakeCudaFail(const char *call, int result)
{
    fakeCudaFailLater(call, 0, result);
}

void fakeCudaFailLater(const char *call, int after, int result)
{
    pthread_mutex_lock(&fake_mutex);
    snprintf(fail_call, sizeof(fail_call), "%s", call);
    fail_result = result;
    fail_after = after;
    pthread_mutex_unlock(&fake_mutex);
}

int fake_failure(const char *call)
{
    int result = OK;
    pthread_mutex_lock(&fake_mutex);
    if (!strcmp(call, fail_call) && fail_after-- == 0) {
        result = fail_result;
        fail_call[0] = '\0';
    }
    pthread_mutex_unlock(&fake_mutex);
    return result;
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

/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/nic/mr_cache.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "transport/order/tally.h"
#include "transport/util/error.h"
#include "transport/util/log.h"
#include <perseus/perseus.h>

struct prs_mr_key prs_mr_key_make(uint64_t addr, uint64_t len_bytes, int kind, bool strict)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);

    return (struct prs_mr_key){addr & ~(page - 1), (addr + len_bytes + page - 1) & ~(page - 1), kind, strict};
}

void prs_mr_cache_init(struct prs_mr_cache *cache)
{
    *cache = (struct prs_mr_cache){0};
    pthread_mutex_init(&cache->lock, NULL);
}

uint32_t prs_mr_cache_fini(struct prs_mr_cache *cache, prs_mr_release_fn *release, void *arg)
{
    uint32_t leaked = cache->count;

    for (uint32_t i = 0; i < cache->count; i++) {
        release(arg, &cache->entry[i]->registered);
        free(cache->entry[i]);
    }
    free(cache->entry);
    pthread_mutex_destroy(&cache->lock);
    return leaked;
}

static bool covers(const struct prs_mr_key *have, const struct prs_mr_key *want)
{
    return have->start <= want->start && have->end >= want->end && have->kind == want->kind &&
           have->strict == want->strict;
}

static int insert_locked(struct prs_mr_cache *cache, uint32_t at, struct prs_mr *mr)
{
    if (cache->count == cache->room) {
        uint32_t room = cache->room ? cache->room * 2 : 32;
        struct prs_mr **entry = realloc(cache->entry, room * sizeof(*entry));

        if (!entry)
            return prs_fail(-ENOMEM, "memory registration: no memory for %u cache entries", room);
        cache->entry = entry;
        cache->room = room;
    }
    memmove(&cache->entry[at + 1], &cache->entry[at], (cache->count - at) * sizeof(struct prs_mr *));
    cache->entry[at] = mr;
    cache->count++;
    return 0;
}

static int get_locked(struct prs_mr_cache *cache, const struct prs_mr_key *key, prs_mr_register_fn *fn, void *arg,
                      struct prs_mr **out)
{
    struct prs_mr *mr;
    uint32_t at;
    int r;

    for (at = 0; at < cache->count && cache->entry[at]->key.start <= key->start; at++) {
        if (covers(&cache->entry[at]->key, key)) {
            cache->entry[at]->refs++;
            *out = cache->entry[at];
            return 0;
        }
    }
    mr = calloc(1, sizeof(*mr));
    if (!mr)
        return prs_fail(-ENOMEM, "memory registration: no memory for a cache entry");
    *mr = (struct prs_mr){.key = *key, .refs = 1};
    r = insert_locked(cache, at, mr); /* first, so that nothing can fail after the registration */
    if (r)
        goto free_mr;
    r = fn(arg, key, &mr->registered);
    if (r)
        goto remove_entry;
    if (mr->registered.remote_key > UINT32_MAX)
        __atomic_store_n(&cache->wide, true, __ATOMIC_RELAXED); /* before anybody can be told the key */
    *out = mr;
    return 0;

remove_entry:
    cache->count--;
    memmove(&cache->entry[at], &cache->entry[at + 1], (cache->count - at) * sizeof(struct prs_mr *));
free_mr:
    free(mr);
    return r;
}

int prs_mr_cache_get(struct prs_mr_cache *cache, const struct prs_mr_key *key, prs_mr_register_fn *fn, void *arg,
                     struct prs_mr **out)
{
    int r;

    pthread_mutex_lock(&cache->lock);
    r = get_locked(cache, key, fn, arg, out);
    pthread_mutex_unlock(&cache->lock);
    return r;
}

bool prs_mr_cache_device_key(struct prs_mr_cache *cache, uint64_t addr, uint32_t len_bytes, uint64_t *rkey)
{
    bool found = false;

    pthread_mutex_lock(&cache->lock);
    for (uint32_t at = 0; !found && at < cache->count && cache->entry[at]->key.start <= addr; at++) {
        const struct prs_mr *mr = cache->entry[at];

        found = mr->key.kind != PRS_MEM_HOST && addr < mr->key.end && len_bytes <= mr->key.end - addr;
        if (found)
            *rkey = mr->registered.remote_key;
    }
    pthread_mutex_unlock(&cache->lock);
    return found;
}

bool prs_mr_cache_use(struct prs_mr_cache *cache, uint64_t addr, uint32_t len_bytes, uint32_t record_key,
                      prs_mr_use_fn *fn, void *arg)
{
    bool found = false;

    pthread_mutex_lock(&cache->lock);
    for (uint32_t at = 0; !found && at < cache->count && cache->entry[at]->key.start <= addr; at++) {
        const struct prs_mr *mr = cache->entry[at];

        found = prs_record_key(mr->registered.remote_key) == record_key && addr < mr->key.end &&
                len_bytes <= mr->key.end - addr;
        if (found)
            fn(arg, mr);
    }
    pthread_mutex_unlock(&cache->lock);
    return found;
}

static void remove_locked(struct prs_mr_cache *cache, struct prs_mr *mr)
{
    uint32_t at = 0;

    while (cache->entry[at] != mr)
        at++;
    cache->count--;
    memmove(&cache->entry[at], &cache->entry[at + 1], (cache->count - at) * sizeof(struct prs_mr *));
}

void prs_mr_cache_put(struct prs_mr_cache *cache, struct prs_mr *mr, prs_mr_release_fn *release, void *arg)
{
    pthread_mutex_lock(&cache->lock);
    if (--mr->refs == 0) {
        int r = release(arg, &mr->registered);

        if (r)
            PRS_WARN("deregistering %#llx-%#llx failed: %s", (unsigned long long)mr->key.start,
                     (unsigned long long)mr->key.end, strerror(-r));
        remove_locked(cache, mr);
        free(mr);
    }
    pthread_mutex_unlock(&cache->lock);
}

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
    pthread_mutex_init(&cache->serial, NULL);
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
    pthread_mutex_destroy(&cache->serial);
    return leaked;
}

/* ---- the sorted array ---- */

/* How many entries start at or before this address. */
static uint32_t count_upto(const struct prs_mr_cache *cache, uint64_t addr)
{
    uint32_t low = 0, high = cache->count;

    while (low < high) {
        uint32_t middle = low + (high - low) / 2;

        if (cache->entry[middle]->key.start <= addr)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The next entry that covers [addr, end), going back from *at. NULL: there is none. */
static struct prs_mr *next_cover(const struct prs_mr_cache *cache, uint64_t addr, uint64_t end, uint32_t *at)
{
    while (*at && cache->entry[*at - 1]->upto >= end) {
        struct prs_mr *mr = cache->entry[--*at];

        if (mr->key.end >= end && addr < mr->key.end)
            return mr;
    }
    return NULL;
}

static void update_upto(struct prs_mr_cache *cache, uint32_t from)
{
    for (uint32_t i = from; i < cache->count; i++) {
        struct prs_mr *mr = cache->entry[i];
        uint64_t before = i ? cache->entry[i - 1]->upto : 0;

        mr->upto = mr->key.end > before ? mr->key.end : before;
    }
}

/* Make room for one more entry. Return 0 or -ENOMEM. */
static int grow_locked(struct prs_mr_cache *cache)
{
    uint32_t room = cache->room ? cache->room * 2 : 32;
    struct prs_mr **entry;

    if (cache->count < cache->room)
        return 0;
    entry = realloc(cache->entry, room * sizeof(*entry));
    if (!entry)
        return prs_fail(-ENOMEM, "memory registration: no memory for %u cache entries", room);
    cache->entry = entry;
    cache->room = room;
    return 0;
}

static void insert_locked(struct prs_mr_cache *cache, struct prs_mr *mr)
{
    uint32_t at = count_upto(cache, mr->key.start);

    memmove(&cache->entry[at + 1], &cache->entry[at], (cache->count - at) * sizeof(struct prs_mr *));
    cache->entry[at] = mr;
    cache->count++;
    update_upto(cache, at);
}

static void remove_locked(struct prs_mr_cache *cache, const struct prs_mr *mr)
{
    uint32_t at = count_upto(cache, mr->key.start) - 1;

    while (cache->entry[at] != mr)
        at--;
    cache->count--;
    memmove(&cache->entry[at], &cache->entry[at + 1], (cache->count - at) * sizeof(struct prs_mr *));
    update_upto(cache, at);
}

/* ---- register, release ---- */

/* Entries change only while serial is held, so finding one needs no other lock then. */
static struct prs_mr *find_serial(const struct prs_mr_cache *cache, const struct prs_mr_key *key)
{
    uint32_t at = count_upto(cache, key->start);
    struct prs_mr *mr;

    while ((mr = next_cover(cache, key->start, key->end, &at)))
        if (mr->key.kind == key->kind && mr->key.strict == key->strict)
            return mr;
    return NULL;
}

static int get_serial(struct prs_mr_cache *cache, const struct prs_mr_key *key, prs_mr_register_fn *fn, void *arg,
                      struct prs_mr **out)
{
    struct prs_mr *mr = find_serial(cache, key);
    int r;

    if (mr) {
        mr->refs++;
        *out = mr;
        return 0;
    }
    mr = calloc(1, sizeof(*mr));
    if (!mr)
        return prs_fail(-ENOMEM, "memory registration: no memory for a cache entry");
    *mr = (struct prs_mr){.key = *key, .refs = 1};
    pthread_mutex_lock(&cache->lock);
    r = grow_locked(cache); /* first, so that nothing can fail after the registration */
    pthread_mutex_unlock(&cache->lock);
    if (!r)
        r = fn(arg, key, &mr->registered);
    if (r) {
        free(mr);
        return r;
    }
    pthread_mutex_lock(&cache->lock);
    if (mr->registered.remote_key > UINT32_MAX)
        __atomic_store_n(&cache->wide, true, __ATOMIC_RELAXED); /* this precedes any use of the key */
    insert_locked(cache, mr);
    pthread_mutex_unlock(&cache->lock);
    *out = mr;
    return 0;
}

int prs_mr_cache_get(struct prs_mr_cache *cache, const struct prs_mr_key *key, prs_mr_register_fn *fn, void *arg,
                     struct prs_mr **out)
{
    int r;

    pthread_mutex_lock(&cache->serial);
    r = get_serial(cache, key, fn, arg, out);
    pthread_mutex_unlock(&cache->serial);
    return r;
}

void prs_mr_cache_put(struct prs_mr_cache *cache, struct prs_mr *mr, prs_mr_release_fn *release, void *arg)
{
    pthread_mutex_lock(&cache->serial);
    if (--mr->refs == 0) {
        int r;

        pthread_mutex_lock(&cache->lock);
        remove_locked(cache, mr); /* nobody uses it from here on */
        pthread_mutex_unlock(&cache->lock);
        r = release(arg, &mr->registered);
        if (r)
            PRS_WARN("deregistering %#llx-%#llx failed: %s", (unsigned long long)mr->key.start,
                     (unsigned long long)mr->key.end, strerror(-r));
        free(mr);
    }
    pthread_mutex_unlock(&cache->serial);
}

/* ---- looking up, for signals ---- */

bool prs_mr_cache_device_key(struct prs_mr_cache *cache, uint64_t addr, uint32_t len_bytes, uint64_t *rkey)
{
    struct prs_mr *mr;
    uint32_t at;

    pthread_mutex_lock(&cache->lock);
    at = count_upto(cache, addr);
    while ((mr = next_cover(cache, addr, addr + len_bytes, &at)))
        if (mr->key.kind != PRS_MEM_HOST)
            break;
    if (mr)
        *rkey = mr->registered.remote_key;
    pthread_mutex_unlock(&cache->lock);
    return mr;
}

bool prs_mr_cache_use(struct prs_mr_cache *cache, uint64_t addr, uint32_t len_bytes, uint32_t record_key,
                      prs_mr_use_fn *fn, void *arg)
{
    struct prs_mr *mr;
    uint32_t at;

    pthread_mutex_lock(&cache->lock);
    at = count_upto(cache, addr);
    while ((mr = next_cover(cache, addr, addr + len_bytes, &at)))
        if (prs_record_key(mr->registered.remote_key) == record_key)
            break;
    if (mr)
        fn(arg, mr);
    pthread_mutex_unlock(&cache->lock);
    return mr;
}

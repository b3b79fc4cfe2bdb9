/* SPDX-License-Identifier: Apache-2.0 */
/* The memory registrations of one domain, reference-counted, keyed by page-aligned range, kind and strictness. A range
 * inside an existing registration shares it; a partial overlap does not. */
#ifndef TRANSPORT_MR_CACHE_H
#define TRANSPORT_MR_CACHE_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "transport/nic/registration.h"

struct prs_mr_key {
    uint64_t start; /* page-aligned */
    uint64_t end;   /* page-aligned, exclusive */
    int kind;       /* enum prs_mem_kind */
    bool strict;
};

struct prs_mr {
    struct prs_mr_key key;
    struct prs_registration registered;
    uint64_t upto; /* the largest key.end of this entry and all before it */
    uint32_t refs;
};

struct prs_mr_cache {
    pthread_mutex_t serial; /* held while memory is registered or released, which may take seconds; taken first */
    /* Held for a short time only, because signals look up registrations under it. Whoever changes the members below
     * holds both locks. */
    pthread_mutex_t lock;
    struct prs_mr **entry; /* sorted by key.start */
    uint32_t count, room;
    bool wide; /* atomic: a remote key has had more than 32 bits */
};

/* Register or deregister memory for the cache. Return 0 or -errno; a failure to register is logged. */
typedef int prs_mr_register_fn(void *arg, const struct prs_mr_key *key, struct prs_registration *out);
typedef int prs_mr_release_fn(void *arg, struct prs_registration *registered);

struct prs_mr_key prs_mr_key_make(uint64_t addr, uint64_t len_bytes, int kind, bool strict);

void prs_mr_cache_init(struct prs_mr_cache *cache);
/* Release what is still registered, which is a leak of the caller. Return the number of leaks. */
uint32_t prs_mr_cache_fini(struct prs_mr_cache *cache, prs_mr_release_fn *release, void *arg);

/* Find or register. Return 0, -ENOMEM or the error of fn. */
int prs_mr_cache_get(struct prs_mr_cache *cache, const struct prs_mr_key *key, prs_mr_register_fn *fn, void *arg,
                     struct prs_mr **out);
/* The remote key of a registration of device memory that covers the range. Return false: there is none. */
bool prs_mr_cache_device_key(struct prs_mr_cache *cache, uint64_t addr, uint32_t len_bytes, uint64_t *rkey);
/* Find the registration that covers the range and whose remote key has this prs_record_key(), and call fn; the
 * registration stays until fn returns. Return false: there is none. */
typedef void prs_mr_use_fn(void *arg, const struct prs_mr *mr);
bool prs_mr_cache_use(struct prs_mr_cache *cache, uint64_t addr, uint32_t len_bytes, uint32_t record_key,
                      prs_mr_use_fn *fn, void *arg);
/* May a record's key be less than the whole remote key? */
static inline bool prs_mr_cache_is_wide(const struct prs_mr_cache *cache)
{
    return __atomic_load_n(&cache->wide, __ATOMIC_RELAXED);
}
/* Drop one reference. */
void prs_mr_cache_put(struct prs_mr_cache *cache, struct prs_mr *mr, prs_mr_release_fn *release, void *arg);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <errno.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "transport/nic/mr_cache.h"
#include "transport/order/tally.h"

static int registered, released, refuse;

static int fake_register(void *arg, const struct prs_mr_key *key, struct prs_registration *out)
{
    (void)arg;
    (void)key;
    if (refuse)
        return -ENOMEM;
    registered++;
    *out = (struct prs_registration){.object = malloc(1)};
    return 0;
}

static int fake_release(void *arg, struct prs_registration *mr)
{
    (void)arg;
    released++;
    free(mr->object);
    return 0;
}

static struct prs_mr *get(struct prs_mr_cache *cache, uint64_t addr, uint64_t bytes, int kind, bool strict)
{
    struct prs_mr_key key = prs_mr_key_make(addr, bytes, kind, strict);
    struct prs_mr *mr = NULL;

    cr_assert_eq(prs_mr_cache_get(cache, &key, fake_register, NULL, &mr), 0);
    return mr;
}

Test(mr_cache, the_same_pages_are_registered_once)
{
    struct prs_mr_cache cache;
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), first = 16 * page;
    struct prs_mr *a, *b, *c;

    prs_mr_cache_init(&cache);
    a = get(&cache, first + 16, 100, 1, false);
    b = get(&cache, first + page / 2, 8, 1, false);
    cr_assert(a == b && registered == 1, "two buffers of one page share it");
    c = get(&cache, first + page - 16, 32, 1, false);
    cr_assert(c != a && registered == 2, "a buffer over two pages gets its own: never merged partially");
    cr_assert(a->key.start == first && a->key.end == first + page && c->key.end == first + 2 * page);
    prs_mr_cache_put(&cache, a, fake_release, NULL);
    cr_assert_eq(released, 0);
    prs_mr_cache_put(&cache, b, fake_release, NULL);
    cr_assert_eq(released, 1);
    prs_mr_cache_put(&cache, c, fake_release, NULL);
    cr_assert_eq(prs_mr_cache_fini(&cache, fake_release, NULL), 0);
}

Test(mr_cache, kind_and_strictness_keep_apart)
{
    struct prs_mr_cache cache;

    prs_mr_cache_init(&cache);
    get(&cache, 0x10000, 4096, 1, false);
    get(&cache, 0x10000, 4096, 1, true);
    get(&cache, 0x10000, 4096, 2, false);
    cr_assert_eq(registered, 3);
    cr_assert_eq(prs_mr_cache_fini(&cache, fake_release, NULL), 3, "what was not given back is counted");
    cr_assert_eq(released, 3);
}

Test(mr_cache, a_larger_registration_serves_its_inside)
{
    struct prs_mr_cache cache;
    struct prs_mr *all, *inside;

    prs_mr_cache_init(&cache);
    get(&cache, 0x8000, 0x1000, 1, false);
    all = get(&cache, 0x10000, 0x10000, 1, false);
    inside = get(&cache, 0x18000, 0x1000, 1, false);
    cr_assert(all == inside && registered == 2);
    get(&cache, 0x1f000, 0x2000, 1, false);
    cr_assert_eq(registered, 3, "sticks out at the end");
    prs_mr_cache_fini(&cache, fake_release, NULL);
}

Test(mr_cache, a_failed_registration_leaves_nothing)
{
    struct prs_mr_key key = prs_mr_key_make(0x10000, 1, 1, false);
    struct prs_mr_cache cache;
    struct prs_mr *mr;

    prs_mr_cache_init(&cache);
    refuse = 1;
    cr_assert_eq(prs_mr_cache_get(&cache, &key, fake_register, NULL, &mr), -ENOMEM);
    cr_assert_eq(prs_mr_cache_fini(&cache, fake_release, NULL), 0);
}

Test(mr_cache, agrees_with_a_plain_list_under_random_use)
{
    enum { SLOTS = 64 };
    struct prs_mr *held[SLOTS] = {0};
    unsigned seed = 20260501;
    struct prs_mr_cache cache;

    prs_mr_cache_init(&cache);
    for (int i = 0; i < 20000; i++) {
        int slot = rand_r(&seed) % SLOTS;

        if (held[slot]) {
            prs_mr_cache_put(&cache, held[slot], fake_release, NULL);
            held[slot] = NULL;
        } else {
            uint64_t addr = (uint64_t)(rand_r(&seed) % 64) * 2048, bytes = 1 + (uint64_t)(rand_r(&seed) % 20000);

            held[slot] = get(&cache, addr, bytes, 1, false);
            cr_assert(held[slot]->key.start <= addr && held[slot]->key.end >= addr + bytes, "seed 20260501 step %d", i);
        }
    }
    for (int i = 0; i < SLOTS; i++)
        if (held[i])
            prs_mr_cache_put(&cache, held[i], fake_release, NULL);
    cr_assert_eq(prs_mr_cache_fini(&cache, fake_release, NULL), 0);
    cr_assert_eq(registered, released);
}

static int register_wide(void *arg, const struct prs_mr_key *key, struct prs_registration *out)
{
    int r = fake_register(NULL, key, out);

    out->remote_key = *(uint64_t *)arg;
    return r;
}

static void take_key(void *arg, const struct prs_mr *mr)
{
    *(uint64_t *)arg = mr->registered.remote_key;
}

/* A record names 32 bits of its key. A key with another half, or one that is gone, must not be taken for it. */
Test(mr_cache, the_key_of_a_record_finds_the_whole_key)
{
    struct prs_mr_key range = {0x10000, 0x11000, 1, true};
    uint64_t narrow = 0xffff1234, whole = 0x300000007, found = 0;
    const uint64_t others[] = {7, 0x700000003, 0x400000007, 0x300000006, 0x200000006, 3ull << 32};
    struct prs_mr_cache cache;
    struct prs_mr *mr[2];

    prs_mr_cache_init(&cache);
    cr_assert_eq(prs_mr_cache_get(&cache, &range, register_wide, &narrow, &mr[0]), 0);
    cr_assert(!prs_mr_cache_is_wide(&cache) && prs_record_key(narrow) == narrow, "32 bits are all of it");
    cr_assert(prs_mr_cache_use(&cache, 0x10008, 8, (uint32_t)narrow, take_key, &found) && found == narrow);
    range.start += 0x1000;
    range.end += 0x1000;
    cr_assert_eq(prs_mr_cache_get(&cache, &range, register_wide, &whole, &mr[1]), 0);
    cr_assert(prs_mr_cache_is_wide(&cache));
    cr_assert(prs_mr_cache_use(&cache, 0x11008, 8, prs_record_key(whole), take_key, &found) && found == whole);
    cr_assert_not(prs_mr_cache_use(&cache, 0x10008, 8, prs_record_key(whole), take_key, &found), "another region");
    cr_assert_not(prs_mr_cache_use(&cache, 0x11ffc, 8, prs_record_key(whole), take_key, &found), "over its end");
    for (size_t i = 0; i < sizeof(others) / sizeof(*others); i++)
        cr_assert_not(prs_mr_cache_use(&cache, 0x11008, 8, prs_record_key(others[i]), take_key, &found), "%#llx",
                      (unsigned long long)others[i]);
    prs_mr_cache_put(&cache, mr[1], fake_release, NULL);
    cr_assert_not(prs_mr_cache_use(&cache, 0x11008, 8, prs_record_key(whole), take_key, &found), "deregistered");
    prs_mr_cache_put(&cache, mr[0], fake_release, NULL);
    cr_assert_eq(prs_mr_cache_fini(&cache, fake_release, NULL), 0);
}

/* ---- looking up while memory is registered, which may take seconds ---- */

struct lookup {
    struct prs_mr_cache *cache;
    uint64_t addr;
    bool found;
};

static bool look_up(struct lookup *lookup)
{
    uint64_t key;

    lookup->found = prs_mr_cache_use(lookup->cache, lookup->addr, 8, 5, take_key, &key) &&
                    prs_mr_cache_device_key(lookup->cache, lookup->addr, 8, &key) && key == 5;
    return lookup->found;
}

static int look_up_and_register(void *arg, const struct prs_mr_key *key, struct prs_registration *out)
{
    uint64_t remote_key = 6;

    look_up(arg);
    return register_wide(&remote_key, key, out);
}

static int look_up_and_release(void *arg, struct prs_registration *mr)
{
    look_up(arg);
    return fake_release(NULL, mr);
}

Test(mr_cache, a_signal_finds_its_word_while_other_memory_is_registered_or_released, .timeout = 60)
{
    struct prs_mr_key word = prs_mr_key_make(0x10000, 0x1000, 2, true), other = prs_mr_key_make(0x20000, 1, 2, true);
    struct prs_mr_cache cache;
    struct lookup lookup = {.cache = &cache, .addr = 0x10008};
    struct prs_mr *mr, *second;
    uint64_t five = 5;

    prs_mr_cache_init(&cache);
    cr_assert_eq(prs_mr_cache_get(&cache, &word, register_wide, &five, &mr), 0);
    cr_assert_eq(prs_mr_cache_get(&cache, &other, look_up_and_register, &lookup, &second), 0);
    cr_assert(lookup.found, "while another is registered");
    prs_mr_cache_put(&cache, second, look_up_and_release, &lookup);
    cr_assert(lookup.found, "while another is released");
    prs_mr_cache_put(&cache, mr, look_up_and_release, &lookup);
    cr_assert_not(lookup.found, "what is being released is found");
    cr_assert_eq(prs_mr_cache_fini(&cache, fake_release, NULL), 0);
}

/* Compares lookups with a search of all registrations. These overlap and contain each other, and some are released. */
Test(mr_cache, a_lookup_finds_what_a_search_of_all_finds)
{
    enum { MOST = 300, PAGES = 200 };
    struct prs_mr *mr[MOST] = {0};
    unsigned seed = 20261127;
    struct prs_mr_cache cache;

    prs_mr_cache_init(&cache);
    for (int step = 0; step < 20000; step++) {
        uint64_t addr = (uint64_t)(rand_r(&seed) % PAGES) << 12, key = 1 + (uint64_t)(rand_r(&seed) % 4), found = 0;
        int i = rand_r(&seed) % MOST;
        bool there = false;

        if (mr[i]) {
            prs_mr_cache_put(&cache, mr[i], fake_release, NULL);
            mr[i] = NULL;
        } else {
            struct prs_mr_key range = {addr, addr + ((1 + (uint64_t)(rand_r(&seed) % 20)) << 12), 1 + i % 2, i % 3};

            cr_assert_eq(prs_mr_cache_get(&cache, &range, register_wide, &key, &mr[i]), 0);
            cr_assert(mr[i]->key.start <= range.start && mr[i]->key.end >= range.end);
        }
        addr = (uint64_t)(rand_r(&seed) % (PAGES << 12));
        for (int k = 0; k < MOST; k++)
            there |=
                mr[k] && mr[k]->key.start <= addr && mr[k]->key.end >= addr + 8 && mr[k]->registered.remote_key == key;
        cr_assert_eq(prs_mr_cache_use(&cache, addr, 8, (uint32_t)key, take_key, &found), there, "seed %d step %d",
                     20261127, step);
        cr_assert(!there || found == key);
    }
    for (int i = 0; i < MOST; i++)
        if (mr[i])
            prs_mr_cache_put(&cache, mr[i], fake_release, NULL);
    cr_assert_eq(prs_mr_cache_fini(&cache, fake_release, NULL), 0);
}

static uint64_t lookup_ns(struct prs_mr_cache *cache, uint64_t addr)
{
    enum { TIMES = 2000 };
    struct timespec begin, end;
    uint64_t key;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &begin);
    for (int i = 0; i < TIMES; i++)
        cr_assert(prs_mr_cache_use(cache, addr, 8, 5, take_key, &key));
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &end);
    return ((uint64_t)(end.tv_sec - begin.tv_sec) * 1000000000 + (uint64_t)end.tv_nsec - (uint64_t)begin.tv_nsec) /
           TIMES;
}

/* It grew from 10 ns to 59 us with 16384 registrations when all were looked at. */
Test(mr_cache, a_lookup_takes_about_as_long_among_many_registrations)
{
    enum { MANY = 16384, STEP = 0x10000 };
    static struct prs_mr *mr[MANY];
    struct prs_mr_cache cache;
    uint64_t five = 5, few_ns = 0, many_ns;

    prs_mr_cache_init(&cache);
    for (uint64_t i = 0; i < MANY; i++) {
        struct prs_mr_key key = prs_mr_key_make(0x100000 + i * STEP, 4096, 2, true);

        cr_assert_eq(prs_mr_cache_get(&cache, &key, register_wide, &five, &mr[i]), 0);
        if (i == 15)
            few_ns = lookup_ns(&cache, 0x100000 + 15 * STEP);
    }
    many_ns = lookup_ns(&cache, 0x100000 + (MANY - 1) * STEP);
    cr_assert_lt(many_ns, 30 * few_ns + 1000, "%llu ns among 16, %llu ns among 16384", (unsigned long long)few_ns,
                 (unsigned long long)many_ns);
    for (int i = 0; i < MANY; i++)
        prs_mr_cache_put(&cache, mr[MANY - 1 - i], fake_release, NULL);
    cr_assert_eq(prs_mr_cache_fini(&cache, fake_release, NULL), 0);
}

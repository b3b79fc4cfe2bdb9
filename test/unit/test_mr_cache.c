/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <errno.h>
#include <stdlib.h>

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
    struct prs_mr *a, *b, *c;

    prs_mr_cache_init(&cache);
    a = get(&cache, 0x10010, 100, 1, false);
    b = get(&cache, 0x10800, 8, 1, false);
    cr_assert(a == b && registered == 1, "two buffers of one page share it");
    c = get(&cache, 0x10ff0, 0x20, 1, false);
    cr_assert(c != a && registered == 2, "a buffer over two pages gets its own: never merged partially");
    cr_assert(a->key.start == 0x10000 && a->key.end == 0x11000 && c->key.end == 0x12000);
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
    struct prs_mr_key range = prs_mr_key_make(0x10000, 0x1000, 1, true);
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

/* SPDX-License-Identifier: Apache-2.0 */
/* The sender polls records while a NIC writes them. It must never accept half a record. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "plugin/cts.h"

static struct cts_record make(uint64_t sequence, uint64_t addr, uint64_t size)
{
    struct cts_record record;
    struct prs_keys keys = {{0}};
    struct cts_keys words;

    for (uint64_t i = 0; i < CTS_KEY_WORDS; i++)
        keys.rkey[i] = (addr >> 8) + (i << 40) + i;
    cr_assert_eq(cts_keys_make(&words, &keys, CTS_KEY_WORDS), 0);
    cts_write(&record, addr, size, &words, cts_label(1, sequence, 0, 1), sequence);
    cr_assert(record.tag == 1 && record.id == sequence % PRS_NOTIFY_IDS && record.index == 0 && record.count == 1);
    return record;
}

Test(cts, a_sealed_record_arrives_under_its_own_number_only)
{
    struct cts_record record = make(1000, 0x7f0000001000, 4096);

    cr_assert(cts_arrived(&record, 1000));
    cr_assert_not(cts_arrived(&record, 1000 + CTS_RING), "the lap before");
    cr_assert_not(cts_arrived(&record, 1000 - CTS_RING), "the lap after");
}

Test(cts, zeroed_memory_is_no_record)
{
    struct cts_record record;

    memset(&record, 0, sizeof(record));
    for (uint64_t sequence = 1; sequence < 100000; sequence++)
        cr_assert_not(cts_arrived(&record, sequence), "sequence %llu", (unsigned long long)sequence);
}

/* Every choice of words that are still old, for pairs of records as a ring of equal buffers has them. */
Test(cts, no_mixture_of_two_laps_is_a_record)
{
    unsigned seed = (unsigned)time(NULL);
    int taken = 0;

    srand(seed);
    for (int pair = 0; pair < 2000; pair++) {
        uint64_t sequence = 1 + (uint64_t)rand();
        uint64_t addr = 0x7f0000000000 + ((uint64_t)rand() << 12);
        struct cts_record old = make(sequence, addr, 1 << 19);
        struct cts_record new = make(sequence + CTS_RING, addr + (pair % 2 ? 0 : (uint64_t)rand() % 64 << 12), 1 << 19);

        for (int mask = 1; mask < 256; mask++) {
            uint64_t mixed[8];

            for (int word = 0; word < 8; word++)
                memcpy(&mixed[word], (uint8_t *)(mask & 1 << word ? &old : &new) + word * 8, 8);
            if (memcmp(mixed, &new, sizeof(new)) != 0)
                taken += cts_arrived((const struct cts_record *)mixed, sequence + CTS_RING);
        }
    }
    cr_assert_eq(taken, 0, "%d torn records were accepted; seed %u", taken, seed);
}

/* Of up to four rails all 64 bits; of more, which only v12 of NCCL's table merges, 32. */
Test(cts, a_record_carries_the_keys_of_all_rails)
{
    for (int rails = 1; rails <= PRS_MAX_RAILS; rails++) {
        bool shared = rails > CTS_KEY_WORDS;
        struct prs_keys keys = {{0}}, read = {{0}};
        struct cts_record record;
        struct cts_keys words = {{0}};

        for (int i = 0; i < rails; i++)
            keys.rkey[i] = (shared ? 0x80000010ull : 0x8000001000000020ull) + (uint64_t)i;
        cr_assert_eq(cts_keys_make(&words, &keys, rails), 0);
        cts_write(&record, 4096, 64, &words, cts_label(9, 77, 5, 8), 77);
        cr_assert(cts_arrived(&record, 77) && record.index == 5 && record.count == 8 && record.shared == shared);
        cts_keys_read(&record, &read);
        cr_assert_eq(memcmp(&read, &keys, sizeof(keys)), 0, "%d rails", rails);
        for (int i = 0; i < rails; i++) {
            struct prs_keys wide = keys;

            wide.rkey[i] |= 1ull << 40;
            cr_assert_eq(cts_keys_make(&words, &wide, rails), shared ? wide.rkey[i] : 0, "rail %d of %d", i, rails);
        }
    }
}

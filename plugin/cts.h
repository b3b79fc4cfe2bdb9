/* SPDX-License-Identifier: Apache-2.0 */
/* Clear-to-send records. A receiver describes each buffer in a record, which its NIC writes into a ring in the sender's
 * memory. The sender polls this clear-to-send ring.
 *
 * The sender may read a record while the NIC writes it. The last word is therefore a sum over the other words and the
 * record's sequence number: a record that is half old and half new, or one lap old, has a wrong sum. */
#ifndef PERSEUS_PLUGIN_CTS_H
#define PERSEUS_PLUGIN_CTS_H

#include <assert.h>
#include <stdbool.h>
#include <string.h>

#include "transport/util/compiler.h"
#include <perseus/perseus.h>

enum {
    /* Entries that may wait for data. Half of the ids, so that one is reused only after its notification. */
    CTS_RING = PRS_NOTIFY_IDS / 2,
    CTS_MAX_ENTRIES = 8, /* entries of one receive */
    CTS_KEY_WORDS = 4,
};

struct cts_record {
    uint64_t addr;
    uint64_t size;               /* capacity */
    uint64_t key[CTS_KEY_WORDS]; /* of the buffer, in the order of the receiver's rails */
    uint32_t tag;
    uint16_t id;        /* of the notification: the sequence number modulo PRS_NOTIFY_IDS */
    uint8_t index : 4;  /* of this entry in its receive */
    uint8_t shared : 4; /* 1: a word has the keys of two rails */
    uint8_t count;      /* entries of that receive */
    uint64_t check;     /* cts_check() */
};
static_assert(sizeof(struct cts_record) == 64, "one record is one cache line and one inline write");
static_assert(offsetof(struct cts_record, tag) == 48 && offsetof(struct cts_record, id) == 52 &&
                  offsetof(struct cts_record, count) == 55 && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "cts_label() makes these at once");
static_assert(offsetof(struct cts_record, check) == 56, "the check word covers all words before it");
static_assert(PRS_MAX_RAILS == 2 * CTS_KEY_WORDS, "two keys at most share a word");
/* The members as 8-byte words. Without may_alias the compiler may compute the sum before it stores them. */
typedef uint64_t __attribute__((may_alias)) cts_word;
static_assert((CTS_RING & (CTS_RING - 1)) == 0, "slots are sequence numbers, masked");

/* The keys of a registration as all its records have them. */
struct cts_keys {
    uint64_t word[CTS_KEY_WORDS];
    uint64_t label; /* their part of cts_label() */
    uint64_t check; /* cts_check_keys() */
};

/* The part of the check that covers the keys.
 *
 * The multipliers are odd: one changed word always changes the sum, and several changed words leave it the same with
 * probability 2^-64. They fit into 31 bits, so that each is an immediate operand. */
static inline uint64_t cts_check_keys(const uint64_t *word)
{
    return word[0] * 0x4cf5ad43u + word[1] * 0x2745937fu + word[2] * 0x38b34ae5u + word[3] * 0x1b873593u;
}

/* Zeroed memory never has the right sum, since sequence numbers start at 1. */
static inline uint64_t cts_check(uint64_t addr, uint64_t size, uint64_t keys_check, uint64_t label, uint64_t sequence)
{
    return sequence * 0x5bd1e995u + addr * 0x2c1b3c6du + size * 0x297a2d39u + label * 0x7feb352du + keys_check;
}

/* Receiver, for each registration. A word has room for a key of 64 bits. With more rails than words, the keys of rails
 * i and i + CTS_KEY_WORDS share a word, and must have 32 bits. Return a key that has more, or 0. */
static inline uint64_t cts_keys_make(struct cts_keys *out, const struct prs_keys *keys, int rails)
{
    bool shared = rails > CTS_KEY_WORDS;

    for (int i = 0; i < CTS_KEY_WORDS; i++) {
        uint64_t low = keys->rkey[i], high = shared ? keys->rkey[i + CTS_KEY_WORDS] : 0;

        if (shared && (low | high) > UINT32_MAX)
            return low > UINT32_MAX ? low : high;
        out->word[i] = low | high << 32;
    }
    out->label = (uint64_t)shared << 52;
    out->check = cts_check_keys(out->word);
    return 0;
}

/* Sender. Only where words are shared it writes the second half of out. */
static inline void cts_keys_read(const struct cts_record *record, struct prs_keys *out)
{
    memcpy(out->rkey, record->key, sizeof(record->key));
    if (likely(!record->shared))
        return;
    for (int i = 0; i < CTS_KEY_WORDS; i++) {
        out->rkey[i + CTS_KEY_WORDS] = out->rkey[i] >> 32;
        out->rkey[i] = (uint32_t)out->rkey[i];
    }
}

/* The word that holds tag, id, index and count. It is stored at once: after four narrow stores, reading the word for
 * the sum would stall. */
static inline uint64_t cts_label(uint32_t tag, uint64_t sequence, uint32_t index, uint32_t count)
{
    return tag | (sequence % PRS_NOTIFY_IDS) << 32 | (uint64_t)index << 48 | (uint64_t)count << 56;
}

/* Receiver: fill it in. label: cts_label(). */
static inline void cts_write(struct cts_record *record, uint64_t addr, uint64_t size, const struct cts_keys *keys,
                             uint64_t label, uint64_t sequence)
{
    label |= keys->label;
    record->addr = addr;
    record->size = size;
    memcpy(record->key, keys->word, sizeof(record->key));
    *(cts_word *)&record->tag = label;
    record->check = cts_check(addr, size, keys->check, label, sequence);
}

/* Sender: whether the whole record with this sequence number has arrived. Words that the caller reads afterwards are
 * those that were summed: a later read of a location never returns an older value, and the receiver overwrites a slot
 * only after the slot's message was sent. */
static inline bool cts_arrived(const struct cts_record *record, uint64_t sequence)
{
    /* [cts-poll] For the compiler only: each call reads memory again. The barrier has no partner: the words need no
     * order, since the sum is right only when all of them have arrived. */
    __asm__ volatile("" ::: "memory");
    if (record->id != sequence % PRS_NOTIFY_IDS)
        return false; /* the usual case: the slot still holds the record of the previous lap */
    return record->check == cts_check(record->addr, record->size, cts_check_keys(record->key),
                                      *(const cts_word *)&record->tag, sequence) &&
           record->count <= CTS_MAX_ENTRIES; /* even if a wrong record has the right sum by chance */
}

/* Allocate CTS_RING zeroed records in strict memory. They have pages of their own, since a fork could otherwise move
 * what the NIC writes. Return 0 or -errno, logged. */
int cts_ring_open(struct prs_fabric *fabric, const struct prs_rail_set *rails, struct cts_record **ring,
                  struct prs_region **region);
/* Either may be NULL. */
void cts_ring_close(struct cts_record *ring, struct prs_region *region);

#endif

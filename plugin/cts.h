/* SPDX-License-Identifier: Apache-2.0 */
/* Clear-to-send records: what a receiver tells a sender about one buffer, written by the receiver's NIC into a ring in
 * the sender's memory and polled there.
 *
 * The sender looks at a record while the NIC may be writing it, so the last word is a sum over the others and over the
 * record's sequence number: a record that is half old and half new, or a lap old, has a wrong sum and is not there yet.
 */
#ifndef PERSEUS_PLUGIN_CTS_H
#define PERSEUS_PLUGIN_CTS_H

#include <assert.h>

#include <perseus/perseus.h>

enum {
    CTS_RING =
        PRS_NOTIFY_IDS / 2, /* entries that may be out; so an id is reused only when its notification was taken */
    CTS_GROUP_MAX = 8,      /* entries of one receive */
};

struct cts_record {
    uint64_t addr;
    uint64_t size;        /* capacity */
    struct prs_keys keys; /* of the buffer, in the order of the receiver's rails */
    uint32_t tag;
    uint16_t id;    /* to notify: the sequence number modulo PRS_NOTIFY_IDS */
    uint8_t index;  /* of this entry in its receive */
    uint8_t count;  /* entries of that receive */
    uint64_t check; /* cts_check() */
};
static_assert(sizeof(struct cts_record) == 64, "one record is one cache line and one inline write");
static_assert(offsetof(struct cts_record, tag) == 48 && offsetof(struct cts_record, id) == 52 &&
                  offsetof(struct cts_record, index) == 54 && offsetof(struct cts_record, count) == 55 &&
                  __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "cts_label() makes these four at once");
static_assert(offsetof(struct cts_record, check) == 56, "the check word covers all words before it");
static_assert(PRS_MAX_RAILS == 8, "the keys take 32 bytes");
/* The members as 8-byte words. may_alias: else the compiler may sum before it stores them. */
typedef uint64_t __attribute__((may_alias)) cts_word;
static_assert((CTS_RING & (CTS_RING - 1)) == 0, "slots are sequence numbers, masked");

/* The keys' share of the check, which a receiver computes once a registration. Odd multipliers: one changed word
 * always changes the sum, several changed words keep it with probability 2^-64. They fit 31 bits so that each is an
 * immediate operand. */
static inline uint64_t cts_check_keys(const struct prs_keys *keys)
{
    const cts_word *word = (const cts_word *)keys;

    return word[0] * 0x4cf5ad43u + word[1] * 0x2745937fu + word[2] * 0x38b34ae5u + word[3] * 0x1b873593u;
}

/* Zeroed memory never passes, since sequence numbers start at 1. */
static inline uint64_t cts_check(uint64_t addr, uint64_t size, uint64_t keys_check, uint64_t label, uint64_t sequence)
{
    return sequence * 0x5bd1e995u + addr * 0x2c1b3c6du + size * 0x297a2d39u + label * 0x7feb352du + keys_check;
}

/* The word of tag, id, index and count, made in a register: four narrow stores would have to be read back together. */
static inline uint64_t cts_label(uint32_t tag, uint64_t sequence, uint32_t index, uint32_t count)
{
    return tag | (sequence % PRS_NOTIFY_IDS) << 32 | (uint64_t)index << 48 | (uint64_t)count << 56;
}

/* Receiver: fill in all but the keys, whose check is given. */
static inline void cts_write(struct cts_record *record, uint64_t addr, uint64_t size, uint64_t label,
                             uint64_t keys_check, uint64_t sequence)
{
    record->addr = addr;
    record->size = size;
    *(cts_word *)&record->tag = label;
    record->check = cts_check(addr, size, keys_check, label, sequence);
}

/* Sender: whether the record with this sequence number is wholly here. A word that is read again later cannot differ
 * from what was summed: one location's reads never go back in time, and a slot is written anew only after its message
 * was sent. */
static inline bool cts_arrived(const struct cts_record *record, uint64_t sequence)
{
    /* C1: for the compiler only: read memory anew in each call. No order between the words is needed, since the sum
     * holds only when all are here; so the NIC's write of the record needs no partner. */
    __asm__ volatile("" ::: "memory");
    if (record->id != sequence % PRS_NOTIFY_IDS)
        return false; /* mostly so: the record of the lap before, asked for in vain */
    return record->check == cts_check(record->addr, record->size, cts_check_keys(&record->keys),
                                      *(const cts_word *)&record->tag, sequence) &&
           record->count <= CTS_GROUP_MAX; /* a sum that fits by chance must not lead astray */
}

/* CTS_RING zeroed records in strict memory, on pages of their own so that a fork does not move what the NIC writes.
 * Return 0 or -errno, logged. */
int cts_ring_open(struct prs_fabric *fabric, const struct prs_rail_set *rails, struct cts_record **ring,
                  struct prs_region **region);
/* NULLs are allowed. */
void cts_ring_close(struct cts_record *ring, struct prs_region *region);

#endif

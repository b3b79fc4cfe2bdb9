/* SPDX-License-Identifier: Apache-2.0 */
/* The policy counted. Every put of a group carries a tag in its immediate: the name of the group's open interval. The
 * signal closes the interval. It travels as a record that says how many arrivals the tag must have, and the receiver
 * raises it when it has counted that many. So order needs no queue, no fence and no wait at the sender. Pure.
 *
 *   sender    prs_tally     tags of open intervals; numbers and credits of records
 *   receiver  prs_counts    arrivals by tag; records in the order of their numbers
 *
 * A record is raised when all arrivals of its tag are here, all records with lower numbers are here, and no earlier
 * record of its group slot (for a barrier: of any slot) still waits. */
#ifndef TRANSPORT_TALLY_H
#define TRANSPORT_TALLY_H

#include <assert.h>
#include <stdbool.h>
#include <stdint.h>

enum {
    PRS_RECORDS = 512,       /* slots of the receiver's record ring; a slot number fits the tag field of an immediate */
    PRS_TAGS = 512,          /* tag 0 means none; each tag in use waits for a record, so more tags would be of no use */
    PRS_RECORD_CREDIT = 256, /* raised records after which the receiver returns credits */
    PRS_TALLY_SLOTS = 32,    /* group slots: as many as the order engine has */
};

enum prs_record_kind {
    PRS_RECORD_CLOSE, /* raises nothing */
    PRS_RECORD_SET,
    PRS_RECORD_ADD,
    PRS_RECORD_ASK, /* a barrier that raises nothing: the receiver returns credits at once when it is reached */
};

/* A record in the receiver's ring, in slot number % PRS_RECORDS. */
struct prs_record {
    uint64_t addr;
    uint64_t value;
    uint32_t key;      /* prs_record_key() of addr's key, on the rail of path 0 at the receiver */
    uint32_t expected; /* arrivals of the tag */
    uint32_t number;
    uint16_t tag;     /* 0: it waits for no arrivals */
    uint8_t slot;     /* of the group */
    uint8_t kind : 4; /* enum prs_record_kind */
    uint8_t barrier : 4;
};
static_assert(sizeof(struct prs_record) == 32, "part of the wire format");

/* The key of a record's word. With all 64 bits the record would not fit the inline limit of EFA. A key of 32 bits is
 * not changed. Only the receiver reads the short key: where keys may be longer, it looks up the whole key of its own
 * memory. The odd factor makes keys differ that consist of a number and a generation. */
static inline uint32_t prs_record_key(uint64_t key)
{
    return (uint32_t)key ^ (uint32_t)(key >> 32) * 0x9e3779b1u;
}

struct prs_interval { /* of one group slot */
    uint32_t count;   /* arrivals that puts have announced */
    uint16_t tag;     /* 0: closed */
};

struct prs_tally {
    struct prs_interval interval[PRS_TALLY_SLOTS];
    uint32_t next_number;
    uint32_t credited;           /* the receiver has raised the records below this number */
    uint32_t asked;              /* number of the last PRS_RECORD_ASK, plus 1 */
    const uint64_t *credit_word; /* here the receiver writes how many records it has raised */
    uint32_t fresh_tag;          /* this tag and all above it were never used */
    uint32_t free_count;
    /* Entries are written before they are read, so they need no initial value. */
    uint16_t closed_by[PRS_RECORDS]; /* the tag that each record closed; free again when its credit comes */
    uint16_t free_tag[PRS_TAGS];
};

/* A tally that never has room or a tag. All peers that send no signals share it, since nothing writes to it. */
extern struct prs_tally prs_tally_full;

void prs_tally_init(struct prs_tally *tally, const uint64_t *credit_word);
/* Announce more arrivals for a group slot. Return the tag that they must name, or 0: none is free now. */
uint16_t prs_tally_count(struct prs_tally *tally, uint32_t slot, uint32_t arrivals);
/* Has the receiver room for this many more records? Reads the credit word only when there seems to be none. */
bool prs_tally_room(struct prs_tally *tally, uint32_t records);
/* Number the record and let it close the interval of the slot. The receiver must have room. */
void prs_tally_close(struct prs_tally *tally, uint32_t slot, struct prs_record *record);
/* Is the last record a PRS_RECORD_ASK? */
bool prs_tally_asked(const struct prs_tally *tally);
/* Has the receiver answered it, having raised all records up to it? */
bool prs_tally_answered(struct prs_tally *tally);

enum prs_slot_state { PRS_SLOT_EMPTY, PRS_SLOT_WAITS, PRS_SLOT_RAISED };

struct prs_counts {
    uint32_t upto;    /* all records below this number are here */
    uint32_t raised;  /* all records below this number are raised */
    uint32_t waiting; /* records here that are not raised */
    /* enum prs_slot_state, by slot. A raised slot becomes empty when all records before it are raised */
    uint8_t state[PRS_RECORDS];
    uint32_t arrived[PRS_TAGS];
    struct prs_record record[PRS_RECORDS]; /* by slot; the entry of an empty slot is undefined */
};

/* Start with no records and no arrivals. */
void prs_counts_init(struct prs_counts *counts);
/* Count arrivals of a tag. Return 0 or -EPROTO: no such tag. */
int prs_counts_arrive(struct prs_counts *counts, uint32_t tag, uint32_t arrivals);
/* Take the record in a slot of the ring. Return 0 or -EPROTO: no sender of this version writes such a record. */
int prs_counts_record(struct prs_counts *counts, uint32_t slot, const struct prs_record *record);
/* *out becomes the next record that may be raised, or NULL. Return 0, or -EPROTO: a tag has more arrivals than
 * expected. */
int prs_counts_next(const struct prs_counts *counts, const struct prs_record **out);
/* Note that the record has been raised. */
void prs_counts_raised(struct prs_counts *counts, const struct prs_record *record);

#endif

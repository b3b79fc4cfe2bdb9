/* SPDX-License-Identifier: Apache-2.0 */
/* The counted policy: every put of a group names the group's open interval, its tag, in the immediate; the signal
 * travels as a record that says how many must have come; the receiver counts, and raises the signal when they have. So
 * order needs no queue, no fence and no wait at the sender. Pure.
 *
 *   sender    prs_tally     tags of open intervals; numbers and credits of records
 *   receiver  prs_counts    arrivals by tag; records in order of their numbers
 *
 * A record is raised when its tag's arrivals are complete, all records with lower numbers have come, and no earlier one
 * of the same group slot (for a barrier: no earlier one at all) is still waiting. */
#ifndef TRANSPORT_TALLY_H
#define TRANSPORT_TALLY_H

#include <assert.h>
#include <stdbool.h>
#include <stdint.h>

enum {
    PRS_RECORDS = 1024,      /* slots of the receiver's record ring: a slot number fits the tag field */
    PRS_TAGS = 1024,         /* tag 0 is none */
    PRS_RECORD_CREDIT = 256, /* raised records that make the receiver tell the sender */
    PRS_TALLY_SLOTS = 32,    /* group slots: as many as the order engine has */
};

enum prs_record_kind {
    PRS_RECORD_CLOSE,
    PRS_RECORD_SET,
    PRS_RECORD_ADD,
    PRS_RECORD_ASK, /* a barrier that raises nothing: the receiver tells at once when all before it is raised */
};

/* As written into the receiver's ring, slot number % PRS_RECORDS. */
struct prs_record {
    uint64_t addr;
    uint64_t value;
    uint32_t key;      /* of addr, on the rail of path 0 at the receiver */
    uint32_t expected; /* arrivals of tag */
    uint32_t number;
    uint16_t tag;     /* 0: waits for no arrivals */
    uint8_t slot;     /* of the group */
    uint8_t kind : 4; /* enum prs_record_kind */
    uint8_t barrier : 4;
};
static_assert(sizeof(struct prs_record) == 32, "part of the wire format");

struct prs_interval { /* of one group slot */
    uint32_t count;   /* arrivals announced */
    uint16_t tag;     /* 0: closed */
};

struct prs_tally {
    struct prs_interval interval[PRS_TALLY_SLOTS];
    uint32_t next_number;
    uint32_t credited;               /* numbers below it are raised at the receiver */
    uint32_t asked;                  /* number of the last ask, plus 1 */
    const uint64_t *credit_word;     /* the receiver writes the number of raised records there */
    uint16_t closed_by[PRS_RECORDS]; /* tag that the record closed; free again with its credit */
    uint16_t free_tag[PRS_TAGS];
    uint32_t free_count;
};

void prs_tally_init(struct prs_tally *tally, const uint64_t *credit_word);
/* Count `arrivals` more for the slot. Return the tag, or 0: none is free now. */
uint16_t prs_tally_count(struct prs_tally *tally, uint32_t slot, uint32_t arrivals);
/* Room for so many records? Looks at the credit word when there seems to be none. */
bool prs_tally_room(struct prs_tally *tally, uint32_t records);
/* Number the record and close the slot's interval with it; there must be room. */
void prs_tally_close(struct prs_tally *tally, uint32_t slot, struct prs_record *record);
/* The receiver has been asked, since the last record, how far it is; and has it answered? */
bool prs_tally_asked(const struct prs_tally *tally);
bool prs_tally_answered(struct prs_tally *tally);

struct prs_counts {
    uint32_t arrived[PRS_TAGS];
    uint32_t upto;   /* all records below this number have come */
    uint32_t raised; /* all records below this number are raised */
    uint32_t waiting;
    bool here[PRS_RECORDS];
    bool done[PRS_RECORDS];
    struct prs_record record[PRS_RECORDS];
};

/* Return 0 or -EPROTO. */
int prs_counts_arrive(struct prs_counts *counts, uint32_t tag, uint32_t arrivals);
int prs_counts_record(struct prs_counts *counts, uint32_t slot, const struct prs_record *record);
/* The next record that may be raised; NULL: none. Return -EPROTO when a count has been exceeded. */
int prs_counts_next(const struct prs_counts *counts, const struct prs_record **out);
/* That record has been raised. */
void prs_counts_raised(struct prs_counts *counts, const struct prs_record *record);

#endif

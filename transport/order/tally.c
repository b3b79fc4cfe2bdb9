/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/order/tally.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>

/* ---- sender ---- */

void prs_tally_init(struct prs_tally *tally, const uint64_t *credit_word)
{
    memset(tally, 0, offsetof(struct prs_tally, closed_by));
    tally->credit_word = credit_word;
    tally->fresh_tag = 1;
}

static bool has_free_tag(const struct prs_tally *tally)
{
    return tally->free_count || tally->fresh_tag < PRS_TAGS;
}

static const uint64_t no_credit;
struct prs_tally prs_tally_full = {.next_number = PRS_RECORDS, .credit_word = &no_credit, .fresh_tag = PRS_TAGS};

static uint16_t take_free_tag(struct prs_tally *tally)
{
    return tally->free_count ? tally->free_tag[--tally->free_count] : (uint16_t)tally->fresh_tag++;
}

static void take_credits(struct prs_tally *tally)
{
    /* The peer's NIC writes it as one aligned word. Nothing else is read because of it, so relaxed is enough. */
    uint32_t raised = (uint32_t)__atomic_load_n(tally->credit_word, __ATOMIC_RELAXED);

    /* MUTANT(order) credits for what was never sent are ignored: delete */
    if (raised - tally->credited > tally->next_number - tally->credited)
        return; /* more than was ever sent: ignore it, and the tags stay taken */
    for (; tally->credited != raised; tally->credited++) {
        uint16_t tag = tally->closed_by[tally->credited % PRS_RECORDS];

        /* MUTANT(order) credits free tags: delete */
        if (tag)
            tally->free_tag[tally->free_count++] = tag;
    }
}

uint16_t prs_tally_count(struct prs_tally *tally, uint32_t slot, uint32_t arrivals)
{
    struct prs_interval *interval = &tally->interval[slot];

    if (!interval->tag) {
        if (!has_free_tag(tally))
            take_credits(tally);
        if (!has_free_tag(tally))
            return 0;
        interval->tag = take_free_tag(tally);
        interval->count = 0;
    }
    interval->count += arrivals;
    return interval->tag;
}

bool prs_tally_room(struct prs_tally *tally, uint32_t records)
{
    if (tally->next_number - tally->credited + records > PRS_RECORDS)
        take_credits(tally);
    /* MUTANT(order) records need room at the receiver:
     * s/tally->next_number - tally->credited + records <= PRS_RECORDS/true/ */
    return tally->next_number - tally->credited + records <= PRS_RECORDS;
}

void prs_tally_close(struct prs_tally *tally, uint32_t slot, struct prs_record *record)
{
    struct prs_interval *interval = &tally->interval[slot];

    record->number = tally->next_number++;
    record->slot = (uint8_t)slot;
    record->tag = interval->tag;
    record->expected = interval->count;
    tally->closed_by[record->number % PRS_RECORDS] = interval->tag;
    /* MUTANT(order) a signal closes its interval: delete */
    interval->tag = 0;
    interval->count = 0;
    if (record->kind == PRS_RECORD_ASK)
        tally->asked = tally->next_number;
}

bool prs_tally_asked(const struct prs_tally *tally)
{
    return tally->asked == tally->next_number;
}

bool prs_tally_answered(struct prs_tally *tally)
{
    take_credits(tally);
    /* MUTANT(order) an answer is of what was sent before the ask:
     * s/prs_tally_asked(tally) && tally->credited == tally->asked/tally->credited - tally->asked < PRS_RECORDS/ */
    return prs_tally_asked(tally) && tally->credited == tally->asked;
}

/* ---- receiver ---- */

void prs_counts_init(struct prs_counts *counts)
{
    memset(counts, 0, offsetof(struct prs_counts, record));
}

int prs_counts_arrive(struct prs_counts *counts, uint32_t tag, uint32_t arrivals)
{
    if (tag == 0 || tag >= PRS_TAGS)
        return -EPROTO;
    counts->arrived[tag] += arrivals;
    return 0;
}

int prs_counts_record(struct prs_counts *counts, uint32_t slot, const struct prs_record *record)
{
    /* MUTANT(order) a record comes once: s/counts->state[slot] ||// */
    if (slot >= PRS_RECORDS || record->number % PRS_RECORDS != slot || record->number - counts->raised >= PRS_RECORDS ||
        counts->state[slot] || record->tag >= PRS_TAGS || record->slot >= PRS_TALLY_SLOTS ||
        record->kind > PRS_RECORD_ASK || record->addr % sizeof(uint64_t))
        return -EPROTO;
    counts->record[slot] = *record;
    counts->state[slot] = PRS_SLOT_WAITS;
    counts->waiting++;
    /* MUTANT(order) records are taken without gaps:
     * s/counts->state[counts->upto % PRS_RECORDS]/record->number >= counts->upto/ */
    while (counts->upto - counts->raised < PRS_RECORDS && counts->state[counts->upto % PRS_RECORDS])
        counts->upto++;
    return 0;
}

int prs_counts_next(const struct prs_counts *counts, const struct prs_record **out)
{
    uint32_t blocked = 0; /* group slots with an earlier record that waits */

    *out = NULL;
    for (uint32_t number = counts->raised; number != counts->upto; number++) {
        const struct prs_record *record = &counts->record[number % PRS_RECORDS];
        uint32_t arrived = record->tag ? counts->arrived[record->tag] : 0;

        if (counts->state[number % PRS_RECORDS] == PRS_SLOT_RAISED)
            continue;
        /* MUTANT(order) a count is never exceeded: delete */
        if (record->tag && arrived > record->expected)
            return -EPROTO;
        /* MUTANT(order) a barrier waits for all earlier records: s/record->barrier ? blocked :// */
        /* MUTANT(order) a record waits for earlier ones of its group: s/blocked >> record->slot & 1/0/ */
        /* MUTANT(order) a record waits for its arrivals: s/== record->expected/|| true/ */
        if ((!record->tag || arrived == record->expected) &&
            !(record->barrier ? blocked : blocked >> record->slot & 1)) {
            *out = record;
            return 0;
        }
        blocked |= 1u << record->slot;
    }
    return 0;
}

void prs_counts_raised(struct prs_counts *counts, const struct prs_record *record)
{
    /* MUTANT(order) a raised tag counts from nothing: s/counts/if (record->number % 2) counts/ */
    counts->arrived[record->tag] = 0; /* nothing counts for tag 0 */
    /* MUTANT(order) a record is raised once:
     * s/PRS_SLOT_RAISED/record->kind != PRS_RECORD_SET ? PRS_SLOT_RAISED : PRS_SLOT_WAITS/ */
    counts->state[record->number % PRS_RECORDS] = PRS_SLOT_RAISED;
    counts->waiting--;
    for (; counts->raised != counts->upto && counts->state[counts->raised % PRS_RECORDS] == PRS_SLOT_RAISED;
         counts->raised++)
        counts->state[counts->raised % PRS_RECORDS] = PRS_SLOT_EMPTY;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* The policy counted: which records and arrivals the receiver accepts from the network. */
#include <criterion/criterion.h>
#include <errno.h>

#include "transport/order/tally.h"

static struct prs_counts counts;

static struct prs_record record_of(uint32_t number, uint16_t tag, uint32_t expected)
{
    return (struct prs_record){.number = number, .tag = tag, .expected = expected, .kind = PRS_RECORD_SET};
}

static int take(uint32_t number, uint16_t tag, uint32_t expected)
{
    struct prs_record record = record_of(number, tag, expected);

    return prs_counts_record(&counts, number % PRS_RECORDS, &record);
}

/* Raise the next record that may be raised. Return its number, or -1: none. */
static int raise_next(void)
{
    const struct prs_record *record;

    cr_assert_eq(prs_counts_next(&counts, &record), 0);
    if (!record)
        return -1;
    prs_counts_raised(&counts, record);
    return (int)record->number;
}

Test(tally, a_record_that_cannot_be_is_refused)
{
    struct prs_record record = record_of(1, 0, 0);

    cr_assert_eq(prs_counts_record(&counts, 0, &record), -EPROTO, "another slot's number");
    cr_assert_eq(prs_counts_record(&counts, PRS_RECORDS, &record), -EPROTO, "beyond the ring");
    cr_assert_eq(take(PRS_RECORDS, 0, 0), -EPROTO, "a lap ahead");
    cr_assert_eq(take(0, PRS_TAGS, 0), -EPROTO, "no such tag");
    record = record_of(0, 0, 0);
    record.slot = PRS_TALLY_SLOTS;
    cr_assert_eq(prs_counts_record(&counts, 0, &record), -EPROTO, "no such group slot");
    record = record_of(0, 0, 0);
    record.addr = 4;
    cr_assert_eq(prs_counts_record(&counts, 0, &record), -EPROTO, "an unaligned word");
    cr_assert_eq(take(0, 0, 0), 0);
    cr_assert_eq(take(0, 0, 0), -EPROTO, "twice");
    cr_assert_eq(prs_counts_arrive(&counts, 0, 1), -EPROTO);
    cr_assert_eq(prs_counts_arrive(&counts, PRS_TAGS, 1), -EPROTO);
}

Test(tally, a_record_is_raised_when_all_arrivals_of_its_tag_have_come)
{
    cr_assert_eq(prs_counts_arrive(&counts, 5, 2), 0);
    cr_assert_eq(take(0, 5, 3), 0);
    cr_assert_eq(raise_next(), -1);
    cr_assert_eq(prs_counts_arrive(&counts, 5, 1), 0);
    cr_assert_eq(raise_next(), 0);
    cr_assert_eq(raise_next(), -1, "once");
}

Test(tally, more_arrivals_than_announced_are_an_error)
{
    const struct prs_record *record;

    cr_assert_eq(take(0, 5, 1), 0);
    cr_assert_eq(prs_counts_arrive(&counts, 5, 2), 0);
    cr_assert_eq(prs_counts_next(&counts, &record), -EPROTO);
}

Test(tally, records_wait_for_those_before_them)
{
    cr_assert_eq(take(1, 0, 0), 0);
    cr_assert_eq(raise_next(), -1, "record 0 has not come");
    cr_assert_eq(take(0, 3, 1), 0);
    cr_assert_eq(raise_next(), -1, "record 0 of the same group slot waits for an arrival");
    cr_assert_eq(prs_counts_arrive(&counts, 3, 1), 0);
    cr_assert_eq(raise_next(), 0);
    cr_assert_eq(raise_next(), 1);
}

/* Both halves, for several laps of numbers and tags: a tag counts from zero again once its record is raised. */
Test(tally, numbers_and_tags_are_used_again)
{
    static struct prs_tally tally;
    static uint64_t credit;

    prs_tally_init(&tally, &credit);
    for (int round = 0; round < 5 * PRS_RECORDS; round++) {
        struct prs_record record = {.kind = PRS_RECORD_ADD};
        uint32_t arrivals = 1 + (uint32_t)round % 3;
        uint16_t tag = prs_tally_count(&tally, 0, arrivals);

        cr_assert_neq(tag, 0, "round %d: no tag is free", round);
        cr_assert(prs_tally_room(&tally, 1), "round %d: no room", round);
        prs_tally_close(&tally, 0, &record);
        cr_assert(record.tag == tag && record.expected == arrivals);
        cr_assert_eq(prs_counts_arrive(&counts, tag, arrivals), 0);
        cr_assert_eq(prs_counts_record(&counts, record.number % PRS_RECORDS, &record), 0);
        cr_assert_eq(raise_next(), round);
        if (round % 100 == 0)
            credit = counts.raised;
    }
}

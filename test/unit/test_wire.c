/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <errno.h>

#include "transport/order/wire.h"
#include "transport/order/arrival.h"

Test(wire, every_possible_immediate_comes_back)
{
    struct prs_imm imm;

    for (uint32_t id = 0; id < PRS_NOTIFY_IDS; id += 31)
        for (uint32_t run = 1; run <= PRS_IMM_MAX_RUN; run++)
            for (uint32_t parts = 1; parts <= (run == 1 ? PRS_IMM_MAX_PARTS : 1); parts++)
                for (uint32_t tag = 0; tag <= PRS_IMM_MAX_TAG; tag += 341) {
                    cr_assert_eq(prs_imm_parse(prs_imm_make(id, run, parts, tag), &imm), 0);
                    cr_assert(!imm.bare && imm.id == id && imm.run == run && imm.parts == parts && imm.tag == tag,
                              "id %u run %u parts %u tag %u", id, run, parts, tag);
                }
}

Test(wire, an_immediate_that_follows_its_bytes_is_told_apart)
{
    struct prs_imm imm;

    for (uint32_t id = 0; id < PRS_NOTIFY_IDS; id += 31)
        for (uint32_t parts = 1; parts <= PRS_IMM_MAX_SIZED_PARTS; parts++)
            for (uint32_t tag = 0; tag <= PRS_IMM_MAX_TAG; tag += 341) {
                cr_assert_eq(prs_imm_parse(prs_imm_make_sized(id, parts, tag), &imm), 0);
                cr_assert(imm.sized && !imm.bare && imm.id == id && imm.run == 1 && imm.parts == parts &&
                              imm.tag == tag && !prs_imm_is_run(prs_imm_make_sized(id, parts, tag)),
                          "id %u parts %u tag %u", id, parts, tag);
            }
    cr_assert_eq(prs_imm_parse(prs_imm_make(0, PRS_IMM_MAX_RUN, 1, 0), &imm), 0);
    cr_assert(!imm.sized && imm.run == PRS_IMM_MAX_RUN);
}

Test(wire, a_bare_immediate_is_told_apart)
{
    struct prs_imm imm;

    cr_assert_eq(prs_imm_parse(prs_imm_make_bare(PRS_BARE_RECORD, 1023), &imm), 0);
    cr_assert(imm.bare && imm.kind == PRS_BARE_RECORD && imm.tag == 1023);
    cr_assert_eq(prs_imm_parse(prs_imm_make_bare(PRS_BARE_COUNT, 1), &imm), 0);
    cr_assert(imm.bare && imm.kind == PRS_BARE_COUNT && imm.tag == 1);
}

Test(wire, an_impossible_immediate_is_refused)
{
    struct prs_imm imm;

    cr_assert_eq(prs_imm_parse(prs_imm_make(0, 2, 2, 0), &imm), -EPROTO, "a run of messages in parts");
    cr_assert_eq(prs_imm_parse(1u << 31 | 3, &imm), -EPROTO, "an unknown kind");
    cr_assert_eq(prs_imm_parse(0xffffffff, &imm), -EPROTO);
}

Test(wire, a_message_is_whole_with_its_last_part_only)
{
    static struct prs_arrivals arrivals;
    struct prs_notice notice;
    struct prs_imm imm;

    prs_imm_parse(prs_imm_make(7, 1, 3, 0), &imm);
    cr_assert_eq(prs_arrivals_add(&arrivals, &imm, 100, &notice), 0);
    cr_assert_eq(prs_arrivals_add(&arrivals, &imm, 0xffffffff, &notice), 0);
    cr_assert_eq(prs_arrivals_add(&arrivals, &imm, 1, &notice), 1);
    cr_assert(notice.first_id == 7 && notice.count == 1 && notice.bytes == 101 + 0xffffffffull);
    cr_assert_eq(prs_arrivals_add(&arrivals, &imm, 1, &notice), 0, "the id may be used again");
}

Test(wire, a_run_names_its_ids_backwards_over_the_end)
{
    static struct prs_arrivals arrivals;
    struct prs_notice notice;
    struct prs_imm imm;

    prs_imm_parse(prs_imm_make(1, 4, 1, 0), &imm);
    cr_assert_eq(prs_arrivals_add(&arrivals, &imm, 8, &notice), 1);
    cr_assert(notice.first_id == 1022 && notice.count == 4 && notice.bytes == 8);
}

Test(wire, parts_that_contradict_each_other_are_refused)
{
    static struct prs_arrivals arrivals;
    struct prs_notice notice;
    struct prs_imm imm;

    prs_imm_parse(prs_imm_make(7, 1, 3, 0), &imm);
    cr_assert_eq(prs_arrivals_add(&arrivals, &imm, 1, &notice), 0);
    prs_imm_parse(prs_imm_make(7, 1, 2, 0), &imm);
    cr_assert_eq(prs_arrivals_add(&arrivals, &imm, 1, &notice), -EPROTO);
    prs_imm_parse(prs_imm_make(7, 1, 1, 0), &imm);
    cr_assert_eq(prs_arrivals_add(&arrivals, &imm, 1, &notice), -EPROTO);
}

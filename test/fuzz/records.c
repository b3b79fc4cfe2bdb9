/* SPDX-License-Identifier: Apache-2.0 */
/* Immediates and signal records, as a peer may send them in any order: what they lead to stays within its tables, and a
 * record is raised once, with its arrivals. */
#include "test/fuzz/fuzz.h"
#include "transport/order/arrival.h"
#include "transport/order/tally.h"
#include "transport/order/wire.h"

struct step {
    uint32_t imm;
    uint32_t bytes;
    struct prs_record record;
};

size_t fuzz_seed(uint32_t n, uint8_t *out, size_t room)
{
    struct step steps[16];

    if (n > 3)
        return 0;
    memset(steps, 0, sizeof(steps));
    for (uint32_t i = 0; i < 16; i++) {
        steps[i].bytes = 4096;
        if (n == 0)
            steps[i].imm = prs_imm_make(i, 1 + i % 3, 1, 0);
        else if (n == 1)
            steps[i].imm = prs_imm_make(i / 4, 1, 4, 0);
        else if (n == 2)
            steps[i].imm = prs_imm_make_bare(i % 2 ? PRS_BARE_RECORD : PRS_BARE_COUNT, i % 2 ? i / 2 : 5);
        else
            steps[i].imm = prs_imm_make_sized(i, 2, 0);
        steps[i].record = (struct prs_record){.addr = 64,
                                              .value = 1,
                                              .expected = 1,
                                              .number = i / 2,
                                              .tag = 5,
                                              .kind = PRS_RECORD_SET,
                                              .slot = (uint8_t)i};
    }
    memcpy(out, steps, sizeof(steps));
    return sizeof(steps);
}

static struct prs_counts counts;
static struct prs_arrivals arrivals;

static void raise_all(void)
{
    const struct prs_record *record;
    uint32_t before = counts.waiting;

    while (prs_counts_next(&counts, &record) == 0 && record) {
        fuzz_require(record >= counts.record && record < counts.record + PRS_RECORDS, "no record of the table");
        fuzz_require(record->kind <= PRS_RECORD_ASK && record->slot < PRS_TALLY_SLOTS, "a record that cannot be");
        fuzz_require(!record->tag || counts.arrived[record->tag] == record->expected, "raised before its arrivals");
        fuzz_accepted++;
        prs_counts_raised(&counts, record);
        fuzz_require(counts.waiting + 1 == before, "%u records wait, and then %u", before, counts.waiting);
        before = counts.waiting;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct fuzz_reader in = {data, bytes};

    memset(&counts, 0, sizeof(counts));
    memset(&arrivals, 0, sizeof(arrivals));
    while (in.left) {
        struct prs_notice notice;
        struct prs_imm imm;
        struct step step;
        int r;

        fuzz_take(&in, &step, sizeof(step));
        if (prs_imm_parse(step.imm, &imm))
            continue;
        if (imm.bare && imm.kind == PRS_BARE_RECORD) {
            (void)prs_counts_record(&counts, imm.tag, &step.record);
        } else if (imm.bare) {
            (void)prs_counts_arrive(&counts, imm.tag, 1);
        } else {
            r = prs_arrivals_add(&arrivals, &imm, step.bytes, &notice);
            fuzz_require(r != 1 ||
                             (notice.first_id < PRS_NOTIFY_IDS && notice.count >= 1 && notice.count <= PRS_IMM_MAX_RUN),
                         "a notice of %u ids from %u on", notice.count, notice.first_id);
        }
        raise_all();
    }
    return 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "test/transport/loss.h"

#include <criterion/criterion.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct loss loss;

void find_loss(void)
{
    int fault;

    must(sscanf(getenv("PERSEUS_TEST_LOSS"), "%d %d %u %u", &loss.side, &fault, &loss.path, &loss.at) == 4, "no row");
    loss.fault = (enum fault)fault;
}

size_t length_of(uint32_t message)
{
    static const size_t lengths[] = {8, 64, 64, 64, 4000, 70000, SLOT_BYTES, 0, 64, 9000};

    return lengths[message % (sizeof(lengths) / sizeof(*lengths))];
}

void progress(struct pair *pair)
{
    must(prs_peer_progress(pair->peer) >= 0, "%s", prs_error_text());
    must(prs_peer_check_remote(pair->peer) == 0, "%s", prs_error_text());
    sched_yield();
}

void must_be_empty(const struct pair *pair, uint32_t slot)
{
    const uint8_t *at = pair->buffer + slot * SLOT_BYTES;

    must(at[0] == EMPTY && !memcmp(at, at + 1, SLOT_BYTES - 1), "slot %u was written late", slot);
}

void run_row_of(const struct loss *row, pair_fn *a, pair_fn *b, bool words_on_device)
{
    struct pair_spec spec = {.rails = {2, 2}, .buffer_bytes = SLOTS * SLOT_BYTES, .words_on_device = words_on_device};
    char text[64];

    if (!pair_rails_fail_over())
        cr_skip_test("these queues cannot replace a lost rail");
    if (words_on_device && !pair_rails_add())
        cr_skip_test("without atomics, only the first rail raises signals in device memory");
    if (row->fault == DEVICE_DEAD && getenv("PERSEUS_PROVIDER"))
        cr_skip_test("a NIC that takes no command: libfabric closes endpoints of such");
    snprintf(text, sizeof(text), "%d %d %u %u", row->side, (int)row->fault, row->path, row->at);
    setenv("PERSEUS_TEST_LOSS", text, 1); /* for the sides, which are processes of their own */
    setenv("NCCL_IB_RESILIENCY_PORT_FAILOVER", "1", 1);
    setenv("NCCL_IB_RESILIENCY_PORT_RECOVERY", "0", 0); /* a row may have set it */
    pair_run(&spec, a, b);
}

void run_row(const struct loss *row, pair_fn *a, pair_fn *b)
{
    run_row_of(row, a, b, false);
}

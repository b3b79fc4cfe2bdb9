/* SPDX-License-Identifier: Apache-2.0 */
/* Drain over several peers: which signals of a proxy wait, for which operations, and how often. */
#include <criterion/criterion.h>
#include <criterion/parameterized.h>

#include "transport/order/order_drain.h"
#include <perseus/perseus.h>

enum { RANKS = 3, GROUPS = 128 };

struct row {
    char commands[16]; /* pairs: a group (lower case: a put; upper case: a signal), then a rank */
    char waits[8];     /* of each command: w: it waits for all before it; .: it goes at once */
};

/* Groups are kept as bits of words. These are the first and last bits of words. */
static uint32_t group_of(char letter)
{
    static const uint32_t groups[] = {0, 63, 64, GROUPS - 1};

    return groups[(letter | 0x20) - 'a'];
}

static int admit(struct prs_order_drain *drain, const char *command, uint64_t position)
{
    uint32_t rank = (uint32_t)(command[1] - '0');

    return command[0] >= 'a' ? prs_order_drain_put(drain, rank, group_of(command[0]))
                             : prs_order_drain_signal(drain, rank, group_of(command[0]), position);
}

/* A signal that waits goes when all before it is complete, and not earlier. */
static void release(struct prs_order_drain *drain, uint64_t position, const char *commands)
{
    cr_assert(drain->waits);
    for (uint64_t completed = 0; completed < position; completed++)
        cr_assert_not(prs_order_drain_release(drain, completed), "%s: command %d went when %d were complete", commands,
                      (int)position, (int)completed);
    cr_assert(prs_order_drain_release(drain, position), "%s: command %d still waits", commands, (int)position);
    cr_assert_not(prs_order_drain_release(drain, position), "%s: command %d went twice", commands, (int)position);
}

static void run(bool enabled, const char *commands, const char *waits)
{
    struct prs_order_drain drain;

    cr_assert_eq(prs_order_drain_init(&drain, enabled, RANKS, GROUPS), 0);
    for (uint64_t position = 0; commands[2 * position]; position++) {
        bool wait = enabled && waits[position] == 'w';

        cr_assert_eq(admit(&drain, &commands[2 * position], position), wait ? PRS_BUSY : 0, "%s: command %d", commands,
                     (int)position);
        if (wait)
            release(&drain, position, commands);
        cr_assert_not(drain.waits);
    }
    prs_order_drain_fini(&drain);
}

static struct row rows[] = {
    {"A1", "."},          /* a signal without puts */
    {"a1A1", ".w"},       /* a signal waits after a put of its group */
    {"a1A1A1", ".w."},    /* signals in a row wait once */
    {"a1A1a1A1", ".w.w"}, /* a put between them: twice */
    {"a1B1", ".."},       /* another group */
    {"a1A2", ".."},       /* the same group at another rank does not wait */
    {"a1a2A1A2", "..ww"}, /* one wait for each group and rank, although the first waited for all ranks */
    {"b1c1C1B1", "..ww"}, {"a0d0D0A0", "..ww"}, {"d2D2D2", ".w."},
};

ParameterizedTestParameters(order_drain, a_signal_waits_for_everything_once_after_puts_of_its_group)
{
    return cr_make_param_array(struct row, rows, sizeof(rows) / sizeof(rows[0]));
}

ParameterizedTest(struct row *row, order_drain, a_signal_waits_for_everything_once_after_puts_of_its_group)
{
    run(true, row->commands, row->waits);
}

Test(order_drain, nothing_waits_under_another_policy)
{
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++)
        run(false, rows[i].commands, rows[i].waits);
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/util/patience.h"

#include <criterion/criterion.h>

enum { LIMIT_MS = 20, LOOK_NS = 1000000, PAUSE_NS = 10000000 };

Test(patience, time_in_which_the_thread_does_not_run_counts_only_in_part)
{
    uint64_t began_ns = prs_clock_ns();
    struct prs_patience patience = prs_patience_begin(LOOK_NS);
    int looks = 0;

    while (!prs_patience_is_over(&patience, LIMIT_MS)) {
        nanosleep(&(struct timespec){0, PAUSE_NS}, NULL);
        looks++;
    }
    cr_assert_geq(looks, LIMIT_MS);
    cr_assert_geq(prs_clock_ns() - began_ns, (uint64_t)LIMIT_MS * PAUSE_NS);
}

Test(patience, a_loop_that_runs_all_the_time_ends_after_the_limit)
{
    uint64_t began_ns = prs_clock_ns(); /* before the wait begins: this thread may lose its core in between */
    struct prs_patience patience = prs_patience_begin(LOOK_NS);

    while (!prs_patience_is_over(&patience, LIMIT_MS))
        ;
    cr_assert_geq(prs_clock_ns() - began_ns, (uint64_t)LIMIT_MS * 1000000);
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Registration of windows when one rank fails or has left. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <time.h>

#include "test/plugin/gin_job.h"

static int bad_window(struct ranks *ranks, void *user)
{
    struct gin_api api;
    const struct plan *plan = user;
    void *handle = NULL, *memory = aligned_alloc(4096, 4096);
    int r = gin_api_open(&api, ranks, RANKS, plan->version, 1);

    if (r)
        return r;
    /* Rank 1 registers memory that is not mapped. */
    CHECK(gin_api_reg(&api, api.rank == 1 ? (void *)0x10000 : memory, 4096, 0, &handle) != NET_SUCCESS && !handle,
          "rank %u: registered, though rank 1 could not", api.rank);
    CHECK(gin_api_reg(&api, memory, 4096, 0, &handle) == NET_SUCCESS, "rank %u: the next one", api.rank);
    CHECK(gin_api_dereg(&api, handle) == NET_SUCCESS, "release");
    CHECK(ranks_barrier(ranks) == 0, "barrier before the end");
    gin_api_close(&api);
    free(memory);
    return 0;
}

Test(gin, when_one_rank_cannot_register_all_ranks_fail, .timeout = 300)
{
    cr_assert_eq(run(bad_window, (struct plan){14, 1}), 0);
}

/* Rank 1 closes its comm while the others register. */
static int leave_early(struct ranks *ranks, void *user)
{
    time_t began = time(NULL);
    const struct plan *plan = user;
    struct gin_api api;
    void *handle = NULL, *memory = aligned_alloc(4096, 4096);
    int r = gin_api_open(&api, ranks, RANKS, plan->version, 1);

    if (r)
        return r;
    if (api.rank != 1)
        CHECK(gin_api_reg(&api, memory, 4096, 0, &handle) != NET_SUCCESS && !handle, "rank %u", api.rank);
    CHECK(time(NULL) - began < 40, "rank %u waited for a rank that had left", api.rank);
    gin_api_close(&api);
    free(memory);
    return 0;
}

Test(gin, a_rank_that_has_left_ends_the_registration_of_the_others, .timeout = 300)
{
    cr_assert_eq(run(leave_early, (struct plan){14, 1}), 0);
}

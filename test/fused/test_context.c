/* SPDX-License-Identifier: Apache-2.0 */
/* Errors where there is no GPU, and for wrong arguments. */
#include <criterion/criterion.h>
#include <errno.h>
#include <string.h>

#include <perseus/attention.h>
#include <perseus/gemm.h>
#include <perseus/moe.h>

Test(context, an_impossible_rank_is_refused)
{
    struct prs_fused_config config = {.rank = 4, .world = 4};
    struct prs_fused *ctx;
    cr_assert_eq(prs_fused_open(&config, &ctx), -EINVAL);
    config.rank = 0, config.world = 65537; /* ranks have 16 bits in a command */
    cr_assert_eq(prs_fused_open(&config, &ctx), -EINVAL);
}

Test(context, several_ranks_need_a_way_to_meet)
{
    struct prs_fused_config config = {.rank = 0, .world = 2};
    struct prs_fused *ctx;
    cr_assert_eq(prs_fused_open(&config, &ctx), -EINVAL);
}

Test(context, without_a_hopper_gpu_opening_says_no_device)
{
    struct prs_fused_config config = {.rank = 0, .world = 1, .device = 4095}; /* no machine has this many devices */
    struct prs_fused *ctx;
    cr_assert_eq(prs_fused_open(&config, &ctx), -ENODEV);
}

Test(context, the_library_says_its_version)
{
    cr_assert_str_eq(prs_fused_version(), PRS_VERSION);
}

Test(context, closing_nothing_does_nothing)
{
    prs_fused_close(NULL);
    prs_gemm_plan_close(NULL);
}

static int give_all_mine(void *user, const void *mine, void *all, size_t bytes)
{
    for (uint32_t rank = 0; rank < *(uint32_t *)user; rank++)
        memcpy((char *)all + rank * bytes, mine, bytes);
    return 0;
}

static int fail_as_mpi_does(void *user, const void *mine, void *all, size_t bytes)
{
    return 5;
}

/* Calls used to return the positive number unchanged, and no caller knows what it means. */
Test(context, an_allgather_that_fails_with_a_positive_number_is_an_error)
{
    struct prs_fused_config config = {.world = 2, .device = 4095, .allgather = fail_as_mpi_does};
    struct prs_fused *ctx;
    cr_assert_eq(prs_fused_open(&config, &ctx), -EIO);
    cr_assert_not_null(strstr(prs_fused_error_text(), "it returned 5"), "%s", prs_fused_error_text());
}

/* A rank without a GPU still takes part in the first allgather, so that the others fail instead of waiting. */
Test(context, a_rank_that_cannot_open_tells_the_others)
{
    uint32_t world = 3;
    struct prs_fused_config config = {
        .rank = 1, .world = world, .device = 4095, .allgather = give_all_mine, .user = &world};
    struct prs_fused *ctx;
    cr_assert_eq(prs_fused_open(&config, &ctx), -ENODEV);
}

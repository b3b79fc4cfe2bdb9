/* SPDX-License-Identifier: Apache-2.0 */
/* The allgather of GIN's windows over a team without a NIC (fake_team.h). The other rank is late, or never comes. */
#include <criterion/criterion.h>
#include <errno.h>
#include <string.h>

#include "plugin/gather.h"
#include "test/support/fake_team.h"
#include "transport/util/error.h"
#include "transport/util/log.h"

enum { RANKS = 2, SHORT_MS = 20, HEALTHY_MS = 60000 };

static const struct fake_team_options two_ranks = {.size = RANKS, .window = 16, .seed = 3};
static struct gather gather;
static struct gather_info info;

/* What the fake team lacks: a connected ring, and the info of the right neighbour, which is our own. */
int prs_team_connect_ring(struct prs_team *team, uint32_t context)
{
    (void)team;
    (void)context;
    return 0;
}

const void *prs_team_rank_info(struct prs_team *team, uint32_t context, uint32_t rank)
{
    (void)team;
    (void)context;
    (void)rank;
    return &info;
}

int prs_region_register(struct prs_fabric *fabric, const struct prs_rail_set *rails, const struct prs_mem *mem,
                        struct prs_region **out)
{
    (void)fabric;
    (void)rails;
    (void)mem;
    *out = NULL;
    return 0;
}

void prs_region_release(struct prs_region *region)
{
    (void)region;
}

void prs_region_keys(const struct prs_region *region, struct prs_keys *out)
{
    (void)region;
    memset(out, 0, sizeof(*out));
}

static int left_error;

int prs_peer_check_remote(struct prs_peer *peer)
{
    (void)peer;
    return left_error;
}

static struct prs_team *open_gather(void)
{
    struct prs_team *team = fake_team_open(&two_ranks);

    cr_assert_eq(gather_init(&gather, NULL, NULL, 0, RANKS, SHORT_MS, &info), 0);
    cr_assert_eq(gather_connect(&gather, team), 0);
    fake_team_hold(team, true); /* posted ops stay in flight */
    return team;
}

static int run_gather(void)
{
    static uint8_t all[RANKS * GATHER_BYTES];
    uint64_t mine = 1;

    return gather_run(&gather, &mine, sizeof(mine), all);
}

/* Uses the part of the stack where the allgather ran. Return how many bytes of it fake_team_close() has changed. */
static __attribute__((noinline)) int close_team(struct prs_team *team)
{
    volatile uint8_t stack[8192];
    int changed = 0;

    for (size_t i = 0; i < sizeof(stack); i++)
        stack[i] = 0x5a;
    fake_team_close(team);
    for (size_t i = 0; i < sizeof(stack); i++)
        changed += stack[i] != 0x5a;
    return changed;
}

Test(gather, what_is_in_flight_when_a_rank_does_not_come_ends_in_memory_that_is_still_there, .timeout = 60)
{
    struct prs_team *team = open_gather();

    cr_assert_eq(run_gather(), -ETIMEDOUT);
    cr_assert_eq(fake_team_in_flight(team), 2, "a put and its flag");
    cr_assert_eq(close_team(team), 0, "the team wrote to the stack of a function that had returned");
    gather_fini(&gather);
}

Test(gather, after_one_that_failed_the_next_fails_at_once_and_posts_nothing, .timeout = 60)
{
    struct prs_team *team = open_gather();

    cr_assert_eq(run_gather(), -ETIMEDOUT);
    cr_assert_eq(run_gather(), -ETIMEDOUT);
    cr_assert(strstr(prs_error_last(), "a previous one failed"), "%s", prs_error_last());
    cr_assert_eq(fake_team_in_flight(team), 2, "those of the first");
    fake_team_close(team);
    gather_fini(&gather);
}

/* Writes what the left neighbour writes: its flag of round 1. */
static void raise_flag(void)
{
    uint64_t *flag = (uint64_t *)(void *)(gather.memory + GATHER_BANKS * RANKS * GATHER_BYTES + (1 * RANKS + 1) * 8);

    __atomic_store_n(flag, 1, __ATOMIC_RELEASE);
}

/* This also happens under `counted`, where only a credit from the other rank makes room. */
Test(gather, a_flag_waits_for_room_after_its_data, .timeout = 60)
{
    static const struct fake_team_options narrow = {.size = RANKS, .window = 1, .seed = 3};
    struct prs_team *team = fake_team_open(&narrow);
    cr_assert_eq(gather_init(&gather, NULL, NULL, 0, RANKS, HEALTHY_MS, &info), 0);
    cr_assert_eq(gather_connect(&gather, team), 0);
    raise_flag();
    cr_assert_eq(run_gather(), 0, "%s", prs_error_last());
    fake_team_close(team);
    gather_fini(&gather);
}

static int warnings;

/* The other rank comes after the third warning. */
static void count_warnings(void *user, int level, const char *file, int line, const char *text)
{
    (void)user;
    (void)file;
    (void)line;
    if (level == PRS_LEVEL_WARN && strstr(text, "rank 0 has waited") && strstr(text, "the data of rank 1") &&
        ++warnings == 3)
        raise_flag();
}

Test(gather, a_rank_that_is_late_is_warned_of_and_waited_for, .timeout = 60)
{
    struct prs_team *team = fake_team_open(&two_ranks);

    prs_log_sink(count_warnings, NULL);
    cr_assert_eq(gather_init(&gather, NULL, NULL, 0, RANKS, HEALTHY_MS, &info), 0);
    cr_assert_eq(gather_connect(&gather, team), 0);
    gather.report_ms = 10;
    cr_assert_eq(run_gather(), 0, "%s", prs_error_last());
    cr_assert_eq(warnings, 3);
    fake_team_close(team);
    gather_fini(&gather);
}

Test(gather, a_neighbour_that_closed_is_not_waited_for, .timeout = 30)
{
    struct prs_team *team = fake_team_open(&two_ranks);

    cr_assert_eq(gather_init(&gather, NULL, NULL, 0, RANKS, HEALTHY_MS, &info), 0);
    cr_assert_eq(gather_connect(&gather, team), 0);
    left_error = -ECONNRESET;
    cr_assert_eq(run_gather(), -ECONNRESET);
    fake_team_close(team);
    gather_fini(&gather);
}

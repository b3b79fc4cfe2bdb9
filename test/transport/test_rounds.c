/* SPDX-License-Identifier: Apache-2.0 */
/* Rank 0 of a team makes connections while it serves others: how much of that one round of progress does. */
#include <criterion/criterion.h>
#include <unistd.h>

#include <perseus/team.h>

#include "test/transport/ends.h"
#include "transport/nic/verbs/verbs.h"
#include "transport/util/clock.h"

enum { RANKS = 13, CONTEXT = 5, SLOW_US = 2000 /* longer than a round may spend on connections */ };

static struct prs_team *team[RANKS];

static void open_ranks(void)
{
    struct prs_handle handles[RANKS];
    struct prs_listener *listener[RANKS];

    open_default();
    for (int rank = 0; rank < RANKS; rank++)
        listener[rank] = open_listener(&handles[rank]);
    for (int rank = 0; rank < RANKS; rank++) {
        struct prs_team_options options = {.fabric = fabric,
                                           .rails = &one_rail,
                                           .listener = listener[rank],
                                           .handles = handles,
                                           .rank = (uint32_t)rank,
                                           .world = RANKS,
                                           .traffic_class = -1,
                                           .timeout_ms = HEALTHY_MS};

        cr_assert_eq(prs_team_open(&options, &team[rank]), 0, "%s", prs_error_text());
    }
}

static void close_ranks(void)
{
    for (int rank = 0; rank < RANKS; rank++)
        prs_team_close(team[rank]);
    close_default();
}

/* ---- queue pairs take as long as on a NIC ---- */

static int (*modify_qp)(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask);
static uint32_t made;

static int modify_slowly(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
    if (mask & IBV_QP_STATE && attr->qp_state == IBV_QPS_INIT) { /* a new one */
        made++;
        usleep(SLOW_US);
    }
    return modify_qp(qp, attr, mask);
}

/* Let all other ranks go on as far as they can, then rank 0 by one round. Return the queue pairs that it makes. */
static uint32_t go_on(void)
{
    for (int rank = 1; rank < RANKS; rank++)
        for (int i = 0; i < 2 * RANKS; i++)
            cr_assert_geq(prs_team_progress(team[rank], CONTEXT), 0, "%s", prs_error_text());
    usleep(SLOW_US); /* wait until their frames have arrived */
    made = 0;
    prs_verbs.modify_qp = modify_slowly;
    cr_assert_geq(prs_team_progress(team[0], CONTEXT), 0, "%s", prs_error_text());
    prs_verbs.modify_qp = modify_qp;
    return made;
}

/* Connect each rank and rank 0. The most that one round made must be few. */
static void connect_all(bool rank_0_calls)
{
    uint64_t give_up = prs_clock_ms() + 2 * HEALTHY_MS;
    uint32_t connected = 0, most = 0, sum = 0;
    struct prs_peer *peer;

    modify_qp = prs_verbs.modify_qp;
    while (connected < RANKS - 1) {
        connected = 0;
        for (uint32_t rank = 1; rank < RANKS; rank++) {
            int r = rank_0_calls ? prs_team_peer(team[0], CONTEXT, rank, &peer)
                                 : prs_team_peer(team[rank], CONTEXT, 0, &peer);

            cr_assert_geq(r, 0, "%s", prs_error_text());
            connected += r == 0;
        }
        for (int round = 0; round < 64; round++) { /* so often does a round look for callers at least once */
            uint32_t now = go_on();

            most = now > most ? now : most;
            sum += now;
            if (now)
                break;
        }
        cr_assert_lt(prs_clock_ms(), give_up);
    }
    if (!sum)
        cr_skip_test("these rails make no queue pair for a peer");
    cr_assert(sum >= RANKS - 1 && most <= 2, "one round made %u of %u queue pairs", most, sum);
}

Test(rounds, one_makes_few_queues_for_those_who_call, .init = open_ranks, .fini = close_ranks, .timeout = 300)
{
    connect_all(false);
}

Test(rounds, one_makes_few_queues_for_those_whom_it_calls, .init = open_ranks, .fini = close_ranks, .timeout = 300)
{
    connect_all(true);
}

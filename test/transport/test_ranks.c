/* SPDX-License-Identifier: Apache-2.0 */
/* Two or three ranks of a team, in one process and thread: what their caller learns, and what goes wrong. */
#include <criterion/criterion.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include <perseus/team.h>

#include "test/transport/ends.h"
#include "transport/nic/domain.h"
#include "transport/nic/fabric.h"
#include "transport/nic/verbs/verbs.h"
#include "transport/peer/peer.h"
#include "transport/util/clock.h"

enum { RANKS = 3, CONTEXT = 5 };

static struct prs_team *team[RANKS];

static void open_ranks(int count, struct prs_team_options options)
{
    char info[] = "rank 0 was here";
    struct prs_handle handles[RANKS];
    struct prs_listener *listener[RANKS];

    options.fabric = fabric;
    options.rails = &one_rail;
    options.world = RANKS;
    options.traffic_class = -1;
    options.rank_info = info;
    options.rank_info_bytes = sizeof(info);
    options.handles = handles;
    for (int rank = 0; rank < RANKS; rank++)
        listener[rank] = open_listener(&handles[rank]);
    for (int rank = 0; rank < RANKS; rank++) {
        if (rank >= count) { /* these ranks do not exist */
            prs_listener_close(listener[rank]);
            continue;
        }
        options.rank = (uint32_t)rank;
        options.listener = listener[rank];
        info[5] = (char)('0' + rank);
        cr_assert_eq(prs_team_open(&options, &team[rank]), 0, "%s", prs_error_text());
    }
}

static void close_ranks(void)
{
    for (int rank = 0; rank < RANKS; rank++)
        prs_team_close(team[rank]);
}

/* Let rank `caller` connect to rank `called`, which only accepts. */
static struct prs_peer *connect_ranks(uint32_t caller, uint32_t called)
{
    uint64_t give_up = prs_clock_ms() + HEALTHY_MS;
    struct prs_peer *peer;
    int r;

    while ((r = prs_team_peer(team[caller], CONTEXT, called, &peer)) == PRS_AGAIN ||
           !prs_team_rank_info(team[called], CONTEXT, caller)) {
        cr_assert_geq(r, 0, "%s", prs_error_text());
        cr_assert_geq(prs_team_progress(team[caller], CONTEXT), 0, "%s", prs_error_text());
        cr_assert_geq(prs_team_progress(team[called], CONTEXT), 0, "%s", prs_error_text());
        cr_assert_lt(prs_clock_ms(), give_up);
    }
    cr_assert_eq(r, 0, "%s", prs_error_text());
    return peer;
}

Test(ranks, a_pair_of_ranks_shares_one_connection, .init = open_default, .fini = close_default)
{
    struct prs_peer *made, *accepted = NULL;

    open_ranks(2, (struct prs_team_options){0});
    made = connect_ranks(1, 0);
    cr_assert_eq(prs_team_peer(team[0], CONTEXT, 1, &accepted), 0, "rank 0 calls a rank that it has accepted");
    cr_assert_neq(accepted, made);
    cr_assert_eq(prs_team_peer(team[0], CONTEXT, 1, &made), 0);
    cr_assert_eq(accepted, made, "a rank's peer changes");
    close_ranks();
}

Test(ranks, each_learns_what_the_other_tells_of_itself, .init = open_default, .fini = close_default)
{
    open_ranks(2, (struct prs_team_options){0});
    cr_assert_null(prs_team_rank_info(team[0], CONTEXT, 1), "it is not connected");
    connect_ranks(1, 0);
    cr_assert_str_eq(prs_team_rank_info(team[0], CONTEXT, 1), "rank 1 was here");
    cr_assert_str_eq(prs_team_rank_info(team[1], CONTEXT, 0), "rank 0 was here");
    cr_assert_null(prs_team_rank_info(team[0], CONTEXT, 2));
    cr_assert_null(prs_team_rank_info(team[0], CONTEXT, RANKS));
    cr_assert_null(prs_team_rank_info(team[0], CONTEXT + 1, 1));
    cr_assert_eq(prs_team_rank(team[1]), 1);
    cr_assert_eq(prs_team_world(team[1]), RANKS);
    close_ranks();
}

Test(ranks, the_counters_of_a_context_are_those_of_its_peers, .init = open_default, .fini = close_default)
{
    enum { SENT_EACH = 3 };
    struct prs_op op[RANKS * SENT_EACH];
    struct prs_stats sum, one;
    uint64_t give_up = prs_clock_ms() + HEALTHY_MS, puts = 0, value = 1, word = 0;
    struct prs_mem memory = {.addr = &word, .len_bytes = sizeof(word), .kind = PRS_MEM_HOST, .flags = PRS_MEM_STRICT};
    struct prs_region *region;
    struct prs_keys keys;

    cr_assert_eq(prs_region_register(fabric, &one_rail, &memory, &region), 0, "%s", prs_error_text());
    prs_region_keys(region, &keys);
    open_ranks(3, (struct prs_team_options){0});
    prs_team_stats(team[1], CONTEXT, &sum);
    cr_assert_eq(sum.puts, 0, "there is no such context yet");
    connect_ranks(1, 0);
    connect_ranks(1, 2);
    for (uint32_t rank = 0; rank < RANKS; rank += 2) {
        struct prs_put put = {.src_addr = &value,
                              .len_bytes = sizeof(value),
                              .dst_addr = (uintptr_t)&word,
                              .dst = &keys,
                              .flags = PRS_PUT_INLINE};
        struct prs_peer *peer;

        cr_assert_eq(prs_team_peer(team[1], CONTEXT, rank, &peer), 0);
        for (int i = 0; i < SENT_EACH; i++) {
            cr_assert_eq(prs_peer_put(peer, &op[puts], &put), 0, "%s", prs_error_text());
            while (op[puts].status == PRS_OP_PENDING) {
                for (int other = 0; other < RANKS; other++)
                    cr_assert_geq(prs_team_progress(team[other], CONTEXT), 0, "%s", prs_error_text());
                cr_assert_lt(prs_clock_ms(), give_up);
            }
            puts++;
        }
        prs_peer_stats(peer, &one);
        cr_assert_eq(one.puts, SENT_EACH, "%llu puts", (unsigned long long)one.puts);
    }
    prs_team_stats(team[1], CONTEXT, &sum);
    cr_assert_eq(sum.puts, puts);
    cr_assert_geq(sum.work_requests, puts);
    prs_team_stats(team[0], CONTEXT, &sum);
    cr_assert_eq(sum.puts, 0);
    close_ranks();
    prs_region_release(region);
}

/* ---- queues of a context ---- */

static struct ibv_cq *(*create_cq)(struct ibv_context *context, int entries, void *user,
                                   struct ibv_comp_channel *channel, int vector);
static int created;

static struct ibv_cq *count_cq(struct ibv_context *context, int entries, void *user, struct ibv_comp_channel *channel,
                               int vector)
{
    created++;
    return create_cq(context, entries, user, channel, vector);
}

/* Rank 1 calls ranks 0 and 2, rank 2 calls rank 0. */
Test(ranks, peers_that_called_share_the_completion_queue_of_their_context, .init = open_default, .fini = close_default)
{
    if (!fabric->rail[0].domain->nic->shares_cqs)
        cr_skip_test("connections share no completion queues");
    open_ranks(3, (struct prs_team_options){0});
    create_cq = prs_verbs.create_cq;
    prs_verbs.create_cq = count_cq;
    connect_ranks(1, 0);
    connect_ranks(2, 0);
    connect_ranks(1, 2);
    prs_verbs.create_cq = create_cq;
    cr_assert_leq(created, RANKS, "%d completion queues for a context of each of %d ranks", created, RANKS);
    close_ranks();
}

static int fail_poll(struct prs_shared_cqs *cqs, struct prs_link **link, struct prs_event *events, bool *more)
{
    (void)cqs;
    (void)events;
    *link = NULL;
    *more = false;
    return -EIO;
}

/* All peers fail and report it, so nobody waits for a peer that was not told. */
Test(ranks, all_peers_fail_when_the_queue_that_they_share_does, .init = open_default, .fini = close_default)
{
    const struct prs_nic_ops *nic = fabric->rail[0].domain->nic;
    struct prs_nic_ops failing = *nic;
    struct prs_peer *peer[RANKS];
    uint32_t failed;
    char name[32];

    if (!nic->shares_cqs)
        cr_skip_test("connections share no completion queues");
    open_ranks(3, (struct prs_team_options){0});
    peer[1] = connect_ranks(0, 1);
    peer[2] = connect_ranks(0, 2);
    failing.poll_shared = fail_poll;
    fabric->rail[0].domain->nic = &failing;
    cr_assert_eq(prs_team_progress(team[0], CONTEXT), -EIO, "%s", prs_error_text());
    fabric->rail[0].domain->nic = nic;
    cr_assert_str_eq(prs_team_error(team[0]), prs_error_text(), "of two errors in one round, the first is told");
    cr_assert_eq(prs_team_failed_rank(team[0], &failed), 0);
    snprintf(name, sizeof(name), "rank 0 to rank %u,", failed);
    cr_assert(strstr(prs_error_text(), name), "%s", prs_error_text());
    for (int rank = 1; rank < RANKS; rank++)
        cr_assert_neq(prs_peer_error(peer[rank])[0], 0, "the peer to rank %d does not know", rank);
    cr_assert_lt(prs_team_progress(team[0], CONTEXT), 0, "the error stays");
    close_ranks();
}

/* ---- errors ---- */

Test(ranks, a_rank_that_does_not_come_is_named_at_the_limit, .init = open_default, .fini = close_default)
{
    uint64_t began = prs_clock_ms();
    uint32_t rank;

    open_ranks(3, (struct prs_team_options){.timeout_ms = 200});
    connect_ranks(0, 1);
    cr_assert_eq(prs_team_connect(team[2], CONTEXT), -ETIMEDOUT, "%s", prs_error_text());
    cr_assert(strstr(prs_error_text(), "2 of 2 peers") && strstr(prs_error_text(), "rank 1 among them") &&
                  strstr(prs_error_text(), "200 ms"),
              "%s", prs_error_text());
    cr_assert_str_eq(prs_team_error(team[2]), prs_error_text());
    cr_assert_eq(prs_team_failed_rank(team[2], &rank), -ENOENT, "two ranks are missing");
    cr_assert_lt(prs_clock_ms() - began, HEALTHY_MS / 2);
    close_ranks();
}

Test(ranks, the_first_error_of_a_team_stays, .init = open_default, .fini = close_default)
{
    uint32_t failed = RANKS;
    char first[512];

    open_ranks(1, (struct prs_team_options){.timeout_ms = 200});
    cr_assert_str_eq(prs_team_error(team[0]), "");
    cr_assert_eq(prs_team_failed_rank(team[0], &failed), -ENOENT);
    for (uint32_t rank = 1; rank < RANKS; rank++) {
        uint64_t give_up = prs_clock_ms() + HEALTHY_MS;
        char name[32];
        struct prs_peer *peer;
        int r;

        while ((r = prs_team_peer(team[0], CONTEXT, rank, &peer)) >= 0 &&
               (r = prs_team_progress(team[0], CONTEXT)) >= 0)
            cr_assert_lt(prs_clock_ms(), give_up, "rank %u does not exist", rank);
        snprintf(name, sizeof(name), "to rank %u, context 5", rank);
        cr_assert_eq(r, -ECONNREFUSED, "%d %s", r, prs_error_text());
        cr_assert(strstr(prs_error_text(), name), "%s", prs_error_text());
        if (rank == 1)
            snprintf(first, sizeof(first), "%s", prs_error_text());
    }
    cr_assert_str_eq(prs_team_error(team[0]), first);
    cr_assert_eq(prs_team_failed_rank(team[0], &failed), 0);
    cr_assert_eq(failed, 1);
    close_ranks();
}

Test(ranks, impossible_options_are_refused, .init = open_default, .fini = close_default)
{
    struct prs_handle handle;
    struct prs_listener *listener = open_listener(&handle);
    const struct prs_team_options good = {.fabric = fabric,
                                          .rails = &one_rail,
                                          .listener = listener,
                                          .handles = &handle,
                                          .world = 1,
                                          .traffic_class = -1};
    struct prs_team_options wrong[6] = {good, good, good, good, good, good};
    struct prs_team *opened = NULL;
    struct prs_peer *peer;

    wrong[0].world = 0;
    wrong[1].rank = 1;
    wrong[2].listener = NULL;
    wrong[3].handles = NULL;
    wrong[4].rank_info_bytes = PRS_TEAM_RANK_INFO_BYTES + 1;
    wrong[5].reserved[0] = 1;
    for (size_t i = 0; i < sizeof(wrong) / sizeof(*wrong); i++) {
        cr_assert_eq(prs_team_open(&wrong[i], &opened), -EINVAL, "row %zu", i);
        cr_assert_null(opened);
    }
    cr_assert_eq(prs_team_open(&good, &opened), 0, "%s", prs_error_text());
    cr_assert_eq(prs_team_peer(opened, CONTEXT, 1, &peer), -EINVAL);
    cr_assert(strstr(prs_error_text(), "no rank 1"), "%s", prs_error_text());
    cr_assert_eq(prs_team_connect_ring(opened, CONTEXT), 0, "a ring of one rank");
    prs_team_close(opened);
}

Test(ranks, a_context_too_many_is_refused_and_the_others_go_on, .init = open_default, .fini = close_default)
{
    uint64_t give_up = prs_clock_ms() + HEALTHY_MS;
    struct prs_peer *peer;
    int r;

    open_ranks(2, (struct prs_team_options){0});
    for (uint32_t context = 0; context < PRS_TEAM_CONTEXTS; context++)
        cr_assert_geq(prs_team_progress(team[0], context), 0, "%s", prs_error_text());
    cr_assert_eq(prs_team_progress(team[0], PRS_TEAM_CONTEXTS), -ENOSPC);
    cr_assert_eq(prs_team_peer(team[0], PRS_TEAM_CONTEXTS, 1, &peer), -ENOSPC);
    cr_assert(strstr(prs_error_text(), "context 4096"), "%s", prs_error_text());

    /* Rank 1 has such a context, and connects: rank 0 closes that connection, and only that. */
    while ((r = prs_team_peer(team[1], PRS_TEAM_CONTEXTS, 0, &peer)) == PRS_AGAIN) {
        cr_assert_geq(prs_team_progress(team[0], CONTEXT), 0, "%s", prs_error_text());
        cr_assert_geq(prs_team_progress(team[1], PRS_TEAM_CONTEXTS), 0, "%s", prs_error_text());
        cr_assert_lt(prs_clock_ms(), give_up);
    }
    cr_assert_eq(r, 0, "%s", prs_error_text());
    connect_ranks(1, 0);
    cr_assert_null(prs_team_rank_info(team[0], PRS_TEAM_CONTEXTS, 1));
    close_ranks();
}

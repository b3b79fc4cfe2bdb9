/* SPDX-License-Identifier: Apache-2.0 */
/* Which connection gets which SRD queue pair. The device is fake, and all ranks are in this process, each with its own
 * device. */
#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "test/support/fake_srd.h"

struct job {
    uint32_t ranks, comms, channels;
    uint32_t most; /* queue pairs of rank 0 */
};

ParameterizedTestParameters(srd_pool, queue_pairs_do_not_grow_with_the_peers)
{
    /* Each channel has a connection in each direction. */
    static struct job jobs[] = {{2, 1, 1, 2},  {64, 1, 1, 2},  {2, 4, 2, 6},   {16, 4, 2, 6},
                                {64, 4, 2, 6}, {64, 4, 8, 12}, {64, 4, 32, 23}};
    size_t count = sizeof(jobs) / sizeof(*jobs);

#ifdef __SANITIZE_THREAD__
    count--; /* no thread is started here, and the last takes ten times as long as all others */
#endif
    return cr_make_param_array(struct job, jobs, count);
}

/* Each arrival must find its connection, and no other. */
static void check_arrivals(const struct fake_srd_pair *pair, uint32_t count)
{
    struct prs_event events[PRS_POLL_MOST];

    for (uint32_t i = 0; i < count; i++) {
        fake_srd_arrive(pair[i].accepting, pair[i].connecting, i, 8);
        fake_srd_arrive(pair[i].connecting, pair[i].accepting, i + count, 8);
        cr_assert(prs_nic_srd.poll(pair[i].accepting, events) == 1 && events[0].value == i, "connection %u", i);
        cr_assert(prs_nic_srd.poll(pair[i].connecting, events) == 1 && events[0].value == i + count, "connection %u",
                  i);
    }
}

ParameterizedTest(struct job *job, srd_pool, queue_pairs_do_not_grow_with_the_peers)
{
    uint32_t between = job->comms * job->channels, count = 0, own = 0;
    uint32_t total = 2 * between * (job->ranks - 1);
    struct fake_srd_pair *pair = calloc(total, sizeof(*pair));
    struct prs_queue **loopback = calloc(total, sizeof(*loopback));
    bool *seen = calloc(1 << 16, sizeof(*seen));

    cr_assert(pair && loopback && seen);
    fake_srd_install();
    for (uint32_t i = 0; i < between; i++)
        for (uint32_t peer = 1; peer < job->ranks; peer++) {
            pair[count++] = fake_srd_connect(0, peer);
            pair[count++] = fake_srd_connect(peer, 0);
        }
    for (uint32_t i = 0; i < count; i++) {
        struct prs_link *link = i % 2 ? pair[i].connecting : pair[i].accepting; /* that of rank 0 */

        cr_assert_eq(prs_nic_srd.loopback(link, 4, &loopback[i]), 0);
        cr_assert_eq(loopback[i]->number, link->queue[0]->number);
        own += !seen[link->queue[0]->number];
        seen[link->queue[0]->number] = true;
    }
    cr_log_info("%u ranks, %u communicators, %u channels: %u connections, %u queue pairs", job->ranks, job->comms,
                job->channels, total, own);
    cr_assert_eq(own, job->most, "%u queue pairs for %u connections to each of %u peers", own, 2 * between,
                 job->ranks - 1);
    check_arrivals(pair, count);
    for (uint32_t i = 0; i < count; i++) {
        fake_srd_close(pair[i].accepting, -1);
        fake_srd_close(pair[i].connecting, -1);
    }
    cr_assert(fake_srd.alive == 0 && fake_srd.handles == 0, "%u queue pairs, %u handles remain", fake_srd.alive,
              fake_srd.handles);
    free(pair);
    free(loopback);
    free(seen);
}

/* Names share entries of a table, where a closed connection leaves no gap before the others. */
Test(srd_pool, arrivals_find_the_connections_that_stay_whichever_have_closed)
{
    enum { PEERS = 61, STEP = 22 }; /* a prime, so that the steps come to each of them */
    struct fake_srd_pair pair[PEERS];
    bool closed[PEERS] = {false};
    struct prs_event events[PRS_POLL_MOST];

    fake_srd_install();
    for (uint32_t i = 0; i < PEERS; i++)
        pair[i] = fake_srd_connect(0, i + 1);
    for (uint32_t i = 0; i < PEERS; i++)
        cr_assert_eq(pair[i].accepting->queue[0]->number, pair[0].accepting->queue[0]->number, "they share a queue");
    for (uint32_t n = 0, at = 0; n < PEERS; n++, at = (at + STEP) % PEERS) {
        fake_srd_close(pair[at].accepting, -1);
        closed[at] = true;
        for (uint32_t i = 0; i < PEERS; i++) {
            if (closed[i])
                continue;
            fake_srd_arrive(pair[i].accepting, pair[i].connecting, i, 8);
            cr_assert(prs_nic_srd.poll(pair[i].accepting, events) == 1 && events[0].value == i,
                      "connection %u, after %u have closed", i, n + 1);
        }
    }
    for (uint32_t i = 0; i < PEERS; i++)
        fake_srd_close(pair[i].connecting, -1);
    cr_assert_eq(fake_srd.alive, 0u);
}

Test(srd_pool, a_process_may_connect_to_itself)
{
    enum { COUNT = 9 };
    struct fake_srd_pair pair[COUNT];

    fake_srd_install();
    for (int i = 0; i < COUNT; i++)
        pair[i] = fake_srd_connect(0, 0);
    check_arrivals(pair, COUNT);
    for (int i = 0; i < COUNT; i++) {
        fake_srd_close(pair[i].accepting, -1);
        fake_srd_close(pair[i].connecting, -1);
    }
    cr_assert_eq(fake_srd.alive, 0u);
}

/* The connector has closed and the listener has not: what the listener still sends must not reach a new connection. */
Test(srd_pool, a_name_is_free_when_the_other_side_has_closed_too)
{
    struct fake_srd_pair stays, old, new;
    struct prs_nic_address address[4] = {{0}};
    struct prs_link *next[3];
    int stream[2];

    fake_srd_install();
    stays = fake_srd_connect(1, 0); /* keeps the queue pairs of both sides */
    old = fake_srd_connect(1, 0);
    new = fake_srd_connect(2, 0); /* keeps the queue pair of rank 0 that `old` uses, too */
    cr_assert_neq(old.accepting->queue[0]->number, stays.accepting->queue[0]->number);
    prs_nic_srd.address(old.accepting->queue[0], &address[3]);
    cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM, 0, stream), 0);
    cr_assert_eq(old.connecting->queue[0]->number, stays.connecting->queue[0]->number);
    fake_srd_close(old.connecting, stream[0]);
    close(stream[0]); /* by the peer */
    next[0] = fake_srd_open(0, 1, 1, address);
    cr_assert_neq(next[0]->queue[0]->number, stays.connecting->queue[0]->number,
                  "the other side still has the old one");
    cr_assert_eq(write(stream[1], "x", 1), 1); /* its farewell */
    close(stream[1]);
    next[1] = fake_srd_open(0, 1, 1, address);
    cr_assert_eq(next[1]->queue[0]->number, stays.connecting->queue[0]->number, "it has closed");
    next[2] = fake_srd_open(0, 1, 1, address);
    cr_assert(next[2]->queue[0]->number != next[0]->queue[0]->number &&
              next[2]->queue[0]->number != next[1]->queue[0]->number);
    for (int i = 0; i < 3; i++)
        fake_srd_close(next[i], -1);
    fake_srd_close(old.accepting, -1);
    for (int i = 0; i < 2; i++) {
        fake_srd_close(i ? new.accepting : stays.accepting, -1);
        fake_srd_close(i ? new.connecting : stays.connecting, -1);
    }
    cr_assert_eq(fake_srd.alive, 0u);
}

Test(srd_pool, a_name_is_never_used_again_if_nothing_tells_that_the_other_side_has_closed)
{
    struct fake_srd_pair stays, old;
    struct prs_nic_address address[4] = {{0}};
    struct prs_link *next;

    fake_srd_install();
    stays = fake_srd_connect(2, 0);
    old = fake_srd_connect(1, 0);
    prs_nic_srd.address(old.accepting->queue[0], &address[3]);
    cr_assert_eq(old.connecting->queue[0]->number, stays.connecting->queue[0]->number);
    fake_srd_close(old.connecting, -1);
    next = fake_srd_open(0, 1, 1, address);
    cr_assert_neq(next->queue[0]->number, stays.connecting->queue[0]->number);
    fake_srd_close(next, -1);
    fake_srd_close(old.accepting, -1);
    fake_srd_close(stays.accepting, -1);
    fake_srd_close(stays.connecting, -1);
    cr_assert_eq(fake_srd.alive, 0u);
}

/* A process has died, and a new one has got a queue pair with the same number. */
Test(srd_pool, a_queue_with_the_same_number_and_another_key_replaces_the_old_one)
{
    struct prs_event events[PRS_POLL_MOST];
    struct prs_nic_address address;
    struct prs_verbs_queue renewed;
    struct prs_link *accepted[3];
    struct fake_srd_pair dead;
    int error;

    fake_srd_install();
    dead = fake_srd_connect(2, 1);
    prs_nic_srd.address(dead.connecting->queue[0], &address);
    /* Two queue pairs hold two connections each to one rail. */
    for (int i = 0; i < 3; i++)
        accepted[i] = fake_srd_open(0, 1, 1, NULL);
    cr_assert_eq(accepted[1]->queue[0]->number, accepted[2]->queue[0]->number);
    cr_assert_eq(prs_nic_srd.connect(accepted[1]->queue[0], &address, NULL, &error), 0);
    cr_assert_eq(prs_nic_srd.connect(accepted[2]->queue[0], &address, NULL, &error), -EPROTO, "used twice");
    renewed = fake_srd_address(dead.connecting);
    renewed.start++;
    prs_verbs_tell_queue(&renewed, &address);
    cr_assert_eq(prs_nic_srd.connect(accepted[2]->queue[0], &address, NULL, &error), 0);
    fake_srd_arrive(accepted[1], dead.connecting, 5, 8);
    cr_assert_eq(prs_nic_srd.poll(accepted[1], events), 0);
    cr_assert_eq(prs_nic_srd.poll(accepted[2], events), 1);
    for (int i = 0; i < 3; i++)
        fake_srd_close(accepted[i], -1);
    fake_srd_close(dead.accepting, -1);
    fake_srd_close(dead.connecting, -1);
    cr_assert_eq(fake_srd.alive, 0u);
}

/* SPDX-License-Identifier: Apache-2.0 */
/* A team with many peers in one context, whose other ends are peers of this process without a team. Over RC they share
 * completion queues (decisions/0017); over SRD queue pairs too. */
#include <criterion/criterion.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <perseus/team.h>

#include "test/transport/ends.h"
#include "transport/nic/fabric.h"
#include "transport/nic/verbs/device.h"
#include "transport/peer/peer.h"
#include "transport/util/clock.h"
#include "transport/util/fork.h"

enum { RANKS = 24, WORDS = 64, CONTEXT = 3 };

/* The other end of one rank. */
struct spoke {
    struct prs_peer *peer;
    uint64_t words[WORDS]; /* the hub writes here: data, then a signal in the last one */
    struct prs_region *region;
    struct prs_keys keys;
};

static struct prs_listener *spokes_listener;
static struct spoke *spokes;   /* [RANKS], by rank; rank 0 has none */
static struct prs_team *hub;   /* rank 0 */
static struct prs_peer *first; /* the hub's own peer to each rank */

/* ---- completion queues that are made ---- */

static struct ibv_cq *(*create_cq)(struct ibv_context *context, int entries, void *user,
                                   struct ibv_comp_channel *channel, int vector);
static uint32_t created;

static struct ibv_cq *count_cq(struct ibv_context *context, int entries, void *user, struct ibv_comp_channel *channel,
                               int vector)
{
    created++;
    return create_cq(context, entries, user, channel, vector);
}

static int refuse_resize(struct ibv_cq *cq, int entries)
{
    return EOPNOTSUPP;
}

/* ---- the hub and its spokes ---- */

static void open_hub(const char *policy)
{
    struct prs_peer_options accepting = {.traffic_class = -1, .policy = policy};
    struct prs_team_options options = {.fabric = fabric,
                                       .rails = &one_rail,
                                       .rank = 0,
                                       .world = RANKS,
                                       .traffic_class = -1,
                                       .policy = policy,
                                       .timeout_ms = HEALTHY_MS};
    struct prs_handle handles[RANKS];
    uint32_t have = 0;

    spokes = calloc(RANKS, sizeof(*spokes));
    options.listener = open_listener(&handles[0]);
    spokes_listener = open_listener(&handles[1]);
    for (int rank = 2; rank < RANKS; rank++)
        handles[rank] = handles[1];
    options.handles = handles;
    cr_assert_eq(prs_team_open(&options, &hub), 0, "%s", prs_error_text());
    create_cq = prs_verbs.create_cq;
    created = 0;
    prs_verbs.create_cq = count_cq;
    for (uint64_t give_up = prs_clock_ms() + 2 * HEALTHY_MS; have < RANKS - 1;) { /* one after the other */
        struct prs_mem memory = {.addr = spokes[have + 1].words,
                                 .len_bytes = sizeof(spokes->words),
                                 .kind = PRS_MEM_HOST,
                                 .flags = PRS_MEM_STRICT};
        int r = prs_team_peer(hub, CONTEXT, have + 1, &first), accepted = PRS_AGAIN;

        cr_assert_geq(r, 0, "%s", prs_error_text());
        if (!spokes[have + 1].peer)
            accepted = prs_accept(spokes_listener, &accepting, &spokes[have + 1].peer);
        cr_assert_geq(accepted, 0, "%s", prs_error_text());
        cr_assert_geq(prs_team_progress(hub, CONTEXT), 0, "%s", prs_error_text());
        cr_assert_lt(prs_clock_ms(), give_up, "rank %u did not connect", have + 1);
        if (r || !spokes[have + 1].peer)
            continue;
        cr_assert_eq(prs_region_register(fabric, &one_rail, &memory, &spokes[have + 1].region), 0);
        prs_region_keys(spokes[have + 1].region, &spokes[have + 1].keys);
        have++;
    }
    prs_verbs.create_cq = create_cq;
}

static void close_hub(void)
{
    prs_team_close(hub);
    for (int rank = 1; rank < RANKS; rank++) {
        prs_peer_close(spokes[rank].peer);
        prs_region_release(spokes[rank].region);
    }
    prs_listener_close(spokes_listener);
    free(spokes);
}

struct transfer {
    struct prs_op put, signal;
};

static void start(uint32_t rank, uint64_t value, struct transfer *transfer)
{
    struct spoke *to = &spokes[rank];
    struct prs_put put = {.src_addr = &value,
                          .len_bytes = sizeof(value),
                          .dst_addr = (uintptr_t)to->words,
                          .dst = &to->keys,
                          .flags = PRS_PUT_INLINE};
    struct prs_signal signal = {
        .dst_addr = (uintptr_t)&to->words[WORDS - 1], .dst = &to->keys, .value = value, .kind = PRS_SIGNAL_SET};
    struct prs_peer *peer;

    cr_assert_eq(prs_team_peer(hub, CONTEXT, rank, &peer), 0);
    cr_assert_eq(prs_peer_put(peer, &transfer->put, &put), 0, "%s", prs_error_text());
    cr_assert_eq(prs_peer_signal(peer, &transfer->signal, &signal), 0, "%s", prs_error_text());
}

static bool is_over(const struct transfer *transfer)
{
    return transfer->put.status != PRS_OP_PENDING && transfer->signal.status != PRS_OP_PENDING;
}

/* Put and signal to all ranks but one, at the same time; 0 leaves none out. */
static void send_to_all_but(uint32_t left_out, uint64_t value)
{
    struct transfer transfer[RANKS];
    uint64_t give_up = prs_clock_ms() + HEALTHY_MS;

    for (uint32_t rank = 1; rank < RANKS; rank++)
        if (rank != left_out)
            start(rank, value, &transfer[rank]);
    for (uint32_t rank = 1; rank < RANKS; rank++) {
        volatile uint64_t *word = &spokes[rank].words[WORDS - 1];

        while (rank != left_out && (!is_over(&transfer[rank]) || *word != value)) {
            (void)prs_team_progress(hub, CONTEXT); /* it may return the error of the one that is left out */
            for (uint32_t other = 1; other < RANKS; other++)
                if (spokes[other].peer)
                    cr_assert_geq(prs_peer_progress(spokes[other].peer), 0, "%s", prs_error_text());
            cr_assert_lt(prs_clock_ms(), give_up, "rank %u: put %d, signal %d, word %llu", rank,
                         transfer[rank].put.status, transfer[rank].signal.status, (unsigned long long)*word);
        }
        if (rank != left_out) {
            cr_assert_eq(transfer[rank].put.status, 0);
            cr_assert_eq(transfer[rank].signal.status, 0);
            cr_assert_eq(spokes[rank].words[0], value);
        }
    }
}

static bool peers_share(void)
{
    return fabric->rail[0].domain->nic->shares_cqs;
}

static void send_much(void)
{
    for (uint64_t value = 1; value <= 50; value++)
        send_to_all_but(0, value);
}

/* The spokes belong to no team: each has its own completion queue. */
Test(team, peers_of_a_context_share_one_completion_queue, .init = open_default, .fini = close_default, .timeout = 300)
{
    open_hub("counted");
    if (peers_share())
        cr_assert_eq(created, RANKS - 1 + 1, "%u completion queues for the hub", created - (RANKS - 1));
    send_much();
    close_hub();
}

/* Each completion queue is twice as large as the previous one: 1, 1 + 2, 1 + 2 + 4, ... peers. */
Test(team, few_completion_queues_do_where_none_can_grow, .init = open_default, .fini = close_default, .timeout = 300)
{
    int (*resize_cq)(struct ibv_cq * cq, int entries) = prs_verbs.resize_cq;

    prs_verbs.resize_cq = refuse_resize;
    open_hub("counted");
    prs_verbs.resize_cq = resize_cq;
    if (peers_share())
        cr_assert_eq(created, RANKS - 1 + 5, "%u completion queues for the hub", created - (RANKS - 1));
    send_much();
    close_hub();
}

/* A device whose completion queues hold no more than three peers. */
Test(team, a_completion_queue_is_full_at_the_limit_of_the_device, .init = open_default, .fini = close_default,
     .timeout = 300)
{
    struct prs_verbs_device *device = prs_verbs_device(fabric->rail[0].domain);
    int most;

    if (!peers_share())
        cr_skip_test("each peer has its own");
    most = device->attr.max_cqe;
    device->attr.max_cqe = 3 * (256 + 512 + 64);
    open_hub("counted");
    device->attr.max_cqe = most;
    if (peers_share())
        cr_assert_eq(created, RANKS - 1 + 8, "%u completion queues for the hub", created - (RANKS - 1));
    send_much();
    close_hub();
}

/* The other side of one rank fails in the middle of transfers: its own end, and theirs continue. */
Test(team, a_peer_that_fails_does_not_disturb_the_others, .init = open_default, .fini = close_default, .timeout = 300)
{
    static const uint32_t lost = 7;
    uint64_t give_up = prs_clock_ms() + HEALTHY_MS;
    struct transfer transfer[2];
    struct prs_peer *peer;
    int r = 0;

    open_hub("counted");
    send_to_all_but(0, 1);
    start(lost, 2, &transfer[0]);
    spokes[lost].keys.rkey[0] ^= 0x5a5a00; /* a wrong key: the NIC refuses */
    start(lost, 2, &transfer[1]);
    while ((r = prs_team_progress(hub, CONTEXT)) >= 0) {
        prs_peer_progress(spokes[lost].peer);
        cr_assert_lt(prs_clock_ms(), give_up, "the peer did not fail");
    }
    cr_assert(strstr(prs_error_text(), "to rank 7"), "%s", prs_error_text());
    cr_assert_eq(prs_team_peer(hub, CONTEXT, lost, &peer), 0);
    cr_assert_neq(prs_peer_error(peer)[0], 0);
    prs_peer_close(spokes[lost].peer);
    spokes[lost].peer = NULL;
    for (uint64_t value = 3; value < 20; value++)
        send_to_all_but(lost, value);
    cr_assert_lt(prs_team_progress(hub, CONTEXT), 0, "the error stays");
    close_hub();
}

/* A rank that closes: the hub notices it while nothing arrives, though it looks at one peer at a time. */
Test(team, a_closed_rank_is_noticed_while_the_others_are_silent, .init = open_default, .fini = close_default,
     .timeout = 300)
{
    uint64_t give_up = prs_clock_ms() + HEALTHY_MS;
    struct transfer transfer;

    open_hub("drain");
    send_to_all_but(0, 1);
    prs_peer_close(spokes[5].peer);
    spokes[5].peer = NULL;
    start(5, 2, &transfer);
    while (prs_team_progress(hub, CONTEXT) >= 0)
        cr_assert_lt(prs_clock_ms(), give_up, "nobody noticed");
    cr_assert(strstr(prs_error_text(), "to rank 5"), "%s", prs_error_text());
    cr_assert_lt(transfer.signal.status, 0);
    send_to_all_but(5, 3);
    close_hub();
}

/* A process dies without a farewell while no transfer with it is pending: only the stream shows it. */
static void notice_by_the_stream(useconds_t pause_us)
{
    uint64_t give_up;

    open_hub("counted");
    prs_fork_close(spokes[9].peer->stream_fd);
    spokes[9].peer->stream_fd = -1;
    give_up = prs_clock_ms() + HEALTHY_MS;
    while (prs_team_progress(hub, CONTEXT) >= 0) {
        cr_assert_lt(prs_clock_ms(), give_up, "nobody noticed");
        if (pause_us)
            usleep(pause_us);
    }
    cr_assert(strstr(prs_error_text(), "to rank 9"), "%s", prs_error_text());
    send_to_all_but(9, 3);
    close_hub();
}

Test(team, a_dead_process_is_noticed_by_its_stream, .init = open_default, .fini = close_default, .timeout = 300)
{
    notice_by_the_stream(0);
}

/* Polls are rare, as on a busy machine, where a caller that yields gets the processor back after milliseconds. */
Test(team, a_dead_process_is_noticed_soon_by_a_caller_that_polls_rarely, .init = open_default, .fini = close_default,
     .timeout = 300)
{
    notice_by_the_stream(10000);
}

/* ---- strangers ---- */

enum { STAYS_MS = 30 /* a peer that is open for this long was not refused */ };

/* Connect to `handle` with this private data, and let the hub accept. */
static struct prs_peer *call_as(const struct prs_handle *handle, const void *data, uint32_t bytes)
{
    struct prs_peer_options options = {.traffic_class = -1, .private_data = data, .private_bytes = bytes};
    uint64_t give_up = prs_clock_ms() + HEALTHY_MS;
    struct prs_connector *connector;
    struct prs_peer *peer = NULL;

    cr_assert_eq(prs_connect(fabric, &one_rail, handle, &options, &connector), 0, "%s", prs_error_text());
    for (int r = PRS_AGAIN; r; r = prs_connector_step(connector, &peer)) {
        cr_assert_geq(r, 0, "%s", prs_error_text());
        cr_assert_geq(prs_team_progress(hub, CONTEXT), 0, "%s", prs_error_text());
        cr_assert_lt(prs_clock_ms(), give_up);
    }
    return peer;
}

/* Let the hub make progress for at most this long, and tell whether it has closed this peer. */
static bool is_closed(struct prs_peer *peer, uint64_t wait_ms)
{
    for (uint64_t end = prs_clock_ms() + wait_ms; prs_clock_ms() < end;) {
        cr_assert_geq(prs_team_progress(hub, CONTEXT), 0, "%s", prs_error_text());
        if (prs_peer_progress(peer) < 0 || prs_peer_check_remote(peer) < 0)
            return true;
    }
    return false;
}

/* What rank 1 of a team of two says to rank 0: its magic, rank, size, context and more. */
static uint32_t learn_hello(uint32_t hello[PRS_PRIVATE_DATA_BYTES / 4])
{
    struct prs_peer_options accepting = {.traffic_class = -1};
    struct prs_handle handles[2];
    struct prs_listener *plain = open_listener(&handles[0]);
    struct prs_team_options options = {.fabric = fabric,
                                       .rails = &one_rail,
                                       .listener = open_listener(&handles[1]),
                                       .handles = handles,
                                       .rank = 1,
                                       .world = 2,
                                       .traffic_class = -1,
                                       .timeout_ms = HEALTHY_MS};
    struct prs_peer *peer, *accepted = NULL;
    uint32_t bytes = 0;
    struct prs_team *team;

    cr_assert_eq(prs_team_open(&options, &team), 0, "%s", prs_error_text());
    while (!accepted) {
        cr_assert_geq(prs_team_peer(team, CONTEXT, 0, &peer), 0, "%s", prs_error_text());
        cr_assert_geq(prs_team_progress(team, CONTEXT), 0, "%s", prs_error_text());
        cr_assert_geq(prs_accept(plain, &accepting, &accepted), 0, "%s", prs_error_text());
    }
    memcpy(hello, prs_peer_private(accepted, &bytes), PRS_PRIVATE_DATA_BYTES);
    prs_peer_close(accepted);
    prs_team_close(team);
    prs_listener_close(plain);
    return bytes;
}

/* They have the cookie, as another team of the job may: what they say tells that they are of no use here. */
Test(team, peers_that_are_not_of_the_team_are_closed_and_the_others_stay, .init = open_default, .fini = close_default,
     .timeout = 300)
{
    static const struct {
        int word; /* of the hello, which differs; -1: none */
        uint32_t value;
        int bytes; /* more or fewer than a hello has */
    } strangers[] = {{-1, 0, -4}, {-1, 0, 4}, {0, 0x12345678, 0}, {1, 3, 0}, {1, UINT32_MAX, 0}, {2, 2, 0}, {2, 4, 0}};
    uint32_t hello[PRS_PRIVATE_DATA_BYTES / 4], bytes = learn_hello(hello);
    struct prs_handle handles[3];
    struct prs_team_options options = {.fabric = fabric,
                                       .rails = &one_rail,
                                       .listener = open_listener(&handles[0]),
                                       .handles = handles,
                                       .world = 3,
                                       .traffic_class = -1,
                                       .timeout_ms = HEALTHY_MS};
    struct prs_peer *member, *peer;

    handles[1] = handles[2] = handles[0]; /* the hub calls nobody */
    hello[2] = 3;
    cr_assert_eq(prs_team_open(&options, &hub), 0, "%s", prs_error_text());
    member = call_as(&handles[0], hello, bytes);
    for (size_t i = 0; i < sizeof(strangers) / sizeof(*strangers); i++) {
        uint32_t said[PRS_PRIVATE_DATA_BYTES / 4];

        memcpy(said, hello, sizeof(said));
        said[1] = 2; /* no member has this rank */
        if (strangers[i].word >= 0)
            said[strangers[i].word] = strangers[i].value;
        peer = call_as(&handles[0], said, bytes + (uint32_t)strangers[i].bytes);
        cr_assert(is_closed(peer, HEALTHY_MS), "stranger %zu was let in", i);
        prs_peer_close(peer);
        cr_assert_not(is_closed(member, STAYS_MS), "stranger %zu: the member was closed", i);
    }
    peer = call_as(&handles[0], hello, bytes);
    cr_assert(is_closed(peer, HEALTHY_MS), "a second connection of the rank was let in");
    prs_peer_close(peer);
    cr_assert_not(is_closed(member, STAYS_MS));
    hello[3]++; /* another context has room for it */
    peer = call_as(&handles[0], hello, bytes);
    cr_assert_not(is_closed(peer, STAYS_MS));
    prs_peer_close(peer);
    prs_peer_close(member);
    prs_team_close(hub);
}

/* ---- threads ---- */

enum { CALLERS = 12, CONTEXTS = 2 };

static uint32_t stop_threads;
static int thread_error[CONTEXTS];

static void *drive_context(void *arg)
{
    uint32_t context = *(uint32_t *)arg;

    while (!__atomic_load_n(&stop_threads, __ATOMIC_RELAXED) && thread_error[context] >= 0)
        thread_error[context] = prs_team_progress(hub, context);
    return NULL;
}

/* A rank connects to rank 0 in both contexts, and sends at once. */
static void call_hub(struct prs_handle *handles, uint32_t rank, uint64_t *words, const struct prs_keys *keys)
{
    struct prs_team_options options = {.fabric = fabric,
                                       .rails = &one_rail,
                                       .handles = handles,
                                       .rank = rank,
                                       .world = CALLERS + 1,
                                       .traffic_class = -1,
                                       .policy = "counted"};
    uint64_t give_up = prs_clock_ms() + HEALTHY_MS, value = rank;
    struct prs_peer *peer[CONTEXTS] = {NULL};
    struct transfer transfer[CONTEXTS];
    struct prs_handle unused;
    struct prs_team *team;

    options.listener = open_listener(&unused);
    cr_assert_eq(prs_team_open(&options, &team), 0, "%s", prs_error_text());
    for (uint32_t c = 0; c < CONTEXTS; c++) {
        struct prs_put put = {.src_addr = &value,
                              .len_bytes = sizeof(value),
                              .dst_addr = (uintptr_t)&words[2 * rank + c],
                              .dst = keys,
                              .flags = PRS_PUT_INLINE};
        struct prs_signal signal = {.dst_addr = (uintptr_t)&words[c], .dst = keys, .value = 1, .kind = PRS_SIGNAL_ADD};
        int r;

        while ((r = prs_team_peer(team, c, 0, &peer[c])) == PRS_AGAIN) {
            cr_assert_geq(prs_team_progress(team, c), 0, "%s", prs_error_text());
            cr_assert_lt(prs_clock_ms(), give_up);
        }
        cr_assert_eq(r, 0, "%s", prs_error_text());
        cr_assert_eq(prs_peer_put(peer[c], &transfer[c].put, &put), 0);
        cr_assert_eq(prs_peer_signal(peer[c], &transfer[c].signal, &signal), 0);
    }
    for (uint32_t c = 0; c < CONTEXTS; c++)
        while (!is_over(&transfer[c]) || prs_team_settle(team, c) == PRS_AGAIN) {
            cr_assert_geq(prs_team_progress(team, c), 0, "%s", prs_error_text());
            cr_assert_lt(prs_clock_ms(), give_up);
        }
    prs_team_close(team);
}

/* Each thread accepts for the context of the other, which may be sent to before its own thread knows of the peer. */
Test(team, a_thread_accepts_for_the_context_of_another, .init = open_default, .fini = close_default, .timeout = 300)
{
    static uint32_t id[CONTEXTS] = {0, 1};
    uint64_t words[2 * (CALLERS + 1)] = {0};
    struct prs_mem memory = {.addr = words, .len_bytes = sizeof(words), .kind = PRS_MEM_HOST, .flags = PRS_MEM_STRICT};
    struct prs_handle handles[CALLERS + 1];
    struct prs_team_options options = {.fabric = fabric,
                                       .rails = &one_rail,
                                       .handles = handles,
                                       .world = CALLERS + 1,
                                       .traffic_class = -1,
                                       .policy = "counted"};
    pthread_t thread[CONTEXTS];
    struct prs_region *region;
    struct prs_keys keys;

    cr_assert_eq(prs_region_register(fabric, &one_rail, &memory, &region), 0);
    prs_region_keys(region, &keys);
    options.listener = open_listener(&handles[0]);
    for (int rank = 1; rank <= CALLERS; rank++)
        handles[rank] = handles[0]; /* nobody connects to them */
    cr_assert_eq(prs_team_open(&options, &hub), 0, "%s", prs_error_text());
    for (int c = 0; c < CONTEXTS; c++)
        cr_assert_eq(pthread_create(&thread[c], NULL, drive_context, &id[c]), 0);
    for (uint32_t rank = 1; rank <= CALLERS; rank++)
        call_hub(handles, rank, words, &keys);
    __atomic_store_n(&stop_threads, 1, __ATOMIC_RELAXED);
    for (int c = 0; c < CONTEXTS; c++)
        pthread_join(thread[c], NULL);
    for (uint32_t c = 0; c < CONTEXTS; c++) {
        cr_assert_eq(words[c], CALLERS, "context %u: %llu signals", c, (unsigned long long)words[c]);
        for (uint32_t rank = 1; rank <= CALLERS; rank++)
            cr_assert_eq(words[2 * rank + c], rank);
    }
    prs_team_close(hub);
    prs_region_release(region);
}

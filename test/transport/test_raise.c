/* SPDX-License-Identifier: Apache-2.0 */
/* Two peers of one process add to one word, each driven by its own thread, on rails with and without atomics. */
#include <criterion/criterion.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <string.h>

#include "test/transport/pair.h"
#include "transport/nic/nic.h"
#include "transport/peer/fail.h"
#include "transport/peer/peer.h"
#include "transport/util/clock.h"

enum { ADDS = 600 };

static struct prs_peer_options options_of(const struct pair *pair)
{
    return (struct prs_peer_options){
        .traffic_class = -1, .policy = pair->spec->policy, .exclusive_adds = pair->spec->exclusive_adds};
}

/* Side B listens. */
static struct prs_peer *accept_second(struct pair *pair)
{
    struct prs_peer_options options = options_of(pair);
    struct prs_listener *listener;
    struct prs_handle handle;
    struct prs_peer *peer;
    uint64_t words[PRS_HANDLE_BYTES / 8];
    int r;

    must(prs_listen(pair->fabric, &pair->rails, &handle, &listener) == 0, "%s", prs_error_text());
    memcpy(words, &handle, sizeof(words));
    for (size_t i = 0; i < PRS_HANDLE_BYTES / 8; i++)
        pair_swap(pair, words[i]);
    while ((r = prs_accept(listener, &options, &peer)) == PRS_AGAIN) /* bounded by alarm() */
        sched_yield();
    must(r == 0, "%s", prs_error_text());
    prs_listener_close(listener);
    return peer;
}

static struct prs_peer *connect_second(struct pair *pair)
{
    struct prs_peer_options options = options_of(pair);
    struct prs_connector *connector;
    struct prs_handle handle;
    struct prs_peer *peer;
    uint64_t words[PRS_HANDLE_BYTES / 8];
    int r;

    for (size_t i = 0; i < PRS_HANDLE_BYTES / 8; i++)
        words[i] = pair_swap(pair, 0);
    memcpy(&handle, words, sizeof(words));
    must(prs_connect(pair->fabric, &pair->rails, &handle, &options, &connector) == 0, "%s", prs_error_text());
    while ((r = prs_connector_step(connector, &peer)) == PRS_AGAIN)
        sched_yield();
    must(r == 0, "%s", prs_error_text());
    return peer;
}

static void add_over_both(struct pair *pair)
{
    static struct prs_op op[2][ADDS];
    struct prs_peer *peer[2] = {pair->peer, connect_second(pair)};

    for (int i = 0; i < 2 * ADDS; i++) {
        struct prs_signal signal = {.dst_addr = pair->remote_words,
                                    .dst = &pair->remote_words_keys,
                                    .value = (uint64_t)i,
                                    .kind = PRS_SIGNAL_ADD,
                                    .group = (uint32_t)i % 4};
        int r;

        while ((r = prs_peer_signal(peer[i % 2], &op[i % 2][i / 2], &signal)) == PRS_BUSY)
            must(prs_peer_progress(peer[i % 2]) >= 0, "%s", prs_error_text());
        must(r == 0, "signal: %s", prs_error_text());
        must(prs_peer_progress(peer[i % 2]) >= 0, "%s", prs_error_text()); /* after each one, so that few are merged */
    }
    for (int i = 0; i < 2 * ADDS; i++)
        while (op[i % 2][i / 2].status == PRS_OP_PENDING)
            must(prs_peer_progress(peer[0]) >= 0 && prs_peer_progress(peer[1]) >= 0, "%s", prs_error_text());
    pair_barrier(pair); /* the other side has seen the sum */
    prs_peer_close(peer[1]);
}

struct driver {
    struct prs_peer *peer;
    const uint64_t *word;
    uint64_t value;
};

static void *drive(void *arg)
{
    struct driver *driver = arg;

    /* Pairs with the release store that raises the signal; bounded by alarm(). */
    while (__atomic_load_n(driver->word, __ATOMIC_ACQUIRE) != driver->value) {
        must(prs_peer_progress(driver->peer) >= 0, "%s", prs_error_text());
        sched_yield();
    }
    return NULL;
}

static void sum_up_over_both(struct pair *pair)
{
    uint64_t sum = (uint64_t)(2 * ADDS) * (2 * ADDS - 1) / 2;
    struct prs_peer *second = accept_second(pair);
    struct driver drivers[2] = {{pair->peer, pair->words, sum}, {second, pair->words, sum}};
    pthread_t thread;

    must(pthread_create(&thread, NULL, drive, &drivers[1]) == 0, "pthread_create");
    drive(&drivers[0]);
    pthread_join(thread, NULL);
    pair_barrier(pair);
    must(pair->words[0] == sum, "%llu after the last add", (unsigned long long)pair->words[0]);
    prs_peer_close(second);
}

#define RUN(name, ...)                                                                                                 \
    Test(raise, name)                                                                                                  \
    {                                                                                                                  \
        pair_run(&(struct pair_spec){__VA_ARGS__}, add_over_both, sum_up_over_both);                                   \
    }

RUN(two_peers_lose_no_add_to_a_word_in_host_memory, .policy = "counted")
RUN(two_peers_lose_no_add_to_a_word_in_device_memory, .policy = "counted", .words_on_device = true,
    .exclusive_adds = true)
RUN(two_peers_that_drain_lose_no_add, .policy = "drain", .words_on_device = true, .exclusive_adds = true)
/* Without atomics, as on EFA, but on queues that keep order. One side without atomics is enough, whichever it is. */
RUN(without_atomics_in_order_loses_no_add, .policy = "in_order", .no_atomics = {true, true})
RUN(without_atomics_counted_loses_no_add, .policy = "counted", .no_atomics = {true, true})
RUN(without_atomics_at_the_receiver_no_add_is_lost, .policy = "in_order", .no_atomics = {false, true})
RUN(without_atomics_at_the_sender_no_add_is_lost, .policy = "in_order", .no_atomics = {true, false})

/* Sets of one word take effect in order, although two writes of a NIC might not. */
static void set_often(struct pair *pair)
{
    static struct prs_op op[ADDS];

    for (uint32_t i = 0; i < ADDS; i++) {
        struct prs_signal signal = {
            .dst_addr = pair->remote_words, .dst = &pair->remote_words_keys, .value = i + 1, .group = 1};

        pair_signal(pair, &op[i], &signal);
    }
    for (uint32_t i = 0; i < ADDS; i++)
        pair_wait_op(pair, &op[i]);
}

static void see_them_grow(struct pair *pair)
{
    uint64_t last = 0, now;

    while ((now = __atomic_load_n(pair->words, __ATOMIC_ACQUIRE)) != ADDS) {
        must(now >= last, "%llu after %llu", (unsigned long long)now, (unsigned long long)last);
        last = now;
        must(prs_peer_progress(pair->peer) >= 0, "%s", prs_error_text());
    }
    pair_barrier(pair);
    must(pair->words[0] == ADDS, "the last value does not stay: %llu", (unsigned long long)pair->words[0]);
}

static void set_often_and_meet(struct pair *pair)
{
    set_often(pair);
    pair_barrier(pair);
}

Test(raise, sets_of_one_word_in_device_memory_keep_their_order)
{
    pair_run(&(struct pair_spec){.policy = "counted", .words_on_device = true}, set_often_and_meet, see_them_grow);
}

Test(raise, sets_of_one_word_in_host_memory_keep_their_order)
{
    pair_run(&(struct pair_spec){.policy = "counted"}, set_often_and_meet, see_them_grow);
}

/* The peer that has claimed the word makes no progress. A peer that waits for the word reports an error in time. */
static void add_next_to_an_idle_peer(struct pair *pair)
{
    static struct prs_op op[2];
    struct prs_peer *peer[2] = {connect_second(pair), pair->peer};

    for (int i = 0; i < 2; i++) {
        struct prs_signal signal = {
            .dst_addr = pair->remote_words, .dst = &pair->remote_words_keys, .value = 1, .kind = PRS_SIGNAL_ADD};

        must(prs_peer_signal(peer[i], &op[i], &signal) == 0, "%s", prs_error_text());
        while (op[i].status == PRS_OP_PENDING)
            must(prs_peer_progress(peer[i]) >= 0, "%s", prs_error_text());
        pair_swap(pair, 0);
    }
    pair_swap(pair, 0); /* do not close before the other side is done */
    prs_peer_close(peer[0]);
}

static void wait_next_to_an_idle_peer(struct pair *pair)
{
    struct prs_peer *holder = accept_second(pair);
    int r;

    pair_swap(pair, 0); /* its record has arrived */
    while (holder->records->raise.stage == PRS_RAISE_IDLE)
        must(prs_peer_progress(holder) >= 0, "%s", prs_error_text());
    pair_swap(pair, 0); /* makes progress on the other peer, which waits */
    pair->fabric->config.timeout_ms = 300;
    r = pair_wait_error(pair);
    must(r == -ETIMEDOUT && strstr(prs_peer_error(pair->peer), "does nobody progress"), "%d %s", r,
         prs_peer_error(pair->peer));
    pair_swap(pair, 0);
    prs_peer_close(holder);
}

Test(raise, waiting_for_a_word_that_is_never_released_is_an_error_in_time)
{
    if (pair_rails_keep("in_order"))
        cr_skip_test("these rails have atomics");
    pair_run(&(struct pair_spec){.policy = "counted", .words_on_device = true, .exclusive_adds = true, .b_dies = true},
             add_next_to_an_idle_peer, wait_next_to_an_idle_peer);
}

static void add_once(struct pair *pair)
{
    struct prs_signal signal = {
        .dst_addr = pair->remote_words, .dst = &pair->remote_words_keys, .value = 1, .kind = PRS_SIGNAL_ADD};
    struct prs_op op;

    must(prs_peer_signal(pair->peer, &op, &signal) == 0, "%s", prs_error_text());
    while (op.status == PRS_OP_PENDING && prs_peer_progress(pair->peer) >= 0)
        ; /* done when the record has arrived, unless the other side fails first */
}

static void refuse_to_add(struct pair *pair)
{
    int r = pair_wait_error(pair);

    must(r == -EOPNOTSUPP && strstr(prs_peer_error(pair->peer), "no atomics"), "%d %s", r, prs_peer_error(pair->peer));
    must(pair->words[0] == 0, "nothing was written");
}

Test(raise, an_add_to_device_memory_that_others_may_add_to_is_refused_without_atomics)
{
    if (pair_rails_keep("in_order"))
        cr_skip_test("these rails have atomics");
    pair_run(&(struct pair_spec){.policy = "counted", .words_on_device = true, .b_dies = true}, add_once,
             refuse_to_add);
}

/* ---- a lost rail, and memory that the other one does not know ---- */

/* The thread that attends to idle peers may be taking the note just now. */
static bool rail_0_is_lost(struct prs_peer *peer)
{
    bool lost;

    prs_peer_lock(peer);
    lost = prs_peer_lost_path(peer, 0);
    prs_peer_unlock(peer);
    return lost;
}

static void wait_until_rail_0_is_lost(struct pair *pair)
{
    uint64_t give_up = prs_clock_ms() + PAIR_TIMEOUT_MS;

    while (!rail_0_is_lost(pair->peer)) {
        must(prs_peer_progress(pair->peer) >= 0, "%s", prs_error_text());
        must(prs_clock_ms() < give_up, "the loss was not agreed upon");
    }
}

static void signal_after_a_loss(struct pair *pair)
{
    struct prs_signal signal = {
        .dst_addr = pair->remote_words, .dst = &pair->remote_words_keys, .value = 1, .kind = PRS_SIGNAL_SET};
    struct prs_keys keys = {{0}};
    uint64_t addr = pair_swap(pair, 0);
    struct prs_op op;
    int r;

    keys.rkey[0] = pair_swap(pair, 0);
    wait_until_rail_0_is_lost(pair);
    pair_signal(pair, &op, &signal); /* the other rail knows this word */
    pair_wait_op(pair, &op);
    while ((r = prs_peer_settle(pair->peer)) == PRS_AGAIN)
        must(prs_peer_progress(pair->peer) >= 0, "%s", prs_error_text());
    must(r == 0, "%s", prs_error_text());
    signal.dst_addr = addr;
    signal.dst = &keys;
    pair_signal(pair, &op, &signal);
    r = pair_wait_error(pair);
    must(r < 0 && strstr(prs_peer_error(pair->peer), "that is not registered on"), "%d %s", r,
         prs_peer_error(pair->peer));
}

static void lose_the_rail_that_knows(struct pair *pair)
{
    static const struct prs_rail_set first = {1, {0}};
    struct prs_mem memory = {
        .addr = pair->buffer, .len_bytes = 4096, .kind = PRS_MEM_CUDA, .dmabuf_fd = -1, .flags = PRS_MEM_STRICT};
    struct prs_region *region;
    struct prs_keys keys;
    int r;

    must(prs_region_register(pair->fabric, &first, &memory, &region) == 0, "%s", prs_error_text());
    prs_region_keys(region, &keys);
    pair_swap(pair, (uintptr_t)pair->buffer);
    pair_swap(pair, keys.rkey[0]);
    prs_peer_lock(pair->peer); /* the thread of watch.c may hold the peer */
    pair->peer->nic->kill(pair->peer->link[0]);
    prs_peer_unlock(pair->peer);
    r = pair_wait_error(pair);
    must(r == -ENETDOWN && strstr(prs_peer_error(pair->peer), "a rail is lost, and a signal goes to device memory"),
         "%d %s", r, prs_peer_error(pair->peer));
    must(pair->words[0] == 1, "the word that both rails know was set");
    prs_region_release(region);
}

Test(raise, a_signal_to_memory_of_a_lost_rail_alone_is_an_error_that_names_the_other)
{
    if (!pair_rails_keep("in_order"))
        cr_skip_test("queues that keep no order: a lost rail ends the peer");
    setenv("NCCL_IB_RESILIENCY_PORT_FAILOVER", "1", 1);
    pair_run(&(struct pair_spec){.policy = "counted", .rails = {2, 2}, .words_on_device = true}, signal_after_a_loss,
             lose_the_rail_that_knows);
}

/* An immediate has room for more slots than there are records. */
static void take_records_of_no_slot(struct pair *pair)
{
    for (uint32_t slot = PRS_RECORDS; slot <= PRS_IMM_MAX_TAG; slot++) {
        struct prs_imm imm = {.bare = true, .kind = PRS_BARE_RECORD, .tag = (uint16_t)slot};

        must(prs_records_arrive(pair->peer, &imm, 0) == -EPROTO, "slot %u", slot);
    }
}

static void do_nothing(struct pair *pair)
{
    (void)pair;
}

Test(raise, a_record_of_no_slot_is_refused)
{
    pair_run(&(struct pair_spec){.policy = "counted"}, take_records_of_no_slot, do_nothing);
}

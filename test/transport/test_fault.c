/* SPDX-License-Identifier: Apache-2.0 */
/* Every failure of a connected pair is reported as an error, in bounded time and by name. */
#include <criterion/criterion.h>
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "test/transport/pair.h"
#include "transport/nic/verbs/verbs_nic.h"
#include "transport/peer/peer.h"
#include "transport/util/clock.h"

static const struct pair_spec plain = {.buffer_bytes = 1 << 20};

static void do_nothing(struct pair *pair)
{
    (void)pair;
}

static void must_name_both_ends(struct pair *pair)
{
    const char *text = prs_peer_error(pair->peer);
    struct prs_rail_info info;

    must(prs_rail_query(pair->fabric, 0, &info) == 0, "%s", prs_error_text());
    must(strstr(text, info.name) && strstr(text, info.gid) && strstr(text, " to "), "the text is: %s", text);
}

/* libfabric's software providers end the connection, without a reason, where verbs says that the request was wrong. */
static bool is_refusal(const struct pair *pair, int r)
{
    bool by_verbs = pair->fabric->rail[0].domain->lister == &prs_nic_rc;

    return r == -EREMOTEIO || (!by_verbs && (r == -ECONNRESET || r == -ETIMEDOUT));
}

static void write_with_a_bad_key(struct pair *pair)
{
    struct prs_put put = pair_put_of(pair, 0, 0, 4096, 1, PRS_PUT_NOTIFY);
    struct prs_keys wrong = {{0}};
    struct prs_op op, behind;
    int r;

    for (int i = 0; i < PRS_MAX_RAILS; i++)
        wrong.rkey[i] = pair->remote_keys.rkey[i] ^ 0x5a5a5a5a;
    put.dst = &wrong;
    must(prs_peer_put(pair->peer, &op, &put) == 0, "%s", prs_error_text());
    must(prs_peer_put(pair->peer, &behind, &put) == 0, "%s", prs_error_text());
    r = pair_wait_error(pair);
    must(is_refusal(pair, r), "%d %s", r, prs_error_text());
    must(op.status == r && behind.status == r, "%d %d", op.status, behind.status);
    must_name_both_ends(pair);
    must(prs_peer_put(pair->peer, &op, &put) == r && prs_peer_progress(pair->peer) == r, "the error stays");
}

static void see_the_queue_closed(struct pair *pair)
{
    int r = pair_wait_error(pair); /* the error is the violation itself, or the end of the other process */

    must(r == -ECONNRESET || r == -EIO || is_refusal(pair, r), "%d %s", r, prs_error_text());
}

Test(fault, a_bad_remote_key_is_a_remote_error)
{
    pair_run(&plain, write_with_a_bad_key, do_nothing);
}

/* The lower half of the key alone is correct. */
static void write_with_a_key_that_is_too_long(struct pair *pair)
{
    struct prs_put put = pair_put_of(pair, 0, 0, 4096, 1, PRS_PUT_NOTIFY);
    struct prs_keys wrong = pair->remote_keys;
    struct prs_op op;
    int r;

    wrong.rkey[0] |= 1ull << 40;
    put.dst = &wrong;
    r = prs_peer_put(pair->peer, &op, &put);
    must(r == -EREMOTEIO && op.status == -EREMOTEIO, "%d %d", r, op.status);
    must(strstr(prs_peer_error(pair->peer), "32 bits"), "%s", prs_peer_error(pair->peer));
    must_name_both_ends(pair);
}

Test(fault, a_key_of_more_bits_than_the_nic_has_is_refused)
{
    if (getenv("PERSEUS_PROVIDER"))
        cr_skip_test("libfabric's keys have 64 bits");
    pair_run(&plain, write_with_a_key_that_is_too_long, do_nothing);
}

static void write_beyond_the_region(struct pair *pair)
{
    struct prs_put put = pair_put_of(pair, 0, pair->buffer_bytes - 100, 4096, 1, 0);
    struct prs_op op;
    int r;

    must(prs_peer_put(pair->peer, &op, &put) == 0, "%s", prs_error_text());
    r = pair_wait_error(pair);
    must(is_refusal(pair, r) && op.status == r, "%d %d", r, op.status);
}

Test(fault, a_write_beyond_the_region_is_a_remote_error)
{
    pair_run(&plain, write_beyond_the_region, do_nothing);
}

static void use_bad_arguments(struct pair *pair)
{
    struct prs_put put = pair_put_of(pair, 0, 0, 8, 1, 0);
    struct prs_op op;

    put.src = NULL;
    must(prs_peer_put(pair->peer, &op, &put) == -EINVAL, "no source region");
    put = pair_put_of(pair, 0, 0, 65, 1, PRS_PUT_INLINE);
    must(prs_peer_put(pair->peer, &op, &put) == -EINVAL, "too long for inline");
    put = pair_put_of(pair, 0, 0, 8, PRS_NOTIFY_IDS, PRS_PUT_NOTIFY);
    must(prs_peer_put(pair->peer, &op, &put) == -EINVAL, "no such id");
    put = pair_put_of(pair, 0, 0, 8, 1, 0);
    put.dst = NULL;
    must(prs_peer_put(pair->peer, &op, &put) == -EINVAL, "no keys");
    put = pair_put_of(pair, 0, 0, 8, 1, 0);
    must(prs_peer_put(pair->peer, &op, &put) == 0, "the peer is still sound: %s", prs_error_text());
    pair_wait_op(pair, &op);
}

Test(fault, bad_arguments_are_refused_and_harm_nothing)
{
    pair_run(&plain, use_bad_arguments, do_nothing);
}

static void vanish(struct pair *pair)
{
    pair_barrier(pair);
    pair_vanish();
}

static void wait_for_one_that_died(struct pair *pair)
{
    uint64_t start;
    int r;

    pair_barrier(pair);
    start = prs_clock_ms();
    r = pair_wait_error(pair);
    must(r == -ECONNRESET, "%d %s", r, prs_error_text());
    must(strstr(prs_peer_error(pair->peer), "died"), "%s", prs_peer_error(pair->peer));
    must(prs_clock_ms() - start < 60000, "took %llu ms", (unsigned long long)(prs_clock_ms() - start));
}

Test(fault, a_receiver_learns_that_its_peer_has_died)
{
    pair_run(&(struct pair_spec){.b_dies = true}, wait_for_one_that_died, vanish);
}

/* Transfers in flight are cut off anywhere: a message has begun to arrive, and its end never does. */
static void vanish_while_sending(struct pair *pair)
{
    static const uint64_t sizes[] = {1 << 20, 60000, 9000, 4096};
    static struct prs_op op[64];
    struct prs_put put;

    for (uint32_t i = 0, r = 0; i < 64 && !r; i++) {
        put = pair_put_of(pair, 0, 0, sizes[i % 4], i, PRS_PUT_NOTIFY);
        r = (uint32_t)prs_peer_put(pair->peer, &op[i], &put);
    }
    for (int i = 0; i < 50; i++)
        must(prs_peer_progress(pair->peer) >= 0, "%s", prs_error_text());
    pair_vanish();
}

Test(fault, a_receiver_outlives_a_sender_that_dies_while_it_sends)
{
    for (int i = 0; i < 3; i++)
        pair_run(&(struct pair_spec){.b_dies = true, .max_ops = 64}, see_the_queue_closed, vanish_while_sending);
}

/* The child of a data loader, say: it inherits every descriptor, and outlives its parent. */
static void leave_a_child(struct pair *pair)
{
    pid_t child = fork();

    must(child >= 0, "fork: %s", strerror(errno));
    if (child == 0) {
        alarm(PAIR_TIMEOUT_MS / 1000);
        pause();
        _exit(0);
    }
    pair_swap(pair, (uint64_t)child);
    pair_vanish();
}

static void wait_for_one_whose_child_lives(struct pair *pair)
{
    pid_t child = (pid_t)pair_swap(pair, 0);
    uint64_t start = prs_clock_ms();
    int r = pair_wait_error(pair);

    must(kill(child, SIGKILL) == 0, "the child has ended: %s", strerror(errno));
    must(r == -ECONNRESET && strstr(prs_peer_error(pair->peer), "died"), "%d %s", r, prs_error_text());
    must(prs_clock_ms() - start < 60000, "took %llu ms", (unsigned long long)(prs_clock_ms() - start));
}

Test(fault, a_receiver_learns_that_its_peer_has_died_though_its_child_lives)
{
    pair_run(&(struct pair_spec){.b_dies = true}, wait_for_one_whose_child_lives, leave_a_child);
}

enum { HANDLE_WORDS = PRS_HANDLE_BYTES / sizeof(uint64_t) };

static void leave_a_child_and_a_handle(struct pair *pair)
{
    struct prs_listener *listener;
    uint64_t words[HANDLE_WORDS] = {0};

    must(prs_listen(pair->fabric, &pair->rails, (struct prs_handle *)words, &listener) == 0, "%s", prs_error_text());
    for (int i = 0; i < HANDLE_WORDS; i++)
        pair_swap(pair, words[i]);
    leave_a_child(pair);
}

static void call_one_whose_child_lives(struct pair *pair)
{
    struct prs_connector *connector;
    uint64_t words[HANDLE_WORDS];
    struct prs_peer *peer;
    pid_t child;
    int r;

    for (int i = 0; i < HANDLE_WORDS; i++)
        words[i] = pair_swap(pair, 0);
    child = (pid_t)pair_swap(pair, 0);
    must(pair_wait_error(pair) == -ECONNRESET, "%s", prs_error_text()); /* it is dead now */
    r = prs_connect(pair->fabric, &pair->rails, (struct prs_handle *)words, NULL, &connector);
    while (r == 0 || r == PRS_AGAIN)
        r = prs_connector_step(connector, &peer);
    must(kill(child, SIGKILL) == 0, "the child has ended: %s", strerror(errno));
    must(r == -ECONNREFUSED, "%d %s", r, prs_error_text());
}

Test(fault, a_caller_of_a_dead_process_is_refused_though_its_child_lives)
{
    pair_run(&(struct pair_spec){.b_dies = true}, call_one_whose_child_lives, leave_a_child_and_a_handle);
}

static void send_to_one_that_died(struct pair *pair)
{
    static struct prs_op op[64];
    struct prs_put put = pair_put_of(pair, 0, 0, 4096, 0, 0);
    uint64_t start;
    int r, started = 0;

    pair_barrier(pair);
    start = prs_clock_ms();
    for (; started < 64 && prs_peer_put(pair->peer, &op[started], &put) == 0; started++)
        ;
    while ((r = prs_peer_progress(pair->peer)) >= 0) {
        must(prs_clock_ms() - start < 100000, "no error came");
        for (int i = 0; i < started; i++) /* keep sending: puts may complete until the peer dies */
            if (op[i].status == 0)
                prs_peer_put(pair->peer, &op[i], &put);
    }
    must(r == -ECONNRESET || r == -ETIMEDOUT || r == -EREMOTEIO, "%d %s", r, prs_error_text());
    for (int i = 0; i < started; i++)
        must(op[i].status == r || op[i].status == 0, "op %d: %d", i, op[i].status);
    must(strlen(prs_peer_error(pair->peer)) > 40, "%s", prs_peer_error(pair->peer));
}

Test(fault, a_sender_learns_that_its_peer_has_died)
{
    pair_run(&(struct pair_spec){.b_dies = true}, send_to_one_that_died, vanish);
}

static void signal_with_another_key(struct pair *pair)
{
    struct prs_signal signal = {.dst_addr = pair->remote_words, .dst = &pair->remote_keys, .value = 1}; /* the data's */
    struct prs_op op;
    int r;

    if (!pair->fabric->rail[0].domain->adds)
        return; /* the receiver raises it: see below */
    must(prs_peer_signal(pair->peer, &op, &signal) == 0, "%s", prs_error_text());
    r = pair_wait_error(pair);
    must(r == -EREMOTEIO, "%d %s", r, prs_error_text());
}

Test(fault, a_signal_with_the_key_of_another_region_is_a_remote_error)
{
    pair_run(&(struct pair_spec){.policy = "in_order"}, signal_with_another_key, do_nothing);
}

/* Done when the record has arrived, unless the other side fails first. */
static void signal_counted(struct pair *pair, const struct prs_keys *keys)
{
    struct prs_signal signal = {.dst_addr = pair->remote_words, .dst = keys, .value = 1};
    struct prs_op op;

    must(prs_peer_signal(pair->peer, &op, &signal) == 0, "%s", prs_error_text());
    while (op.status == PRS_OP_PENDING && prs_peer_progress(pair->peer) >= 0)
        ;
}

static void signal_counted_with_the_key_of_the_data(struct pair *pair)
{
    signal_counted(pair, &pair->remote_keys);
}

static void signal_counted_with_a_changed_lower_half(struct pair *pair)
{
    struct prs_keys keys = pair->remote_words_keys;

    keys.rkey[0] ^= 1 << 20;
    signal_counted(pair, &keys);
}

static void signal_counted_with_a_changed_upper_half(struct pair *pair)
{
    struct prs_keys keys = pair->remote_words_keys;

    keys.rkey[0] ^= 1ull << 40;
    signal_counted(pair, &keys);
}

static void refuse_to_raise(struct pair *pair)
{
    see_the_queue_closed(pair);
    must(pair->words[0] == 0, "nothing was written");
}

Test(fault, the_receiver_raises_no_signal_with_a_wrong_key)
{
    static const struct pair_spec counted = {.policy = "counted"};

    pair_run(&counted, signal_counted_with_the_key_of_the_data, refuse_to_raise);
    pair_run(&counted, signal_counted_with_a_changed_lower_half, refuse_to_raise);
    pair_run(&counted, signal_counted_with_a_changed_upper_half, refuse_to_raise);
}

static void close_early(struct pair *pair)
{
    (void)pair; /* without a barrier: the peer is closed while the other side writes */
}

static void write_to_one_that_closed(struct pair *pair)
{
    struct prs_put put = pair_put_of(pair, 0, 0, 4096, 1, 0);
    struct prs_op op = {0};
    uint64_t start = prs_clock_ms();
    int r = 0;

    while (r >= 0) {
        if (op.status != PRS_OP_PENDING)
            r = prs_peer_put(pair->peer, &op, &put);
        if (r >= 0)
            r = prs_peer_progress(pair->peer);
        if (!r)
            sched_yield();
    }
    must(prs_clock_ms() - start < 100000, "took %llu ms", (unsigned long long)(prs_clock_ms() - start));
    must(r == -ETIMEDOUT || r == -ECONNRESET, "%d %s", r, prs_error_text());
    must(strstr(prs_peer_error(pair->peer), "closed"), "%s", prs_peer_error(pair->peer));
}

Test(fault, a_sender_learns_that_its_peer_has_closed)
{
    pair_run(&(struct pair_spec){.b_dies = true}, write_to_one_that_closed, close_early);
}

static useconds_t pause_us; /* after each poll */

/* A lazy put that fails is no error, since no one waits for it. Waiting for the other side's writes is an error. */
static void outlive_one_that_closed(struct pair *pair)
{
    struct prs_put put = pair_put_of(pair, 0, 0, 8, 1, PRS_PUT_LAZY | PRS_PUT_NOTIFY);
    struct prs_op lazy;
    uint64_t start;
    int r = 0;

    pair_put(pair, &lazy, &put);
    pair_barrier(pair);
    start = prs_clock_ms();
    while ((r = prs_peer_check_remote(pair->peer)) == 0) {
        r = prs_peer_progress(pair->peer);
        must(r >= 0, "a lazy put to a closed peer: %s", prs_error_text());
        must(prs_clock_ms() - start < 30000, "the waiting side got no error");
        if (pause_us)
            usleep(pause_us);
    }
    must(r == -ECONNRESET && strstr(prs_error_text(), "closed"), "%d %s", r, prs_error_text());
    must(prs_peer_progress(pair->peer) == -ECONNRESET, "the error stays");
}

static void close_when_it_is_here(struct pair *pair)
{
    pair_wait_notified(pair, 1);
    pair_barrier(pair);
}

Test(fault, waiting_for_a_peer_that_has_closed_is_an_error)
{
    pair_run(&(struct pair_spec){.b_dies = true}, outlive_one_that_closed, close_when_it_is_here);
}

/* Polls are rare, as on a busy machine, where a caller that yields gets the processor back after milliseconds. */
Test(fault, a_caller_that_polls_rarely_learns_soon_that_its_peer_has_closed)
{
    pause_us = 4000;
    pair_run(&(struct pair_spec){.b_dies = true}, outlive_one_that_closed, close_when_it_is_here);
}

enum { SIGNALS_A_CREDIT = 256 }; /* PRS_RECORD_CREDIT */

/* This side raises the signals of a peer that has closed, and sends it a credit that the peer does not receive. */
static void owe_credit_to_one_that_closed(struct pair *pair)
{
    uint64_t start;
    int r;

    pair_barrier(pair);
    sleep(1);
    start = prs_clock_ms();
    while (prs_clock_ms() - start < 4000) { /* the NIC retries for one second */
        must(prs_peer_progress(pair->peer) >= 0, "nothing here waits for the other side: %s", prs_error_text());
        sched_yield();
    }
    must(pair->words[SIGNALS_A_CREDIT - 1] == SIGNALS_A_CREDIT, "the last signal is not raised");
    while ((r = prs_peer_check_remote(pair->peer)) == 0) { /* over libfabric a close may take seconds */
        must(prs_peer_progress(pair->peer) >= 0, "nothing here waits for the other side: %s", prs_error_text());
        must(prs_clock_ms() - start < 60000, "waiting is an error");
    }
    must(r == -ECONNRESET, "waiting is an error: %d %s", r, prs_error_text());
}

static void signal_and_close(struct pair *pair)
{
    static struct prs_op op[SIGNALS_A_CREDIT];

    pair_barrier(pair);
    for (uint32_t i = 0; i < SIGNALS_A_CREDIT; i++) {
        struct prs_signal signal = {
            .dst = &pair->remote_words_keys, .dst_addr = pair->remote_words + i * 8, .value = i + 1};
        int r;

        while ((r = prs_peer_signal(pair->peer, &op[i], &signal)) == PRS_BUSY)
            must(prs_peer_progress(pair->peer) >= 0, "%s", prs_error_text());
        must(r == 0, "%s", prs_error_text());
    }
    for (uint32_t i = 0; i < SIGNALS_A_CREDIT; i++)
        pair_wait_op(pair, &op[i]);
}

Test(fault, a_credit_to_a_peer_that_has_closed_is_no_error)
{
    pair_run(&(struct pair_spec){.policy = "counted", .b_dies = true}, owe_credit_to_one_that_closed, signal_and_close);
}

/* The queues report nothing, so only the event shows the failure. */
static void lose_the_device(struct pair *pair)
{
    struct prs_domain *domain = pair->peer->fabric->rail[pair->rails.rail[0]].domain;
    int r;

    prs_domain_lose(domain, "local catastrophic error"); /* as the event thread would */
    r = pair_wait_error(pair);
    must(r == -EIO, "%d %s", r, prs_error_text());
    must(strstr(prs_peer_error(pair->peer), domain->name), "%s", prs_peer_error(pair->peer));
}

Test(fault, a_lost_device_is_an_error_even_while_only_waiting)
{
    pair_run(&plain, lose_the_device, do_nothing);
}

/* ---- the network of the TCP connection ---- */

/* Behave as if keepalive probes failed. The real connection stays open, so the other side sees no end of stream. */
static void lose_the_stream(struct pair *pair)
{
    struct sockaddr_in nobody = {.sin_family = AF_INET, .sin_port = htons(1), .sin_addr = {htonl(INADDR_LOOPBACK)}};
    int broken = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);

    must(dup(pair->peer->stream_fd) >= 0, "dup");
    must(broken >= 0 && connect(broken, (struct sockaddr *)&nobody, sizeof(nobody)) < 0, "somebody listens on port 1");
    must(dup2(broken, pair->peer->stream_fd) >= 0, "dup2");
}

/* Long enough for several writes that ask whether the peer is alive. */
static void wait_in_vain(struct pair *pair)
{
    uint64_t until = prs_clock_ms() + 3000;

    while (prs_clock_ms() < until || !pair->peer->stream_lost) {
        must(prs_peer_progress(pair->peer) >= 0, "the peer is alive: %s", prs_error_text());
        must(prs_peer_check_remote(pair->peer) == 0, "the peer is alive: %s", prs_error_text());
    }
}

static void send_without_a_stream(struct pair *pair)
{
    struct prs_put put = pair_put_of(pair, 0, 0, 4096, 1, PRS_PUT_NOTIFY);
    struct prs_op op;

    lose_the_stream(pair);
    wait_in_vain(pair);
    pair_barrier(pair);
    pair_put(pair, &op, &put);
    pair_wait_op(pair, &op);
}

static void receive_without_a_stream(struct pair *pair)
{
    lose_the_stream(pair);
    wait_in_vain(pair);
    pair_barrier(pair);
    pair_wait_notified(pair, 1);
}

Test(fault, without_the_tcp_network_transfers_go_on)
{
    pair_run(&plain, send_without_a_stream, receive_without_a_stream);
}

static void learn_of_a_death_without_a_stream(struct pair *pair)
{
    uint64_t give_up = prs_clock_ms() + 100000;
    int r = 0;

    lose_the_stream(pair);
    pair_barrier(pair);
    while (!r) {
        r = prs_peer_progress(pair->peer);
        r = r < 0 ? r : prs_peer_check_remote(pair->peer);
        must(prs_clock_ms() < give_up, "no error came");
    }
    must(r == -ETIMEDOUT || r == -ECONNRESET, "%d %s", r, prs_error_text());
    must_name_both_ends(pair);
}

static void vanish_without_a_stream(struct pair *pair)
{
    lose_the_stream(pair);
    pair_barrier(pair);
    pair_vanish();
}

Test(fault, without_the_tcp_network_a_write_shows_that_the_peer_has_died)
{
    pair_run(&(struct pair_spec){.b_dies = true}, learn_of_a_death_without_a_stream, vanish_without_a_stream);
}

/* ---- a failure that no caller waits for ---- */

/* A farewell may follow, but no call waits for it. */
static void fail_a_lazy_put(struct pair *pair)
{
    struct prs_put put = pair_put_of(pair, 0, 0, 8, 1, PRS_PUT_LAZY);
    uint64_t give_up = prs_clock_ms() + 100000;
    bool was_suspended = false;
    struct prs_op lazy;
    int r = 0;

    pair_barrier(pair);
    pair_put(pair, &lazy, &put);
    while (r >= 0) {
        r = prs_peer_progress(pair->peer);
        was_suspended |= r >= 0 && pair->peer->farewell_ns;
        must(prs_clock_ms() < give_up, "no error came");
    }
    must(was_suspended, "the call that found the failure waited for the farewell");
    must(r == -ETIMEDOUT || r == -ECONNRESET, "%d %s", r, prs_error_text());
}

static void stop_the_queues(struct pair *pair)
{
    pair->peer->nic->kill(pair->peer->link[0]);
    __atomic_store_n(&pair->peer->error, -ECANCELED, __ATOMIC_RELAXED); /* no progress, so no error here */
    pair_barrier(pair);
    sleep(20);
}

/* A libfabric provider may try to connect again for longer than the other side sleeps. */
Test(fault, no_call_waits_for_a_farewell)
{
    if (getenv("PERSEUS_PROVIDER"))
        cr_skip_test("it needs a NIC that gives up soon");
    pair_run(&(struct pair_spec){.b_dies = true}, fail_a_lazy_put, stop_the_queues);
}

/* SPDX-License-Identifier: Apache-2.0 */
/* What perseus-hwcheck's trials find, over a fake network whose queues are right alone and may be wrong under load. */
#include <criterion/criterion.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "tools/hwcheck/trial.h"

enum { PAIRS = 400, WAITING = 2 * SLOTS + QUEUES_MOST, HELD_POLLS = 1000 };
enum fault { NONE, OVERTAKES, LOSES_ADDS };

struct request {
    struct prs_op *op;
    const void *from; /* NULL: a signal */
    uint64_t to, value;
    size_t bytes;
    enum prs_signal_kind kind;
    uint32_t flags, id;
};

/* A queue: its requests, oldest first. Only its own side's thread uses it. */
struct prs_peer {
    struct link *other;
    struct request waiting[WAITING];
    uint32_t first, end;
    uint64_t held_until; /* polls of the receiver */
};

static struct {
    struct link sends, receives;
    struct prs_peer queue[2][QUEUES_MOST];
    enum fault fault;
    uint64_t polls; /* of the receiver */
} net;

/* ---- the network ---- */

static struct request *next_of(struct prs_peer *queue)
{
    return &queue->waiting[queue->first % WAITING];
}

static int enter(struct prs_peer *queue, struct request request)
{
    if (queue->end - queue->first == WAITING)
        return PRS_BUSY;
    request.op->status = PRS_OP_PENDING;
    queue->waiting[queue->end++ % WAITING] = request;
    return 0;
}

int prs_peer_put(struct prs_peer *queue, struct prs_op *op, const struct prs_put *put)
{
    return enter(queue, (struct request){.op = op,
                                         .from = put->src_addr,
                                         .to = put->dst_addr,
                                         .bytes = put->len_bytes,
                                         .flags = put->flags,
                                         .id = put->notify_id});
}

int prs_peer_signal(struct prs_peer *queue, struct prs_op *op, const struct prs_signal *signal)
{
    return enter(queue,
                 (struct request){.op = op, .to = signal->dst_addr, .value = signal->value, .kind = signal->kind});
}

static void deliver(struct link *other, const struct request *request)
{
    uint64_t *word = (uint64_t *)(uintptr_t)request->to;

    if (!request->from && request->kind == PRS_SIGNAL_ADD)
        __atomic_fetch_add(word, request->value, __ATOMIC_ACQ_REL);
    else if (!request->from)
        __atomic_store_n(word, request->value, __ATOMIC_RELEASE);
    else
        memcpy(word, request->from, request->bytes);
    if (request->flags & PRS_PUT_NOTIFY) {
        other->odd += request->bytes != other->announced_bytes;
        __atomic_fetch_add(&other->notified[request->id], 1, __ATOMIC_RELEASE);
    }
    __atomic_store_n(&request->op->status, 0, __ATOMIC_RELEASE);
}

static bool is_add(const struct prs_peer *queue)
{
    const struct request *next = &queue->waiting[queue->first % WAITING];

    return queue->end != queue->first && !next->from && next->kind == PRS_SIGNAL_ADD;
}

/* Of adds of several queues at the same time each but the first has read too early. */
static void lose_adds(struct prs_peer *queues, uint32_t count)
{
    bool seen = false;

    for (uint32_t i = 0; i < count; i++) {
        if (is_add(&queues[i]) && seen)
            next_of(&queues[i])->value = 0;
        seen |= is_add(&queues[i]);
    }
}

/* On one queue, while others have work, what follows a put passes it. The put waits until the receiver has looked. */
static void overtake(struct prs_peer *queues, uint32_t count)
{
    struct prs_peer *queue = &queues[count - 1];
    bool is_loaded = false;

    for (uint32_t i = 0; i + 1 < count; i++)
        is_loaded |= queues[i].end != queues[i].first;
    if (is_loaded && queue->end - queue->first >= 2 && next_of(queue)->from && next_of(queue)->bytes == SLOT_BYTES) {
        struct request put = *next_of(queue);

        deliver(queue->other, &queue->waiting[(queue->first + 1) % WAITING]);
        queue->waiting[++queue->first % WAITING] = put;
        queue->held_until = __atomic_load_n(&net.polls, __ATOMIC_RELAXED) + HELD_POLLS;
    }
}

int link_progress(struct link *link)
{
    bool sends = link == &net.sends;
    struct prs_peer *queues = net.queue[!sends];

    if (!sends)
        __atomic_add_fetch(&net.polls, 1, __ATOMIC_RELAXED);
    for (uint32_t i = 0; i < link->queues; i++) {
        struct prs_peer *queue = &queues[i];

        if (queue->end == queue->first || __atomic_load_n(&net.polls, __ATOMIC_RELAXED) < queue->held_until)
            continue;
        if (sends && net.fault == LOSES_ADDS)
            lose_adds(queues, link->queues);
        if (sends && net.fault == OVERTAKES && i + 1 == link->queues && queue->held_until == 0)
            overtake(queues, link->queues);
        else
            queue->held_until = 0;
        if (queue->held_until)
            continue;
        deliver(queue->other, next_of(queue));
        queue->first++;
    }
    return 0;
}

bool control_has_input(int control)
{
    return control > 0;
}

/* ---- both sides ---- */

struct wanted {
    enum trial_kind kind;
    int result;
    struct outcome outcome;
};

static void *send_all(void *arg)
{
    struct wanted *wanted = arg;

    while (!__atomic_load_n(&net.polls, __ATOMIC_ACQUIRE)) /* the other side is ready */
        ;
    wanted->result = trial_send(&net.sends, wanted->kind, PAIRS, &wanted->outcome);
    return NULL;
}

static void open_side(struct link *link, struct link *other, struct prs_peer *queues, uint32_t count)
{
    link->data = aligned_alloc(4096, DATA_BYTES);
    link->words = aligned_alloc(4096, 4096); /* WORDS and more */
    cr_assert(link->data && link->words);
    link->queues = count;
    for (uint32_t i = 0; i < count; i++) {
        link->peer[i] = &queues[i];
        queues[i].other = other;
    }
}

static void close_side(struct link *link)
{
    free(link->data);
    free(link->words);
}

static struct outcome try(enum trial_kind kind, uint32_t queues, enum fault fault)
{
    struct wanted wanted = {.kind = kind};
    struct outcome outcome;
    pthread_t thread;

    memset(&net, 0, sizeof(net));
    net.fault = fault;
    open_side(&net.sends, &net.receives, net.queue[0], queues);
    open_side(&net.receives, &net.sends, net.queue[1], queues);
    net.sends.remote =
        (struct place_of_memory){(uintptr_t)net.receives.data, (uintptr_t)net.receives.words, {{0}}, {{0}}};
    net.receives.remote = (struct place_of_memory){(uintptr_t)net.sends.data, (uintptr_t)net.sends.words, {{0}}, {{0}}};
    trial_prepare(&net.sends);
    trial_prepare(&net.receives);
    cr_assert_eq(pthread_create(&thread, NULL, send_all, &wanted), 0);
    cr_assert_eq(trial_receive(&net.receives, kind, PAIRS, &outcome), 0, "kind %d over %u queues", kind, queues);
    pthread_join(thread, NULL);
    cr_assert_eq(wanted.result, 0, "kind %d over %u queues", kind, queues);
    close_side(&net.sends);
    close_side(&net.receives);
    return outcome;
}

/* Nobody sends. The limit of a trial alone is half a minute. */
Test(hwcheck, a_side_ends_soon_after_the_other_has_ended, .timeout = 20)
{
    struct outcome outcome;

    memset(&net, 0, sizeof(net));
    open_side(&net.receives, &net.sends, net.queue[1], 1);
    net.receives.control = 1;
    trial_prepare(&net.receives);
    cr_assert_eq(trial_receive(&net.receives, TRIAL_SET, PAIRS, &outcome), -ETIMEDOUT);
    close_side(&net.receives);
}

/* 3 does not divide the number of slots. */
Test(hwcheck, a_network_that_is_right_is_found_right_over_any_number_of_queues, .timeout = 120)
{
    static const uint32_t counts[] = {1, 3, 4, QUEUES_MOST};

    for (int i = 0; i < 4; i++)
        for (int kind = TRIAL_LATENCY; kind <= TRIAL_LAST; kind++) {
            struct outcome found = try((enum trial_kind)kind, counts[i], NONE);

            cr_assert(found.late == 0 && found.wrong == 0, "kind %d over %u queues: %llu late, %llu wrong", kind,
                      counts[i], (unsigned long long)found.late, (unsigned long long)found.wrong);
        }
}

Test(hwcheck, a_queue_that_keeps_no_order_while_others_have_work_is_found, .timeout = 120)
{
    static const enum trial_kind kinds[] = {TRIAL_SET, TRIAL_ADD, TRIAL_NOTIFY, TRIAL_EMPTY};

    for (int i = 0; i < 4; i++) {
        struct outcome alone = try(kinds[i], 1, OVERTAKES), loaded = try(kinds[i], 4, OVERTAKES);

        cr_assert(alone.late == 0 && alone.wrong == 0, "kind %d", kinds[i]);
        cr_assert(loaded.late > 0 && loaded.wrong == 0, "kind %d: %llu late, %llu wrong", kinds[i],
                  (unsigned long long)loaded.late, (unsigned long long)loaded.wrong);
    }
}

Test(hwcheck, adds_that_queues_take_from_each_other_are_found, .timeout = 120)
{
    cr_assert_eq(try(TRIAL_SHARED, 1, LOSES_ADDS).wrong, 0);
    cr_assert_gt(try(TRIAL_SHARED, 4, LOSES_ADDS).wrong, 0);
}

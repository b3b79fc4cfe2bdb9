/* SPDX-License-Identifier: Apache-2.0 */
/* A path is lost: the fate of its requests, one rule at a time. */
#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <errno.h>
#include <string.h>

#include "test/support/order_bench.h"
#include "transport/order/order_queue.h"
#include "transport/order/wire.h"

static const struct prs_keys keys = {{BENCH_HIGH + 100, BENCH_HIGH + 101}};
static const uint32_t local_keys[PRS_MAX_RAILS] = {10, 11, 12, 13, 14, 15, 16, 17};

static int put(struct bench *bench, struct prs_op *op, size_t bytes, uint32_t id, uint32_t group, uint32_t flags)
{
    static uint8_t payload[PRS_INLINE_BYTES] = {42, 43, 44, 45, 46, 47, 48, 49};
    struct prs_put put = {.dst = &keys,
                          .src_addr = flags & PRS_PUT_INLINE ? payload : NULL,
                          .len_bytes = bytes,
                          .notify_id = id,
                          .group = group,
                          .flags = flags};

    return prs_order_put(&bench->order, op, &put, local_keys);
}

static int get(struct bench *bench, struct prs_op *op)
{
    struct prs_get get = {.src = &keys, .len_bytes = 64};

    return prs_order_get(&bench->order, op, &get, local_keys);
}

static void post(struct bench *bench)
{
    struct prs_chain chain;

    while (prs_order_take(&bench->order, 0, &chain))
        ;
}

/* The queue of the last request, and all others, of a bench with this many paths of one queue each. */
static struct prs_order_queue *queue_of(struct bench *bench, uint32_t path)
{
    return &bench->order.queue[path];
}

static struct bench *two_paths(void)
{
    return bench_fresh(PRS_POLICY_COUNTED, 2, 1);
}

/* Small puts share a path. */
static uint32_t busy_path(const struct bench *bench)
{
    uint32_t path = 0;

    while (path < bench->order.path_count && bench->order.queue[path].tail == bench->order.queue[path].head)
        path++;
    cr_assert_lt(path, bench->order.path_count, "nothing is in flight");
    return path;
}

static int lose(struct bench *bench, uint32_t path, uint32_t taken, struct prs_order_replay *replay)
{
    cr_assert_eq(prs_order_path_stop(&bench->order, path), 0);
    return prs_order_path_down(&bench->order, path, &taken, replay);
}

/* ---- what is done, what leaves again ---- */

enum what { NOTIFIED = 1, COUNTED, PLAIN, SIGNAL, READ };

struct row {
    enum what request[5];
    uint32_t taken; /* immediates */
    uint32_t done;  /* mask of the requests that are done */
    bool refused;
    uint32_t posted; /* requests; the others wait to be posted; 0: all */
};

ParameterizedTestParameters(order_path, what_was_taken_is_done_and_the_rest_leaves_again)
{
    static struct row rows[] = {
        {{NOTIFIED}, 0, 0, false, 0},
        {{NOTIFIED}, 1, 1, false, 0},
        {{NOTIFIED}, 2, 0, true, 0},
        {{NOTIFIED, COUNTED}, 1, 1, false, 0},
        {{NOTIFIED, COUNTED}, 2, 3, false, 0},
        {{NOTIFIED, COUNTED}, 2, 0, true, 1},
        {{PLAIN}, 0, 0, false, 0},
        {{PLAIN, NOTIFIED}, 0, 0, false, 0},
        {{PLAIN, NOTIFIED, PLAIN}, 1, 3, false, 0}, /* the queue kept order */
        {{COUNTED, SIGNAL}, 1, 1, false, 0},
        {{COUNTED, SIGNAL}, 2, 3, false, 0},
        {{READ}, 0, 0, false, 0},
        {{READ, NOTIFIED}, 1, 2, false, 0}, /* the read's data may not be here */
        {{NOTIFIED, READ, NOTIFIED, NOTIFIED}, 2, 5, false, 0},
    };
    return cr_make_param_array(struct row, rows, sizeof(rows) / sizeof(*rows));
}

static void admit(struct bench *bench, enum what what, struct prs_op *op, uint32_t number)
{
    struct prs_signal signal = {.dst = &keys, .dst_addr = 64, .value = number, .group = 3};

    if (what == SIGNAL)
        cr_assert_eq(prs_order_signal(&bench->order, op, &signal), 0);
    else if (what == READ)
        cr_assert_eq(get(bench, op), 0);
    else
        cr_assert_eq(put(bench, op, 64 + number, 7 * number, what == COUNTED ? 3 : PRS_GROUP_NONE,
                         what == NOTIFIED ? PRS_PUT_NOTIFY : 0),
                     0);
}

ParameterizedTest(struct row *row, order_path, what_was_taken_is_done_and_the_rest_leaves_again)
{
    struct bench *bench = two_paths();
    struct prs_order_replay replay;
    struct prs_op op[5];
    uint32_t path, count = 0, done = (uint32_t)__builtin_popcount(row->done);
    int r;

    for (; count < 5 && row->request[count]; count++) {
        admit(bench, row->request[count], &op[count], count);
        if (row->posted == count + 1)
            post(bench);
    }
    if (!row->posted)
        post(bench);
    path = busy_path(bench);
    cr_assert_eq(queue_of(bench, path)->head - queue_of(bench, path)->tail, count, "all on one queue");
    r = lose(bench, path, row->taken, &replay);
    if (row->refused) {
        cr_assert_eq(r, -EPROTO);
        return;
    }
    cr_assert_eq((uint32_t)r, done);
    cr_assert_eq(replay.taken, done);
    cr_assert_eq(replay.replayed, count - done);
    for (uint32_t i = 0; i < count; i++)
        cr_assert_eq(op[i].status, row->done >> i & 1 ? 0 : PRS_OP_PENDING, "request %u", i);
    cr_assert_eq(bench->order.ops, count - done);
    cr_assert_eq(queue_of(bench, 1 - path)->head, count - done);
    cr_assert_eq(bench->order.signaled, 0, "no completion of the lost path is awaited");
    if (count == done) {
        cr_assert(prs_order_idle(&bench->order));
        return;
    }
    post(bench);
    cr_assert_eq(prs_order_complete(&bench->order, 1 - path, count - done - 1, 0), (int)(count - done));
    cr_assert_eq(bench->order.ops, 0);
}

/* ---- what a replayed request carries ---- */

Test(order_path, a_replay_has_the_keys_of_its_rails)
{
    struct bench *bench = two_paths();
    const struct prs_wr *wr;
    struct prs_order_replay replay;
    struct prs_op op[3];
    uint32_t path, other;

    cr_assert_eq(put(bench, &op[0], 64, 1, PRS_GROUP_NONE, PRS_PUT_NOTIFY), 0);
    cr_assert_eq(put(bench, &op[1], 8, 9, PRS_GROUP_NONE, PRS_PUT_NOTIFY | PRS_PUT_INLINE), 0);
    admit(bench, SIGNAL, &op[2], 5);
    path = busy_path(bench);
    other = 1 - path;
    wr = queue_of(bench, path)->wr;
    cr_assert(wr[0].local_key == 10 + path && wr[0].remote_key == BENCH_HIGH + 100 + path &&
              wr[2].remote_key == BENCH_HIGH + 70 + path);
    lose(bench, path, 0, &replay);
    memset(bench->copies[path], 0, sizeof(bench->copies[path]));
    wr = queue_of(bench, other)->wr;
    cr_assert(wr[0].local_key == 10 + other && wr[0].remote_key == BENCH_HIGH + 100 + other, "%u %#llx",
              wr[0].local_key, (unsigned long long)wr[0].remote_key);
    cr_assert_eq(wr[1].local_addr, (uintptr_t)queue_of(bench, other)->inline_bytes + PRS_INLINE_BYTES);
    cr_assert_eq(*(uint8_t *)(uintptr_t)wr[1].local_addr, 42, "a copy of its own");
    cr_assert(wr[2].remote_key == BENCH_HIGH + 70 + other &&
              ((struct prs_record *)(uintptr_t)wr[2].local_addr)->value == 5);
}

Test(order_path, a_put_of_nothing_needs_no_keys)
{
    struct bench *bench = two_paths();
    struct prs_put nothing = {.notify_id = 3, .flags = PRS_PUT_NOTIFY};
    struct prs_order_replay replay;
    struct prs_op op;
    uint32_t path;

    cr_assert_eq(prs_order_put(&bench->order, &op, &nothing, NULL), 0);
    path = busy_path(bench);
    lose(bench, path, 0, &replay);
    cr_assert(queue_of(bench, 1 - path)->wr[0].remote_key == bench->order.record_key[1 - path] &&
              queue_of(bench, 1 - path)->wr[0].len_bytes == 0);
}

Test(order_path, a_run_stays_a_run)
{
    struct bench *bench = two_paths();
    struct prs_order_replay replay;
    struct prs_op op[4];
    uint32_t path, other;

    for (uint32_t i = 0; i < 3; i++)
        cr_assert_eq(put(bench, &op[i], 64, i, PRS_GROUP_NONE, PRS_PUT_NOTIFY), 0);
    path = busy_path(bench);
    other = 1 - path;
    cr_assert_eq(queue_of(bench, path)->immediates, 1u, "one for all three");
    lose(bench, path, 0, &replay);
    cr_assert_eq(queue_of(bench, other)->immediates, 1u);
    cr_assert(queue_of(bench, other)->wr[1].opcode == PRS_WR_WRITE &&
              queue_of(bench, other)->wr[2].imm == prs_imm_make(2, 3, 1, 0));
    cr_assert_eq(put(bench, &op[3], 64, 3, PRS_GROUP_NONE, PRS_PUT_NOTIFY), 0);
    cr_assert(queue_of(bench, other)->wr[2].opcode == PRS_WR_WRITE_IMM, "nothing takes over a replayed immediate");
    post(bench);
    cr_assert_eq(prs_order_path_stop(&bench->order, other), -ENETDOWN, "the last path");
}

Test(order_path, a_fence_that_was_taken_says_that_reads_are_done)
{
    struct bench *bench = two_paths();
    struct prs_signal strong = {.dst = &keys, .dst_addr = 64, .flags = PRS_SIGNAL_STRONG};
    struct prs_order_replay replay;
    struct prs_op op[3];
    uint32_t path;

    cr_assert_eq(get(bench, &op[0]), 0);
    path = busy_path(bench);
    cr_assert_eq(prs_order_signal(&bench->order, &op[1], &strong), 0);
    cr_assert(queue_of(bench, path)->wr[1].flags & PRS_WR_FENCE);
    cr_assert_eq(get(bench, &op[2]), 0);
    post(bench);
    cr_assert_eq(lose(bench, path, 1, &replay), 2);
    cr_assert(op[0].status == 0 && op[1].status == 0 && op[2].status == PRS_OP_PENDING);
}

Test(order_path, a_replayed_signal_stays_after_its_reads)
{
    struct bench *bench = two_paths();
    struct prs_signal strong = {.dst = &keys, .dst_addr = 64, .flags = PRS_SIGNAL_STRONG};
    struct prs_order_replay replay;
    struct prs_op op[4];
    uint32_t path, other;

    cr_assert_eq(get(bench, &op[0]), 0);
    path = busy_path(bench);
    other = 1 - path;
    cr_assert_eq(prs_order_signal(&bench->order, &op[1], &strong), 0);
    post(bench);
    cr_assert_eq(prs_order_path_stop(&bench->order, path), 0);
    cr_assert_eq(prs_order_signal(&bench->order, &op[2], &strong), PRS_BUSY, "the reads are of a stopped path");
    lose(bench, path, 0, &replay);
    cr_assert(queue_of(bench, other)->wr[0].opcode == PRS_WR_READ &&
              queue_of(bench, other)->wr[1].flags & PRS_WR_FENCE);
    cr_assert_eq(prs_order_signal(&bench->order, &op[2], &strong), 0);
    cr_assert(queue_of(bench, other)->wr[2].flags & PRS_WR_FENCE, "after the replayed read");
}

/* ---- while a path is away ---- */

Test(order_path, nothing_goes_to_a_stopped_path)
{
    struct bench *bench = two_paths();
    struct prs_op small, large, word;
    struct prs_chain chain;
    uint32_t path, head;

    cr_assert_eq(put(bench, &small, 64, 1, PRS_GROUP_NONE, PRS_PUT_NOTIFY), 0);
    path = busy_path(bench);
    cr_assert_eq(prs_order_path_stop(&bench->order, path), 0);
    cr_assert_eq(prs_order_path_stop(&bench->order, path), 0, "it is stopped already");
    cr_assert(!prs_order_take(&bench->order, 0, &chain), "what waits there is not posted");
    head = queue_of(bench, path)->head;
    for (uint32_t i = 2; i < 6; i++) {
        cr_assert_eq(put(bench, &word, i % 2 ? 0 : 64, i, PRS_GROUP_NONE, PRS_PUT_NOTIFY), 0);
        cr_assert_eq(put(bench, &large, 4 << 20, 16 + i, PRS_GROUP_NONE, PRS_PUT_NOTIFY), 0);
    }
    cr_assert_eq(get(bench, &word), 0);
    cr_assert_eq(queue_of(bench, path)->head, head);
    cr_assert(queue_of(bench, 1 - path)->head > 8);
}

/* An older word must not land after a newer one and stay. */
Test(order_path, words_keep_their_order)
{
    struct bench *bench = two_paths();
    struct prs_order_replay replay;

    cr_assert_eq(prs_order_word(&bench->order, 64, bench_path_keys, 256), 0);
    cr_assert_eq(prs_order_word(&bench->order, 64, bench_path_keys, 512), 0);
    post(bench);
    cr_assert_eq(prs_order_path_stop(&bench->order, 0), 0);
    cr_assert_eq(prs_order_word(&bench->order, 64, bench_path_keys, 768), PRS_BUSY);
    cr_assert_eq(prs_order_touch(&bench->order), PRS_BUSY);
    lose(bench, 0, 0, &replay);
    cr_assert_eq(prs_order_word(&bench->order, 64, bench_path_keys, 768), 0);
    cr_assert_eq(prs_order_touch(&bench->order), 0);
    for (uint32_t i = 0; i < 3; i++) {
        const struct prs_wr *wr = &queue_of(bench, 1)->wr[i];

        cr_assert(*(uint64_t *)(uintptr_t)wr->local_addr == 256 * (i + 1) && wr->remote_key == BENCH_HIGH + 71);
    }
}

Test(order_path, replays_wait_for_room_and_go_before_all_else)
{
    struct bench *bench = two_paths();
    struct prs_order_replay replay;
    static struct prs_op op[2 * BENCH_DEPTH];
    uint32_t path, other, used = 0, first = 0;

    cr_assert_eq(put(bench, &op[used], 64, used, PRS_GROUP_NONE, PRS_PUT_NOTIFY), 0);
    path = busy_path(bench);
    other = 1 - path;
    for (used = 1; queue_of(bench, path)->head < 20; used++)
        cr_assert_eq(put(bench, &op[used], 64, 2 * used, PRS_GROUP_NONE, PRS_PUT_NOTIFY), 0);
    post(bench);
    cr_assert_eq(prs_order_path_stop(&bench->order, path), 0);
    for (; queue_of(bench, other)->head < BENCH_DEPTH - 4; used++)
        cr_assert_eq(put(bench, &op[used], 64, 2 * used, PRS_GROUP_NONE, PRS_PUT_NOTIFY), 0);
    post(bench);
    lose(bench, path, 0, &replay);
    cr_assert_eq(replay.replayed, 20u);
    cr_assert_eq(queue_of(bench, other)->head, (uint32_t)BENCH_DEPTH, "four had room");
    cr_assert_eq(prs_order_word(&bench->order, 64, bench_path_keys, 1), PRS_BUSY);
    cr_assert_eq(prs_order_path_up(&bench->order, path), PRS_BUSY);
    post(bench);
    for (uint32_t end = BENCH_DEPTH - 5; bench->order.ops; end = queue_of(bench, other)->head - 1) {
        cr_assert_gt(prs_order_complete(&bench->order, other, end, 0), 0);
        post(bench);
        cr_assert_lt(first++, 10u);
    }
    for (uint32_t i = 0; i < used; i++)
        cr_assert_eq(op[i].status, 0, "op %u", i);
    cr_assert_eq(prs_order_path_up(&bench->order, path), 0);
}

Test(order_path, a_path_that_is_back_is_used_again)
{
    struct bench *bench = two_paths();
    struct prs_order_replay replay;
    struct prs_op op[2];
    uint32_t head;

    bench->order.small_queue = 1;
    cr_assert_eq(put(bench, &op[1], 64, 1, PRS_GROUP_NONE, PRS_PUT_NOTIFY), 0);
    post(bench);
    lose(bench, 1, 1, &replay);
    cr_assert_eq(replay.taken, 1);
    cr_assert_eq(prs_order_path_up(&bench->order, 1), 0);
    head = queue_of(bench, 1)->head;
    cr_assert_eq(put(bench, &op[0], 4 << 20, 1, PRS_GROUP_NONE, PRS_PUT_NOTIFY), 0);
    cr_assert(queue_of(bench, 1)->head > head && queue_of(bench, 0)->head > 0, "both carry parts");
    post(bench);
    /* The counters of new queues start again. */
    cr_assert_eq(lose(bench, 1, 99, &replay), -EPROTO);
    cr_assert_eq(lose(bench, 1, 0, &replay), 0);
}

/* The message before is with another queue now, so its immediate cannot be taken over. */
Test(order_path, a_path_that_is_back_continues_no_run)
{
    struct bench *bench = two_paths();
    struct prs_order_replay replay;
    struct prs_op op[2];

    bench->order.small_queue = 1;
    cr_assert_eq(put(bench, &op[0], 64, 1, PRS_GROUP_NONE, PRS_PUT_NOTIFY), 0);
    lose(bench, 1, 0, &replay);
    cr_assert_eq(prs_order_path_up(&bench->order, 1), 0);
    bench->order.small_queue = 1;
    cr_assert_eq(put(bench, &op[1], 64, 2, PRS_GROUP_NONE, PRS_PUT_NOTIFY), 0);
    cr_assert_eq(queue_of(bench, 1)->wr[1].imm, prs_imm_make(2, 1, 1, 0));
}

/* A knock is an immediate like any other. */
Test(order_path, a_knock_leaves_over_a_living_path)
{
    struct bench *bench = two_paths();
    struct prs_order_replay replay;

    cr_assert_eq(prs_order_path_stop(&bench->order, 0), 0);
    cr_assert_eq(prs_order_knock(&bench->order), 0);
    cr_assert(queue_of(bench, 1)->wr[0].imm == prs_imm_make_bare(PRS_BARE_NOTE, 0) &&
              !queue_of(bench, 1)->wr[0].len_bytes);
    post(bench);
    lose(bench, 0, 0, &replay);
    cr_assert_eq(prs_order_path_up(&bench->order, 0), 0);
    cr_assert_eq(lose(bench, 1, 1, &replay), 0);
    cr_assert(replay.taken == 1 && replay.replayed == 0);
}

Test(order_path, failing_ends_what_waits_to_be_replayed)
{
    struct bench *bench = two_paths();
    struct prs_order_replay replay;
    struct prs_op op[2];
    uint32_t path;

    cr_assert_eq(put(bench, &op[0], 64, 1, PRS_GROUP_NONE, PRS_PUT_NOTIFY), 0);
    cr_assert_eq(put(bench, &op[1], 64, 5, PRS_GROUP_NONE, PRS_PUT_NOTIFY), 0);
    post(bench);
    path = busy_path(bench);
    lose(bench, path, 1, &replay);
    prs_order_fail(&bench->order, -EIO);
    cr_assert(op[0].status == 0 && op[1].status == -EIO);
}

/* ---- probes ---- */

Test(order_path, probes_leave_out_a_lost_path)
{
    struct bench *bench = two_paths();
    const struct prs_wr requests[PRS_MAX_RAILS] = {{.len_bytes = 1}, {.len_bytes = 1}},
                        raise = {.opcode = PRS_WR_ADD, .remote_addr = 0x7008};
    struct prs_order_replay replay;
    struct prs_op before, op;
    uint64_t word;

    cr_assert_eq(prs_order_probe(&bench->order, &before, requests), 0);
    post(bench);
    cr_assert_eq(prs_order_path_stop(&bench->order, 1), 0);
    cr_assert_eq(prs_order_probe(&bench->order, &op, requests), PRS_BUSY, "data of the path may be on its way");
    lose(bench, 1, 0, &replay);
    cr_assert_eq(prs_order_probe(&bench->order, &op, requests), 0);
    cr_assert_eq(bench->order.queue[3].head, 1, "its probe queue gets no second request");
    post(bench);
    cr_assert_eq(prs_order_complete(&bench->order, 2, 0, 0), 0);
    cr_assert_eq(prs_order_complete(&bench->order, 2, 1, 0), 1);
    cr_assert(op.status == 0 && before.status == PRS_OP_PENDING);
    cr_assert_eq(prs_order_probe_lost(&bench->order, 1, &word), 1);
    cr_assert(before.status == 0 && prs_order_idle(&bench->order) && bench->order.ops == 0);
    cr_assert_eq(prs_order_self(&bench->order, NULL, &raise), 0);
    post(bench);
    cr_assert_eq(prs_order_probe_lost(&bench->order, 0, &word), -ENETDOWN, "the add may have taken effect");
    cr_assert_eq(word, 0x7008);
}

/* Among sets, an add that was not posted, and flushes in between, the requests that write are sent again, in order. */
Test(order_path, sets_to_ourselves_leave_again_over_another_path)
{
    struct bench *bench = two_paths();
    const struct prs_wr reads[PRS_MAX_RAILS] = {{.len_bytes = 1}, {.len_bytes = 1}};
    struct prs_wr set = {.opcode = PRS_WR_WRITE, .len_bytes = 8, .remote_key = 5};
    struct prs_order_queue *to = &bench->order.queue[3];
    struct prs_op flush, own;
    struct prs_order_replay replay;
    uint64_t word;
    uint32_t at = 0;
    struct prs_wr *wr;

    for (uint32_t i = 0; i < 3; i++) {
        set.remote_addr = 0x100 + 8 * i;
        set.value = 40 + i;
        cr_assert_eq(prs_order_self(&bench->order, i == 1 ? &own : NULL, &set), 0);
        if (i == 0)
            cr_assert_eq(prs_order_probe(&bench->order, &flush, reads), 0);
    }
    post(bench);
    cr_assert_eq(prs_order_complete(&bench->order, 3, 0, 0), 0);
    cr_assert_eq(prs_order_complete(&bench->order, 2, 0, 0), 0, "the first set is done");
    set.opcode = PRS_WR_ADD;
    cr_assert_eq(prs_order_self(&bench->order, NULL, &set), 0);
    cr_assert_eq(prs_order_self_left(&bench->order, &at), NULL, "nothing is lost yet");
    cr_assert_eq(prs_order_path_stop(&bench->order, 0), 0);
    lose(bench, 0, 0, &replay);
    cr_assert_eq(prs_order_self_over(&bench->order, 1), PRS_BUSY, "the loopback queue works");
    cr_assert_eq(prs_order_probe_lost(&bench->order, 0, &word), 1);
    cr_assert(flush.status == 0 && own.status == PRS_OP_PENDING && !prs_order_self_idle(&bench->order));
    cr_assert_eq(prs_order_probe_lost(&bench->order, 0, &word), 0, "all its errors come, one by one");
    while ((wr = prs_order_self_left(&bench->order, &at)))
        wr->remote_key = BENCH_HIGH + 9;
    cr_assert_eq(prs_order_self_over(&bench->order, 1), 0);
    cr_assert_eq(prs_order_self_left(&bench->order, &at), NULL);
    cr_assert(prs_order_probe_idle(&bench->order, 0));
    cr_assert_eq(to->head, BENCH_DEPTH + 3);
    for (uint32_t i = 1; i < 4; i++) {
        const struct prs_wr *moved = &to->wr[i - 1];

        cr_assert(moved->remote_key == BENCH_HIGH + 9 && moved->remote_addr == (i < 3 ? 0x100 + 8 * i : 0x110));
        cr_assert(moved->opcode == (i < 3 ? PRS_WR_WRITE : PRS_WR_ADD) && !(moved->flags & PRS_WR_SIGNALED));
        if (i < 3)
            cr_assert_eq(*(const uint64_t *)(uintptr_t)moved->local_addr, 40 + i);
    }
    post(bench);
    cr_assert_eq(prs_order_complete(&bench->order, 3, BENCH_DEPTH + 2, 0), 1);
    cr_assert(own.status == 0 && prs_order_self_idle(&bench->order));
    cr_assert_eq(prs_order_path_up(&bench->order, 0), 0);
    prs_order_probe_up(&bench->order, 0);
    cr_assert_eq(bench->order.path[0].probe, PRS_PROBE_WORKS);
}

Test(order_path, sets_wait_for_room_on_the_other_path)
{
    struct bench *bench = two_paths();
    const struct prs_wr reads[PRS_MAX_RAILS] = {{.len_bytes = 1}, {.len_bytes = 1}};
    struct prs_wr set = {.opcode = PRS_WR_WRITE, .len_bytes = 8};
    struct prs_op flush;
    struct prs_order_replay replay;
    uint64_t word;

    cr_assert_eq(prs_order_probe(&bench->order, &flush, reads), 0);
    while (prs_order_self(&bench->order, NULL, &set) == 0)
        ;
    post(bench);
    cr_assert_eq(prs_order_complete(&bench->order, 2, 0, 0), 0, "the read of this path; one set more fits");
    cr_assert_eq(prs_order_self(&bench->order, NULL, &set), 0);
    cr_assert_eq(prs_order_path_stop(&bench->order, 0), 0);
    lose(bench, 0, 0, &replay);
    cr_assert_eq(prs_order_probe_lost(&bench->order, 0, &word), 0);
    cr_assert_eq(prs_order_self_over(&bench->order, 1), PRS_BUSY, "the read of the other path is in flight");
    post(bench);
    cr_assert_eq(prs_order_complete(&bench->order, 3, 0, 0), 1);
    cr_assert_eq(prs_order_self_over(&bench->order, 1), 0);
}

Test(order_path, requests_to_ourselves_move_to_another_path_when_none_is_in_flight)
{
    struct bench *bench = two_paths();
    const struct prs_wr raise = {.opcode = PRS_WR_ADD};

    cr_assert_eq(prs_order_self(&bench->order, NULL, &raise), 0);
    post(bench);
    cr_assert_eq(prs_order_self_over(&bench->order, 1), PRS_BUSY);
    cr_assert_eq(prs_order_complete(&bench->order, 2, 0, 0), 0);
    cr_assert_eq(prs_order_self_over(&bench->order, 1), 0);
    cr_assert_eq(prs_order_self(&bench->order, NULL, &raise), 0);
    cr_assert(!prs_order_self_idle(&bench->order) && prs_order_probe_idle(&bench->order, 0));
    cr_assert_eq(bench->order.queue[3].head, 1);
}

/* ---- standby ---- */

static uint64_t bytes_of(const struct bench *bench, uint32_t path)
{
    return bench->order.stats.path_bytes[path];
}

Test(order_path, a_standby_path_carries_requests_only_while_all_others_are_stopped)
{
    struct bench *bench = two_paths();
    struct prs_order_replay replay;
    static struct prs_op op[64];
    uint32_t used = 0;

    bench->order.path[1].standby = true;
    prs_order_rest(&bench->order);
    cr_assert_eq(put(bench, &op[used++], 64, 1, PRS_GROUP_NONE, 0), 0);
    cr_assert_eq(put(bench, &op[used++], 1 << 20, 1, PRS_GROUP_NONE, 0), 0);
    cr_assert_eq(bytes_of(bench, 1), 0, "the first path lives");
    cr_assert_eq(bytes_of(bench, 0), (1 << 20) + 64);
    post(bench);
    lose(bench, 0, 0, &replay);
    cr_assert_eq(bytes_of(bench, 1), (1 << 20) + 64, "what was lost leaves again there");
    cr_assert_eq(put(bench, &op[used++], 64, 1, PRS_GROUP_NONE, 0), 0);
    cr_assert_eq(put(bench, &op[used++], 1 << 20, 1, PRS_GROUP_NONE, 0), 0);
    cr_assert_eq(bytes_of(bench, 1), 2 * ((1 << 20) + 64));
    cr_assert_eq(prs_order_path_up(&bench->order, 0), 0);
    cr_assert_eq(put(bench, &op[used++], 64, 1, PRS_GROUP_NONE, 0), 0);
    cr_assert_eq(put(bench, &op[used++], 64, 1, PRS_GROUP_NONE, 0), 0);
    cr_assert_eq(put(bench, &op[used++], 1 << 20, 1, PRS_GROUP_NONE, 0), 0);
    cr_assert_eq(bytes_of(bench, 0), 2 * ((1 << 20) + 64) + 64, "the first path is back: %llu",
                 (unsigned long long)bytes_of(bench, 0));
}

/* A standby path that was lost itself, and comes back, rests again. */
Test(order_path, a_standby_path_rests_again_when_it_comes_back)
{
    struct bench *bench = two_paths();
    struct prs_order_replay replay;
    static struct prs_op op;

    bench->order.path[1].standby = true;
    prs_order_rest(&bench->order);
    lose(bench, 1, 0, &replay);
    cr_assert_eq(prs_order_path_stop(&bench->order, 0), -ENETDOWN, "nothing would be left");
    cr_assert_eq(prs_order_path_up(&bench->order, 1), 0);
    cr_assert_eq(put(bench, &op, 1 << 20, 1, PRS_GROUP_NONE, 0), 0);
    cr_assert_eq(bytes_of(bench, 1), 0);
    post(bench);
    lose(bench, 0, 0, &replay);
    cr_assert_eq(bytes_of(bench, 1), 1 << 20);
}

/* ---- where paths are not replaced ---- */

Test(order_path, only_counted_over_several_paths_can_fail_over)
{
    cr_assert(prs_order_can_fail_over(&bench_fresh(PRS_POLICY_COUNTED, 2, 1)->order));
    cr_assert(!prs_order_can_fail_over(&bench_fresh(PRS_POLICY_COUNTED, 1, 2)->order));
    cr_assert(!prs_order_can_fail_over(&bench_fresh(PRS_POLICY_IN_ORDER, 2, 1)->order));
    cr_assert(!prs_order_can_fail_over(&bench_fresh(PRS_POLICY_NIC_FENCE, 2, 1)->order));
    cr_assert_eq(prs_order_path_stop(&bench_fresh(PRS_POLICY_DRAIN, 2, 1)->order, 0), -ENETDOWN);
}

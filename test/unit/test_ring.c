/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <perseus/device.h>
#include "transport/gpu/ring.h"
#include "transport/gpu/window.h"
#include "transport/util/error.h"

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { COMMANDS = 200000 };
#else
enum { COMMANDS = 1000000 };
#endif

static uint64_t draw(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state ^ *state >> 29;
}

/* A device whose ring is emptied by the test alone. */
struct bench {
    struct prs_ring ring;
    struct prs_ring_local local;
    struct prs_device device;
};

static void bench_open(struct bench *b, uint64_t slots, uint64_t timeout_ns)
{
    memset(b, 0, sizeof(*b));
    cr_assert_eq(prs_ring_init(&b->ring, slots), 0);
    b->device = (struct prs_device){.slots = b->ring.slots,
                                    .control = b->ring.control,
                                    .local = &b->local,
                                    .slot_count = slots,
                                    .timeout_ns = timeout_ns,
                                    .epoch = 7,
                                    .world = 2};
}

Test(ring, a_command_survives_packing)
{
    uint64_t state = 12345;

    for (int i = 0; i < 100000; i++) {
        struct prs_cmd_fields in = {0}, out;
        struct prs_cmd cmd;

        in.op = 1 + draw(&state) % 3;
        in.flags = draw(&state) & 7;
        in.peer = draw(&state) % PRS_CMD_PEERS;
        in.dst_window = draw(&state) % PRS_CMD_WINDOWS;
        in.src_window = draw(&state) % PRS_CMD_WINDOWS;
        in.group = draw(&state) % PRS_CMD_GROUPS;
        in.epoch = draw(&state) % PRS_CMD_EPOCHS;
        in.dst_offset = draw(&state) & PRS_CMD_MAX_OFFSET;
        in.src_offset = in.op == PRS_CMD_PUT ? draw(&state) & PRS_CMD_MAX_OFFSET : 0;
        in.bytes = in.op == PRS_CMD_PUT ? draw(&state) & PRS_CMD_MAX_BYTES : draw(&state);
        cmd = prs_cmd_pack(&in, i & 1);
        for (int w = 0; w < 4; w++)
            cr_assert_eq(cmd.word[w] & 1, (uint64_t)(i & 1), "word %d of command %d lost its lap", w, i);
        out = prs_cmd_unpack(&cmd);
        cr_assert_eq(memcmp(&in, &out, sizeof(in)), 0, "command %d (op %u) came out changed", i, in.op);
    }
}

Test(ring, a_torn_command_is_never_taken)
{
    struct bench b;

    bench_open(&b, 4, 1000000);
    /* Three laps, so that the slots hold words of the lap before. */
    for (uint64_t position = 0; position < 12; position++) {
        struct prs_cmd_fields in = {.op = PRS_CMD_PUT, .bytes = position + 1, .src_offset = ~0ull >> 1}, out;
        struct prs_cmd cmd = prs_cmd_pack(&in, prs_cmd_lap(position, 4));
        struct prs_cmd *slot = &b.ring.slots[position & 3], before = *slot;

        for (int words = 0; words < 15; words++) { /* each proper subset of the four words */
            for (int w = 0; w < 4; w++)
                slot->word[w] = words & 1 << w ? cmd.word[w] : before.word[w];
            cr_assert_eq(prs_ring_take(&b.ring, &out), 0, "position %" PRIu64 " taken with words %#x only", position,
                         words);
        }
        *slot = cmd;
        cr_assert_eq(prs_ring_take(&b.ring, &out), 1);
        cr_assert_eq(out.bytes, position + 1);
        cr_assert_eq(prs_ring_take(&b.ring, &out), 0, "position %" PRIu64 " taken twice", position);
    }
    prs_ring_fini(&b.ring);
}

Test(ring, a_full_ring_waits_with_a_limit_and_says_for_what)
{
    struct prs_device_report report;
    struct bench b;
    char text[256];
    uint64_t at;

    bench_open(&b, 4, 20 * 1000000);
    for (int i = 0; i < 4; i++)
        cr_assert_eq(prs_ring_claim(&b.device, 1, &at), 0);
    cr_assert_eq(prs_ring_claim(&b.device, 1, &at), -PRS_DEVICE_TIMEOUT);
    cr_assert_eq(prs_ring_report(&b.ring, &report), 1);
    cr_assert_eq(report.kind, (uint64_t)PRS_WAIT_CREDIT);
    cr_assert_eq(report.index, 4u);
    cr_assert_eq(report.want, 1u);
    cr_assert_eq(report.have, 0u);
    prs_ring_report_text(&report, text, sizeof(text));
    cr_assert(strstr(text, "timed out") && strstr(text, "a free slot"), "%s", text);
    /* The error is sticky: the next claim fails at once and claims nothing. */
    cr_assert_eq(prs_ring_claim(&b.device, 1, &at), -PRS_DEVICE_TIMEOUT);
    cr_assert_eq(b.local.claim, 5u);
    prs_ring_fini(&b.ring);
}

static void *claim_fifth(void *argument)
{
    struct bench *b = argument;
    uint64_t at;

    return (void *)(intptr_t)prs_ring_claim(&b->device, 1, &at);
}

Test(ring, an_abort_ends_a_wait)
{
    struct bench b;
    pthread_t thread;
    void *result;
    uint64_t at;

    bench_open(&b, 4, 60ull * 1000000000);
    for (int i = 0; i < 4; i++)
        cr_assert_eq(prs_ring_claim(&b.device, 1, &at), 0);
    cr_assert_eq(pthread_create(&thread, NULL, claim_fifth, &b), 0);
    prs_ring_abort(&b.ring, -EPIPE);
    pthread_join(thread, &result);
    cr_assert_eq((intptr_t)result, -PRS_DEVICE_ABORTED);
    prs_ring_fini(&b.ring);
}

Test(ring, a_size_that_is_no_power_of_two_is_refused)
{
    struct prs_ring ring;

    cr_assert_eq(prs_ring_init(&ring, 1000), -EINVAL);
    cr_assert_eq(prs_ring_init(&ring, 2), -EINVAL);
    cr_assert(strstr(prs_error_last(), "power of two"), "%s", prs_error_last());
}

enum { PRODUCERS = 4 };

struct producer {
    struct bench *bench;
    uint32_t id;
    uint32_t count;
};

static void *produce(void *argument)
{
    struct producer *p = argument;
    uint64_t state = p->id + 99;

    for (uint32_t i = 0; i < p->count;) {
        uint32_t n = 1 + draw(&state) % 2;
        uint64_t at = 0;

        if (n > p->count - i)
            n = 1;
        if (prs_ring_claim(&p->bench->device, n, &at) != 0)
            return (void *)1;
        for (uint32_t k = 0; k < n; k++, i++) {
            struct prs_cmd_fields f = {.op = PRS_CMD_PUT, .peer = p->id, .bytes = i, .src_offset = at + k};

            if (draw(&state) % 64 == 0)
                sched_yield();
            prs_ring_write(&p->bench->device, at + k, &f);
        }
    }
    return NULL;
}

Test(ring, no_command_is_lost_or_repeated_over_many_wraps, .timeout = 600)
{
    struct producer producers[PRODUCERS];
    pthread_t threads[PRODUCERS];
    uint32_t next[PRODUCERS] = {0};
    struct prs_cmd_fields f;
    struct bench b;
    uint64_t state = 5;
    void *result;

    bench_open(&b, 16, 60ull * 1000000000);
    for (uint32_t i = 0; i < PRODUCERS; i++) {
        producers[i] = (struct producer){&b, i, COMMANDS / PRODUCERS};
        cr_assert_eq(pthread_create(&threads[i], NULL, produce, &producers[i]), 0);
    }
    for (uint64_t taken = 0; taken < COMMANDS;) {
        if (!prs_ring_take(&b.ring, &f)) {
            prs_ring_return(&b.ring);
            sched_yield();
            continue;
        }
        cr_assert_eq(f.src_offset, taken, "position %" PRIu64 " carries the command of %" PRIu64, taken, f.src_offset);
        cr_assert_eq(f.bytes, next[f.peer], "producer %u: want command %u, got %" PRIu64, f.peer, next[f.peer],
                     f.bytes);
        next[f.peer]++;
        taken++;
        if (draw(&state) % 4 == 0)
            prs_ring_return(&b.ring);
    }
    for (uint32_t i = 0; i < PRODUCERS; i++) {
        pthread_join(threads[i], &result);
        cr_assert_null(result);
    }
    cr_assert_eq(prs_ring_take(&b.ring, &f), 0);
    prs_ring_fini(&b.ring);
}

/* ---- what a command may touch ---- */

enum { WINDOW_BYTES = 4096 };

struct refusal {
    struct prs_cmd_fields cmd;
    int result;
    char names[32]; /* what the error text must contain */
};

Test(window, a_command_that_must_not_run_is_refused_by_name)
{
    static const uint64_t huge = PRS_CMD_MAX_OFFSET;
    static const struct refusal rows[] = {
        {{.op = PRS_CMD_PUT, .epoch = 7, .bytes = 4096, .src_window = 0, .dst_window = 0, .peer = 1}, 0, ""},
        {{.op = PRS_CMD_PUT, .epoch = 7, .bytes = 0, .src_offset = 4096, .dst_offset = 4096}, 0, ""},
        {{.op = PRS_CMD_PUT, .epoch = 7, .bytes = 1, .src_offset = 4095, .dst_offset = 4095}, 0, ""},
        {{.op = PRS_CMD_SIGNAL_ADD, .epoch = 7, .dst_window = 1, .dst_offset = 4088, .flags = 1}, 0, ""},
        {{.op = 0, .epoch = 7}, -EBADMSG, "operation 0"},
        {{.op = 9, .epoch = 7}, -EBADMSG, "operation 9"},
        {{.op = PRS_CMD_PUT, .epoch = 6}, -ESTALE, "epoch 6"},
        {{.op = PRS_CMD_PUT, .epoch = 7, .flags = 1}, -EBADMSG, "flags 1"},
        {{.op = PRS_CMD_PUT, .epoch = 7, .peer = 2}, -EINVAL, "peer 2 of 2"},
        {{.op = PRS_CMD_PUT, .epoch = 7, .dst_window = 2}, -EINVAL, "destination window 2"},
        {{.op = PRS_CMD_PUT, .epoch = 7, .src_window = 4000}, -EINVAL, "source window 4000"},
        {{.op = PRS_CMD_PUT, .epoch = 7, .bytes = 4097}, -ERANGE, "4097 bytes"},
        {{.op = PRS_CMD_PUT, .epoch = 7, .bytes = 2, .src_offset = 4095}, -ERANGE, "source window"},
        {{.op = PRS_CMD_PUT, .epoch = 7, .bytes = 2, .dst_offset = 4095}, -ERANGE, "destination window"},
        {{.op = PRS_CMD_PUT, .epoch = 7, .bytes = 1, .dst_offset = huge}, -ERANGE, "outside"},
        {{.op = PRS_CMD_PUT, .epoch = 7, .bytes = PRS_CMD_MAX_BYTES, .dst_offset = huge}, -ERANGE, "outside"},
        {{.op = PRS_CMD_SIGNAL_SET, .epoch = 7, .dst_window = 1, .dst_offset = 4}, -EINVAL, "multiple of 8"},
        {{.op = PRS_CMD_SIGNAL_SET, .epoch = 7, .dst_window = 0}, -EINVAL, "not made for signals"},
        {{.op = PRS_CMD_SIGNAL_SET, .epoch = 7, .dst_window = 1, .dst_offset = 4096}, -ERANGE, "outside"},
        {{.op = PRS_CMD_SIGNAL_SET, .epoch = 7, .dst_window = 1, .flags = 2}, -EBADMSG, "flags 2"},
        {{.op = PRS_CMD_SIGNAL_SET, .epoch = 7, .dst_window = 1, .pad = 1}, -EBADMSG, "stray bits"},
        {{.op = PRS_CMD_SIGNAL_SET, .epoch = 7, .dst_window = 1, .src_window = 1}, -EBADMSG, "stray bits"},
    };
    struct prs_window_remote remotes[2] = {{0}};
    struct prs_window_options data = {.base = (void *)4096, .bytes = WINDOW_BYTES, .remotes = remotes};
    struct prs_window_options signals = data;
    struct prs_windows windows;

    signals.flags = PRS_WINDOW_SIGNALS;
    cr_assert_eq(prs_windows_init(&windows, 2, 7, 4), 0);
    cr_assert_eq(prs_windows_add(&windows, &data), 0);
    cr_assert_eq(prs_windows_add(&windows, &signals), 1);
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        int r = prs_windows_check(&windows, &rows[i].cmd);

        cr_assert_eq(r, rows[i].result, "row %zu: want %d, got %d: %s", i, rows[i].result, r, prs_error_last());
        if (r < 0)
            cr_assert(strstr(prs_error_last(), rows[i].names), "row %zu: want '%s' in: %s", i, rows[i].names,
                      prs_error_last());
    }
    prs_windows_fini(&windows);
}

Test(window, what_is_given_back_is_refused_until_its_index_comes_again)
{
    struct prs_window_remote remotes[2] = {{0}};
    struct prs_window_options options = {.base = (void *)4096, .bytes = WINDOW_BYTES, .remotes = remotes};
    struct prs_cmd_fields put = {.op = PRS_CMD_PUT, .epoch = 7, .bytes = 8};
    struct prs_windows windows;

    cr_assert_eq(prs_windows_init(&windows, 2, 7, 3), 0);
    for (int i = 0; i < 3; i++)
        cr_assert_eq(prs_windows_add(&windows, &options), i);
    cr_assert_eq(prs_windows_add(&windows, &options), -ENOSPC);
    prs_windows_drop(&windows, 1);
    put.dst_window = 1;
    cr_assert_eq(prs_windows_check(&windows, &put), -EINVAL);
    cr_assert(strstr(prs_error_last(), "window 1, which was given back"), "%s", prs_error_last());
    put.dst_window = 2;
    cr_assert_eq(prs_windows_check(&windows, &put), 0);
    cr_assert_eq(prs_windows_add(&windows, &options), 1);
    put.dst_window = 1;
    cr_assert_eq(prs_windows_check(&windows, &put), 0);
    prs_windows_fini(&windows);
}

/* A broken kernel may write any words. A command passes only if all memory that it touches lies within windows. */
Test(window, random_words_never_pass_out_of_bounds)
{
    struct prs_window_remote remotes[2] = {{0}};
    struct prs_window_options options = {.base = (void *)4096, .bytes = WINDOW_BYTES, .remotes = remotes};
    struct prs_windows windows;
    uint64_t state = (uint64_t)getpid() * 2654435761u + 1, seed = state;
    int passed = 0;

    cr_assert_eq(prs_windows_init(&windows, 2, 7, 2), 0);
    cr_assert_eq(prs_windows_add(&windows, &options), 0);
    options.flags = PRS_WINDOW_SIGNALS;
    cr_assert_eq(prs_windows_add(&windows, &options), 1);
    for (int i = 0; i < 300000; i++) {
        struct prs_cmd cmd = {{draw(&state), draw(&state), draw(&state), draw(&state)}};
        struct prs_cmd_fields f;

        /* Make most commands plausible, with small fields, so that they reach the later checks. */
        if (i % 4) {
            cmd.word[0] = (cmd.word[0] & 7) % 5 << 1 | (cmd.word[0] >> 20 & 1) << 8 | (cmd.word[0] >> 30 & 1) << 24 |
                          (cmd.word[0] >> 40 & 1) << 36;
            cmd.word[1] &= 0x3fff;
            cmd.word[2] &= 0x3ff0;
            cmd.word[3] = (cmd.word[3] & 0x3fff) | 7ull << 48;
        }
        f = prs_cmd_unpack(&cmd);
        if (prs_windows_check(&windows, &f) < 0)
            continue;
        passed++;
        __uint128_t to = (__uint128_t)f.dst_offset + (f.op == PRS_CMD_PUT ? f.bytes : 8);
        __uint128_t from = (__uint128_t)f.src_offset + (f.op == PRS_CMD_PUT ? f.bytes : 0);

        cr_assert(f.peer < 2 && f.dst_window < 2 && f.src_window < 2 && to <= WINDOW_BYTES && from <= WINDOW_BYTES,
                  "seed %" PRIu64 ", command %d: peer %u, offsets %" PRIu64 ", %" PRIu64 ", %" PRIu64 " bytes", seed, i,
                  f.peer, f.dst_offset, f.src_offset, f.bytes);
        cr_assert(f.op == PRS_CMD_PUT || (f.dst_window == 1 && f.dst_offset % 8 == 0), "seed %" PRIu64 ", signal %d",
                  seed, i);
    }
    cr_assert_gt(passed, 1000, "seed %" PRIu64 ": only %d passed: the test tests nothing", seed, passed);
    prs_windows_fini(&windows);
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Rank 0 has `concurrency` transfers to `peers` ranks in flight together, first without signals, then each with one.
 * Efficiency is the second throughput over the first. Each transfer has its own signal word. A receiver checks the data
 * of a transfer as soon as it sees the signal. */
#include "tools/perf/putsignal.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/perf/putsignal_gpu.h"
#include "tools/perf/trace.h"

enum { TURN_COMMANDS = 16 };

struct run {
    struct bench *bench;
    const struct cell *cell;
};

static uint64_t slots_of(const struct bench *bench, uint64_t bytes)
{
    uint64_t slots = bench->half / bytes;

    return slots ? slots : 1;
}

static uint64_t offset_of(const struct run *run, uint32_t transfer)
{
    return transfer % slots_of(run->bench, run->cell->bytes) * run->cell->bytes;
}

static uint32_t peer_of(const struct run *run, uint32_t transfer)
{
    return 1 + transfer % run->cell->peers;
}

/* Coupled: each transfer is a group. Else the k-th transfer to a peer is in the peer's group k / size. */
static uint32_t group_of(const struct run *run, uint32_t transfer)
{
    const struct cell *cell = run->cell;

    if (cell->group == GROUP_COUPLED)
        return 1 + transfer;
    if (cell->group == GROUP_PEER)
        return 1;
    return 1 + (uint32_t)(transfer / cell->peers / cell->group);
}

/* ---- the sender ---- */

static struct prs_device_signal signal_of(const struct run *run, uint32_t transfer, uint64_t value)
{
    return (struct prs_device_signal){.offset = transfer * 8,
                                      .value = value,
                                      .peer = peer_of(run, transfer),
                                      .window = PRS_HEAP_SIGNALS,
                                      .group = group_of(run, transfer)};
}

/* A kernel pushes while the proxy posts; here one thread alternates between the two. */
static int take_turn(struct bench *bench, uint32_t pushed)
{
    int r = pushed % TURN_COMMANDS == 0 ? prs_proxy_step(bench->proxy) : 0;

    return r < 0 ? r : 0;
}

/* After all puts: the signals of each group together, as the last thread to arrive at a group sends them. */
static int push_signals(const struct run *run, uint64_t value)
{
    const struct cell *cell = run->cell;
    uint32_t pushed = 0;
    int r = 0;

    for (uint32_t peer = 0; peer < cell->peers && r == 0; peer++)
        for (uint32_t t = peer; t < cell->concurrency && r == 0; t += cell->peers) {
            struct prs_device_signal signal = signal_of(run, t, value);

            r = prs_signal(&run->bench->device, &signal, NULL);
            trace_signal(run->bench->trace, signal.peer, signal.group);
            if (!r)
                r = take_turn(run->bench, ++pushed);
        }
    return r;
}

static int push(const struct run *run, bool with_signals, uint64_t value)
{
    struct bench *bench = run->bench;
    bool coupled = run->cell->group == GROUP_COUPLED;
    int r = 0;

    for (uint32_t t = 0; t < run->cell->concurrency && r == 0; t++) {
        struct prs_device_put put =
            bench_put(bench, peer_of(run, t), offset_of(run, t), run->cell->bytes, group_of(run, t));
        struct prs_device_signal signal = signal_of(run, t, value);

        r = with_signals && coupled ? prs_put_signal(&bench->device, &put, &signal, NULL)
                                    : prs_put(&bench->device, &put, NULL);
        trace_put(bench->trace, put.peer, put.bytes, put.group);
        if (with_signals && coupled)
            trace_signal(bench->trace, signal.peer, signal.group);
        if (!r)
            r = take_turn(bench, t + 1);
    }
    if (r == 0 && with_signals && !coupled)
        r = push_signals(run, value);
    return r == 0 ? 0 : -EIO;
}

static void fill_sources(const struct run *run, uint64_t epoch)
{
    uint64_t bytes = run->cell->bytes, slots = slots_of(run->bench, bytes);

    for (uint32_t t = 0; t < run->cell->concurrency && t < slots; t++)
        bench_fill(bench_source(run->bench, t * bytes), bytes, epoch, t);
}

/* One timed iteration; then wait until every receiver has checked. */
static int send_once(const struct run *run, uint64_t epoch, bool with_signals, double *us)
{
    uint64_t *words = ranks_words(run->bench->ranks);
    uint64_t acks = epoch * run->cell->peers;
    double start;
    int r;

    fill_sources(run, epoch);
    trace_restart(run->bench->trace); /* the last iteration remains, which has signals */
    start = bench_now_us();
    r = push(run, with_signals, epoch);
    if (!r)
        r = bench_quiet(run->bench);
    *us = bench_now_us() - start;
    if (r < 0)
        return r;
    __atomic_store_n(&words[WORD_EPOCH], epoch, __ATOMIC_RELEASE);
    return ranks_wait_word(run->bench->ranks, &words[WORD_ACKS], acks, bench_idle, run->bench);
}

static int send_all(const struct run *run, struct putsignal_result *result)
{
    const struct options *options = run->bench->options;
    uint32_t rounds = options->warmup + options->iterations;
    double *put_only = calloc(rounds, sizeof(double)), *put_signal = calloc(rounds, sizeof(double));
    struct cell_counts before, after;
    int r = put_only && put_signal ? 0 : -ENOMEM;

    for (uint32_t i = 0; i < rounds && r == 0; i++) {
        uint32_t kept = i < options->warmup ? 0 : i - options->warmup;

        if (i == options->warmup)
            cell_count(run->bench, &before);
        r = send_once(run, 2ull * i + 1, false, &put_only[kept]);
        if (!r)
            r = send_once(run, 2ull * i + 2, true, &put_signal[kept]);
    }
    if (!r) {
        cell_count(run->bench, &after);
        cell_conclude(run->cell, options->iterations, put_only, put_signal, &before, &after, result);
    }
    free(put_only);
    free(put_signal);
    return r;
}

/* ---- a receiver ---- */

static uint64_t check_transfer(const struct run *run, uint32_t transfer, uint64_t epoch)
{
    uint64_t slot = transfer % slots_of(run->bench, run->cell->bytes);

    return bench_wrong(bench_arrival(run->bench, offset_of(run, transfer)), run->cell->bytes, epoch, slot);
}

static void poison_arrivals(const struct run *run)
{
    uint64_t bytes = run->cell->bytes, slots = slots_of(run->bench, bytes);

    for (uint32_t slot = 0; slot < run->cell->concurrency && slot < slots; slot++)
        bench_poison(bench_arrival(run->bench, slot * bytes), bytes);
}

/* Wait for each signal, and check its data at once. */
static int receive_signals(const struct run *run, uint64_t epoch, uint64_t *wrong)
{
    uint32_t rank = ranks_rank(run->bench->ranks);

    for (uint32_t t = rank - 1; t < run->cell->concurrency; t += run->cell->peers) {
        int r = ranks_wait_word(run->bench->ranks, bench_word(run->bench, t), epoch, bench_idle, run->bench);
        if (r < 0)
            return r;
        *wrong += check_transfer(run, t, epoch);
    }
    return 0;
}

static int receive_all(const struct run *run)
{
    const struct options *options = run->bench->options;
    uint32_t rank = ranks_rank(run->bench->ranks);
    uint64_t *words = ranks_words(run->bench->ranks);
    uint64_t epochs = 2ull * (options->warmup + options->iterations);

    for (uint64_t epoch = 1; epoch <= epochs; epoch++) {
        uint64_t wrong = 0;
        int r = epoch % 2 == 0 ? receive_signals(run, epoch, &wrong) : 0;

        if (!r)
            r = ranks_wait_word(run->bench->ranks, &words[WORD_EPOCH], epoch, bench_idle, run->bench);
        if (r < 0)
            return bench_fail(run->bench, "receiving", r);
        for (uint32_t t = rank - 1; epoch % 2 != 0 && t < run->cell->concurrency; t += run->cell->peers)
            wrong += check_transfer(run, t, epoch);
        if (wrong)
            __atomic_fetch_add(&words[WORD_ERRORS], wrong, __ATOMIC_RELAXED);
        poison_arrivals(run);
        __atomic_fetch_add(&words[WORD_ACKS], 1, __ATOMIC_RELEASE);
    }
    return 0;
}

static int clear_arrivals(const struct run *run)
{
    memset(bench_word(run->bench, 0), 0, run->cell->concurrency * sizeof(uint64_t));
    poison_arrivals(run);
    return 0;
}

int putsignal_run(struct bench *bench, const struct cell *cell, struct putsignal_result *result)
{
    uint64_t *words = ranks_words(bench->ranks);
    struct run run = {.bench = bench, .cell = cell};
    uint32_t rank = ranks_rank(bench->ranks);
    char number[24];
    int r;

    /* The barrier ensures that no rank is still in the previous cell when the counters are set to zero. */
    r = ranks_barrier(bench->ranks);
    if (r == 0 && rank == 0)
        words[WORD_EPOCH] = words[WORD_ACKS] = words[WORD_ERRORS] = 0;
    if (!r)
        r = bench->gpu ? putsignal_gpu_clear(bench, cell) : clear_arrivals(&run);
    if (!r)
        r = ranks_barrier(bench->ranks);
    if (r < 0)
        return bench_fail(bench, "meeting", r);
    if (rank == 0) {
        r = bench->gpu ? putsignal_gpu_send(bench, cell, result) : send_all(&run, result);
        snprintf(result->policy, sizeof(result->policy), "%s", cell->policy);
        snprintf(result->group, sizeof(result->group), "%s", options_group_name(cell->group, number, sizeof(number)));
        result->bytes = cell->bytes;
        result->concurrency = cell->concurrency;
        result->peers = cell->peers;
        result->errors = words[WORD_ERRORS];
        return r < 0 ? bench_fail(bench, "sending", r) : 0;
    }
    if (rank > cell->peers)
        return 0; /* this rank has no part in this cell, and waits at the next barrier */
    return bench->gpu ? putsignal_gpu_receive(bench, cell) : receive_all(&run);
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/perf/simple.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/perf/results.h"

enum {
    WORD_DONE = 8,      /* index of a shared word: the last size that rank 0 has finished */
    WORD_WRONG = 9,     /* wrong words over all ranks */
    WORD_SLOWEST = 10,  /* alltoall: slowest rank of an iteration, ns */
    SIGNAL_PING = 1024, /* signal words in different cache lines */
    SIGNAL_PONG = 1032,
    SIGNAL_ALL = 1040,
    RATE_PUTS = 20000,
    GPU_RATE_PUTS = 200000,
    IDLE_SPINS = 200,
};

struct round {
    struct bench *bench;
    const char *policy;
    uint64_t bytes;
    uint32_t concurrency;
    double *us; /* [iterations] */
    bool first; /* no row was printed yet */
    uint64_t errors;
};

static int wait_signal(struct bench *bench, uint64_t index, uint64_t value)
{
    double give_up = bench_now_us() + bench->options->timeout_s * 1e6;
    unsigned idle = 0;

    /* Spin, since this measures a latency; but yield sometimes, since there may be more ranks than cores. */
    while (prs_load_acquire_sys(bench_word(bench, index)) < value) {
        int r = prs_proxy_step(bench->proxy);

        if (r < 0)
            return bench_fail(bench, "stepping the proxy", r);
        idle = r > 0 ? 0 : idle + 1;
        if (idle > IDLE_SPINS)
            sched_yield();
        if (r == 0 && bench_now_us() > give_up)
            return bench_fail(bench, "waiting for a signal", -ETIMEDOUT);
    }
    return 0;
}

static int put_and_signal(struct bench *bench, uint32_t peer, uint64_t offset, uint64_t bytes, uint64_t word,
                          uint64_t value)
{
    struct prs_device_put put = bench_put(bench, peer, offset, bytes, 1);
    struct prs_device_signal signal = {
        .offset = word * 8, .value = value, .peer = peer, .window = PRS_HEAP_SIGNALS, .group = 1};

    return prs_put_signal(&bench->device, &put, &signal, NULL) == 0 ? 0 : -EIO;
}

static void report(struct round *round, const char *mode, uint32_t count, double bytes_each, double ops_each)
{
    const struct options *o = round->bench->options;
    struct simple_result result = {
        .op = o->op_name,
        .mode = mode,
        .policy = round->policy,
        .bytes = round->bytes,
        .concurrency = round->concurrency,
        .peers = round->bench->bootstrap.world - 1,
        .iterations = count,
        .errors = ranks_words(round->bench->ranks)[WORD_WRONG],
    };

    result.usec_p50 = bench_median(round->us, count);
    result.usec_p99 = bench_percentile(round->us, count, 0.99);
    result.GBps = bytes_each / result.usec_p50 / 1e3;
    result.rate_Mps = ops_each / result.usec_p50;
    report_simple(&result, o->json, round->first);
    round->first = false;
    round->errors += result.errors;
    ranks_words(round->bench->ranks)[WORD_WRONG] = 0;
}

/* A rank that only receives drives its NIC until rank 0 calls finish(). */
static int attend(struct bench *bench, uint64_t until)
{
    return ranks_wait_word(bench->ranks, &ranks_words(bench->ranks)[WORD_DONE], until, bench_idle, bench);
}

static void finish(struct bench *bench, uint64_t until)
{
    __atomic_store_n(&ranks_words(bench->ranks)[WORD_DONE], until, __ATOMIC_RELEASE);
}

/* ---- put and msgrate, latency ---- */

static int put_once(struct round *round, uint32_t puts, double *us)
{
    struct bench *bench = round->bench;
    uint64_t slots = bench->half / round->bytes;
    double start = bench_now_us();

    for (uint32_t i = 0; i < puts; i++) {
        uint32_t peer = 1 + i % (bench->bootstrap.world - 1);
        struct prs_device_put put =
            bench_put(bench, peer, i % round->concurrency % slots * round->bytes, round->bytes, 1);

        /* This thread also steps the proxy, so it must make room in the ring first. */
        while (bench->device.local->claim - bench->device.control->done >= round->concurrency) {
            int r = prs_proxy_step(bench->proxy);

            if (r < 0)
                return bench_fail(bench, "stepping the proxy", r);
        }
        if (prs_put(&bench->device, &put, NULL) < 0)
            return -EIO;
    }
    *us = 0;
    if (bench_quiet(bench) < 0)
        return -EIO;
    *us = bench_now_us() - start;
    return 0;
}

/* Rank 0 puts; at the end, the others check the bytes of the last iteration. */
static int run_puts(struct round *round, uint32_t puts, uint64_t until)
{
    struct bench *bench = round->bench;
    const struct options *o = bench->options;
    uint32_t rank = bench->bootstrap.rank, peers = bench->bootstrap.world - 1;
    uint64_t slots = bench->half / round->bytes, used = slots < round->concurrency ? slots : round->concurrency;
    uint64_t wrong = 0;
    int r = 0;

    for (uint32_t s = 0; s < used; s++)
        if (rank == 0)
            bench_fill(bench_source(bench, s * round->bytes), round->bytes, until, s);
        else
            bench_poison(bench_arrival(bench, s * round->bytes), round->bytes);
    r = ranks_barrier(bench->ranks);
    for (uint32_t i = 0; rank == 0 && r == 0 && i < o->warmup + o->iterations; i++)
        r = put_once(round, puts, &round->us[i < o->warmup ? 0 : i - o->warmup]);
    if (r < 0)
        return r;
    if (rank == 0)
        finish(bench, until);
    else if ((r = attend(bench, until)) < 0)
        return bench_fail(bench, "receiving", r);
    /* This rank received transfers i with 1 + i % peers == rank. */
    for (uint32_t i = rank - 1; rank > 0 && i < puts && i < used; i += peers)
        if (peers == 1 || round->concurrency % peers == 0)
            wrong += bench_wrong(bench_arrival(bench, i * round->bytes), round->bytes, until, i);
    __atomic_fetch_add(&ranks_words(bench->ranks)[WORD_WRONG], wrong, __ATOMIC_RELAXED);
    r = ranks_barrier(bench->ranks);
    if (r == 0 && rank == 0)
        report(round, "put", o->iterations, (double)round->bytes * puts, puts);
    return r;
}

static int run_latency(struct round *round, uint64_t until)
{
    struct bench *bench = round->bench;
    const struct options *o = bench->options;
    uint32_t rank = bench->bootstrap.rank, total = o->warmup + o->iterations;
    uint64_t base = until << 32, wrong = 0;
    int r = ranks_barrier(bench->ranks);

    if (rank > 1)
        return r == 0 ? ranks_barrier(bench->ranks) : r;
    for (uint32_t i = 0; i < total && r == 0; i++) {
        double start;

        bench_fill(bench_source(bench, 0), round->bytes, base + i, rank);
        start = bench_now_us();
        if (rank == 0)
            r = put_and_signal(bench, 1, 0, round->bytes, SIGNAL_PING, base + i + 1);
        if (!r)
            r = wait_signal(bench, rank == 0 ? SIGNAL_PONG : SIGNAL_PING, base + i + 1);
        if (rank == 0 && i >= o->warmup)
            round->us[i - o->warmup] = (bench_now_us() - start) / 2;
        wrong += bench_wrong(bench_arrival(bench, 0), round->bytes, base + i, 1 - rank);
        if (r == 0 && rank == 1)
            r = put_and_signal(bench, 0, 0, round->bytes, SIGNAL_PONG, base + i + 1);
        if (!r)
            r = bench_quiet(bench);
    }
    __atomic_fetch_add(&ranks_words(bench->ranks)[WORD_WRONG], wrong, __ATOMIC_RELAXED);
    if (!r)
        r = ranks_barrier(bench->ranks);
    if (r == 0 && rank == 0)
        report(round, "put_signal", o->iterations, (double)round->bytes, 1);
    return r;
}

/* ---- alltoall: every rank sends a block to every other one ---- */

static int exchange_blocks(struct round *round, uint64_t iteration, bool by_signals)
{
    struct bench *bench = round->bench;
    uint32_t rank = bench->bootstrap.rank, size = bench->bootstrap.world;
    int r = 0;

    for (uint32_t step = 1; step < size && r == 0; step++) {
        uint32_t peer = (rank + step) % size;
        struct prs_device_put put = bench_put(bench, peer, peer * round->bytes, round->bytes, 1);
        struct prs_device_signal signal = {.offset = (SIGNAL_ALL + rank) * 8ull,
                                           .value = iteration,
                                           .peer = peer,
                                           .window = PRS_HEAP_SIGNALS,
                                           .group = 1};

        put.dst_offset = bench->half + rank * round->bytes;
        r = by_signals ? prs_put_signal(&bench->device, &put, &signal, NULL) : prs_put(&bench->device, &put, NULL);
    }
    if (r != 0 || bench_quiet(bench) < 0)
        return -EIO;
    if (!by_signals) /* as a host does it: wait for completion, then a barrier */
        return ranks_barrier(bench->ranks);
    for (uint32_t step = 1; step < size && r == 0; step++)
        r = wait_signal(bench, SIGNAL_ALL + (rank + step) % size, iteration);
    return r;
}

static int alltoall_once(struct round *round, uint64_t iteration, bool by_signals, double *us)
{
    struct bench *bench = round->bench;
    uint64_t *slowest = &ranks_words(bench->ranks)[WORD_SLOWEST];
    uint32_t rank = bench->bootstrap.rank, size = bench->bootstrap.world;
    uint64_t wrong = 0, mine, seen = 0;
    double start;
    int r;

    for (uint32_t peer = 0; peer < size; peer++) {
        bench_fill(bench_source(bench, peer * round->bytes), round->bytes, iteration, rank * 1000 + peer);
        bench_poison(bench_arrival(bench, peer * round->bytes), round->bytes);
    }
    r = ranks_barrier(bench->ranks);
    if (rank == 0)
        __atomic_store_n(slowest, 0, __ATOMIC_RELAXED);
    if (!r)
        r = ranks_barrier(bench->ranks);
    if (r < 0)
        return r;
    start = bench_now_us();
    r = exchange_blocks(round, iteration, by_signals);
    mine = (uint64_t)((bench_now_us() - start) * 1e3);
    while (r == 0 && mine > seen &&
           !__atomic_compare_exchange_n(slowest, &seen, mine, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        ;
    for (uint32_t from = 0; r == 0 && from < size; from++)
        if (from != rank)
            wrong +=
                bench_wrong(bench_arrival(bench, from * round->bytes), round->bytes, iteration, from * 1000 + rank);
    __atomic_fetch_add(&ranks_words(bench->ranks)[WORD_WRONG], wrong, __ATOMIC_RELAXED);
    if (!r)
        r = ranks_barrier(bench->ranks);
    *us = (double)__atomic_load_n(slowest, __ATOMIC_RELAXED) / 1e3;
    return r;
}

static int run_alltoall(struct round *round, uint64_t until)
{
    struct bench *bench = round->bench;
    const struct options *o = bench->options;
    uint32_t size = bench->bootstrap.world, total = o->warmup + o->iterations;
    uint64_t iteration = until << 32;
    int r = 0;

    if (round->bytes * size > bench->half) {
        fprintf(stderr, "alltoall of %u x %llu bytes does not fit\n", size, (unsigned long long)round->bytes);
        return -EINVAL;
    }
    for (int by_signals = 0; by_signals < 2 && r == 0; by_signals++) {
        for (uint32_t i = 0; i < total && r == 0; i++)
            r = alltoall_once(round, ++iteration, by_signals, &round->us[i < o->warmup ? 0 : i - o->warmup]);
        if (r == 0 && bench->bootstrap.rank == 0)
            report(round, by_signals ? "put_signal" : "put_barrier", o->iterations, (double)round->bytes * (size - 1),
                   size - 1);
        if (!r)
            r = ranks_barrier(bench->ranks);
    }
    return r;
}

/* ---- all of them ---- */

/* A kernel pushes commands. Latency is the time from a command until the GPU sees its completion; the message rate is
 * that of the whole path. */
static int run_gpu(struct round *round, uint64_t until)
{
    struct bench *bench = round->bench;
    const struct options *o = bench->options;
    struct gpu_plan plan = {
        .device = bench->device, .half = bench->half, .slots = 1, .bytes = round->bytes, .concurrency = 1, .peers = 1};
    int r = ranks_barrier(bench->ranks);

    if (bench->bootstrap.rank != 0)
        return r == 0 ? ranks_wait_word(bench->ranks, &ranks_words(bench->ranks)[WORD_DONE], until, NULL, NULL) : r;
    if (o->op == PERF_LATENCY) {
        if (bench->gpu->round_trip(&plan, o->iterations, round->us))
            return -EIO;
        for (uint32_t i = 0; i < o->iterations; i++)
            round->us[i] /= 1e3;
        report(round, "gpu_round_trip", o->iterations, (double)round->bytes, 1);
    } else {
        for (uint32_t i = 0; i < o->iterations; i++)
            if (bench->gpu->rate(&plan, GPU_RATE_PUTS, round->concurrency, &round->us[i]))
                return -EIO;
        report(round, "gpu", o->iterations, (double)round->bytes * GPU_RATE_PUTS, GPU_RATE_PUTS);
    }
    finish(bench, until);
    return prs_proxy_check(bench->proxy) < 0 ? bench_fail(bench, "the kernel", prs_proxy_check(bench->proxy)) : 0;
}

static int run_round(struct round *round, uint64_t until)
{
    if (round->bench->gpu)
        return run_gpu(round, until);
    switch (round->bench->options->op) {
    case PERF_LATENCY:
        return run_latency(round, until);
    case PERF_ALLTOALL:
        return run_alltoall(round, until);
    case PERF_MSGRATE:
        return run_puts(round, RATE_PUTS, until);
    default:
        return run_puts(round, round->concurrency, until);
    }
}

int simple_run(struct bench *bench)
{
    const struct options *o = bench->options;
    struct round round = {.bench = bench, .first = true};
    uint64_t until = 0;
    int r = 0;

    round.us = calloc(o->iterations, sizeof(double));
    if (!round.us)
        return -ENOMEM;
    for (uint32_t p = 0; p < o->policies.count && r == 0; p++) {
        round.policy = options_policy_name(o, p);
        r = bench_open(bench, round.policy);
        for (uint32_t b = 0; b < o->bytes.count && r == 0; b++) {
            round.bytes = o->bytes.value[b];
            for (uint32_t c = 0; c < o->concurrency.count && r == 0; c++) {
                round.concurrency = (uint32_t)o->concurrency.value[c];
                r = run_round(&round, ++until);
            }
        }
        if (!r)
            r = ranks_barrier(bench->ranks);
        bench_close(bench);
    }
    free(round.us);
    if (round.errors) {
        fprintf(stderr, "perseus-perf: %llu words were wrong\n", (unsigned long long)round.errors);
        r = 1;
    }
    return r;
}

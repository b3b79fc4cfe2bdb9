/* SPDX-License-Identifier: Apache-2.0 */
/* putsignal with a persistent kernel as the sender, and kernels that check what arrived in device memory. */
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

#include "tools/perf/putsignal_gpu.h"

static struct gpu_plan plan_of(const struct bench *bench, const struct cell *cell)
{
    uint64_t slots = bench->half / cell->bytes;

    return (struct gpu_plan){
        .device = bench->device,
        .half = bench->half,
        .slots = slots ? slots : 1,
        .bytes = cell->bytes,
        .group = cell->group == GROUP_COUPLED ? 0 : cell->group,
        .poison = BENCH_POISON,
        .concurrency = cell->concurrency,
        .peers = cell->peers,
        .iterations = bench->options->warmup + bench->options->iterations,
    };
}

int putsignal_gpu_clear(struct bench *bench, const struct cell *cell)
{
    struct gpu_plan plan = plan_of(bench, cell);

    return bench->gpu->clear(&plan) ? -EIO : 0;
}

/* Wait until the kernel has sent. When it fails, the proxy's error names the cause. */
static int wait_sent(struct bench *bench, uint64_t epoch)
{
    const struct gpu_meeting *meeting = bench->gpu->meeting();
    double give_up = bench_now_us() + bench->options->timeout_s * 1e6;

    while (__atomic_load_n(&meeting->sent, __ATOMIC_ACQUIRE) < epoch) {
        int r = prs_proxy_check(bench->proxy);

        if (r < 0)
            return bench_fail(bench, "the sender's kernel", r);
        if (bench_now_us() > give_up)
            return bench_fail(bench, "waiting for the sender's kernel", -ETIMEDOUT);
        sched_yield();
    }
    return 0;
}

static int follow_sender(struct bench *bench, const struct cell *cell, struct cell_counts *before)
{
    struct gpu_meeting *meeting = bench->gpu->meeting();
    uint64_t *words = ranks_words(bench->ranks);
    uint64_t epochs = 2ull * (bench->options->warmup + bench->options->iterations);
    int r = 0;

    if (bench->options->warmup == 0)
        cell_count(bench, before);
    for (uint64_t epoch = 1; epoch <= epochs && r == 0; epoch++) {
        r = wait_sent(bench, epoch);
        if (r < 0)
            return r;
        __atomic_store_n(&words[WORD_EPOCH], epoch, __ATOMIC_RELEASE);
        r = ranks_wait_word(bench->ranks, &words[WORD_ACKS], epoch * cell->peers, NULL, NULL);
        if (epoch == 2ull * bench->options->warmup)
            cell_count(bench, before); /* the kernel waits for `checked`: nothing is in flight */
        __atomic_store_n(&meeting->checked, epoch, __ATOMIC_RELEASE);
    }
    return r;
}

int putsignal_gpu_send(struct bench *bench, const struct cell *cell, struct putsignal_result *result)
{
    struct gpu_plan plan = plan_of(bench, cell);
    uint32_t warmup = bench->options->warmup, kept = bench->options->iterations;
    double *us = calloc(2ull * plan.iterations, sizeof(double)), *put_only = calloc(plan.iterations, sizeof(double)),
           *put_signal = calloc(plan.iterations, sizeof(double));
    struct cell_counts before = {0}, after;
    int r = us && put_only && put_signal ? 0 : -ENOMEM;

    if (r == 0 && bench->gpu->send(&plan))
        r = -EIO;
    if (!r)
        r = follow_sender(bench, cell, &before);
    if (r == 0 && bench->gpu->finish(us, 2 * plan.iterations))
        r = -EIO;
    if (!r) {
        cell_count(bench, &after);
        for (uint32_t i = 0; i < kept; i++) {
            put_only[i] = us[2 * (warmup + i)];
            put_signal[i] = us[2 * (warmup + i) + 1];
        }
        cell_conclude(cell, kept, put_only, put_signal, &before, &after, result);
    }
    free(us);
    free(put_only);
    free(put_signal);
    return r;
}

static int check(struct bench *bench, const struct gpu_plan *plan, uint64_t epoch)
{
    uint64_t wrong = 0;
    int r = bench->gpu->check(plan, ranks_rank(bench->ranks), epoch, epoch % 2 == 0, &wrong) ? -EIO : 0;

    if (wrong)
        __atomic_fetch_add(&ranks_words(bench->ranks)[WORD_ERRORS], wrong, __ATOMIC_RELAXED);
    return r == 0 ? prs_proxy_check(bench->proxy) : r;
}

/* With signals, the kernel that checks starts before they come and waits for them; unless this would keep a sender on
 * the same GPU from running. */
int putsignal_gpu_receive(struct bench *bench, const struct cell *cell)
{
    struct gpu_plan plan = plan_of(bench, cell);
    uint64_t *words = ranks_words(bench->ranks);
    uint64_t epochs = 2ull * plan.iterations;
    bool alone = bench->gpu->alone(cell->peers + 1) != 0;

    for (uint64_t epoch = 1; epoch <= epochs; epoch++) {
        bool early = alone && epoch % 2 == 0;
        int r = early ? check(bench, &plan, epoch) : 0;

        if (!r)
            r = ranks_wait_word(bench->ranks, &words[WORD_EPOCH], epoch, NULL, NULL);
        if (r == 0 && !early)
            r = check(bench, &plan, epoch);
        if (r < 0)
            return bench_fail(bench, "receiving", r);
        __atomic_fetch_add(&words[WORD_ACKS], 1, __ATOMIC_RELEASE);
    }
    return 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* perseus-perf --gpu without a GPU: threads play the blocks of the sender's persistent kernel. The commands, the words
 * shared with the CPU and the checks are the same (tools/perf/gpu_blocks.h). */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/perf/gpu_blocks.h"

static struct gpu_shared shared;
static struct gpu_meeting met;
static struct gpu_plan plan; /* of the current run */
static struct gpu_block blocks[GPU_GROUPS_MAX];
static pthread_t threads[GPU_GROUPS_MAX];
static int results[GPU_GROUPS_MAX];
static double *times;

static int open_threads(uint32_t rank)
{
    (void)rank;
    return 0;
}

static int alone(uint32_t ranks)
{
    (void)ranks;
    return 1;
}

static struct gpu_meeting *meeting_of(void)
{
    return &met;
}

static void *run_block(void *argument)
{
    struct gpu_block *block = argument;
    int r = 0;

    for (uint64_t iteration = 1; r == 0 && iteration <= 2 * plan.iterations; iteration++) {
        if (block->transfer < plan.slots)
            gpu_fill(&plan, block->transfer, iteration, 0, 1);
        r = gpu_iterate(block, iteration);
    }
    results[block->transfer] = r;
    return NULL;
}

static int send_by_threads(const struct gpu_plan *wanted)
{
    if (wanted->concurrency > GPU_GROUPS_MAX)
        return 1;
    free(times);
    times = calloc(2ull * wanted->iterations, sizeof(*times));
    if (!times)
        return 1;
    plan = *wanted;
    met.sent = met.checked = 0;
    memset(&shared, 0, sizeof(shared));
    for (uint32_t i = 0; i < plan.concurrency; i++)
        blocks[i] = (struct gpu_block){&plan, &shared, &met, times, i, 0};
    gpu_begin_groups(&blocks[0]);
    for (uint32_t i = 0; i < plan.concurrency; i++)
        if (pthread_create(&threads[i], NULL, run_block, &blocks[i]) != 0) {
            fprintf(stderr, "gpu_threads: thread %u of %u cannot be started\n", i, plan.concurrency);
            exit(1); /* the threads that were started wait for it */
        }
    return 0;
}

static int finish(double *us, uint32_t count)
{
    int failed = 0;

    for (uint32_t i = 0; i < plan.concurrency; i++) {
        pthread_join(threads[i], NULL);
        failed |= results[i];
    }
    memcpy(us, times, count * sizeof(*us));
    return failed != 0;
}

static int check(const struct gpu_plan *of, uint32_t rank, uint64_t iteration, int with_signals, uint64_t *wrong)
{
    for (uint32_t t = rank - 1; t < of->concurrency; t += of->peers) {
        if (with_signals)
            *wrong += gpu_await(of, t, iteration) != 0;
        *wrong += gpu_wrong(of, t, iteration, 0, 1);
    }
    for (uint32_t slot = 0; slot < of->slots && slot < of->concurrency; slot++)
        gpu_poison(of, slot, 0, 1);
    return 0;
}

static int clear(const struct gpu_plan *of)
{
    for (uint32_t slot = 0; slot < of->slots && slot < of->concurrency; slot++)
        gpu_poison(of, slot, 0, 1);
    memset(gpu_signal(of, 0), 0, of->concurrency * sizeof(uint64_t));
    return 0;
}

gpu_library_fn perf_gpu_library;

__attribute__((visibility("default"))) const struct gpu_library *perf_gpu_library(void)
{
    static const struct gpu_library library = {.host = 1,
                                               .open = open_threads,
                                               .alone = alone,
                                               .meeting = meeting_of,
                                               .send = send_by_threads,
                                               .finish = finish,
                                               .check = check,
                                               .clear = clear};

    return &library;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* How often waiting threads read host memory. On a GPU such a read takes more than a microsecond, and reads of one line
 * are served one after the other. Many threads that all read would delay the very copies that they wait for. So this
 * test counts every load of the protocol from the ring's control lines. */
#include <criterion/criterion.h>
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdbool.h>
#include <string.h>
#include <unistd.h>

#include <perseus/sync.h>

static const char *control_at;
static uint64_t control_reads; /* atomic */

static void count_read(const void *word)
{
    const char *at = word;

    if (at >= control_at && at < control_at + 128)
        __atomic_fetch_add(&control_reads, 1, __ATOMIC_RELAXED);
}

static uint64_t counted_load_relaxed(const uint64_t *word)
{
    count_read(word);
    return prs_load_relaxed(word);
}

static uint64_t counted_load_acquire_sys(const uint64_t *word)
{
    count_read(word);
    return prs_load_acquire_sys(word);
}

static uint64_t counted_load_acquire_gpu(const uint64_t *word)
{
    count_read(word);
    return prs_load_acquire_gpu(word);
}

static void counted_load_pair_acquire_sys(const uint64_t *words, uint64_t *first, uint64_t *second)
{
    count_read(words);
    prs_load_pair_acquire_sys(words, first, second);
}

/* From here on the protocol loads through the counting functions. */
#define prs_load_relaxed          counted_load_relaxed
#define prs_load_acquire_sys      counted_load_acquire_sys
#define prs_load_acquire_gpu      counted_load_acquire_gpu
#define prs_load_pair_acquire_sys counted_load_pair_acquire_sys
#include <perseus/device.h>

#include "transport/gpu/ring.h"

enum {
    THREADS = 16,
    SLOTS = 4,
    WAIT_MS = 40,
    HEALTHY_MS = 60000, /* for a wait that succeeds: a machine may keep a thread off its cores for seconds */
    FEW = 4,            /* reads that begin just before the counted time, or end just after it */
};

static struct prs_ring ring;
static struct prs_ring_local local;
static struct prs_device device;
static uint64_t word; /* a signal that nobody sends */

static void open_ring(uint64_t timeout_ms)
{
    cr_assert_eq(prs_ring_init(&ring, SLOTS), 0);
    memset(&local, 0, sizeof(local));
    control_at = (const char *)ring.control;
    control_reads = 0;
    device = (struct prs_device){.slots = ring.slots,
                                 .control = ring.control,
                                 .local = &local,
                                 .slot_count = SLOTS,
                                 .timeout_ns = timeout_ms * 1000000,
                                 .epoch = 1,
                                 .world = 2};
}

static void *wait_for_completion(void *argument)
{
    return (void *)(intptr_t)prs_flush(&device, (uint64_t)(uintptr_t)argument);
}

static void *wait_for_a_slot(void *argument)
{
    uint64_t at;

    (void)argument;
    return (void *)(intptr_t)prs_ring_claim(&device, SLOTS + 1, &at);
}

static void *wait_for_a_signal(void *argument)
{
    (void)argument;
    return (void *)(intptr_t)prs_wait_signal(&device, &word, PRS_COMPARE_GE, 1);
}

static void start(pthread_t *threads, int count, void *(*wait)(void *), uint64_t argument)
{
    for (int i = 0; i < count; i++)
        cr_assert_eq(pthread_create(&threads[i], NULL, wait, (void *)(uintptr_t)argument), 0);
}

static void join(const pthread_t *threads, int count, int want)
{
    for (int i = 0; i < count; i++) {
        void *result;

        cr_assert_eq(pthread_join(threads[i], &result), 0);
        cr_assert_eq((intptr_t)result, want, "thread %d of %d ended with %d", i, count, (int)(intptr_t)result);
    }
}

/* Let all threads wait until their limit. Return the number of their reads; *elapsed_ns limits the reads of one
 * thread. */
static uint64_t reads_of(void *(*first)(void *), void *(*second)(void *), uint64_t *elapsed_ns)
{
    pthread_t threads[THREADS];
    uint64_t start_ns = prs_now_ns();

    open_ring(WAIT_MS);
    start(threads, THREADS / 2, first, 1);
    start(threads + THREADS / 2, THREADS / 2, second, 1);
    join(threads, THREADS, -PRS_DEVICE_TIMEOUT);
    *elapsed_ns = prs_now_ns() - start_ns;
    prs_ring_fini(&ring);
    return control_reads;
}

Test(device_looks, sixteen_that_wait_for_the_proxy_read_host_memory_as_seldom_as_one)
{
    uint64_t elapsed_ns, reads = reads_of(wait_for_completion, wait_for_a_slot, &elapsed_ns);

    cr_assert_geq(reads, 2, "nobody looked");
    cr_assert_leq(reads, 2 * local.looks, "%" PRIu64 " reads in %" PRIu64 " looks", reads, local.looks);
    cr_assert_leq(reads, elapsed_ns / PRS_LOOK_NS + elapsed_ns / PRS_LOOK_ABORT_NS + FEW,
                  "%" PRIu64 " reads in %" PRIu64 " ns", reads, elapsed_ns);
}

Test(device_looks, who_waits_for_a_signal_hardly_reads_host_memory)
{
    uint64_t elapsed_ns, reads = reads_of(wait_for_a_signal, wait_for_a_signal, &elapsed_ns);

    cr_assert_geq(reads, 2, "no thread would have noticed an abort");
    cr_assert_leq(reads, 2 * (elapsed_ns / PRS_LOOK_ABORT_NS) + FEW, "%" PRIu64 " reads in %" PRIu64 " ns", reads,
                  elapsed_ns);
}

Test(device_looks, what_one_thread_has_seen_the_others_know_without_a_read)
{
    uint64_t before, at;

    open_ring(HEALTHY_MS);
    for (int i = 0; i < SLOTS; i++)
        cr_assert_eq(prs_ring_claim(&device, 1, &at), 0);
    cr_assert_eq(control_reads, 0, "the first lap needs no credit");
    ring.control->credit = 3;
    ring.control->done = 2;
    cr_assert_eq(prs_flush(&device, 1), 0);
    before = control_reads;
    cr_assert_gt(before, 0);
    cr_assert_eq(prs_flush(&device, 2), 0);
    for (int i = 0; i < 3; i++)
        cr_assert_eq(prs_ring_claim(&device, 1, &at), 0);
    cr_assert_eq(control_reads, before, "what was known was read again");
    prs_ring_fini(&ring);
}

Test(device_looks, while_one_looks_the_others_only_learn_from_it)
{
    pthread_t threads[THREADS];

    open_ring(HEALTHY_MS);
    local.looked_ns = PRS_LOOKING; /* another thread is reading, and takes long */
    start(threads, THREADS, wait_for_completion, 7);
    usleep(5000);
    __atomic_store_n(&local.done_seen, 7, __ATOMIC_RELEASE);
    join(threads, THREADS, 0);
    cr_assert_eq(control_reads, 0);
    prs_ring_fini(&ring);
}

Test(device_looks, who_leaves_leaves_the_looking_to_the_others)
{
    pthread_t first, threads[THREADS];

    open_ring(HEALTHY_MS);
    for (uint64_t done = 1; done <= 200; done++) { /* the thread that looks may differ from round to round */
        start(&first, 1, wait_for_completion, done);
        start(threads, THREADS / 4, wait_for_completion, done);
        prs_ring_done(&ring, done);
        join(&first, 1, 0);
        join(threads, THREADS / 4, 0);
    }
    prs_ring_fini(&ring);
}

Test(device_looks, an_abort_reaches_all_who_wait)
{
    pthread_t threads[3][THREADS];
    uint64_t start_ns;

    open_ring(2 * HEALTHY_MS);
    start(threads[0], THREADS, wait_for_completion, 1);
    start(threads[1], THREADS, wait_for_a_slot, 0);
    start(threads[2], THREADS, wait_for_a_signal, 0);
    usleep(2000);
    start_ns = prs_now_ns();
    prs_ring_abort(&ring, -EPIPE);
    for (int i = 0; i < 3; i++)
        join(threads[i], THREADS, -PRS_DEVICE_ABORTED);
    cr_assert_lt(prs_now_ns() - start_ns, HEALTHY_MS * 1000000ull, "it took %" PRIu64 " ns", prs_now_ns() - start_ns);
    prs_ring_fini(&ring);
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Memory that signals target is released while signals arrive. */
#include <criterion/criterion.h>
#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include "test/plugin/gin_job.h"

static bool driver_stops;

static void *drive(void *arg)
{
    struct job *job = arg;

    while (!__atomic_load_n(&driver_stops, __ATOMIC_RELAXED)) {
        if (gin_api_progress(&job->api) != NET_SUCCESS)
            return job;
        sched_yield();
    }
    return NULL;
}

static int send_signals(struct job *job, uint32_t count)
{
    struct gin_call call = {.rank = 1, .signal = job->signal_handle, .operation = GIN_SIGNAL_ADD, .value = 1};
    void *request;

    for (uint32_t i = 0; i < count; i++) {
        CHECK(gin_api_put(&job->api, &call, &request) == NET_SUCCESS, "signal %u", i);
        CHECK(gin_api_wait(&job->api, request) == 0, "signal %u", i);
    }
    return 0;
}

/* Rank 0 knows that its signals are done. Then rank 1 releases the memory that they target. Either a thread of its own
 * drives rank 1 meanwhile, or nobody does. */
static int give_up_signals(struct ranks *ranks, void *user)
{
    enum { SIGNALS = 100 };
    const struct plan *plan = user;
    bool threaded = plan->contexts == 2;
    uint64_t *words;
    pthread_t thread;
    void *failed = NULL;
    struct job job;
    int r = job_open(&job, ranks, user);

    if (r)
        return r;
    words = ranks_words(ranks);
    if (job.api.rank == 0) {
        if (send_signals(&job, 1))
            return 1;
        while (!__atomic_load_n(&words[1], __ATOMIC_ACQUIRE))
            gin_api_progress(&job.api);
        if (send_signals(&job, SIGNALS - 1))
            return 1;
        __atomic_store_n(&words[0], 1, __ATOMIC_RELEASE);
        while (!__atomic_load_n(&words[2], __ATOMIC_ACQUIRE))
            gin_api_progress(&job.api);
        CHECK(!gin_api_has_error(&job.api), "rank 0 has an error");
    } else if (job.api.rank == 1) {
        if (wait_signal(&job, 0, 1)) /* connected */
            return 1;
        if (threaded)
            CHECK(pthread_create(&thread, NULL, drive, &job) == 0, "thread");
        __atomic_store_n(&words[1], 1, __ATOMIC_RELEASE);
        while (!__atomic_load_n(&words[0], __ATOMIC_ACQUIRE))
            usleep(100);
        CHECK(gin_api_dereg(&job.api, job.signal_handle) == NET_SUCCESS, "signals");
        job.signal_handle = NULL;
        CHECK(__atomic_load_n(&job.signals[0], __ATOMIC_ACQUIRE) == SIGNALS, "%lu were raised",
              (unsigned long)job.signals[0]);
        __atomic_store_n(&driver_stops, true, __ATOMIC_RELAXED);
        if (threaded)
            pthread_join(thread, &failed);
        CHECK(!failed, "progress failed");
        for (int i = 0; i < 20000; i++)
            CHECK(gin_api_progress(&job.api) == NET_SUCCESS, "a signal came after its memory was released");
        __atomic_store_n(&words[2], 1, __ATOMIC_RELEASE);
    }
    return job_close(&job);
}

/* Runs with `counted` and over EFA, too: there the receiver raises the signals. */
Test(gin, memory_is_released_when_the_signals_that_came_for_it_are_raised, .timeout = 300)
{
    cr_assert_eq(run(give_up_signals, (struct plan){14, 1}), 0);
}

Test(gin, memory_is_released_beside_a_thread_that_raises_its_signals, .timeout = 300)
{
    cr_assert_eq(run(give_up_signals, (struct plan){14, 2}), 0);
}

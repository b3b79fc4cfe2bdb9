/* SPDX-License-Identifier: Apache-2.0 */
/* Memory that signals target is released while signals arrive. */
#include <criterion/criterion.h>
#include <pthread.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>

#include "test/plugin/gin_job.h"

/* Who drives rank 1 when it releases memory. */
enum driver { SELF, THREAD, SLOW_THREAD, ENDED_THREAD };

struct helper {
    struct job *job;
    enum driver kind;
    bool has_driven, stops; /* atomic */
};

static void *drive(void *arg)
{
    struct helper *helper = arg;

    while (!__atomic_load_n(&helper->stops, __ATOMIC_RELAXED)) {
        if (gin_api_progress(&helper->job->api) != NET_SUCCESS)
            return helper;
        __atomic_store_n(&helper->has_driven, true, __ATOMIC_RELEASE);
        if (helper->kind == SLOW_THREAD)
            usleep(50000); /* as a thread that the machine leaves waiting */
        else
            sched_yield();
    }
    return NULL;
}

static bool start_helper(pthread_t *thread, struct helper *helper)
{
    if (pthread_create(thread, NULL, drive, helper))
        return false;
    while (!__atomic_load_n(&helper->has_driven, __ATOMIC_ACQUIRE))
        sched_yield();
    return true;
}

static bool stop_helper(pthread_t thread, struct helper *helper)
{
    void *failed;

    __atomic_store_n(&helper->stops, true, __ATOMIC_RELAXED);
    return pthread_join(thread, &failed) == 0 && !failed;
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

/* CPU time of this thread. Other programs do not prolong it, and a wait for another thread does: it only yields. */
static uint64_t cpu_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

/* Release the memory of signals that are done at their sender. */
static int release_signals(struct job *job, enum driver kind, uint32_t signals)
{
    uint64_t *words = ranks_words(job->api.ranks);
    struct helper helper = {.job = job, .kind = kind};
    pthread_t thread;
    uint64_t began_ms;

    if (wait_signal(job, 0, 1)) /* connected */
        return 1;
    if (kind != SELF)
        CHECK(start_helper(&thread, &helper), "thread");
    if (kind == ENDED_THREAD)
        CHECK(stop_helper(thread, &helper), "progress failed");
    __atomic_store_n(&words[1], 1, __ATOMIC_RELEASE);
    while (!__atomic_load_n(&words[0], __ATOMIC_ACQUIRE))
        usleep(100);
    began_ms = cpu_ms();
    CHECK(gin_api_dereg(&job->api, job->signal_handle) == NET_SUCCESS, "signals");
    job->signal_handle = NULL;
    if (kind == ENDED_THREAD) {
        CHECK(cpu_ms() - began_ms < 200, "waited for a thread that has ended");
        return 0;
    }
    CHECK(__atomic_load_n(&job->signals[0], __ATOMIC_ACQUIRE) == signals, "%lu were raised",
          (unsigned long)job->signals[0]);
    if (kind != SELF)
        CHECK(stop_helper(thread, &helper), "progress failed");
    for (int i = 0; i < 20000; i++)
        CHECK(gin_api_progress(&job->api) == NET_SUCCESS, "a signal came after its memory was released");
    return 0;
}

/* Rank 0 knows that its signals are done. Then rank 1 releases the memory that they target. user: enum driver */
static int give_up_signals(struct ranks *ranks, void *user)
{
    enum { SIGNALS = 100 };
    struct plan plan = {14, 1};
    uint64_t *words;
    struct job job;
    int r = job_open(&job, ranks, &plan);

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
        if (release_signals(&job, *(enum driver *)user, SIGNALS))
            return 1;
        __atomic_store_n(&words[2], 1, __ATOMIC_RELEASE);
    }
    return job_close(&job);
}

static void release_beside(enum driver kind)
{
    int r = ranks_run(RANKS, 1, TIMEOUT_S, give_up_signals, &kind);

    if (r == 77)
        cr_skip_test("no RDMA device here");
    cr_assert_eq(r, 0);
}

/* These run with `counted` and over EFA, too: there the receiver raises the signals. */
Test(gin, memory_is_released_when_the_signals_that_came_for_it_are_raised, .timeout = 300)
{
    release_beside(SELF);
}

Test(gin, memory_is_released_beside_a_thread_that_raises_its_signals, .timeout = 300)
{
    release_beside(THREAD);
}

Test(gin, memory_is_released_beside_a_slow_thread_that_raises_its_signals, .timeout = 300)
{
    release_beside(SLOW_THREAD);
}

Test(gin, memory_is_released_at_once_when_the_thread_that_raised_signals_has_ended, .timeout = 300)
{
    release_beside(ENDED_THREAD);
}

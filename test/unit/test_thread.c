/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "transport/util/thread.h"

static char *shut; /* a page whose faults the program handles, as garbage collectors do */

static void open_page(int sig, siginfo_t *info, void *context)
{
    (void)sig;
    (void)context;
    if ((char *)info->si_addr != shut || mprotect(shut, 4096, PROT_READ | PROT_WRITE))
        signal(SIGSEGV, SIG_DFL);
}

static void *look(void *arg)
{
    sigset_t *blocked = arg;

    *shut = 1; /* with the signal blocked the kernel would end the process */
    pthread_sigmask(SIG_BLOCK, NULL, blocked);
    return NULL;
}

Test(thread, faults_alone_reach_the_programs_handlers)
{
    static const int of_the_program[] = {SIGTERM, SIGINT, SIGALRM, SIGUSR1, SIGCHLD, SIGPROF};
    static const int of_the_thread[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
    struct sigaction action = {.sa_sigaction = open_page, .sa_flags = SA_SIGINFO};
    sigset_t blocked, before, after;
    pthread_t thread;

    shut = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    cr_assert_neq((void *)shut, MAP_FAILED);
    cr_assert_eq(sigaction(SIGSEGV, &action, NULL), 0);
    pthread_sigmask(SIG_BLOCK, NULL, &before);
    cr_assert_eq(prs_thread_start(&thread, "a-test", look, &blocked), 0);
    pthread_sigmask(SIG_BLOCK, NULL, &after);
    pthread_join(thread, NULL);
    cr_assert_eq(*shut, 1);
    for (size_t i = 0; i < sizeof(of_the_program) / sizeof(*of_the_program); i++) {
        cr_expect(sigismember(&blocked, of_the_program[i]), "%s", strsignal(of_the_program[i]));
        cr_expect_eq(sigismember(&after, of_the_program[i]), sigismember(&before, of_the_program[i]),
                     "%s of the thread that starts it", strsignal(of_the_program[i]));
    }
    for (size_t i = 0; i < sizeof(of_the_thread) / sizeof(*of_the_thread); i++)
        cr_expect_not(sigismember(&blocked, of_the_thread[i]), "%s", strsignal(of_the_thread[i]));
}

/* ---- exit() ---- */

static struct seen { /* shared with children */
    int begun, ended, ended_at_exit, refused_at_exit;
} * seen;

static void look_at_exit(void)
{
    seen->ended_at_exit = __atomic_load_n(&seen->ended, __ATOMIC_ACQUIRE);
    seen->refused_at_exit = !prs_work_begin();
}

static void *work(void *arg)
{
    const int *naps = arg;

    if (!prs_work_begin())
        return NULL;
    __atomic_store_n(&seen->begun, 1, __ATOMIC_RELEASE);
    for (int i = 0; i < __atomic_load_n(naps, __ATOMIC_RELAXED) && !prs_exiting(); i++)
        usleep(1000);
    usleep(50000); /* wait until the thread has ended its work */
    __atomic_store_n(&seen->ended, 1, __ATOMIC_RELEASE);
    prs_work_end();
    return NULL;
}

static _Noreturn void exit_from_work(int naps)
{
    pthread_t thread;

    atexit(look_at_exit); /* registered first, so it runs last */
    if (prs_thread_start(&thread, "a-test", work, &naps))
        _exit(1);
    while (!__atomic_load_n(&seen->begun, __ATOMIC_ACQUIRE))
        usleep(100);
    exit(7);
}

static int status_of(pid_t pid)
{
    int status;

    cr_assert_eq(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

Test(thread, exit_waits_for_the_end_of_work)
{
    pid_t pid;

#if defined(__SANITIZE_THREAD__)
    cr_skip_test("ThreadSanitizer starts no thread in a forked child");
#endif
    seen = mmap(NULL, sizeof(*seen), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    cr_assert_neq((void *)seen, MAP_FAILED);
    pid = fork();
    if (pid == 0)
        exit_from_work(1 << 30);
    cr_assert_eq(status_of(pid), 7);
    cr_assert(seen->begun && seen->ended_at_exit && seen->refused_at_exit);
}

static double ms_of_a_child(void)
{
    struct timespec before, after;
    pid_t pid;

    clock_gettime(CLOCK_MONOTONIC, &before);
    pid = fork();
    if (pid == 0)
        exit(7);
    cr_assert_eq(status_of(pid), 7);
    clock_gettime(CLOCK_MONOTONIC, &after);
    return (double)(after.tv_sec - before.tv_sec) * 1e3 + (double)(after.tv_nsec - before.tv_nsec) / 1e6;
}

/* The parent's threads are not in the child, so there is nothing to wait for. A child that waits does so for a second;
 * on a busy machine one that does not may take as long, but not each of five. */
Test(thread, a_forked_child_exits_at_once)
{
    int naps = 60000;
    double least_ms = 1e9;
    pthread_t thread;

    seen = mmap(NULL, sizeof(*seen), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    cr_assert_neq((void *)seen, MAP_FAILED);
    cr_assert_eq(prs_thread_start(&thread, "a-test", work, &naps), 0);
    while (!__atomic_load_n(&seen->begun, __ATOMIC_ACQUIRE))
        usleep(100);
    for (int i = 0; i < 5; i++) {
        double ms = ms_of_a_child();

        least_ms = ms < least_ms ? ms : least_ms;
    }
    cr_assert_lt(least_ms, 800, "the quickest of five children took %.0f ms", least_ms);
    __atomic_store_n(&naps, 0, __ATOMIC_RELAXED);
    pthread_join(thread, NULL);
}

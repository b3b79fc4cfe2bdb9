/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
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
                     "%s of who starts it", strsignal(of_the_program[i]));
    }
    for (size_t i = 0; i < sizeof(of_the_thread) / sizeof(*of_the_thread); i++)
        cr_expect_not(sigismember(&blocked, of_the_thread[i]), "%s", strsignal(of_the_thread[i]));
}

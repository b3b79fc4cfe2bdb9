/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/util/thread.h"

#include <signal.h>
#include <stdlib.h>

#include "transport/util/patience.h"

enum { EXIT_PATIENCE_MS = 1000, EXIT_NAP_NS = 50000, EXIT_LOOK_NS = 10000000 };

static bool exiting;
static int at_work; /* threads between prs_work_begin() and prs_work_end() */

int prs_thread_start(pthread_t *thread, const char *name, void *(*run)(void *), void *arg)
{
    static const int own_faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS};
    sigset_t others, old;
    int r;

    sigfillset(&others);
    for (unsigned i = 0; i < sizeof(own_faults) / sizeof(own_faults[0]); i++)
        sigdelset(&others, own_faults[i]);
    pthread_sigmask(SIG_BLOCK, &others, &old); /* the new thread begins with this mask */
    r = pthread_create(thread, NULL, run, arg);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (!r)
        pthread_setname_np(*thread, name);
    return r;
}

/* ---- exit() ---- */

/* [thread-exit] Sequentially consistent, as in prs_work_begin(): either the thread sees `exiting`, or exit() sees the
 * thread at work. */
static void end_work(void)
{
    struct prs_patience patience = prs_patience_begin(EXIT_LOOK_NS);
    struct timespec nap = {0, EXIT_NAP_NS};

    __atomic_store_n(&exiting, true, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&at_work, __ATOMIC_SEQ_CST) && !prs_patience_is_over(&patience, EXIT_PATIENCE_MS))
        nanosleep(&nap, NULL);
}

static void forget_parent(void)
{
    at_work = 0; /* the parent's threads are not here */
}

/* Functions given to atexit() run before the destructor functions of libraries, whenever those were loaded. But C++
 * objects of libraries that are loaded later end before; the transport's threads use none. */
static void watch_exit(void)
{
    atexit(end_work);
    pthread_atfork(NULL, NULL, forget_parent);
}

bool prs_work_begin(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    pthread_once(&once, watch_exit);
    __atomic_add_fetch(&at_work, 1, __ATOMIC_SEQ_CST); /* [thread-exit] */
    if (!__atomic_load_n(&exiting, __ATOMIC_SEQ_CST))
        return true;
    prs_work_end();
    return false;
}

void prs_work_end(void)
{
    __atomic_sub_fetch(&at_work, 1, __ATOMIC_SEQ_CST);
}

bool prs_exiting(void)
{
    return __atomic_load_n(&exiting, __ATOMIC_RELAXED);
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/util/thread.h"

#include <signal.h>

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

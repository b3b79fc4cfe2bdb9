/* SPDX-License-Identifier: Apache-2.0 */
/* A fork copies a mutex as another thread holds it, but not the thread: the child would wait for ever. */
#ifndef UTIL_FORK_H
#define UTIL_FORK_H

#include <pthread.h>

/* At file level: the child of a fork finds this mutex free. What it protects must be harmless half changed: here all
 * of it belongs to the parent, and is known by its owner's pid. */
#define PRS_RENEW_IN_CHILD(name, mutex)                                                                                \
    static void renew_##name(void)                                                                                     \
    {                                                                                                                  \
        pthread_mutex_init(&(mutex), NULL);                                                                            \
    }                                                                                                                  \
    static __attribute__((constructor)) void watch_forks_##name(void)                                                  \
    {                                                                                                                  \
        pthread_atfork(NULL, NULL, renew_##name);                                                                      \
    }

#endif

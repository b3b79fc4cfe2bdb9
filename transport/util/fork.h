/* SPDX-License-Identifier: Apache-2.0 */
/* A forked child inherits mutexes that other threads hold, but not those threads: it would wait for ever. */
#ifndef UTIL_FORK_H
#define UTIL_FORK_H

#include <pthread.h>

/* At file scope: reset this mutex in forked children. The child may see half-changed data, which must be harmless: here
 * all of it belongs to the parent, which the owner's pid shows. */
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

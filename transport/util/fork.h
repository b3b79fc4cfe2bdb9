/* SPDX-License-Identifier: Apache-2.0 */
/* What a forked child inherits and must not keep.
 *
 * Mutexes that other threads hold, without those threads: it would wait for ever.
 *
 * Descriptors of connections and listeners: the kernel ends a connection when nobody has it. Else other ranks would
 * wait for ever for one that has died while its forked child lives, and connect to it without an answer. */
#ifndef UTIL_FORK_H
#define UTIL_FORK_H

#include <pthread.h>
#include <stdbool.h>

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

/* Make a descriptor between these two: socket(), accept(). A forked child closes it. prs_fork_end() returns fd, or -1
 * with errno. Keep what comes between short: forks wait for it. */
void prs_fork_begin(void);
int prs_fork_end(int fd);
/* Close it. In a forked child, where it is closed already and its number may be in use again, do nothing. */
void prs_fork_close(int fd);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* What a forked child inherits and must not keep.
 *
 * Mutexes that other threads hold: those threads do not exist in the child, so it would wait for ever.
 *
 * Descriptors of connections and listeners: the kernel ends a connection only when no process has its descriptor.
 * Otherwise other ranks would wait for ever for a rank that has died while its forked child lives, and would connect to
 * it without getting an answer. */
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

/* Make a descriptor (socket(), accept()) between these two calls; forked children then close it. prs_fork_end() returns
 * fd, or -1 with errno. Do little in between, because forks wait for it. */
void prs_fork_begin(void);
int prs_fork_end(int fd);
/* Close it. In a forked child, where it is closed already and its number may be in use again, do nothing. */
void prs_fork_close(int fd);

#endif

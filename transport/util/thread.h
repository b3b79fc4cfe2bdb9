/* SPDX-License-Identifier: Apache-2.0 */
/* A library's own threads in a program: the transport's, and the software NIC's. */
#ifndef UTIL_THREAD_H
#define UTIL_THREAD_H

#include <pthread.h>

/* As pthread_create (0 or an errno), with a name of at most 15 characters. The program's signals stay its own threads'
 * affair; those that tell of a fault of the thread itself (SIGSEGV and the like) reach the program's handler: some
 * write-protect memory and mend what they caught, and a blocked one would kill. */
int prs_thread_start(pthread_t *thread, const char *name, void *(*run)(void *), void *arg);

#endif

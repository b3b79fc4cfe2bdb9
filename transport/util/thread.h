/* SPDX-License-Identifier: Apache-2.0 */
/* Threads that a library starts inside a program: used by the transport and the software NIC. */
#ifndef UTIL_THREAD_H
#define UTIL_THREAD_H

#include <pthread.h>
#include <stdbool.h>

/* As pthread_create() (0 or an errno), with a name of at most 15 characters. The thread blocks all signals, so the
 * program's own threads handle them, except those for faults of the thread itself (SIGSEGV and the like). Programs that
 * write-protect memory handle those faults and continue; while blocked, they would end the process. */
int prs_thread_start(pthread_t *thread, const char *name, void *(*run)(void *), void *arg);

/* A program may call exit() while a library's threads still run. Other libraries, such as libfabric with its
 * providers, then free and unmap what such threads use. So a thread calls into other libraries only between these two:
 * exit() waits for prs_work_end(), for at most a second. Return false: the process exits, and the thread must end.
 * Where the work is a loop, prs_exiting() tells when it must end. */
bool prs_work_begin(void);
void prs_work_end(void);
bool prs_exiting(void);

#endif

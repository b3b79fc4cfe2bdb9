/* SPDX-License-Identifier: Apache-2.0 */
/* Included before the transport's sources, so that they read the simulator's clock and use its memory. */
#ifndef SIM_HOST_H
#define SIM_HOST_H

#include <stdint.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/mman.h>
#include <time.h>

#include "tools/sim/memory.h"

void sim_clock_set(uint64_t ps);

int sim_clock_gettime(clockid_t clock, struct timespec *out);
/* Anonymous memory. Private memory is not zeroed, because connections come and go, and write their memory before they
 * read it. */
void *sim_mmap(void *address, size_t bytes, int protection, int flags, int fd, off_t offset);
int sim_munmap(void *memory, size_t bytes);

/* The TCP stream of a connection. */
ssize_t sim_send(int fd, const void *data, size_t bytes, int flags);
ssize_t sim_recv(int fd, void *data, size_t bytes, int flags);

#define clock_gettime                sim_clock_gettime
#define send(fd, data, bytes, flags) sim_send(fd, data, bytes, flags)
#define recv(fd, data, bytes, flags) sim_recv(fd, data, bytes, flags)
#define calloc                       sim_calloc
#define malloc(bytes)                sim_malloc(bytes)
#define free                         sim_free
#define mmap                         sim_mmap
#define munmap                       sim_munmap

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* Stands in front of the transport's sources, so that they read the simulator's clock and take pages from its pool:
 * thousands of connections are opened and closed in a run, and the kernel's pages are slow. */
#ifndef SIM_HOST_H
#define SIM_HOST_H

#include <stdint.h>
#include <sys/mman.h>
#include <time.h>

void sim_host_init(void);
/* Free the pool. */
void sim_host_fini(void);
void sim_clock_set(uint64_t ps);
/* Give the pages of memory of ours that hold only zeros back to the kernel, which gives zeros when they are needed. */
void sim_host_trim(void *memory, size_t bytes);

int sim_clock_gettime(clockid_t clock, struct timespec *out);
/* Anonymous private memory only. */
void *sim_mmap(void *address, size_t bytes, int protection, int flags, int fd, off_t offset);
int sim_munmap(void *memory, size_t bytes);

#define clock_gettime sim_clock_gettime
#define mmap          sim_mmap
#define munmap        sim_munmap

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* How a program sets up the emulated Hopper GPUs. Everything else is CUDA's own runtime interface. See README.md. */
#ifndef TOOLS_HOPPER_HOPPER_H
#define TOOLS_HOPPER_HOPPER_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Call it before the first CUDA call of the process; only the first call counts. 0 stands for 8 devices, 8 SMs, and a
 * seed made from the clock. HOPPER_SMS and HOPPER_SEED in the environment override these. */
void hopper_setup(uint32_t devices, uint32_t sms, uint64_t seed);
uint64_t hopper_seed(void);
uint32_t hopper_devices(void);
uint32_t hopper_sms(void);

/* From now on a violation does not end the process: launches fail with cudaErrorLaunchFailure instead. */
void hopper_tolerate(void);
/* After a rank has given up, its kernels read memory that others may be writing. From now on that is no violation. */
void hopper_forgive_late_writes(void);
/* The text of the first violation; "" if there was none. */
const char *hopper_violation(void);
/* How many SMs of a device have a CTA at this moment. */
uint32_t hopper_busy_sms(int device);

/* A collective of another library, such as an all-reduce of NCCL on another stream. It has a kernel on each of `ranks`
 * devices, which holds `sms` whole SMs until all CTAs of all these kernels run. */
struct hopper_collective;
struct hopper_collective *hopper_collective_open(uint32_t ranks, uint32_t sms);
/* Enqueues the kernel of the current device. False: the device has fewer SMs. */
bool hopper_collective_launch(struct hopper_collective *c, struct CUstream_st *stream);
/* Whether all CTAs have been seen running. */
bool hopper_collective_met(const struct hopper_collective *c);
/* Call it when all its kernels have ended. */
void hopper_collective_close(struct hopper_collective *c);

/* From now on at most this many clusters of a launch run at a time, as if another program held the other SMs; 0: as
 * many as fit. The occupancy that a program asks for does not change. */
void hopper_limit_clusters(uint32_t clusters);
/* How many kernels were loaded on a device by their first launch there. */
uint32_t hopper_late_loads(void);
/* How often peer access was enabled a second time: an error to CUDA, which compute-sanitizer reports. */
uint32_t hopper_repeated_access(void);

/* Bytes of a device that this process has got from cuMemCreate() and not released. A mapping in another process keeps
 * memory too; it is not counted. */
uint64_t hopper_virtual_bytes(int device);
/* From now on cuMemCreate() gives at most so many bytes in all. */
void hopper_limit_virtual_bytes(int device, uint64_t bytes);

#ifdef __cplusplus
}
#endif

#endif

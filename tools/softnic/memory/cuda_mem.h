/* SPDX-License-Identifier: Apache-2.0 */
/* Device memory by CUDA: the functions of device_mem.h.
 *
 * The initiator copies, or, when it cannot open the other side's memory, that side's owner does, by the same code with
 * itself as the initiator (owner_copy.h, agent.h). The process's own pointers are used as they are; those of another
 * process are mapped (cuda_region.h). GPU to GPU is one copy, over NVLink where there is one. Pageable host memory goes
 * through pinned slots (cuda_staging.h); pinned host memory of the caller's process is copied directly. All copies run
 * on non-blocking streams of our own (cuda_stream.h): nothing here waits for a stream of the application, or makes
 * one wait. Writes into device memory need not even wait for each other (cuda_queue.h). */
#ifndef SOFTNIC_CUDA_MEM_H
#define SOFTNIC_CUDA_MEM_H

#include "tools/softnic/memory/device_mem.h"

extern const struct sn_device_mem sn_cuda_mem;

#endif

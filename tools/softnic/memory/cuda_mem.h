/* SPDX-License-Identifier: Apache-2.0 */
/* Device memory for the software NIC: what place.h asks of a device copier (struct sn_device_mem), done with CUDA.
 *
 * The initiator moves the data, or, when it cannot open the other side's memory, that side's owner does, by the same
 * code with itself as the initiator (handoff.h, agent.h). Its own pointers are used as they are, those of another
 * process are mapped (cuda_region.h); GPU to GPU is one copy, over NVLink where there is one; pageable host memory goes
 * through pinned slots (cuda_staging.h), pinned host memory of the caller's process directly. Everything runs on
 * non-blocking streams of our own, which say how far they are in memory (cuda_stream.h): nothing here waits for, or is
 * waited for by, a stream of the application. Writes into device memory need not even wait for each other
 * (cuda_flight.h). */
#ifndef SOFTNIC_CUDA_MEM_H
#define SOFTNIC_CUDA_MEM_H

#include "tools/softnic/memory/device_mem.h"

extern const struct sn_device_mem sn_cuda_mem;

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* Registered device memory across processes: how the owner makes it available, and how an initiator maps it. */
#ifndef SOFTNIC_CUDA_REGION_H
#define SOFTNIC_CUDA_REGION_H

#include "tools/softnic/memory/cuda_api.h"
#include "tools/softnic/memory/span.h"

/** Fill in mr->ipc for [mr->addr, mr->addr + mr->length): an IPC handle for memory of cuMemAlloc, a descriptor per
 * allocation for memory of the virtual memory API, kept open until unexport. Return 0, -EFAULT (not one piece of device
 * memory), or another -errno; all logged. Memory that cannot be shared is marked as its owner's alone. */
int sn_cuda_region_export(const struct sn_cuda *cuda, struct sn_mr_shm *mr);
void sn_cuda_region_unexport(struct sn_mr_shm *mr);

/** True when it could not be exported: other processes have its owner copy. */
bool sn_cuda_region_owner_only(const struct sn_mr_shm *mr);

/** GPU that holds the region, as the owner knows it. */
struct sn_cu_uuid sn_cuda_region_uuid(const struct sn_mr_shm *mr);

struct sn_cuda_map;

/** Make a region of another process addressable from dev, which is current. *ptr is where the owner's `addr` is here.
 * The mapping is kept for later requests, and for sn_cuda_region_reap when no registration that uses it is left.
 * Nothing here waits for a GPU. The caller gives its reference back when its copies are done. Return 0, SN_COPY_OWNER
 * (it cannot be opened here), -ESRCH (the owner is gone), -EFAULT (the registration went away), -EIO, -EPERM; logged.
 */
int sn_cuda_map_take(const struct sn_cuda *cuda, struct sn_cuda_dev *dev, struct sn_world *world, uint32_t mr,
                     uint64_t addr, struct sn_cuda_map **map, sn_cu_ptr *ptr);
void sn_cuda_map_give(struct sn_cuda_map *map);

/** Close the mappings that no registration needs any more. This may wait for the GPU and its kernels: only for calls in
 * which a program expects that (registering and deregistering device memory, closing a device), never in a transfer. */
void sn_cuda_region_reap(const struct sn_cuda *cuda);

#endif

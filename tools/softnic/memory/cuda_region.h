/* SPDX-License-Identifier: Apache-2.0 */
/* Registered device memory across processes: how the owner exports it, and how an initiator maps it. */
#ifndef SOFTNIC_CUDA_REGION_H
#define SOFTNIC_CUDA_REGION_H

#include "tools/softnic/memory/cuda_api.h"
#include "tools/softnic/memory/span.h"

/* Fill in mr->ipc for [mr->addr, mr->addr + mr->length): an IPC handle for memory of cuMemAlloc, or one descriptor per
 * allocation for memory of the virtual memory API, kept open until unexport. Return 0, -EFAULT (not one piece of
 * device memory), or another -errno; all logged. Memory that cannot be exported is marked as reachable by its owner
 * only. */
int sn_cuda_region_export(const struct sn_cuda *cuda, struct sn_mr_shm *mr);
void sn_cuda_region_unexport(struct sn_mr_shm *mr);

/* True when it could not be exported: other processes have its owner copy. */
bool sn_cuda_region_owner_only(const struct sn_mr_shm *mr);

/* The GPU that holds the region, as the owner knows it. */
struct sn_cu_uuid sn_cuda_region_uuid(const struct sn_mr_shm *mr);

struct sn_cuda_map;

/* Make a region of another process addressable from dev, which is current. *ptr: the address here of the owner's
 * `addr`. The mapping is kept for later requests, until sn_cuda_region_reap finds no registration that uses it.
 * Nothing here waits for a GPU. The caller gives its reference back when its copies are done. Return 0, SN_COPY_OWNER
 * (it cannot be opened here), -ESRCH (the owner is gone), -EFAULT (the registration is gone), -EIO, or -EPERM;
 * logged. */
int sn_cuda_map_take(const struct sn_cuda *cuda, struct sn_cuda_dev *dev, struct sn_world *world, uint32_t mr,
                     uint64_t addr, struct sn_cuda_map **map, sn_cu_ptr *ptr);
void sn_cuda_map_give(struct sn_cuda_map *map);

/* The same for a region of this process, whose own address serves unless it is on another GPU than dev and made with
 * the virtual memory API: then only GPUs that were given access reach it, and the application need not have done that.
 * Return 0 or -errno; *map may stay NULL. */
int sn_cuda_map_take_own(const struct sn_cuda *cuda, struct sn_cuda_dev *dev, struct sn_world *world, uint32_t mr,
                         uint64_t addr, struct sn_cuda_map **map, sn_cu_ptr *ptr);

/* Close the mappings that no registration needs any more. This may wait for the GPU and its kernels. So call it only
 * where programs expect that (registering and deregistering device memory, closing a device), never during a
 * transfer. */
void sn_cuda_region_reap(const struct sn_cuda *cuda);

#endif

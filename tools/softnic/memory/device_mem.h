/* SPDX-License-Identifier: Apache-2.0 */
/* What the NIC asks of device memory: a table that the CUDA driver fills in (cuda_mem.h), or, in a world with a copier,
 * that process (copier_client.h). */
#ifndef SOFTNIC_DEVICE_MEM_H
#define SOFTNIC_DEVICE_MEM_H

#include "tools/softnic/memory/span.h"

/* Where a queue pair's flights go, one behind the other; zero to begin with. */
struct sn_copy_queue {
    void *stream; /* the device copier's; may change while nothing is aloft */
    uint32_t pending;
    uint32_t id; /* tells the lanes of a process apart: the queue pair's index */
};

/* A transfer that a copy engine makes behind those before it, while its queue pair goes on. */
struct sn_queued_copy {
    uint64_t mark;
    void *map, *from_map, *slot; /* held until it has landed */
    void *to;                    /* where its bytes go from the slot then, NULL: it is no read */
    uint64_t bytes;
};

enum { SN_BOUNCE_BYTES = 256 << 10 };

/** Device memory, filled in by cuda_mem.c when there is a driver; NULL: host memory only. Every call may come from any
 * thread. */
struct sn_device_mem {
    /** Does [addr, addr+length) lie in device memory? */
    bool (*is_device)(uint64_t addr, uint64_t length);
    /** Fill in mr->ipc (and mr->addr for a DMA-BUF: fd >= 0, offset in it) so that other processes can map it; 0 or
     * -errno. */
    int (*export_mr)(struct sn_mr_shm *mr, int dmabuf_fd, uint64_t offset);
    void (*unexport_mr)(struct sn_mr_shm *mr);
    bool (*dmabuf_supported)(void);
    /** True when the registration was made for its owner alone to reach. */
    bool (*owner_only)(const struct sn_mr_shm *mr);
    /** No transfer is under way that would mind: what may wait for a GPU's kernels is done now. */
    void (*settle)(void);
    /** The registration, which is valid, will be used by transfers that are made here: do what they need and what may
     * wait for a GPU's kernels. Return 0, SN_COPY_OWNER (they will have to be made by its owner), or -errno; logged.
     */
    int (*prepare)(uint32_t mr);
    /** At least one side is device memory. Nothing on the way may wait for a GPU's kernels: they may wait for it. As
     * sn_copy_start and sn_copy_poll, or SN_COPY_OWNER, with nothing done.
     */
    int (*copy_start)(struct sn_copy *copy);
    int (*copy_poll)(struct sn_copy *copy);
    /** Give the transfer to a copy engine, behind all that is aloft in the lane: into device memory, from device memory
     * or a short one from memory of this process, whose bytes are taken now; or a short one from one piece of device
     * memory to one of this process that is not registered, whose bytes are there when it has landed. Return 0 (aloft),
     * SN_COPY_BUSY (not now, or not such a one: nothing is done), or -errno, logged. */
    int (*enqueue)(struct sn_copy *copy, struct sn_copy_queue *queue, struct sn_queued_copy *queued);
    /** Is it done? In the order of the lane. ask: see to it that this will be known; else only look, for more will be
     * given to the lane. Return 0, SN_COPY_BUSY, or -errno, logged; after the first and the last it is over. */
    int (*queued_done)(struct sn_copy_queue *queue, struct sn_queued_copy *queued, bool ask);
    /** SN_BOUNCE_BYTES of host memory that a copy engine reaches, or NULL: none is left. */
    void *(*bounce_take)(void);
    void (*bounce_give)(void *bounce);
};
extern const struct sn_device_mem *sn_device_mem;

#endif

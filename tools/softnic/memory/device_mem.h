/* SPDX-License-Identifier: Apache-2.0 */
/* The NIC's operations on device memory: a table of functions, implemented with CUDA (cuda_mem.h), or by jobs for the
 * copier (copier_client.h). */
#ifndef SOFTNIC_DEVICE_MEM_H
#define SOFTNIC_DEVICE_MEM_H

#include "tools/softnic/memory/span.h"

/* A copy queue: the copies of one queue pair follow each other in it. All zero to begin with. */
struct sn_copy_queue {
    void *stream; /* a stream of CUDA; may change while the queue is empty */
    uint32_t pending;
    uint32_t id; /* tells the queues of a process apart: the queue pair's index */
};

/* A copy in a queue. A copy engine makes it after those before it, while its queue pair continues. */
struct sn_queued_copy {
    uint64_t mark;
    void *map, *from_map, *slot; /* held until it is done */
    /* for a read: where its bytes go from the slot when they have arrived; otherwise NULL */
    void *to;
    uint64_t bytes;
};

enum { SN_BOUNCE_BYTES = 256 << 10 };

/* Device memory. NULL: there is no driver, and all memory is host memory. Any thread may call any function. */
struct sn_device_mem {
    /* Does [addr, addr+length) lie in device memory? */
    bool (*is_device)(uint64_t addr, uint64_t length);
    /* Fill in mr->ipc (and mr->addr for a DMA-BUF: fd >= 0, offset in it) so that other processes can map it; 0 or
     * -errno. */
    int (*export_mr)(struct sn_mr_shm *mr, int dmabuf_fd, uint64_t offset);
    void (*unexport_mr)(struct sn_mr_shm *mr);
    bool (*dmabuf_supported)(void);
    /* True when only its owner can reach the registered memory. */
    bool (*owner_only)(const struct sn_mr_shm *mr);
    /* Do work that may wait for a GPU's kernels, now that it delays no transfer. */
    void (*settle)(void);
    /* The registration, which is valid, will be used by transfers that are made here: prepare what they need,
     * including what may wait for a GPU's kernels. Return 0, SN_COPY_OWNER (its owner will have to make them), or
     * -errno; logged. */
    int (*prepare)(uint32_t mr);
    /* Copy; at least one side is device memory. Nothing on the way may wait for a GPU's kernels: they may be waiting
     * for this copy. Return as sn_copy_start and sn_copy_poll, or SN_COPY_OWNER with nothing done. */
    int (*copy_start)(struct sn_copy *copy);
    int (*copy_poll)(struct sn_copy *copy);
    /* Give a copy to a copy engine, after all others of the queue. It goes into device memory, from device memory or
     * (a short one) from memory of this process, whose bytes are taken now; or it is a short one from one piece of
     * device memory to unregistered memory of this process, whose bytes arrive when it is done. It may go into several
     * pieces of one registration, in any order; from memory of this process only into words (8 aligned bytes), which
     * become visible in their order. Return 0 (queued),
     * SN_COPY_BUSY (not now, or not this kind of copy: nothing is done), or -errno, logged. */
    int (*enqueue)(struct sn_copy *copy, struct sn_copy_queue *queue, struct sn_queued_copy *queued);
    /* Is it done? Call it in the order of the queue. ask: record a mark if needed, so that this becomes known; without
     * it only look, because more copies will follow. Return 0, SN_COPY_BUSY, or -errno, logged; 0 and -errno end the
     * copy. */
    int (*queued_done)(struct sn_copy_queue *queue, struct sn_queued_copy *queued, bool ask);
    /* SN_BOUNCE_BYTES of host memory that a copy engine can reach, or NULL when none is left. */
    void *(*bounce_take)(void);
    void (*bounce_give)(void *bounce);
    /* Called again and again, at least once a second: tell the user, once, when a copy made by another thread of this
     * process hangs. NULL: another process makes the copies. */
    void (*watch)(uint64_t now);
};
extern const struct sn_device_mem *sn_device_mem;

#endif

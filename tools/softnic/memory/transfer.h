/* SPDX-License-Identifier: Apache-2.0 */
/* Moving bytes between registered memory of two processes, one of which is the caller's. */
#ifndef SOFTNIC_PLACE_H
#define SOFTNIC_PLACE_H

#include "tools/softnic/world/queues.h"
#include "tools/softnic/world/world.h"

/* A piece of memory as its owner sees it. mr: index of the registration it lies in; SN_NONE: plain host memory of the
 * caller. */
struct sn_span {
    uint64_t addr;
    uint64_t length;
    uint32_t mr;
    uint32_t kind; /* enum sn_mem_kind */
};

/** The part [offset, offset + bytes) of a list. Return the number of spans. */
uint32_t sn_spans_slice(struct sn_span *to, const struct sn_span *from, uint32_t count, uint64_t offset,
                        uint64_t bytes);

/* Who is at a transfer that takes its time: the device copier, the owner of the memory (handoff.h), or the steps of an
 * atomic operation. */
enum sn_copy_by { SN_BY_DEVICE, SN_BY_OWNER, SN_BY_STEPS };

/* One transfer. dst and src hold the same number of bytes in total. */
struct sn_copy {
    struct sn_world *world;
    uint32_t self;     /* process index of the caller */
    uint32_t dst_proc; /* process indices; at least one is self, but in the copier */
    uint32_t src_proc;
    uint32_t dst_count, src_count;
    uint64_t length;
    void *async; /* of whom `by` names, between start and the end of poll */
    uint32_t by; /* enum sn_copy_by */
    struct sn_span dst[SN_MAX_SGE], src[SN_MAX_SGE];
};

enum {
    SN_PLACE_BUSY = 1,
    SN_PLACE_OWNER = 2, /* from the device copier only: the other side's memory can be reached by its owner alone */
};

/** Copy (device memory that cannot be mapped here: have its owner copy), the last bytes last; an aligned 4 or 8 byte
 * destination gets one store. Return 0 (done), SN_PLACE_BUSY (device memory: call sn_place_poll until it is not),
 * -ESRCH (the other process is gone), -EFAULT (memory is not mapped), -EPERM, -EIO. */
int sn_place_start(struct sn_copy *copy);
int sn_place_poll(struct sn_copy *copy);

enum { SN_WRITE_BATCH = 32, SN_WRITE_BATCH_BYTES = 4096 /* longer ones gain nothing from sharing a system call */ };

/** Write count pieces of host memory here to as many there, in order, with one system call. dst[i] and src[i] are
 * equally long. Return 0, or -EAGAIN: perhaps not all are written; write them one by one to learn what is wrong. */
int sn_place_writes(struct sn_world *world, uint32_t dst_proc, const struct sn_span *dst, const struct sn_span *src,
                    unsigned count);

/* An operation on 8 aligned bytes: read, then write, under the world's lock of that word. cas: swap if equal to
 * compare_add, else add. */
struct sn_atomic {
    bool cas; /* this and the next three are the caller's */
    uint64_t compare_add, swap, *found;
    struct sn_copy *target; /* its dst is the word */
    bool locked, moving, writing;
    uint32_t tries;
    uint64_t value;
    struct sn_copy word; /* between memory here and the target */
};

/** Atomic among all requests of the world. Return as sn_place_start; *found is filled in when it is done. Both must
 * stay until then. */
int sn_place_atomic(struct sn_copy *copy, struct sn_atomic *atomic);

/** Which of the world's atomic_locks guards a word of that process. Whoever has one waits for no other: they are tried.
 */
unsigned sn_atomic_lock_of(uint32_t proc, uint64_t addr);

/** The same for an owner, whom nobody else can help. sn_atomic_step until it is not SN_PLACE_BUSY. */
void sn_atomic_begin(struct sn_atomic *atomic, struct sn_copy *target);
int sn_atomic_step(struct sn_atomic *atomic);

/** True when the process is there and is still the one that entered the world. */
bool sn_place_reachable(struct sn_world *world, uint32_t proc);

/* Where a queue pair's flights go, one behind the other; zero to begin with. */
struct sn_lane {
    void *stream; /* the device copier's; may change while nothing is aloft */
    uint32_t aloft;
    uint32_t id; /* tells the lanes of a process apart: the queue pair's index */
};

/* A transfer that a copy engine makes behind those before it, while its queue pair goes on. */
struct sn_flight {
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
     * wait for a GPU's kernels. Return 0, SN_PLACE_OWNER (they will have to be made by its owner), or -errno; logged.
     */
    int (*prepare)(uint32_t mr);
    /** At least one side is device memory. Nothing on the way may wait for a GPU's kernels: they may wait for it. As
     * sn_place_start and sn_place_poll, or SN_PLACE_OWNER, with nothing done.
     */
    int (*copy_start)(struct sn_copy *copy);
    int (*copy_poll)(struct sn_copy *copy);
    /** Give the transfer to a copy engine, behind all that is aloft in the lane: into device memory, from device memory
     * or a short one from memory of this process, whose bytes are taken now; or a short one from one piece of device
     * memory to one of this process that is not registered, whose bytes are there when it has landed. Return 0 (aloft),
     * SN_PLACE_BUSY (not now, or not such a one: nothing is done), or -errno, logged. */
    int (*fly)(struct sn_copy *copy, struct sn_lane *lane, struct sn_flight *flight);
    /** Is it done? In the order of the lane. ask: see to it that this will be known; else only look, for more will be
     * given to the lane. Return 0, SN_PLACE_BUSY, or -errno, logged; after the first and the last it is over. */
    int (*fly_landed)(struct sn_lane *lane, struct sn_flight *flight, bool ask);
    /** SN_BOUNCE_BYTES of host memory that a copy engine reaches, or NULL: none is left. */
    void *(*bounce_take)(void);
    void (*bounce_give)(void *bounce);
};
extern const struct sn_device_mem *sn_device_mem;

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* The world: one sparse file in /dev/shm that every process using the software NIC maps. It contains whatever an
 * initiator needs to act for a target that is not running: devices, processes, queue pairs, completion and receive
 * rings, memory keys. Everything has a fixed width and is position independent: references are table indices, or
 * offsets from the start of the file. */
#ifndef SOFTNIC_WORLD_H
#define SOFTNIC_WORLD_H

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SN_WORLD_MAGIC 0x31434e5446535250ull /* "PRSFTNC1" */
#define SN_WORLD_ENV   "SOFTNIC_WORLD"       /* path of the world's file */
#define SN_NODE_ENV    "SOFTNIC_NODE"        /* emulated node of this process; without it every device is visible */

enum {
    SN_WORLD_VERSION = 10,
    SN_MAX_PROCS = 256,
    SN_MAX_DEVS = 64,
    SN_MAX_CTXS = 1024,
    SN_MAX_QPS = 16384, /* 14 bits of the queue pair number; the other 10 are the generation */
    SN_MAX_CQS = 16384,
    SN_MAX_SRQS = 2048,
    SN_MAX_MRS = 65536,     /* 16 bits of a key; the other 16 are the generation */
    SN_MAX_GIDS = 2,        /* 0: fe80::/64 of the GUID, 1: IPv4-mapped, RoCEv2; EFA has the first only */
    SN_MAX_CQE = 262144,    /* libfabric's ofi_rxm asks for this many. NVSHMEM makes every queue that large */
    SN_ASYNC_EVENTS = 4096, /* unread events of an opened device: a failure may hit all queue pairs, twice each */
    SN_ARENA_CLASSES = 20,  /* 4 KiB << class */
    SN_IPC_BLOB = 128,
    SN_MAX_SGE = 32,
    SN_MAX_SPANS = SN_MAX_SGE + 1, /* spans of a copy: the buffers, and the header of a datagram */
    SN_AGENT_SLOTS = 32,           /* jobs that one agent carries out at a time */
    SN_AGENT_ORDER = 64,
    SN_ATOMIC_LOCKS = 64,
    SN_MAX_INITIATORS = 7, /* initiators at work on one queue pair at a time; others wait */
};
#define SN_ARENA_BYTES (4ull << 30)
#define SN_NONE        UINT32_MAX

/* A lock word in shared memory: 0 or the holder's pid, so that a killed holder can be detected (lock.h). */
struct sn_lock {
    uint32_t owner;
    uint32_t stolen; /* how often it was taken from a dead holder */
};

/* Indices of a table: fresh ones first, then the one that was freed longest ago, so that numbers are not reused at
 * once. */
struct sn_slots {
    struct sn_lock lock;
    uint32_t fresh; /* indices from here on were never used */
    uint32_t free_head, free_tail;
    uint32_t pad[3];
};

enum sn_fence_meaning { SN_FENCE_SPEC = 0, SN_FENCE_STRICT = 1 };

/* Settings of the timing model. All zero: the model is off, and requests execute as fast as the machine can. */
struct sn_config {
    uint64_t rate_bps;         /* rate of each direction of each cable, at the start; 0: unlimited */
    uint64_t latency_ns;       /* one way, of each cable, at the start */
    uint64_t wr_cost_ns;       /* NIC occupancy per work request */
    uint64_t doorbell_cost_ns; /* added for each posting call */
    uint64_t fence_cost_ns;    /* added for each fenced request */
    uint64_t jitter_ns;        /* uniform extra delivery delay */
    uint64_t seed;
    uint64_t retry_cap_ns; /* longest wait before RETRY_EXC_ERR, whatever the queue pair asks for */
    uint32_t fence_meaning;
    uint32_t nics;          /* per node */
    uint32_t nodes;         /* devices are node * nics + nic */
    uint32_t cables_differ; /* some cable has, or has had, a rate, a latency or losses of its own */
    uint32_t copier;        /* a process of the NIC's own copies device memory (copier.h) */
    uint32_t efa;           /* the devices are AWS's EFA: SRD queue pairs, no RC */
    uint32_t odd_empty;     /* deliberately wrong: an empty write with immediate reports one byte */
    uint32_t atomic_cap;    /* enum ibv_atomic_cap that devices report */
};
static_assert(sizeof(struct sn_config) == 96, "shared layout");

struct sn_counters {
    uint64_t send_wrs, recv_wrs; /* work requests posted */
    uint64_t doorbells;          /* posting calls, send and receive */
    uint64_t cqes_send, cqes_recv;
    uint64_t bytes_tx, bytes_rx;
    uint64_t fences;
    uint64_t errors; /* completions with an error status, except flushed ones */
    uint64_t rnr_naks, retries;
    uint64_t flushed; /* requests and receives that a queue pair returned undone */
    uint64_t dropped; /* UD and UC: messages of this device that did not arrive */
};
static_assert(sizeof(struct sn_counters) == 104, "shared layout");

struct sn_dev {
    char name[32];
    char sysfs_device[192]; /* real path of the PCI device that it pretends to be; empty: none */
    uint64_t guid;
    uint8_t gid[SN_MAX_GIDS][16];
    uint32_t lid;
    uint32_t node;
    uint32_t port_up;
    uint32_t loss_ppb;         /* losses among 10^9 messages and acknowledgements; set at run time */
    struct sn_lock clock_lock; /* protects the three clocks */
    uint64_t nic_free_at, tx_free_at, rx_free_at;
    uint64_t rate_bps, latency_ns; /* like those of sn_config; they can be set at run time */
    struct sn_counters counters;
    uint32_t efa;        /* as in sn_config */
    uint32_t dead;       /* sn_device_kill() */
    uint32_t atomic_cap; /* as in sn_config */
    uint8_t spare[512 - 32 - 192 - 8 - 32 - 16 - 8 - 24 - 16 - 104 - 12];
};
static_assert(sizeof(struct sn_dev) == 512, "shared layout");

enum sn_proc_state { SN_PROC_FREE = 0, SN_PROC_LIVE = 1, SN_PROC_SWEEP = 2 };

struct sn_proc {
    uint32_t state;
    uint32_t pid;
    uint64_t start_ticks; /* field 22 of /proc/pid/stat: a process that reuses the pid has another value */
    /* A word of that process, and its address there: reading it back proves that pid is still the same process, and has
     * not called exec. */
    uint64_t nonce, nonce_addr;
    uint32_t generation;
    uint32_t node; /* SN_NONE: sees every device */
    uint8_t spare[24];
};
static_assert(sizeof(struct sn_proc) == 64, "shared layout");

struct sn_async {
    uint32_t type;    /* enum ibv_event_type */
    uint32_t element; /* queue pair number, port, or index of a completion queue or shared receive queue */
};

/* An opened device. Other processes put asynchronous events here and wake its socket. */
struct sn_ctx_shm {
    uint32_t owner; /* process index + 1; 0: free */
    uint32_t dev;
    struct sn_lock lock;
    uint32_t head, tail; /* of events */
    uint32_t wake_id;    /* names the socket: wake.h */
    uint32_t lost;       /* number of events that found the ring full */
    struct sn_async events[SN_ASYNC_EVENTS];
};
static_assert(sizeof(struct sn_ctx_shm) == 32 + 8 * SN_ASYNC_EVENTS, "shared layout");

struct sn_cqe {
    uint64_t wr_id;
    uint32_t status; /* enum ibv_wc_status */
    uint32_t opcode; /* enum ibv_wc_opcode */
    uint32_t byte_len;
    uint32_t imm; /* network order */
    uint32_t qp_num;
    uint32_t src_qp;
    uint32_t wc_flags;
    uint32_t vendor_err;
    uint32_t queue_upto; /* this completion frees the send queue up to this position */
    uint32_t is_recv;
    uint64_t time_ns;
    uint32_t src_dev; /* for a receive: the sender's device */
    uint32_t sl;
};
static_assert(sizeof(struct sn_cqe) == 64, "one cache line each");

enum sn_cq_arm { SN_CQ_IDLE = 0, SN_CQ_ARM_SOLICITED = 1, SN_CQ_ARM_ANY = 2 };

/* On one line: a producer that finds the ring empty, as most do, needs the consumers' last store anyway. */
struct sn_cq_shm {
    uint32_t owner;
    uint32_t ctx;        /* index of the opened device, for CQ_ERR */
    struct sn_lock lock; /* producers */
    uint64_t ring_off;
    uint32_t capacity; /* power of two */
    uint32_t tail;
    uint32_t head;    /* written by the owner's consumers */
    uint32_t wake_id; /* completion channel's socket; 0: none */
    uint32_t armed;   /* enum sn_cq_arm */
    uint32_t events;  /* events that were raised and not taken by ibv_get_cq_event yet */
    uint32_t overrun;
    uint8_t pad[12];
};
static_assert(sizeof(struct sn_cq_shm) == 64, "one cache line");

struct sn_sge {
    uint64_t addr;
    uint32_t length;
    uint32_t key;
};
static_assert(sizeof(struct sn_sge) == 16, "shared layout");

struct sn_rqe { /* followed by max_sge sn_sge */
    uint64_t wr_id;
    uint32_t num_sge;
    uint32_t pad;
};

/* A receive ring: the owner appends, and initiators take from the head. Queue pairs and shared receive queues use it
 * alike. */
struct sn_rq_shm {
    struct sn_lock lock;
    uint64_t ring_off;
    uint32_t capacity; /* power of two */
    uint32_t stride;
    uint32_t max_sge;
    uint32_t head, tail;
    uint32_t limit; /* raise SRQ_LIMIT_REACHED when fewer are left; 0: not armed */
    uint8_t spare[24];
};
static_assert(sizeof(struct sn_rq_shm) == 64, "shared layout");

enum sn_transport { SN_TRANSPORT_RC, SN_TRANSPORT_SRD, SN_TRANSPORT_UC, SN_TRANSPORT_UD };

struct sn_qp_shm {
    uint32_t owner;
    uint32_t qpn; /* generation << 14 | index; 0: not in use */
    uint32_t ctx;
    uint32_t dev;
    uint32_t pd; /* unique in the owner process */
    uint32_t transport;
    uint32_t state; /* enum ibv_qp_state */
    uint32_t dest_qpn;
    uint32_t dest_dev;
    uint32_t access; /* enum ibv_access_flags */
    uint32_t scq, rcq;
    uint32_t srq; /* SN_NONE: own ring */
    uint32_t max_dest_rd_atomic;
    /* Each word: a count << 32 | pid of an initiator that is acting on this queue pair and its memory; pid 0: none. A
     * connected queue pair has one at a time, others any number. */
    uint64_t initiators[SN_MAX_INITIATORS];
    uint32_t generation; /* outlives the queue pair */
    uint32_t min_rnr_timer;
    struct sn_lock lock; /* state changes */
    struct sn_rq_shm rq;
    uint32_t qkey; /* UD, SRD: the key that a request must carry */
    uint8_t spare[60];
};
static_assert(sizeof(struct sn_qp_shm) == 256 && offsetof(struct sn_qp_shm, initiators[1]) == 64 &&
                  offsetof(struct sn_qp_shm, rq) == 128,
              "a request to a connected queue pair uses the first cache line, and another for its receive");

struct sn_srq_shm {
    uint32_t owner;
    uint32_t ctx;
    uint32_t pd;
    uint32_t pad[13];
    struct sn_rq_shm rq;
};
static_assert(sizeof(struct sn_srq_shm) == 128, "shared layout");

enum sn_mem_kind { SN_MEM_HOST = 0, SN_MEM_CUDA = 1 };

struct sn_mr_shm {
    uint32_t owner;
    uint32_t key; /* index << 16 | generation; 0: not valid */
    uint32_t generation;
    uint32_t pd;
    uint64_t iova; /* the address that requests use */
    uint64_t length;
    uint64_t addr; /* its address in the owner: addr + (requested - iova) */
    uint32_t access;
    uint32_t kind;                  /* enum sn_mem_kind */
    uint32_t ctx;                   /* SN_MEM_CUDA: the opened device whose agent copies it for others */
    uint32_t window;                /* it is a memory window; its key is not valid while it is not bound */
    uint32_t window_qpn, window_of; /* the queue pair that has bound it; index of its registration */
    uint8_t ipc[SN_IPC_BLOB];       /* SN_MEM_CUDA: how another process maps it (cuda_region.c) */
    uint8_t spare[64];
};
static_assert(sizeof(struct sn_mr_shm) == 256, "shared layout");

/* A job for an agent (agent.h). */
struct sn_agent_span {
    uint64_t addr, length;
    uint32_t key; /* key of the registration; 0: plain host memory */
    uint32_t kind;
};
static_assert(sizeof(struct sn_agent_span) == 24, "shared layout");

enum sn_agent_op {
    SN_AGENT_WRITE,
    SN_AGENT_READ,
    SN_AGENT_ADD,
    SN_AGENT_SWAP,
    SN_AGENT_ENQUEUE, /* the copier's: put a write into a copy queue */
    SN_AGENT_PREPARE, /* the copier's: the peer's memory (dst) will be used */
};

struct sn_agent_slot {
    uint32_t op;
    int32_t result;                 /* once done: 0, SN_COPY_OWNER, or -errno from the agent's point of view */
    uint32_t proc, proc_generation; /* the initiator */
    uint64_t length, compare_add, swap, found;
    uint32_t dst_count, src_count;
    /* the process that registered the other side's memory: the owner, or, if the copier is asked, any process */
    uint32_t peer;
    /* SN_AGENT_ENQUEUE: the index of the queue pair whose queue it is; and whether that queue is empty */
    uint16_t queue;
    uint16_t queue_is_empty;
    struct sn_agent_span dst[SN_MAX_SPANS], src[SN_MAX_SPANS];
};
static_assert(sizeof(struct sn_agent_slot) == 64 + 2 * 24 * SN_MAX_SPANS, "shared layout");

static_assert(SN_MAX_QPS <= UINT16_MAX, "lanes are numbered like queue pairs");

/* One for each opened device, and in the copier one for each process. The words are apart from the slots, so that
 * looking at all of them reads four cache lines. */
struct sn_agent_shm {
    uint32_t epoch; /* odd: an agent is at work. Another number: another agent */
    uint32_t bell;  /* futex: counts posted jobs */
    uint32_t asleep;
    uint32_t beat; /* advances while the agent makes progress */
    uint32_t tail; /* of order */
    uint8_t pad[44];
    uint64_t words[SN_AGENT_SLOTS]; /* initiator's pid << 32 | serial << 8 | enum sn_agent_state */
    /* the copier's: words in the order of posting, with the slot's number in place of the state */
    uint64_t order[SN_AGENT_ORDER];
    struct sn_agent_slot slots[SN_AGENT_SLOTS];
};
static_assert(offsetof(struct sn_agent_shm, words) == 64 && sizeof(struct sn_agent_shm) % 64 == 0, "shared layout");

/* The process that copies device memory for all processes: copier.h. */
struct sn_copier_shm {
    uint32_t proc; /* process index + 1; 0: there is no copier */
    uint32_t bell; /* futex: counts changes that the copier must read */
    /* Indexed by process. wanted: the generation of the process if it wants an agent, else 0. serves: the generation if
     * it has an agent, else 0. They are not stored with the agents, so that reading all of them touches no other
     * pages. */
    uint32_t wanted[SN_MAX_PROCS], serves[SN_MAX_PROCS];
};
static_assert(sizeof(struct sn_copier_shm) == 8 + 8 * SN_MAX_PROCS, "shared layout");

struct sn_world {
    uint64_t magic;
    uint32_t version;
    uint32_t ephemeral; /* the last process to leave removes the file */
    uint64_t bytes;
    uint64_t id; /* random: names sockets, seeds generations */
    uint32_t creator_pid;
    uint32_t dead; /* removed: a process that still opens it must start over */
    uint64_t creator_start;
    uint64_t created_ns;         /* CLOCK_REALTIME */
    uint64_t pid_ns;             /* the process namespace that all pids here belong to; 0: unknown */
    uint64_t file_dev, file_ino; /* this file: another one may have its path now */
    /* the process that softnic-run made for its command, once it is in its namespaces; 0: not yet, or no launcher */
    uint32_t command_pid;
    uint32_t pad;
    struct sn_config config;
    uint32_t dev_count;
    uint32_t wake_next; /* the next number of a socket */
    struct sn_copier_shm copier;
    struct sn_lock proc_lock;
    struct sn_slots ctx_slots, cq_slots, qp_slots, srq_slots, mr_slots;
    struct sn_lock arena_lock;
    uint64_t arena_off; /* first byte of ring space */
    uint64_t arena_next;
    uint64_t arena_free[SN_ARENA_CLASSES];
    struct sn_lock atomic_locks[SN_ATOMIC_LOCKS]; /* locks for remote atomics, by address (atomic.h) */
    struct sn_proc procs[SN_MAX_PROCS];
    struct sn_dev devs[SN_MAX_DEVS];
    uint32_t ctx_free[SN_MAX_CTXS], cq_free[SN_MAX_CQS], qp_free[SN_MAX_QPS], srq_free[SN_MAX_SRQS],
        mr_free[SN_MAX_MRS];
    struct sn_ctx_shm ctxs[SN_MAX_CTXS] __attribute__((aligned(4096)));
    struct sn_cq_shm cqs[SN_MAX_CQS] __attribute__((aligned(4096)));
    struct sn_qp_shm qps[SN_MAX_QPS] __attribute__((aligned(4096)));
    struct sn_srq_shm srqs[SN_MAX_SRQS] __attribute__((aligned(4096)));
    struct sn_mr_shm mrs[SN_MAX_MRS] __attribute__((aligned(4096)));
    /* [opened device]; unused ones take no pages */
    struct sn_agent_shm agents[SN_MAX_CTXS] __attribute__((aligned(4096)));
    /* [process]; unused ones take no pages */
    struct sn_agent_shm copiers[SN_MAX_PROCS] __attribute__((aligned(4096)));
};

/* Fill config with the defaults: one node, one device, model off. */
void sn_config_default(struct sn_config *config);

/* True when requests must go through the virtual clocks. */
static inline bool sn_model_on(const struct sn_config *c)
{
    return __atomic_load_n(&c->cables_differ, __ATOMIC_RELAXED) || c->rate_bps || c->latency_ns || c->wr_cost_ns ||
           c->doorbell_cost_ns || c->fence_cost_ns || c->jitter_ns;
}

/* sn_device_kill(), wake.h */
static inline bool sn_device_is_dead(const struct sn_world *world, uint32_t dev)
{
    return __atomic_load_n(&world->devs[dev].dead, __ATOMIC_ACQUIRE);
}

/* Give one cable another rate, latency or loss, even while it is in use: for requests posted from now on. */
void sn_world_set_rate(struct sn_world *world, uint32_t dev, uint64_t rate_bps);
void sn_world_set_latency(struct sn_world *world, uint32_t dev, uint64_t latency_ns);
void sn_world_set_loss(struct sn_world *world, uint32_t dev, uint32_t loss_ppb);

/* Create the complete file, or none, and map it. ephemeral: the last process to detach unlinks it. Return 0, -EEXIST
 * (another process was faster: open it), -ENOSPC, or another -errno. */
int sn_world_create(const char *path, const struct sn_config *config, bool ephemeral, struct sn_world **out);

/* Map an existing world. All processes that map it can name each other's memory, so it must belong to this user, and no
 * other may open it. Return 0, -ENOENT, -EPERM (another user's, or open to others), -ELOOP (a symbolic link), -EPROTO
 * (not a world, or of another version), -EXDEV (of another process namespace: its processes cannot be identified or
 * reached from here), or another -errno. */
int sn_world_open(const char *path, struct sn_world **out);

/* The reason, in words, why sn_world_open of this thread has just returned r. */
const char *sn_world_error(int r);

/* Remove the file, unless its path names another file now. A process that opened it before finds `dead` and starts
 * over. The caller holds proc_lock, so that nobody else removes it and makes another. Return whether it was removed. */
bool sn_world_remove_locked(struct sn_world *world, const char *path);

/* Unmap the world; the file stays. NULL does nothing. */
void sn_world_close(struct sn_world *world);

/* Path of the world this process should use: SOFTNIC_WORLD, or /dev/shm/softnic.<uid>.v<version>, so that builds of two
 * versions do not share a world. */
void sn_world_path(char *path, size_t bytes);

/* Take the pages of a part of the world now: a full /dev/shm must be an error here, not a SIGBUS at a later write.
 * Return 0, or -ENOSPC, logged as "what: /dev/shm is full". Kernels before 5.14 cannot do it. */
int sn_world_populate(void *at, uint64_t bytes, const char *what);

/* Allocate ring space: zeroed, aligned to 4 KiB, at least bytes long. The offset goes to *off. Return 0 or -ENOMEM. */
int sn_arena_alloc(struct sn_world *world, uint64_t bytes, uint64_t *off);
void sn_arena_free(struct sn_world *world, uint64_t off, uint64_t bytes);

/* The address of ring space; NULL: it is not in the arena, so what named it is damaged. */
static inline void *sn_ring_at(struct sn_world *world, uint64_t off, uint64_t bytes)
{
    uint64_t end = sizeof(struct sn_world) + SN_ARENA_BYTES;

    if (off < sizeof(struct sn_world) || off > end || bytes > end - off || off % 8)
        return NULL;
    return (uint8_t *)world + off;
}

/* Take an index into table, whose entries have entry_bytes each. Return 0 or -ENOMEM. */
int sn_slot_take(struct sn_slots *slots, const uint32_t *free_ring, uint32_t capacity, void *table, size_t entry_bytes,
                 uint32_t *index);
void sn_slot_give(struct sn_slots *slots, uint32_t *free_ring, uint32_t capacity, uint32_t index);

/* Log one line to stderr, prefixed "softnic: ". Silent with SOFTNIC_LOG=none. */
void sn_log(const char *format, ...) __attribute__((format(printf, 1, 2)));

uint64_t sn_now_ns(void); /* CLOCK_MONOTONIC: the same in every process */

#endif

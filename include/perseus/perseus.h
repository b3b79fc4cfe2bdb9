/* SPDX-License-Identifier: Apache-2.0 */
/**
 * The Perseus transport: one-sided transfers between two ranks over one or more rails, with the ordering done by the
 * NIC.
 *
 * Terms. A *rail* is one NIC port. A *fabric* is the process's set of usable rails. A *region* is memory registered on
 * every rail it will use. A *peer* is one connection to one remote rank: its queues over 1..R rails. An *op* is one
 * transfer. A *group* is a set of puts that signals are ordered behind.
 *
 * Returns. 0 is done; a negative value is -errno, is to be forwarded unchanged, and has been logged once by whoever
 * detected it, with prs_error_text() telling what failed, on which object, with which value, and the likely cause; a
 * positive value is a named condition (PRS_BUSY, PRS_AGAIN) that the caller handles.
 *
 * Threads. Functions on the fabric and on regions may be called from any thread at any time. Everything on one
 * listener, connector or peer is for one thread at a time (the caller serialises); different peers need no common lock.
 * Only prs_region_register() and prs_region_release() may run beside the data path of a peer that uses the same rails.
 *
 * Nothing here blocks longer than a system call, unless its comment gives a bound. */
#ifndef PERSEUS_PERSEUS_H
#define PERSEUS_PERSEUS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PRS_API __attribute__((visibility("default")))

enum {
    PRS_MAX_RAILS = 8,            /* rails one peer may be striped over */
    PRS_HANDLE_BYTES = 128,       /* what a listener gives out of band to those who connect; NCCL's limit */
    PRS_HANDLE_CALLER_BYTES = 16, /* its last bytes are the caller's: never read nor written here */
    PRS_PRIVATE_DATA_BYTES = 256, /* caller's bytes exchanged while connecting */
    PRS_NOTIFY_IDS = 1024,        /* notification ids of one peer; ids are used modulo this */
    PRS_INLINE_BYTES = 64,        /* PRS_PUT_INLINE reaches this far on every rail */
};

/** Named conditions: not errors, never logged. */
enum prs_condition {
    PRS_BUSY = 1,  /* the peer's window is full: prs_peer_progress(), then try again */
    PRS_AGAIN = 2, /* connecting takes longer: call the same step function again */
};

/* ---- log ---- */

enum prs_log_level { PRS_LOG_ERROR = 0, PRS_LOG_WARN, PRS_LOG_INFO, PRS_LOG_DEBUG };

/** Receives each line (without newline). May be called from any thread, never while a lock of the caller's is needed.
 */
typedef void prs_log_fn(void *user, enum prs_log_level level, const char *file, int line, const char *text);

/** Send log lines to fn (NULL: to stderr, from the level that PERSEUS_LOG names on; silent by default). Process-wide.
 */
PRS_API void prs_log_set(prs_log_fn *fn, void *user);

/** Why the last function that failed on this thread failed, one line; "" if none did. Valid until the next failure. */
PRS_API const char *prs_error_text(void);

/** "0.1.0" */
PRS_API const char *prs_version(void);

/* ---- fabric ---- */

enum prs_mem_kind {
    PRS_MEM_HOST = 1,   /* ordinary memory */
    PRS_MEM_CUDA = 2,   /* device memory, registered by its address (peermem) */
    PRS_MEM_DMABUF = 4, /* device memory, registered by a DMA-BUF file */
};

struct prs_fabric;

/** One usable rail. Strings are NUL-terminated; pci_path is "" for a virtual device. */
struct prs_rail_info {
    char name[64];      /* as verbs names the device, e.g. "mlx5_0" */
    char pci_path[256]; /* real path below /sys/devices; PCI function digit zeroed so that ports of one card coincide */
    char gid[64];       /* the GID in use, as text */
    char mem_note[128]; /* why CUDA or DMA-BUF memory cannot be registered; "" where it can */
    char queue_kind[8]; /* "rc", or "srd" (AWS EFA) */
    char link[16];      /* "InfiniBand", "RoCE" or "EFA" */
    uint64_t guid;      /* of the chip: equal for ports of one card */
    /* Of a put with PRS_PUT_NOTIFY, over however many rails and queues; others may be longer. */
    uint64_t max_put_bytes;
    uint32_t speed_mbps;   /* width times lane speed */
    uint32_t mem_kinds;    /* mask of enum prs_mem_kind */
    uint32_t max_peers;    /* how many peers the device has queues for */
    float latency_us;      /* one way, an estimate for topology models */
    int16_t port;          /* 1-based */
    int16_t gid_index;     /* local meaning only; never sent */
    int16_t numa_node;     /* -1 unknown */
    int16_t rail_id;       /* same value: same rail of a rail-optimised network; -1 unknown */
    int16_t plane_id;      /* different values never reach each other; -1 unknown */
    bool in_order;         /* one queue delivers in the order of posting (RC; not SRD) */
    bool relaxed_ordering; /* data regions are registered with relaxed PCI ordering */
    bool adaptive_routing; /* the network may reorder packets of one queue (the NIC still completes in order) */
    bool is_roce;          /* Ethernet link layer; false for InfiniBand and EFA */
};

/** What to use; NULL and zeros mean the environment's values (README, "Variables"), which use NCCL's names and syntax.
 */
struct prs_fabric_options {
    const char *hca;     /* NCCL_IB_HCA syntax: "^=name:port,..." */
    int traffic_class;   /* 0: NCCL_IB_TC, else the network's default */
    uint32_t timeout_ms; /* limit of each connection set-up and of each wait; 0: PERSEUS_TIMEOUT_MS, else 30000 */
};

/**
 * Find the rails that can be used, open each, and say in one INFO line each what was found and what was passed over and
 * why. The fabric counts references per process: a second open of the same options is cheap and shares devices. Return
 * 0 (also when no rail was found: prs_fabric_rails() is 0 then), -EINVAL for a variable with an impossible value,
 * -ENOMEM, -EACCES or -ENOSYS (no libibverbs). */
PRS_API int prs_fabric_open(const struct prs_fabric_options *options, struct prs_fabric **out);
/** Drop one reference. Regions and peers must be gone. NULL is allowed; after a fork the child's call does nothing. */
PRS_API void prs_fabric_close(struct prs_fabric *fabric);

PRS_API int prs_fabric_rails(const struct prs_fabric *fabric);
/** Return 0 or -EINVAL (no such rail). */
PRS_API int prs_rail_query(const struct prs_fabric *fabric, int rail, struct prs_rail_info *out);

/** An ordered set of rails that one virtual NIC, region or peer uses; indices as in prs_rail_query(). */
struct prs_rail_set {
    int count;
    int rail[PRS_MAX_RAILS];
};

/**
 * First asynchronous fatal event of a rail in the set: device fatal, completion queue overrun, or a port that has been
 * down for longer than retries last (NCCL_IB_TIMEOUT, NCCL_IB_RETRY_CNT). Return 0 while the rails are sound, and
 * always with NCCL_IB_RETURN_ASYNC_EVENTS=0; else -EIO with prs_error_text() naming device, port and event. Cheap: no
 * system call. */
PRS_API int prs_fabric_check(const struct prs_fabric *fabric, const struct prs_rail_set *rails);

/**
 * The ordering policy that a peer over these rails would get, as "name (why)", from PERSEUS_ORDER or chosen. Return 0,
 * -EINVAL or -EOPNOTSUPP (a forced policy that these rails cannot keep). */
PRS_API int prs_fabric_policy(const struct prs_fabric *fabric, const struct prs_rail_set *rails, char *text,
                              size_t bytes);

/** Whether signals over these rails are raised by the CPU of who receives them, when it makes progress, and not by the
 * NIC: 1 or 0, or an error as prs_fabric_policy() has. */
PRS_API int prs_fabric_raises(const struct prs_fabric *fabric, const struct prs_rail_set *rails);

/* ---- memory ---- */

struct prs_region;

enum prs_mem_flags {
    /* Signals, flags and records: never registered with relaxed ordering, so that what is written later is seen later.
     */
    PRS_MEM_STRICT = 1,
};

struct prs_mem {
    void *addr;
    size_t len_bytes;
    enum prs_mem_kind kind;
    int dmabuf_fd;          /* PRS_MEM_DMABUF only; the caller may close it after the call */
    uint64_t dmabuf_offset; /* of addr within the file */
    uint32_t flags;         /* enum prs_mem_flags */
};

/** Remote keys of a region, one a rail in the order of the owner's rail set. Plain data: send it to who will write
 * there. */
struct prs_keys {
    uint32_t rkey[PRS_MAX_RAILS];
};

/**
 * Register memory on every rail of the set. Registrations are cached by page-aligned range, kind and flags and counted,
 * never merged partially; zero bytes are legal (nothing is registered). The memory stays the caller's and must stay
 * mapped until release. Return 0, -ENOMEM (the text gives RLIMIT_MEMLOCK or the device's limit), -EOPNOTSUPP (kind not
 * supported by a rail: the text says why), -EFAULT or -EINVAL. */
PRS_API int prs_region_register(struct prs_fabric *fabric, const struct prs_rail_set *rails, const struct prs_mem *mem,
                                struct prs_region **out);
/** The same for memory of the current CUDA context's device: by a DMA-BUF file where driver and rails can do that, else
 * by address. flags: enum prs_mem_flags. */
PRS_API int prs_region_register_cuda(struct prs_fabric *fabric, const struct prs_rail_set *rails, void *addr,
                                     size_t len_bytes, uint32_t flags, struct prs_region **out);
/** After it, no NIC touches the memory; transfers still in flight there fail at their peer. NULL is allowed. */
PRS_API void prs_region_release(struct prs_region *region);
PRS_API void prs_region_keys(const struct prs_region *region, struct prs_keys *out);

/* ---- connecting ---- */

/** Opaque and checked: magic, version, length, transport, 128-bit cookie, address. A foreign one is refused by name. */
struct prs_handle {
    uint8_t bytes[PRS_HANDLE_BYTES];
};

struct prs_listener;
struct prs_connector;
struct prs_peer;

/** Bytes arrived under an id, once all parts of that notification are here. Called within prs_peer_progress() only. */
typedef void prs_notify_fn(void *user, uint32_t id, uint64_t bytes);

struct prs_peer_options {
    const void *private_data; /* copied; handed to the other side as it is */
    uint32_t private_bytes;   /* at most PRS_PRIVATE_DATA_BYTES */
    prs_notify_fn *on_notify; /* NULL: notifications are an error */
    void *user;               /* first argument of on_notify */
    uint32_t window_ops;      /* ops that may be in flight; 0: 256, at most 2^20. Beyond it puts return PRS_BUSY */
    int traffic_class;        /* -1: the fabric's */
    int queues_per_rail;      /* 0: NCCL_IB_QPS_PER_CONNECTION, else 1 */
    const char *policy;       /* ordering policy by name; NULL: PERSEUS_ORDER, else "auto" */
    bool adds_alone;          /* only peers of this process, each with this set, write to those words of its device
                                 memory that are added to: what such adds need on rails without atomics (EFA) */
    uint32_t timeout_ms;      /* limit of connecting; 0: the fabric's */
};

/**
 * Listen for peers on a TCP port of the interface that NCCL_SOCKET_IFNAME and NCCL_SOCKET_FAMILY choose.
 * The handle may be given to any number of connectors. Return 0 or -errno. */
PRS_API int prs_listen(struct prs_fabric *fabric, const struct prs_rail_set *rails, struct prs_handle *handle,
                       struct prs_listener **out);
/**
 * One step of accepting the next peer; never blocks. options are read when the peer is made. Strangers (garbage, wrong
 * version, wrong cookie, silent for the time limit) are refused, logged once, and do not disturb the others. Return 0
 * (*out is a connected peer, owned by the caller), PRS_AGAIN, or -errno: also when a peer was refused for what fails on
 * this side (no memory, no queues, no common rail), or says that it failed. The listener stays sound. */
PRS_API int prs_accept(struct prs_listener *listener, const struct prs_peer_options *options, struct prs_peer **out);
/** Half-open connections are dropped. NULL is allowed. */
PRS_API void prs_listener_close(struct prs_listener *listener);

/** Begin to connect. Return 0 or -errno (-EPROTO: the handle is foreign, truncated or of another version). */
PRS_API int prs_connect(struct prs_fabric *fabric, const struct prs_rail_set *rails, const struct prs_handle *handle,
                        const struct prs_peer_options *options, struct prs_connector **out);
/**
 * One step; never blocks. Return 0 (*out is a connected peer; the connector is freed), PRS_AGAIN, or -errno (freed as
 * well): -ETIMEDOUT and -ECONNREFUSED name the address and the likely cause, -EPROTO what was expected and what came.
 */
PRS_API int prs_connector_step(struct prs_connector *connector, struct prs_peer **out);
/** Give up a connection not yet made. NULL is allowed. */
PRS_API void prs_connector_close(struct prs_connector *connector);

/**
 * Change the first argument of on_notify: for who accepts several peers at once and learns only afterwards which is
 * which. Before the first call of prs_peer_progress(), which is the first that notifies. */
PRS_API void prs_peer_set_user(struct prs_peer *peer, void *user);
/** The other side's private data; *bytes is its length. Valid until the peer is closed. */
PRS_API const void *prs_peer_private(const struct prs_peer *peer, uint32_t *bytes);
/** Flush every queue to the error state, wait for the NIC to let go (bounded by the time limit), free. NULL is allowed;
 *  in a child of a fork the parent's queues are left alone. */
PRS_API void prs_peer_close(struct prs_peer *peer);
/** The sticky first error of the peer, naming peer, rails and GIDs; "" while it is sound. */
PRS_API const char *prs_peer_error(const struct prs_peer *peer);
/** One line for logs: addresses, rails with GIDs, queues, policy and why it was chosen. Valid until the peer is closed.
 */
PRS_API const char *prs_peer_describe(const struct prs_peer *peer);

/* ---- transfers ---- */

/**
 * Storage of one transfer: the caller's, from the call that starts it until status leaves PRS_OP_PENDING. Then the
 * source may be reused, and (for puts) the bytes are in the remote memory. Start values do not matter. */
struct prs_op {
    int32_t status;   /* PRS_OP_PENDING, 0 or -errno; written only by functions called on the peer */
    uint32_t parts;   /* transport's own */
    uint64_t mark[2]; /* transport's own */
};
enum { PRS_OP_PENDING = 1 };

/* Group of a put that no signal, not even a strong one, is to be ordered behind: it costs least. */
#define PRS_GROUP_NONE 0xffffffffu

enum prs_put_flags {
    PRS_PUT_NOTIFY = 1, /* on_notify(id, len_bytes) at the remote side once all bytes are visible there */
    PRS_PUT_INLINE =
        2, /* copy the source now (len_bytes <= PRS_INLINE_BYTES); src may be memory that is not registered */
    PRS_PUT_LAZY = 4, /* nobody waits for this op: it may be reported done as late as some later ones, and does not keep
                         a later op from being posted at once */
};

struct prs_put {
    const struct prs_region *src; /* NULL with PRS_PUT_INLINE or when len_bytes is 0 */
    const void *src_addr;
    uint64_t dst_addr;          /* remote virtual address */
    const struct prs_keys *dst; /* keys of the remote region, read during the call */
    size_t len_bytes;           /* 0 is legal */
    uint32_t notify_id;         /* < PRS_NOTIFY_IDS; not in use by an earlier, unfinished notification */
    uint32_t group;             /* the group it belongs to; 0: the peer's default group; or PRS_GROUP_NONE */
    uint32_t flags;             /* enum prs_put_flags */
};

/**
 * Start to write len_bytes to the peer. It is posted at once when nothing of this peer is in flight, else with others
 * behind one doorbell at the next prs_peer_progress() or when a batch is full. Puts are not ordered among each other; a
 * notification and a signal are (see there). Striped over rails by speed and measured completion when large. Return 0,
 * PRS_BUSY (nothing was started), or the peer's sticky error. */
PRS_API int prs_peer_put(struct prs_peer *peer, struct prs_op *op, const struct prs_put *put);

struct prs_get {
    const struct prs_region *dst;
    void *dst_addr;
    uint64_t src_addr;
    const struct prs_keys *src;
    size_t len_bytes;
};
/** Start to read from the peer's memory. Returns as prs_peer_put(). */
PRS_API int prs_peer_get(struct prs_peer *peer, struct prs_op *op, const struct prs_get *get);

/**
 * Make bytes that NICs have written into this region visible to a reader of the device memory, by a read of our own
 * through each rail. Return 0 (op is pending), PRS_BUSY, or -errno. */
PRS_API int prs_peer_flush(struct prs_peer *peer, struct prs_op *op, const struct prs_region *region, const void *addr);

enum prs_signal_kind { PRS_SIGNAL_SET = 0, PRS_SIGNAL_ADD = 1 };
enum prs_signal_flags {
    PRS_SIGNAL_STRONG = 1, /* ordered behind every earlier op on this peer; without it only behind its group */
};
struct prs_signal {
    uint64_t dst_addr; /* 8-byte aligned word in a PRS_MEM_STRICT region of the peer */
    const struct prs_keys *dst;
    uint64_t value;
    enum prs_signal_kind kind;
    uint32_t group;
    uint32_t flags; /* enum prs_signal_flags */
};
/**
 * Set or add to a 64-bit word of the peer, which sees it only after the bytes of every put of the group that was
 * started before. How this is ensured is the peer's policy (transport/order.h): never by waiting here. Under `counted`,
 * and on rails without atomics (EFA), the receiver raises it within its prs_peer_progress(), and op is done when the
 * signal has been handed over; prs_peer_settle() tells when it is raised. Returns as prs_peer_put(). */
PRS_API int prs_peer_signal(struct prs_peer *peer, struct prs_op *op, const struct prs_signal *signal);
/**
 * Whether everything that was started has taken effect at the peer, signals that its process raises among it: what the
 * peer may be told before it gives memory up that signals go to. Return 0, PRS_AGAIN (progress, and ask again) or
 * -errno. A signal that waits for a put which never comes is never settled: bound the wait. */
PRS_API int prs_peer_settle(struct prs_peer *peer);

/**
 * Post what waits, take completions and arrivals, raise notifications. Call it until the ops are done: nothing else
 * drives them. Return how many events were handled (>= 0) or the sticky error: -ECONNRESET, -ETIMEDOUT, -EREMOTEIO (a
 * remote access refused), -EIO; all ops of the peer have that status then. */
PRS_API int prs_peer_progress(struct prs_peer *peer);

/**
 * For who waits for the other side to write: can anything still come? Return 0, or the sticky error: -ECONNRESET when
 * the other side has closed this peer, which by itself is no error. Only after many a prs_peer_progress() that found
 * nothing, so that what was written before is told of before. Cheap: no system call. */
PRS_API int prs_peer_awaited(struct prs_peer *peer);

/** Counters since the peer was made; those of several peers may be added. */
struct prs_stats {
    uint64_t puts, gets, signals, notifications; /* asked by the caller; arrivals for notifications */
    uint64_t work_requests, receives, doorbells; /* posted */
    uint64_t completions, arrivals;              /* taken from completion queues: own requests, remote notifications */
    uint64_t fences, drains, merged_signals; /* fence flags posted; waits for all completions; adds merged into one */
    uint64_t bytes;
    uint64_t rail_bytes[PRS_MAX_RAILS];
    uint64_t signal_flushes; /* reads before a signal was raised here in device memory, for data of other rails */
};
PRS_API void prs_peer_stats(const struct prs_peer *peer, struct prs_stats *out);

#ifdef __cplusplus
}
#endif
#endif

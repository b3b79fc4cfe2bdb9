/* SPDX-License-Identifier: Apache-2.0 */
/**
 * The Perseus transport: one-sided transfers between two ranks over one or more rails, with the ordering done by the
 * NIC.
 *
 * Terms. A *rail* is one NIC port. A *fabric* is the process's set of usable rails. A *region* is memory registered on
 * every rail it will use. A *peer* is one connection to one remote rank: its queues over 1..R rails. An *op* is one
 * transfer. A *group* is a set of puts that a signal must follow. To *progress* is to call prs_peer_progress().
 *
 * Returns. 0 means done. A negative value is -errno: forward it unchanged. The function that detected the error has
 * logged it once, and prs_error_text() says what failed, on which object, with which value, and the likely cause. A
 * positive value is a named condition (PRS_BUSY, PRS_AGAIN) that the caller handles.
 *
 * Threads. Functions on the fabric and on regions may be called from any thread at any time. Only one thread at a time
 * may use a listener, connector or peer (the caller serialises); different peers need no common lock. While one thread
 * uses a peer, others may register and release regions for the same rails, and read its counters (prs_peer_stats()).
 *
 * Ownership. The caller owns what a function returns in *out, and closes it: regions and peers first, then listeners
 * and connectors, then the fabric.
 *
 * Nothing here blocks longer than a system call, unless its comment gives a bound.
 *
 * Versions. Later versions add fields in place of `reserved`. Set options to zero before filling them in, as
 * initialisers do: a field that is not 0 and that the loaded library does not know gives -EINVAL. In results, the
 * library sets fields that it does not know to 0. */
#ifndef PERSEUS_PERSEUS_H
#define PERSEUS_PERSEUS_H

#include <perseus/common.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    PRS_MAX_RAILS = 8,            /* rails one peer may be striped over */
    PRS_HANDLE_BYTES = 128,       /* passed out of band from a listener to its connectors; NCCL's limit */
    PRS_HANDLE_CALLER_BYTES = 16, /* its last bytes belong to the caller: never read or written here */
    PRS_PRIVATE_DATA_BYTES = 256, /* caller's bytes exchanged while connecting */
    PRS_NOTIFY_IDS = 1024,        /* notification ids of one peer; ids are used modulo this */
    PRS_INLINE_BYTES = 64,        /* limit of PRS_PUT_INLINE on every rail */
};

/** Named conditions. They are not errors and are never logged. */
enum prs_condition {
    PRS_BUSY = 1,  /* too many ops are in flight: prs_peer_progress(), then try again */
    PRS_AGAIN = 2, /* not finished yet: call the same function again */
};

/* ---- log ---- */

enum prs_log_level { PRS_LOG_ERROR = 0, PRS_LOG_WARN, PRS_LOG_INFO, PRS_LOG_DEBUG };

/** Receives each line, without newline. Called from any thread, inside any function here: take no lock that a caller of
 * this library may hold. */
typedef void prs_log_fn(void *user, enum prs_log_level level, const char *file, int line, const char *text);

/** Send the log lines of this process to fn. NULL: to stderr, up to the level that PERSEUS_LOG names, else nowhere.
 * From any thread; a line that another thread is writing may still reach the former fn. */
PRS_API void prs_log_set(prs_log_fn *fn, void *user);

/** One line about the last failure on this thread; "" if there was none. Valid until the next failure. */
PRS_API const char *prs_error_text(void);

/** The version of the library, as "0.2.0"; static text. */
PRS_API const char *prs_version(void);

/* ---- fabric ---- */

enum prs_mem_kind {
    PRS_MEM_HOST = 1,   /* ordinary memory */
    PRS_MEM_CUDA = 2,   /* device memory, registered by its address (peermem) */
    PRS_MEM_DMABUF = 4, /* device memory, registered by a DMA-BUF file */
};

struct prs_fabric;

/** What a device claims: with respect to whose accesses its atomics on a word are atomic. */
enum prs_atomic_scope {
    PRS_ATOMIC_UNKNOWN = 0, /* the claim was not read */
    PRS_ATOMIC_NONE,        /* it has no atomics */
    PRS_ATOMIC_NIC,         /* its own atomics: IBV_ATOMIC_HCA, and libfabric's atomics */
    PRS_ATOMIC_CPU,         /* also those of the CPU and of other devices: IBV_ATOMIC_GLOB */
};

/** One usable rail. Strings are NUL-terminated; pci_path is "" for a virtual device. */
struct prs_rail_info {
    char name[64];      /* as verbs names the device, e.g. "mlx5_0" */
    char pci_path[256]; /* real path below /sys/devices; PCI function digit zeroed: equal for all ports of a NIC */
    char gid[64];       /* the GID in use, as text */
    char mem_note[128]; /* why CUDA or DMA-BUF memory cannot be registered; "" if it can */
    char queue_kind[8]; /* "rc", or "srd" (AWS EFA) */
    char link[16];      /* "InfiniBand", "RoCE" or "EFA" */
    uint64_t guid;      /* the chip's guid: equal for all ports of a NIC, even if each port is a device of its own */
    /* Limit of a put with PRS_PUT_NOTIFY, over any number of rails and queues; other puts may be longer. */
    uint64_t max_put_bytes;
    uint32_t speed_mbps;   /* of the whole link */
    uint32_t mem_kinds;    /* mask of enum prs_mem_kind */
    uint32_t max_peers;    /* as many as the device has queues for */
    float latency_us;      /* one way; an estimate for topology models */
    int16_t port;          /* 1-based, of the device */
    int16_t chip_port;     /* number of the port on its chip, from 1: no two rails have the same guid and chip_port */
    int16_t gid_index;     /* meaningful only on this host; never sent */
    int16_t numa_node;     /* -1 unknown */
    int16_t rail_id;       /* rails with equal values are one rail of a rail-optimised network; -1 unknown */
    int16_t plane_id;      /* rails with different values cannot reach each other; -1 unknown */
    bool in_order;         /* one queue delivers in the order of posting (RC does, SRD does not) */
    bool relaxed_ordering; /* data regions are registered with relaxed PCI ordering */
    /* a write into a PRS_MEM_STRICT region becomes visible after all earlier writes of the NIC, from any peer: known
     * only of NVIDIA's NICs */
    bool strict_is_last;
    bool adaptive_routing;  /* the network may reorder packets of one queue (the NIC still completes in order) */
    bool is_roce;           /* Ethernet link layer; false for InfiniBand and EFA */
    bool atomics;           /* the transport uses the NIC's atomics; if not, the receiver's CPU raises signals */
    uint32_t mtu;           /* of the port, in bytes; a queue uses the smaller MTU of both ends. 0: unknown */
    uint32_t traffic_class; /* traffic class of a peer without one of its own */
    uint32_t atomic_scope;  /* enum prs_atomic_scope: the device's own claim, whether the transport uses them or not */
    uint64_t reserved[PRS_RESERVED_WORDS - 1];
};

/** Options of a fabric. NULL and zeros mean the values of the environment variables (doc/variables.md). */
struct prs_fabric_options {
    const char *hca;                       /* NCCL_IB_HCA syntax: "^=name:port,..." */
    int traffic_class;                     /* 0: NCCL_IB_TC, else the network's default */
    uint32_t timeout_ms;                   /* of each wait on the host (common.h) */
    uint64_t reserved[PRS_RESERVED_WORDS]; /* 0 */
};

/**
 * Find and open the usable rails. One INFO line for each device port says what was found, or why it was skipped. The
 * fabric counts references per process: a second open with the same options is cheap and shares the devices. Return 0
 * (also when no rail was found: prs_fabric_rails() is 0 then), -EINVAL for a variable with an impossible value,
 * -ENOMEM, -EACCES or -ENOSYS (no libibverbs). */
PRS_API int prs_fabric_open(const struct prs_fabric_options *options, struct prs_fabric **out);
/** Drop one reference. Release regions and close peers first. NULL is allowed; in a forked child this does nothing. */
PRS_API void prs_fabric_close(struct prs_fabric *fabric);

/** The number of usable rails; they have the indices 0 ... number - 1. */
PRS_API int prs_fabric_rails(const struct prs_fabric *fabric);
/** Describe a rail. Return 0 or -EINVAL (no such rail). */
PRS_API int prs_rail_query(const struct prs_fabric *fabric, int rail, struct prs_rail_info *out);

/** An ordered set of rails that one virtual NIC, region or peer uses; indices as in prs_rail_query(). */
struct prs_rail_set {
    int count;
    int rail[PRS_MAX_RAILS];
};

/**
 * Check whether a rail of the set has reported a fatal asynchronous event: a device failure, or a port that has been
 * down for longer than all retries (NCCL_IB_TIMEOUT, NCCL_IB_RETRY_CNT). Return 0 while the rails work, and always with
 * NCCL_IB_RETURN_ASYNC_EVENTS=0; else -EIO, and prs_error_text() names device, port and event. Makes no system call. */
PRS_API int prs_fabric_check(const struct prs_fabric *fabric, const struct prs_rail_set *rails);

/**
 * The rails that a peer over `rails` uses: the same rails, followed by a single rail's standby rail if there is one
 * (PERSEUS_STANDBY_RAIL). The set is not checked. */
PRS_API void prs_fabric_all_rails(const struct prs_fabric *fabric, const struct prs_rail_set *rails,
                                  struct prs_rail_set *all);

/**
 * The ordering policy that a peer over these rails would get, as "name (why)": the one in PERSEUS_ORDER, else the best.
 * Return 0, -EINVAL or -EOPNOTSUPP (these rails cannot keep the policy in PERSEUS_ORDER). */
PRS_API int prs_fabric_policy(const struct prs_fabric *fabric, const struct prs_rail_set *rails, char *text,
                              size_t bytes);

/**
 * The network interface that prs_listen() would listen on, as "name address (why)". Return 0 or -ENODEV (the settings
 * admit none: prs_error_text() names the existing ones). */
PRS_API int prs_fabric_interface(const struct prs_fabric *fabric, char *text, size_t bytes);

/** Return 1 if the receiver's CPU raises signals over these rails, inside its prs_peer_progress(); 0 if the sender's
 * NIC writes them; errors as prs_fabric_policy(). */
PRS_API int prs_fabric_receiver_raises(const struct prs_fabric *fabric, const struct prs_rail_set *rails);

/* ---- memory ---- */

struct prs_region;

enum prs_mem_flags {
    PRS_MEM_STRICT = 1, /* for signals and flags: no relaxed ordering, so a write here is seen after earlier ones */
};

/** Memory to register. */
struct prs_mem {
    void *addr;
    size_t len_bytes;
    enum prs_mem_kind kind;
    int dmabuf_fd;                         /* PRS_MEM_DMABUF only; the caller may close it after the call */
    uint64_t dmabuf_offset;                /* of addr within the file */
    uint32_t flags;                        /* enum prs_mem_flags */
    uint64_t reserved[PRS_RESERVED_WORDS]; /* 0 */
};

/** Remote keys of a region, one for each rail in the order of the owner's rail set. Plain data: send it to the ranks
 * that write there. A NIC with shorter keys refuses a key that does not fit. */
struct prs_keys {
    uint64_t rkey[PRS_MAX_RAILS];
};

/**
 * Register memory on every rail of the set. Registrations are cached by page-aligned range, kind and flags, and
 * counted: a range inside a registered one shares it, a partial overlap does not. Zero bytes are legal (nothing is
 * registered). The caller owns the memory and keeps it mapped until the release. Return 0, -ENOMEM (the text gives
 * RLIMIT_MEMLOCK or the device's limit), -EOPNOTSUPP (a rail does not support the kind: the text says why), -EFAULT or
 * -EINVAL. */
PRS_API int prs_region_register(struct prs_fabric *fabric, const struct prs_rail_set *rails, const struct prs_mem *mem,
                                struct prs_region **out);
/** Register memory of the current CUDA context's device: by a DMA-BUF file where driver and rails support it, else by
 * address. flags: enum prs_mem_flags. Return as prs_region_register(). */
PRS_API int prs_region_register_cuda(struct prs_fabric *fabric, const struct prs_rail_set *rails, void *addr,
                                     size_t len_bytes, uint32_t flags, struct prs_region **out);
/** When it returns, no NIC uses the memory any more; transfers still in flight fail at their peer. NULL is allowed. */
PRS_API void prs_region_release(struct prs_region *region);
/** Copy the remote keys of a region. */
PRS_API void prs_region_keys(const struct prs_region *region, struct prs_keys *out);

/* ---- connecting ---- */

/** Tells connectors how to reach a listener. Opaque: magic, version, length, transport, 128-bit cookie, address. All
 * of it is checked. Plain data, passed on by the caller. */
struct prs_handle {
    uint8_t bytes[PRS_HANDLE_BYTES];
};

struct prs_listener;
struct prs_connector;
struct prs_peer;

/** Called when all bytes of the notification `id` have arrived; only inside prs_peer_progress(). */
typedef void prs_notify_fn(void *user, uint32_t id, uint64_t bytes);

/** Options of a connection; the same for connecting and accepting. */
struct prs_peer_options {
    const void *private_data; /* copied; the other side gets it unchanged */
    uint32_t private_bytes;   /* at most PRS_PRIVATE_DATA_BYTES */
    prs_notify_fn *on_notify; /* NULL: notifications are an error */
    void *user;               /* first argument of on_notify */
    uint32_t max_ops;         /* in flight at a time, at most 2^20; 0: 256. Beyond it puts return PRS_BUSY */
    int traffic_class;        /* -1: the fabric's */
    int queues_per_rail;      /* 0: NCCL_IB_QPS_PER_CONNECTION, else 1 */
    const char *policy;       /* name of the ordering policy; NULL: PERSEUS_ORDER, else "auto" */
    /* The caller promises this for each word in device memory of this process to which others add: only peers of this
     * process write to the word, and all of these peers set this field. Adds to such words need it on rails without
     * atomics (EFA). */
    bool exclusive_adds;
    /* Wait for the other process as long as the caller keeps asking: it may be minutes late. A warning is logged once
     * in each timeout_ms. The limit still holds for TCP, and for everything after the other side's first answer. */
    bool patient;
    /* Replace a lost rail also if NCCL_IB_RESILIENCY_PORT_FAILOVER is not set (decisions/0014). With several rails the
     * CPU then adds to words in host memory, so all peers that add to one word must set this and have several rails. */
    bool replaces_rails;
    /* This side sends no signals, and under the policy `counted` no puts of a group: both are then refused. The other
     * side needs no memory for their records, and no queue to itself to raise them. */
    bool no_signals;
    uint32_t timeout_ms;                   /* of connecting; 0: the fabric's */
    uint64_t reserved[PRS_RESERVED_WORDS]; /* 0 */
};

/**
 * Listen for peers on a TCP port of the interface that NCCL_SOCKET_IFNAME and NCCL_SOCKET_FAMILY choose. Any number of
 * connectors may use the handle. Return 0 or -errno. */
PRS_API int prs_listen(struct prs_fabric *fabric, const struct prs_rail_set *rails, struct prs_handle *handle,
                       struct prs_listener **out);
/**
 * One step of accepting the next peer; never blocks. options are read when the peer is made. Other connections
 * (garbage, wrong version, wrong cookie, silent until the time limit) are refused and logged once; they do not disturb
 * peers. Return 0 (*out is a connected peer, owned by the caller), PRS_AGAIN, or -errno. Also return -errno if this
 * side had to refuse a peer (no memory, no queues, no common rail), or if the peer reports a failure. The listener
 * remains usable. */
PRS_API int prs_accept(struct prs_listener *listener, const struct prs_peer_options *options, struct prs_peer **out);
/** Drop unfinished connections and stop listening. NULL is allowed. */
PRS_API void prs_listener_close(struct prs_listener *listener);

/** Start to connect. Return 0 or -errno (-EPROTO: the handle is foreign, truncated or of another version). */
PRS_API int prs_connect(struct prs_fabric *fabric, const struct prs_rail_set *rails, const struct prs_handle *handle,
                        const struct prs_peer_options *options, struct prs_connector **out);
/**
 * One step of connecting; never blocks. A TCP connection that is lost before the first answer is made again, within
 * the time limit. Return 0 (*out is a connected peer), PRS_AGAIN or -errno; 0 and -errno free the connector. The text
 * of -ETIMEDOUT and -ECONNREFUSED names the address and the likely cause, that of -EPROTO names the expected and the
 * received value.
 */
PRS_API int prs_connector_step(struct prs_connector *connector, struct prs_peer **out);
/** Abandon a connection that is not made yet. NULL is allowed. */
PRS_API void prs_connector_close(struct prs_connector *connector);

/**
 * Replace on_notify's user argument, for callers that accept several peers at once and only later learn which is which.
 * Call it before the first prs_peer_progress(), since only that function notifies. */
PRS_API void prs_peer_set_user(struct prs_peer *peer, void *user);
/** The other side's private data; *bytes is its length. Valid until the peer is closed. */
PRS_API const void *prs_peer_private(const struct prs_peer *peer, uint32_t *bytes);
/** Put every queue into the error state, wait until the NIC no longer uses its memory (bounded by the time limit),
 * free. Where peers share queues (AWS EFA), wait for this peer's requests instead; the other side may then write into
 * regions that stay registered until it has closed too. NULL is allowed. In a forked child the parent's queues are left
 * alone. */
PRS_API void prs_peer_close(struct prs_peer *peer);
/** The first error of the peer, which is sticky, naming peer, rails and GIDs; "" while there is none. */
PRS_API const char *prs_peer_error(const struct prs_peer *peer);
/** One line for logs: addresses, rails, GIDs, queues, policy and why it was chosen. Valid until the peer is closed. */
PRS_API const char *prs_peer_describe(const struct prs_peer *peer);

/* ---- transfers ---- */

/**
 * Storage of one transfer. The caller provides it, uninitialised, and keeps it from the call that starts the transfer
 * until status leaves PRS_OP_PENDING. Then the source may be reused, and the bytes of a put are in the remote
 * memory. */
struct prs_op {
    int32_t status;   /* PRS_OP_PENDING, 0 or -errno; written only by functions called on the peer */
    uint32_t parts;   /* internal */
    uint64_t mark[2]; /* internal */
};
enum { PRS_OP_PENDING = 1 };

/* The group of a put that no signal has to wait for, not even a strong one. Such puts cost least. */
#define PRS_GROUP_NONE 0xffffffffu

enum prs_put_flags {
    PRS_PUT_NOTIFY = 1, /* call on_notify(id, len_bytes) at the remote side once all bytes are visible there */
    PRS_PUT_INLINE = 2, /* copy the source now (len_bytes <= PRS_INLINE_BYTES); it need not be registered */
    PRS_PUT_LAZY = 4,   /* nobody waits for this op: it completes with later ones, and they need not wait for it */
};

/** What prs_peer_put() writes: from src_addr here to dst_addr of the peer. */
struct prs_put {
    const struct prs_region *src; /* NULL with PRS_PUT_INLINE or when len_bytes is 0 */
    const void *src_addr;
    uint64_t dst_addr;          /* remote virtual address */
    const struct prs_keys *dst; /* keys of the remote region, read during the call */
    size_t len_bytes;           /* 0 is legal */
    uint32_t notify_id;         /* < PRS_NOTIFY_IDS; no unfinished notification may be using it */
    uint32_t group;             /* its group; 0: the peer's default group; or PRS_GROUP_NONE */
    uint32_t flags;             /* enum prs_put_flags */
};

/**
 * Start to write len_bytes to the peer. The put is posted at once when this peer has nothing in flight; else it is
 * posted together with others, with one doorbell, at the next prs_peer_progress() or when a batch is full. Puts are
 * not ordered among each other; notifications and signals are ordered (see there). Large puts are striped over rails
 * by speed and measured completion times. Return 0, PRS_BUSY (nothing was started), or the peer's sticky error. */
PRS_API int prs_peer_put(struct prs_peer *peer, struct prs_op *op, const struct prs_put *put);

/** What prs_peer_get() reads: from src_addr of the peer to dst_addr here. */
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
 * Make bytes that NICs have written into this region visible to a reader of the device memory, by a local read through
 * each rail. Return 0 (op is pending), PRS_BUSY, or -errno. */
PRS_API int prs_peer_flush(struct prs_peer *peer, struct prs_op *op, const struct prs_region *region, const void *addr);

enum prs_signal_kind { PRS_SIGNAL_SET = 0, PRS_SIGNAL_ADD = 1 };
enum prs_signal_flags {
    PRS_SIGNAL_STRONG = 1, /* follows every earlier op on this peer; without it only the puts of its group */
};
/** What prs_peer_signal() does to a word of the peer. */
struct prs_signal {
    uint64_t dst_addr; /* 8-byte aligned word in a PRS_MEM_STRICT region of the peer */
    const struct prs_keys *dst;
    uint64_t value;
    enum prs_signal_kind kind;
    uint32_t group;
    uint32_t flags; /* enum prs_signal_flags */
};
/**
 * Set or add to a 64-bit word of the peer. The peer sees it only after the bytes of every put of the group that was
 * started before. The peer's policy (ARCHITECTURE.md, "A signal") ensures this, never by waiting in this call. Under
 * `counted`, and on rails without atomics (EFA, some others), the receiver raises the signal inside its
 * prs_peer_progress(), and op is done when the signal has reached it; prs_peer_settle() says when it is raised.
 * Returns as prs_peer_put(). Where lost rails are replaced, a set of a word in device memory may be done twice: do not
 * reset such a word while sets are in flight. */
PRS_API int prs_peer_signal(struct prs_peer *peer, struct prs_op *op, const struct prs_signal *signal);
/**
 * Check whether everything that was started has taken effect at the peer, including signals raised by its own process.
 * Do so before telling the peer that it may release memory that signals target. Return 0 (it has), PRS_AGAIN (make
 * progress and ask again) or -errno. If a put never arrives, the signals after it never take effect: limit the time of
 * this wait. */
PRS_API int prs_peer_settle(struct prs_peer *peer);

/**
 * A batch: transfers that are started between begin and end are posted with one doorbell, of any length, even if
 * nothing is in flight. More than about 16 transfers need several doorbells. If nothing was in flight at the begin, the
 * end posts the batch; otherwise the next prs_peer_progress() does. prs_peer_progress() also posts an unfinished batch.
 * A second begin has no effect. The end returns 0 or the peer's sticky error. */
PRS_API void prs_peer_begin_batch(struct prs_peer *peer);
PRS_API int prs_peer_end_batch(struct prs_peer *peer);

/**
 * Post waiting requests, handle completions and arrivals, call on_notify. Call it until the ops are done: nothing else
 * drives them. Return the number of events handled (>= 0) or the sticky error, which then also becomes the status of
 * all pending ops of the peer: -ECONNRESET, -ETIMEDOUT, -EREMOTEIO (a remote access was refused) or -EIO. */
PRS_API int prs_peer_progress(struct prs_peer *peer);

/**
 * For a caller that waits for remote writes: check whether any can still arrive. Return 0, or the sticky error:
 * -ECONNRESET if the other side has closed this peer. A closed peer is an error only for a caller that still expects
 * writes. Call it only after prs_peer_progress() has returned 0 repeatedly, so that writes that did arrive are reported
 * first. Makes no system call. */
PRS_API int prs_peer_check_remote(struct prs_peer *peer);

/** The number that verbs gives to the peer's first queue here: it names the connection in other tools. */
PRS_API uint32_t prs_peer_queue_number(const struct prs_peer *peer);

/** Counters since the peer was made. They may be summed over peers. */
struct prs_stats {
    uint64_t puts, gets, signals;                /* started by the caller */
    uint64_t notifications;                      /* that arrived */
    uint64_t work_requests, receives, doorbells; /* posted */
    /* polled completions of this side's requests, and arrivals of remote ones */
    uint64_t completions, arrivals;
    uint64_t fences, drains, merged_signals; /* fence flags posted; waits for all completions; adds merged */
    uint64_t bytes;
    uint64_t rail_bytes[PRS_MAX_RAILS]; /* in the order of prs_fabric_all_rails() */
    /* reads that flush data of other rails before a signal in device memory is raised */
    uint64_t signal_flushes;
    uint64_t reserved[PRS_RESERVED_WORDS];
};
/** Read the counters. From any thread until the peer is closed; they may be slightly out of date. */
PRS_API void prs_peer_stats(const struct prs_peer *peer, struct prs_stats *out);

#ifdef __cplusplus
}
#endif
#endif

/* SPDX-License-Identifier: Apache-2.0 */
/**
 * The proxy turns the commands of a kernel into transfers. It owns one command ring and one context of a team, and
 * touches only memory that was given to it as windows.
 *
 * A command that is malformed, stale or out of bounds is refused: neither this command nor any later one is executed,
 * the error is sticky, prs_proxy_error() describes it, and every wait on the device ends.
 *
 * Functions return 0 or -errno where nothing else is said. One thread at a time may call them, unless said
 * otherwise. */
#ifndef PERSEUS_PROXY_H
#define PERSEUS_PROXY_H

#include <perseus/device.h>
#include <perseus/team.h>

#ifdef __cplusplus
extern "C" {
#endif

/** A proxy; opaque. */
struct prs_proxy;

/** Options of prs_proxy_open(); copied. */
struct prs_proxy_options {
    struct prs_team *team; /* must outlive the proxy; at most 65536 ranks */
    uint32_t context_id;   /* of the team; nobody else may use it while the proxy is open */
    uint32_t ring_slots;   /* power of two; 0: 1024 */
    uint32_t timeout_ms;   /* limit of each wait on the device (common.h) */
    bool stepped;          /* without a thread: the caller runs prs_proxy_step() */
    bool cuda;             /* the device of the current CUDA context maps the ring and holds its local part */
    int numa_node;         /* where the thread runs; -1: anywhere */
    uint32_t *failed;      /* set to 1 when the proxy fails, for waits outside of the device API; NULL: none */
    uint64_t reserved[PRS_RESERVED_WORDS]; /* 0 */
};

/** Make a proxy. Kernels can use it after prs_proxy_start(). Return 0, -EINVAL or -ENOMEM. */
PRS_API int prs_proxy_open(const struct prs_proxy_options *options, struct prs_proxy **out);
/** End every wait on the device, stop the thread, wait for the transfers in flight, and free. Returns within 1 s, and
 * executes no further command. If commands to a rank are left, the rank can no longer be reached in this context: its
 * peer fails with -ECANCELED. The team and the memory of the windows must still exist. NULL is allowed. */
PRS_API void prs_proxy_close(struct prs_proxy *proxy);

/** What a window may be used for, besides data. */
enum prs_window_flags {
    PRS_WINDOW_SIGNALS = 1, /* strict memory (PRS_MEM_STRICT): signals may be put here */
};

/** A window of another rank. */
struct prs_window_remote {
    uint64_t base;        /* its address at that rank */
    uint64_t mapped;      /* its address here; 0: only the NIC reaches it. All windows of a rank are mapped, or none */
    struct prs_keys keys; /* of its region */
};

/** Options of prs_proxy_window(). */
struct prs_window_options {
    void *base;
    uint64_t bytes;                          /* the same on every rank */
    const struct prs_region *region;         /* must outlive the proxy */
    const struct prs_window_remote *remotes; /* [world]; copied */
    uint32_t flags;                          /* enum prs_window_flags */
    uint64_t reserved[PRS_RESERVED_WORDS];   /* 0 */
};

/** Windows that a proxy may have at once. */
enum { PRS_PROXY_WINDOWS = 64 };

/** Add a window, before or after prs_proxy_start(). Every rank must add the same windows in the same order. The window
 * gets the lowest free index. Return that index (>= 0) or -errno. -EINVAL: also if some windows of a rank are mapped
 * and others are not, since signals could then overtake puts. */
PRS_API int prs_proxy_window(struct prs_proxy *proxy, const struct prs_window_options *options);
/** Wait until all complete commands have taken effect at their peers, including signals that the peers' processes raise
 * (policy `counted`, rails without atomics). prs_quiet() does not wait for these signals, so a receiver could release
 * memory before its own proxy raises a signal there. Therefore, before memory is released, call this function, then a
 * barrier of all ranks, then drop the window and release the memory. One call at a time. Return 0, -ETIMEDOUT or the
 * sticky error. */
PRS_API int prs_proxy_settle(struct prs_proxy *proxy, uint32_t timeout_ms);
/** Drop a window; every rank must do so. If a kernel that gave up has left a command that names the window, that
 * command touches no memory, and the proxy fails with the sticky error. The index may be used again. One call at a
 * time. Return 0, -EINVAL or -ETIMEDOUT: the proxy's thread did not run for 5 s. The window is then dropped when the
 * thread runs again; its region must stay until then. The next call, for this window or another, first waits for
 * that. */
PRS_API int prs_proxy_window_drop(struct prs_proxy *proxy, uint32_t index);
/** Start the thread, and fill in what kernels (or threads of the host) need: valid until close, also for later
 * windows. */
PRS_API int prs_proxy_start(struct prs_proxy *proxy, struct prs_device *out);

/** Run one round of the loop of a stepped proxy. Return a positive number if something was done, 0 if idle, or the
 * sticky error. */
PRS_API int prs_proxy_step(struct prs_proxy *proxy);

/** Return 0 or the sticky error, also of the device. From any thread. */
PRS_API int prs_proxy_check(struct prs_proxy *proxy);
/** Return the text of the sticky error, or "" without one; valid until close. From any thread. */
PRS_API const char *prs_proxy_error(struct prs_proxy *proxy);

/** Counters of a proxy. */
struct prs_proxy_stats {
    uint64_t commands, puts, signals;
    uint64_t fences;   /* waits for all commands; only under the policy drain */
    uint64_t stall_ns; /* time in these waits */
    uint64_t batches;  /* rounds that took commands */
    uint64_t reserved[PRS_RESERVED_WORDS];
};
/** Read the counters, which are exact while the proxy is idle. */
PRS_API void prs_proxy_stats(const struct prs_proxy *proxy, struct prs_proxy_stats *out);

#ifdef __cplusplus
}
#endif
#endif

/* SPDX-License-Identifier: Apache-2.0 */
/**
 * The proxy: what turns the commands of a kernel into transfers. It owns one command ring and one context of a team,
 * and may touch only memory that was given to it as windows.
 *
 * A command that is malformed, stale or out of bounds is refused: it and everything after it is not executed, the error
 * is sticky, prs_proxy_error() names it, and every wait on the device ends. */
#ifndef PERSEUS_PROXY_H
#define PERSEUS_PROXY_H

#include <perseus/device.h>
#include <perseus/team.h>

#ifdef __cplusplus
extern "C" {
#endif

struct prs_proxy;

struct prs_proxy_options {
    struct prs_team *team; /* must outlive the proxy; at most 65536 ranks */
    uint32_t context;      /* the proxy's alone while it is open */
    uint32_t ring_slots;   /* power of two; 0: 1024 */
    uint32_t timeout_ms;   /* limit of each wait on the device; 0: 10000 */
    /* true: no thread is made, the caller runs prs_proxy_step() */
    bool stepped;
    bool cuda;     /* the ring is mapped for, and its local part lies in, the current CUDA context's device */
    int numa_node; /* where the thread runs; -1: anywhere */
};

PRS_API int prs_proxy_open(const struct prs_proxy_options *options, struct prs_proxy **out);
/** End every wait on the device, stop the thread, let the transfers that are under way end (1 s at most; no further
 * command is taken), free. A rank to which some remain can no longer be reached in this context: its peer fails with
 * -ECANCELED. The team and the windows' memory must still be there. NULL is allowed. */
PRS_API void prs_proxy_close(struct prs_proxy *proxy);

enum prs_window_flags {
    PRS_WINDOW_SIGNALS = 1, /* strict memory (PRS_MEM_STRICT): signals may be put here */
};

/** The same window at another rank. */
struct prs_window_remote {
    uint64_t base;        /* there */
    uint64_t mapped;      /* where it is mapped here; 0: only the NIC reaches it. The same for all windows of a rank */
    struct prs_keys keys; /* of the region there */
};

struct prs_window_options {
    void *base;
    uint64_t bytes;                          /* the same on every rank */
    const struct prs_region *region;         /* must outlive the proxy */
    const struct prs_window_remote *remotes; /* [size of the team]; copied */
    uint32_t flags;                          /* enum prs_window_flags */
};

enum { PRS_PROXY_WINDOWS = 64 };

/** Collective by contract: the same windows in the same order on every rank, before or after prs_proxy_start(). The
 * lowest free index is taken. Return it (>= 0) or -errno: -EINVAL also for a window that is mapped of a rank whose
 * others are not, or the other way round, since signals would not stay behind puts then. */
PRS_API int prs_proxy_window(struct prs_proxy *proxy, const struct prs_window_options *options);
/** Wait until what commands that are done have sent has taken effect at its peers, signals that their processes raise
 * (policy `counted`, rails without atomics) among it; one call at a time. prs_quiet() does not: a receiver could give
 * up the memory of a signal that nobody awaited before its own proxy raises it. So, before memory goes: settle, then
 * meet the other ranks, then drop and release. Return 0, -ETIMEDOUT or the sticky error. */
PRS_API int prs_proxy_settle(struct prs_proxy *proxy, uint32_t timeout_ms);
/** Collective by contract, one call at a time. A command that names the window and still waits, of a kernel that gave
 * up, ends in the sticky error and touches nothing; the window's index may come again. Return 0, -EINVAL or -ETIMEDOUT
 * (the proxy's thread did not run for 5 s: the window goes when it does, and its region must stay until then; the next
 * call, for this window or another, waits for it first). */
PRS_API int prs_proxy_window_drop(struct prs_proxy *proxy, uint32_t index);
/** *out is what kernels (or threads) need, valid until close, also for windows that come later; the thread runs. */
PRS_API int prs_proxy_start(struct prs_proxy *proxy, struct prs_device *out);

/** One round of the loop, for a stepped proxy. Return how much was done (0: idle) or the sticky error. */
PRS_API int prs_proxy_step(struct prs_proxy *proxy);

/** 0 or the sticky error, also of the device. From any thread. */
PRS_API int prs_proxy_check(struct prs_proxy *proxy);
/** Its text, "" while sound; valid until close. */
PRS_API const char *prs_proxy_error(struct prs_proxy *proxy);

struct prs_proxy_stats {
    uint64_t commands, puts, signals;
    uint64_t fences;   /* waits for everything: of a proxy whose team's policy is drain */
    uint64_t stall_ns; /* time in them */
    uint64_t batches;  /* rounds that took commands */
};
/** Exact when the proxy is idle. */
PRS_API void prs_proxy_stats(const struct prs_proxy *proxy, struct prs_proxy_stats *out);

#ifdef __cplusplus
}
#endif
#endif

/* SPDX-License-Identifier: Apache-2.0 */
/**
 * Symmetric memory: the same two windows on every rank of a team, one for data and one for signal words. They are
 * registered on the rails and mapped by the other ranks of the node. The memory is device memory (CUDA, virtual memory
 * management) or, without a GPU, host memory; ranks pass both to each other as file descriptors over UNIX sockets.
 *
 * The heap owns the memory until prs_heap_close(). One thread at a time may use a heap. Its fabric must outlive it. */
#ifndef PERSEUS_HEAP_H
#define PERSEUS_HEAP_H

#include <perseus/bootstrap.h>
#include <perseus/proxy.h>

#ifdef __cplusplus
extern "C" {
#endif

struct prs_heap;

enum prs_heap_part { PRS_HEAP_DATA = 0, PRS_HEAP_SIGNALS = 1, PRS_HEAP_PARTS = 2 };

/** Options of prs_heap_open(). */
struct prs_heap_options {
    struct prs_fabric *fabric;
    const struct prs_rail_set *rails;
    uint64_t data_bytes;   /* the same on every rank; rounded up to pages or the device's granularity */
    uint64_t signal_bytes; /* likewise */
    bool cuda;             /* memory of the current CUDA context's device */
    bool map_local;        /* map the memory of ranks on this node: puts to them need no NIC */
    uint64_t node; /* ranks with equal numbers share a node; 0: PERSEUS_NODE, else the machine's boot id and network */
    uint32_t timeout_ms;                   /* 0: the fabric's */
    uint64_t reserved[PRS_RESERVED_WORDS]; /* 0 */
};

/** Collective. The memory is zeroed. Return 0 or -errno; when one rank fails, all do, and the text names it. */
PRS_API int prs_heap_open(const struct prs_bootstrap *bootstrap, const struct prs_heap_options *options,
                          struct prs_heap **out);
/** Call it after every proxy and peer that uses the heap is closed. NULL is allowed. */
PRS_API void prs_heap_close(struct prs_heap *heap);

/** Address of a part on this rank. */
PRS_API void *prs_heap_base(const struct prs_heap *heap, enum prs_heap_part part);
/** Bytes of a part, after rounding. */
PRS_API uint64_t prs_heap_bytes(const struct prs_heap *heap, enum prs_heap_part part);
/** Where the part lies on each rank: an array [world], in order of rank, valid until the heap is closed. */
PRS_API const struct prs_window_remote *prs_heap_remotes(const struct prs_heap *heap, enum prs_heap_part part);

/**
 * Allocate bytes of a part, until the heap is closed: single allocations cannot be freed. When all ranks make the
 * same calls in the same order, the offset is the same on every rank. Return 0, -EINVAL
 * (align is not a power of two) or -ENOMEM (the text says how much is left). */
PRS_API int prs_heap_alloc(struct prs_heap *heap, enum prs_heap_part part, uint64_t bytes, uint64_t align,
                           uint64_t *offset);

/** Make the heap's parts windows 0 (PRS_HEAP_DATA) and 1 (PRS_HEAP_SIGNALS) of a proxy that has no windows yet. Return
 * 0 or -errno, as prs_proxy_window(). */
PRS_API int prs_heap_windows(const struct prs_heap *heap, struct prs_proxy *proxy);

#ifdef __cplusplus
}
#endif
#endif

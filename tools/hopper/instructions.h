/* SPDX-License-Identifier: Apache-2.0 */
/* The emulated instructions, which the headers in include/ call: always in the running CUDA thread, on its own stack.
 * Shared-memory addresses have 32 bits, as in PTX: bits 0-23 are the offset in the window of a CTA; bits 24-31 are 0
 * for the thread's own CTA, or 1 + its rank for any CTA of the cluster. */
#ifndef TOOLS_HOPPER_INSTRUCTIONS_H
#define TOOLS_HOPPER_INSTRUCTIONS_H

#include <cuda.h>
#include <stdint.h>
#include <time.h>
#include <vector_types.h>

namespace hopper
{

/* threadIdx, blockIdx, blockDim, gridDim and the cluster of the running thread. */
struct coordinates {
    uint3 thread, block;
    dim3 block_dim, grid_dim;
    uint32_t cluster_rank, cluster_size;
};
extern struct coordinates *here;

/* ---- scheduler.cpp ---- */
/* Lets other threads run. Most of the calls below do so too. */
void thread_yield(void);
void thread_sleep(uint32_t ns);
/* Grows with every step of the emulator; runs with the same seed agree on it. */
int64_t thread_clock(void);
/* The time that the scheduler's OS thread has run. The second replaces clock_gettime() on any thread. */
uint64_t thread_timer_ns(void);
int thread_gettime(int clock, struct timespec *now);
[[noreturn]] void thread_trap(void);

/* ---- device_memory.cpp ---- */
void *shared_dynamic(void);
uint32_t shared_address(const void *p);
uint32_t shared_map(uint32_t address, uint32_t cta);
/* Ordinary loads and stores, checked. Copies and tensor cores may read what was stored only after
 * shared_fence_async() by the thread that stored it. */
const void *shared_load(uint32_t address, uint32_t bytes);
void shared_store(uint32_t address, const void *from, uint32_t bytes);
void shared_fence_async(void);
void global_fence_async(void);

/* ---- place.cpp ---- */
/* Says which line of a kernel calls the next ordering instruction. In the environment,
 * HOPPER_WITHOUT=folder/file.cuh:LINE removes the order that this line makes, the same with =gpu or =cta narrows its
 * scope, and HOPPER_PLACES=FILE appends all lines that are reached to a file. */
void place_is(const char *file, int line, const char *instruction);

/* ---- atomic.cpp ---- */
/* As in PTX: the scope and the kind of an operation's order. The host may call these functions too, with the scope of
 * the whole system. */
enum scope : uint8_t { SCOPE_CTA, SCOPE_CLUSTER, SCOPE_GPU, SCOPE_SYS, SCOPES };
enum order : uint8_t { ORDER_RELAXED = 0, ORDER_ACQUIRE = 1, ORDER_RELEASE = 2, ORDER_ACQ_REL = 3 };
/* The word has 4 or 8 bytes. */
uint64_t atomic_load(const void *p, uint32_t bytes, enum order order, enum scope scope);
void atomic_store(void *p, uint32_t bytes, uint64_t value, enum order order, enum scope scope);
/* Stores next if the word is *old; otherwise sets *old to the word. */
bool atomic_swap(void *p, uint32_t bytes, uint64_t *old, uint64_t next, enum order order, enum scope scope);
uint64_t atomic_add(void *p, uint32_t bytes, uint64_t value, enum order order, enum scope scope);
/* fence.acq_rel */
void atomic_fence(enum scope scope);

/* ---- warp.cpp ---- */
/* Waits for all lanes of the mask; values[lane], unless NULL, gets the value of that lane. All lanes must pass the same
 * name. */
void warp_meet(const char *name, uint32_t mask, uint64_t mine, uint64_t *values);
void warp_store_matrix(uint32_t address, const uint32_t *registers, int count, bool transposed);
void warp_load_matrix(uint32_t address, uint32_t *registers, int count, bool transposed);
void warpgroup_registers(uint32_t count, bool more);
/* threads 0: all threads of the CTA that have not left. */
void block_barrier(uint32_t id, uint32_t threads, bool wait);
/* A barrier of the whole CTA; returns for how many threads the predicate is true. */
uint32_t block_count(bool predicate);
void cluster_barrier_arrive(void);
void cluster_barrier_wait(void);

/* ---- mbarrier.cpp ---- */
void mbarrier_start(uint32_t address, uint32_t arrivals);
void mbarrier_end(uint32_t address);
void mbarrier_start_fence(void);
/* Expects `bytes` more and arrives `arrivals` times, in one step: a release with this scope. */
void mbarrier_signal(uint32_t address, uint32_t arrivals, uint32_t bytes, enum scope scope);
bool mbarrier_done(uint32_t address, uint32_t parity);
void mbarrier_block(uint32_t address, uint32_t parity);

/* ---- bulk_copy.cpp ---- */
enum reduction { REDUCE_NONE, REDUCE_ADD_F32, REDUCE_ADD_BF16, REDUCE_ADD_U32 };

void bulk_load_bytes(uint32_t dst, const void *src, uint32_t bytes, uint32_t bar, uint16_t ctas);
void bulk_store_bytes(void *dst, uint32_t src, uint32_t bytes, enum reduction how);
void bulk_copy_shared(uint32_t dst, uint32_t src, uint32_t bytes, uint32_t bar);
/* ctas: a bit for each CTA of a multicast; 0: the CTA that dst names. at[dims]: coordinates, innermost first. */
void tile_load(uint32_t dst, const CUtensorMap *map, uint32_t bar, const int32_t *at, int dims, uint16_t ctas);
void tile_store(const CUtensorMap *map, uint32_t src, const int32_t *at, int dims, enum reduction how);
void tile_prefetch(const CUtensorMap *map);
void group_commit(void);
void group_wait(uint32_t left, bool read_only);

/* ---- wgmma.cpp ---- */
enum wgmma_type { WGMMA_BF16, WGMMA_F16, WGMMA_E4M3 };

/* d[64 x n] (+)= A[64 x K] B[K x n]; K is 32 bytes of a row; d is this thread's n / 2 accumulators. a_registers: this
 * thread's four registers of A. NULL: A is in shared memory, where a_descriptor says. Both operands of e4m3 are K-major
 * and in shared memory. */
struct wgmma_call {
    uint32_t n;
    uint64_t a_descriptor, b_descriptor;
    const uint32_t *a_registers;
    bool add, trans_a, trans_b;
    enum wgmma_type type; /* type of A and B */
};
void wgmma_issue(float *d, const struct wgmma_call *call);
void wgmma_fence_registers(void);
void wgmma_commit_group(void);
void wgmma_wait_group(uint32_t left);

} // namespace hopper

#endif

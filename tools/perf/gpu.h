/* SPDX-License-Identifier: Apache-2.0 */
/* The GPU's side of perseus-perf --gpu: a library of its own, opened at run time, so that the tool needs no CUDA. */
#ifndef TOOLS_PERF_GPU_H
#define TOOLS_PERF_GPU_H

#include <perseus/device.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Host memory by which the kernel and the CPU wait for each other. Each word has one writer. */
struct gpu_meeting {
    uint64_t sent;    /* written by the kernel: iterations that are complete */
    uint64_t checked; /* by the CPU: iterations that every receiver has checked */
    uint64_t wrong;   /* by a kernel that checks: words that were wrong */
    uint64_t pad[5];
};

/* One cell of the table, as kernels see it. */
struct gpu_plan {
    struct prs_device device;
    uint64_t half;  /* offset: sources lie below it, arrivals from it on */
    uint64_t slots; /* transfers beyond share slots */
    uint64_t bytes;
    uint64_t group; /* 0: coupled; else puts per group; at least `concurrency`: one group a destination */
    uint64_t poison;
    uint32_t concurrency, peers;
    uint32_t iterations; /* of each kind: odd iterations put only, even ones put with signals */
};

struct gpu_library {
    int host; /* for tests without CUDA: memory is the host's, and threads stand for the blocks */
    /* Use the GPU of this rank. Return 0, or 1 with the reason on stderr; the other functions that return int do the
     * same. */
    int (*open)(uint32_t rank);
    /* Whether each rank has its own GPU: then a kernel that waits does not delay another rank's. */
    int (*alone)(uint32_t ranks);
    struct gpu_meeting *(*meeting)(void); /* zeroed; valid until the process ends */
    /* Start the sender's persistent kernel; us[] (2 * iterations) is filled when finish() returns. */
    int (*send)(const struct gpu_plan *plan);
    int (*finish)(double *us, uint32_t count);
    /* Check what a rank received in an iteration, and poison it; with_signals: wait for the signal of each transfer
     * first. It has finished on return. */
    int (*check)(const struct gpu_plan *plan, uint32_t rank, uint64_t iteration, int with_signals, uint64_t *wrong);
    /* Before receiving: poison the arrivals, zero the signals. */
    int (*clear)(const struct gpu_plan *plan);
    /* Threads push `puts` puts of plan->bytes to rank 1 as fast as the ring takes them. */
    int (*rate)(const struct gpu_plan *plan, uint64_t puts, uint32_t blocks, double *us);
    /* One put of plan->bytes at a time to rank 1, until it is complete; the nanoseconds of each go to ns[]. */
    int (*round_trip)(const struct gpu_plan *plan, uint32_t count, double *ns);
};

/* The library's only symbol. */
typedef const struct gpu_library *gpu_library_fn(void);

#ifdef __cplusplus
}
#endif
#endif

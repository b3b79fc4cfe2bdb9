/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/perf/gpu.h"

#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>

#include <perseus/device.cuh>

#include "tools/perf/gpu_blocks.h"

enum { THREADS = 128 };

static struct gpu_shared *shared;
static double *times; /* device */
static uint32_t times_room;
static struct gpu_meeting *met;
static cudaStream_t stream;

static int fail(const char *what, cudaError_t error)
{
    if (error == cudaSuccess)
        return 0;
    fprintf(stderr, "perseus-perf --gpu: %s: %s\n", what, cudaGetErrorString(error));
    return 1;
}

/* ---- the sender ---- */

static __global__ void send_kernel(struct gpu_plan plan, struct gpu_shared *state, struct gpu_meeting *meeting,
                                   double *us)
{
    struct gpu_block block = {&plan, state, meeting, us, blockIdx.x, 0};
    int r = 0;

    if (block.transfer == 0 && threadIdx.x == 0)
        gpu_begin_groups(&block);
    for (uint64_t iteration = 1; iteration <= 2 * plan.iterations; iteration++) {
        if (block.transfer < plan.slots)
            gpu_fill(&plan, block.transfer, iteration, threadIdx.x, blockDim.x);
        __syncthreads();
        if (threadIdx.x == 0)
            r = gpu_iterate(&block, iteration);
        if (__syncthreads_or(r != 0))
            return;
    }
}

static int gpu_send(const struct gpu_plan *plan)
{
    if (2 * plan->iterations > times_room) {
        cudaFree(times);
        times_room = 2 * plan->iterations;
        if (fail("cudaMalloc", cudaMalloc(&times, times_room * sizeof(double))))
            return 1;
    }
    met->sent = met->checked = 0;
    if (fail("cudaMemset", cudaMemsetAsync(shared, 0, sizeof(*shared), stream)))
        return 1;
    /* At most 128 small blocks: all are resident together on any GPU that runs this code. */
    send_kernel<<<plan->concurrency, THREADS, 0, stream>>>(*plan, shared, met, times);
    return fail("starting the sender", cudaGetLastError());
}

static int gpu_finish(double *us, uint32_t count)
{
    if (fail("the sender's kernel", cudaStreamSynchronize(stream)))
        return 1;
    return fail("cudaMemcpy", cudaMemcpyAsync(us, times, count * sizeof(double), cudaMemcpyDeviceToHost, stream)) ||
           fail("cudaMemcpy", cudaStreamSynchronize(stream));
}

/* ---- a receiver ---- */

static __global__ void check_kernel(struct gpu_plan plan, uint32_t rank, uint64_t iteration, int with_signals,
                                    unsigned long long *wrong)
{
    uint32_t transfer = rank - 1 + blockIdx.x * plan.peers;
    unsigned long long found = 0;

    if (transfer >= plan.concurrency)
        return;
    if (threadIdx.x == 0 && with_signals)
        found += gpu_await(&plan, transfer, iteration) != 0;
    __syncthreads();
    found += gpu_wrong(&plan, transfer, iteration, threadIdx.x, blockDim.x);
    if (found)
        atomicAdd(wrong, found);
}

static __global__ void poison_kernel(struct gpu_plan plan, int signals)
{
    gpu_poison(&plan, blockIdx.x, threadIdx.x, blockDim.x);
    if (signals && threadIdx.x == 0)
        for (uint32_t t = blockIdx.x; t < plan.concurrency; t += gridDim.x)
            *gpu_signal(&plan, t) = 0;
}

static uint32_t arrival_slots(const struct gpu_plan *plan)
{
    return plan->slots < plan->concurrency ? (uint32_t)plan->slots : plan->concurrency;
}

static int gpu_check(const struct gpu_plan *plan, uint32_t rank, uint64_t iteration, int with_signals, uint64_t *wrong)
{
    met->wrong = 0;
    check_kernel<<<(plan->concurrency + plan->peers - 1) / plan->peers, THREADS, 0, stream>>>(
        *plan, rank, iteration, with_signals, (unsigned long long *)&met->wrong);
    poison_kernel<<<arrival_slots(plan), THREADS, 0, stream>>>(*plan, 0);
    if (fail("checking", cudaStreamSynchronize(stream)))
        return 1;
    *wrong += met->wrong;
    return 0;
}

static int gpu_clear(const struct gpu_plan *plan)
{
    poison_kernel<<<arrival_slots(plan), THREADS, 0, stream>>>(*plan, 1);
    return fail("clearing", cudaStreamSynchronize(stream));
}

/* ---- the ring by itself ---- */

static __global__ void rate_kernel(struct gpu_plan plan, uint64_t puts)
{
    struct prs_device_put put = {0, plan.half, plan.bytes, 1, 0, 0, 1};
    uint64_t ticket = 0;
    int r = 0;

    if (threadIdx.x != 0)
        return;
    for (uint64_t i = blockIdx.x; i < puts && r == 0; i += gridDim.x)
        r = prs_put(&plan.device, &put, &ticket);
    if (!r)
        prs_flush(&plan.device, ticket);
}

static int gpu_rate(const struct gpu_plan *plan, uint64_t puts, uint32_t blocks, double *us)
{
    cudaEvent_t from, to;
    float ms = 0;

    if (fail("events", cudaEventCreate(&from)) || fail("events", cudaEventCreate(&to)))
        return 1;
    cudaEventRecord(from, stream);
    rate_kernel<<<blocks, 32, 0, stream>>>(*plan, puts);
    cudaEventRecord(to, stream);
    if (fail("the rate kernel", cudaStreamSynchronize(stream)) || fail("time", cudaEventElapsedTime(&ms, from, to)))
        return 1;
    *us = ms * 1e3;
    cudaEventDestroy(from);
    cudaEventDestroy(to);
    return 0;
}

static __global__ void round_trip_kernel(struct gpu_plan plan, uint32_t count, double *ns, double ns_per_clock)
{
    struct prs_device_put put = {0, plan.half, plan.bytes, 1, 0, 0, 1};
    int r = 0;

    for (uint32_t i = 0; i < count && r == 0; i++) {
        uint64_t ticket = 0;
        long long start = clock64();

        r = prs_put(&plan.device, &put, &ticket);
        while (r == 0 && prs_load_acquire_sys(&plan.device.control->done) < ticket)
            r = prs_load_relaxed(&plan.device.control->abort) != 0 ? -1 : 0;
        ns[i] = (double)(clock64() - start) * ns_per_clock;
    }
}

static int gpu_round_trip(const struct gpu_plan *plan, uint32_t count, double *ns)
{
    int device = 0, khz = 0;
    double *out;

    if (fail("cudaGetDevice", cudaGetDevice(&device)) ||
        fail("clock rate", cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, device)) ||
        fail("cudaMalloc", cudaMalloc(&out, count * sizeof(double))))
        return 1;
    /* Converted at the highest clock, since a busy GPU of this kind runs at that clock. */
    round_trip_kernel<<<1, 1, 0, stream>>>(*plan, count, out, 1e6 / khz);
    if (fail("the round-trip kernel", cudaStreamSynchronize(stream)))
        return 1;
    return fail("cudaMemcpy", cudaMemcpyAsync(ns, out, count * sizeof(double), cudaMemcpyDeviceToHost, stream)) ||
           fail("cudaMemcpy", cudaStreamSynchronize(stream)) || fail("cudaFree", cudaFree(out));
}

/* ---- the library ---- */

static int gpu_open(uint32_t rank)
{
    int count = 0;

    if (fail("cudaGetDeviceCount", cudaGetDeviceCount(&count)))
        return 1;
    return fail("cudaSetDevice", cudaSetDevice((int)rank % count)) ||
           fail("stream", cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)) ||
           fail("cudaMalloc", cudaMalloc(&shared, sizeof(*shared))) ||
           fail("host memory", cudaHostAlloc(&met, sizeof(*met), cudaHostAllocMapped | cudaHostAllocPortable)) ||
           (memset(met, 0, sizeof(*met)), 0);
}

static int gpu_alone(uint32_t ranks)
{
    int count = 0;

    return cudaGetDeviceCount(&count) == cudaSuccess && ranks <= (uint32_t)count;
}

static struct gpu_meeting *gpu_meeting_of(void)
{
    return met;
}

extern "C" __attribute__((visibility("default"))) const struct gpu_library *perf_gpu_library(void)
{
    static const struct gpu_library library = {0,          gpu_open,  gpu_alone, gpu_meeting_of, gpu_send,
                                               gpu_finish, gpu_check, gpu_clear, gpu_rate,       gpu_round_trip};

    return &library;
}

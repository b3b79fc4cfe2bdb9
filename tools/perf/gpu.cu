/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/perf/gpu.h"

#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>

#include <perseus/device.cuh>

enum { THREADS = 128, GROUPS_MAX = 128, STRIDE_LARGE = 64, STRIDE_FROM = 16384 };

/* What the blocks of the sender's kernel share, in device memory. */
struct shared_state {
    uint64_t barrier; /* arrivals over all barriers */
    uint64_t start_ns;
    struct prs_group groups[GROUPS_MAX];
    struct prs_device_signal deposits[GROUPS_MAX]; /* one a transfer */
};

static struct shared_state *state;
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

/* ------------------------------------------------------------------------------------------------------------------
 * data that tells what it is: the same marks as bench.c */

static __device__ uint64_t mark(uint64_t iteration, uint64_t slot, uint64_t word)
{
    uint64_t x = iteration * 0x9e3779b97f4a7c15u ^ slot << 40 ^ word;

    return x ^ x >> 31;
}

static __device__ uint64_t stride_of(uint64_t bytes)
{
    return bytes <= STRIDE_FROM ? 1 : STRIDE_LARGE;
}

static __device__ uint64_t *data_at(const struct gpu_plan *plan, uint64_t offset)
{
    return (uint64_t *)(prs_device_map(&plan->device, 0, plan->device.rank) + offset);
}

static __device__ uint64_t *signal_at(const struct gpu_plan *plan, uint64_t index)
{
    return (uint64_t *)prs_device_map(&plan->device, 1, plan->device.rank) + index;
}

static __device__ void fill_slot(const struct gpu_plan *plan, uint64_t slot, uint64_t iteration)
{
    uint64_t *words = data_at(plan, slot * plan->bytes), count = plan->bytes / 8;

    for (uint64_t i = threadIdx.x * stride_of(plan->bytes); i < count; i += blockDim.x * stride_of(plan->bytes))
        words[i] = mark(iteration, slot, i);
    if (threadIdx.x == 0)
        words[count - 1] = mark(iteration, slot, count - 1);
}

/* ------------------------------------------------------------------------------------------------------------------
 * the sender */

/* All blocks of the grid (they are resident together); thread 0 of each. Ends early when the device fails. */
static __device__ int meet(const struct gpu_plan *plan, struct shared_state *s, uint64_t *passed)
{
    struct prs_wait wait = {0, 0};
    uint64_t want = ++*passed * gridDim.x, have;
    int r = 0;

    prs_add_acq_rel_gpu(&s->barrier, 1);
    while (r == 0 && (have = prs_load_acquire_gpu(&s->barrier)) < want)
        r = prs_wait_more(&plan->device, &wait, PRS_WAIT_GROUP, 0xffff, want, have);
    return r;
}

static __device__ uint32_t group_index(const struct gpu_plan *plan, uint32_t transfer)
{
    return transfer % plan->peers + plan->peers * (uint32_t)(transfer / plan->peers / plan->group);
}

static __device__ void begin_groups(const struct gpu_plan *plan, struct shared_state *s)
{
    uint32_t sizes[GROUPS_MAX], next = 0;

    for (uint32_t g = 0; g < GROUPS_MAX; g++)
        sizes[g] = 0;
    for (uint32_t t = 0; t < plan->concurrency; t++)
        sizes[group_index(plan, t)]++;
    for (uint32_t g = 0; g < GROUPS_MAX; g++) {
        prs_group_begin(&s->groups[g], g + 1, sizes[g] ? sizes[g] : 1, &s->deposits[next]);
        next += sizes[g];
    }
}

static __device__ int start_transfer(const struct gpu_plan *plan, struct shared_state *s, uint32_t t,
                                     uint64_t iteration, bool with_signals)
{
    uint64_t at = t % plan->slots * plan->bytes;
    struct prs_device_put put = {at, plan->half + at, plan->bytes, 1 + t % plan->peers, 0, 0, 1 + t};
    struct prs_device_signal signal = {t * 8ull, iteration, 1 + t % plan->peers, 1, 1 + t, 0, 0};
    int r;

    if (plan->group == 0)
        return with_signals ? prs_put_signal(&plan->device, &put, &signal, NULL) : prs_put(&plan->device, &put, NULL);
    put.group = group_index(plan, t) + 1;
    r = prs_put(&plan->device, &put, NULL);
    if (r == 0 && with_signals)
        r = prs_group_arrive(&plan->device, &s->groups[put.group - 1], &signal);
    return r < 0 ? r : 0;
}

/* Block 0: everything is complete; tell the CPU and wait until the receivers have looked. */
static __device__ int end_iteration(const struct gpu_plan *plan, struct gpu_meeting *met, struct shared_state *s,
                                    uint64_t iteration, double *us)
{
    int r = prs_quiet(&plan->device);

    us[iteration - 1] = (double)(prs_now_ns() - s->start_ns) / 1e3;
    if (r == 0) {
        prs_store_release_sys(&met->sent, iteration);
        r = prs_wait_signal(&plan->device, &met->checked, PRS_COMPARE_GE, iteration);
    }
    return r;
}

static __global__ void send_kernel(struct gpu_plan plan, struct shared_state *s, struct gpu_meeting *met, double *us)
{
    uint32_t transfer = blockIdx.x;
    uint64_t passed = 0;
    int r = 0;

    if (transfer == 0 && threadIdx.x == 0 && plan.group)
        begin_groups(&plan, s);
    for (uint64_t iteration = 1; iteration <= 2 * plan.iterations; iteration++) {
        if (transfer < plan.slots)
            fill_slot(&plan, transfer, iteration);
        __syncthreads();
        if (threadIdx.x == 0) {
            r = meet(&plan, s, &passed);
            if (r == 0 && transfer == 0)
                s->start_ns = prs_now_ns();
            r = r ? r : meet(&plan, s, &passed);
            r = r ? r : start_transfer(&plan, s, transfer, iteration, iteration % 2 == 0);
            r = r ? r : meet(&plan, s, &passed);
            if (r == 0 && transfer == 0)
                r = end_iteration(&plan, met, s, iteration, us);
            r = r ? r : meet(&plan, s, &passed); /* nobody fills before the receivers have looked */
        }
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
    if (fail("cudaMemset", cudaMemsetAsync(state, 0, sizeof(*state), stream)))
        return 1;
    /* At most 128 small blocks: all are resident together on any GPU that runs this code. */
    send_kernel<<<plan->concurrency, THREADS, 0, stream>>>(*plan, state, met, times);
    return fail("starting the sender", cudaGetLastError());
}

static int gpu_finish(double *us, uint32_t count)
{
    if (fail("the sender's kernel", cudaStreamSynchronize(stream)))
        return 1;
    return fail("cudaMemcpy", cudaMemcpyAsync(us, times, count * sizeof(double), cudaMemcpyDeviceToHost, stream)) ||
           fail("cudaMemcpy", cudaStreamSynchronize(stream));
}

/* ------------------------------------------------------------------------------------------------------------------
 * a receiver */

static __global__ void check_kernel(struct gpu_plan plan, uint32_t rank, uint64_t iteration, int with_signals,
                                    unsigned long long *wrong)
{
    uint32_t transfer = rank - 1 + blockIdx.x * plan.peers;
    uint64_t slot = transfer % plan.slots, count = plan.bytes / 8, stride = stride_of(plan.bytes);
    const uint64_t *words = data_at(&plan, plan.half + slot * plan.bytes);
    unsigned long long found = 0;

    if (transfer >= plan.concurrency)
        return;
    for (uint64_t i = threadIdx.x * stride; i < count; i += blockDim.x * stride)
        found += words[i] != mark(iteration, slot, i);
    if (threadIdx.x == 0) {
        found += words[count - 1] != mark(iteration, slot, count - 1);
        found += with_signals && prs_load_acquire_sys(signal_at(&plan, transfer)) != iteration;
    }
    if (found)
        atomicAdd(wrong, found);
}

static __global__ void poison_kernel(struct gpu_plan plan, int signals)
{
    uint64_t count = plan.bytes / 8, stride = stride_of(plan.bytes);
    uint64_t *words = data_at(&plan, plan.half + blockIdx.x * plan.bytes);

    for (uint64_t i = threadIdx.x * stride; i < count; i += blockDim.x * stride)
        words[i] = plan.poison;
    if (threadIdx.x == 0)
        words[count - 1] = plan.poison;
    if (signals && threadIdx.x == 0)
        for (uint32_t t = blockIdx.x; t < plan.concurrency; t += gridDim.x)
            *signal_at(&plan, t) = 0;
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

/* ------------------------------------------------------------------------------------------------------------------
 * the ring by itself */

static __global__ void rate_kernel(struct gpu_plan plan, uint64_t puts)
{
    struct prs_device_put put = {0, plan.half, plan.bytes, 1, 0, 0, 1};
    uint64_t ticket = 0;
    int r = 0;

    if (threadIdx.x != 0)
        return;
    for (uint64_t i = blockIdx.x; i < puts && r == 0; i += gridDim.x)
        r = prs_put(&plan.device, &put, &ticket);
    if (r == 0)
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
    /* At the highest clock, which is where a busy GPU of this kind runs. */
    round_trip_kernel<<<1, 1, 0, stream>>>(*plan, count, out, 1e6 / khz);
    if (fail("the round-trip kernel", cudaStreamSynchronize(stream)))
        return 1;
    return fail("cudaMemcpy", cudaMemcpyAsync(ns, out, count * sizeof(double), cudaMemcpyDeviceToHost, stream)) ||
           fail("cudaMemcpy", cudaStreamSynchronize(stream)) || fail("cudaFree", cudaFree(out));
}

/* ------------------------------------------------------------------------------------------------------------------ */

static int gpu_open(uint32_t rank)
{
    int count = 0;

    if (fail("cudaGetDeviceCount", cudaGetDeviceCount(&count)))
        return 1;
    return fail("cudaSetDevice", cudaSetDevice((int)rank % count)) ||
           fail("stream", cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)) ||
           fail("cudaMalloc", cudaMalloc(&state, sizeof(*state))) ||
           fail("host memory", cudaHostAlloc(&met, sizeof(*met), cudaHostAllocMapped | cudaHostAllocPortable)) ||
           (memset(met, 0, sizeof(*met)), 0);
}

static struct gpu_meeting *gpu_meeting_of(void)
{
    return met;
}

extern "C" __attribute__((visibility("default"))) const struct gpu_library *perf_gpu_library(void)
{
    static const struct gpu_library library = {gpu_open,  gpu_meeting_of, gpu_send, gpu_finish,
                                               gpu_check, gpu_clear,      gpu_rate, gpu_round_trip};

    return &library;
}

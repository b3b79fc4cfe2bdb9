/* SPDX-License-Identifier: Apache-2.0 */
/* The warp-wide and block-wide calls of perseus/device.cuh, to a mapped peer, for which no proxy is needed. */
#include <criterion/criterion.h>
#include <cuda_runtime.h>

#include "fused/core/launch.cuh"
#include "tools/hopper/hopper.h"
#include <perseus/device.cuh>

enum { THREADS = 64, BYTES = 1000, CALLS = 6, BLOCK_CALLS = 4, SENDERS = 2, PART = 480 };

/* One allocation with everything that the kernel reads and writes. */
struct memory {
    struct prs_ring_local local;
    struct prs_ring_control control;
    uint64_t map[2]; /* one window of two ranks */
    uint64_t bytes[1];
    uint8_t data[2][1024]; /* its last words are for signals */
    struct prs_arrival_counter counter;
    struct prs_device_signal signals[SENDERS];
    int result[CALLS][THREADS]; /* of the calls by blocks, then of those by warps */
    int wrong[THREADS];         /* bytes */
};

struct args {
    struct prs_device device;
    struct memory *memory;
};

/* The signal word that sender number i signals. */
static __device__ const uint64_t *word_of(const struct args &a, int i)
{
    return (const uint64_t *)&a.memory->data[1][1016 - 8 * i];
}

static __global__ void put_by_teams(const struct args a)
{
    struct prs_device_put put = {0, 0, BYTES, 1, 0, 0, 1};
    struct prs_device_signal signal = {1016, 7, 1, 0, 1, 0, 0};

    a.memory->result[0][threadIdx.x] = prs_put_block(&a.device, &put);
    a.memory->result[1][threadIdx.x] = prs_put_signal_block(&a.device, &put, &signal);
    a.memory->result[2][threadIdx.x] = prs_wait_signal_block(&a.device, word_of(a, 0), PRS_COMPARE_EQ, 7);
    if (threadIdx.x == 0)
        prs_arrival_counter_init(&a.memory->counter, 1, 1, a.memory->signals);
    a.memory->result[3][threadIdx.x] = prs_arrival_counter_arrive_block(&a.device, &a.memory->counter, &signal);
    if (threadIdx.x < 32) {
        a.memory->result[4][threadIdx.x] = prs_put_warp(&a.device, &put);
        a.memory->result[5][threadIdx.x] = prs_put_signal_warp(&a.device, &put, &signal);
    }
}

/* Two blocks put and arrive; the signals of both release the third block. */
static __global__ void arrive_and_wait(const struct args a)
{
    struct prs_device_put put = {blockIdx.x * PART, blockIdx.x * PART, PART, 1, 0, 0, 1};
    struct prs_device_signal signal = {1016 - 8 * blockIdx.x, 7, 1, 0, 1, 0, 0};

    if (blockIdx.x < SENDERS) {
        a.memory->result[blockIdx.x][threadIdx.x] = prs_put_block(&a.device, &put);
        if (!a.memory->result[blockIdx.x][threadIdx.x])
            a.memory->result[blockIdx.x][threadIdx.x] =
                prs_arrival_counter_arrive_block(&a.device, &a.memory->counter, &signal);
        return;
    }
    for (int i = 0; i < SENDERS; i++)
        a.memory->result[SENDERS + i][threadIdx.x] = prs_wait_signal_block(&a.device, word_of(a, i), PRS_COMPARE_GE, 7);
    for (int i = 0; i < SENDERS * PART; i++)
        a.memory->wrong[threadIdx.x] += a.memory->data[1][i] != (uint8_t)(i * 7 + 1);
}

/* One launch of `blocks` blocks, on a device whose first error was `failed`. */
static struct memory *run(void (*kernel)(const struct args), uint32_t blocks, uint64_t failed)
{
    struct launch_shape shape = {1, THREADS, 1024};
    struct args a = {};
    uint32_t clusters;

    hopper_setup(1, 4, 0);
    cr_assert_eq(cudaMalloc((void **)&a.memory, sizeof(*a.memory)), cudaSuccess);
    cr_assert_eq(cudaMemset(a.memory, 0, sizeof(*a.memory)), cudaSuccess);
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    for (int i = 0; i < 1000; i++)
        a.memory->data[0][i] = (uint8_t)(i * 7 + 1);
    for (int rank = 0; rank < 2; rank++)
        a.memory->map[rank] = (uint64_t)(uintptr_t)a.memory->data[rank];
    a.memory->bytes[0] = sizeof(a.memory->data[0]);
    a.memory->local.failed = failed;
    a.device.control = &a.memory->control;
    a.device.local = &a.memory->local;
    a.device.map = a.memory->map;
    a.device.bytes = a.memory->bytes;
    a.device.world = 2;
    a.device.windows = 1;
    a.device.timeout_ns = 60ull * 1000000000;
    prs_arrival_counter_init(&a.memory->counter, 1, SENDERS, a.memory->signals);
    cr_assert_eq(launch_prepare(kernel, &shape, &clusters), 0);
    cr_assert_eq(launch_kernel(kernel, &shape, blocks, NULL, a), 0);
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    return a.memory;
}

static void assert_all_return(const struct memory *memory, int want)
{
    for (int call = 0; call < CALLS; call++)
        for (int thread = 0; thread < (call < BLOCK_CALLS ? THREADS : 32); thread++)
            cr_assert_eq(memory->result[call][thread], want, "call %d, thread %d: %d, want %d", call, thread,
                         memory->result[call][thread], want);
}

Test(device, a_mapped_peer_is_written_by_all_threads, .timeout = 200)
{
    const struct memory *memory = run(put_by_teams, 1, 0);

    assert_all_return(memory, 0);
    for (int i = 0; i < BYTES; i++)
        cr_assert_eq(memory->data[1][i], memory->data[0][i], "byte %d", i);
    cr_assert_eq(*(const uint64_t *)&memory->data[1][1016], 7);
}

Test(device, the_last_block_to_arrive_sends_the_signals_of_all, .timeout = 200)
{
    const struct memory *memory = run(arrive_and_wait, SENDERS + 1, 0);

    assert_all_return(memory, 0);
    cr_assert_eq(memory->counter.flushed, 1);
    for (int thread = 0; thread < THREADS; thread++)
        cr_assert_eq(memory->wrong[thread], 0, "thread %d read %d wrong bytes", thread, memory->wrong[thread]);
}

/* In an earlier version prs_put_block() returned 0 where every other call fails at once. */
Test(device, after_the_first_error_each_call_returns_it_to_each_thread, .timeout = 200)
{
    assert_all_return(run(put_by_teams, 1, PRS_DEVICE_TIMEOUT), -PRS_DEVICE_TIMEOUT);
}
